"""Damages the files of a model folder at random and imports each: only a result or a one-line error is allowed.

python -m tests.support.fuzz_import FOLDER KIND COUNT SEED: runs with limited memory, prints how many were refused.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.support.damage import WRONG, mutated
from textmill.conversion.importing import import_model
from textmill.errors import TextmillError

MEMORY = 1_500_000_000
"""Bytes that may be allocated in addition to those of the program itself."""


class Payload:
    """Creates a folder when it is unpickled by a reader that trusts its input."""

    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (self.canary,)


def damage_bytes(data: bytes, dice: random.Random) -> bytes:
    kind, at = dice.randrange(5), dice.randrange(max(1, len(data)))
    if dice.random() < 0.5:
        at = dice.randrange(min(len(data), 400) or 1)  # headers are where the sizes are
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + dice.randbytes(dice.randint(1, 40)) + data[at:]
    if kind == 2:
        return data[:at] + data[at + dice.randint(1, 40) :]
    number = dice.choice([0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1]).to_bytes(8, "little")
    new = number if kind == 3 else bytes([data[at] ^ (1 << dice.randrange(8))]) if data else b""
    return data[:at] + new + data[at + len(new) :]


def damage_file(path: Path, dice: random.Random, canary: Path) -> None:
    if path.suffix in (".pt", ".bin") and path.stem != "gpt2" and dice.random() < 0.5:
        tree = torch.load(path, weights_only=False)
        wrong = (*WRONG, torch.zeros(3), torch.Size([2, 10**18]), Payload(str(canary)), {"x": Payload(str(canary))})
        torch.save(mutated(tree, dice, wrong), path)
    else:
        path.write_bytes(damage_bytes(path.read_bytes(), dice))


def main(folder: Path, kind: str, count: int, seed: int) -> int:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    dice, refused = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as root:
        canary = Path(root) / "canary"
        for number in range(count):
            broken = shutil.copytree(folder, Path(root) / f"{number}")
            files = sorted(path for path in broken.rglob("*") if path.is_file() and path.name != "manifest.json")
            weights = [path for path in files if path.suffix not in (".json", ".md", "")] or files
            damage_file(dice.choice(weights if dice.random() < 0.8 else files), dice, canary)
            try:
                import_model(str(broken), str(Path(root) / "out"), kind=kind, vocab=None)
            except TextmillError:
                refused += 1
            except BaseException:
                print(f"{kind}: file {number} of seed {seed}", traceback.format_exc(), flush=True)
                return 1
            assert not list(Path(root).glob("out.*")), "something unfinished is left"
            shutil.rmtree(Path(root) / "out", ignore_errors=True)
            shutil.rmtree(broken)
            assert not canary.exists(), "code from a file was run"
    print(f"refused {refused} of {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
