"""Cleaning in `prepare`: the account is exact with every rule and filter; presets; sentences."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from textmill.config import RunConfig
from textmill.corpus.clean.rules import RULES
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import open_corpus

GOOD = "The mill by the river had been silent for years when the two brothers came back to open its doors."
TEXTS = [
    GOOD,
    GOOD + " ",
    "",
    "x",
    "cafÃ© <b>bold</b>\r\n" + GOOD,
    GOOD.replace("silent", "very silent") + "\u200b\x07<n>https://a.b/c\nRead more",
    "--- *** " * 20,
    "12345 " * 30,
    "one line of text\n" * 30,
    "buy it now and again " * 30,
    "강가의 방앗간은 여러 해 동안 조용히 서 있었다. 그러다가 두 형제가 돌아왔다.",
    "Irmağın kıyısındaki değirmen yıllarca sessiz kalmıştı, sonra iki kardeş geldi.",
    GOOD + " Write to a@b.com or 010-1234-5678.",
]
EVERYTHING = {
    "rules": sorted(set(RULES) - {"dsgpt2"}),
    "min_chars": 2,
    "min_words": 3,
    "max_symbols": 0.5,
    "max_digits": 0.5,
    "max_repeated_lines": 0.5,
    "max_repeated_words": 0.5,
    "languages": ["en", "ko"],
    "sentences": "split",
}


def prepare_corpus(folder: Path, texts: list[str], **corpus: Any) -> tuple[dict[str, Any], list[str]]:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "a.jsonl").write_text("\n".join([*lines, "{broken"]) + "\n")
    settings = {"sources": [str(folder / "a.jsonl")], "max_unreadable": 0.9, **corpus}
    out = prepare(
        RunConfig.model_validate({"folder": str(folder / "out"), "corpus": settings, "runner": {"workers": 1}})
    )
    kept = [row.text for row in open_corpus(out)]
    return json.loads((out / "account.json").read_text()), kept


def test_account_balances_with_all_rules_and_filters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    account, kept = prepare_corpus(tmp_path, TEXTS, **EVERYTHING)
    assert account["records"] == len(TEXTS) + 1
    assert account["records"] == account["kept"] + sum(account["dropped"].values()) + account["quarantined"]
    assert account["quarantined"] == 1
    fates = ["duplicate", "empty", "short", "symbols", "digits", "repeated_lines", "repeated_words", "language"]
    assert account["dropped"] == dict.fromkeys(fates, 1)
    once = dict.fromkeys(["repair", "html", "markers", "invisibles", "url_lines", "boilerplate", "emails", "phones"], 1)
    assert account["changed"].items() >= once.items()
    assert account["by_source"][str(tmp_path / "a.jsonl")]["changed"] == account["changed"]
    assert len(kept) == account["kept"] == 5
    assert "café bold\n" + GOOD in kept
    assert GOOD + "\nWrite to [email] or [phone]." in kept
    printed = capsys.readouterr().out
    assert "  changed                     boilerplate 1, controls 1, emails 1" in printed


def test_web_preset(tmp_path: Path) -> None:
    rng = random.Random(1)
    english, korean = (" ".join(rng.choice(text.split()) for _ in range(200)) for text in (GOOD, TEXTS[10]))
    account, kept = prepare_corpus(tmp_path, [GOOD, english, korean], preset="web")
    assert account["dropped"] == {"few_words": 1, "language": 1}
    assert kept == [english]


def test_presplit_lines(tmp_path: Path) -> None:
    _, kept = prepare_corpus(tmp_path, ["Bir cümle. İki.\n\n한 문장."], sentences="lines")
    assert kept == ["Bir cümle. İki.\n한 문장."]
