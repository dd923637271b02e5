"""Cut long texts between words, so that counting and sampling do not depend on how long documents are."""

from __future__ import annotations

import re
from collections.abc import Iterator

BOUNDARY = re.compile(r"(?<=\S)(?=[ \n]\S)")
"""Every kind of tokenizer starts a new word before a single space or newline."""
PIECE_CHARACTERS = 1 << 16
"""Documents up to twice this length are sampled whole, longer ones in pieces of about this length."""


def cut_text(text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Pieces of `size` characters or more, each at most twice as long; they are cut between words where possible."""
    start = 0
    while len(text) - start > 2 * size:
        found = BOUNDARY.search(text, start + size, start + 2 * size)
        end = found.start() if found else start + 2 * size
        yield text[start:end]
        start = end
    yield text[start:] if start else text
