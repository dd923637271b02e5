"""The command run: all stages from text to an evaluated model with samples, skipping those that are done.

`run` calls the function of each stage, which is also a command of its own: prepare, fit_tokenizer, tokenize, train,
evaluate, generate. Afterwards it says how good the model is and proposes what to do next. The results of evaluation and
generation are kept in summary.json: a second call prints them without computing them again.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import time
from contextlib import redirect_stderr, suppress
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

from textmill.checkpoints.adapters import is_adapter
from textmill.checkpoints.folders import list_checkpoints, rank_checkpoints
from textmill.commands.evaluate import check_evaluation, evaluate
from textmill.commands.prepare import prepare
from textmill.config import SIZES, STAGE_FOLDERS, EvaluateConfig, ModelConfig, RunConfig, StageName, TokenizerConfig
from textmill.config.own_files import is_own_file
from textmill.config.yaml_text import format_yaml_value
from textmill.corpus.shards import open_corpus
from textmill.engines.early_import import import_torch_meanwhile
from textmill.errors import TextmillError
from textmill.evaluation import format_tables
from textmill.generation import generate
from textmill.generation.chat import answer
from textmill.generation.fill import fill
from textmill.generation.prompts import find_prompts
from textmill.models import Shape, count_blocks_and_head, label_head_of, open_family, read_shape
from textmill.planning.verdict import FinishedRun, State, describe_quality, describe_state, read_curves, state_of
from textmill.runners import share_runner
from textmill.storage.files import check_folder, claim_folder, format_path, read_json, write_json
from textmill.storage.stages import MANIFEST, Force
from textmill.tokens.splits import open_splits
from textmill.tokens.tokenize import tokenize
from textmill.tokens.vocabulary.fitting import fit_tokenizer
from textmill.tokens.vocabulary.tokenizer import tokenizer_of
from textmill.training.generations import check_processes, train
from textmill.training.run_folder import SUMMARY_FILE
from textmill.training.start import check_start, use_imported_model
from textmill.where import open_where


def run(config: RunConfig, force: Force = "no", *, started: float | None = None) -> Path:
    """prepare, fit-tokenizer, tokenize, train, evaluate, generate; return the run's folder."""
    started = time.perf_counter() if started is None else started
    config = check_before_work(config)
    imports = import_torch_meanwhile()
    stages = {"prepare": prepare, "fit-tokenizer": fit_tokenizer, "tokenize": tokenize}
    skipped: dict[str, str] = {}
    if config.tokens.use:
        skipped = _stages_to_skip(config.folder_of("tokenizer"), config.tokenizer, config.train.layout)
    with share_runner(config.runner):
        for number, (name, run_stage) in enumerate(stages.items(), 1):
            if name in skipped:
                _headline(number, f"{name}: not needed: {skipped[name]}")
            else:
                _headline(number, name)
                run_stage(config, force)
    imports.join()
    _headline(4, "train")
    evaluates = _evaluates(config)
    folder = train(config, force, started=started, evaluates=evaluates)
    checkpoint = rank_checkpoints(folder, None)[0]
    summary = _summarize(config, folder, checkpoint)
    measured = summary["measured"]
    facts = _describe_run(config, folder, checkpoint)
    print()
    if not config.corpus.labels:
        lines = [*describe_quality(measured), describe_state(facts)]
        print("\n".join(lines))
        if summary.get("verdict") != lines:
            write_json(folder / SUMMARY_FILE, {**summary, "verdict": lines})
    print_next_steps(config, checkpoint, facts, evaluated=evaluates)
    return folder


def check_before_work(config: RunConfig) -> RunConfig:
    """Refuse settings that a later stage cannot use; return the config with `model.init_from` as a model folder.

    Unless all is well, nothing that is written here is left.
    """
    check_processes(config.train)
    names: tuple[StageName, ...] = () if config.tokens.use else ("corpus", "tokenizer", "tokens")
    for name in names:
        if not ((folder := config.folder_of(name)) / MANIFEST).is_file():
            check_folder(folder, f"{name}.folder")
    with claim_folder(config.folder_of("train"), "train.folder", True) as keep_folder:
        imported = use_imported_model(config)
        shape = check_start(imported)
        if _evaluates(config):
            check_evaluation(config.evaluate, config.corpus, shape, config.train.length)
        if config.sample.prompts_file is not None:
            find_prompts(config.sample)
        if imported is not config:
            keep_folder()
    return imported


def _summarize(config: RunConfig, folder: Path, checkpoint: Path) -> dict[str, Any]:
    """Evaluate the model and let it write, or print what an earlier call saved for the same weights and settings."""
    files = read_json(checkpoint / MANIFEST)["files"]
    weights = [entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")]
    inputs = {"step": checkpoint.name, "weights": weights, **config.results("evaluate", "sample")}
    path = folder / SUMMARY_FILE
    summary: dict[str, Any] = read_json(path) if path.is_file() else {}
    if summary.get("inputs") == inputs:
        if (measured := summary["measured"]) is not None:
            _headline(5, f"evaluate: done already, on the {config.evaluate.split} split")
            print(format_tables(measured))
        _headline(6, f"{'fill' if config.train.layout == 'masked' else 'generate'}: done already")
        for text in summary["texts"]:
            print(text)
        return summary
    measured, texts = _use_model(config, read_shape(checkpoint))
    summary = {"inputs": inputs, "measured": measured, "texts": texts}
    write_json(path, summary)
    return summary


def _use_model(config: RunConfig, shape: Shape) -> tuple[dict[str, Any] | None, list[str]]:
    """Evaluate the model and let it write; a model for masked tokens fills the masks of `sample.prompt`."""
    if label_head_of(shape):
        measured = _evaluate_split(config)
        _headline(6, "generate: not needed: the model predicts labels")
        return measured, []
    if open_family(shape.family).OBJECTIVE == "masked":
        if _evaluates(config):
            measured = _evaluate_split(config)
        else:
            measured = None
            _headline(
                5, "evaluate: the valid loss and accuracy above are those of masked tokens; more with evaluate.tasks"
            )
        _headline(6, "fill" if config.sample.prompt else "fill: no sample.prompt")
        return measured, fill(config) if config.sample.prompt else []
    measured = _evaluate_split(config)
    _headline(6, "generate")
    if config.train.layout == "chat":
        return measured, answer(config)
    prompt = config.sample.prompt or ""  # `run` never waits for one to be typed
    sample = config.sample.model_copy(update={"prompt": prompt})
    return measured, [prompt + text for text in generate(config.model_copy(update={"sample": sample}))]


def _evaluates(config: RunConfig) -> bool:
    """Whether the model is evaluated after training: for one that predicts masked tokens only if tasks are configured,
    since the default one is for models that predict the next token."""
    # Not the family: with model.init_from it need not be set.
    return bool(
        config.corpus.labels or config.train.layout != "masked" or config.evaluate.tasks != EvaluateConfig().tasks
    )


def _evaluate_split(config: RunConfig) -> dict[str, Any] | None:
    """Evaluate on the split of `evaluate.split`, unless it is empty."""
    _headline(5, "evaluate")
    split = config.evaluate.split
    if open_splits(config).stores(split):
        return evaluate(config)
    print(
        f"the {split} split is empty, so there is nothing to evaluate on; "
        "use more text, or give the split more of corpus.split"
    )
    return None


def _stages_to_skip(folder: Path, tokenizer: TokenizerConfig, layout: str) -> dict[str, str]:
    """The stages that existing tokens do not need, and why: they need no corpus, and come with their tokenizer."""
    tokenizer_of(folder, tokenizer, layout)  # fails here, before any work, if there is none
    skipped = {"prepare": "tokens.use names existing tokens"}
    return skipped if tokenizer.use else {**skipped, "fit-tokenizer": f"{format_path(folder)} is used as it is"}


def _headline(number: int, text: str) -> None:
    print(f"\n[{number}/6] {text}", flush=True)


def _describe_run(config: RunConfig, folder: Path, checkpoint: Path) -> FinishedRun:
    _, last_checkpoint = max(list_checkpoints(folder).items())
    unique_tokens = sum(store.tokens for store in open_splits(config).stores("train"))
    valid_losses, train_loss, epochs = read_curves(folder)
    tokens = read_json(last_checkpoint / "progress.json")["tokens"] if epochs is None else round(epochs * unique_tokens)
    shape = read_shape(checkpoint)
    train = config.train
    plain_loss = not (train.distil.teachers or train.generations > 1 or train.label_smoothing)
    return FinishedRun(
        parameters=count_blocks_and_head(shape),
        unique_tokens=unique_tokens,
        tokens=tokens,
        valid_losses=valid_losses,
        from_scratch=config.model.init_from is None,
        all_parameters=shape.parameters,
        train_loss=train_loss if plain_loss else None,
    )


MAX_NAMED_SOURCES = 8
"""A proposed command that names the sources names all of them; for more, another one is proposed."""
READ_DOCUMENTS = 20
"""Documents in which the words of a prompt are looked for."""
WORDS = re.compile(r"\b[^\W\d_]{2,16} [^\W\d_]{2,16}\b|[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]{2,8}")
"""Two words; of scripts without spaces (Thai, Lao, Japanese, Chinese) a few characters."""


def print_next_steps(config: RunConfig, checkpoint: Path, facts: FinishedRun, *, evaluated: bool) -> None:
    """Say where the model is and which commands use it or make it better; `evaluated`: `run` has measured it."""
    where = shlex.join(_where_of(config))
    opened_by = "an adapter: PEFT can open it" if is_adapter(checkpoint) else "transformers can open it"
    if is_own_file(config.model.family):
        opened_by = "only textmill opens it"
    print(f"\nAll stages are done. The model is {format_path(checkpoint)} ({opened_by}). Next:")
    if config.corpus.labels:
        print(f"  textmill evaluate {where} evaluate.text=FILE")
    elif config.train.layout == "masked":
        print(f"  textmill fill {where} sample.prompt='a text with [MASK]'")
        print(f"  textmill embed {where} 'a text' 'another text'")
        if not evaluated:
            print(f"  textmill evaluate {where} evaluate.tasks=pseudo_perplexity evaluate.sample=1000")
    elif config.train.layout == "chat":
        print(f"  textmill chat {where}")
    else:
        prompt = shlex.quote(_prompt_of(config.folder_of("corpus")))
        print(f"  textmill generate {where} sample.prompt={prompt} sample.count=3")
    for line in improving_commands(config, state_of(facts), where):
        print(f"  {line}")


def _prompt_of(corpus: Path) -> str:
    """Two words of a text that the model has not seen, so that they are of its language."""
    with suppress(TextmillError):  # existing tokens need no corpus
        for document in islice(open_corpus(corpus, "valid"), READ_DOCUMENTS):
            if found := WORDS.search(document.text):
                return found.group()
    return "Once more"


def _where_of(config: RunConfig) -> list[str]:
    """WHERE of the commands to type next: the root folder if it opens with these settings, else the run's folder."""
    run = config.folder_of("train")
    for folder in (Path(config.folder), run):
        words = [format_path(folder)]
        with suppress(TextmillError), redirect_stderr(StringIO()):  # what it warns of was printed at the start
            opened = open_where(words[0], []).config
            same_folders = all(
                opened.folder_of(stage).resolve() == config.folder_of(stage).resolve() for stage in STAGE_FOLDERS
            )
            if same_folders and opened.results(*STAGE_FOLDERS, "model") == config.results(*STAGE_FOLDERS, "model"):
                return words
    # A family's file is code, which runs only if the user names it.
    own = [f"model.family={config.model.family}"] if is_own_file(config.model.family) else []
    return [format_path(run), *own]


def improving_commands(config: RunConfig, state: State, where: str) -> list[str]:
    """Commands that would make the model better, by what limits it now."""
    train = config.train
    name = config.model.family
    if config.corpus.labels:
        if not train.epochs or state == "overfitting":
            return []
        return [f"textmill train {where} train.epochs={2 * train.epochs:g}"]
    family = f" --family {name}" if name in SIZES and name != ModelConfig().family else ""
    run = format_path(config.folder_of("train"))
    tune = f"textmill tune {where} --minutes 60"
    with_more_text = f"textmill new {_free_name('larger')} --text 'more texts/*.txt'{family}"
    if state == "overfitting":
        decay = f"train.weight_decay={max(0.1, 2 * train.weight_decay):g}"
        return [f"textmill run {where} {decay} train.folder={shlex.quote(run + '-2')}", tune]
    if state == "unknown":  # without a valid split nothing can be tuned, and nobody knows whether more time helps
        return [with_more_text]
    if state == "limited by the text":
        if train.distil.teachers or train.generations > 1 or train.layout == "masked":
            return [tune, with_more_text]
        return [second_generation(where, run), tune, with_more_text]
    if train.minutes is None:
        return [
            f"textmill train {where} train.{train.unit}={2 * getattr(train, train.unit)}",
            f"textmill new {(mine := _free_name('mine'))} --text 'texts/*.txt'{family} && textmill run {mine}",
        ]
    if len(config.corpus.paths) > MAX_NAMED_SOURCES:
        return [f"textmill train {where} train.minutes={4 * train.minutes:g}", tune]
    sources = " ".join(f"--text {shlex.quote(_short_path(source))}" for source in config.corpus.paths)
    same = f" --family {name}" if name in SIZES else ""  # without it, `new` may choose another family
    return [f"textmill new {_free_name('longer')} {sources}{same} --minutes {4 * train.minutes:g}", tune]


def second_generation(where: str, run: str) -> str:
    """The command that trains the same model again, taught by the first: worth it if the text limits the model.

    `where` is WHERE, quoted for the shell.
    """
    settings = f"train.folder={run}-2", f"train.distil.teachers={format_yaml_value([run])}", "train.seed=2"
    return " ".join(["textmill run", where, *map(shlex.quote, settings)])


def _free_name(name: str) -> str:
    """A folder that does not exist: `new` refuses one that does."""
    names = (f"{name}-{number}" if number > 1 else name for number in itertools.count(1))
    return next(one for one in names if not os.path.exists(one))


def _short_path(source: str) -> str:
    return format_path(Path(source)) if os.path.isabs(source) else source
