"""What show prints is what is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from textmill.cli import main


def test_show_a_corpus(tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tiny_texts.parent)
    assert main(["new", "mine", "--text", "texts"]) == 0
    assert main(["prepare", "mine"]) == 0
    account = json.loads((tiny_texts.parent / "mine" / "corpus" / "account.json").read_text())
    for where in ("mine", "mine/corpus"):
        capsys.readouterr()
        assert main(["show", where]) == 0
        out = capsys.readouterr().out
        assert f"mine/corpus: {account['kept']:,} documents" in out
        for name in ("english", "korean", "turkish"):
            assert f"texts/{name}.txt" in out
        assert re.search(r"Hangul +[\d,]+ +\d", out)
        assert re.search(r"Latin +[\d,]+ +\d", out)
        lengths = re.findall(r"^  [\d,]+ to [\d,]+ +([\d,]+) ", out, re.M)
        assert sum(int(count.replace(",", "")) for count in lengths) == account["kept"], "every document has a length"
        assert out.count("--- texts/") == 3
