"""Lets a chat model answer questions of the valid split with transformers alone; prints how many answers stop.

    python bench/chat_answers.py RUNS/chat-ko [--step 500] [--count 30] [--longest 40]

The folder is a project with a corpus of conversations; the questions are the first of its valid split.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from textmill.checkpoints.folders import list_checkpoints
from textmill.corpus.conversations import turns_from_json
from textmill.corpus.shards import list_shards


def read_questions(root: Path, count: int) -> list[str]:
    """The user's first turns in the first conversations of the valid split."""
    rows = [
        row
        for path in list_shards(root / "corpus", "valid")
        for row in pq.read_table(path).column("messages").to_pylist()
    ]
    return [next(text for role, text in turns_from_json(row) if role == "user") for row in rows[:count]]


def answer(tokenizer: Any, model: Any, question: str, longest: int) -> tuple[str, bool]:
    """The answer by greedy decoding, and whether it reached its stop token."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
    )
    generated = model.generate(**prompt, max_new_tokens=longest, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    new = generated[0, prompt["input_ids"].shape[1] :].tolist()
    return tokenizer.decode(new, skip_special_tokens=True), bool(new) and new[-1] == tokenizer.eos_token_id


def main() -> None:
    """Print the answers and how many of them stop."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--longest", type=int, default=40)
    arguments = parser.parse_args()
    steps = list_checkpoints(arguments.root / "run")
    folder = steps[arguments.step or max(steps)]
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    stopped = 0
    questions = read_questions(arguments.root, arguments.count)
    for question in questions:
        text, stops = answer(tokenizer, model, question, arguments.longest)
        stopped += stops
        print(f"{question} -> {' '.join(text.split())}{'' if stops else ' ...'}")
    fraction = stopped / max(1, len(questions))
    print(
        f"{folder.name}: {stopped} of {len(questions)} answers stop within {arguments.longest} tokens ({fraction:.0%})"
    )


if __name__ == "__main__":
    main()
