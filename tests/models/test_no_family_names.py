"""No weight or module name of a family outside its own package, the converters and the table of other tools' options:
other modules read Weight."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import textmill

PACKAGE = Path(textmill.__file__).parent
NAMES = (
    "wte",
    "wpe",
    "c_attn",
    "c_proj",
    "c_fc",
    "ln_1",
    "ln_2",
    "ln_f",
    "lm_head",
    "transformer.h",
    "fan_in_fan_out=True",
    "word_embeddings",
    "token_type_embeddings",
    "intermediate.dense",
    "seq_relationship",
    "cls.predictions",
    "embed_tokens",
    "q_proj",
    "gate_proj",
    "input_layernorm",
)
OWN = ("models/gpt2/", "models/bert/", "models/llama/", "conversion/", "config/other_names.py")
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if not str(path.relative_to(PACKAGE)).startswith(OWN)]


def words_of(path: Path) -> list[tuple[int, str]]:
    """Every identifier and text of a module, docstrings left out."""
    found: list[tuple[int, str]] = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found.append((node.lineno, node.value))
        elif isinstance(node, ast.Attribute):
            found.append((node.lineno, node.attr))
        elif isinstance(node, ast.Name):
            found.append((node.lineno, node.id))
    return found


def test_modules_are_found() -> None:
    assert len(FILES) > 100
    own = [word for path in (PACKAGE / "models" / "gpt2").glob("*.py") for _, word in words_of(path)]
    assert any(name in word for word in own for name in NAMES), "the search finds them where they are"


def test_no_name_of_a_family() -> None:
    names = re.compile("|".join(map(re.escape, NAMES)))
    files = [path for path in FILES if names.search(path.read_text(encoding="utf-8"))]
    places = [(path.relative_to(PACKAGE), *one) for path in files for one in words_of(path)]
    found = [f"{path}:{line}: {word}" for path, line, word in places if names.search(word)]
    assert not found
