"""Draw a million tokens with each sampling setting, and compare their counts with transformers' probabilities.

    python bench/sampling_draws.py [draws]

Each row has Pearson's chi-squared over the cells that expect at least 10 draws, its degrees of freedom, and how many
standard deviations it is from its mean. More than 5 in any row, or a token that may not come, ends with an error. With
a GPU the kernels draw, else torch's operations. A short version is in tests/generation/test_batch.py.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation import logits_process as theirs

from textmill.config import SampleConfig
from textmill.generation.sampling import choose_next_ids, collect_rules, new_state

VOCAB = 128
ROWS = 20_000
PROMPT = [3, 5, 7, 90]
NEW_IDS = [5, 9, 5]
"""New tokens before the one that is drawn."""
END = 0
LIMIT = 5
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 7},
    "top_p": {"temperature": 1.3, "top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "min_tokens": {"min_tokens": 9},
    "all": {
        "temperature": 1.2,
        "top_k": 60,
        "top_p": 0.97,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "min_tokens": 9,
    },
}


def reference(logits_V: Tensor, sample: SampleConfig) -> Tensor:
    """The probabilities of all tokens by transformers' processors; OpenAI's penalties by their definition."""
    counts_V = torch.bincount(torch.tensor(NEW_IDS), minlength=VOCAB)
    scores_1V = logits_V[None].clone()
    ids_1T = torch.tensor([PROMPT + NEW_IDS])
    if sample.repetition_penalty != 1:
        scores_1V = theirs.RepetitionPenaltyLogitsProcessor(sample.repetition_penalty)(ids_1T, scores_1V)
    scores_1V = scores_1V - sample.presence_penalty * (counts_V > 0) - sample.frequency_penalty * counts_V
    if sample.min_tokens:
        scores_1V[:, END] = -torch.inf
    warpers: list[Any] = [theirs.TemperatureLogitsWarper(sample.temperature)]
    if sample.top_k:
        warpers.append(theirs.TopKLogitsWarper(sample.top_k))
    if sample.top_p < 1:
        warpers.append(theirs.TopPLogitsWarper(sample.top_p))
    if sample.min_p:
        warpers.append(theirs.MinPLogitsWarper(sample.min_p))
    for warper in warpers:
        scores_1V = warper(ids_1T, scores_1V)
    return scores_1V[0].double().softmax(0)


def count_draws(logits_V: Tensor, sample: SampleConfig, draws: int) -> Tensor:
    """How often each token is drawn with the seeds 0, 1, 2 and so on."""
    device = logits_V.device
    first = new_state(sample, PROMPT, ends=(END,), bias=(), vocab=VOCAB, device=device)
    for id_ in NEW_IDS:
        first.add(id_)
        first.new_tokens += 1
    counts_V = torch.zeros(VOCAB, dtype=torch.long)
    for begin in range(0, draws, ROWS):
        seeds = range(begin, min(begin + ROWS, draws))
        states = [dataclasses.replace(first, sample=sample.model_copy(update={"seed": seed})) for seed in seeds]
        found_N = choose_next_ids(logits_V.expand(len(states), -1).contiguous(), states, collect_rules(states, device))
        counts_V += torch.bincount(found_N.cpu(), minlength=VOCAB)
    return counts_V


def main() -> None:
    """Print a row for each setting."""
    draws = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(7)
    logits_V = torch.randn(VOCAB) * 2
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {device}, {draws:,} draws per setting")
    failed = False
    for name, settings in SETTINGS.items():
        started = time.process_time()
        sample = SampleConfig(**{"temperature": 1.0, **settings})
        wanted_V = reference(logits_V, sample) * draws
        counts_V = count_draws(logits_V.to(device), sample, draws)
        large_V = wanted_V >= 10
        counts = torch.cat([counts_V[large_V], counts_V[~large_V].sum()[None]])
        wanted = torch.cat([wanted_V[large_V], wanted_V[~large_V].sum()[None]])
        kept = wanted >= 10
        chi_squared = float((((counts - wanted) ** 2) / wanted)[kept].sum())
        freedom = int(kept.sum()) - 1
        deviations = (chi_squared - freedom) / (2 * freedom) ** 0.5
        impossible = int(counts_V[wanted_V == 0].sum())
        failed |= deviations > LIMIT or impossible > 0
        seconds = time.process_time() - started
        print(
            f"{name:20} chi-squared {chi_squared:7.1f}, {freedom:3} degrees of freedom, {deviations:+.1f} deviations; "
            f"{impossible} impossible tokens; {seconds:.0f} s",
            flush=True,
        )
    if failed:
        sys.exit("a setting does not follow its probabilities")


if __name__ == "__main__":
    main()
