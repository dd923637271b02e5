"""Scoring speed, compared with lm-evaluation-harness' own model class on the same weights in the same run.

    python bench/evaluate.py [windows=N] [items=N] [data=FOLDER] [tiny]

GPT-2 124M with random weights: text in windows of 1,024 tokens with a stride of 512, and questions with four choices
of different lengths. On a GPU in bf16, by default WikiText-2's test file in full and 5,000 items; on a CPU in fp32, a
few of each. The text is FOLDER/wikitext2/test.txt with GPT-2's vocabulary in FOLDER/gpt2_bpe (default: ../shared/data
next to the repository), else the bundled corpus. The other side runs at its best batch size, found on a part of the
work. Where lm-eval is not installed, an equal loop over transformers takes its place. Prints seconds, tokens/s, the
ratio, and how far the log-likelihoods are from each other.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from textmill.checkpoints.folders import open_checkpoint
from textmill.config import TokenizerConfig, TorchEngine
from textmill.corpus.find_sources import bundled_corpora
from textmill.evaluation.scorer_torch import TorchScorer, open_scorer
from textmill.evaluation.tasks.wikitext import rolling_pairs
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit, open_tokenizer

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
WINDOW, STRIDE, TRIED = 1024, 512, 16
Pair = tuple[Sequence[int], Sequence[int]]
ScorePairs = Callable[[list[Pair], int], list[float]]


def main() -> None:
    """Measure windows, then questions."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    given = dict(one.partition("=")[::2] for one in sys.argv[1:])
    is_gpu = torch.cuda.is_available()
    random.seed(1)
    text, tokenizer = open_text(Path(given["data"]) if "data" in given else DATA)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), tokenizer, "tiny" in given)
        scorer = open_scorer(
            open_checkpoint(Path(folder)),
            TorchEngine(device="auto", precision="bf16" if is_gpu else "fp32"),
            16 if not is_gpu else 64,
        )
        name, other = open_other(Path(folder), scorer)
        print(f"{scorer.device}, {scorer.precision}, {torch.get_num_threads()} threads; compared with {name}")
        ids = tokenizer.encode(text)
        windows = list(rolling_pairs(ids, tokenizer.eos_id, WINDOW, STRIDE))
        compare("windows", windows[: int(given.get("windows", len(windows) if is_gpu else 4))], scorer, other)
        items = make_items(ids, int(given.get("items", 5000 if is_gpu else 20)))
        compare("four choices", items, scorer, other)


def open_text(data: Path) -> tuple[str, TextTokenizer]:
    """WikiText-2 with GPT-2's vocabulary, or the bundled corpus with a vocabulary fitted to it."""
    if data.is_dir():
        text = (data / "wikitext2" / "test.txt").read_text(encoding="utf-8")
        return text, open_tokenizer(data / "gpt2_bpe")
    text = next(iter(bundled_corpora().values())).read_text(encoding="utf-8")
    return text, fit(iter([[text]]), TokenizerConfig(vocab=8192))


def make_model(folder: Path, tokenizer: TextTokenizer, tiny: bool) -> None:
    """Write GPT-2 with random weights and GPT-2's vocabulary size."""
    torch.manual_seed(1)
    small = {"n_layer": 2, "n_head": 2, "n_embd": 64} if tiny else {}
    GPT2LMHeadModel(GPT2Config(eos_token_id=tokenizer.eos_id, **small)).save_pretrained(folder)
    tokenizer.save(folder)


def make_items(ids: list[int], count: int) -> list[Pair]:
    """Questions of 30 to 90 tokens with four choices of 5 to 45 tokens, about as long as HellaSwag's."""
    pairs: list[Pair] = []
    for _ in range(count):
        start = random.randrange(len(ids) - 400)
        context = ids[start : start + random.randint(30, 90)]
        for _ in range(4):
            begin = random.randrange(len(ids) - 400)
            pairs.append((context, ids[begin : begin + random.randint(5, 45)]))
    return pairs


def open_other(folder: Path, scorer: TorchScorer) -> tuple[str, ScorePairs]:
    """lm-eval's model class for transformers, or a loop that does the same."""
    dtype, device = getattr(torch, scorer.precision), scorer.net.head.device
    if find_spec("lm_eval") is not None:
        from lm_eval.models.huggingface import HFLM

        model: Any = HFLM(pretrained=str(folder), device=str(device), dtype=scorer.precision, batch_size=1)

        def score(pairs: list[Pair], batch: int) -> list[float]:
            requests = [
                ((str(number), ""), list(context), list(continuation))
                for number, (context, continuation) in enumerate(pairs)
            ]
            found = model._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=batch)
            return [value for value, _ in found]

        return "lm-eval's HFLM", score
    net: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    return "a loop over transformers", lambda pairs, batch: loop(net, device, pairs, batch)


@torch.inference_mode()
def loop(net: Any, device: torch.device, pairs: list[Pair], batch: int) -> list[float]:
    """Pad texts of similar length, compute all logits, and gather those of the continuation, as HFLM does."""
    order = sorted(range(len(pairs)), key=lambda number: -sum(map(len, pairs[number])))
    found = [0.0] * len(pairs)
    for begin in range(0, len(order), batch):
        numbers = order[begin : begin + batch]
        rows = [[*pairs[number][0], *pairs[number][1]] for number in numbers]
        length = max(map(len, rows)) - 1
        inputs = torch.tensor([row[:-1] + [0] * (length + 1 - len(row)) for row in rows], device=device)
        log_probabilities = torch.log_softmax(net(inputs).logits, -1, dtype=torch.float32)
        for row, number in enumerate(numbers):
            count, end = len(pairs[number][1]), len(rows[row]) - 1
            labels = torch.tensor(rows[row][-count:], device=device)
            chosen = log_probabilities[row, end - count : end].gather(-1, labels[:, None])
            found[number] = float(chosen.sum())
    return found


def compare(name: str, pairs: list[Pair], scorer: TorchScorer, other: ScorePairs) -> None:
    """Time both sides on the same pairs, after a warm-up."""
    scorer.score_tokens(pairs[:TRIED])
    seconds, ours = timed(lambda: [score.log_likelihood for score in scorer.score_tokens(pairs)])
    best = find_batch(pairs, other)
    other_seconds, theirs = timed(lambda: other(pairs, best))
    tokens = sum(len(context) + len(continuation) for context, continuation in pairs)
    difference = max(abs(one / two - 1) for one, two in zip(ours, theirs, strict=True))
    rates = [f"{tokens / one:,.0f} tokens/s" for one in (seconds, other_seconds)]
    print(
        f"{name}: {len(pairs):,} texts, {tokens:,} tokens; textmill {seconds:.2f} s ({rates[0]}), "
        f"other {other_seconds:.2f} s at batch {best} ({rates[1]}): {other_seconds / seconds:.2f} times as fast; "
        f"log-likelihoods differ by {difference:.1e} at most"
    )


def find_batch(pairs: list[Pair], other: ScorePairs) -> int:
    """The fastest batch size on the first pairs."""
    sizes = (8, 32, 64, 128, 256) if torch.cuda.is_available() else (1, 4, 16)
    part = pairs[: 4 * max(sizes) if torch.cuda.is_available() else TRIED]
    times: dict[int, float] = {}
    for size in sizes:
        try:
            other(part[:size], size)
            times[size], _ = timed(lambda size=size: other(part, size))  # type: ignore[misc]
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    return min(times, key=times.__getitem__)


def timed(work: Callable[[], list[float]]) -> tuple[float, list[float]]:
    """Seconds and result."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main()
