"""What was chosen for products is kept for the next run, whatever has become of the file."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from textmill.errors import TextmillError
from textmill.kernels import matmul_cache as choices
from textmill.kernels import matmul_torch as products_torch
from textmill.kernels.cublaslt import Form
from textmill.storage.files import file_lock

CARD = "NVIDIA H200, cuBLAS 130200"
FORM = Form(64, 32, 16, False, True, torch.bfloat16, torch.float32, True, False)
PRODUCT: Any = SimpleNamespace(form=FORM, device="cuda:0", way_of={b"good": "good way", b"bad": None}.__getitem__)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(products_torch, "card", lambda device: CARD)
    return tmp_path


def test_choices_of_several_cards_and_forms_stand_beside_each_other() -> None:
    assert choices.kept(CARD, "a") is None
    for card, form, way in ((CARD, "a", b"\x00\xff" * 32), (CARD, "b", b""), ("another", "a", b"1")):
        choices.keep(card, form, way)
    assert [choices.kept(CARD, form) for form in "abc"] == [b"\x00\xff" * 32, b"", None]
    assert choices.kept("another", "a") == b"1"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"NVIDIA H200, cuBLAS 130200": 3}', '{"NVIDIA H200, cuBLAS 130200": {"a": "xy"}}', "\x00"]
)
def test_a_damaged_file_keeps_nothing_and_is_written_anew(text: str) -> None:
    choices.place().parent.mkdir()
    choices.place().write_text(text)
    assert choices.kept(CARD, "a") is None
    choices.keep(CARD, "a", b"way")
    assert choices.kept(CARD, "a") == b"way"
    assert set(json.loads(choices.place().read_text())) == {CARD}


def test_where_nothing_can_be_written_nothing_is(folder: Path) -> None:
    (folder / "textmill").write_text("a file where the folder would be")
    choices.keep(CARD, "a", b"way")
    assert choices.kept(CARD, "a") is None


def test_where_nothing_can_be_locked_nothing_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Lustre that is mounted without locks."""

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    choices.keep(CARD, "a", b"way")
    assert choices.kept(CARD, "a") is None
    said = r"a\.lock: its file system does not support file locks \(Function not implemented\); "
    with pytest.raises(TextmillError, match=said), file_lock(folder / "a.lock", "busy"):
        pass


@pytest.mark.parametrize(
    ("kept", "known"),
    [(None, None), (b"", (None,)), (b"good", ((PRODUCT, "good way"),)), (b"bad", None)],
    ids=["nothing", "torch's own", "a way", "a way that the library refuses"],
)
def test_what_a_run_knows_from_another(kept: bytes | None, known: Any) -> None:
    if kept is not None:
        choices.keep(CARD, str(FORM), kept)
    assert products_torch._known(PRODUCT) == known


def test_processes_that_choose_at_the_same_time_lose_nothing() -> None:
    with ThreadPoolExecutor(8) as many:
        list(many.map(lambda number: choices.keep(CARD, str(number), b"way"), range(40)))
    assert all(choices.kept(CARD, str(number)) == b"way" for number in range(40))
