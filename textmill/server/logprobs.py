"""Log-probabilities of tokens in the two shapes that OpenAI's clients read."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from textmill.generation.text_chunks import TokenLogprob
from textmill.server.token_text import TokenTexts

LEAST = -9999.0
"""What is told for a token that cannot come: JSON has no infinity."""


class Offsets:
    """Where in the text each token begins, in characters."""

    def __init__(self) -> None:
        self._decoder, self._count = codecs.getincrementaldecoder("utf-8")("replace"), 0

    def next(self, raw: bytes) -> int:
        """The place of the next token, which has these bytes."""
        place = self._count
        self._count += len(self._decoder.decode(raw))
        return place


def completion_logprobs(
    pieces: TokenTexts, entries: Iterable[TokenLogprob], asked: int, offsets: Offsets
) -> dict[str, list[Any]]:
    """The lists of /v1/completions: a place in each for every token."""
    told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for id_, logprob, top in entries:
        told["tokens"].append(pieces.text_of(id_))
        told["token_logprobs"].append(None if logprob is None else _finite(logprob))
        told["top_logprobs"].append(None if logprob is None else _by_text(pieces, [*top[:asked], (id_, logprob)]))
        told["text_offset"].append(offsets.next(pieces.bytes_of(id_)))
    return told


def _by_text(pieces: TokenTexts, chances: Iterable[tuple[int, float]]) -> dict[str, float]:
    """Log-probabilities by the token's text; where two tokens have one text, the second is told by its id."""
    told: dict[str, float] = {}
    for id_, chance in dict(chances).items():
        text = pieces.text_of(id_)
        told[f"token_id:{id_}" if text in told else text] = _finite(chance)
    return told


def chat_logprobs(pieces: TokenTexts, entries: Iterable[TokenLogprob], asked: int) -> dict[str, Any]:
    """The list of /v1/chat/completions: an object for every token."""
    content = []
    for id_, logprob, top in entries:
        likeliest = [_chat_token(pieces, other, chance) for other, chance in top[:asked]]
        content.append({**_chat_token(pieces, id_, LEAST if logprob is None else logprob), "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def _chat_token(pieces: TokenTexts, id_: int, logprob: float) -> dict[str, Any]:
    return {"token": pieces.text_of(id_), "logprob": _finite(logprob), "bytes": list(pieces.bytes_of(id_))}


def _finite(number: float) -> float:
    return max(number, LEAST)
