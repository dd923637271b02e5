"""Compare the replicas of each weight on all ranks; end the run if their bits differ."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from textmill.errors import EXIT_USER, AlreadyReported, TextmillError
from textmill.processes.ranks import Ranks


class HasReplicas(Protocol):
    """The part of an engine that is needed here."""

    def replica_checksums(self) -> dict[str, int]: ...


def check_replicas(ranks: Ranks, engine: HasReplicas, step: int, every: int) -> None:
    """Every `every` steps, compare the checksums of all ranks; the error names the weight and the deviating rank."""
    if ranks.world == 1 or step % every:
        return
    if mismatch := find_mismatch(ranks.all_gather(engine.replica_checksums())):
        advice = (
            "a GPU or its memory is faulty; replace it and resume with --step from a checkpoint "
            f"of step {max(0, step - every):,} or earlier"
        )
        raise TextmillError(f"step {step:,}: {mismatch}; {advice}") if ranks.first else AlreadyReported(EXIT_USER)


def find_mismatch(checksums: list[dict[str, Any]]) -> str | None:
    """The first weight whose replicas differ, and which rank deviates from the majority."""
    for name in sorted({name for one in checksums for name in one}):
        by_rank = {rank: one[name] for rank, one in enumerate(checksums) if name in one}
        (majority, count), *others = Counter(by_rank.values()).most_common()
        if others:
            deviating = [rank for rank, checksum in by_rank.items() if checksum != majority]
            which = f"rank {' and '.join(map(str, by_rank))} differ, without a majority"
            if count > others[0][1]:
                which = f"rank {', '.join(map(str, deviating))} differs from the other {count}"
            return f"the replicas of '{name}' are no longer the same: {which}"
    return None
