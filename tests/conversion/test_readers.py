"""Exports as their readers open them: transformers, llama.cpp and onnxruntime, each in a fresh process."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conversion.test_carried_settings import update, write_foreign
from tests.conversion.test_gguf import CHATML, MODELS, multilingual, write_sentencepiece
from tests.conversion.test_gguf_llama import KINDS, write_model
from tests.support.bert_models import write_bert
from tests.support.model_folders import korean_tokenizer, write_folder
from textmill.cli import main
from textmill.conversion import compare, readers
from textmill.conversion.readers import check_with_reader
from textmill.models.bert.family import TASK_CLASSES
from textmill.models.pooling import Pooling, pooling_files

FOLDERS = ("gpt2", "chat", "llama", "qwen2", "qwen3", "biases", "foreign", "sentencepiece")
BERTS = ("BertForMaskedLM", "BertForPreTraining", "BertModel", *(f"BertFor{name}" for name in TASK_CLASSES.values()))
SHORT = (("foreign", "gguf"), ("BertForMaskedLM", "gguf"))
CASES = [
    pytest.param(folder, kind, marks=() if (folder, kind) in SHORT else pytest.mark.long)
    for folder in (*FOLDERS, *BERTS)
    for kind in ("hf", "gguf", "onnx")
]


@pytest.fixture(autouse=True)
def with_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "check_with_reader", check_with_reader)


def write(folder: Path, name: str) -> Path:
    """A small folder of this kind."""
    if name in ("gpt2", "chat"):
        return write_folder(folder, korean_tokenizer(chat="default" if name == "chat" else None), loud=6.0)
    if name == "sentencepiece":
        write_sentencepiece(folder, MODELS["bpe"])
        return folder
    if name in BERTS:
        write_bert(folder, name)
        return folder
    if name == "foreign":
        write_foreign(folder)
        update(folder / "tokenizer_config.json", {"chat_template": CHATML})
        return folder
    return write_model(folder, KINDS[name])


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_readers_give_our_ids_outputs_and_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    pytest.importorskip("gguf", reason="needs the extra export")
    monkeypatch.setattr(compare, "TEXTS", (*compare.TEXTS, *multilingual(500)))
    folder = write(tmp_path / "model", name)
    assert main(["export", str(folder), f"export.folder={tmp_path / 'out'}", f"export.kind={kind}"]) == 0
    found = capsys.readouterr().out
    assert found.count("opened with") == len(readers.READERS[kind]), found
    assert "not installed" not in found
    if name not in BERTS:
        assert kind == "onnx" or "greedy tokens" in found
    if name in ("chat", "foreign"):
        assert "chat turns" in found
    if name in BERTS:
        assert ("embeddings" if kind == "gguf" else "a pair") in found


@pytest.mark.long
@pytest.mark.parametrize(
    "pooling", [Pooling("cls", False, 60), Pooling("mean", True, 60, {"prompts": {"query": "Q: "}})]
)
def test_sentence_transformers_gives_our_embeddings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pooling: Pooling
) -> None:
    library = pytest.importorskip("sentence_transformers", reason="needs the extra long")
    folder, out = tmp_path / "model", tmp_path / "out"
    write_bert(folder, "BertModel")
    for name, text in pooling_files(pooling, 32).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    assert main(["export", str(folder), f"export.folder={out}"]) == 0
    assert re.search(r"sentence-transformers [\d.]+: embeddings \(difference \S+\) are equal", capsys.readouterr().out)
    found = library.SentenceTransformer(str(out), device="cpu").prompts
    assert found["query"] == pooling.prompts.get("prompts", {"query": ""})["query"]

    monkeypatch.setattr("textmill.conversion.formats.hf.pooling_files", lambda *_: pooling_files(Pooling("mean"), 32))
    assert main(["export", str(folder), f"export.folder={tmp_path / 'other'}"]) == 2
    assert "sentence-transformers computes other embeddings" in capsys.readouterr().err


CHANGES: list[tuple[str, str, Any]] = [
    ("ids", "gives other ids", lambda ids: [one[::-1] for one in ids]),
    ("new", "continues with", lambda new: new[::-1]),
    ("new", "continues with []", lambda _: []),
    ("values", "computes other outputs", lambda values: (np.array(values) * 1.01).tolist()),
    ("ends", "ends a text at", lambda _: [3]),
    ("missing", "finds no weights for 1 parameters", lambda _: ["a.weight"]),
]


@pytest.mark.parametrize("kind", ["gguf", pytest.param("hf", marks=pytest.mark.long)])
def test_a_reader_that_gives_something_else_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pytest.importorskip("xllamacpp", reason="needs the extra dev")
    folder = write_model(tmp_path / "model", KINDS["qwen2"])
    given: dict[str, Any] = {}
    ask = readers._ask

    def answer(key: str, change: Any, request: dict[str, Any]) -> dict[str, Any]:
        given.update(given or ask(request))
        return {**given, key: change(given[key])}

    for key, message, change in CHANGES[:3] if kind == "gguf" else CHANGES:
        monkeypatch.setattr(readers, "_ask", partial(answer, key, change))
        assert main(["export", str(folder), f"export.folder={tmp_path / 'out'}", f"export.kind={kind}"]) == 2
        assert f"out: not written: {readers.READERS[kind][0]} {message}" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_library_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_ask", lambda _: {"not_installed": "transformers"})
    folder = write_folder(tmp_path / "model", korean_tokenizer())
    assert main(["export", str(folder), f"export.folder={tmp_path / 'out'}"]) == 0
    assert "not opened with transformers: transformers is not installed" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert "not installed" in manifest["check"]
