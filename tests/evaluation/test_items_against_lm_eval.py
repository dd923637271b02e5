"""Thirteen tasks, without and with examples in the prompt, equal lm-evaluation-harness item by item.

lm-eval's own task files read the records as the hub has them, textmill the same records as files in their published
formats. Neither model has one token for begin and end: `plain` only has a begin token, and the tokenizer of `begins`
also puts it before every text.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from textmill.commands.evaluate import evaluate
from textmill.config import EvaluateConfig, ModelConfig, RunConfig, TorchEngine

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
WORDS = "the mill stands by a river and its wheel turns it was old so they sold flour to all who came".split()
Rows = list[dict[str, Any]]
ITEMS = 12
SHOTS = 3


def words(dice: random.Random, low: int = 1, high: int = 6) -> str:
    return " ".join(dice.choices(WORDS, k=dice.randint(low, high)))


def hellaswag(dice: random.Random) -> tuple[Any, Any]:
    start = f"[header] {words(dice)} [title] {words(dice)}."
    record: dict[str, Any] = {"activity_label": "Milling", "ctx_a": start, "ctx_b": "then it"}
    record |= {"endings": [words(dice) for _ in range(4)], "label": dice.randrange(4)}
    return record, record | {"label": str(record["label"])}


def piqa(dice: random.Random) -> tuple[Any, Any]:
    record = {"goal": words(dice), "sol1": words(dice), "sol2": words(dice), "label": dice.randrange(2)}
    return record, record


def question(dice: random.Random, count: int) -> tuple[str, list[str], list[str], str]:
    labels = list("ABCDE"[:count])
    return words(dice, 2, 6), labels, [words(dice, 1, 3) for _ in labels], dice.choice(labels)


def nested(count: int, key: str = "question") -> Callable[[random.Random], tuple[Any, Any]]:
    """ARC, OpenBookQA, CommonsenseQA: nested as published, flat on the hub."""

    def make(dice: random.Random) -> tuple[Any, Any]:
        stem, labels, texts, answer = question(dice, count)
        choices = [{"text": text, "label": label} for label, text in zip(labels, texts, strict=True)]
        return {"question": {"stem": stem, "choices": choices}, "answerKey": answer}, {
            key: stem,
            "choices": {"text": texts, "label": labels},
            "answerKey": answer,
        }

    return make


def winogrande(dice: random.Random) -> tuple[Any, Any]:
    record = {"sentence": f"{words(dice)} _ {words(dice)}.", "option1": "the mill", "option2": "the wheel"}
    record |= {"answer": dice.choice("12")}
    return record, record


def boolq(dice: random.Random) -> tuple[Any, Any]:
    record = {"passage": words(dice, 5, 20), "question": words(dice)}
    answer = dice.random() < 0.5
    return record | {"answer": answer, "title": "Mill"}, record | {"label": int(answer)}


def mmlu(dice: random.Random) -> tuple[Any, Any]:
    stem, labels, texts, answer = question(dice, 4)
    return [stem, *texts, answer], {"question": stem, "choices": texts, "answer": labels.index(answer)}


def blimp(dice: random.Random) -> tuple[Any, Any]:
    record = {"sentence_good": words(dice, 3), "sentence_bad": words(dice, 3), "linguistics_term": "island_effects"}
    return record, record


def multiblimp(dice: random.Random) -> tuple[Any, Any]:
    record = {"sen": words(dice, 3), "wrong_sen": words(dice, 3), "phenomenon": dice.choice(["SV-#", "SV-P"])}
    return record, record


def lambada(dice: random.Random) -> tuple[Any, Any]:
    record = {"text": words(dice, 4, 12)}
    return record, record


def gsm8k(dice: random.Random) -> tuple[Any, Any]:
    record = {"question": f"{words(dice)} {dice.randrange(99)}", "answer": f"{words(dice)}\n#### {dice.randrange(999)}"}
    return record, record


def kobest(dice: random.Random) -> tuple[Any, Any]:
    label = dice.randrange(2)
    texts = {"question": "결과", "premise": words(dice), "alternative_1": words(dice), "alternative_2": words(dice)}
    published = {"sentence": texts["premise"], "question": "결과", "1": texts["alternative_1"]}
    return published | {"2": texts["alternative_2"], "Answer": str(label + 1)}, texts | {"label": label}


TASKS: dict[str, tuple[str, str, str, Callable[[random.Random], tuple[Any, Any]]]] = {
    # the name in textmill: the name and the folder in lm-eval, the published file, a record in both formats
    "hellaswag": ("hellaswag", "hellaswag", "hellaswag_val.jsonl", hellaswag),
    "piqa": ("piqa", "piqa", "valid.jsonl", piqa),
    "arc": ("arc_easy", "arc", "ARC-Easy-Test.jsonl", nested(4)),
    "openbookqa": ("openbookqa", "openbookqa", "test.jsonl", nested(4, "question_stem")),
    "commonsenseqa": ("commonsense_qa", "commonsense_qa", "dev_rand_split.jsonl", nested(5)),
    "winogrande": ("winogrande", "winogrande", "dev.jsonl", winogrande),
    "boolq": ("boolq", "super_glue/boolq", "dev.jsonl", boolq),
    "mmlu": ("mmlu_anatomy", "mmlu/default", "test/anatomy_test.csv", mmlu),
    "blimp": ("blimp_wh_island", "blimp", "wh_island.jsonl", blimp),
    "multiblimp": ("multiblimp_eng", "multiblimp", "eng/data.tsv", multiblimp),
    "lambada": ("lambada_openai", "lambada", "lambada_test.jsonl", lambada),
    "gsm8k": ("gsm8k", "gsm8k", "test.jsonl", gsm8k),
    "kobest": ("kobest_copa", "kobest", "test.tsv", kobest),
}
EXAMPLE_FILES = {
    "hellaswag": "hellaswag_train.jsonl",
    "piqa": "train.jsonl",
    "arc": "ARC-Easy-Train.jsonl",
    "openbookqa": "train.jsonl",
    "commonsenseqa": "train_rand_split.jsonl",
    "winogrande": "train_xl.jsonl",
    "boolq": "train.jsonl",
    "mmlu": "dev/anatomy_dev.csv",
    "gsm8k": "train.jsonl",
    "kobest": "train.tsv",
}
"""Tasks that are measured with examples in the prompt, and the published file that these come from."""


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as stream:
        if path.suffix == ".jsonl":
            stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        elif path.suffix == ".csv":
            csv.writer(stream).writerows(rows)
        else:
            table = csv.DictWriter(stream, list(rows[0]), delimiter="\t")
            table.writeheader()
            table.writerows(rows)
    return path


def data_of(name: str, folder: Path) -> tuple[Path, dict[str, Rows]]:
    """The published files of a task, and the same records by split as on the hub."""
    dice = random.Random(name)
    _, _, file, make = TASKS[name]
    measured = [make(dice) for _ in range(ITEMS)]
    shown = [make(dice) for _ in range(ITEMS)]
    path = write(folder / name / file, [published for published, _ in measured])
    if name in EXAMPLE_FILES:
        write(folder / name / EXAMPLE_FILES[name], [published for published, _ in shown])
    hub = [record for _, record in measured]
    examples = [record for _, record in shown]
    is_only_split = name in ("blimp", "multiblimp")
    return path, {"train": hub if is_only_split else examples, "dev": examples, "validation": hub, "test": hub}


@pytest.fixture(scope="module", params=["plain", "begins"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer whose begin and end tokens differ."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from tokenizers.decoders import ByteLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    inner.train_from_iterator([" ".join(WORDS)] * 20 + ["Question: what? Answer: yes no #### 123"] * 10, trainer)
    if request.param == "begins":
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", inner.token_to_id("<s>"))]
        )
    folder = tmp_path_factory.mktemp(request.param)
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=inner.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=1024,
        bos_token_id=inner.token_to_id("<s>"),
        eos_token_id=inner.token_to_id("</s>"),
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    # Its cache of logits mixes up texts that are equal but divided differently into context and continuation.
    return HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=4, logits_cache=False)


def run_reference(reference: Any, name: str, splits: dict[str, Rows], shots: int) -> list[dict[str, Any]]:
    """The samples of lm-eval, in the order of the data."""
    import datasets
    import lm_eval
    from lm_eval.tasks import TaskManager

    task_name, folder, *_ = TASKS[name]
    rows = datasets.DatasetDict({split: datasets.Dataset.from_list(records) for split, records in splits.items()})
    path = Path(lm_eval.__file__).parent / "tasks" / folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
        patch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)  # it starts pip and more, each time
        manager = TaskManager(include_path=str(path), include_defaults=False)
        task = manager.load([task_name])["tasks"][task_name]
        task.set_config(key="num_fewshot", value=shots)
        found = lm_eval.simple_evaluate(
            model=reference, tasks=[task], task_manager=manager, num_fewshot=shots, bootstrap_iters=0, log_samples=True
        )
    return sorted(found["samples"][task_name], key=lambda sample: sample["doc_id"])


@pytest.mark.parametrize(
    ("name", "shots"), [*((name, 0) for name in TASKS), *((name, SHOTS) for name in EXAMPLE_FILES)]
)
def test_every_item_has_the_score_of_lm_eval(
    name: str, shots: int, model: Path, reference: Any, tmp_path: Path
) -> None:
    path, splits = data_of(name, tmp_path)
    log = tmp_path / "items.jsonl"
    settings = {} if name in ("lambada", "blimp", "multiblimp") else {"shots": shots}
    config = RunConfig(
        folder=str(tmp_path),
        model=ModelConfig(init_from=str(model)),
        engine=TorchEngine(device="cpu", precision="fp32"),
        evaluate=EvaluateConfig(tasks=[f"{name}:{path}"], predictions=str(log), **settings),
    )
    card = evaluate(config)[name]["card"]
    assert card["first_context"] == "<s>"
    items = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    samples = run_reference(reference, name, splits, shots)
    if name == "gsm8k":
        by_filter: dict[str, list[Any]] = {}
        for sample in samples:
            by_filter.setdefault(sample["filter"], []).append(sample)
        assert [item["text"] for item in items] == [one["resps"][0][0] for one in by_filter["strict-match"]]
        assert [item["exact_match"] for item in items] == [one["exact_match"] for one in by_filter["strict-match"]]
        flexible = [one["exact_match"] for one in by_filter["flexible-extract"]]
        assert [item["exact_match_flexible"] for item in items] == flexible
        return
    assert len(items) == len(samples) == ITEMS
    for item, sample in zip(items, samples, strict=True):
        wanted = [float(response[0][0]) for response in sample["resps"]]
        # float32 sums of up to a few hundred log-probabilities of about 10 each
        assert item.get("scores", [item.get("score")]) == pytest.approx(wanted, rel=1e-4), item["id"]
        for metric in ("acc", "acc_norm"):
            if metric in sample and not item.get("tied"):
                assert item.get(metric, item.get("accuracy")) == sample[metric], (item["id"], metric)
