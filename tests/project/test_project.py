"""The project around the package: versions, pins, the README's commands, the recipes."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import textmill
from textmill.cli import main

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PIN = re.compile(r"^([a-z0-9-]+)==([0-9][0-9a-z.]*)$")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [PIN.match(line) for line in lines if line.strip() and not line.startswith("#")]
    assert all(found), "constraints.txt: every line is name==version"
    return {match[1]: match[2] for match in found if match}


def needs() -> list[Requirement]:
    project = PROJECT["project"]
    lists = [project["dependencies"], PROJECT["build-system"]["requires"], *project["optional-dependencies"].values()]
    return [Requirement(line) for lines in lists for line in lines]


def test_versions_agree() -> None:
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "textmill/__init__.py"
    assert metadata.version("textmill") == textmill.__version__, "run make again: the installed version is an older one"
    assert f"## {textmill.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_dependency_is_pinned_within_its_range() -> None:
    pinned = pins()
    for need in needs():
        name = canonicalize_name(need.name)
        assert name in pinned, f"constraints.txt: no pin for {name}"
        assert need.specifier.contains(pinned[name]), (
            f"constraints.txt: {name}=={pinned[name]} is outside '{need.specifier}'"
        )


def test_pins_stay_below_the_limits_of_other_packages() -> None:
    pinned = pins()
    assert pinned["torch"] == "2.13.0"
    assert int(pinned["pyarrow"].partition(".")[0]) < 26
    assert int(pinned["protobuf"].partition(".")[0]) < 7


def readme_commands() -> list[str]:
    """Return the lines of the README's sh blocks that call textmill or make."""
    blocks = re.findall(
        r"^```(?:sh|bash|console)\n(.*?)^```",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(("textmill ", "make "))]


def test_readme_commands_exist() -> None:
    commands = readme_commands()
    assert any(line.startswith("textmill ") for line in commands)
    assert "make demo" in {line.partition("#")[0].strip() for line in commands}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    subcommands = set()
    for line in commands:
        command, word = line.split()[:2]
        if command == "make":
            assert word in targets, f"README.md: '{line}': the Makefile has no target {word}"
        elif not word.startswith("-"):
            subcommands.add(word)
    for subcommand in sorted(subcommands):
        assert main([subcommand, "--help"]) == 0, f"README.md: textmill {subcommand}"


PRETEND_PYTHON = """#!/bin/sh
case "$*" in
  -m\\ venv\\ *) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  -m\\ pip\\ install*) echo "Collecting it"; echo "  Downloading it"; echo "Looking in links"; test ! -e broken ;;
esac
"""
"""A Python whose pip prints what it does, and fails if there is a file `broken`."""


def test_installing_shows_progress(tmp_path: Path) -> None:
    """A terminal shows what pip does now; a file has one line per group with its size; errors are shown in full."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "textmill").mkdir()
    (tmp_path / "textmill" / "__init__.py").touch()
    python = tmp_path / "python"
    python.write_text(PRETEND_PYTHON, encoding="utf-8")
    python.chmod(0o755)
    command = ["make", "--no-print-directory", "-C", str(tmp_path), f"PYTHON={python}", ".venv/core"]
    terminal, its_end = pty.openpty()
    done = subprocess.run(command, stdout=its_end, stderr=subprocess.PIPE, text=True)
    os.close(its_end)
    shown = b""
    with open(terminal, "rb", 0) as stream, suppress(OSError):  # the end of a terminal is an error
        while part := stream.read(1000):
            shown += part
    assert done.returncode == 0, done.stderr
    assert shown.count(b"Downloading it") == 2, "once for torch, once for textmill"
    assert b"Looking in links" not in shown
    (tmp_path / "broken").touch()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".venv" / "core").unlink()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert re.fullmatch(r"installing torch .* GB, once\)\n", done.stdout)
    assert "Collecting it\nDownloading it\nLooking in links" in done.stderr


def test_recipes_exist() -> None:
    assert (ROOT / "recipes" / "quickstart.sh").is_file()
    assert {"quickstart.yaml", "own-text.yaml"} <= {path.name for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipe_is_a_valid_config(path: Path) -> None:
    from textmill.config.load import build_config, read_yaml, resolve_paths

    tree, lines = read_yaml(path)
    config = build_config(resolve_paths(tree, path.parent), file=path, lines=lines)
    assert config.corpus.sources, "a recipe names its texts"


def test_ci_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, ".ci/run is executable"
    assert {"make test", "make test-long"} <= set(script.read_text(encoding="utf-8").splitlines())


def test_no_script_has_the_name_of_a_standard_module() -> None:
    """Python searches the script's folder first: bench/tokenize.py would hide the module `tokenize`."""
    assert {path.stem for path in (ROOT / "bench").glob("*.py")}.isdisjoint(sys.stdlib_module_names)
