"""Import torch in a thread while a command waits for its worker processes: it takes seconds, on a GPU up to 15."""

from __future__ import annotations

import threading
from contextlib import suppress
from importlib import import_module

COMPILER = "torch._inductor.compile_fx"


def import_torch_meanwhile() -> threading.Thread:
    """Start the imports and return their thread. It must end before another one imports parts of torch: they import
    each other, and two threads that import them in different orders deadlock."""
    thread = threading.Thread(target=_import_torch, name="import torch")
    thread.start()
    return thread


def _import_torch() -> None:
    with suppress(Exception):  # whoever needs it next gets the error
        cuda = import_module("torch").cuda
        if cuda.is_available():
            cuda.init()
            import_module(COMPILER)
