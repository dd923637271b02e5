"""BERT's and Megatron's data rules in plain Python, token by token: the reference of the masked layout."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise


def find_spans(
    documents: list[int], sizes: list[int], target_of: Callable[[int], int], min_sentences: int = 2
) -> list[tuple[int, int, int]]:
    """(first sentence, sentence after the last, target) of each sample, as Megatron's build_mapping.

    `documents` are the first sentences of the documents and the number of all sentences.
    """
    spans = []
    for first, end in pairwise(documents):
        if end - first < min_sentences:
            continue
        start, tokens, count, target = first, 0, 0, target_of(first)
        for sentence in range(first, end):
            tokens, count, remaining = tokens + sizes[sentence], count + 1, end - sentence - 1
            if (tokens >= target and remaining > 1 and count >= min_sentences) or remaining == 0:
                spans.append((start, sentence + 1, target))
                start, tokens, count = sentence + 1, 0, 0
                target = target_of(start) if start < end else 0
    return spans


def truncated_lengths(a: int, b: int, most: int) -> tuple[int, int]:
    """The lengths of two segments after removing one token at a time from the longer one."""
    while a + b > most:
        if a > b:
            a -= 1
        else:
            b -= 1
    return a, b


def full_sentences(documents: list[list[int]], longest: int) -> list[list[int]]:
    """Sentences of one document while they fit; a sentence that is too long is cut. Lengths of the pieces in tokens."""
    spans: list[list[int]] = []
    for sizes in documents:
        current: list[int] = []
        for size in sizes:
            left = size
            if sum(current) + left > longest and current:
                spans.append(current)
                current = []
            while left > longest:
                spans.append([longest])
                left -= longest
            current = [*current, left] if left else current
        if current:
            spans.append(current)
    return spans


def choose_words(words: list[list[int]], order: list[int], predictions: int) -> set[int]:
    """The chosen positions. `words` are lists of positions; a word that does not fit any more is skipped."""
    chosen: set[int] = set()
    for word in order:
        if len(chosen) >= predictions:
            break
        if len(chosen) + len(words[word]) <= predictions:
            chosen.update(words[word])
    return chosen
