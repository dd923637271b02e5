"""The pages that follow from the code are in step with it, and name keys that exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.config.test_other_names import OPTIONS
from tests.conftest import ROOT
from tests.project.test_documented_commands import PAGES, commands_of
from textmill.commands.table import COMMANDS
from textmill.config.keys import all_fields, section_types

COMING_FROM = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
RENEW = "run: python docs/generate.py"
FLAGS = {"--force", "--help", "--name", "--json"}
"""Options that are flags of textmill, or of docker."""


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_in_step(generator: ModuleType) -> None:
    for path, text in generator.pages().items():
        assert path.is_file(), f"{path.name} is missing; {RENEW}"
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is out of date; {RENEW}"
    assert {path.stem for path in (ROOT / "docs" / "commands").iterdir()} == set(COMMANDS)


def test_the_reference_has_every_key() -> None:
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE)
    keys = {key for key, field in all_fields() if not section_types(field.annotation)}
    assert keys <= set(listed)
    assert set(listed) - keys <= {"model.shape"}


def test_examples_of_commands_are_run_elsewhere() -> None:
    """So tests/project/test_documented_commands.py does not run the pages of commands themselves."""
    elsewhere = {line for page in PAGES for line in commands_of(page)}
    for page in (ROOT / "docs" / "commands").glob("*.md"):
        lines = commands_of(page)
        assert lines, f"{page.name}: no example; write one on a page of its topic"
        assert set(lines) <= elsewhere, page.name


def test_every_option_of_other_tools_is_on_a_page() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in COMING_FROM)
    cells = re.findall(r"^\| (`[^|]*`) \|", pages, re.MULTILINE)
    rows = set(re.findall(r"`([\w-]+)`", " ".join(cells)))
    assert {option.removeprefix("--") for option in OPTIONS if option not in FLAGS} <= rows


@pytest.mark.parametrize("page", COMING_FROM, ids=lambda page: page.stem)
def test_pages_for_other_tools_name_keys_that_exist(page: Path) -> None:
    known = {key for key, _ in all_fields()}
    sections = {key.partition(".")[0] for key in known if "." in key}
    words = re.findall(r"[\w.]+", " ".join(re.findall(r"`([^`]+)`", page.read_text(encoding="utf-8"))))
    named = [word for word in words if word.partition(".")[0] in sections and "." in word.rstrip(".")]
    wrong = {key for key in named if key not in known and not key.endswith((".yaml", ".md", ".json", ".py", ".bin"))}
    assert not wrong


def test_the_site_has_every_page() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = re.findall(r"[\w/-]+\.md", str(config["nav"]))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(named) == sorted(pages)
