"""Counts the bytes and words of an Arrow column of texts in its buffers, without creating Python strings."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LONG_SPACES = [
    space.encode()
    for space in "\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008"
    "\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
]
"""White-space characters that take two or three bytes in UTF-8."""


def buffers_of(column: Any) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """The UTF-8 bytes of an Arrow string column, and the offset of each text plus the end of the last one."""
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4)
    octets = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return octets[bounds[0] : bounds[-1]], bounds - bounds[0]


def count_words(octets: NDArray[np.uint8], bounds: NDArray[np.int32]) -> int:
    """Words separated by white space, in all texts: the sum of len(text.split())."""
    spaces = octets - np.uint8(9) <= 23  # tab to space; bytes below 9 wrap around to large numbers
    controls = octets - np.uint8(14) <= 13  # control characters between them that are not white space
    if controls.any():
        spaces &= ~controls
    if len(octets) and int(octets.max()) >= 0x80:
        _mark_long_spaces(octets, spaces)
    # A word starts after white space, or at the start of a text.
    starts = int(np.count_nonzero(spaces[:-1] > spaces[1:]))
    firsts = bounds[:-1][np.diff(bounds) > 0]
    inner = firsts[firsts > 0]
    return starts + int(np.count_nonzero(~spaces[firsts])) - int(np.count_nonzero(spaces[inner - 1] & ~spaces[inner]))


def _mark_long_spaces(octets: NDArray[np.uint8], spaces: NDArray[np.bool_]) -> None:
    leads = np.flatnonzero((octets == 0xC2) | (octets - np.uint8(0xE1) <= 2))
    for lead in (0xC2, 0xE1, 0xE2, 0xE3):
        here = leads[octets[leads] == lead]
        follow = octets[here + 1].astype(np.uint16)
        if lead != 0xC2:  # three bytes long
            follow = follow * np.uint16(256) + octets[here + 2]
        tails = [int.from_bytes(space[1:], "big") for space in LONG_SPACES if space[0] == lead]
        found = here[np.isin(follow, np.array(tails, np.uint16))]
        for step in range(2 if lead == 0xC2 else 3):
            spaces[found + step] = True
