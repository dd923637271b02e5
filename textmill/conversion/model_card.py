"""The model card (README.md of an exported folder), written from what the run recorded about itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from textmill.checkpoints.adapters import ADAPTER_CONFIG, is_adapter
from textmill.checkpoints.folders import Checkpoint, open_model
from textmill.config import CorpusConfig, ExportConfig
from textmill.config.load import read_yaml
from textmill.config.yaml_text import format_yaml
from textmill.errors import TextmillError
from textmill.models import has_masked_head, label_head_of
from textmill.models.pooling import Pooling
from textmill.storage.files import read_json
from textmill.storage.stages import MANIFEST
from textmill.tokens.vocabulary.tokenizer import TextTokenizer
from textmill.track.jsonl import METRICS_FILE, read_metrics

CARD = "README.md"
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
LARGEST_LICENCE = 1_000_000
CURVE_ROWS = 12
"""Most rows of the training curve."""
FILE_FACTS = {"file", "text"}
"""What a protocol card says about files: their names are shown, without the folders of this machine."""
PRIVATE_FACTS = ("seconds", "device", "predictions")
"""What a protocol card says about the machine."""


def write_card(
    export: ExportConfig,
    corpus: CorpusConfig,
    tokens: Path,
    checkpoint: Checkpoint,
    shape: Any,
    tokenizer: TextTokenizer,
    pooling: Pooling | None,
) -> str:
    """The card in Markdown: the model, its data, its training, its scores, its licence and how to use it.

    `corpus` and the folder `tokens` are the run's. A model that was not trained here keeps the card that it came with.
    """
    base = find_base_model(checkpoint)
    source = read_card(checkpoint.folder if not checkpoint.step else base.folder if base and base.folder else None)
    tag = _tag_of(shape, pooling)
    license_ = export.license or source.head.get("license")
    library = "sentence-transformers" if pooling is not None and shape.family == "bert" else "transformers"
    head: dict[str, Any] = {"library_name": library, "pipeline_tag": tag}
    if not checkpoint.step and source.body:
        head = {**head, **source.head, **({"license": license_} if license_ else {})}
        return format_card(head, source.body)
    head["tags"] = ["textmill"]
    if base:
        head["base_model"] = base.name
    if license_:
        head = {"license": license_, **head}
    if languages := list(corpus.languages) if checkpoint.step else source.head.get("language"):
        head = {"language": languages, **head}
    name = export.name or Path(str(export.folder)).name
    training = "Training" if base is None else "Adapter" if is_adapter(checkpoint.folder) else "Finetuning"
    parts = [
        f"---\n{format_yaml(head)}---",
        f"# {name}",
        _describe(shape, NOUNS[tag], checkpoint, base),
        _table("Model", _model_rows(shape, tokenizer)),
        _table("Data", _data_rows(corpus.sources, tokens)) if checkpoint.step else "",
        _table(training, _training_rows(checkpoint)),
        _curve(checkpoint),
        _scores(checkpoint),
        f"## Licence\n\n{license_ or 'Not stated by whoever exported this model.'}",
        f"## Usage\n\n```python\n{_code_of(tag, tokenizer)}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


@dataclass(frozen=True)
class BaseModel:
    """The model that a run began with."""

    name: str
    """Its name on the hub, or that of its folder."""
    folder: Path | None
    """Its folder, if it is still there."""


def find_base_model(checkpoint: Checkpoint) -> BaseModel | None:
    """The base of an adapter, or what `model.init_from` of the run names; None for a model trained from scratch."""
    recorded = checkpoint.folder / "run.yaml"
    named = None
    if is_adapter(checkpoint.folder):
        named = read_json(checkpoint.folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    elif checkpoint.step and recorded.is_file():
        named = (read_yaml(recorded)[0].get("model") or {}).get("init_from")
    if not isinstance(named, str):
        return None
    try:
        folder = open_model(named).folder
    except TextmillError:
        folder = None
    is_local = Path(named).is_absolute() or Path(named).exists()
    # The folders below a project have no name of their own: PROJECT/run/step-0000100.
    parts = [part for part in Path(named).parts if not part.startswith("step-") and part not in ("run", "best")]
    return BaseModel(parts[-1] if is_local and parts else named, folder)


@dataclass(frozen=True)
class SourceCard:
    """The README.md that a model came with."""

    head: dict[str, Any]
    """Its YAML."""
    body: str


def read_card(folder: Path | None) -> SourceCard:
    """The card in a folder; an empty one if there is none."""
    path = folder / CARD if folder else None
    return parse_card(path.read_text(encoding="utf-8", errors="replace") if path and path.is_file() else None)


def parse_card(text: str | None) -> SourceCard:
    """The head and the body of a card."""
    if not text or not text.startswith("---\n") or "\n---\n" not in text:
        return SourceCard({}, text or "")
    head, _, body = text.removeprefix("---\n").partition("\n---\n")
    try:
        tree = yaml.safe_load(head)
    except yaml.YAMLError:
        tree = None
    return SourceCard(tree if isinstance(tree, dict) else {}, body)


def format_card(head: dict[str, Any], body: str) -> str:
    """A card of a head and a body."""
    return f"---\n{format_yaml(head)}---\n{body}"


def read_licences(folder: Path) -> dict[str, str]:
    """The texts of licences in a folder, by file name; they must go with a model."""
    paths = [path for pattern in LICENCES for path in sorted(folder.glob(pattern)) if path.is_file()]
    small = [path for path in paths if path.stat().st_size < LARGEST_LICENCE]
    return {path.name: path.read_text(encoding="utf-8", errors="replace") for path in small}


NOUNS = {
    "text-generation": "language model",
    "sentence-similarity": "text encoder",
    "text-classification": "text classifier",
    "token-classification": "token classifier",
    "question-answering": "question-answering model",
    "fill-mask": "masked language model",
    "feature-extraction": "text encoder",
}
"""What a model is, by the pipeline of the hub that it is for."""
EMBED = """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("FOLDER")
print(model.encode(["a text", "another one"]))"""
ANSWER = """from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForQuestionAnswering.from_pretrained("FOLDER")
inputs = tokenizer("Where is the mill?", "The mill is by the river.", return_tensors="pt")
outputs = model(**inputs)
first, last = int(outputs.start_logits.argmax()), int(outputs.end_logits.argmax())
print(tokenizer.decode(inputs["input_ids"][0][first : last + 1]))"""
"""Without a pipeline: transformers 5 has none for it."""


def _tag_of(shape: Any, pooling: Pooling | None) -> str:
    """The pipeline of the hub that a model is for, by its head."""
    if shape.family != "bert":
        return "text-generation"
    if pooling is not None:
        return "sentence-similarity"
    if head := label_head_of(shape):
        return "text-classification" if head[0] == "sequence-classification" else head[0]
    return "fill-mask" if has_masked_head(shape) else "feature-extraction"


def _code_of(tag: str, tokenizer: TextTokenizer) -> str:
    """Python that uses a model."""
    if tag in (own := {"sentence-similarity": EMBED, "question-answering": ANSWER}):
        return own[tag]
    given = {"text-generation": '"Once"', "fill-mask": f'"a text with a {tokenizer.roles.get("mask_token", "[MASK]")}"'}
    call = given.get(tag, '"a text"')
    if tag == "text-generation" and tokenizer.has_template:
        call = '[{"role": "user", "content": "Hello"}]'
    more = ", max_new_tokens=50" if tag == "text-generation" else ""
    return f'from transformers import pipeline\n\nmodel = pipeline("{tag}", "FOLDER")\nprint(model({call}{more}))'


def _describe(shape: Any, noun: str, checkpoint: Checkpoint, base: BaseModel | None) -> str:
    what = f"A {shape.family} {noun} with {shape.parameters:,} parameters"
    if base is not None and is_adapter(checkpoint.folder):
        return f"{what}: {base.name} with a LoRA adapter merged into it. The adapter was trained with textmill."
    if base is not None:
        return f"{what}, finetuned from {base.name} with textmill."
    return f"{what}, trained with textmill." if checkpoint.step else f"{what}, converted with textmill."


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
        ("chat template", "yes" if tokenizer.has_template else "no"),
    ]


def _data_rows(entries: Sequence[Any], tokens: Path) -> list[tuple[str, Any]]:
    """Names of sources without their folders, which are the trainer's own; counts from the manifests that exist."""
    sources = [
        Path(source).name if isinstance(source, str) else str(getattr(source, "name", type(source).__name__))
        for source in entries
    ]
    rows: list[tuple[str, Any]] = [("sources", ", ".join(sources))]
    for split, entry in _manifest_of(tokens).get("splits", {}).items():
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
    """What `textmill evaluate` measured at this step: file names, intervals, and how it was measured."""
    parts = []
    for path in sorted((checkpoint.folder.parent / "evaluation").glob("*.json")) if checkpoint.step else []:
        try:
            tree = read_json(path)
        except TextmillError:
            continue
        if isinstance(tree, dict) and tree.get("step") == checkpoint.step and (rows := _score_rows(tree)):
            table = "\n".join(["| of | figure | value | 95% interval |", "|---|---|---|---|", *rows])
            parts += [f"Protocol: {', '.join(_protocol_facts(tree))}.", table]
    return "\n\n".join(["## Scores", *parts]) if parts else ""


def _score_rows(result: dict[str, Any]) -> list[str]:
    """The numbers of a result by task or model: {"lambada": {"accuracy": 0.3}} -> | lambada | accuracy | 0.3 | |."""
    rows = []
    for section, values in result.items():
        if not isinstance(values, dict):
            continue
        intervals = values.get("intervals", {})
        for name, value in values.items():
            if isinstance(value, int | float):
                ends = intervals.get(name)
                interval = f"{_cell(ends[0])} to {_cell(ends[1])}" if isinstance(ends, list) and len(ends) == 2 else ""
                rows.append(f"| {section} | {name} | {_cell(value)} | {interval} |")
    return rows


def _protocol_facts(result: dict[str, Any]) -> list[str]:
    """How a result was measured: the protocol card of its task."""
    cards = [values["card"] for values in result.values() if isinstance(values, dict) and "card" in values]
    facts = dict(cards[0]) if cards else {}
    for key in FILE_FACTS & facts.keys():
        files = facts[key] if isinstance(facts[key], list) else [facts[key]]
        facts[key] = ", ".join(Path(file).name for file in files)
    return [f"{key} {_cell(value)}" for key, value in facts.items() if key not in PRIVATE_FACTS and value is not None]
