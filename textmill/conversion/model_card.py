"""The model card (README.md of an exported folder), written from what the run recorded about itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from textmill.checkpoints.folders import Checkpoint
from textmill.config import RunConfig
from textmill.config.yaml_text import format_yaml
from textmill.errors import TextmillError
from textmill.models import own_options
from textmill.storage.files import read_json
from textmill.storage.stages import MANIFEST
from textmill.tokens.vocabulary.tokenizer import TextTokenizer
from textmill.track.jsonl import METRICS_FILE, read_metrics

CURVE_ROWS = 12
"""Most rows of the training curve."""
PROTOCOL = ("task", "split", "documents", "tokens", "bytes", "words", "window", "stride", "precision", "append_end")
"""What an evaluation's file says about how it was measured."""
PRIVATE_FACTS = ("file", "seconds", "device")
"""What a protocol card says about the machine: a path, and how long it took."""


def write_card(config: RunConfig, checkpoint: Checkpoint, shape: Any, tokenizer: TextTokenizer) -> str:
    """The card in Markdown: the model, its data, its training, its scores, its licence and how to use it."""
    library = "textmill" if own_options(shape) else "transformers"
    head: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["textmill"]}
    if config.export.license:
        head = {"license": config.export.license, **head}
    if config.corpus.languages:
        head = {"language": list(config.corpus.languages), **head}
    name = config.export.name or Path(str(config.export.folder)).name
    parts = [
        f"---\n{format_yaml(head)}---",
        f"# {name}",
        f"A {shape.family} language model with {shape.parameters:,} parameters, trained with textmill.",
        _table("Model", _model_rows(shape, tokenizer)),
        _table("Data", _data_rows(config)),
        _table("Training", _training_rows(checkpoint)),
        _curve(checkpoint),
        _scores(checkpoint),
        f"## Licence\n\n{config.export.license or 'Not stated by whoever exported this model.'}",
        _usage(shape, tokenizer),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(title: str, rows: list[tuple[str, Any]]) -> str:
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows if value not in (None, "", [])]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines]) if lines else ""


def _cell(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())


def _model_rows(shape: Any, tokenizer: TextTokenizer) -> list[tuple[str, Any]]:
    return [
        ("layers", shape.layers),
        ("width", shape.width),
        ("attention heads", shape.heads),
        ("longest context, tokens", shape.positions),
        ("vocabulary", shape.vocab),
        ("chat template", "yes" if tokenizer.chat or tokenizer.jinja else "no"),
    ]


def _data_rows(config: RunConfig) -> list[tuple[str, Any]]:
    """Names of sources without their folders, which are the trainer's own; counts from the manifests that exist."""
    sources = [
        Path(source).name if isinstance(source, str) else str(getattr(source, "name", type(source).__name__))
        for source in config.corpus.sources
    ]
    rows: list[tuple[str, Any]] = [("sources", ", ".join(sources))]
    for split, entry in _manifest_of(config.folder_of("tokens")).get("splits", {}).items():
        if isinstance(entry, dict):
            counts = [f"{entry[key]:,} {key}" for key in ("documents", "tokens", "bytes") if entry.get(key)]
            rows.append((f"{split} split", ", ".join(counts)))
    return rows


def _manifest_of(folder: Path) -> dict[str, Any]:
    try:
        tree = read_json(folder / MANIFEST)
    except TextmillError:
        return {}
    return tree if isinstance(tree, dict) else {}


def _training_rows(checkpoint: Checkpoint) -> list[tuple[str, Any]]:
    progress = checkpoint.progress
    made_from = progress.get("made_from")
    made_from = made_from if isinstance(made_from, dict) else {}
    keys = ("train.optimizer", "train.learning_rate", "train.batch", "train.length", "train.layout", "train.seed")
    return [
        ("steps", checkpoint.step or None),
        ("tokens seen", progress.get("tokens")),
        *((key, made_from.get(key)) for key in keys),
        ("loss on the valid split", checkpoint.valid_loss),
    ]


def _curve(checkpoint: Checkpoint) -> str:
    """Losses up to the exported step, in a few rows."""
    if not checkpoint.step:
        return ""
    metrics_by_step: dict[int, dict[str, Any]] = {}
    for row in read_metrics(checkpoint.folder.parent / METRICS_FILE):
        if row["step"] <= checkpoint.step:
            metrics_by_step.setdefault(row["step"], {}).update(row)
    if not metrics_by_step:
        return ""
    steps = sorted(metrics_by_step)
    # Evenly spaced, with the first and the last step.
    places = {round(row * (len(steps) - 1) / (CURVE_ROWS - 1)) for row in range(CURVE_ROWS)}
    lines = ["## Curve", "", "| step | train loss | valid loss |", "|---|---|---|"]
    for place in sorted(places):
        metrics = metrics_by_step[steps[place]]
        lines.append(f"| {steps[place]:,} | {_number(metrics.get('loss'))} | {_number(metrics.get('valid_loss'))} |")
    return "\n".join(lines)


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else ""


def _scores(checkpoint: Checkpoint) -> str:
    """What `textmill evaluate` measured at this step, each with its protocol: the split, the window, the stride."""
    parts = []
    for path in sorted((checkpoint.folder.parent / "evaluation").glob(f"step-{checkpoint.step:07d}*.json")):
        try:
            tree = read_json(path)
        except TextmillError:
            continue
        if isinstance(tree, dict) and (rows := _score_rows(tree)):
            table = "\n".join(["| of | figure | value |", "|---|---|---|", *rows])
            parts += [f"Protocol: {', '.join(_protocol_facts(tree))}.", table]
    return "\n\n".join(["## Scores", *parts]) if parts else ""


def _score_rows(result: dict[str, Any]) -> list[str]:
    """The numbers of a result by task or model: {"lambada": {"accuracy": 0.3}} -> | lambada | accuracy | 0.3 |."""
    rows = []
    for section, values in result.items():
        if isinstance(values, dict) and section != "card":
            for name, value in values.items():
                if isinstance(value, int | float):
                    rows.append(f"| {section} | {name} | {_cell(value)} |")
    return rows


def _protocol_facts(result: dict[str, Any]) -> list[str]:
    """How a result was measured: the protocol card of its task, or of perplexity some keys of the result itself."""
    cards = [values["card"] for values in result.values() if isinstance(values, dict) and "card" in values]
    facts = cards[0] if cards else {key: value for key, value in result.items() if key in PROTOCOL}
    return [f"{key} {_cell(value)}" for key, value in facts.items() if key not in PRIVATE_FACTS and value is not None]


def _usage(shape: Any, tokenizer: TextTokenizer) -> str:
    is_chat = tokenizer.chat or tokenizer.jinja
    if options := own_options(shape):
        command = "chat FOLDER" if is_chat else "generate FOLDER sample.prompt=Once"
        return f"## Usage\n\nOnly textmill computes {', '.join(options)}:\n\n```sh\ntextmill {command}\n```"
    call = 'model("Once", max_new_tokens=50)'
    if is_chat:
        call = 'model([{"role": "user", "content": "Hello"}], max_new_tokens=50)'
    return f"""## Usage

```python
from transformers import pipeline

model = pipeline("text-generation", "FOLDER")
print({call})
```"""
