"""The pages on the architecture name only files, functions, config keys and commands that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from textmill.config import RunConfig
from textmill.config.keys import all_fields

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / name for name in ("architecture.md", "architecture-rules.md")]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
TERMS = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))
LAYOUT = re.findall(r"```\n(textmill/\n.*?)```", TEXT, flags=re.DOTALL)[0]
SECTIONS = "|".join(RunConfig.model_fields)


def layout_paths() -> list[str]:
    """The paths of the layout tree, each under the folder that its indentation puts it in."""
    paths: list[str] = []
    parents: list[tuple[int, str]] = []
    for line in LAYOUT.splitlines():
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        while parents and parents[-1][0] >= indent:
            parents.pop()
        path = "".join(parent for _, parent in parents) + name
        paths.append(path)
        if name.endswith("/"):
            parents.append((indent, name))
            named = re.findall(r"\b[a-z]\w+\.(?:py|sh)\b", line.partition(name)[2])
            paths += [path + file for file in named]
    return paths


def test_the_layout_tree_is_found() -> None:
    assert len(layout_paths()) > 40


@pytest.mark.parametrize("path", layout_paths())
def test_paths_of_the_layout_exist(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_package_is_in_the_layout() -> None:
    packages = {f"textmill/{folder.parent.name}/" for folder in (ROOT / "textmill").glob("*/__init__.py")}
    assert packages <= set(layout_paths())


def test_named_files_exist() -> None:
    files = [term for term in TERMS if re.fullmatch(r"[\w.]+(/[\w.]+)+/?", term) and "NAME" not in term]
    assert files
    missing = [term for term in files if not (ROOT / term).exists() and not term.startswith("./")]
    assert not missing


def test_named_functions_exist() -> None:
    """Those of the table that follows a command through the code: each is defined in the file of its row."""
    rows = re.findall(r"^\|[^|]*\| `(textmill/[\w/]+\.py)` \| (`\w+`(?:, `\w+`)*) \|$", TEXT, flags=re.MULTILINE)
    assert len(rows) > 15
    for file, names in rows:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
        defined |= {
            node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        assert set(re.findall(r"\w+", names)) <= defined, file


def test_files_named_in_docstrings_of_modules_exist() -> None:
    """They are in the folder of the module, in one below it, or named by their path in the package."""
    package, checked = ROOT / "textmill", 0
    for path in sorted(package.rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for name in re.findall(r"(?<![\w./])(?:[a-z][a-z0-9_]*/)*[a-z_][a-z0-9_]*\.py\b", docstring):
            checked += 1
            assert list(path.parent.rglob(name)) or (package / name).exists(), f"{path}: {name}"
    assert checked > 60


def test_named_keys_exist() -> None:
    known = {key for key, _ in all_fields()}
    keys = [term.partition("=")[0] for term in TERMS if re.fullmatch(rf"({SECTIONS})\.[\w.]+(=\w+)?", term)]
    keys = [key for key in keys if not key.endswith(".safetensors")]
    assert len(keys) > 40
    assert sorted(set(keys) - known) == []


def test_named_commands_exist() -> None:
    from textmill.commands.table import COMMANDS

    named = set(re.findall(r"textmill ([a-z][a-z-]+)", " ".join(TERMS)))
    assert named
    assert named <= set(COMMANDS)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
