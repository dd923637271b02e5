"""Damaged trees of plain values, for tests."""

from __future__ import annotations

import random
from typing import Any

WRONG = (None, True, -1, 3, 1.5, 10**400, "wrong", [], [None], {}, {"a": 1})


def mutated(tree: Any, dice: random.Random, wrong: tuple[Any, ...] = WRONG) -> Any:
    """Return the tree with one random item removed or replaced."""
    if not isinstance(tree, dict | list) or not tree or dice.random() < 0.2:
        return dice.choice(wrong)
    place = dice.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
    if dice.random() < 0.2:
        return (
            {name: value for name, value in tree.items() if name != place} if isinstance(tree, dict) else tree[:place]
        )
    changed = mutated(tree[place], dice, wrong)
    return {**tree, place: changed} if isinstance(tree, dict) else [*tree[:place], changed, *tree[place + 1 :]]
