"""Entities in labels such as B-PER and I-PER, and their precision, recall and F1, by conlleval's rules."""

from __future__ import annotations

from collections.abc import Sequence

OUTSIDE = "O"
PREFIXES = ("B-", "I-", "E-", "S-", "L-", "U-")
"""Begin, inside, end, single; BILOU names the last two last and unit."""

Entity = tuple[str, int, int]
"""Its type, its first word and its last word."""


def has_entities(names: Sequence[str]) -> bool:
    """Whether labels mark entities."""
    return any(name.startswith(PREFIXES) for name in names)


def find_entities(labels: Sequence[str]) -> set[Entity]:
    """The entities of a sentence. One starts at B or S, at another type, or at any tag after the end of one."""
    found: set[Entity] = set()
    start = 0
    previous_tag = OUTSIDE
    previous_kind = ""
    for place, label in enumerate([*labels, OUTSIDE]):
        tag, kind = (label[0], label[2:]) if label.startswith(PREFIXES) else (OUTSIDE, "")
        tag = {"L": "E", "U": "S"}.get(tag, tag)
        inside = tag != OUTSIDE
        was_inside = previous_tag != OUTSIDE
        breaks = tag in "BSO" or previous_tag in "ESO" or kind != previous_kind
        if was_inside and breaks:
            found.add((previous_kind, start, place - 1))
        if inside and breaks:
            start = place
        previous_tag = tag
        previous_kind = kind
    return found


class EntityCounts:
    """Entities that are expected, predicted and both."""

    def __init__(self) -> None:
        self.expected = self.predicted = self.right = 0

    def add(self, expected: Sequence[str], predicted: Sequence[str]) -> None:
        """Count the entities of a sentence; one is right if its type and both of its ends are."""
        wanted = find_entities(expected)
        found = find_entities(predicted)
        self.expected, self.predicted = self.expected + len(wanted), self.predicted + len(found)
        self.right += len(wanted & found)

    def metrics(self) -> dict[str, float]:
        """Precision, recall and F1 over all entities."""
        return {
            "entity_f1": 2 * self.right / max(1, self.expected + self.predicted),
            "entity_precision": self.right / max(1, self.predicted),
            "entity_recall": self.right / max(1, self.expected),
        }
