"""Bytes and words of a column of texts, counted in its buffers, without making a string of any."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LONG_SPACES = [sign.encode() for sign in "\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
               "\u2028\u2029\u202f\u205f\u3000"]  # fmt: skip
"""White space of two and three bytes in UTF-8."""


def buffers_of(column: Any) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """The UTF-8 of an Arrow string column, and where each text begins in it, and the last one ends."""
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4)
    octets = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return octets[bounds[0] : bounds[-1]], bounds - bounds[0]


def count_words(octets: NDArray[np.uint8], bounds: NDArray[np.int32]) -> int:
    """What stands between white space, in all texts: the sum of len(text.split())."""
    spaces = octets - np.uint8(9) <= 23  # tab to space; bytes below 9 come round to the top
    controls = octets - np.uint8(14) <= 13  # between them, signs that are none
    if controls.any():
        spaces &= ~controls
    if len(octets) and int(octets.max()) >= 0x80:
        _mark_long_spaces(octets, spaces)
    # A word begins where no white space follows white space, or where a text begins.
    begins = int(np.count_nonzero(spaces[:-1] > spaces[1:]))
    firsts = bounds[:-1][np.diff(bounds) > 0]
    inner = firsts[firsts > 0]
    return begins + int(np.count_nonzero(~spaces[firsts])) - int(np.count_nonzero(spaces[inner - 1] & ~spaces[inner]))


def _mark_long_spaces(octets: NDArray[np.uint8], spaces: NDArray[np.bool_]) -> None:
    places = np.flatnonzero((octets == 0xC2) | (octets - np.uint8(0xE1) <= 2))
    for lead in (0xC2, 0xE1, 0xE2, 0xE3):
        here = places[octets[places] == lead]
        follow = octets[here + 1].astype(np.uint16)
        if lead != 0xC2:  # three bytes in all
            follow = follow * np.uint16(256) + octets[here + 2]
        wanted = [int.from_bytes(sign[1:], "big") for sign in LONG_SPACES if sign[0] == lead]
        found = here[np.isin(follow, np.array(wanted, np.uint16))]
        for step in range(2 if lead == 0xC2 else 3):
            spaces[found + step] = True
