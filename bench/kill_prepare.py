"""Kill prepare and tokenize, or a worker of theirs, at seeded moments and start again; the result must be the undisturbed one's.

    python bench/kill_prepare.py [kills] [seed] [local or beam]

Each start has 1, 2 or 4 workers, drawn anew, so that one goes on with what another left. Half of the blows hit the parent, half a process
below it. Besides, 1, 2 and 4 workers left alone and shuffled sources must give the same bytes.
With `beam` the blows hit Beam's direct runner with two processes, over fewer texts; what it must give are the bytes of the local runner.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "textmill"]
PATIENCE = {"local": 120, "beam": 300}
ROWS = {"local": 3000, "beam": 300}
BEAM = ["runner.kind=beam", "runner.options=[--direct_running_mode=multi_processing, --direct_num_workers=2]"]


def texts(folder: Path, seed: int, rows: int) -> None:
    """Six files of JSON lines in three scripts, with duplicates and broken lines."""
    dice = random.Random(seed)
    words = ["mill", "river", "değirmen", "ırmak", "물레방아", "강", "磨坊", "grain", "wheel", "çark"]
    folder.mkdir()
    for number in range(6):
        with open(folder / f"{number}.jsonl", "w", encoding="utf-8") as stream:
            for row in range(rows):
                text = " ".join(dice.choices(words, k=dice.randrange(2, 160)))
                stream.write(
                    dice.choice(
                        ["{broken\n"] if row % 500 == 7 else [json.dumps({"text": text}, ensure_ascii=False) + "\n"]
                    )
                )


def command_line(command: str, root: Path, sources: list[Path], workers: int = 2, runner: str = "local") -> list[str]:
    """The words of one call."""
    names = ",".join(map(str, sources))
    where = BEAM if runner == "beam" else [f"runner.workers={workers}"]
    return [*COMMAND, command, "quickstart", f"folder={root}", f"corpus.sources={names}", "tokenizer.vocab=400", *where]


def content(folder: Path) -> str:
    """A hash of every file's name and bytes, but for what names this machine's folders and moments."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name not in ("run.yaml", "manifest.json"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest() + json.loads((folder / "manifest.json").read_text())["fingerprint"]


def made(root: Path, sources: list[Path], workers: int = 2, runner: str = "local") -> tuple[str, str]:
    """Prepare and tokenize undisturbed; hashes of both folders."""
    for command in ("prepare", "tokenize"):
        subprocess.run(
            command_line(command, root, sources, workers, runner),
            check=True,
            capture_output=True,
            timeout=PATIENCE[runner],
        )
    return content(root / "corpus"), content(root / "tokens")


def below(pid: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return children + [deeper for child in children for deeper in below(child)]


def struck(words: list[str], dice: random.Random, duration: float, patience: float) -> tuple[bool, bool]:
    """Start, strike the parent or a process below it at a drawn moment, wait for the end; (a blow hit, it came through)."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(dice.uniform(0.2, duration))
    targets = [process.pid] if dice.random() < 0.5 else below(process.pid)
    hit = False
    if targets and process.poll() is None:
        try:
            os.kill(dice.choice(targets), signal.SIGKILL)
            hit = True
        except ProcessLookupError:
            pass
    return hit, process.wait(patience) == 0


def main(kills: int = 50, seed: int = 1, runner: str = "local") -> int:
    """The campaign; its figures go to docs/benchmarks.md."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        texts(here / "texts", seed, ROWS[runner])
        sources = sorted((here / "texts").iterdir())
        wanted = made(here / "whole", sources)
        start = time.monotonic()
        layouts = [made(here / "again", sources, runner=runner) == wanted]
        duration = (time.monotonic() - start) / 2
        if runner == "local":
            layouts += [made(here / f"workers{count}", sources, count) == wanted for count in (1, 4)]
        layouts.append(made(here / "shuffled", random.Random(3).sample(sources, len(sources)), runner=runner) == wanted)
        hits = rounds = equal = 0
        while hits < kills:
            root = here / "struck"
            for command in ("prepare", "tokenize"):
                through = False
                while not through:
                    words = command_line(command, root, sources, dice.choice((1, 2, 4)), runner)
                    hit, through = struck(words, dice, duration, PATIENCE[runner])
                    hits += hit
            equal += (content(root / "corpus"), content(root / "tokens")) == wanted
            rounds += 1
            shutil.rmtree(root)
        others = (
            "run again, 1 and 4 workers, shuffled sources" if runner == "local" else "undisturbed, shuffled sources"
        )
        print(
            f"{runner}: {hits} SIGKILLs, 0 hangs: {equal} of {rounds} results byte-identical; {others} equal: {layouts}"
        )
        return 0 if equal == rounds and all(layouts) else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3]), *sys.argv[3:]))
