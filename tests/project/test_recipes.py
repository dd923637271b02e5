"""Every recipe runs with two steps, and so does quickstart.sh."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from textmill.checkpoints.folders import open_checkpoint
from textmill.cli import main
from textmill.config import TokenizerConfig
from textmill.generation import sample_prompts
from textmill.tokens.vocabulary.tokenizer import fit
from textmill.where import open_where, recipe_names, recipes_folder

QUICK = [
    "train.steps=2",
    "train.warmup=0",
    "train.batch=2",
    "train.length=32",
    "train.evaluate_batches=1",
    "sample.max_tokens=5",
]
TINY = ["model.shape.layers=2", "model.shape.heads=2", "model.shape.width=32"]
"""The net of a recipe, much smaller, with its activation, norms and dropout."""
SMALLER = {
    "gpt2-small": ["model.size=nano"],
    "bert-base": ["model.size=tiny", "tokenizer.vocab=2000"],
    "bert-ko": ["model.size=tiny", "tokenizer.vocab=2000"],
    "bert-classify": ["tokenizer.use=encoder", "model.init_from=encoder"],
    "distilgpt2": [
        "tokenizer.use=pretrained", "model.init_from=pretrained", "model.init_layers=[0]",
        "train.distil.teachers=[pretrained]",
    ],
    "chat-ko": [],
    "ko-gpt2": [*TINY, "tokenizer.vocab=400"],
    "tr-gpt2": [*TINY, "tokenizer.vocab=400", "train.decay_steps=2", "engine.micro_batch=2"],
    "megatron-gpt2": [*TINY, "tokenizer.vocab=400", "corpus.min_words=5", "corpus.languages=[]"],
    "megatron-bert": [
        *TINY, "tokenizer.vocab=400", "corpus.min_words=5", "train.decay_steps=2", "train.masked.max_predictions=5",
    ],
    "yuan-4.7b": [*TINY, "train.tokens=null", "engine.offload_optimizer=null"],
    "jax-wikitext": [
        *TINY, "corpus.sources=texts/*.txt", "corpus.section_chars=400", "tokenizer.use=pretrained",
        "tokens.features.max_length=32", "tokens.features.min_length=4", "tokens.features.stride=16",
        "runner.options=[]", "train.epochs=null",
    ],
}  # fmt: skip
"""Settings for recipes that would take minutes without a GPU."""
SYSTEMS = ("ko-gpt2", "tr-gpt2", "megatron-gpt2", "megatron-bert", "yuan-4.7b", "jax-wikitext")
"""Recipes that tests/project/test_systems.py runs, with the commands around them."""
ALONE = [name for name in recipe_names() if name not in SYSTEMS]


def write_inputs(folder: Path) -> None:
    """Write what the recipes name, next to a folder of texts."""
    texts = folder / "texts"
    _write_pairs(folder / "ChatbotData.csv")
    _write_exam(folder / "exam.jsonl")
    _write_reviews(folder / "reviews.csv")
    _write_encoder(folder / "encoder", texts)
    _write_model(folder / "pretrained", texts)
    _write_lines(texts)
    _write_vocab(folder / "vocab.txt", texts)


def _write_pairs(path: Path) -> None:
    """Write a few questions and answers in the format of songys/Chatbot_data."""
    pairs = [(f"{number}시에 뭐 해?", f"{number}시에는 물레방아를 돌려요.") for number in range(60)]
    path.write_text("Q,A,label\n" + "".join(f"{question},{answer},0\n" for question, answer in pairs), encoding="utf-8")


def _write_exam(path: Path) -> None:
    """Write a few questions in the format of the task choices."""
    contexts = [f"The old mill beside the river has {number} wheels, and each of them" for number in range(9)]
    questions = [{"context": context, "choices": ["turns", "grinds"], "answer": 0} for context in contexts]
    path.write_text("".join(json.dumps(one) + "\n" for one in questions), encoding="utf-8")


def _write_reviews(path: Path) -> None:
    """Write a few texts with labels."""
    path.write_text("text,label\n" + "".join(f"the mill {number},{number % 2}\n" for number in range(60)))


def _write_encoder(folder: Path, texts: Path) -> None:
    """Write a BERT of transformers and its tokenizer."""
    texts_of = iter([[path.read_text(encoding="utf-8")] for path in texts.iterdir()])
    tokenizer = fit(texts_of, TokenizerConfig(kind="wordpiece", vocab=300))
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    net = BertForMaskedLM(BertConfig(**sizes, max_position_embeddings=64, vocab_size=tokenizer.vocab))
    net.save_pretrained(folder)
    tokenizer.save(folder)


def _write_model(folder: Path, texts: Path) -> None:
    """Write a transformers model and its tokenizer."""
    folder.mkdir()
    tokenizer = fit(iter([[path.read_text(encoding="utf-8")] for path in texts.iterdir()]), TokenizerConfig(vocab=300))
    tokenizer.save(folder)
    GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=32, vocab_size=tokenizer.vocab)
    ).save_pretrained(folder)


def _write_lines(texts: Path) -> None:
    """Write the paragraphs of the texts as JSON lines too, with the fields of Megatron's example."""
    for path in list(texts.glob("*.txt")):
        blocks = path.read_text(encoding="utf-8").split("\n\n")
        rows = [
            {"src": path.stem, "text": f"{block} {number}", "id": str(number)} for number, block in enumerate(blocks)
        ]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.with_suffix(".jsonl").write_text(lines, encoding="utf-8")


def _write_vocab(path: Path, texts: Path) -> None:
    """Write a vocab.txt in the format of Yuan: special pieces, marks for space and line end, then characters."""
    characters = sorted({character for file in texts.glob("*.txt") for character in file.read_text(encoding="utf-8")})
    pieces = ["<s>", "<unk>", "<pad>", "<eod>", "\u2582", "\u2583", *(one for one in characters if not one.isspace())]
    path.write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")


@pytest.mark.long_with(*[name for name in ALONE if name != "quickstart"])
@pytest.mark.parametrize("name", ALONE)
def test_recipe(
    name: str, tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_texts.parent
    shutil.copy(recipes_folder() / f"{name}.yaml", folder)
    monkeypatch.chdir(folder)
    write_inputs(folder)
    assert main(["run", f"{name}.yaml", *QUICK, *SMALLER.get(name, [])]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert f"All stages are done. The model is runs/{name}/run/step-0000002" in out
    following = {"chat-ko": "chat", "bert-base": "train", "bert-ko": "train", "bert-classify": "evaluate"}.get(
        name, "generate"
    )
    assert f"  textmill {following} runs/{name}" in out.partition("Next:")[2]
    if name == "chat-ko":
        _check_chat_template_is_used(folder / "runs" / name / "run")
    if name == "evaluated":
        assert "best checkpoint is step 2, choices/bits_per_byte" in out
        assert "checked for this file: 0 documents dropped" in out
    if name == "quickstart":
        _check_run_has_no_settings_of_one_call(folder, capsys)


def _check_run_has_no_settings_of_one_call(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check commands of docs/generate.md in the quickstart's run, whose recipe has a prompt."""
    (folder / "prompts.txt").write_text("Once\nTwice\n", encoding="utf-8")
    capsys.readouterr()
    assert main(["generate", "runs/quickstart", "sample.prompts_file=prompts.txt", "sample.max_tokens=3"]) == 0
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == ["Once", "Twice"]
    assert main(["generate", "quickstart", "sample.prompts_file=prompts.txt", "sample.max_tokens=50"]) == 0
    for where in ("runs/quickstart", "runs/quickstart/run", "runs/quickstart/run/step-0000002"):
        assert open_where(where, ["sample.max_tokens=3"]).config.sample.prompt is None, "generate asks for a text"


def _check_chat_template_is_used(run: Path) -> None:
    """Check texts of `run` without and with a prompt, and samples during training."""
    conversations = json.loads((run / "summary.json").read_text(encoding="utf-8"))["texts"]
    assert len(conversations) == 3
    assert all(
        re.match(r"<\|user\|>\d+시에 뭐 해\?<\|endoftext\|><\|assistant\|>", conversation)
        for conversation in conversations
    )
    assert main(["run", "chat-ko.yaml", *QUICK, "sample.prompt=5시에 뭐 해?"]) == 0
    (conversation,) = json.loads((run / "summary.json").read_text(encoding="utf-8"))["texts"]
    config = open_where("chat-ko.yaml", [*QUICK, "train.sample_prompts=5시에 뭐 해?"]).config
    (line,) = sample_prompts(
        open_checkpoint(run / "step-0000002"), config.train.sample_prompts, config.sample, config.engine
    )
    assert conversation == f"<|user|>5시에 뭐 해?<|endoftext|><|assistant|>{line['text']}"


@pytest.mark.long
def test_quickstart_sh(tmp_path: Path) -> None:
    script = tmp_path / "bin" / "textmill"
    script.parent.mkdir()
    script.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import sys; from textmill.cli import main; sys.exit(main())' \"$@\"\n"
    )
    script.chmod(0o755)
    path = os.pathsep.join([str(script.parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(recipes_folder().parent)}
    done = subprocess.run(
        ["sh", str(recipes_folder() / "quickstart.sh"), *QUICK],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for wanted in (
        "intact",
        "bits/byte",
        "KING RICHARD:",
        "runs/quickstart/run/step-0000002",
        "Next:",
        "All stages are done",
    ):
        assert wanted in done.stdout


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in recipe_names())
