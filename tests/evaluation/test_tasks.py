"""Tasks on local files: figures equal a straight loop over transformers, bad files get one clear message."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from textmill.checkpoints.folders import Checkpoint
from textmill.cli import main
from textmill.commands.evaluate import evaluate
from textmill.config import EvaluateConfig, RunConfig
from textmill.errors import TextmillError
from textmill.evaluation.metrics import mean_loss_interval, proportion_interval, t_quantile
from textmill.evaluation.task import Score
from textmill.evaluation.tasks import lambada
from textmill.evaluation.tasks.wikitext import count_spaced_words, detokenize
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

WIKI = " \n = A mill = \n \n The mill , by a river , turns . Its wheel @-@ house stands ( by the river ) . \n" * 3
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(config: RunConfig) -> Run:
    def evaluate_tasks(*tasks: str, **settings: Any) -> dict[str, Any]:
        return evaluate(config.model_copy(update={"evaluate": EvaluateConfig(tasks=list(tasks), **settings)}))

    return evaluate_tasks


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint.folder)


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def window_losses(model: Any, ids: list[int], window: int, stride: int) -> tuple[float, int]:
    """The loop of transformers' page on perplexity: labels of the overlap are -100, the first token has no label."""
    total, counted, previous = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        inputs = torch.tensor([ids[begin:end]])
        labels = inputs.clone()
        labels[:, : -(end - previous)] = -100
        with torch.no_grad():
            logits = model(inputs).logits
        losses = torch.nn.functional.cross_entropy(
            logits[0, :-1].double(), labels[0, 1:], ignore_index=-100, reduction="sum"
        )
        total, counted, previous = total + float(losses), counted + int((labels[0, 1:] != -100).sum()), end
        if end == len(ids):
            break
    return total, counted


@pytest.mark.parametrize(("window", "stride"), [(24, 24), (24, 7), (16, 5), (16, 16), (2, 1)])
def test_wikitext_as_transformers_counts(
    run: Run, model: Any, tokenizer: TextTokenizer, tmp_path: Path, window: int, stride: int
) -> None:
    (tmp_path / "wiki.txt").write_text(WIKI, encoding="utf-8")
    settings = {"window": window, "stride": stride, "wikitext": "transformers"}
    found = run(f"wikitext:{tmp_path / 'wiki.txt'}", **settings)["wikitext"]
    loss, counted = window_losses(model, tokenizer.encode(WIKI), window, stride)
    assert found["card"]["counted"] == counted
    assert found["loss"] == pytest.approx(loss / counted, rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"stride": 5}, {"window": 10}])
def test_wikitext_as_megatron_counts(
    run: Run, model: Any, tokenizer: TextTokenizer, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """A window has one more token than transformers' at the same length: the last one is only predicted."""
    (tmp_path / "wiki.txt").write_text(WIKI, encoding="utf-8")
    found = run(f"wikitext:{tmp_path / 'wiki.txt'}", wikitext="megatron", **settings)
    ids, window = tokenizer.encode(detokenize(WIKI)), settings.get("window", 24)
    stride = settings.get("stride", min(32, window))
    loss = 0.0
    for start in range(0, len(ids) - 1, stride):
        with torch.no_grad():
            inputs = ids[start : start + window]
            log_probabilities = model(torch.tensor([inputs])).logits[0].double().log_softmax(-1)
        fresh = range(0 if start == 0 else max(0, window - stride), len(ids[start + 1 : start + 1 + window]))
        loss -= sum(float(log_probabilities[place, ids[start + 1 + place]]) for place in fresh)
    words = len(WIKI.strip().split(" ")) - 1
    assert found["wikitext"]["card"]["counted"] == len(ids) - 1
    assert found["wikitext"]["word_perplexity"] == pytest.approx(math.exp(loss / words), rel=1e-4)


def test_a_lambada_loss_beyond_all_perplexities_has_none() -> None:
    """e to the power of 1,000 is no double."""
    found = lambada._measured([Score(-1000.0, 1, False, -1000.0, False)] * 3, 9, {})
    assert found.metrics["perplexity"] is found.metrics["last_token_perplexity"] is None
    assert found.metrics["bits_per_byte"] == pytest.approx(1000 / math.log(2) / 3)


def test_lambada_last_word_and_last_token(run: Run, model: Any, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    texts = ["the mill stands by a river", "its wheel turns and 물레방아는", "a river and the wheelhouse"]
    file = write_lines(tmp_path / "lambada.jsonl", *({"text": text} for text in texts))
    word, last = [], []
    for text in texts:
        ids, context = tokenizer.encode(text), tokenizer.encode(text.rpartition(" ")[0])
        with torch.no_grad():
            found = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
        chosen = [float(found[place - 1, ids[place]]) for place in range(len(context), len(ids))]
        word.append(-sum(chosen))
        last.append(-chosen[-1])
    result = run(f"lambada:{file}")["lambada"]
    assert result["perplexity"] == pytest.approx(math.exp(np.mean(word)), rel=1e-5)
    assert result["last_token_perplexity"] == pytest.approx(math.exp(np.mean(last)), rel=1e-5)
    octets = sum(len(text.rpartition(" ")[2].encode()) for text in texts)
    assert result["bits_per_byte"] == pytest.approx(sum(word) / math.log(2) / octets)


def test_text_without_a_project(
    checkpoint: Checkpoint, model: Any, tokenizer: TextTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint.folder, bare, ignore=lambda *_: ["progress.json", "manifest.json"])
    text = "the mill stands by a river\n\nand its wheel turns\n"
    (tmp_path / "other.txt").write_text(text, encoding="utf-8")
    settings = ["engine.device=cpu", "engine.precision=fp32"]
    assert main(["evaluate", str(bare), f"evaluate.text={tmp_path / 'other.txt'}", "--json", *settings]) == 0
    result = json.loads(capsys.readouterr().out)
    ids = [tokenizer.first_id, *tokenizer.encode(text), tokenizer.eos_id]
    loss, counted = window_losses(model, ids, 25, 24)
    card = result["perplexity"]["card"]
    assert (card["tokens"], card["words"], card["bytes"]) == (counted, 10, len(text))
    assert result["perplexity"]["loss"] == pytest.approx(loss / counted, rel=1e-5)
    (tmp_path / "other.txt").write_text("\n".join([text] * 20), encoding="utf-8")
    for recorded, documents in (("section", 1), ("block", 40)):  # as in the run.yaml of a run
        unit = [f"corpus.documents={recorded}", "corpus.section_chars=100"]
        assert main(["evaluate", str(bare), f"evaluate.text={tmp_path / 'other.txt'}", "--json", *settings, *unit]) == 0
        assert json.loads(capsys.readouterr().out)["perplexity"]["card"]["documents"] == documents
    assert main(["evaluate", str(bare), *settings]) == 2
    assert "evaluate.text=FILE" in capsys.readouterr().err


def test_a_sample_estimates_the_full_figure(run: Run, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(WIKI * 40, encoding="utf-8")
    full = run("perplexity", text=[str(tmp_path / "long.txt")])
    part = run("perplexity", text=[str(tmp_path / "long.txt")], sample=60)
    again = run("perplexity", text=[str(tmp_path / "long.txt")], sample=60)
    assert part["perplexity"]["loss"] == again["perplexity"]["loss"] != full["perplexity"]["loss"]
    low, high = part["perplexity"]["intervals"]["loss"]
    assert low < full["perplexity"]["loss"] < high
    assert part["perplexity"]["card"]["tokens"] == full["perplexity"]["card"]["tokens"]
    assert part["perplexity"]["card"]["sample"] == 60


def test_intervals_of_known_numbers() -> None:
    """Wilson's interval of 8 in 10 (R: binom::binom.wilson), and the standard error of a mean."""
    assert proportion_interval(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    losses = [1.0, 2.0, 4.0, 5.0]
    half = 3.182446 * np.std(losses, ddof=1) / 2  # the quantile of Student's t with 3 degrees of freedom
    assert mean_loss_interval(losses, [1, 1, 1, 1]) == pytest.approx((3 - half, 3 + half), abs=0.002 * half)
    assert [t_quantile(freedom) for freedom in (9, 19, 100)] == pytest.approx([2.262157, 2.093024, 1.983972], rel=1e-4)
    assert mean_loss_interval([1.0], [5]) is None


def test_a_task_in_ten_lines_of_yaml(run: Run, tmp_path: Path) -> None:
    quiz = {"ask": {"what": "mill"}, "options": ["turns", "river"], "right": "B"}
    write_lines(tmp_path / "quiz.jsonl", quiz, {**quiz, "right": "A"})
    write_lines(
        tmp_path / "own.jsonl",
        {"context": "the mill", "choices": ["turns", "river"], "answer": 1},
        {"context": "the mill", "choices": ["turns", "river"], "answer": "turns"},
    )
    (tmp_path / "quiz.yaml").write_text(
        'task: choices\nfile: quiz.jsonl\ncontext: "the {ask.what}"\nchoices: options\nanswer: right\n'
    )
    (tmp_path / "listed.yaml").write_text(
        'task: choices\nname: own-name\nfile: quiz.jsonl\ncontext: "the {ask.what}"\n'
        'choices: ["{options.0}", "{options.1}"]\nanswer: right\n'
    )
    result = run(str(tmp_path / "quiz.yaml"), str(tmp_path / "listed.yaml"), f"choices:{tmp_path / 'own.jsonl'}")
    metrics = [
        {key: one[key] for key in ("acc", "acc_norm", "bits_per_byte")}
        for one in (result["quiz"], result["own-name"], result["choices"])
    ]
    assert metrics[0] == metrics[1] == metrics[2]
    assert metrics[0]["acc"] == 0.5


def test_two_protocols_in_one_call(run: Run, tmp_path: Path) -> None:
    (tmp_path / "wiki.txt").write_text(WIKI, encoding="utf-8")
    (tmp_path / "strided.yaml").write_text(
        "task: wikitext\nfile: wiki.txt\nevaluate: {stride: 3, wikitext: megatron}\n"
    )
    result = run(str(tmp_path / "strided.yaml"), f"wikitext:{tmp_path / 'wiki.txt'}")
    assert (result["strided"]["card"]["stride"], result["strided"]["card"]["protocol"]) == (3, "megatron")
    assert (result["wikitext"]["card"]["stride"], result["wikitext"]["card"]["protocol"]) == (24, "lm-eval")


def test_words_of_wikitext_as_megatron_counts_them(shared_data: Path) -> None:
    """NVIDIA/Megatron-LM issue 51 has 245,566 words; the first is not predicted."""
    text = (shared_data / "wikitext2" / "test.txt").read_text(encoding="utf-8")
    assert count_spaced_words(text) + 1 == 245_566


BAD = [
    ("choices", '{"context": "a", "choices": ["b"], "answer": 0}', ":1: has 1 choices"),
    (
        "choices",
        '{"context": "a", "choices": ["b", "c"], "answer": 2}',
        ":1: the answer is 2; give a number from 0 to 1",
    ),
    ("choices", '{"context": "a", "choices": ["b", "c"], "answer": 0}\n{"context": "a"', ":2: not JSON"),
    ("choices", '{"choices": ["b", "c"], "answer": 0}', ":1: no field 'context'; it has choices, answer"),
    ("choices", "[1]", ":1: found a list; a record is an object"),
    ("choices", "", "has no items"),
    ("lambada", '{"text": "word"}', ":1: the text 'word' has no last word"),
    ("hellaswag", '{"context": "a"}', ":1: no field 'activity_label'"),
    ("winogrande", '{"sentence": "no gap", "option1": "a", "option2": "b", "answer": "1"}', "needs '_'"),
    ("kobest", '{"a": 1, "label": 1}', "those of no KoBEST task"),
    ("arc", '{"question": "a"}', ":1: has no question with choices"),
]


@pytest.mark.parametrize(("task", "content", "message"), BAD)
def test_bad_files_get_one_clear_message(
    run: Run, life: Path, tmp_path: Path, task: str, content: str, message: str
) -> None:
    (tmp_path / "data.jsonl").write_text(content, encoding="utf-8")
    before = sorted(path for path in life.rglob("*"))
    with pytest.raises(TextmillError) as error:
        run(f"{task}:{tmp_path / 'data.jsonl'}")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(path for path in life.rglob("*")) == before


def test_a_flipped_byte_is_noticed(run: Run, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "data.jsonl", {"context": "the mill", "choices": ["turns", "river"], "answer": 0})
    good = file.read_bytes()
    task = tmp_path / "my.yaml"
    task.write_text(f"task: choices\nfile: data.jsonl\nsha256: {hashlib.sha256(good).hexdigest()}\n")
    run(str(task))
    file.write_bytes(good.replace(b"turns", b"turnt"))
    with pytest.raises(TextmillError, match=r"its SHA-256 is .*damaged or was edited"):
        run(str(task))


def test_a_byte_that_is_not_utf_8_is_noticed(run: Run, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "data.jsonl", {"context": "the mill", "choices": ["turns", "river"], "answer": 0})
    file.write_bytes(file.read_bytes().replace(b"turns", b"tur\xffs"))
    with pytest.raises(TextmillError, match=r":1: not UTF-8 \(byte \d+ of the line is 0xff\)"):
        run(f"choices:{file}")


def test_untrained_weights_are_reported(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The weights of this test are random."""
    (tmp_path / "wiki.txt").write_text(WIKI, encoding="utf-8")
    run(f"wikitext:{tmp_path / 'wiki.txt'}")
    assert "the weights look untrained, or the tokenizer is not the one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["lambada"], "lambada needs a file; write lambada:FILE"),
        (["lambada:nothing.jsonl"], "no such file"),
        (["nothing.yaml"], "no such file; evaluate.tasks names it as a task"),
    ],
)
def test_missing_files(run: Run, tasks: list[str], message: str) -> None:
    with pytest.raises(TextmillError, match=message):
        run(*tasks)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("task: quiz\n", "task is 'quiz'; choose from"),
        ("task: choices\nfiles: a\n", ":2: no such key 'files'"),
        ("task: lambada\nfile: a\ncontext: b\n", ":3: 'context' belongs to task: choices"),
        ("task: choices\nfile: 3\n", ":2: file is 3; write text"),
    ],
)
def test_bad_task_files(run: Run, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "own.yaml").write_text(content)
    with pytest.raises(TextmillError) as error:
        run(str(tmp_path / "own.yaml"))
    assert message in str(error.value)
