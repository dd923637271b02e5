"""Existing stores are split as Megatron splits them, and blended."""

from __future__ import annotations

import pytest

from textmill.config import CorpusConfig
from textmill.tokens.existing_tokens import split_borders


@pytest.mark.parametrize(
    ("shares", "count", "edges"),
    [
        ("969,30,1", 1000, [0, 969, 999, 1000]),
        ("969,30,1", 10, [0, 10, 10, 10]),
        ("969,30,1", 79000, [0, 76551, 78921, 79000]),
        ("949,50,1", 100, [0, 95, 100, 100]),
        ("0.7/0.2/0.1", 33, [0, 23, 30, 33]),
        ("1,1,1", 10, [0, 4, 7, 10]),
        ("1,1,1", 11, [0, 3, 7, 11]),
        ("1,1,1", 8, [0, 2, 5, 8]),
        ("95,5", 7, [0, 7, 7, 7]),
    ],
)
def test_published_borders(shares: str, count: int, edges: list[int]) -> None:
    assert split_borders(CorpusConfig(split=shares).split, count) == edges  # type: ignore[arg-type]
