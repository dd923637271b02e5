"""The command check finds every flipped bit of a corpus and of token stores; the index alone would miss those in ids."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest

from textmill.cli import main
from textmill.commands.check import check
from textmill.errors import TextmillError
from textmill.storage.files import format_path
from textmill.tokens.index_formats import find_index_errors
from textmill.tokens.store import open_store

FLIPS = 1000


def test_a_thousand_flipped_bits(
    tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny_texts.parent)
    assert main(["new", "mine", "--text", "texts"]) == 0
    for command in ("prepare", "fit-tokenizer", "tokenize"):
        assert main([command, "mine"]) == 0
    corpus, tokens = tiny_texts.parent / "mine" / "corpus", tiny_texts.parent / "mine" / "tokens"
    paths = [
        path
        for folder in (corpus, tokens)
        for path in sorted(folder.iterdir())
        if path.suffix in (".bin", ".idx", ".parquet")
    ]
    paths = [path for path in paths if path.stat().st_size]
    assert {path.suffix for path in paths} == {".bin", ".idx", ".parquet"}
    check("mine/corpus")
    check("mine/tokens")
    dice, found, found_by_index = random.Random(11), 0, 0
    for number in range(FLIPS):
        path = paths[number % len(paths)]
        content = path.read_bytes()
        place = dice.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << dice.randrange(8))]) + content[place + 1 :])
        with pytest.raises(TextmillError, match=f"{path.name} does not match its checksum"):
            check(str(path.parent))
        found += 1
        if path.suffix == ".bin":
            with suppress(TextmillError):
                found_by_index += bool(find_index_errors(open_store(path.with_suffix("")).index))
        path.write_bytes(content)
    assert found == FLIPS
    assert found_by_index == 0, "the format itself has no checksums; the manifest has"
    capsys.readouterr()


def test_a_path_is_printed_in_full_when_the_current_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert format_path(here / "run") == "run"
    here.rmdir()
    assert format_path(tmp_path / "run") == str(tmp_path / "run")
