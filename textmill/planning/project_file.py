"""Write a plan as a commented YAML file: every number with a short reason."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import yaml

from textmill.config import ModelConfig
from textmill.config.yaml_text import format_yaml_value
from textmill.corpus.inspection import RecordFacts
from textmill.models import open_family
from textmill.planning.plan import EMBEDDING_RATE_FACTOR, MachineProfile, Plan, TextProfile, fitted_fraction
from textmill.training.auto_preset import MAX_EPOCHS

Row = tuple[str, object, str]
"""A key, its value, and its comment; a key without a value is a group, and the rows after it are indented by the
caller."""
MIN_PAIR_BYTES = 400
"""Shorter documents have too few sentences for sentence pairs."""
MIN_NEAR_DUPLICATES = 0.01
MAX_NEAR_DUPLICATES = 0.8
"""Fractions of a sample that nearly repeats other texts, between which this is removed: if nearly all of it does, the
texts follow a template, and hardly anything would be left."""
SECOND_GENERATION = """\
# The text, not the time, is the limit: so a second model learns from the first, and is the result.
# It was 0.02 to 0.04 bits per byte better where this was measured (docs/distil.md).
"""
STAGES = "prepare, fit-tokenizer, tokenize, train, evaluate, generate"


@dataclass(frozen=True)
class Project:
    """A text, a machine, and the plan to train a model of the text on the machine."""

    folder: str
    sources: list[str]
    """Where the text is, as the project's file names it; see `path_in_project`."""
    records: RecordFacts
    text: TextProfile
    machine: MachineProfile
    plan: Plan
    family: str = "gpt2"

    @property
    def masked(self) -> bool:
        """Whether the model predicts masked tokens, and not the next one."""
        return open_family(self.family).OBJECTIVE == "masked"


def project_yaml(project: Project) -> str:
    """The content of textmill.yaml."""
    text = project.text
    machine = project.machine
    plan = project.plan
    scripts = ", ".join(f"{script} {share:.0%}" for script, share in text.scripts.items() if share >= 0.01)
    quoted = shlex.quote(project.folder)
    millions = count_model_parameters(project) / 1e6
    stages = "prepare, fit-tokenizer, tokenize, train" if project.masked else STAGES
    head = f"""\
# Settings for {text.bytes / 1e6:.1f} MB of text ({scripts or "no letters"}) in about {text.documents:,} documents,
# on {machine.name} ({machine.cores} CPU cores): {millions:.1f}M parameters, {_minutes(plan)}.
#
#   textmill run {quoted}            # all stages: {stages}
#   textmill COMMAND --help --all    # every setting with its default
#
# Paths are relative to this file. Each stage writes a folder next to it: corpus, tokenizer, tokens, run.
# Change what you like: a finished stage is not run twice, and a change that would alter its
# result is reported before anything is overwritten. docs/autopilot.md explains every choice.
"""
    lines = [head, *([SECOND_GENERATION] if plan.generations > 1 else [])]
    for section, rows in _sections(project).items():
        lines.append(f"{section}:")
        lines += [_line(*row) for row in rows]
        lines.append("")
    return "\n".join(lines)


def path_in_project(path: str, folder: str | Path) -> str:
    """A source's path as the project's file names it: relative to the file in its folder and the folder's parent,
    which are moved together, else absolute."""
    relative = os.path.relpath(path, folder)
    return os.path.abspath(path) if relative.startswith(os.path.join("..", "..")) else relative


def count_model_parameters(project: Project) -> int:
    """All parameters of the finished model, as `train` and `show` count them; the rules of a plan count fewer."""
    rows = _sections(project)["model"]
    model = ModelConfig.model_validate(yaml.safe_load("\n".join(_line(*row) for row in rows)))
    return (
        open_family(project.family)
        .shape_of(model, vocab=project.plan.vocab, eos_id=0, length=project.plan.length)
        .parameters
    )


def _line(key: str, value: object, note: str) -> str:
    setting = f"  {key}: {value}" if value != "" else f"  {key}:"
    return f"{setting:<29} # {note}" if note else setting


def two_digits(number: float) -> str:
    """A number with two significant digits, such as 0.012 or 3,000."""
    return f"{float(f'{number:.2g}'):,.15g}"


def _minutes(plan: Plan) -> str:
    return f"about {plan.all_seconds / 60:.1f} min of training" if plan.ends_early else f"about {plan.minutes:g} min"


def _sections(project: Project) -> dict[str, list[Row]]:
    """The settings by section."""
    sections = _common_sections(project)
    if project.machine.device == "cuda" and not project.plan.compiled:
        sections["engine"] = [("compile", "false", "it would take more time than it saves in so short a run")]
    if project.masked:
        sections = _masked_sections(sections, project.text, project.plan, project.family)
    return sections


def _common_sections(project: Project) -> dict[str, list[Row]]:
    """Those of a model that predicts the next token."""
    records = project.records
    text = project.text
    plan = project.plan
    family = project.family
    untied = plan.is_untied(family)
    interval = max(20, round(plan.steps / 80) * 10)  # steps between two evaluations
    return {
        "corpus": _corpus_rows(project.sources, records, text),
        "tokenizer": [
            (
                "vocab",
                plan.vocab,
                f"{text.bytes_per_token[plan.vocab]:.1f} bytes per token; a pass over the text is cheapest",
            ),
            *([("chat", "default", "tokens that mark who speaks, and the end of an answer")] if records.chat else []),
            *_sample_rows(text, plan.minutes),
        ],
        "model": [
            *([("family", family, "rotary positions, RMSNorm and a gated MLP")] if family == "llama" else []),
            ("shape", "", f"{two_digits(plan.parameters / plan.train_tokens)} parameters for each token of the text"),
            ("  layers", plan.layers, ""),
            ("  heads", plan.heads, ""),
            ("  width", plan.width, "the largest net that sees the text often enough in this time"),
            *_dropout_rows(plan),
            *([("  qk_norm", "true", "queries and keys are normalised, as in Qwen3")] if family == "llama" else []),
            *([("  untied", "true", "a head with weights of its own, which takes no more time")] if untied else []),
        ],
        "train": [
            *([("layout", "chat", "loss on the answers only")] if records.chat else []),
            *_train_rows(plan, interval, untied),
        ],
        "sample": [
            (
                "prompt",
                "null",
                "a question for the finished model; null: some of the valid split"
                if records.chat
                else 'what the finished model continues, such as "Once upon a time"',
            ),
            ("temperature", 0.8, "0: always the likeliest token; higher: more random"),
            ("max_tokens", 40 if records.chat else 200, "tokens of new text"),
        ],
    }


def _sample_rows(text: TextProfile, minutes: float) -> list[Row]:
    fraction = fitted_fraction(text, minutes)
    return [("fit_sample", fraction, "this fraction of the documents is enough")] if fraction < 1 else []


def _dropout_rows(plan: Plan) -> list[Row]:
    if not plan.dropout:
        return [("  dropout", 0.0, "not needed for so few epochs")]
    return [
        ("  dropout", plan.dropout, "used when the text is repeated many times"),
        ("  attention_dropout", 0.0, "none on attention weights: that would be slow on a GPU"),
    ]


def _corpus_rows(sources: list[str], records: RecordFacts, text: TextProfile) -> list[Row]:
    rows: list[Row] = [("sources", format_yaml_value(sources), "files, globs and folders")]
    if records.text_key and records.text_key != "text":
        rows.append(("text_key", format_yaml_value(records.text_key), "the field with the text"))
    if not records.encoding.startswith("utf-"):
        rows.append(("encoding", records.encoding, "of the files that are not UTF-8; a guess from their bytes"))
    if records.chat:
        rows.append(("chat", records.chat, "the records are conversations"))
    if text.cut_records:
        rows.append(("cut_records", "true", "a few long records hold the text"))
    if text.section:
        what = "a record" if text.cut_records else "a text"
        rows.append(("section_chars", text.section, f"{what} is cut into documents of about this many characters"))
    held_out = text.held_out_percent
    ratios = f"{100 - 2 * held_out},{held_out},{held_out}"
    rows.append(("split", ratios, "percent for train, valid and test; a document keeps its split"))
    if text.split_by == "position":
        reason = "the middle of a long text is valid and test, with a gap on both sides: so they are new"
        rows.append(("split_by", "position", reason))
    elif text.split_by == "file":
        rows.append(("split_by", "file", "all sections of a file are in one split: so valid and test are new"))
    elif text.split_by != "document":
        name = text.split_by.partition(":")[2]
        rows.append(("keep_fields", format_yaml_value([name]), ""))
        rows.append(
            ("split_by", text.split_by, f"all texts of the same {name} are in one split: so valid and test are new")
        )
    if MIN_NEAR_DUPLICATES <= text.near_duplicates <= MAX_NEAR_DUPLICATES and not records.chat:
        share = f"{text.near_duplicates:.0%} of a sample nearly repeat other texts"
        rows.append(("dedup", "near", f"{share}, which are kept once: so valid and test are new"))
    return rows


def _train_rows(plan: Plan, interval: int, untied: bool) -> list[Row]:
    slow = "the head and norms" if untied else "embeddings and biases"
    rate: Row = ("embedding_rate_factor", EMBEDDING_RATE_FACTOR, "embeddings learn so much faster than the head")
    again: Row = ("generations", plan.generations, "as many epochs for each, which learns from the one before")
    seen = f"of the whole command; about {two_digits(plan.epochs)} epochs, {plan.steps:,} steps"
    return [
        ("length", plan.length, "tokens per sample"),
        ("batch", plan.batch, f"samples per step: {plan.batch * plan.length:,} tokens"),
        ("minutes", f"{plan.minutes:g}", seen),
        ("max_epochs", f"{MAX_EPOCHS:g}", "more do not help, even if there is time"),
        *([again] if plan.generations > 1 else []),
        ("optimizer", "muon", "better than AdamW at every size that was measured"),
        ("learning_rate", plan.learning_rate, "0.125 / sqrt(width), Muon's"),
        ("muon", "", ""),
        ("  momentum", 0.9, ""),
        ("  adamw_rate_factor", plan.adamw_rate_factor, f"{slow} learn at 0.01"),
        *([rate] if untied else []),
        ("weight_decay", plan.weight_decay, "by parameters for each token, epochs and batch"),
        ("warmup", 0.05, "of the run; then the learning rate falls to 0 (cosine)"),
        ("evaluate_every", interval, "steps between two measurements of the valid loss"),
        ("save_every", interval, "steps between two checkpoints; training resumes from them, transformers opens them"),
    ]


def _masked_sections(
    sections: dict[str, list[Row]], text: TextProfile, plan: Plan, family: str
) -> dict[str, list[Row]]:
    """The sections of a plan, changed for a model that predicts masked tokens: sentences, WordPiece, masked layout."""
    pairs: Row = ("  pairs", "next", "sentence pairs: does the second follow the first?")
    shape = sections["model"]
    if text.document_bytes < MIN_PAIR_BYTES:
        pairs = ("  pairs", "none", f"full sentences: documents of {text.document_bytes:.0f} bytes are short for pairs")
        shape = [*shape, ("  pair_head", "false", "there are no pairs")]
    return {
        "corpus": [*sections["corpus"], ("sentences", "split", "one sentence per line")],
        "tokenizer": [
            ("kind", "wordpiece", "as in BERT"),
            ("vocab", plan.vocab, "holds the characters of the text"),
            *(row for row in sections["tokenizer"] if row[0] == "fit_sample"),
        ],
        "tokens": [
            ("level", "sentence", "samples are made of full sentences"),
            ("append_end", "false", "samples have their own [SEP]"),
        ],
        "model": [("family", family, "predicts masked tokens"), *shape],
        "train": [
            ("layout", "masked", "15 % of the tokens are masked, others in each epoch"),
            ("masked", "", ""),
            pairs,
            *sections["train"],
        ],
        **{name: rows for name, rows in sections.items() if name == "engine"},
    }
