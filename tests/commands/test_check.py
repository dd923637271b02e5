"""The command check finds every flipped bit of a corpus and of token stores, also inside token ids."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest

from textmill.cli import main
from textmill.commands.check import check
from textmill.errors import TextmillError
from textmill.storage.files import format_path, write_json
from textmill.storage.stages import add_yaml_checksum
from textmill.tokens.store import find_index_errors, open_store


@pytest.mark.long_with(1000)
@pytest.mark.parametrize("flips", [60, 1000])
def test_every_flipped_bit_is_found(
    tiny_texts: Path, flips: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    for number in range(flips):
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
    assert found == flips
    assert found_by_index == 0, "the format itself has no checksums; the manifest has"
    capsys.readouterr()


def test_run_yaml_and_the_ends_of_manifests_are_checked(
    tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny_texts.parent)
    assert main(["new", "mine", "--text", "texts"]) == 0
    assert main(["prepare", "mine"]) == 0
    folder, dice = tiny_texts.parent / "mine" / "corpus", random.Random(7)
    check("mine/corpus")
    manifest, run_yaml = (folder / "manifest.json").read_bytes(), (folder / "run.yaml").read_bytes()
    for _ in range(60):
        place = dice.randrange(len(run_yaml))
        flipped = bytes([run_yaml[place] ^ (1 << dice.randrange(8))])
        (folder / "run.yaml").write_bytes(run_yaml[:place] + flipped + run_yaml[place + 1 :])
        with pytest.raises(TextmillError, match=r"run\.yaml (does not match its own checksum|cannot be read)"):
            check("mine/corpus")
    (folder / "run.yaml").unlink()
    with pytest.raises(TextmillError, match=r"run\.yaml is missing"):
        check("mine/corpus")
    (folder / "run.yaml").write_bytes(run_yaml)
    for changed in (manifest + b" ", manifest + b"\n", manifest[:-1]):
        (folder / "manifest.json").write_bytes(changed)
        with pytest.raises(TextmillError, match=r"manifest\.json has other bytes"):
            check("mine/corpus")
    (folder / "manifest.json").write_bytes(manifest)
    check("mine/corpus")
    capsys.readouterr()


def test_run_yaml_and_manifests_of_a_run_are_checked(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-0000001"
    checkpoint.mkdir()
    write_json(checkpoint / "manifest.json", {"step": 1, "files": {}})
    write_json(checkpoint / "progress.json", {})
    with pytest.raises(TextmillError, match=r"run\.yaml is missing"):
        check(str(tmp_path))
    text = add_yaml_checksum("folder: .\n")
    for damaged in (
        text.replace("folder", "golder"),
        text.replace("SHA", "SHB"),
        text.replace("#", "c"),
        text[:-9],
        "folder: .\n",
    ):
        (tmp_path / "run.yaml").write_text(damaged, encoding="utf-8")
        with pytest.raises(TextmillError, match=r"run\.yaml does not match"):
            check(str(tmp_path))
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    assert check(str(tmp_path)) == [checkpoint]
    with open(checkpoint / "manifest.json", "a", encoding="utf-8") as stream:
        stream.write(" ")
    with pytest.raises(TextmillError, match=r"manifest\.json has other bytes"):
        check(str(tmp_path))


def test_a_path_is_printed_in_full_when_the_current_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert format_path(here / "run") == "run"
    here.rmdir()
    assert format_path(tmp_path / "run") == str(tmp_path / "run")
