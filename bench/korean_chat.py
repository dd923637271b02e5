"""Runs all commands: Korean text -> vocabulary -> pretrained model -> chat finetuning -> answers.

    python bench/korean_chat.py ko.jsonl.xz ChatbotData.csv OUT [size=small] [minutes=8] [rate=520000] [batch=32] ...

Pretraining takes as many steps as fit into `minutes` at `rate` tokens per second, so that the schedule ends on time.
That is many epochs of the text. Against overfitting, embeddings and both branches of each block have dropout (attention
has none, because the fast kernels do not support it), and finetuning starts from the best checkpoint, not the last.
If it is run again, it resumes. OUT/report.md has the losses, the accuracy, the fraction of answers that stop before and
after, and the answers; OUT/curves.svg is a plot of the losses.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import curves
import yaml

from textmill.config import ModelConfig
from textmill.models.gpt2 import family as gpt2

SETTINGS: dict[str, Any] = {
    "size": "small",
    "minutes": 8.0,
    "rate": 520_000.0,
    "batch": 32,
    "length": 1024,
    "vocab": 32_000,
    "learning_rate": 6e-3,
    "dropout": 0.1,
    "compile": 1,
    "chat_steps": 900,
    "chat_batch": 16,
    "chat_length": 256,
    "chat_rate": 2e-4,
    "questions": 30,
}


def shape_of(out: Path, options: dict[str, Any]) -> Path:
    """Write a config.json of the named size with its own value for each dropout."""
    named = gpt2.shape_of(ModelConfig(size=options["size"]), vocab=options["vocab"], eos_id=0, length=options["length"])
    shape = replace(named, embedding_dropout=options["dropout"], residual_dropout=options["dropout"])
    (out / "shape.json").write_text(json.dumps(gpt2.hf_config_of(shape)), encoding="utf-8")
    return out / "shape.json"


def configs_of(text: Path, pairs: Path, out: Path, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configs of the two runs: plain text from scratch, then conversations from its weights."""
    engine = {"compile": bool(options["compile"])}
    steps = max(2, int(options["minutes"] * 60 * options["rate"] / (options["batch"] * options["length"])))
    base = {
        "folder": str(out / "base"),
        "corpus": {"sources": [str(text)], "split": "99,1,0"},
        "tokenizer": {"vocab": options["vocab"]},
        "model": {"shape": str(shape_of(out, options))},
        "engine": engine,
        "train": {
            "length": options["length"],
            "batch": options["batch"],
            "steps": steps,
            "optimizer": "muon",
            "learning_rate": options["learning_rate"],
            "evaluate_every": max(1, steps // 10),
            "save_every": max(1, steps // 10),
            "log_every": max(1, steps // 100),
            "evaluate_batches": 16,
        },
    }
    chat_steps = options["chat_steps"]
    chat = {
        "folder": str(out / "chat"),
        "corpus": {"sources": [str(pairs)], "chat": "pairs", "split": "95,5,0"},
        "tokenizer": {"use": str(out / "base" / "tokenizer"), "chat": "default"},
        "model": {"init_from": str(out / "base" / "run" / "best")},
        "engine": engine,
        "train": {
            "layout": "chat",
            "length": options["chat_length"],
            "batch": options["chat_batch"],
            "steps": chat_steps,
            "learning_rate": options["chat_rate"],
            "evaluate_every": max(1, chat_steps // 6),
            "save_every": max(1, chat_steps // 3),
            "log_every": max(1, chat_steps // 30),
            "checkpoints": {"keep": 3},
        },
    }
    return base, chat


def run_commands(out: Path, name: str, config: dict[str, Any], commands: list[str]) -> dict[str, float]:
    """Run commands on a config, each in its own process as a user would; return the seconds of each."""
    path = out / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    seconds = {}
    for command in commands:
        start = time.perf_counter()
        print(f"== textmill {command} {name}.yaml", flush=True)
        subprocess.run([sys.executable, "-m", "textmill", command, str(path)], check=True)
        seconds[f"{name} {command}"] = time.perf_counter() - start
    return seconds


def loss_table(run: Path) -> list[str]:
    """Each evaluation on the valid split, as rows of a table."""
    rows, rate = [], 0.0
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        rate = entry.get("tokens_per_second", rate)
        if "valid_loss" in entry:
            rows.append(
                f"| {entry['step']:,} | {entry['valid_loss']:.3f} | {entry['valid_accuracy']:.1%} | {rate:,.0f} |"
            )
    return ["| step | valid loss | valid accuracy | tokens/s |", "|---|---|---|---|", *rows]


def _share_questions(out: Path) -> None:
    """Use the questions of the finetuned run for its first weights too."""
    if not (out / "before" / "corpus").exists():
        (out / "before" / "corpus").symlink_to(out / "chat" / "corpus")


def answers_of(root: Path, step: int, count: int) -> list[str]:
    """The answers of a checkpoint to questions of the valid split, with transformers alone."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("chat_answers.py")),
        str(root),
        "--step",
        str(step),
        "--count",
        str(count),
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout.splitlines()


def main(arguments: list[str]) -> None:
    """Run every stage that is not done yet, then write the report."""
    text, pairs, out = (Path(argument).absolute() for argument in arguments[:3])
    options = dict(SETTINGS)
    for argument in arguments[3:]:
        key, _, value = argument.partition("=")
        options[key] = type(SETTINGS[key])(value)
    out.mkdir(parents=True, exist_ok=True)
    base, chat = configs_of(text, pairs, out, options)
    seconds = run_commands(out, "base", base, ["prepare", "fit-tokenizer", "tokenize", "train"])
    seconds |= run_commands(out, "chat", chat, ["prepare", "fit-tokenizer", "tokenize"])
    first = {
        **chat,
        "train": {
            **chat["train"],
            "steps": 1,
            "learning_rate": 1e-12,
            "warmup": 0,
            "folder": str(out / "before" / "run"),
        },
    }
    run_commands(out, "before", first, ["train"])
    seconds |= run_commands(out, "chat", chat, ["train"])
    _share_questions(out)
    before = answers_of(out / "before", 1, options["questions"])
    after = answers_of(out / "chat", chat["train"]["steps"], options["questions"])
    stages = ", ".join(f"{name} {taken:.0f} s" for name, taken in seconds.items())
    report = [
        f"Seconds: {stages}",
        "",
        "Pretraining:",
        "",
        *loss_table(out / "base" / "run"),
        "",
        "Chat:",
        "",
        *loss_table(out / "chat" / "run"),
        "",
        f"Before: {before[-1]}",
        f"After: {after[-1]}",
        "",
        "```",
        *after[:-1],
        "```",
    ]
    curves.main(
        [str(out / "curves.svg"), f"pretraining={out / 'base' / 'run'}", f"conversations={out / 'chat' / 'run'}"]
    )
    (out / "report.md").write_text("\n".join(report) + "\n", encoding="utf-8")
    print("\n".join(report))


if __name__ == "__main__":
    main(sys.argv[1:])
