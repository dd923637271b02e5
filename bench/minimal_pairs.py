"""Minimal pairs from held-out sentences by plain rules, and what models that only count tokens choose.

A pair is a sentence of 5 to 30 words as it was written, and the same sentence with one change:

- agreement: the only one of is/are, was/were, has/have, does/do in it becomes the other form;
- article: the only a or an in it becomes the other one; of both rules, each form is changed equally often at most, so
  that a model gains little by choosing the more frequent form;
- order: two neighbouring words change places, both of small letters only, at a place drawn from the seed.

Nobody has read the pairs: a few changed sentences are correct English too.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from textmill.evaluation.tasks.perplexity import Counts

FORMS = {"is": "are", "was": "were", "has": "have", "does": "do"}
FORMS |= {other: form for form, other in FORMS.items()}
ARTICLES = {"a": "an", "an": "a"}
SENTENCE = re.compile(r"[A-Z][A-Za-z ,;'’-]*[.?!]")
"""Plain sentences, without numbers, brackets, quotes or markup."""
WORDS = range(5, 31)
Pair = tuple[str, str]
"""The sentence as it was written, and the changed one."""
Change = Callable[[list[str], Random], "tuple[str, list[str]] | None"]
"""From words to the changed ones and the form that was changed, or None if the rule does not fit."""


def swap_form(forms: dict[str, str]) -> Change:
    """A rule that swaps the only one of these words."""

    def change(words: list[str], _: Random) -> tuple[str, list[str]] | None:
        found = [number for number, word in enumerate(words) if word in forms]
        if len(found) != 1:
            return None
        at = found[0]
        return words[at], [*words[:at], forms[words[at]], *words[at + 1 :]]

    return change


def swap_neighbours(words: list[str], dice: Random) -> tuple[str, list[str]] | None:
    """Two neighbouring words, both of small letters, change places."""
    found = [
        number
        for number, (word, after) in enumerate(pairwise(words))
        if word != after and (word + after).isalpha() and (word + after).islower()
    ]
    if not found:
        return None
    at = dice.choice(found)
    return "", [*words[:at], words[at + 1], words[at], *words[at + 2 :]]


RULES: dict[str, tuple[Change, int]] = {
    "agreement": (swap_form(FORMS), len(FORMS)),
    "article": (swap_form(ARTICLES), len(ARTICLES)),
    "order": (swap_neighbours, 1),
}
"""Each rule, and the number of its forms."""


def build_pairs(documents: Iterable[str], count: int, per_document: int = 5, seed: int = 1) -> dict[str, list[Pair]]:
    """Up to `count` pairs of each rule; each sentence is in one pair only, and a document gives a few of each rule."""
    dice, pairs, forms = Random(seed), {name: list[Pair]() for name in RULES}, Counter[tuple[str, str]]()
    for document in documents:
        given = dict.fromkeys(RULES, 0)
        for line in document.splitlines():
            words = line.split()
            if len(words) not in WORDS or not SENTENCE.fullmatch(line):
                continue
            for name, (change, kinds) in RULES.items():
                if given[name] < per_document and (found := change(words, dice)):
                    form, changed = found
                    if forms[name, form] < max(1, count // kinds):
                        pairs[name].append((" ".join(words), " ".join(changed)))
                        forms[name, form] += 1
                        given[name] += 1
                        break
    return pairs


def write_pairs(folder: Path, pairs: dict[str, list[Pair]]) -> dict[str, Path]:
    """A file of BLiMP's fields for each rule that found pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, found in pairs.items():
        if found:
            lines = [json.dumps({"sentence_good": good, "sentence_bad": bad}) for good, bad in found]
            paths[name] = folder / f"{name}.jsonl"
            paths[name].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths


def accuracy_of_counts(
    counts: Counts, encode: Callable[[str], list[int]], pairs: list[Pair], first: int
) -> dict[str, float]:
    """The fraction of pairs whose good sentence is likelier by token counts; an equal pair counts half."""

    def scores(text: str) -> tuple[float, float]:
        tokens = np.array(encode(text), np.int64)
        before: NDArray[np.int64] = np.concatenate([[first], tokens[:-1]])
        return float(np.log(counts.unigram(tokens)).sum()), float(np.log(counts.bigram(before, tokens)).sum())

    right = np.zeros(2)
    for good, bad in pairs:
        for number, (better, worse) in enumerate(zip(scores(good), scores(bad), strict=True)):
            right[number] += 0.5 if abs(better - worse) < 1e-9 else better > worse
    return dict(zip(("unigram", "bigram"), (right / max(1, len(pairs))).tolist(), strict=True))
