"""textmill: raw text in any language to a trained, measured and served language model."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# The verbs and the config by name; each is loaded when it is first used, so that `import textmill` is quick.
_PLACES = {
    "RunConfig": "textmill.config",
    "run": "textmill.commands.run",
    "prepare": "textmill.corpus.prepare",
    "fit_tokenizer": "textmill.tokens.vocabulary.fitting",
    "tokenize": "textmill.tokens.tokenize",
    "train": "textmill.training.loop",
    "evaluate": "textmill.evaluation",
    "generate": "textmill.generation",
    "chat": "textmill.generation.chat",
    "export": "textmill.conversion",
    "merge": "textmill.tokens.merge",
    "open_model": "textmill.checkpoints.folders",
    "check": "textmill.commands.check",
    "show": "textmill.commands.show",
    "open_corpus": "textmill.corpus.reader",
    "TextmillError": "textmill.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'textmill' has no attribute '{name}'")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
