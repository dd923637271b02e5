"""Exports to URLs and a hub; models and tokens read from URLs through the local cache."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.support.fake_hub import TOKEN, fake_hub
from tests.support.model_folders import TEXT, korean_tokenizer, write_folder
from textmill.cli import main
from textmill.storage import remote_folders
from textmill.storage.remote_folders import fetch
from textmill.storage.tensor_files import read_model

SETTINGS = ["train.steps=2", "train.warmup=0", "train.batch=2", "train.length=16", "engine.device=cpu"]


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty file system in memory, and a cache in the folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = fsspec.filesystem("memory")
    files.rm("/mill", recursive=True) if files.exists("/mill") else None
    yield files
    files.rm("/mill", recursive=True) if files.exists("/mill") else None


def export(source: Path, url: str, *arguments: str) -> int:
    return main(["export", str(source), f"export.folder={url}", *arguments])


def test_an_export_to_a_url_is_complete_or_continued(
    tmp_path: Path, memory: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_folder(tmp_path / "source", korean_tokenizer())
    put = remote_folders.RemoteFolder.put

    def breaking(self: Any, local: Path, name: str) -> None:
        if name == "model.safetensors":
            raise KeyboardInterrupt
        put(self, local, name)

    monkeypatch.setattr(remote_folders.RemoteFolder, "put", breaking)
    export(source, "memory://mill/out")
    assert not memory.exists("/mill/out/manifest.json"), "what is not complete has no manifest"
    assert memory.exists("/mill/out/unfinished-export.json")
    monkeypatch.setattr(remote_folders.RemoteFolder, "put", put)
    assert export(source, "memory://mill/out") == 0
    assert "export: copied" in capsys.readouterr().out
    names = {path.rpartition("/")[2] for path in memory.find("/mill/out")}
    assert names == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "manifest.json",
    }
    assert memory.cat("/mill/out/model.safetensors")[-4096:] == (source / "model.safetensors").read_bytes()[-4096:]
    assert export(source, "memory://mill/out") == 0
    assert "export: done already: memory://mill/out" in capsys.readouterr().out
    assert export(source, "memory://mill/out", "export.precision=bf16") == 2
    assert "export.precision was fp32, is bf16" in capsys.readouterr().err
    assert export(source, "memory://mill/out", "export.precision=bf16", "--force") == 0
    assert len(memory.cat("/mill/out/model.safetensors")) < 0.6 * (source / "model.safetensors").stat().st_size
    memory.pipe("/mill/letters/dear.txt", b"dear")
    assert export(source, "memory://mill/letters", "--force") == 2
    assert "was not made by 'textmill export'" in capsys.readouterr().err
    assert not list((tmp_path / "cache").rglob("*.safetensors")), "no copy stays in the cache"


def test_models_are_read_from_a_url(tmp_path: Path, memory: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "source", korean_tokenizer())
    memory.put(str(source), "/mill/model", recursive=True)
    memory.pipe("/mill/model/optimizer.safetensors", b"large")
    generate = ["generate", "memory://mill/model", "sample.max_tokens=3", "engine.device=cpu"]
    assert main(generate) == 0
    assert "memory://mill/model: copying 4 files" in capsys.readouterr().err
    assert main(generate) == 0
    assert "copying" not in capsys.readouterr().err, "the copy is used again"
    copy = fetch("memory://mill/model")
    assert dict(read_model(copy)).keys() == dict(read_model(source)).keys()
    assert not (copy / "optimizer.safetensors").exists()
    memory.pipe("/mill/model/added_tokens.json", b"{}")
    assert fetch("memory://mill/model") != copy, "a change makes a new copy"
    assert main(["import", "memory://mill/model", str(tmp_path / "in")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "in")(TEXT[0]).input_ids == korean_tokenizer().encode(TEXT[0])
    assert main(["generate", "memory://mill/nothing"]) == 2
    assert "memory://mill/nothing: nothing is there" in capsys.readouterr().err
    assert main(["generate", "strange://mill"]) == 2
    assert "protocol not available" in capsys.readouterr().err
    assert fetch(f"file://{source}") == source


@pytest.mark.long
def test_training_from_remote_tokens_and_weights(
    tmp_path: Path, memory: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_folder(tmp_path / "source", korean_tokenizer())
    (tmp_path / "text.txt").write_text("\n\n".join(TEXT * 40), encoding="utf-8")
    corpus = "corpus: {sources: [text.txt], section_chars: 100, dedup: none}"
    (tmp_path / "my.yaml").write_text(f"{corpus}\ntokenizer: {{use: {source}}}\n")
    where = [str(tmp_path / "my.yaml"), f"folder={tmp_path / 'mine'}", "runner.workers=1"]
    for command in ("prepare", "fit-tokenizer", "tokenize"):
        assert main([command, *where]) == 0
    memory.put(str(source), "/mill/model", recursive=True)
    memory.put(str(tmp_path / "mine" / "tokens"), "/mill/tokens", recursive=True)
    train = ["train", str(tmp_path / "my.yaml"), "model.init_from=memory://mill/model", "train.min_learning_rate=0"]
    train += [*SETTINGS, "train.learning_rate=1e-30", "tokenizer.use=memory://mill/model"]
    for name, url in (("folder", "memory://mill/tokens"), ("prefix", "memory://mill/tokens/train")):
        run = tmp_path / name
        assert main([*train, f"tokens.use={url}", f"folder={run}"]) == 0, capsys.readouterr().err
        before, after = dict(read_model(source)), dict(read_model(run / "run" / "step-0000002"))
        assert all(np.array_equal(values, after[name]) for name, values in before.items())
    assert main([*train, "tokens.use=memory://mill/tokens", f"folder={tmp_path / 'folder'}"]) == 0
    assert "train: done already" in capsys.readouterr().out


def test_an_export_to_the_hub_is_one_commit(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_folder(tmp_path / "source", korean_tokenizer())
    with fake_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert export(source, "hf://me/mill", "export.license=apache-2.0") == 0, capsys.readouterr().err
        assert hub.created[0]["name"] == "mill"
        assert hub.created[0].get("visibility", "private" if hub.created[0].get("private") else "") == "private"
        (files,) = hub.commits
        assert files["config.json"].startswith(b"{")
        assert b"license: apache-2.0" in files["README.md"]
        (tmp_path / "model.safetensors").write_bytes(files["model.safetensors"])
        assert io.BytesIO(files["model.safetensors"]).read(8) == (source / "model.safetensors").read_bytes()[:8]
        output = capsys.readouterr()
        assert TOKEN not in output.out + output.err
        assert export(source, "hf://me/mill") == 2
        assert "hf://me/mill: exists already; name another one, or add --force" in capsys.readouterr().err
        assert len(hub.commits) == 1
        assert export(source, "hf://me/mill", "--force") == 0, capsys.readouterr().err
        assert len(hub.commits) == 2
        monkeypatch.setenv("HF_TOKEN", "another")
        assert export(source, "hf://me/mill") == 2
        assert "hf://me/mill: cannot be written (" in capsys.readouterr().err
        assert export(source, "hf://mill") == 2
        assert "write hf://OWNER/NAME" in capsys.readouterr().err
        assert len(hub.commits) == 2


def test_a_yaml_file_at_a_url_runs_no_code(tmp_path: Path, memory: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "source", korean_tokenizer())
    memory.put(str(source), "/mill/model", recursive=True)
    memory.pipe("/mill/model/evil.py", f"open({str(tmp_path / 'ran')!r}, 'w')".encode())
    memory.pipe("/mill/model/textmill.yaml", b"model: {family: ./evil.py}")
    assert main(["export", "memory://mill/model", f"export.folder={tmp_path / 'out'}"]) == 0, capsys.readouterr().err
    assert main(["export", "memory://mill/model/textmill.yaml", f"export.folder={tmp_path / 'two'}"]) == 2
    assert "name the URL of a run, a checkpoint or a model folder" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_files_without_a_version_are_copied_again(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_folders, "version_of", lambda info: "")
    for content in (b"one", b"two"):
        memory.pipe("/mill/folder/a.txt", content)
        assert (fetch("memory://mill/folder") / "a.txt").read_bytes() == content


def test_what_a_hub_says_of_a_file_is_its_version() -> None:
    assert remote_folders.version_of({"name": "a", "size": 3, "blob_id": "1f"}) == "blob_id 1f"


def test_a_password_in_a_url_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "ftp://user:secret@host/model"]) == 2
    message = capsys.readouterr().err
    assert "has a password" in message
    assert "secret" not in message
