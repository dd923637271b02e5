"""Plant random mistakes in a package and count those that its tests catch.

    python bench/mutations.py engines 30 [SEED] [-- PYTEST ARGUMENTS]

Each mistake is made in a copy of the repository: a comparison or an arithmetic operator is replaced, a constant
changed, two arguments swapped, a condition negated or a statement removed. The tests of tests/PACKAGE run until the
first failure. Before tests are removed from a package, run it with --deselect for each of them: what the remaining
tests catch is also caught with them. Survivors are printed with the line that was changed.
"""

from __future__ import annotations

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
SECONDS = 600
"""A mistake that makes a test hang counts as caught."""


def mistakes(tree: ast.Module) -> Iterator[tuple[int, Callable[[], None]]]:
    """The line and the edit of every mistake that can be made in this tree."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Compare):
            yield line, partial(node.ops.__setitem__, 0, OPERATORS[type(node.ops[0])]())
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS and not _is_union(node):
            yield line, partial(setattr, node, "op", OPERATORS[type(node.op)]())
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            changed = not node.value if isinstance(node.value, bool) else node.value + 1
            yield line, partial(setattr, node, "value", changed)
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            yield line, partial(node.args.reverse)
        elif isinstance(node, ast.If | ast.IfExp):
            negated = ast.UnaryOp(ast.Not(), node.test)
            yield line, partial(setattr, node, "test", negated)
        if isinstance(node, ast.Module | ast.ClassDef):
            continue  # docstrings, imports and declared fields
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for place, statement in enumerate(block if isinstance(block, list) else []):
                if isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr | ast.Raise) and not _is_text(statement):
                    yield statement.lineno, partial(block.__setitem__, place, ast.Pass())  # type: ignore[union-attr]


def _is_union(node: ast.BinOp | ast.BoolOp) -> bool:
    """Whether it joins strings, where - and / are errors that any test finds."""
    return isinstance(node, ast.BinOp) and any(isinstance(side, ast.JoinedStr) for side in (node.left, node.right))


def _is_text(statement: ast.stmt) -> bool:
    """Whether it is a docstring."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def plant(path: Path, dice: random.Random) -> int:
    """Make one random mistake in a file; return its line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    candidates = list(mistakes(tree))
    line, edit = dice.choice(candidates)
    edit()
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
    return line


def main(package: str, count: int, seed: int, arguments: list[str]) -> None:
    """Plant `count` mistakes, one after the other, and print what became of each."""
    dice = random.Random(f"{package} {seed}")
    caught = 0
    with tempfile.TemporaryDirectory() as temporary:
        clone = Path(temporary) / "textmill"
        shutil.copytree(
            ROOT, clone, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__", ".mypy_cache", "site")
        )
        (clone / ".venv").symlink_to((ROOT / ".venv").resolve())
        files = sorted((clone / "textmill" / package).rglob("*.py"))
        sizes = [path.stat().st_size for path in files]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not long", "-p", "no:cacheprovider"]
        command += [f"tests/{package}", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
        for number in range(1, count + 1):
            (path,) = dice.choices(files, sizes)
            original = path.read_text(encoding="utf-8")
            line = plant(path, dice)
            try:
                done = subprocess.run(
                    command, cwd=clone, env=environment, capture_output=True, text=True, timeout=SECONDS
                )
                failed = [text.split()[1] for text in done.stdout.splitlines() if text.startswith(("FAILED", "ERROR"))]
                result = f"caught by {failed[0]}" if failed else f"exit code {done.returncode}"
                survived = done.returncode == 0
            except subprocess.TimeoutExpired:
                result, survived = "caught: hangs", False
            path.write_text(original, encoding="utf-8")
            caught += not survived
            place = f"{path.relative_to(clone)}:{line}"
            print(f"{number:3} {place}: {'SURVIVED' if survived else result}", flush=True)
            if survived:
                print(f"      {original.splitlines()[line - 1].strip()}", flush=True)
    print(f"{caught} of {count} caught")


if __name__ == "__main__":
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    name, number, *rest = given[:split]
    main(name, int(number), int(rest[0]) if rest else 0, given[split + 1 :])
