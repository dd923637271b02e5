"""Passes chunks from the model's thread to the event loop, with one wake-up for many chunks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from textmill.generation.text_chunks import TextChunk

ReceiveChunk = Callable[[TextChunk], None]


class WakeupQueue:
    """A queue from any thread to the event loop."""

    def __init__(self) -> None:
        self._queue = deque[tuple[ReceiveChunk, TextChunk]]()
        self._scheduled = False

    def put(self, loop: asyncio.AbstractEventLoop, receive: ReceiveChunk, chunk: TextChunk) -> None:
        """Have the loop call `receive` with a chunk; may be called from any thread."""
        # Append first, then test the flag. The loop does it in the reverse order, so no chunk is left behind.
        self._queue.append((receive, chunk))
        if not self._scheduled:
            self._scheduled = True
            try:
                loop.call_soon_threadsafe(self._deliver_all)
            except RuntimeError:
                self._scheduled = False  # the loop is closed; nobody waits for the chunk

    def _deliver_all(self) -> None:
        self._scheduled = False
        while self._queue:
            receive, chunk = self._queue.popleft()
            receive(chunk)
