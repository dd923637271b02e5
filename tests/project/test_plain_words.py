"""Names, messages and docstrings of package, tests and benchmarks use the terms of the field, not private words."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "textmill"
PRIVATE = frozenset(
    "anew apart asked house kin mend mended mends onto parted peer peers room rooms said told wholeness".split()
)
"""Words that a reader new to the code cannot understand; docs/glossary.md has the terms to use."""
VAGUE = frozenset({"copies", "through", "whole"})
"""Words that are fine in a sentence, but not as the name of a function, class or attribute."""
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
SUSPECT = re.compile(rf"{'|'.join(PRIVATE)}|(?:def |class |\.)_*(?:{'|'.join(VAGUE)})", re.IGNORECASE)
"""What a file has before it is worth parsing."""
ALLOWED = {"tests/engines": 1}
"""How often private words still occur, by folder; a number may only fall."""


@cache
def parts_of(name: str) -> list[str]:
    """Split an identifier or a text into words, in lower case."""
    return [part.lower() for part in PARTS.findall(name)]


def names_in(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Yield line and name of identifiers, and whether a function, class or attribute is defined there."""
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


def texts_in(tree: ast.AST, docstrings_only: bool) -> Iterator[tuple[int, str]]:
    """Yield line and value of string constants; of tests only the docstrings, because the others may be test data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not docstrings_only:
            yield node.lineno, node.value
        elif docstrings_only and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, str(node.value.value)


def found_in(path: Path, *, docstrings_only: bool = False) -> list[str]:
    """Return every private word in a file, with its place."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        lines = enumerate(text.splitlines(), 1)
        return [f"{path.name}:{number}: {part}" for number, line in lines for part in parts_of(line) if part in PRIVATE]
    if not SUSPECT.search(text):
        return []
    tree = ast.parse(text)
    found = [
        f"{path.name}:{line}: {part} in {name}"
        for line, name, given in names_in(tree)
        for part in parts_of(name)
        if part in PRIVATE or (given and part in VAGUE and parts_of(name) == [part])
    ]
    for line, value in texts_in(tree, docstrings_only):
        words = [part for part in re.findall(r"[A-Za-z]+", value) if part.lower() in PRIVATE]
        found += [f"{path.name}:{line}: {word!r} in a text" for word in words]
    return found


def check(found: dict[str, list[str]]) -> None:
    """Fail with the places of the folders that have more private words than allowed."""
    counts = Counter({name: len(places) for name, places in found.items() if places})
    more = {name: found[name] for name in counts if counts[name] > ALLOWED.get(name, 0)}
    assert not more, "\n".join(f"{name}/{place}" for name, places in more.items() for place in places)


def test_package_has_no_private_words() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".html", ".js", ".css")):
        inside = path.relative_to(PACKAGE).parts
        found.setdefault(inside[0] if len(inside) > 1 else "textmill", []).extend(found_in(path))
    check(found)


def test_tests_and_benchmarks_have_no_private_words() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").glob("*.py")]):
        if path != Path(__file__).resolve():
            folder = path.parent.relative_to(ROOT).as_posix()
            found.setdefault(folder, []).extend(found_in(path, docstrings_only=folder != "bench"))
    check(found)


def test_search_finds_private_words(tmp_path: Path) -> None:
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
