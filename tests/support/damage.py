"""Damaged trees of plain values, for tests."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

WRONG = (None, True, -1, 3, 1.5, 10**400, "wrong", [], [None], {}, {"a": 1})


def mutated(tree: Any, dice: random.Random, wrong: tuple[Any, ...] = WRONG) -> Any:
    """Return the tree with one random item removed or replaced."""
    if not isinstance(tree, dict | list) or not tree or dice.random() < 0.2:
        return dice.choice(wrong)
    place = dice.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
    if dice.random() < 0.2:
        return (
            {name: value for name, value in tree.items() if name != place} if isinstance(tree, dict) else tree[:place]
        )
    changed = mutated(tree[place], dice, wrong)
    return {**tree, place: changed} if isinstance(tree, dict) else [*tree[:place], changed, *tree[place + 1 :]]


class Damage(NamedTuple):
    """A damaged document."""

    name: str
    """Its file name; the extension may be wrong."""
    data: bytes
    kind: str
    is_revealed: bool
    """False if nothing in the file shows the damage: flipped bits in a format without checksums, question marks."""


CHECKSUMS = (".docx", ".odt", ".epub", ".pdf", ".gz")
TEXTS = (".md", ".html", ".tex", ".srt", ".vtt", ".jsonl", ".csv")
EXTENSIONS = (*CHECKSUMS, ".rtf", ".txt", *TEXTS, ".warc", ".mbox", ".py", ".parquet", ".json", ".doc", "")


def damage_document(data: bytes, name: str, dice: random.Random) -> Damage:
    """Flip bits, cut the end, change the extension, or store the text in another encoding."""
    stem, _, end = name.rpartition(".")
    end = f".{end}"
    kind = dice.choice(("flip", "cut", "extension", "encoding" if end in TEXTS else "flip"))
    if kind == "flip":
        changed = bytearray(data)
        for _ in range(dice.choice((1, 1, 1, 2, 8))):
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
        return Damage(name, bytes(changed), kind, end in CHECKSUMS)
    if kind == "cut":
        return Damage(name, data[: dice.randrange(len(data))], kind, True)
    if kind == "extension":
        other = dice.choice([one for one in EXTENSIONS if one != end])
        return Damage(stem + other, data, f"{end} as {other or 'no extension'}", True)
    encoding = dice.choice(("utf-16-le", "utf-16-be", "utf-16", "utf-32", "cp1254", "cp1252", "cp949", "mac-turkish"))
    stored = data.decode().encode(encoding, "replace")
    # Letters that an encoding lacks became question marks: that is text like any other.
    return Damage(name, stored, encoding, stored.decode(encoding) == data.decode())
