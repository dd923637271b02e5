"""Joined stores have all documents of their parts, in order; only matching stores can be joined."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from textmill.cli import main
from textmill.commands.check import check
from textmill.errors import TextmillError
from textmill.storage.files import manifest_entry, read_json, write_json
from textmill.storage.stages import open_manifest
from textmill.tokens.lineage import Lineage, lineage_path, new_lineage
from textmill.tokens.merge import merge
from textmill.tokens.store import StoreWriter, open_store


def write(prefix: Path, documents: list[list[int]], dtype: object = np.uint16) -> Path:
    with StoreWriter(prefix, np.dtype(dtype)) as store:  # type: ignore[call-overload]
        store.add(documents)
    return prefix


def token_folder(folder: Path, documents: dict[str, list[list[int]]], tokenizer: str = "abc") -> Path:
    """A folder as `tokenize` writes it."""
    folder.mkdir()
    (folder / "run.yaml").write_text("folder: .\n")
    files, splits = {}, {}
    for split, rows in documents.items():
        write(folder / split, rows)
        with new_lineage(lineage_path(folder / split)) as lineage:
            lineage.add([f"{folder.name}.txt"] * len(rows), [f"line {number}" for number in range(len(rows))])
        files |= {
            f"{split}.{end}": manifest_entry(folder / f"{split}.{end}") for end in ("bin", "idx", "lineage.parquet")
        }
        splits[split] = {"documents": len(rows), "tokens": sum(map(len, rows)), "bytes": 7, "words": 3}
    facts = {"tokenizer": tokenizer, "vocab": 99, "eos_id": 0, "splits": splits}
    write_json(
        folder / "manifest.json",
        {"verb": "tokenize", "fingerprint": folder.name, **facts, "files": files, "made_from": {}},
    )
    return folder


def test_prefixes_are_joined_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [write(tmp_path / name, rows) for name, rows in (("b", [[1, 2], [3]]), ("a", []), ("c.x", [[], [4, 5, 6]]))]
    assert main(["merge", str(tmp_path / "out" / "all"), f"{parts[0]}.bin", str(parts[1]), f"{parts[2]}.idx"]) == 0
    whole = write(tmp_path / "whole", [[1, 2], [3], [], [4, 5, 6]])
    for end in (".bin", ".idx"):
        assert (tmp_path / "out" / f"all{end}").read_bytes() == Path(f"{whole}{end}").read_bytes()
    assert main(["check", str(tmp_path / "out" / "all")]) == 0
    assert "no checksums" in capsys.readouterr().out
    assert main(["merge", str(tmp_path / "out" / "all"), str(parts[0]), str(parts[1])]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["merge", str(tmp_path / "out" / "all"), str(parts[0]), str(parts[1]), "--force"]) == 0
    assert open_store(tmp_path / "out" / "all").tokens == 3


def test_folders_are_joined_split_by_split(tmp_path: Path) -> None:
    one = token_folder(tmp_path / "one", {"train": [[1, 2], [3]], "valid": [[9]], "test": []})
    two = token_folder(tmp_path / "two", {"train": [[4]], "valid": [], "test": [[7, 8]]})
    out = merge(str(tmp_path / "out"), [str(one), str(two)])
    assert [open_store(out / split).ids.tolist() for split in ("train", "valid", "test")] == [[1, 2, 3, 4], [9], [7, 8]]
    assert open_manifest(out)["splits"]["train"] == {"documents": 3, "tokens": 4, "bytes": 14, "words": 6}
    lineage = Lineage(lineage_path(out / "train"))
    assert [lineage[number] for number in range(3)] == [
        ("one.txt", "line 0"),
        ("one.txt", "line 1"),
        ("two.txt", "line 0"),
    ]
    assert check(str(out)) == [out]
    before = (out / "manifest.json").stat().st_mtime_ns
    merge(str(out), [str(one), str(two)])
    assert (out / "manifest.json").stat().st_mtime_ns == before, "done already"
    with pytest.raises(TextmillError, match="made from other settings or inputs"):
        merge(str(out), [str(two), str(one)])


def test_stores_that_do_not_match_are_an_error(tmp_path: Path) -> None:
    one = token_folder(tmp_path / "one", {"train": [[1]], "valid": [], "test": []})
    other = token_folder(tmp_path / "other", {"train": [[1]], "valid": [], "test": []}, tokenizer="xyz")
    with pytest.raises(TextmillError, match="tokenizer differs from"):
        merge(str(tmp_path / "out"), [str(one), str(other)])
    with pytest.raises(TextmillError, match="join only folders or only prefixes"):
        merge(str(tmp_path / "out"), [str(one), str(one / "train")])
    wide = write(tmp_path / "wide", [[1]], np.int32)
    with pytest.raises(TextmillError, match="the same dtype"):
        merge(str(tmp_path / "out"), [str(one / "train"), str(wide)])
    with pytest.raises(TextmillError, match="file not found"):
        merge(str(tmp_path / "out"), [str(wide), str(tmp_path / "nowhere")])
    assert main(["merge"]) == main(["merge", "x"]) == main(["merge", "x", "y"]) == 2
    assert not (tmp_path / "out").exists()


def test_a_changed_manifest_is_found(tmp_path: Path) -> None:
    one = token_folder(tmp_path / "one", {"train": [[1, 2]], "valid": [], "test": []})
    out = merge(str(tmp_path / "out"), [str(one), str(one)])
    text = (out / "manifest.json").read_text()
    for damaged in (text.replace('"vocab": 99', '"vocab": 98'), text.replace("sha256", "sha257", 1)):
        (out / "manifest.json").write_text(damaged)
        with pytest.raises(TextmillError, match=r"manifest\.json does not match its own checksum"):
            check(str(out))


def test_feature_rows_and_other_settings_are_an_error(tmp_path: Path) -> None:
    folders = [token_folder(tmp_path / name, {"train": [[1]], "valid": [], "test": []}) for name in ("one", "two")]
    for setting, message in (
        ({"tokens.kind": "features"}, "contains feature rows"),
        ({"tokens.append_end": False}, "the same settings"),
    ):
        manifest = read_json(folders[1] / "manifest.json")
        write_json(folders[1] / "manifest.json", {**manifest, "made_from": setting})
        with pytest.raises(TextmillError, match=message):
            merge(str(tmp_path / "out"), [str(folder) for folder in folders])
    assert not list(tmp_path.glob("out*"))
