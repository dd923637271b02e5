"""Exports a GPT-2 in every format, imports it again and exports that: logit differences, equal bytes, time, memory.

    python bench/conversion.py [tiny] [wide] [untied] [124M] [kinds=hf,gguf] [bpe=FOLDER]

Every command on the 124M model runs in a process of its own, whose memory is measured. Logits of the source and of the
imported folder are transformers'. Weights are random (seeded); the 124M model has GPT-2's vocabulary, whose files are
in ../shared/data/gpt2_bpe next to the repository, or in FOLDER.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from textmill.cli import main as textmill
from textmill.config import ModelConfig, ShapeConfig, TokenizerConfig
from textmill.models import initial_weights, open_family
from textmill.storage.files import hash_file
from textmill.storage.tensor_files import encode_safetensors, read_model
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit, open_tokenizer
from textmill.where import PACKAGE

BPE = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "gpt2_bpe"
LARGE = "124M"
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 3, "heads": 4, "width": 96, "positions": 65},
    "wide": {"layers": 2, "heads": 4, "width": 64, "inner": 96, "positions": 128},
    "untied": {"layers": 2, "heads": 2, "width": 64, "positions": 96, "untied": True},
    LARGE: {"layers": 12, "heads": 12, "width": 768, "positions": 1024},
}
FORMATS: dict[str, list[str]] = {
    "hf": ["fp32", "bf16", "fp16"],
    "gguf": ["fp32", "fp16", "bf16", "q8_0", "q4_0"],
    "onnx": ["fp32", "fp16"],
}
NOT_WEIGHTS = {"manifest.json", "README.md", "Modelfile"}
LARGE_ONLY = {"hf": ["fp32"], "gguf": ["fp16", "q8_0"]}
"""Of the largest model, these precisions only; of other formats the first."""


def write_model(folder: Path, name: str, bpe: Path) -> None:
    """A model folder with random weights, larger than at the start of training, so that logits differ between ids."""
    tokenizer = _tokenizer(name, bpe)
    family = open_family("gpt2")
    config = ModelConfig(size="nano", shape=ShapeConfig(**SHAPES[name]))
    shape = family.shape_of(config, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(family.hf_config_of(shape)))
    dice = np.random.default_rng(1)
    named = [
        (one, values + dice.normal(0, 0.05, values.shape).astype(np.float32))
        for one, values in initial_weights(shape, 1)
    ]
    (folder / "model.safetensors").write_bytes(b"".join(encode_safetensors(named)))
    tokenizer.save(folder)


def _tokenizer(name: str, bpe: Path) -> TextTokenizer:
    if name == LARGE:
        return open_tokenizer(bpe)
    text = (PACKAGE / "corpora" / "tinyshakespeare.txt").read_text(encoding="utf-8")[:100_000]
    return fit(iter([text.split("\n\n")]), TokenizerConfig(vocab=600))


def run(*arguments: str, own_process: bool) -> tuple[float, float]:
    """Run a command, with `own_process` in one of its own; return its seconds and then its peak memory in GB."""
    start = time.perf_counter()
    if not own_process:
        with contextlib.redirect_stdout(io.StringIO()):
            code = textmill(list(arguments))
        if code:
            sys.exit(f"textmill {' '.join(arguments)}: exit code {code}")
        return time.perf_counter() - start, 0.0
    process = subprocess.Popen([sys.executable, "-m", "textmill", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"textmill {' '.join(arguments)}: exit code {process.returncode}")
    return time.perf_counter() - start, usage.ru_maxrss / 1e6


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Transformers' logits in fp32."""
    with torch.no_grad():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits
    return found


def files_of(folder: Path) -> dict[str, str]:
    """Checksums of all files with weights or a tokenizer."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: hash_file(path) for name, path in found.items() if path.name not in NOT_WEIGHTS}


def measure(name: str, kind: str, precision: str, source: Path, work: Path, ids: torch.Tensor) -> str:
    """A row of the table."""
    settings = [f"export.kind={kind}", f"export.precision={precision}", "export.name=mill"]
    out, back, again = (work / f"{kind}-{precision}-{part}" for part in ("out", "back", "again"))
    own_process = name == LARGE
    seconds, memory = run("export", str(source), f"export.folder={out}", *settings, own_process=own_process)
    run("import", str(out), str(back), own_process=own_process)
    run("export", str(back), f"export.folder={again}", *settings, own_process=own_process)
    check = json.loads((out / "manifest.json").read_text())["check"]
    written = check.split("logits differ by at most ")[1].split(" ")[0].rstrip(",;")
    wanted = logits(source, ids)
    difference = float((logits(back, ids) - wanted).abs().max())
    before, after = dict(read_model(source)), dict(read_model(back))
    equal = before.keys() == after.keys() and all(np.array_equal(before[one], after[one]) for one in before)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 1e6
    bytes_equal = files_of(out) == files_of(again)
    cells = [
        kind,
        precision,
        name,
        written,
        f"{difference:.2g}",
        f"{float(wanted.abs().max()):.3g}",
        "yes" if equal else "rounded",
        "yes" if bytes_equal else "no",
        f"{size:,.1f}",
        f"{seconds:.1f}",
        f"{memory:.2f}" if own_process else "",
    ]
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> None:
    """Print the table."""
    kinds = [one for text in arguments if text.startswith("kinds=") for one in text[6:].split(",")] or list(FORMATS)
    bpe = next((Path(text[4:]) for text in arguments if text.startswith("bpe=")), BPE)
    names = [one for one in arguments if "=" not in one] or list(SHAPES)
    print(
        "| format | precision | shape | file | imported | largest logit | weights equal | files equal | MB | s | GB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            work, source = Path(folder), Path(folder) / "source"
            write_model(source, name, bpe)
            vocab = json.loads((source / "config.json").read_text())["vocab_size"]
            ids = torch.from_numpy(np.random.default_rng(2).integers(0, vocab, (2, 64)))
            for kind in kinds:
                large = LARGE_ONLY.get(kind, FORMATS[kind][:1])
                for precision in large if name == LARGE else FORMATS[kind]:
                    print(measure(name, kind, precision, source, work, ids), flush=True)
                    for path in work.glob(f"{kind}-{precision}-*"):
                        subprocess.run(["rm", "-r", str(path)], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
