"""The command new: inspects the text and the machine, and writes a short YAML file with comments."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from textmill.config.presets import TRAIN_PRESETS
from textmill.corpus.source import SELF_COMPRESSED, Source
from textmill.corpus.sources import bundled_corpora, find_sources, source_state
from textmill.corpus.streams import BrokenStream, open_stream
from textmill.devices import open_device
from textmill.errors import TextmillError
from textmill.storage.files import write_text
from textmill.where import PROJECT

SAMPLE_BYTES = 1 << 20
CPU_FLOPS_PER_CORE = 1.7e10
"""What one laptop core reaches in small fp32 matmuls, forward and backward."""
GPU_TOKENS_PER_SECOND = {"micro": 800_000, "mini": 500_000, "small": 150_000}
NANO_BLOCKS, NANO_WIDTH = 230_000, 96
MINUTES = {"cpu": 5, "gpu": 30}
PRESETS = {("cpu", "nano"): "pretrain-nano", ("cuda", "small"): "pretrain-muon"}
"""The best preset found in experiments, by the device and the model size they ran on."""

Row = tuple[str, object, str]
"""A key, its value, and its comment."""


@dataclass(frozen=True)
class Settings:
    """The values that fit this text on this machine."""

    device: str
    size: str
    vocab: int
    section: int
    split: str
    length: int
    batch: int
    steps: int
    preset: str | None
    epochs: float
    minutes: float


def new(folder: str, text: str) -> Path:
    """Write FOLDER/textmill.yaml for the user's own text: files, a folder, a glob or a shipped corpus; return its path."""
    path = Path(folder) / PROJECT
    if path.exists():
        raise TextmillError(f"{path}: exists already; edit it, or name another folder")
    sources = find_sources([text], skip=[Path(folder) / name for name in ("corpus", "tokenizer", "tokens", "run")])
    total = sum(source_state(source).bytes for source in sources)
    if not total:
        raise TextmillError(f"{text}: {len(sources)} files, all empty; name files with text")
    settings = _choose_settings(total, _non_ascii_fraction(sources))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TextmillError(f"{folder}: cannot be created ({error.strerror}); name another folder") from None
    write_text(path, _yaml(folder, text, sources, total, settings))
    print(f"new: {len(sources)} files, {total / 1e6:.1f} MB of text; wrote {path}")
    print(f"next: textmill run {folder}")
    return path


def _non_ascii_fraction(sources: list[Source]) -> float:
    """The fraction of non-ASCII bytes in a sample: scripts such as Hangul use three bytes per letter."""
    sample = b"".join(_head(source, SAMPLE_BYTES // min(len(sources), 64)) for source in sources[:64])
    return sum(byte > 127 for byte in sample) / max(1, len(sample))


def _head(source: Source, count: int) -> bytes:
    if source.format in (*SELF_COMPRESSED, "mongo"):
        return b""  # its bytes are not those of the text
    try:
        with open_stream(source.address) as stream:
            return stream.read1(count)
    except BrokenStream:
        return b""


def _choose_settings(total: int, non_ascii: float) -> Settings:
    device = open_device("auto").type
    on_gpu = device != "cpu"
    vocab = next(
        size for limit, size in ((3e6, 1024), (3e7, 4096), (3e8, 16384), (float("inf"), 32000)) if total < limit
    )
    vocab = min(32000, vocab * 2) if non_ascii > 0.3 else vocab
    tokens = max(1, round(total / 3))
    size = (
        "nano"
        if not on_gpu
        else next(size for limit, size in ((2e7, "micro"), (2e8, "mini"), (float("inf"), "small")) if total < limit)
    )
    length = {"nano": 64, "micro": 512}.get(size, 1024)
    preset = PRESETS.get((device, size))
    batch = TRAIN_PRESETS[preset]["batch"] if preset else 64
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rate = (
        GPU_TOKENS_PER_SECOND[size] if on_gpu else CPU_FLOPS_PER_CORE * cores / (6 * (NANO_BLOCKS + NANO_WIDTH * vocab))
    )
    minutes = MINUTES["gpu" if on_gpu else "cpu"]
    # More than about fifteen epochs over a small text lead to overfitting.
    steps = max(100, min(round(rate * 60 * minutes / (batch * length)), round(15 * tokens / (batch * length)) or 1))
    steps = round(steps, -1 if steps < 1000 else -2)
    seen = steps * batch * length
    section = max(200, min(4000, round(total / 30000) * 100))
    split = "90,5,5" if total / section > 200 else "80,10,10"  # leave a few documents to evaluate on
    name = "GPU" if on_gpu else f"{cores} CPU cores"
    return Settings(name, size, vocab, section, split, length, batch, steps, preset, seen / tokens, seen / rate / 60)


def _optimizer_rows(settings: Settings) -> list[Row]:
    """The preset that was best in experiments, or the settings that are not the defaults."""
    if settings.preset:
        return [("preset", settings.preset, "the optimizer, learning rates and schedule that were best in experiments")]
    return [
        ("learning_rate", "1e-3", "after a warm-up over the first 5% of steps; then it falls"),
        ("min_learning_rate", "1e-4", "down to this"),
        ("betas", "[0.9, 0.95]", "of Adam"),
    ]


def _yaml(folder: str, text: str, sources: list[Source], total: int, settings: Settings) -> str:
    named = (
        text
        if text in bundled_corpora() and not os.path.exists(text)
        else os.path.relpath(os.path.expanduser(text), folder)
    )
    minutes, often = max(1, round(settings.minutes)), max(20, round(settings.steps / 50) * 10)
    head = f"""\
# Settings for {len(sources)} files, {total / 1e6:.1f} MB of text, on {settings.device}.
#
#   textmill run {folder}        # all stages: prepare, fit-tokenizer, tokenize, train, evaluate, generate
#   textmill COMMAND --help      # every setting with its default
#
# Paths are relative to this file. Each stage writes a folder next to it: corpus, tokenizer, tokens, run.
# Change what you like: a finished stage is not run twice, and a change that would alter its
# result is reported before anything is overwritten.
"""
    sections: dict[str, list[Row]] = {
        "corpus": [
            ("sources", json.dumps([named], ensure_ascii=False), "files, globs and folders of .txt, .md and .jsonl"),
            ("section_chars", settings.section, "plain text is cut into documents of about this many characters"),
            ("split", settings.split, "percent for train, valid and test; a document never changes its split"),
        ],
        "tokenizer": [("vocab", settings.vocab, "vocabulary entries; use more for more text and more scripts")],
        "model": [("size", settings.size, "nano, micro, mini, small (124M), medium (350M), large (774M), xl (1.5B)")],
        "train": [
            ("length", settings.length, "tokens per sample"),
            ("batch", settings.batch, "samples per step"),
            (
                "steps",
                settings.steps,
                f"about {settings.epochs:.1f} epochs, roughly {minutes} minutes",
            ),
            *_optimizer_rows(settings),
            ("evaluate_every", often, "steps between two measurements of the valid loss"),
            ("save_every", often, "steps between two checkpoints; training resumes from them, transformers opens them"),
        ],
        "sample": [
            ("prompt", "null", 'what the finished model continues, such as "Once upon a time"'),
            ("temperature", 0.8, "0: always the likeliest token; higher: more random"),
            ("max_tokens", 200, "tokens of new text"),
        ],
    }
    lines = [head]
    for section, rows in sections.items():
        lines.append(f"{section}:")
        lines += [f"  {key}: {value}".ljust(30) + f"# {note}" for key, value, note in rows]
        lines.append("")
    return "\n".join(lines)
