"""The likeliest token of each text in two small kernels: scores are read once, as they are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS, PARTS, BLOCK = 1024, 256, 512
"""Programs that share the scores of all texts, at most so many those of one, and scores that one looks at in one go."""


@triton.jit  # type: ignore[untyped-decorator]
def _search(scores, barred, tops, ids, spoilt, stride, vocab, each, K: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    row, part = tl.program_id(0), tl.program_id(1)
    best, where = tl.full((B,), float("-inf"), tl.float32), tl.full((B,), 2147483647, tl.int32)
    bad = tl.zeros((B,), tl.int32)
    for start in range(part * each, tl.minimum(vocab, (part + 1) * each), B):
        columns = start + tl.arange(0, B)
        inside = columns < tl.minimum(vocab, (part + 1) * each)
        values = tl.load(scores + row.to(tl.int64) * stride + columns, mask=inside, other=0.0).to(tl.float32)
        bad |= tl.where(tl.abs(values) < float("inf"), 0, 1)
        allowed = inside
        for number in tl.static_range(K):
            allowed &= columns != tl.load(barred + row * K + number).to(tl.int32)
        better = allowed & ((values > best) | (where == 2147483647))
        best, where = tl.where(better, values, best), tl.where(better, columns, where)
    top = tl.max(best, 0)
    at = row * tl.num_programs(1) + part
    tl.store(tops + at, top)
    tl.store(ids + at, tl.min(tl.where(best == top, where, 2147483647), 0))
    tl.store(spoilt + at, tl.max(bad, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _settle(tops, ids, spoilt, out, P: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = row * P + tl.arange(0, P)
    found = tl.load(tops + at)
    first = tl.min(tl.where(found == tl.max(found, 0), tl.load(ids + at), 2147483647), 0)
    tl.store(out + row, tl.where(tl.max(tl.load(spoilt + at), 0) == 0, first, -1).to(tl.int64))


def likeliest(scores_NV: Tensor, barred_NK: Tensor | None) -> Tensor:
    """Each row's first greatest score, but for those of the ids barred to it (-1: none); -1 where a score is no finite number."""
    rows, vocab = scores_NV.shape
    assert scores_NV.stride(1) == 1
    parts = min(PARTS, triton.next_power_of_2(max(1, PROGRAMS // rows) + 1) // 2)
    tops_NP = scores_NV.new_empty(rows, parts, dtype=torch.float32)
    ids_NP, spoilt_NP = (scores_NV.new_empty(rows, parts, dtype=torch.int32) for _ in range(2))
    out_N = scores_NV.new_empty(rows, dtype=torch.long)
    count = 0 if barred_NK is None else barred_NK.shape[1]
    _search[(rows, parts)](
        scores_NV, scores_NV if barred_NK is None else barred_NK, tops_NP, ids_NP, spoilt_NP, scores_NV.stride(0), vocab,
        triton.cdiv(vocab, parts), K=count, B=BLOCK, num_warps=4,
    )  # fmt: skip
    _settle[(rows,)](tops_NP, ids_NP, spoilt_NP, out_N, P=parts, num_warps=1)
    return out_N
