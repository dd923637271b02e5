"""Names of models: which are local folders, and which are looked up on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from textmill.cli import main
from textmill.errors import TextmillError
from textmill.storage.hub import find_model_folder

huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that are looked up on a hub that has every model."""
    names: list[str] = []

    def download(name: str, **_: object) -> str:
        names.append(name)
        return str(tmp_path / "downloaded")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    return names


def test_only_names_without_a_local_folder_go_to_the_hub(tmp_path: Path, requested: list[str]) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert find_model_folder("runs/mine") == Path("runs/mine")
    with pytest.raises(TextmillError, match=r"\./mien: no such folder; use a run"):
        find_model_folder("./mien")
    assert not requested
    assert find_model_folder("owner/model") == tmp_path / "downloaded"
    assert find_model_folder("gpt2") == tmp_path / "downloaded"
    assert requested == ["owner/model", "gpt2"]


@pytest.mark.parametrize(
    "file",
    [
        "mine/run.yaml",
        "run.yaml",
        "textmill.yaml",
        "step-0000010/config.json",
        "mine/run/run.yaml",
        "mine/textmill.yaml",
    ],
)
def test_a_mistyped_run_is_not_sent_to_the_hub(file: str, tmp_path: Path, requested: list[str]) -> None:
    path = tmp_path / "runs" / file
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(TextmillError, match=r"runs/mien: no such folder; runs has [\w -]+; check the name"):
        find_model_folder("runs/mien")
    assert not requested


def test_a_local_folder_with_the_owners_name_does_not_hide_the_hub(
    tmp_path: Path, requested: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as the folder of the owner's other model, or of something else."""
    other = tmp_path / "owner" / "other"
    other.mkdir(parents=True)
    (other / "config.json").write_text("{}")
    assert find_model_folder("owner/other") == Path("owner/other")
    assert not requested
    assert find_model_folder("owner/model") == tmp_path / "downloaded"
    assert requested == ["owner/model"]
    assert capsys.readouterr().err == "textmill: owner/model: no such folder in owner; using the hub's\n"


@pytest.mark.parametrize("recipe", ["finetune", "bert-classify"])
def test_a_recipe_without_its_model_does_not_ask_the_hub(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", recipe]) == 2
    assert "./pretrained: no such folder; use a run" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["model.init_from", "tokenizer.use", "train.distil.teachers"])
def test_a_failed_download_says_where_it_looked(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str, **_: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "quickstart", f"{key}={'[mien]' if key.endswith('s') else 'mien'}"]) == 2
    error = capsys.readouterr().err
    assert f"{key}: mien: no such folder here, so it was looked up on the Hugging Face hub" in error
    assert "(no network); name a local folder as ./mien, or check the hub's name" in error
    assert not list(tmp_path.iterdir())
