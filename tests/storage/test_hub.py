"""Names of models: which are local folders, and which are looked up on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from textmill.errors import TextmillError
from textmill.storage.hub import find_model_folder

huggingface_hub = pytest.importorskip("huggingface_hub")


def test_only_names_without_a_local_folder_go_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []

    def download(name: str, **_: object) -> str:
        requested.append(name)
        return str(tmp_path / "downloaded")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert find_model_folder("runs/mine") == Path("runs/mine")
    with pytest.raises(
        TextmillError, match=r"runs/mien: no such folder in runs; .* the hub's, work in a folder without runs$"
    ):
        find_model_folder("runs/mien")
    with pytest.raises(TextmillError, match=r"\./mien: no such folder; use a run"):
        find_model_folder("./mien")
    assert not requested, "a mistyped folder was sent to the hub"
    assert find_model_folder("owner/model") == tmp_path / "downloaded"
    assert find_model_folder("gpt2") == tmp_path / "downloaded"
    assert requested == ["owner/model", "gpt2"]
