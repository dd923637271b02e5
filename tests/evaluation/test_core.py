"""CORE on a small bundle equals a plain loop over transformers, written from its description."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from textmill.checkpoints.folders import Checkpoint
from textmill.commands.evaluate import evaluate
from textmill.config import EvaluateConfig, RunConfig
from textmill.errors import TextmillError
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

CORE = """
icl_tasks:
- {label: quiz, dataset_uri: a/quiz.jsonl, num_fewshot: [1], icl_task_type: multiple_choice}
- {label: gaps, dataset_uri: gaps.jsonl, num_fewshot: [0], icl_task_type: schema, continuation_delimiter: " "}
- {label: last, dataset_uri: last.jsonl, num_fewshot: [0], icl_task_type: language_modeling}
"""
WORDS = ["mill", "river", "wheel", "turns", "stands", "and", "its", "by"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval_bundle")
    (folder / "core.yaml").write_text(CORE)
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nquiz,50\ngaps,50\nlast,0\n")
    dice = random.Random(3)

    def text(count: int) -> str:
        return " ".join(dice.choices(WORDS, k=count))

    rows: dict[str, list[dict[str, Any]]] = {
        "a/quiz.jsonl": [
            {"query": text(2), "choices": dice.sample(WORDS, 2), "gold": dice.randrange(2)} for _ in range(8)
        ],
        "gaps.jsonl": [
            {"context_options": dice.sample(WORDS, 2), "continuation": text(3), "gold": dice.randrange(2)}
            for _ in range(8)
        ],
        "last.jsonl": [{"context": f"{text(4)} ", "continuation": text(1)} for _ in range(8)],
    }
    for name, records in rows.items():
        (folder / "eval_data" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "eval_data" / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def losses_of(model: Any, ids: list[int]) -> tuple[list[float], list[bool]]:
    """The loss of each token but the first, and whether it is the likeliest."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    labels = torch.tensor(ids[1:])
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return losses.tolist(), (logits.argmax(-1) == labels).tolist()


def expected(bundle: Path, model: Any, tokenizer: TextTokenizer) -> dict[str, float]:
    """The accuracy of each task, question by question."""
    right: dict[str, list[bool]] = {"quiz": [], "gaps": [], "last": []}
    files = {"quiz": "a/quiz.jsonl", "gaps": "gaps.jsonl", "last": "last.jsonl"}
    for label, name in files.items():
        rows = [json.loads(line) for line in (bundle / "eval_data" / name).read_text().splitlines()]
        random.Random(1337).shuffle(rows)
        for number, row in enumerate(rows):
            if label == "last":
                context = tokenizer.encode(row["context"].strip())
                ids = [tokenizer.eos_id, *tokenizer.encode(f"{row['context'].strip()} {row['continuation']}")]
                right[label].append(all(losses_of(model, ids)[1][len(context) :]))
                continue
            if label == "quiz":
                [other] = random.Random(1234 + number).sample([row for n, row in enumerate(rows) if n != number], 1)
                shown = f"{other['query']} {other['choices'][other['gold']]}\n\n"
                texts = [f"{shown}{row['query']} {choice}" for choice in row["choices"]]
            else:
                texts = [f"{context} {row['continuation']}" for context in row["context_options"]]
            ids_of = [[tokenizer.eos_id, *tokenizer.encode(text)] for text in texts]
            one, two = ids_of if label == "quiz" else [ids[::-1] for ids in ids_of]
            same = next(n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
            means = []
            for ids in ids_of:
                losses = losses_of(model, ids)[0]
                scored = losses[same - 1 :] if label == "quiz" else losses[-same:]
                means.append(sum(scored) / len(scored))
            right[label].append(means.index(min(means)) == row["gold"])
    return {label: sum(one) / len(one) for label, one in right.items()}


def test_core_equals_a_loop_over_transformers(
    bundle: Path, config: RunConfig, checkpoint: Checkpoint, tokenizer: TextTokenizer
) -> None:
    settings = EvaluateConfig(tasks=[f"core:{bundle}"])
    found = evaluate(config.model_copy(update={"evaluate": settings}))["core"]
    wanted = expected(bundle, AutoModelForCausalLM.from_pretrained(checkpoint.folder), tokenizer)
    assert {label: found[f"accuracy/{label}"] for label in wanted} == wanted
    centered = [(wanted["quiz"] - 0.5) / 0.5, (wanted["gaps"] - 0.5) / 0.5, wanted["last"]]
    assert found["core"] == pytest.approx(sum(centered) / 3)
    assert found["card"]["examples"] == 24


def test_a_folder_that_is_no_bundle(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text("{}")
    with pytest.raises(TextmillError, match=r"has no core\.yaml"):
        evaluate(config.model_copy(update={"evaluate": EvaluateConfig(tasks=[f"core:{tmp_path}"])}))
