"""The section for evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from textmill.config.section import Section, changeable
from textmill.errors import TextmillError

TASKS = Path(__file__).parent.parent / "evaluation" / "tasks"
LM_EVAL = "lm-eval"
"""`lm-eval:NAME` runs a task of lm-evaluation-harness."""


def task_names() -> list[str]:
    """The evaluation tasks: one file each."""
    return sorted(file.stem for file in TASKS.glob("*.py") if file.stem != "__init__")


def is_task_file(task: str) -> bool:
    """Whether an entry of `evaluate.tasks` is a YAML file that describes a task of the user's own."""
    return task.endswith((".yaml", ".yml")) and not task.startswith(f"{LM_EVAL}:")


class WikitextConfig(Section):
    """Settings of the task wikitext."""

    protocol: Literal["lm-eval", "megatron", "transformers"] = "lm-eval"
    """lm-eval: each article alone, detokenised, first token predicted; megatron: the file as one detokenised text, a
    window every 32 tokens, first token not predicted; transformers: the file as it is, a window every 512 tokens, first
    token not predicted. `evaluate.window`, `evaluate.stride`, `evaluate.first_token` and `evaluate.count_end` override
    the protocol."""
    detokenize: bool | None = None
    """Undo the tokenisation of the published files (` @-@ `, ` , `); default: as the protocol does."""
    articles: bool | None = None
    """Read each article alone, not the file as one text; default: as the protocol does."""


class AnswersConfig(Section):
    """How answers to questions are chosen."""

    n_best: int = Field(20, ge=1)
    """The most likely first and last tokens of each window that are combined."""
    max_tokens: int = Field(30, ge=1)
    """Most tokens of an answer."""
    no_answer: bool | None = None
    """Whether a question may have no answer (SQuAD 2.0); default: whether one of the examples has none."""
    no_answer_margin: float = 0.0
    """How much higher no answer must score than the best answer to be chosen."""


class EvaluateConfig(Section):
    """How a model is evaluated."""

    tasks: list[str] = Field(["perplexity"], json_schema_extra={"task_files": True})
    """What to measure: perplexity (of a split, or of `evaluate.text`; for a BERT pseudo_perplexity), tasks on a file of
    data such as wikitext:FILE, lambada:FILE, hellaswag:FILE, choices:FILE or pairs:FILE, your own task as a YAML file,
    and lm-eval:NAME for tasks of lm-evaluation-harness (extra: textmill[eval])."""
    split: Literal["train", "valid", "test"] = "valid"
    """The split to evaluate on."""
    text: list[str] = Field([], json_schema_extra={"source": True, "per_call": True})
    """Files or folders to measure instead of a split; read as `corpus.sources` are, but not cleaned. With a finetuned
    head, examples as `corpus.labels` reads them; without labels they get predictions only."""
    predictions: str | None = Field(None, json_schema_extra={"path": True, "per_call": True})
    """The file for the predictions of a finetuned head: JSON lines, or SQuAD's JSON; default: in the run's
    `evaluation` folder."""
    batch: int = changeable(16, ge=1)
    """Windows in one forward pass."""
    window: int | None = Field(None, ge=1)
    """Tokens that the model reads at once; default: `train.length`, or the model's longest context."""
    stride: int | None = Field(None, ge=1)
    """Tokens between the starts of two windows; default: the window's length. A smaller stride gives each token more
    context."""
    first_token: Literal["predicted", "context"] | None = None
    """predicted: the first token is predicted from an end-of-text token; context: it is only read. Default: predicted;
    in the task wikitext as the protocol does."""
    count_end: bool | None = None
    """Whether end-of-text tokens are predicted and counted; default: true, but false in the task wikitext."""
    sample: int | None = Field(None, ge=2)
    """Measure only this many examples (windows, for perplexity), a random sample; default: all."""
    seed: int = Field(1234, ge=0, lt=2**63)
    """The seed of `evaluate.sample`."""
    baselines: bool = True
    """Also evaluate a unigram and a bigram model, counted on the train split."""
    answers: AnswersConfig = AnswersConfig()
    """How a model finetuned for question-answering chooses answers."""
    wikitext: WikitextConfig = WikitextConfig()
    """Settings of the task wikitext."""

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, tasks: list[str]) -> list[str]:
        if not tasks:
            raise TextmillError(f"evaluate.tasks: is empty; choose from {', '.join(task_names())}")
        return check_tasks(tasks, "evaluate.tasks")


def check_tasks(tasks: list[str], key: str) -> list[str]:
    """Refuse a name that is no task; `key` is the setting that error messages name."""
    known = task_names()
    for task in tasks:
        if not is_task_file(task) and task.partition(":")[0] not in [*known, LM_EVAL]:
            raise TextmillError(
                f"{key}: unknown task '{task}'; choose from {', '.join(known)}, {LM_EVAL}:NAME, or name a YAML file"
            )
    return tasks
