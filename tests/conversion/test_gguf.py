"""GGUF files in a real llama.cpp: our token ids and our greedy tokens, with a vocabulary fitted on Korean."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers

from tests.conftest import ROOT
from tests.support.model_folders import TEXT, korean_tokenizer, write_folder
from textmill.cli import main
from textmill.config import TokenizerConfig
from textmill.conversion.compare import TEXTS
from textmill.conversion.formats.gguf import modelfile, read
from textmill.conversion.model import Hints
from textmill.conversion.readers import join_unknown
from textmill.errors import TextmillError
from textmill.models.nets_torch import open_net
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit, open_tokenizer

pytest.importorskip("gguf", reason="needs the extra export")

MORE = ("fp16", "bf16", "q4_0")
SCRIPTS = [
    (0x20, 0x7F),
    (0xA0, 0x250),
    (0x400, 0x460),
    (0xAC00, 0xD7A4),
    (0x4E00, 0x9FFF),
    (0x3041, 0x30FF),
    (0x5D0, 0x5EB),
    (0x621, 0x64B),
    (0x1F600, 0x1F640),
]


def multilingual(count: int) -> list[str]:
    """Sentences, and strings of characters of many scripts with spaces, digits and line ends between them."""
    dice = random.Random(3)
    texts = [text for line in (*TEXT, *TEXTS) for text in (line, line[dice.randrange(9) :], line.upper())]
    while len(texts) < count:
        words = []
        for _ in range(dice.randint(1, 6)):
            first, last = dice.choice(SCRIPTS)
            words.append("".join(chr(dice.randrange(first, last)) for _ in range(dice.randint(1, 8))))
            words.append(dice.choice([" ", "  ", "\n", " \n\n ", "\t", "", "'s ", "12", " 345", "..."]))
        texts.append("".join(words))
    return texts[:count]


def ask_llama_cpp(file: Path, **request: Any) -> dict[str, Any]:
    pytest.importorskip("xllamacpp", reason="needs the extra dev")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.llama_cpp", str(file)],
        input=json.dumps({"texts": [], "prompts": [], "tokens": 1, "context": 96, **request}),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert answers, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(answers[0].removeprefix("ANSWER "))
    return found


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    net, ids = open_net(folder, torch.device("cpu")), list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(net.logits(net(torch.tensor([ids])))[0, -1].argmax()))
            if ids[-1] == net.shape.eos_id:
                break
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"split_digits": True}, marks=pytest.mark.long),
        pytest.param({"chat": "default"}, marks=pytest.mark.long),
    ],
)
def test_llama_cpp_gives_our_ids_and_our_greedy_tokens(tmp_path: Path, settings: dict[str, Any]) -> None:
    tokenizer = korean_tokenizer(vocab=420, **settings)
    folder, out = write_folder(tmp_path / "model", tokenizer, loud=6.0, rows=5), tmp_path / "out"
    assert main(["export", str(folder), f"export.folder={out}", "export.kind=gguf"]) == 0
    texts, prompts = multilingual(1000 if not settings else 100), [tokenizer.encode(line)[:20] for line in TEXT]
    found = ask_llama_cpp(out / "out.gguf", texts=texts, prompts=prompts, tokens=64)
    assert found["ids"] == [tokenizer.encode(text) for text in texts]
    for prompt, new in zip(prompts, found["new"], strict=True):
        wanted = greedy(folder, prompt, 64)
        assert len(set(wanted)) > 5, "a model that repeats one token proves nothing"
        assert [id_ for id_ in new if id_ != tokenizer.eos_id] == [id_ for id_ in wanted if id_ != tokenizer.eos_id]


@pytest.mark.parametrize("precision", ["q8_0", *(pytest.param(one, marks=pytest.mark.long) for one in MORE)])
def test_every_type_runs_in_llama_cpp_and_is_read_as_the_package_reads_it(tmp_path: Path, precision: str) -> None:
    tokenizer = korean_tokenizer()
    folder, out = write_folder(tmp_path / "model", tokenizer), tmp_path / "out"
    assert (
        main(["export", str(folder), f"export.folder={out}", "export.kind=gguf", f"export.precision={precision}"]) == 0
    )
    assert len(ask_llama_cpp(out / "out.gguf", prompts=[tokenizer.encode(TEXT[0])[:9]], tokens=3)["new"][0]) == 3
    weights = read(out, Hints()).weights
    net = open_net(folder, torch.device("cpu"))
    before = dict(read(_as_fp32(folder, tmp_path), Hints()).weights)
    largest = max(float(np.abs(values - before[name]).max()) for name, values in weights.items())
    assert 0 < largest < {"fp16": 2e-4, "bf16": 2e-3, "q8_0": 2e-3, "q4_0": 4e-2}[precision]
    assert net.shape.vocab == len(weights["transformer.wte.weight"])


def test_a_quantised_model_is_judged_on_text_with_a_bound_of_its_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "model", korean_tokenizer(), loud=8.0, width=64)

    def export(precision: str, *more: str) -> int:
        out = tmp_path / f"{precision}{len(more)}"
        settings = [f"export.folder={out}", "export.kind=gguf", f"export.precision={precision}", *more]
        return main(["export", str(folder), *settings])

    assert export("q8_0") == 0
    assert "(bound 0.02) on " in capsys.readouterr().out
    assert export("q8_0", "export.max_divergence=1e-7") == 2
    assert "use export.precision=fp16, or raise export.max_divergence" in capsys.readouterr().err
    assert export("q4_0") == 2
    assert "(bound 0.5)" in capsys.readouterr().err
    assert export("q4_0", "export.max_divergence=20") == 0


def _as_fp32(folder: Path, tmp_path: Path) -> Path:
    assert main(["export", str(folder), f"export.folder={tmp_path / 'fp32'}", "export.kind=gguf"]) == 0
    return tmp_path / "fp32"


def test_the_chat_template_and_the_modelfile(tmp_path: Path) -> None:
    tokenizer = korean_tokenizer(chat="default")
    folder, out = write_folder(tmp_path / "model", tokenizer), tmp_path / "out"
    assert main(["export", str(folder), f"export.folder={out}", "export.kind=gguf", "export.name=My mill"]) == 0
    talk = [
        {"role": "user", "content": "물레방아는?"},
        {"role": "assistant", "content": "강가에."},
        {"role": "user", "content": "왜?"},
    ]
    from transformers import AutoTokenizer

    wanted = AutoTokenizer.from_pretrained(folder).apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert ask_llama_cpp(out / "My-mill.gguf", talk=talk)["talk"] == wanted
    lines = (out / "Modelfile").read_text().splitlines()
    assert lines[0] == "FROM ./My-mill.gguf"
    assert lines[1].endswith(
        '<|user|>{{ .Content }}<|endoftext|>{{ else if eq .Role "assistant" }}<|assistant|>'
        '{{ .Content }}<|endoftext|>{{ end }}{{ end }}<|assistant|>"""'
    )
    assert lines[2:] == ["PARAMETER num_ctx 96", 'PARAMETER stop "<|endoftext|>"']


CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a mill<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_the_modelfile_of_another_chat_model_stops_and_leaves_its_template_to_ollama() -> None:
    inner = korean_tokenizer().inner
    inner.add_special_tokens(["<s>", "<|im_end|>"])
    tokenizer = TextTokenizer(inner, 0, {"bos_token": "<s>", "eos_token": "<|endoftext|>"}, jinja=CHATML)
    written = modelfile("a.gguf", SimpleNamespace(positions=96, family="llama"), tokenizer)
    stops = 'PARAMETER stop "<|endoftext|>"\nPARAMETER stop "<|im_end|>"\n'
    assert written == f"FROM ./a.gguf\nPARAMETER num_ctx 96\n{stops}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "unigram", "vocab": 500}, "it has no byte fallback for unigram; fit with tokenizer.byte_fallback=fa"),
        ({"kind": "wordpiece", "split_digits": True}, "splits words as BERT does, and this tokenizer does not; use hf"),
        ({"lowercase": True}, "this one is BPE with a normalizer"),
    ],
)
def test_tokenizers_that_llama_cpp_does_not_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], message: str
) -> None:
    assert message in refusal(tmp_path, korean_tokenizer(**settings), capsys)


def test_another_way_of_splitting_words_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = korean_tokenizer()
    han = pre_tokenizers.Split(Regex(r"\p{Han}"), "isolated")
    tokenizer.inner.pre_tokenizer = pre_tokenizers.Sequence([han, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    message = "llama.cpp has no name for how this tokenizer splits words"
    assert message in refusal(tmp_path, tokenizer, capsys)


def refusal(tmp_path: Path, tokenizer: TextTokenizer, capsys: pytest.CaptureFixture[str]) -> str:
    """What the export of a model with this tokenizer says, which writes nothing."""
    folder = write_folder(tmp_path / "model", tokenizer)
    assert main(["export", str(folder), f"export.folder={tmp_path / 'out'}", "export.kind=gguf"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    return capsys.readouterr().err


PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
UNIGRAM = {"model_type": "unigram", "vocab_size": 900, "character_coverage": 0.98}
BPE = {"model_type": "bpe", "vocab_size": 1100, "byte_fallback": True}
MODELS: dict[str, dict[str, Any]] = {
    "bpe": {**BPE, **PLAIN},
    "bpe without a prefix": {**BPE, **PLAIN, "add_dummy_prefix": False, "user_defined_symbols": ["<mill>"]},
    "unigram": {**UNIGRAM, "normalization_rule_name": "nmt_nfkc_cf"},
    "unigram without a prefix": {**UNIGRAM, **PLAIN, "add_dummy_prefix": False, "user_defined_symbols": ["<mill>"]},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bpe that normalises": (BPE, "it does not normalise the text of a BPE vocabulary; use hf"),
    "bpe without bytes": ({**BPE, **PLAIN, "byte_fallback": False}, "it writes unknown characters as bytes, and this"),
    "unigram with blanks": ({**UNIGRAM, **PLAIN}, "it counts blanks differently; use hf"),
    "symbols": (
        {**UNIGRAM, "user_defined_symbols": ["<mill>"]},
        "it also puts a space before the text after a special",
    ),
}


def write_sentencepiece(folder: Path, options: dict[str, Any]) -> TextTokenizer:
    """A model of the sentencepiece library as a folder; returns its tokenizer."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs the extra dev")
    texts = iter([*TEXT, *TEXTS, *multilingual(60)] * 20)
    prefix = folder.with_name("spm")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts, model_prefix=str(prefix), hard_vocab_limit=False, minloglevel=2, **options
    )
    tokenizer = open_tokenizer(prefix.with_suffix(".model"))
    write_folder(folder, tokenizer, rows=5)
    return tokenizer


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.long] * (one != "bpe")) for one in MODELS])
def test_a_sentencepiece_model_gives_the_same_ids_in_llama_cpp(tmp_path: Path, name: str) -> None:
    tokenizer = write_sentencepiece(tmp_path / "model", MODELS[name])
    out, back = tmp_path / "out", tmp_path / "back"
    assert main(["export", str(tmp_path / "model"), f"export.folder={out}", "export.kind=gguf"]) == 0
    texts = [*multilingual(500), "   lead", "trail  ", "a  b   c", "\n\n", "▁x <s> </s> [unused901] <0x41>"]
    if "nfkc_cf" in str(MODELS[name]):  # combining marks are the difference that export warns of
        texts = [text for text in texts if "\u309a" not in text and "\u3099" not in text]
    found = ask_llama_cpp(out / "out.gguf", texts=texts)["ids"]
    for text, ids in zip(texts, found, strict=True):
        assert join_unknown(ids, tokenizer.unk_id) == join_unknown(tokenizer.encode(text), tokenizer.unk_id), text
    assert main(["import", str(out), str(back)]) == 0
    again = open_tokenizer(back)
    assert [again.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]
    assert again.decode(again.encode(TEXT[0])) == TEXT[0]


@pytest.mark.long
def test_a_fitted_unigram_gives_the_same_ids_in_llama_cpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = fit(iter([multilingual(150)]), TokenizerConfig(kind="unigram", vocab=1600, byte_fallback=False))
    folder, out = write_folder(tmp_path / "model", tokenizer), tmp_path / "out"
    assert main(["export", str(folder), f"export.folder={out}", "export.kind=gguf"]) == 0
    assert "one token of unknown characters in a row" in capsys.readouterr().err
    texts = multilingual(500)
    for text, ids in zip(texts, ask_llama_cpp(out / "out.gguf", texts=texts)["ids"], strict=True):
        assert ids == join_unknown(tokenizer.encode(text), tokenizer.unk_id), text


@pytest.mark.parametrize("name", REFUSED)
def test_sentencepiece_models_that_llama_cpp_does_not_have_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    options, message = REFUSED[name]
    write_sentencepiece(tmp_path / "model", options)
    assert main(["export", str(tmp_path / "model"), f"export.folder={tmp_path / 'out'}", "export.kind=gguf"]) == 2
    assert message in capsys.readouterr().err


def test_merges_that_are_not_all_of_them_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = write_sentencepiece(tmp_path / "spm", MODELS["bpe"])
    tree = json.loads(tokenizer.inner.to_str())
    tree["model"]["merges"].pop(5)
    write_folder(tmp_path / "model", replace(tokenizer, inner=Tokenizer.from_str(json.dumps(tree))))
    assert main(["export", str(tmp_path / "model"), f"export.folder={tmp_path / 'out'}", "export.kind=gguf"]) == 2
    assert "it merges all tokens whose union is one" in capsys.readouterr().err


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    out = _as_fp32(write_folder(tmp_path / "model", korean_tokenizer()), tmp_path)
    whole = (out / "fp32.gguf").read_bytes()
    for length in (3, 20, 500, len(whole) // 2, len(whole) - 1000):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(TextmillError, match="not a readable GGUF file"):
            read(tmp_path / "cut.gguf", Hints())
    (tmp_path / "cut.gguf").write_bytes(whole.replace(b"gpt2", b"bird", 1))
    with pytest.raises(TextmillError, match="its architecture is 'bird'"):
        read(tmp_path / "cut.gguf", Hints())


@pytest.mark.parametrize("name", ["bert-cased", pytest.param("minilm", marks=pytest.mark.long)])
def test_a_bert_gives_the_same_ids_in_llama_cpp_and_comes_back(tmp_path: Path, name: str) -> None:
    from tests.conversion.test_identity import write

    folder, out, back = tmp_path / "model", tmp_path / "out", tmp_path / "back"
    write(folder, name)
    assert main(["export", str(folder), f"export.folder={out}", "export.kind=gguf"]) == 0
    assert (out / "Modelfile").read_text() == "FROM ./out.gguf\n"
    texts = [*multilingual(500), "   lead", "a  b", "\n\n", "▁x [CLS] ÀÉ ﬁ", "don't—stop"]
    if name == "minilm":  # accents are stripped; export says what llama.cpp then does in another way
        texts = [unicodedata.normalize("NFD", text) for text in texts]
        texts = [text for text in texts if all(unicodedata.category(one) != "Mc" for one in text)]
    tokenizer = open_tokenizer(folder)
    assert ask_llama_cpp(out / "out.gguf", texts=texts)["ids"] == [tokenizer.encode(text) for text in texts]
    assert main(["import", str(out), str(back)]) == 0
    again = open_tokenizer(back)
    assert again.roles == tokenizer.roles
    assert [again.inner.encode(text).ids for text in texts] == [tokenizer.inner.encode(text).ids for text in texts]
    assert (back / "1_Pooling/config.json").is_file()
