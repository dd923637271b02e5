"""Text chunks: nothing is lost or sent twice, and a stream sends at most one chunk per interval."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from textmill.generation.requests import Done, TextChunk, Token
from textmill.generation.worker import ChunkCollector

TOKENS = [
    Token(number, text, -float(number), ((7, -0.5),)) for number, text in enumerate(["a", "", "b", "c", "", "", "d"])
]
END = Done("length", 7, "e")


@pytest.mark.parametrize("logprobs", [False, True])
def test_text_without_streaming_is_one_chunk(logprobs: bool) -> None:
    parts: list[TextChunk] = []
    collector = ChunkCollector(parts.append, logprobs, streamed=False)
    for event in (*TOKENS, END):
        collector(event)
    assert parts == [
        TextChunk("abcde", [(token.id, token.logprob, token.top) for token in TOKENS] if logprobs else [], END)
    ]


def test_stream_sends_a_chunk_at_most_every_20_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, parts = SimpleNamespace(now=0.0), list[TextChunk]()
    monkeypatch.setattr("textmill.generation.worker.time", SimpleNamespace(monotonic=lambda: clock.now))
    collector = ChunkCollector(parts.append, False, streamed=True)
    for event, clock.now in zip((*TOKENS, END), [1.001, 1.005, 1.01, 1.021, 1.025, 1.061, 1.07, 1.071], strict=True):
        collector(event)
    assert [(part.text, part.done) for part in parts] == [("a", None), ("bc", None), ("d", None), ("e", END)]
