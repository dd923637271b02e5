"""More than twenty kinds of broken lines among good ones: the account balances exactly, and every good line is kept."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import pytest
import zstandard

from textmill.config import RunConfig
from textmill.corpus.document import SPLITS
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import list_shards, read_documents

EVERY = 100
"""One line in this many is broken or unusual."""

QUARANTINED = {
    "cut JSON": b'{"text": "never end',
    "no JSON": b"plain words",
    "raw control": b'{"text": "a\tb"}',
    "not UTF-8": b'{"text": "\xff\xfe"}',
    "surrogate in UTF-8": b'{"text": "\xed\xa0\x80"}',
    "lone surrogate": b'{"text": "x\\ud800y"}',
    "NUL bytes": b"\0" * 40,
    "no object": b'["text"]',
    "a number": b"17",
    "missing key": b'{"body": "words"}',
    "null": b'{"text": null}',
    "a list for text": b'{"text": ["a"]}',
    "a number for text": b'{"text": 1e5}',
    "nested lists": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "too many digits": b'{"text": ' + b"9" * 5000 + b"}",
    "two objects": b'{"text": "a"}{"text": "b"}',
    "UTF-16 in the middle": '{"text": "x"}'.encode("utf-16"),
}
DROPPED = {
    "blank": b"",
    "spaces": b"   \t",
    "empty text": b'{"text": ""}',
    "nothing but controls": b'{"text": "\\u0000\\u0001"}',
}
KEPT = {
    "BOM": b'\xef\xbb\xbf{"text": "bom %d"}',
    "CRLF": b'{"text": "crlf %d"}\r',
    "NaN": b'{"text": "nan %d", "x": NaN}',
    "the last of two keys": b'{"text": "no", "text": "last %d"}',
    "NUL inside": b'{"text": "nul \\u0000 %d"}',
}


def corpus(rng: random.Random, count: int) -> tuple[bytes, Counter[str], set[str]]:
    """The lines, the expected number of each outcome, and the texts that must be kept."""
    kinds = [*QUARANTINED, *DROPPED, *KEPT]
    lines, outcomes, texts = [], Counter[str](), set()
    for number in range(count):
        kind = kinds[number // EVERY % len(kinds)] if number % EVERY == 7 and len(lines) > 10 else None
        if kind in QUARANTINED:
            outcomes["quarantined"] += 1
            line = QUARANTINED[kind] if not kind.startswith("nested") or number < 20_000 else QUARANTINED[kind][:20_000]
            outcomes["quarantined_bytes"] += len(line) + 1
            lines.append(line)
        elif kind in DROPPED:
            outcomes["empty"] += 1
            lines.append(DROPPED[kind])
        elif kind is not None:
            outcomes["kept"] += 1
            outcomes["garbled"] += kind == "NUL inside"
            lines.append(KEPT[kind] % number)
            texts.add(
                {"BOM": "bom %d", "CRLF": "crlf %d", "NaN": "nan %d", "NUL inside": "nul   %d"}.get(kind, "last %d")
                % number
            )
        else:
            outcomes["kept"] += 1
            text = f"line {number} {rng.random()}"
            texts.add(text)
            lines.append(b'{"text": "%s"}' % text.encode())
    return b"\n".join(lines), outcomes, texts


@pytest.mark.long_with(200_000)
@pytest.mark.parametrize("count", [10_000, 200_000])
def test_account_balances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    data, outcomes, texts = corpus(random.Random(3), count)
    Path("texts/lines.jsonl").write_bytes(data)
    Path("texts/zero.jsonl").write_bytes(b"")
    Path("texts/zero.jsonl.gz").write_bytes(b"")
    extra = [f"packed {number}" for number in range(20_000)]
    packed = "".join(json.dumps({"text": text}) + "\n" for text in extra).encode()
    Path("texts/cut.jsonl.gz").write_bytes(gzip.compress(packed)[:-5000])
    Path("texts/cut.jsonl.zst").write_bytes(
        zstandard.ZstdCompressor().compress(packed.replace(b"packed", b"zpacked"))[:-5000]
    )
    Path("texts/wide.jsonl").write_bytes('\ufeff{"text": "geniş"}\n{"text": "넓다"}\n'.encode("utf-16"))
    settings = {"sources": ["texts"], "split": [98.0, 1.0, 1.0], "max_unreadable": 0.9}
    folder = prepare(RunConfig.model_validate({"folder": "out", "corpus": settings, "runner": {"workers": 1}}))
    account = json.loads((folder / "account.json").read_text())
    lines = account["by_source"]["texts/lines.jsonl"]
    lines.pop("changed")  # what the rules did to kept lines is another test's
    assert lines == {
        "files": 1,
        "records": count,
        "kept": outcomes["kept"],
        "dropped": {"empty": outcomes["empty"]},
        "quarantined": outcomes["quarantined"],
        "quarantined_bytes": outcomes["quarantined_bytes"],
        "garbled": outcomes["garbled"],
    }
    assert len(texts) == outcomes["kept"]
    assert account["records"] == account["kept"] + sum(account["dropped"].values()) + account["quarantined"]
    found = [row for split in SPLITS for path in list_shards(folder, split) for row in read_documents(path)]
    assert {row.text for row in found if row.source == "texts/lines.jsonl"} == texts
    assert {row.text for row in found if row.source == "texts/wide.jsonl"} == {"geniş", "넓다"}
    for kind in ("gz", "zst"):
        cut = account["by_source"][f"texts/cut.jsonl.{kind}"]
        assert cut["quarantined"] == 1
        assert 0 < cut["kept"] == cut["records"] - 1 < 20_000
    rows = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
    assert len(rows) == account["quarantined"] == outcomes["quarantined"] + 2
    assert all(row["reason"] and row["place"] for row in rows)
