"""Kill prepare and tokenize at random moments and check that a restart gives the same bytes.

    python bench/kill_prepare.py [kills] [seed] [local or beam]

Half of the kills hit the command, half one of its workers. Each start has 1, 2 or 4 workers, chosen at random, so that
a run resumes what another number of workers left. In addition, undisturbed runs with 1, 2 and 4 workers and with
shuffled sources must give the same bytes. With `beam`, the kills hit Beam's direct runner with two processes, on less
text; the result must equal that of the local runner.
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
TIMEOUT_SECONDS = {"local": 120, "beam": 300}
ROWS = {"local": 3000, "beam": 300}
BEAM = ["runner.kind=beam", "runner.options=[--direct_running_mode=multi_processing, --direct_num_workers=2]"]


def write_texts(folder: Path, seed: int, rows: int) -> None:
    """Write six files of JSON lines in three scripts, with duplicates and broken lines."""
    rng = random.Random(seed)
    words = ["mill", "river", "değirmen", "ırmak", "물레방아", "강", "磨坊", "grain", "wheel", "çark"]
    folder.mkdir()
    for number in range(6):
        with open(folder / f"{number}.jsonl", "w", encoding="utf-8") as stream:
            for row in range(rows):
                text = " ".join(rng.choices(words, k=rng.randrange(2, 160)))
                stream.write(
                    rng.choice(
                        ["{broken\n"] if row % 500 == 7 else [json.dumps({"text": text}, ensure_ascii=False) + "\n"]
                    )
                )


def command_line(command: str, root: Path, sources: list[Path], workers: int = 2, runner: str = "local") -> list[str]:
    """The command line of one call."""
    names = ",".join(map(str, sources))
    where = BEAM if runner == "beam" else [f"runner.workers={workers}"]
    return [*COMMAND, command, "quickstart", f"folder={root}", f"corpus.sources={names}", "tokenizer.vocab=400", *where]


def hash_content(folder: Path) -> str:
    """A hash of all file names and contents, without the files that name folders and times of this machine."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name not in ("run.yaml", "manifest.json"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest() + json.loads((folder / "manifest.json").read_text())["fingerprint"]


def run_undisturbed(root: Path, sources: list[Path], workers: int = 2, runner: str = "local") -> tuple[str, str]:
    """Run prepare and tokenize without a kill; return the hashes of both folders."""
    for command in ("prepare", "tokenize"):
        subprocess.run(
            command_line(command, root, sources, workers, runner),
            check=True,
            capture_output=True,
            timeout=TIMEOUT_SECONDS[runner],
        )
    return hash_content(root / "corpus"), hash_content(root / "tokens")


def find_descendants(pid: int) -> list[int]:
    """All child processes of a process, recursively."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return children + [deeper for child in children for deeper in find_descendants(child)]


def run_and_kill(arguments: list[str], rng: random.Random, duration: float, timeout: float) -> tuple[bool, bool]:
    """Start a command, kill it or one of its workers at a random moment, and wait; return (killed, succeeded)."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(rng.uniform(0.2, duration))
    targets = [process.pid] if rng.random() < 0.5 else find_descendants(process.pid)
    killed = False
    if targets and process.poll() is None:
        try:
            os.kill(rng.choice(targets), signal.SIGKILL)
            killed = True
        except ProcessLookupError:
            pass
    return killed, process.wait(timeout) == 0


def main(kills: int = 50, seed: int = 1, runner: str = "local") -> int:
    """Run the campaign; its results go to docs/benchmarks.md."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        root_folder = Path(folder)
        write_texts(root_folder / "texts", seed, ROWS[runner])
        sources = sorted((root_folder / "texts").iterdir())
        expected = run_undisturbed(root_folder / "expected", sources)
        start = time.monotonic()
        same_results = [run_undisturbed(root_folder / "again", sources, runner=runner) == expected]
        duration = (time.monotonic() - start) / 2
        if runner == "local":
            same_results += [
                run_undisturbed(root_folder / f"workers{count}", sources, count) == expected for count in (1, 4)
            ]
        same_results.append(
            run_undisturbed(root_folder / "shuffled", random.Random(3).sample(sources, len(sources)), runner=runner)
            == expected
        )
        kill_count = rounds = equal = 0
        while kill_count < kills:
            root = root_folder / "killed"
            for command in ("prepare", "tokenize"):
                succeeded = False
                while not succeeded:
                    arguments = command_line(command, root, sources, rng.choice((1, 2, 4)), runner)
                    killed, succeeded = run_and_kill(arguments, rng, duration, TIMEOUT_SECONDS[runner])
                    kill_count += killed
            equal += (hash_content(root / "corpus"), hash_content(root / "tokens")) == expected
            rounds += 1
            shutil.rmtree(root)
        others = (
            "run again, 1 and 4 workers, shuffled sources" if runner == "local" else "undisturbed, shuffled sources"
        )
        print(
            f"{runner}: {kill_count} SIGKILLs, 0 hangs: {equal} of {rounds} results byte-identical; "
            f"{others} equal: {same_results}"
        )
        return 0 if equal == rounds and all(same_results) else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3]), *sys.argv[3:]))
