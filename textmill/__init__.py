"""textmill: from raw text in any language to a trained, evaluated and served language model."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from textmill.commands.table import COMMANDS

__version__ = "0.1.0"

# Every command is a function here, named in the table of commands. Each is imported when it is first used, so that
# `import textmill` is fast.
_FUNCTIONS = {row.python_name: row for row in COMMANDS.values()}
_OTHERS = {
    "RunConfig": "textmill.config",
    "TextmillError": "textmill.errors",
    "open_corpus": "textmill.corpus.shards",
    "open_model": "textmill.checkpoints.folders",
}


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name].load()
    if name in _OTHERS:
        return getattr(import_module(_OTHERS[name]), name)
    raise AttributeError(f"module 'textmill' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FUNCTIONS, *_OTHERS])
