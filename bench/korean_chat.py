"""The whole way by the tool's own commands: Korean text -> vocabulary -> a pretrained model -> chat finetuning -> answers.

    python bench/korean_chat.py ko.jsonl.xz ChatbotData.csv OUT [size=small] [minutes=8] [rate=520000] [batch=32] [length=1024] ...

Pretraining takes as many steps as `minutes` hold at `rate` tokens a second, so that the schedule ends where the clock does. That is many
times the text there is: embeddings and both branches of each block drop a share (attention does not, for which it would have to leave the
fast kernels), and finetuning begins with the best checkpoint, not the last. Run again, it goes on where it was. OUT/report.md has the
losses, the accuracy, the share of answers that stop before and after, and the answers; OUT/curves.svg is a picture of the losses.
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
from textmill.models.gpt2 import facts as gpt2

SETTINGS: dict[str, Any] = {
    "size": "small", "minutes": 8.0, "rate": 520_000.0, "batch": 32, "length": 1024, "vocab": 32_000, "learning_rate": 6e-3, "dropout": 0.1,
    "compile": 1, "chat_steps": 900, "chat_batch": 16, "chat_length": 256, "chat_rate": 2e-4, "questions": 30,
}  # fmt: skip


def shape_of(out: Path, chosen: dict[str, Any]) -> Path:
    """The named size as a config.json that says each dropout by itself."""
    named = gpt2.shape_of(ModelConfig(size=chosen["size"]), vocab=chosen["vocab"], end=0, length=chosen["length"])
    shape = replace(named, embedding_dropout=chosen["dropout"], residual_dropout=chosen["dropout"])
    (out / "shape.json").write_text(json.dumps(gpt2.hf_config_of(shape)), encoding="utf-8")
    return out / "shape.json"


def configs_of(text: Path, pairs: Path, out: Path, chosen: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two runs: plain text from nothing, then conversations on its weights."""
    engine = {"compile": bool(chosen["compile"])}
    steps = max(2, int(chosen["minutes"] * 60 * chosen["rate"] / (chosen["batch"] * chosen["length"])))
    base = {
        "folder": str(out / "base"), "corpus": {"sources": [str(text)], "split": "99,1,0"}, "tokenizer": {"vocab": chosen["vocab"]},
        "model": {"shape": str(shape_of(out, chosen))},
        "engine": engine,
        "train": {
            "length": chosen["length"], "batch": chosen["batch"], "steps": steps, "optimizer": "muon",
            "learning_rate": chosen["learning_rate"], "evaluate_every": max(1, steps // 10), "save_every": max(1, steps // 10),
            "log_every": max(1, steps // 100), "evaluate_batches": 16,
        },
    }  # fmt: skip
    chat_steps = chosen["chat_steps"]
    chat = {
        "folder": str(out / "chat"), "corpus": {"sources": [str(pairs)], "chat": "pairs", "split": "95,5,0"},
        "tokenizer": {"use": str(out / "base" / "tokenizer"), "chat": "default"},
        "model": {"init_from": str(out / "base" / "run" / "best")}, "engine": engine,
        "train": {
            "layout": "chat", "length": chosen["chat_length"], "batch": chosen["chat_batch"], "steps": chat_steps,
            "learning_rate": chosen["chat_rate"], "evaluate_every": max(1, chat_steps // 6), "save_every": max(1, chat_steps // 3),
            "log_every": max(1, chat_steps // 30), "checkpoints": {"keep": 3},
        },
    }  # fmt: skip
    return base, chat


def mill(out: Path, name: str, config: dict[str, Any], commands: list[str]) -> dict[str, float]:
    """Run commands on a config, each in a process of its own as a user would; the seconds of each."""
    path = out / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    seconds = {}
    for command in commands:
        began = time.perf_counter()
        print(f"== textmill {command} {name}.yaml", flush=True)
        subprocess.run([sys.executable, "-m", "textmill", command, str(path)], check=True)
        seconds[f"{name} {command}"] = time.perf_counter() - began
    return seconds


def curve_of(run: Path) -> list[str]:
    """Each look at the valid split, as rows of a table."""
    rows, rate = [], 0.0
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        rate = entry.get("tokens_per_second", rate)
        if "valid_loss" in entry:
            rows.append(
                f"| {entry['step']:,} | {entry['valid_loss']:.3f} | {entry['valid_accuracy']:.1%} | {rate:,.0f} |"
            )
    return ["| step | valid loss | valid accuracy | tokens/s |", "|---|---|---|---|", *rows]


def _ask_the_same(out: Path) -> None:
    """The questions of the finetuned run are asked of its first weights too."""
    if not (out / "before" / "corpus").exists():
        (out / "before" / "corpus").symlink_to(out / "chat" / "corpus")


def answers_of(root: Path, step: int, count: int) -> list[str]:
    """What a finetuned step says to questions of the valid split, by transformers alone."""
    asking = [
        sys.executable,
        str(Path(__file__).with_name("chat_answers.py")),
        str(root),
        "--step",
        str(step),
        "--count",
        str(count),
    ]
    return subprocess.run(asking, check=True, capture_output=True, text=True, encoding="utf-8").stdout.splitlines()


def main(words: list[str]) -> None:
    """Every stage that is not done yet, then the report."""
    text, pairs, out = (Path(word).absolute() for word in words[:3])
    chosen = dict(SETTINGS)
    for word in words[3:]:
        key, _, value = word.partition("=")
        chosen[key] = type(SETTINGS[key])(value)
    out.mkdir(parents=True, exist_ok=True)
    base, chat = configs_of(text, pairs, out, chosen)
    seconds = mill(out, "base", base, ["prepare", "fit-tokenizer", "tokenize", "train"])
    seconds |= mill(out, "chat", chat, ["prepare", "fit-tokenizer", "tokenize"])
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
    mill(out, "before", first, ["train"])
    seconds |= mill(out, "chat", chat, ["train"])
    _ask_the_same(out)
    before = answers_of(out / "before", 1, chosen["questions"])
    after = answers_of(out / "chat", chat["train"]["steps"], chosen["questions"])
    stages = ", ".join(f"{name} {taken:.0f} s" for name, taken in seconds.items())
    report = [
        f"Seconds: {stages}", "", "Pretraining:", "", *curve_of(out / "base" / "run"), "", "Chat:", "", *curve_of(out / "chat" / "run"), "",
        f"Before: {before[-1]}", f"After: {after[-1]}", "", "```", *after[:-1], "```",
    ]  # fmt: skip
    curves.main(
        [str(out / "curves.svg"), f"pretraining={out / 'base' / 'run'}", f"conversations={out / 'chat' / 'run'}"]
    )
    (out / "report.md").write_text("\n".join(report) + "\n", encoding="utf-8")
    print("\n".join(report))


if __name__ == "__main__":
    main(sys.argv[1:])
