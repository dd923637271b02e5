"""The command run: all stages from text to an evaluated model with samples, skipping those that are done.

`run` calls the function of each stage, which is also a command of its own: prepare, fit_tokenizer, tokenize, train,
evaluate, generate. Afterwards it says how good the model is and proposes what to do next. The results of evaluation and
generation are kept in summary.json: a second call prints them without computing them again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from textmill.checkpoints.folders import list_checkpoints, rank_checkpoints
from textmill.commands.evaluate import evaluate
from textmill.commands.next_steps import print_next_steps
from textmill.commands.prepare import prepare
from textmill.config import EvaluateConfig, RunConfig
from textmill.engines.early_import import import_torch_meanwhile
from textmill.evaluation import format_tables
from textmill.evaluation.measured_task import format_metrics
from textmill.generation import generate
from textmill.generation.chat import answer
from textmill.generation.fill import fill
from textmill.models import Shape, count_blocks_and_head, label_head_of, open_family, read_shape
from textmill.planning.verdict import RunFacts, describe_forecast, describe_quality, describe_state, read_curves
from textmill.processes.command_time import CommandTime
from textmill.runners import share_runner
from textmill.storage.files import format_path, read_json, write_json
from textmill.storage.stages import MANIFEST, Force
from textmill.tokens.splits import open_splits
from textmill.tokens.tokenize import tokenize
from textmill.tokens.vocabulary.fitting import fit_tokenizer
from textmill.tokens.vocabulary.tokenizer import tokenizer_of
from textmill.training.imported_model import use_imported_model
from textmill.training.loop import train
from textmill.training.new_run import check_start
from textmill.training.run_folder import SUMMARY_FILE
from textmill.training.teacher_cache import cache_teacher


def run(config: RunConfig, force: Force = "no", *, command: CommandTime | None = None) -> Path:
    """prepare, fit-tokenizer, tokenize, train, evaluate, generate; return the run's folder."""
    config = use_imported_model(config)
    command = replace(command or CommandTime(), evaluates=_evaluates(config))
    check_start(config)
    if config.engine.device not in ("auto", "cpu"):
        from textmill.devices import open_device

        open_device(config.engine.device)  # fails here, before any work, if there is none
    imports = import_torch_meanwhile()
    stages = {"prepare": prepare, "fit-tokenizer": fit_tokenizer, "tokenize": tokenize}
    with share_runner(config.runner):
        for number, (name, run_stage) in enumerate(stages.items(), 1):
            reason = _reason_to_skip(config, name)
            if reason is not None:
                _headline(number, f"{name}: not needed: {reason}")
            else:
                _headline(number, name)
                run_stage(config, force)
    imports.join()
    _headline(4, "train")
    if config.train.distil.cache:
        cache_teacher(config, force)
    folder = train(config, force, command=command)
    checkpoint = rank_checkpoints(folder, None)[0]
    summary = _summarize(config, folder, checkpoint)
    measured = summary["measured"]
    facts = _facts_of(config, folder, checkpoint)
    print()
    if not config.corpus.labels:
        vocab = read_shape(checkpoint).vocab
        lines = [*describe_quality(measured), describe_state(facts), *describe_forecast(measured, facts, vocab)]
        print("\n".join(lines))
        if summary.get("verdict") != lines:
            write_json(folder / SUMMARY_FILE, {**summary, "verdict": lines})
    print_next_steps(config, checkpoint, facts, evaluated=_evaluates(config))
    return folder


def _summarize(config: RunConfig, folder: Path, checkpoint: Path) -> dict[str, Any]:
    """Evaluate the model and let it write, or print what an earlier call saved for the same weights and settings."""
    files = read_json(checkpoint / MANIFEST)["files"]
    weights = [entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")]
    inputs = {"step": checkpoint.name, "weights": weights, **config.results("evaluate", "sample")}
    summary = _read_summary(folder, inputs)
    if summary is not None:
        _print_summary(config, summary)
        return summary
    measured, texts = _use_model(config, read_shape(checkpoint))
    summary = {"inputs": inputs, "measured": measured, "texts": texts}
    write_json(folder / SUMMARY_FILE, summary)
    return summary


def _use_model(config: RunConfig, shape: Shape) -> tuple[dict[str, Any] | None, list[str]]:
    """Evaluate the model and let it write; a model for masked tokens fills the masks of `sample.prompt`."""
    if label_head_of(shape):
        measured = _evaluate_split(config)
        _headline(6, "generate: not needed: the model predicts labels")
        return measured, []
    if open_family(shape.family).OBJECTIVE == "masked":
        measured = _evaluate_masked(config)
        _headline(6, "fill" if config.sample.prompt else "fill: no sample.prompt")
        return measured, fill(config) if config.sample.prompt else []
    measured = _evaluate_split(config)
    _headline(6, "generate")
    if config.train.layout == "chat":
        return measured, answer(config)
    return measured, [(config.sample.prompt or "") + text for text in generate(_with_prompt(config))]


def _evaluates(config: RunConfig) -> bool:
    """Whether the model is evaluated after training: for one that predicts masked tokens only if tasks are configured,
    since the default one is for models that predict the next token."""
    # Not the family: with model.init_from it need not be set.
    masked = config.train.layout == "masked"
    return bool(config.corpus.labels) or not masked or config.evaluate.tasks != EvaluateConfig().tasks


def _evaluate_masked(config: RunConfig) -> dict[str, Any] | None:
    """Run the tasks that are configured."""
    if not _evaluates(config):
        _headline(5, "evaluate: the valid loss and accuracy above are those of masked tokens; more with evaluate.tasks")
        return None
    return _evaluate_split(config)


def _evaluate_split(config: RunConfig) -> dict[str, Any] | None:
    """Evaluate on the split of `evaluate.split`, unless it is empty."""
    _headline(5, "evaluate")
    return evaluate(config) if _has_tokens(config, config.evaluate.split) else None


def _reason_to_skip(config: RunConfig, stage: str) -> str | None:
    """Why a stage is not needed: existing tokens need no corpus, and come with the tokenizer that made them."""
    if config.tokens.use and stage == "prepare":
        tokenizer_of(config.folder_of("tokenizer"), config.tokenizer)  # fails here, before any work, if there is none
        return "tokens.use names existing tokens"
    if config.tokens.use and stage == "fit-tokenizer" and not config.tokenizer.use:
        return f"{format_path(config.folder_of('tokenizer'))} is used as it is"
    return None


def _with_prompt(config: RunConfig) -> RunConfig:
    """The config with an empty prompt if it has none: `run` never waits for one to be typed."""
    sample = config.sample.model_copy(update={"prompt": config.sample.prompt or ""})
    return config.model_copy(update={"sample": sample})


def _headline(number: int, text: str) -> None:
    print(f"\n[{number}/6] {text}", flush=True)


def _has_tokens(config: RunConfig, split: str) -> bool:
    if open_splits(config).stores(split):
        return True
    print(
        f"the {split} split is empty, so there is nothing to evaluate on; "
        "use more text, or give the split more of corpus.split"
    )
    return False


def _read_summary(folder: Path, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The results that an earlier run saved for the same checkpoint and the same settings."""
    if not (folder / SUMMARY_FILE).is_file():
        return None
    summary: dict[str, Any] = read_json(folder / SUMMARY_FILE)
    return summary if summary.get("inputs") == inputs else None


def _print_summary(config: RunConfig, summary: dict[str, Any]) -> None:
    if (measured := summary["measured"]) is not None:
        _headline(5, f"evaluate: done already, on the {config.evaluate.split} split")
        labels = config.corpus.labels
        print(format_metrics(labels, measured[labels]) if labels else format_tables(config.evaluate.tasks, measured))
    _headline(6, f"{'fill' if config.train.layout == 'masked' else 'generate'}: done already")
    for text in summary["texts"]:
        print(text)


def _facts_of(config: RunConfig, folder: Path, checkpoint: Path) -> RunFacts:
    _, last_checkpoint = max(list_checkpoints(folder).items())
    unique_tokens = sum(store.tokens for store in open_splits(config).stores("train"))
    valid_losses, train_loss, epochs = read_curves(folder)
    tokens = read_json(last_checkpoint / "progress.json")["tokens"] if epochs is None else round(epochs * unique_tokens)
    shape = read_shape(checkpoint)
    plain_loss = not (config.train.distil.teachers or config.train.distil.cache or config.train.label_smoothing)
    return RunFacts(
        parameters=count_blocks_and_head(shape),
        unique_tokens=unique_tokens,
        tokens=tokens,
        valid_losses=valid_losses,
        from_scratch=config.model.init_from is None,
        all_parameters=shape.parameters,
        train_loss=train_loss if plain_loss else None,
    )
