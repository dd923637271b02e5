"""Embeddings against transformers and sentence-transformers, the embed command, and its mistakes."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import textmill
from tests.support.bert_models import pretrained_encoder, write_bert
from tests.support.small_models import TEXT, write_model
from textmill.checkpoints.folders import open_model
from textmill.cli import main
from textmill.config import EmbedConfig, TokenizerConfig, TorchEngine
from textmill.errors import TextmillError
from textmill.generation.embed import new_text_encoder
from textmill.generation.encoder import Embedder, open_embedder, open_filler
from textmill.models.gpt2 import family as gpt2
from textmill.models.packed_texts import pack_texts
from textmill.models.pooling import read_pooling
from textmill.tokens.vocabulary.tokenizer import fit
from textmill.where import open_where

SENTENCES = [
    "The mill stands by the river.",
    "A wheel turns.",
    "",
    "Who is there?",
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "물레방아는 강가에 서 있다.",
    "a " * 400,
]


def opened(folder: Path, **numbers: Any) -> Embedder:
    return open_embedder(open_model(str(folder)), TorchEngine(device="cpu"), EmbedConfig(**numbers))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 64), st.integers(1, 300))
@settings(max_examples=30, deadline=None)
def test_packing_keeps_every_token_once(lengths: list[int], row_tokens: int, batch_tokens: int) -> None:
    texts = [np.arange(length) + 1000 * number + 1 for number, length in enumerate(lengths)]
    seen: list[int] = []
    for packed in pack_texts(texts, row_tokens=row_tokens, batch_tokens=batch_tokens):
        flat = packed.ids_NT.ravel()
        ids, owners = flat[packed.places_M], packed.texts_M
        for place, number in enumerate(packed.numbers_U.tolist()):
            assert np.array_equal(ids[owners == place], texts[number])
        seen += packed.numbers_U.tolist()
        rows, width = packed.ids_NT.shape
        assert rows == 1 or rows * width <= batch_tokens
        if packed.documents_NT is not None:
            assert np.count_nonzero(packed.documents_NT > 0) == packed.lengths_U.sum()
            padding = packed.documents_NT <= 0
            beside = padding[:, 1:] & padding[:, :-1]
            assert (np.diff(packed.documents_NT)[beside] != 0).all(), "padding may be longer than the model's context"
    assert sorted(seen) == list(range(len(lengths)))


@pytest.mark.long
def test_a_pretrained_encoder_gives_transformers_embeddings() -> None:
    import transformers

    folder = pretrained_encoder()
    net = transformers.BertModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [*SENTENCES[:6], "a " * 300]
    for pooling in ("mean", "cls"):
        found = opened(folder, pooling=pooling, normalize=False).embed(texts)
        unit = opened(folder, pooling=pooling).embed(texts[:1])
        for text, vector in zip(texts, found, strict=True):
            batch = tokenizer(text, truncation=True, max_length=256, padding=False, return_tensors="pt")
            with torch.no_grad():
                states = net(**batch).last_hidden_state[0]
            wanted = states[0] if pooling == "cls" else states.mean(0)
            assert np.abs(vector - wanted.numpy()).max() < 1e-4
        assert np.abs(unit[0] - found[0] / np.linalg.norm(found[0])).max() < 1e-6, "its files say: normalize"


@pytest.mark.long
def test_a_pretrained_encoder_gives_the_embeddings_of_sentence_transformers(tmp_path: Path) -> None:
    """Folders of old and of new versions say the same in other files; import keeps what they say."""
    library = pytest.importorskip("sentence_transformers", reason="needs the extra long")
    theirs = library.SentenceTransformer(str(pretrained_encoder()))
    wanted = theirs.encode(SENTENCES)
    theirs.save(str(tmp_path / "new"))
    assert main(["import", str(tmp_path / "new"), str(tmp_path / "imported")]) == 0
    for folder in (pretrained_encoder(), tmp_path / "new", tmp_path / "imported"):
        assert np.abs(opened(folder).embed(SENTENCES) - wanted).max() < 1e-4
    again = library.SentenceTransformer(str(tmp_path / "imported"))
    assert np.abs(again.encode(SENTENCES) - wanted).max() < 1e-6
    assert again.max_seq_length == 256


def test_padding_may_be_longer_than_the_context(tmp_path: Path) -> None:
    """Rows are wider than the 8 positions of this model, and the last one is nearly empty."""
    net, tokenizer = write_bert(tmp_path, "BertModel", positions=8)
    texts = ["the mill"] * 32 + ["a"]
    found = opened(tmp_path).embed(texts)
    for text, vector in zip(texts[-2:], found[-2:], strict=True):
        ids = [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id][:8]
        with torch.no_grad():
            assert np.abs(net(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy() - vector).max() < 1e-5


def test_a_next_token_model_gives_the_mean_of_its_states(tmp_path: Path) -> None:
    import transformers

    tokenizer = fit(iter([TEXT * 3]), TokenizerConfig(vocab=300))
    shape = gpt2.Shape(
        layers=2, heads=2, width=32, inner=64, positions=32, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id
    )
    folder = write_model(tmp_path / "run", tokenizer, shape).folder
    net = transformers.GPT2Model.from_pretrained(folder).eval()
    found = opened(folder).embed([*TEXT, ""])
    for text, vector in zip([*TEXT, ""], found, strict=True):
        ids = (tokenizer.encode(text) or [tokenizer.eos_id])[:32]
        with torch.no_grad():
            wanted = net(torch.tensor([ids])).last_hidden_state[0].mean(0)
        assert np.abs(vector - wanted.numpy()).max() < 1e-4


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder = tmp_path_factory.mktemp("bert")
    return folder, *write_bert(folder, "BertModel")


def test_the_command_prints_lines_and_writes_matrices(
    bert: tuple[Path, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder, net, tokenizer = bert
    monkeypatch.chdir(tmp_path)
    texts = ["The mill", "물레방아는 강가에", "the wheel " * 40]
    assert main(["embed", str(folder), *texts]) == 0
    out, errors = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["text"] for line in lines] == texts
    assert [line.get("truncated", False) for line in lines] == [False, False, True]
    assert "1 of 3 texts are longer than 48 tokens and were truncated; the longest has" in errors
    vectors = textmill.embed(open_where(str(folder), []).config, texts)
    assert np.array_equal(vectors, np.array([line["embedding"] for line in lines], np.float32))
    Path("texts.txt").write_text("\n".join(texts), encoding="utf-8")
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name in ("texts.txt", "texts.jsonl"):
        assert main(["embed", str(folder), name, "--out", "vectors.npy", "embed.pooling=cls"]) == 0
        first = np.load("vectors.npy", allow_pickle=False)
        assert main(["embed", str(folder), name, "--out", "vectors.jsonl", "embed.pooling=cls"]) == 0
        second = [json.loads(line)["embedding"] for line in Path("vectors.jsonl").read_text().splitlines()]
        assert np.array_equal(first, np.array(second, np.float32)), "nine digits are enough"
        for text, vector in zip(texts[:2], first, strict=False):
            ids = [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]
            with torch.no_grad():
                wanted = net(torch.tensor([ids])).last_hidden_state[0, 0].numpy()
            assert np.abs(vector - wanted).max() < 1e-5
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl", ".jsonl", ".npy", ".txt"]


def test_what_cannot_be_embedded_is_one_line(
    bert: tuple[Path, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(bert[0])
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("folder.npy").mkdir()
    Path("latin.txt").write_bytes(b"ok\n\xff\xfe\n")
    Path("bad.jsonl").write_text('{"text": "ok"}\n{"texts": "no"}\n')
    for words, message in (
        ([folder, "empty.txt"], "empty.txt is empty"),
        ([folder, "latin.txt", "--out", "x.npy"], "latin.txt:2: is not UTF-8 text"),
        ([folder, "bad.jsonl", "--out", "x.npy"], 'bad.jsonl:2: is not a text; write each line as {"text": "TEXT"}'),
        ([folder, "a", "b", "--out", "x.csv"], "'x.csv' is no .npy or .jsonl file"),
        ([folder, "a", "embed.length=49"], "embed.length: 49 is more than the model's 48; lower it"),
        ([folder, "a", "--out", "folder.npy"], "--out: folder.npy is a folder; name a file in it"),
        ([folder, "a", "--out", "latin.txt/x.npy"], "--out: latin.txt is not a folder; name another one"),
        ([folder, "texts/none.txt", "--out", "x.npy"], "texts/none.txt: no such file"),
        ([folder, "a", "embed.length=2"], "embed.length: 2 has no space for a text; raise it"),
        ([folder, "a", "embed.pooling=max"], "embed.pooling: "),
        (["nowhere", "a"], "nowhere: no such file or folder"),
    ):
        assert main(["embed", *words]) == 2
        errors = capsys.readouterr().err
        assert message in errors
        assert errors.count("\n") == 1
    assert not list(tmp_path.glob("x.*")), "nothing is half-written"
    monkeypatch.setattr("sys.stdin", None)
    assert main(["embed", folder]) == 2
    assert "no text; write: textmill embed MODEL 'a text'" in capsys.readouterr().err


def test_fill_takes_texts_as_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bert(tmp_path)
    capsys.readouterr()
    folder = [str(tmp_path), "engine.device=cpu"]
    texts = ["the [MASK]", "a [MASK] of"]
    assert main(["fill", *folder, *texts, "--json"]) == 0
    filled = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["prompt"] for one in filled] == texts
    for words, message in [
        (["no mask"], "TEXT: 'no mask' has no [MASK]"),
        ([*texts, "sample.prompt=x"], "one of them"),
    ]:
        assert main(["fill", *folder, *words]) == 2
        assert message in capsys.readouterr().err


def test_a_folder_without_tokenizer_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bert(tmp_path)
    capsys.readouterr()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    for words in (["embed", str(tmp_path), "a"], ["fill", str(tmp_path), "a [MASK]"]):
        assert main(words) == 2
        errors = capsys.readouterr().err
        assert str(tmp_path) in errors
        assert "tokenizer" in errors
        assert errors.count("\n") == 1


def test_foreign_modules_and_pooling_are_refused(tmp_path: Path) -> None:
    def write(modules: Any, pooling: Any) -> None:
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        (tmp_path / "1_Pooling").mkdir(exist_ok=True)
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))

    pooling = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
    dense = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
    write([pooling], {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    assert read_pooling(tmp_path).kind == "cls"
    write([pooling], {"pooling_mode": "mean"})
    assert read_pooling(tmp_path).kind == "mean"
    for modules, kinds, message in (
        ([pooling], {"pooling_mode": "max"}, "pools by max; textmill knows mean and cls; set embed.pooling"),
        ([pooling], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "pools by mean, cls"),
        ([pooling], ["mean"], "is not an object of settings"),
        ([pooling, dense], {"pooling_mode": "mean"}, "has the module Dense, which textmill does not compute"),
        ([{**pooling, "path": "../1_Pooling"}], {}, "a folder inside this one is expected"),
        ([{**pooling, "path": ".."}], {}, "a folder inside this one is expected"),
        ("Pooling", {}, "is not a list of modules"),
    ):
        write(modules, kinds)
        with pytest.raises(TextmillError, match=message):
            read_pooling(tmp_path)
    write([pooling], {"pooling_mode": "max"})
    assert read_pooling(tmp_path, "cls").kind == "cls", "a setting overrides the file"


def test_a_mask_that_is_filled_with_a_mask_keeps_the_order(tmp_path: Path) -> None:
    write_bert(tmp_path)
    filler = open_filler(open_model(str(tmp_path)), TorchEngine(device="cpu"))
    tokenizer = filler.texts.tokenizer
    logits = F.one_hot(torch.tensor([filler.texts.mask_id, tokenizer.encode("the")[0]]), tokenizer.vocab).float()
    filler.net.logits = lambda x_NTE: logits  # type: ignore[method-assign]
    assert [one.text for one in filler.fill(["a [MASK] b [MASK] c"], 1)] == ["a [MASK] b the c"]
    filler.net.logits = lambda x_NTE: logits * torch.nan  # type: ignore[method-assign]
    with pytest.raises(TextmillError, match="a probability is not finite"):
        list(filler.fill(["a [MASK] b [MASK] c"], 1))


def test_names_of_files_among_texts_are_pointed_out(
    bert: tuple[Path, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("one\ntwo\n")
    assert main(["embed", str(bert[0]), "a.txt", "b", "--out", "new/folder/x.npy"]) == 0
    assert "a.txt: is embedded as a text, though a file has this name" in capsys.readouterr().err
    assert np.load("new/folder/x.npy").shape == (2, 32)
    os.mkfifo("pipe")
    writer = threading.Thread(target=lambda: Path("pipe").write_text("one\ntwo\n"))
    writer.start()
    assert main(["embed", str(bert[0]), "pipe"]) == 0
    writer.join()
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == ["one", "two"]


def test_a_model_without_cls_has_no_cls_pooling(tmp_path: Path) -> None:
    shape = gpt2.Shape(layers=1, heads=2, width=16, inner=32, positions=32, vocab=300, eos_id=0)
    tokenizer = fit(iter([TEXT * 3]), TokenizerConfig(vocab=300))
    with pytest.raises(
        TextmillError, match=r"embed.pooling: .* has no \[CLS\] token at the start of a text; set it to"
    ):
        new_text_encoder(shape, tokenizer, EmbedConfig(pooling="cls"), tmp_path)
