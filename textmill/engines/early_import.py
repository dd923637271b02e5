"""Import torch in a thread while a command waits for its worker processes: it takes seconds, on a GPU up to 15."""

from __future__ import annotations

import threading
from contextlib import suppress
from importlib import import_module

COMPILER = "torch._inductor.compile_fx"


def import_torch_meanwhile() -> None:
    """Start the imports; whoever needs torch before they are finished waits for them."""
    threading.Thread(target=_import_torch, name="import torch").start()


def _import_torch() -> None:
    with suppress(Exception):  # whoever needs it next gets the error
        cuda = import_module("torch").cuda
        if cuda.is_available():
            cuda.init()
            import_module(COMPILER)
