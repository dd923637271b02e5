"""Names, messages and docstrings of the package are in the words of the field, not in words of our own."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "textmill"
PRIVATE = frozenset(
    "anew apart asked house kin mend mended mends onto parted peer peers room rooms said told wholeness".split()
)
"""Words that say nothing to somebody who has not read the code before; docs/glossary.md has the ones to take."""
VAGUE = frozenset({"copies", "through", "whole"})
"""Ordinary English in a sentence; as the name of a function, a class or an attribute they say nothing."""
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
ALLOWED = {
    "commands": 2, "config": 40, "engines": 267, "kernels": 35, "models": 27,
    "training": 7, "verification": 43,
}  # fmt: skip
"""How often they still occur, by package; a number may only fall."""


def parts_of(name: str) -> list[str]:
    """The words of an identifier or a text, in small letters."""
    return [part.lower() for part in PARTS.findall(name)]


def names_in(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Identifiers: line, name, and whether it is given to a function, a class or an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name, True
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr, isinstance(node.ctx, ast.Store)
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id, False
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, False
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.value.lineno, node.arg, False


def found_in(path: Path) -> list[str]:
    """Every private word in a file, with its place."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        lines = enumerate(text.splitlines(), 1)
        return [f"{path.name}:{number}: {part}" for number, line in lines for part in parts_of(line) if part in PRIVATE]
    tree = ast.parse(text)
    found = [
        f"{path.name}:{line}: {part} in {name}"
        for line, name, given in names_in(tree)
        for part in parts_of(name)
        if part in PRIVATE or (given and part in VAGUE and parts_of(name) == [part])
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = [part for part in re.findall(r"[A-Za-z]+", node.value) if part.lower() in PRIVATE]
            found += [f"{path.name}:{node.lineno}: {word!r} in a text" for word in words]
    return found


def test_no_private_words() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".html", ".js", ".css")):
        inside = path.relative_to(PACKAGE).parts
        found.setdefault(inside[0] if len(inside) > 1 else "textmill", []).extend(found_in(path))
    counts = Counter({name: len(places) for name, places in found.items() if places})
    more = {name: found[name] for name in counts if counts[name] > ALLOWED.get(name, 0)}
    assert not more, "\n".join(place for places in more.values() for place in places)


def test_the_search_finds_what_it_is_for(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""What is told."""\n\nclass Whole:\n    def make_room(self) -> None:\n        self.askedFor = whole\n'
    )
    assert found_in(path) == [
        "module.py:3: whole in Whole",
        "module.py:4: room in make_room",
        "module.py:5: asked in askedFor",
        "module.py:1: 'told' in a text",
    ]
