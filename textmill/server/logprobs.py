"""Log-probabilities in the two formats that OpenAI's clients read."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from textmill.generation.text_chunks import TokenLogprob
from textmill.server.token_text import TokenTexts

MIN_LOGPROB = -9999.0
"""Reported for an impossible token, because JSON has no infinity."""


class TextOffsets:
    """Computes where in the text each token starts, in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def next(self, raw: bytes) -> int:
        """Return the offset of the next token, which has these bytes."""
        offset = self._characters
        self._characters += len(self._decoder.decode(raw))
        return offset


def completion_logprobs(
    texts: TokenTexts, logprobs: Iterable[TokenLogprob], count: int, offsets: TextOffsets
) -> dict[str, list[Any]]:
    """Return the format of /v1/completions: four lists with one item per token."""
    fields: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for id_, logprob, top in logprobs:
        fields["tokens"].append(texts.get_text(id_))
        fields["token_logprobs"].append(None if logprob is None else _finite(logprob))
        fields["top_logprobs"].append(None if logprob is None else _by_text(texts, [*top[:count], (id_, logprob)]))
        fields["text_offset"].append(offsets.next(texts.get_bytes(id_)))
    return fields


def _by_text(texts: TokenTexts, logprobs: Iterable[tuple[int, float]]) -> dict[str, float]:
    """Return log-probabilities by the token's text; if two tokens have the same text, the second by its id."""
    found: dict[str, float] = {}
    for id_, logprob in dict(logprobs).items():
        text = texts.get_text(id_)
        found[f"token_id:{id_}" if text in found else text] = _finite(logprob)
    return found


def chat_logprobs(texts: TokenTexts, logprobs: Iterable[TokenLogprob], count: int) -> dict[str, Any]:
    """Return the format of /v1/chat/completions: a list with one object per token."""
    content = []
    for id_, logprob, top in logprobs:
        most_likely = [_chat_token(texts, other, value) for other, value in top[:count]]
        token = _chat_token(texts, id_, MIN_LOGPROB if logprob is None else logprob)
        content.append({**token, "top_logprobs": most_likely})
    return {"content": content, "refusal": None}


def _chat_token(texts: TokenTexts, id_: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.get_text(id_), "logprob": _finite(logprob), "bytes": list(texts.get_bytes(id_))}


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
