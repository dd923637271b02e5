"""Copies of one weight on several processes: the same bits on all of them, or the run ends."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from textmill.errors import EXIT_USER, AlreadyReported, TextmillError
from textmill.processes.ranks import Ranks


class HasReplicas(Protocol):
    """An engine, as far as it is asked here."""

    def replica_checksums(self) -> dict[str, int]: ...


def check_replicas(ranks: Ranks, engine: HasReplicas, step: int, every: int) -> None:
    """Now and then, compare what each process has of each weight; where they differ, name the weight and the process that stands alone."""
    if ranks.world == 1 or step % every:
        return
    if fault := find_mismatch(ranks.all_gather(engine.replica_checksums())):
        back = max(0, step - every)
        advice = f"memory or a device is faulty; leave it out, and go back to a checkpoint of step {back:,} or before with --step"
        raise TextmillError(f"step {step:,}: {fault}; {advice}") if ranks.first else AlreadyReported(EXIT_USER)


def find_mismatch(found: list[dict[str, Any]]) -> str | None:
    """The first weight whose copies differ, and whose copy is unlike most."""
    for name in sorted({name for one in found for name in one}):
        held = {rank: one[name] for rank, one in enumerate(found) if name in one}
        (most, count), *others = Counter(held.values()).most_common()
        if others:
            odd = [rank for rank, bits in held.items() if bits != most]
            alone = f"rank {', '.join(map(str, odd))} differs from the other {count}"
            same = f"rank {' and '.join(map(str, held))} differ, and no majority says which is right"
            return f"the copies of '{name}' are no longer the same: {alone if count > others[0][1] else same}"
    return None
