"""WikiText, LAMBADA and multiple choice equal lm-evaluation-harness on the same local files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.lm_eval_reference import run_reference, write_tasks
from textmill.checkpoints.folders import Checkpoint
from textmill.commands.evaluate import evaluate
from textmill.config import EvaluateConfig, RunConfig
from textmill.evaluation.tasks import kobest
from textmill.evaluation.tasks.wikitext import count_words, detokenize, split_articles

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
WORDS = "the mill stands by a river and its wheel turns ; ( it ' s old ) 물레방아는 강가에 있다 çark döner".split()
ARTICLE = [
    ' = {title} = \n \n The well @-@ known mill , built in 1 @,@ 850 ( or 1850 . 5 ) , has a " wheel " of 3 @.@ 5 m .',
    " It 's the workers ' mill . \n = = History = = \n \n At 20 ° C the river [ a small one ] freezes ? No ! ",
    "It is {words} . \n",
]


def words(dice: random.Random, low: int, high: int) -> str:
    return " ".join(dice.choices(WORDS, k=dice.randint(low, high)))


def wikitext() -> str:
    dice = random.Random(3)
    return " \n" + "".join("".join(ARTICLE).format(title=f"Mill {n}", words=words(dice, 5, 60)) for n in range(5))


def texts() -> list[dict[str, Any]]:
    dice = random.Random(4)
    return [{"text": words(dice, 3, 8)} for _ in range(60)]


def items() -> list[dict[str, Any]]:
    """Equal candidates before and after the right one, one token and many, one byte and many, spaces at the end."""
    made: list[dict[str, Any]] = [
        {"context": "the mill", "choices": ["turns", "turns", "stands"], "answer": 0},
        {"context": "the mill", "choices": ["turns", "turns", "stands"], "answer": 1},
        {"context": "the mill ", "choices": ["t", "turns and turns and turns by the river"], "answer": 1},
        {"context": "물레방아는 강가에", "choices": ["서 있다", "wheel", "döner"], "answer": 0},
        {"context": "", "choices": ["the mill turns", "mill the turns"], "answer": 0},
        {"context": "a river and its wheel " * 12, "choices": ["turns", "stands by"], "answer": 0},
    ]
    dice = random.Random(5)
    for _ in range(500):
        count = dice.randint(2, 5)
        choices = [words(dice, 1, 4) for _ in range(count)]
        made.append({"context": words(dice, 1, 7), "choices": choices, "answer": dice.randrange(count)})
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    pages = [{"page": page} for page in split_articles(wikitext())]
    write_tasks(folder, {"local_wikitext": pages, "local_lambada": texts(), "local_choices": items()})
    (folder / "wiki.txt").write_text(wikitext(), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path, checkpoint: Checkpoint) -> dict[str, dict[str, float]]:
    return run_reference(folder, ["local_wikitext", "local_lambada", "local_choices"], checkpoint.folder)


def run(config: RunConfig, *tasks: str, **settings: Any) -> dict[str, Any]:
    return evaluate(config.model_copy(update={"evaluate": EvaluateConfig(tasks=list(tasks), **settings)}))


def test_wikitext(config: RunConfig, folder: Path, reference: dict[str, dict[str, float]]) -> None:
    found = run(config, f"wikitext:{folder / 'wiki.txt'}")["wikitext"]
    wanted = reference["local_wikitext"]
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-4), name


def test_choices(config: RunConfig, folder: Path, reference: dict[str, dict[str, float]]) -> None:
    found = run(config, f"choices:{folder / 'local_choices.jsonl'}")["choices"]
    wanted = reference["local_choices"]
    assert {name: found[name] for name in ("acc", "acc_norm", "acc_bytes")} == {
        name: wanted[name] for name in ("acc", "acc_norm", "acc_bytes")
    }


def test_lm_evals_own_tasks_run_with_our_scorer(
    config: RunConfig, folder: Path, reference: dict[str, dict[str, float]], life: Path
) -> None:
    names = ("local_wikitext", "local_lambada", "local_choices")
    found = run(config, *(f"lm-eval:{folder / name}" for name in names))
    for name in names:
        for metric, value in reference[name].items():
            assert found[name][metric] == pytest.approx(value, rel=1e-4), (name, metric)
    [file] = (life / "run" / "evaluation").glob("step-0000123-local_choices-*.json")
    saved = json.loads(file.read_text())
    assert saved["local_choices"]["card"]["examples"] == len(items())


def test_the_detokeniser_equals_lm_evals() -> None:
    from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer

    text = wikitext() + " ' 5 workers ' N x = = = = y = = = = 'quoted ' { braces } \" open"
    assert detokenize(text) == wikitext_detokenizer({"page": text})
    assert count_words(text) == process_results({"page": text}, (0.0,))["word_perplexity"][1]


RECORDS: dict[str, dict[str, Any]] = {
    "kobest_boolq": {"paragraph": "방아가 있다.", "question": "있나?", "label": 1},
    "kobest_hellaswag": {
        "context": "물이 흐른다.",
        "ending_1": "돈다.",
        "ending_2": "난다.",
        "ending_3": "산다.",
        "ending_4": "간다.",
        "label": 3,
    },
    "kobest_sentineg": {"sentence": "좋아요", "label": 1},
    "kobest_wic": {"word": "배", "context_1": "배가 고프다.", "context_2": "배를 탔다.", "label": 0},
}
"""A record of each task, in the fields of the hub; test_items_against_lm_eval.py has the other tasks."""


@pytest.mark.parametrize("name", RECORDS)
def test_prompts_and_candidates_of_kobest_equal_those_of_lm_eval(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager

    rows = datasets.Dataset.from_list([RECORDS[name]])
    every = datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: every)
    folder = Path(lm_eval.__file__).parent / "tasks" / "kobest"
    task = TaskManager(include_path=str(folder), include_defaults=False).load([name])["tasks"][name]
    task.set_config(key="num_fewshot", value=0)
    task.build_all_requests(limit=None, rank=0, world_size=1)
    item = kobest.read_item(RECORDS[name], "place")
    assert [tuple(request.args) for request in task.instances] == list(item.pairs)
    right = task.process_results(
        task.instances[0].doc, [(float(n == item.answer), False) for n in range(len(item.pairs))]
    )
    assert right["acc"] == 1.0
