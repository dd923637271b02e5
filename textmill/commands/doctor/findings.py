"""Finding: the result of one check of doctor."""

from __future__ import annotations

from dataclasses import dataclass, replace

GOOD = "good"
ADVICE = "advice"
BAD = "bad"
MARKS = {GOOD: "ok  ", ADVICE: "hint", BAD: "FAIL"}
SHOWN_SECONDS = 1.0


@dataclass(frozen=True)
class Finding:
    """What a check found, and what to do about it."""

    name: str
    level: str
    """good, advice (it works, but not as well as it could) or bad (something will fail)."""
    found: str
    fix: str = ""
    seconds: float = 0.0

    def after(self, seconds: float) -> Finding:
        """The same finding with the seconds that the check took."""
        return replace(self, seconds=round(seconds, 2))

    def format(self) -> str:
        """One line, and a second one with the fix."""
        took = f" ({self.seconds:.0f} s)" if self.seconds >= SHOWN_SECONDS else ""
        fix = f"\n       fix: {self.fix}" if self.fix else ""
        return f"{MARKS[self.level]}  {self.name}: {self.found}{took}{fix}"
