"""The command show prints the content of folders."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from bench.kill_train import train_arguments
from textmill.cli import main
from textmill.commands.show import token_texts
from textmill.config import TokenizerConfig
from textmill.tokens.vocabulary.tokenizer import fit


def test_show_a_corpus(tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tiny_texts.parent)
    assert main(["new", "mine", "--text", "texts"]) == 0
    assert main(["prepare", "mine"]) == 0
    account = json.loads((tiny_texts.parent / "mine" / "corpus" / "account.json").read_text())
    for where in ("mine", "mine/corpus"):
        capsys.readouterr()
        assert main(["show", where]) == 0
        out = capsys.readouterr().out
        assert f"mine/corpus: {account['kept']:,} documents" in out
        for name in ("english", "korean", "turkish"):
            assert f"texts/{name}.txt" in out
        assert re.search(r"Hangul +[\d,]+ +\d", out)
        assert re.search(r"Latin +[\d,]+ +\d", out)
        languages = out.split(f"languages of a sample of {account['kept']} documents\n")[1].split("\n\n")[0]
        counted = {name: int(count) for name, count in re.findall(r"^  (\w+) +(\d+) ", languages, re.M)}
        codes = {"english": "en", "korean": "ko", "turkish": "tr"}
        assert counted == {codes[Path(name).stem]: one["kept"] for name, one in account["by_source"].items()}
        lengths = re.findall(r"^  [\d,]+ to [\d,]+ +([\d,]+) ", out, re.M)
        assert sum(int(count.replace(",", "")) for count in lengths) == account["kept"], "every document has a length"
        assert out.count("--- texts/") == 3


def test_show_tokens_and_what_a_step_saw(
    tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny_texts.parent)
    assert main(["new", "mine", "--text", "texts"]) == 0
    quick = [
        "train.steps=3",
        "train.batch=2",
        "train.length=32",
        "train.warmup=0",
        "model.size=nano",
        "train.evaluate_batches=1",
    ]
    for command in ("prepare", "fit-tokenizer", "tokenize"):
        assert main([command, "mine"]) == 0
    assert main(["train", "mine", *quick]) == 0
    counts = json.loads((tiny_texts.parent / "mine" / "tokens" / "manifest.json").read_text())["splits"]
    capsys.readouterr()
    assert main(["show", "mine/tokens"]) == 0
    out = capsys.readouterr().out
    for split, one in counts.items():
        assert re.search(rf"{split} +{one['documents']:,} documents +{one['tokens']:,} tokens", out)
    lengths = re.findall(r"^  [\d,]+ to [\d,]+ +([\d,]+) ", out, re.M)
    assert sum(int(count.replace(",", "")) for count in lengths) == sum(one["documents"] for one in counts.values())
    assert out.count("--- document ") == 3
    assert main(["show", "mine/tokens", "--counts", "counts.json"]) == 0
    assert f"counts.json: {counts['train']['tokens']:,} train tokens" in capsys.readouterr().out
    assert sum(json.loads(Path("counts.json").read_text())["counts"]) == counts["train"]["tokens"]
    assert main(["show", "mine"]) == 0
    assert "records by outcome" in capsys.readouterr().out
    assert main(["show", "mine/run", "--step", "2"]) == 0
    out = capsys.readouterr().out
    assert "step 2: 2 samples of 32 tokens" in out
    assert set(re.findall(r"sample (\d+):", out)) == {"2", "3"}
    assert re.search(r"sample 2: texts/(english|korean|turkish)\.txt, section \d+, [\d,]+ tokens: ", out)
    assert main(["show", "mine/run", "--step", "9999"]) == 0
    assert "step 9,999 has not been trained; the last checkpoint is step 3" in capsys.readouterr().err
    assert main(["show", "mine/run", "--step", "0"]) == main(["show", "mine/run", "--step", "best"]) == 2


def test_the_texts_of_tokens_join_to_the_document() -> None:
    tokenizer = fit(iter([["aaa bbb aaa bbb"]]), TokenizerConfig(vocab=280))
    text = "aaa 한국어 çark 😀 bbb"
    texts = list(token_texts(tokenizer.encode(text), tokenizer))
    assert "".join(texts) == text
    assert "한" in texts


def test_show_without_language_identification(
    tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny_texts.parent)
    assert main(["new", "mine", "--text", "texts"]) == 0
    assert main(["prepare", "mine"]) == 0
    monkeypatch.setattr("textmill.commands.show.find_spec", lambda name: None)
    assert main(["show", "mine"]) == 0
    assert "pip install 'textmill[clean]'" in capsys.readouterr().out


def test_show_a_model_and_a_tokenizer_of_another_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=32, vocab_size=300, bos_token_id=0, eos_token_id=0)
    )
    model.save_pretrained(tmp_path / "model")
    assert main(["show", str(tmp_path / "model")]) == 0
    out = capsys.readouterr().out
    assert f"{model.num_parameters():,} parameters" in out
    parts = {
        name: int(count.replace(",", "")) for name, count in re.findall(r"^  (transformer\S+) +([\d,]+) ", out, re.M)
    }
    assert parts["transformer.wte"] == 300 * 16
    assert parts["transformer.h.*.mlp.c_fc"] == 2 * (16 * 64 + 64), "weights and biases of both blocks"
    assert sum(parts.values()) == model.num_parameters()
    tokenizer = fit(iter([["a few words"] * 3]), TokenizerConfig(vocab=270))
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(tmp_path / "tokenizer")
    assert main(["show", str(tmp_path / "tokenizer")]) == 0
    out = capsys.readouterr().out
    assert f"BPE tokenizer, {tokenizer.vocab:,} entries" in out
    assert "토" in out, "an example in several languages"


def test_show_a_checkpoint_and_its_adapter(tokenized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint has a manifest that no stage wrote."""
    root = Path(shutil.copytree(tokenized, tmp_path / "root"))
    quick = ["train.warmup=0", "train.save_every=2", "train.evaluate_every=2"]
    assert main([*train_arguments(root, root / "base", 2), *quick]) == 0
    lora = [f"train.folder={root / 'lora'}", "model.lora.rank=2", "train.optimizer=adamw"]
    assert main(["train", str(root / "base"), *lora, f"model.init_from={root / 'base' / 'step-0000002'}"]) == 0
    capsys.readouterr()
    assert main(["show", str(root / "base" / "step-0000002")]) == 0
    assert re.search(r"step 2: [\d,]+ tokens seen, train loss \d", capsys.readouterr().out)
    assert main(["show", str(root / "lora" / "step-0000002")]) == 0
    assert f"base model: {root / 'base' / 'step-0000002'}" in capsys.readouterr().out
