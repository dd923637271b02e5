"""The command evaluate: its metrics, its table, the file it saves, and its errors."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from textmill.checkpoints.folders import Checkpoint
from textmill.commands.evaluate import evaluate
from textmill.config import EvaluateConfig, RunConfig, TokenizerConfig
from textmill.errors import TextmillError
from textmill.evaluation.measured_task import format_metrics
from textmill.evaluation.metrics import compute_metrics
from textmill.storage.files import read_json, write_json
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit


def test_metrics_of_a_known_loss() -> None:
    metrics = compute_metrics(80 * math.log(2), {"tokens": 10, "words": 5, "bytes": 40}, "x")
    wanted = {
        "loss": 8 * math.log(2),
        "token_perplexity": 256,
        "word_perplexity": 65536,
        "byte_perplexity": 4,
        "bits_per_byte": 2,
    }
    assert metrics == pytest.approx(wanted)


def test_a_word_as_long_as_a_page_has_no_perplexity() -> None:
    metrics = compute_metrics(5000.0, {"tokens": 1000, "words": 1, "bytes": 3000}, "x")
    assert metrics["word_perplexity"] is None
    shown = format_metrics("perplexity", {**metrics, "intervals": {}})
    assert ["word_perplexity", "-"] in [line.split() for line in shown.splitlines()]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_raises_an_error(loss: float) -> None:
    with pytest.raises(TextmillError, match="not a finite number"):
        compute_metrics(loss, {"tokens": 10, "words": 5, "bytes": 40}, "x")


def test_the_result_is_printed_saved_and_consistent(
    config: RunConfig, life: Path, documents: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    result = evaluate(config)
    shown = capsys.readouterr().out
    assert "step 123" in shown
    facts = dict(line.split(maxsplit=1) for line in shown.splitlines() if len(line.split()) > 1)
    assert (facts["window"], facts["documents"], facts["append_end"]) == ("24", "12", "yes")
    saved = (life / "run" / "evaluation").glob("step-0000123-perplexity-valid-*.json")
    assert result in [read_json(path) for path in saved]
    text_bytes = sum(len(text.encode()) for text in documents["valid"])
    metrics = result["perplexity"]
    card = metrics["card"]
    assert (card["documents"], card["bytes"]) == (12, text_bytes)
    assert metrics["word_perplexity"] == pytest.approx(math.exp(metrics["loss"] * card["tokens"] / card["words"]))
    for suffix in ("", "/unigram", "/bigram"):
        nats = metrics[f"loss{suffix}"] * card["tokens"]
        assert metrics[f"bits_per_byte{suffix}"] == pytest.approx(nats / math.log(2) / text_bytes)
    assert metrics["loss/bigram"] < metrics["loss/unigram"]


def test_json_is_one_line_and_baselines_are_optional(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    plain = config.model_copy(update={"evaluate": EvaluateConfig(split="train", baselines=False, stride=5)})
    result = evaluate(plain, 123, as_json=True)
    assert json.loads(capsys.readouterr().out) == result
    assert result["perplexity"]["card"]["stride"] == 5
    assert "loss/unigram" not in result["perplexity"]


def test_the_window_is_train_length(config: RunConfig) -> None:
    short = config.model_copy(update={"train": config.train.model_copy(update={"length": 8})})
    assert evaluate(short)["perplexity"]["card"]["window"] == 8


def test_nothing_is_written_into_a_bare_model_folder(config: RunConfig, checkpoint: Checkpoint, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint.folder, bare, ignore=lambda *_: ["progress.json", "manifest.json"])
    before = sorted(tmp_path.rglob("*"))
    model, train = (
        config.model.model_copy(update={"init_from": str(bare)}),
        config.train.model_copy(update={"folder": str(bare)}),
    )
    result = evaluate(config.model_copy(update={"model": model, "train": train}))
    assert result["step"] == 0
    assert sorted(tmp_path.rglob("*")) == before
    assert result["perplexity"]["loss"] == pytest.approx(evaluate(config)["perplexity"]["loss"])


def test_the_error_for_an_empty_split_names_another(config: RunConfig) -> None:
    with pytest.raises(TextmillError, match=r"test split is empty; .*evaluate\.split=train.*corpus\.split"):
        evaluate(config.model_copy(update={"evaluate": EvaluateConfig(split="test")}))


def test_tokens_of_another_tokenizer_raise_an_error(config: RunConfig, life: Path, tmp_path: Path) -> None:
    shutil.copytree(life / "tokens", tmp_path / "tokens")
    other: TextTokenizer = fit(iter([["another text"]]), TokenizerConfig(vocab=260))
    manifest = read_json(tmp_path / "tokens" / "manifest.json")
    write_json(tmp_path / "tokens" / "manifest.json", {**manifest, "tokenizer": other.fingerprint})
    tokens = config.tokens.model_copy(update={"folder": str(tmp_path / "tokens")})
    with pytest.raises(TextmillError, match=r"another tokenizer.*tokenizer\.use="):
        evaluate(config.model_copy(update={"tokens": tokens}))


def test_a_stride_above_the_window_raises_an_error(config: RunConfig) -> None:
    with pytest.raises(TextmillError, match=r"evaluate\.stride: 25"):
        evaluate(config.model_copy(update={"evaluate": EvaluateConfig(stride=25)}))


@pytest.mark.parametrize(
    ("tasks", "message"), [(["glue"], "unknown task 'glue'; choose from .*perplexity"), ([], "is empty; choose from")]
)
def test_task_names_are_checked_when_the_config_is_read(tasks: list[str], message: str) -> None:
    with pytest.raises(TextmillError, match=message):
        EvaluateConfig(tasks=tasks)
