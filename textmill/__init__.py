"""textmill: from raw text in any language to a trained, evaluated and served language model."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

from textmill.commands.table import COMMANDS, Command

if TYPE_CHECKING:  # for the user's type checker and editor; `__getattr__` has them
    from textmill.commands.python import Run as Run
    from textmill.commands.python import open as open
    from textmill.commands.python import open_training as open_training
    from textmill.config import RunConfig as RunConfig
    from textmill.errors import TextmillError as TextmillError

__version__ = "0.1.0"

# Every command is a function here, named in the table of commands. Each is imported when it is first used, so that
# `import textmill` is fast.
_FUNCTIONS = {row.python_name: row for row in COMMANDS.values()}
_OTHERS = {
    "RunConfig": "textmill.config",
    "TextmillError": "textmill.errors",
    "open": "textmill.commands.python",
    "open_corpus": "textmill.corpus.shards",
    "open_model": "textmill.checkpoints.folders",
    "open_training": "textmill.commands.python",
}


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return _taking_where(_FUNCTIONS[name])
    if name in _OTHERS:
        return getattr(import_module(_OTHERS[name]), name)
    raise AttributeError(f"module 'textmill' has no attribute '{name}'")


def _taking_where(row: Command) -> Callable[..., Any]:
    """The function of a command; instead of a RunConfig it takes WHERE too, with `settings` such as
    {"train.steps": 9}."""
    function = row.load()
    if row.opens is None:
        return function

    @wraps(function)
    def call(where: Any, *arguments: Any, settings: Any = (), **options: Any) -> Any:
        open_config = import_module("textmill.where").open_config
        return function(open_config(where, settings), *arguments, **options)

    return call


def __dir__() -> list[str]:
    return sorted([*globals(), *_FUNCTIONS, *_OTHERS])
