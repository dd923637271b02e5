"""Rules of the codebase: imports, docstrings, and text that must not appear."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "textmill"
MODULES = sorted(PACKAGE.rglob("*.py"))
TEXTS = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".sh", ".cfg", ""}
NOT_AT_HELP = ("torch", "pydantic", "numpy", "rich", "yaml", "jax", "transformers", "tokenizers", "pyarrow")


@cache
def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    return [(path, node) for path in MODULES for node in ast.walk(tree_of(path))]


@pytest.fixture(scope="module", autouse=True)
def _forget_trees() -> Iterator[None]:
    """A million objects would make every later collection of garbage slow."""
    yield
    tree_of.cache_clear()
    nodes.cache_clear()


def written_files() -> list[Path]:
    """Return every text file of the project, without build results and shipped corpora."""
    folders = [PACKAGE, ROOT / "tests", ROOT / "docs", ROOT / "recipes", ROOT / "bench", ROOT / ".ci"]
    files = (
        [path for folder in folders for path in folder.rglob("*")]
        + list(ROOT.glob("*"))
        + list(ROOT.glob(".gitignore"))
    )
    return [
        path
        for path in files
        if path.is_file() and path.suffix in TEXTS and path.parent.name != "corpora" and path.name != ".git"
    ]


def test_every_file_has_a_docstring() -> None:
    for path in MODULES:
        docstring = ast.get_docstring(tree_of(path))
        assert docstring, f"{name_of(path)}: no docstring; one sentence on why the module exists"
        assert "TBD" not in docstring, name_of(path)


@pytest.mark.parametrize("package", ["engines", "runners", "models", "track"])
def test_each_kind_is_turned_into_a_module_name_in_one_place(package: str) -> None:
    places: dict[str, list[str]] = {}
    for path, node in nodes():
        if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            name = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
            if name.startswith(f"textmill.{package}."):
                places.setdefault(name, []).append(f"{name_of(path)}:{node.lineno}")
    # A family has several files (family.py, a net for each framework), engines also have optimizers; each kind is
    # imported in one place.
    wanted = {"textmill.models.*.family"} if package == "models" else {f"textmill.{package}.on_*"}
    assert wanted <= set(places)
    assert package == "models" or len(places) == (2 if package == "engines" else 1)
    assert all(len(lines) == 1 for lines in places.values()), places


def _is_kind(node: ast.AST) -> bool:
    """True for `engine.kind`, `runner.kind`, `model.family`: only the code that finds the module may read these."""
    if (
        not isinstance(node, ast.Attribute)
        or (owner := getattr(node.value, "attr", getattr(node.value, "id", None))) is None
    ):
        return False
    return (node.attr == "kind" and owner in ("engine", "runner")) or (node.attr == "family" and owner == "model")


def test_nothing_branches_on_a_kind() -> None:
    for path, node in nodes():
        compared: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            compared = [node.subject]
        assert not any(map(_is_kind, compared)), f"{name_of(path)}:{getattr(node, 'lineno', 0)} branches on a kind"


def test_kinds_are_read_where_they_are_found() -> None:
    reads = {name_of(path) for path, node in nodes() if _is_kind(node) and getattr(node, "attr", None) == "kind"}
    reported = {"textmill/commands/doctor.py"}
    found = {"textmill/engines/__init__.py", "textmill/engines/memory.py", "textmill/runners/__init__.py"}
    assert reads <= found | reported


def test_no_pickle() -> None:
    """Pickled files of others are read in two modules, which run no code from them; only formats use that of torch."""
    for path, node in nodes():
        where = f"{name_of(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and node.module == "textmill.conversion.torch_files":
            assert name_of(path).startswith("textmill/conversion/"), where
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if name_of(path) in ("textmill/conversion/torch_files.py", "textmill/tokens/array_rows.py"):
            if is_call and ast.unparse(node.func) == "torch.load":
                assert "pickle_module" in [keyword.arg for keyword in node.keywords], where
            elif is_call:
                assert not ast.unparse(node.func).startswith("pickle."), where
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not {name.partition(".")[0] for name in names} & {
                "pickle",
                "cloudpickle",
                "dill",
                "shelve",
                "marshal",
            }, where
        if isinstance(node, ast.Attribute) and node.attr in ("load", "save") and isinstance(node.value, ast.Name):
            assert node.value.id != "torch", f"{where}: torch.{node.attr} is pickle"
        assert not (isinstance(node, ast.keyword) and node.arg == "allow_pickle"), where


HELP = """
import sys
sys.argv = ["textmill", "--help"]
from textmill.cli import main
try:
    code = main()
except SystemExit as stop:
    code = stop.code
print("LOADED", *[name for name in sys.modules if "." not in name])
sys.exit(code)
"""


def test_help_loads_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text, _, loaded = done.stdout.rpartition("LOADED")
    assert "textmill" in text
    assert not set(loaded.split()) & set(NOT_AT_HELP)


MACHINE_PATH = re.compile(r"(?<![\w.~*}])/(home|root|Users|work|mnt|srv|opt)/\w")
REGISTRY = re.compile(r"pypi[.]|pythonhosted[.]|download[.]pytorch[.]|conda[.]anaconda[.]", re.IGNORECASE)


@pytest.mark.parametrize(("rule", "pattern"), [("a machine's own path", MACHINE_PATH), ("a registry's host", REGISTRY)])
def test_never_written(rule: str, pattern: re.Pattern[str]) -> None:
    for path in written_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert not pattern.search(line), f"{name_of(path)}:{number}: {rule}: {line.strip()}"
