"""The verb new: looks at the text and the machine, and writes a short YAML that explains itself."""

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
CPU_FLOPS_A_CORE = 1.7e10
"""What a laptop's core does in small fp32 products, forward and backward."""
GPU_TOKENS_A_SECOND = {"micro": 800_000, "mini": 500_000, "small": 150_000}
NANO_BLOCKS, NANO_WIDTH = 230_000, 96
MINUTES = {"cpu": 5, "gpu": 30}
PRESETS = {("cpu", "nano"): "pretrain-nano", ("cuda", "small"): "pretrain-muon"}
"""What was best in trials, by the kind of device and the size that they were made on."""

Row = tuple[str, object, str]
"""A key, its value, and what a person is told of it."""


@dataclass(frozen=True)
class Draft:
    """The numbers that fit this text on this machine."""

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


def new(folder: str, text: str | None, settings: list[str]) -> Path:
    """Write FOLDER/textmill.yaml for the user's own text."""
    if text is None:
        raise TextmillError("new: no text named; say: textmill new DIR --text 'texts/*.txt'")
    if settings:
        raise TextmillError(f"new: takes no settings, found '{settings[0]}'; change them in the file it writes")
    path = Path(folder) / PROJECT
    if path.exists():
        raise TextmillError(f"{path}: there already; change it, or name another folder")
    sources = find_sources([text], skip=[Path(folder) / name for name in ("corpus", "tokenizer", "tokens", "run")])
    total = sum(source_state(source).bytes for source in sources)
    if not total:
        raise TextmillError(f"{text}: {len(sources)} files and not a byte in them; name files with text")
    draft = _draft(total, _wide_share(sources))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TextmillError(f"{folder}: cannot be made ({error.strerror}); name another folder") from None
    write_text(path, _yaml(folder, text, sources, total, draft))
    print(f"new: {len(sources)} files, {total / 1e6:.1f} MB of text; wrote {path}")
    print(f"next: textmill run {folder}")
    return path


def _wide_share(sources: list[Source]) -> float:
    """The share of bytes outside ASCII in a sample: scripts such as Hangul spend three bytes a letter."""
    sample = b"".join(_head(source, SAMPLE_BYTES // min(len(sources), 64)) for source in sources[:64])
    return sum(byte > 127 for byte in sample) / max(1, len(sample))


def _head(source: Source, count: int) -> bytes:
    if source.format in (*SELF_COMPRESSED, "mongo"):
        return b""  # its bytes are not the text's
    try:
        with open_stream(source.address) as stream:
            return stream.read1(count)
    except BrokenStream:
        return b""


def _draft(total: int, wide: float) -> Draft:
    device = open_device("auto").type
    on_gpu = device != "cpu"
    vocab = next(
        size for limit, size in ((3e6, 1024), (3e7, 4096), (3e8, 16384), (float("inf"), 32000)) if total < limit
    )
    vocab = min(32000, vocab * 2) if wide > 0.3 else vocab
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
    rate = GPU_TOKENS_A_SECOND[size] if on_gpu else CPU_FLOPS_A_CORE * cores / (6 * (NANO_BLOCKS + NANO_WIDTH * vocab))
    minutes = MINUTES["gpu" if on_gpu else "cpu"]
    # More than about fifteen passes over a small text teach a small model little but the text by heart.
    steps = max(100, min(round(rate * 60 * minutes / (batch * length)), round(15 * tokens / (batch * length)) or 1))
    steps = round(steps, -1 if steps < 1000 else -2)
    seen = steps * batch * length
    section = max(200, min(4000, round(total / 30000) * 100))
    split = "90,5,5" if total / section > 200 else "80,10,10"  # a few documents must be left to measure on
    name = "GPU" if on_gpu else f"{cores} CPU cores"
    return Draft(name, size, vocab, section, split, length, batch, steps, preset, seen / tokens, seen / rate / 60)


def _rates(draft: Draft) -> list[Row]:
    """The optimizer and its rates, as far as they are not the defaults: what was best in trials, where there were any."""
    if draft.preset:
        return [("preset", draft.preset, "the optimizer, its rates and its schedule that were best in trials")]
    rise, low = "rises for the first 5% of steps, then falls", "down to this"
    return [
        ("learning_rate", "1e-3", rise),
        ("min_learning_rate", "1e-4", low),
        ("betas", "[0.9, 0.95]", "Adam's memory"),
    ]


def _yaml(folder: str, text: str, sources: list[Source], total: int, draft: Draft) -> str:
    named = (
        text
        if text in bundled_corpora() and not os.path.exists(text)
        else os.path.relpath(os.path.expanduser(text), folder)
    )
    minutes, often = max(1, round(draft.minutes)), max(20, round(draft.steps / 50) * 10)
    head = f"""\
# What textmill will make of {len(sources)} files, {total / 1e6:.1f} MB of text, on {draft.device}.
#
#   textmill run {folder}    # the whole chain: prepare, fit-tokenizer, tokenize, train, evaluate, generate
#   textmill VERB --help     # every setting there is, with its default
#
# Paths are relative to this file. Each stage writes a folder beside it: corpus, tokenizer, tokens, run.
# Change what you like: a stage that is done is not done twice, and a change that would
# make it another one is said before anything is touched.
"""
    sections: dict[str, list[Row]] = {
        "corpus": [
            ("sources", json.dumps([named], ensure_ascii=False), "files, globs and folders of .txt, .md and .jsonl"),
            ("section", draft.section, "plain text is cut into documents of about so many characters"),
            ("split", draft.split, "percent for train, valid and test; a document never changes sides"),
        ],
        "tokenizer": [("vocab", draft.vocab, "pieces; more text and more scripts want more")],
        "model": [("size", draft.size, "nano, micro, mini, small (124M), medium (350M), large (774M), xl (1.5B)")],
        "train": [
            ("length", draft.length, "tokens a sample"),
            ("batch", draft.batch, "samples a step"),
            (
                "steps",
                draft.steps,
                f"about {draft.epochs:.1f} passes over the text, {minutes} minutes by a rough guess",
            ),
            *_rates(draft),
            ("evaluate_every", often, "steps between two losses on the valid part"),
            ("save_every", often, "steps between two checkpoints, to go on from; transformers opens them as they are"),
        ],
        "sample": [
            ("prompt", "null", 'what the finished model continues, such as "Once upon a time"'),
            ("temperature", 0.8, "0: always the likeliest token; higher: bolder"),
            ("max_tokens", 200, "tokens of new text"),
        ],
    }
    lines = [head]
    for section, rows in sections.items():
        lines.append(f"{section}:")
        lines += [f"  {key}: {value}".ljust(30) + f"# {note}" for key, value, note in rows]
        lines.append("")
    return "\n".join(lines)
