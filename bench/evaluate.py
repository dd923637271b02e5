"""Scoring speed, compared with lm-evaluation-harness' own model class on the same weights in the same run.

    python bench/evaluate.py [work=NAME,NAME] [times=N] [layers=N] [width=N] [data=FOLDER] [other=transformers]
                             [profile]

GPT-2 with random weights, 12 layers 768 wide unless `layers` and `width` say otherwise; bf16 on a GPU, fp32 on a CPU,
where there is less work; `times` multiplies it. The kinds of work are below (WORK). The text is
FOLDER/wikitext2/test.txt with GPT-2's vocabulary in FOLDER/gpt2_bpe (default: ../shared/data next to the repository),
else the bundled corpus. The other side runs at its best batch size, found on a part of the work. Where lm-eval is not
installed, or with `other=transformers`, an equal loop over transformers takes its place. Prints CPU seconds of all
threads and seconds, the ratio (on a GPU of seconds, on a CPU of CPU seconds, since other processes do not change
those), and how far the log-likelihoods are from each other. `profile` also prints where textmill's time goes.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
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
WINDOW = 1024
Pair = tuple[list[int], list[int]]
ScorePairs = Callable[[list[Pair], int], list[float]]
Part = Callable[[int, int], list[int]]
"""Consecutive tokens from a random place: so many at least, so many at most."""


def main() -> None:
    """Measure each kind of work."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    given = dict(one.partition("=")[::2] for one in sys.argv[1:])
    is_gpu = torch.cuda.is_available()
    text, tokenizer = open_text(Path(given["data"]) if "data" in given else DATA)
    ids = tokenizer.encode(text)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), tokenizer, int(given.get("layers", 12)), int(given.get("width", 768)))
        engine = TorchEngine(device="auto", precision="bf16" if is_gpu else "fp32")
        scorer = open_scorer(open_checkpoint(Path(folder)), engine, 64 if is_gpu else 16)
        name, other = open_other(Path(folder), scorer, given.get("other") != "transformers")
        print(f"{scorer.device}, {scorer.precision}, {torch.get_num_threads()} threads; compared with {name}")
        for work in given["work"].split(",") if "work" in given else WORK:
            on_gpu, on_cpu, make = WORK[work]
            random.seed(1)
            count = round((on_gpu if is_gpu else on_cpu) * float(given.get("times", 1)))
            pairs = make(ids, count)
            compare(work, pairs, scorer, other)
            if "profile" in given:
                print_profile(pairs, scorer)


def open_text(data: Path) -> tuple[str, TextTokenizer]:
    """WikiText-2 with GPT-2's vocabulary, or the bundled corpus with a vocabulary fitted to it."""
    if data.is_dir():
        text = (data / "wikitext2" / "test.txt").read_text(encoding="utf-8")
        return text, open_tokenizer(data / "gpt2_bpe")
    text = next(iter(bundled_corpora().values())).read_text(encoding="utf-8")
    return text, fit(iter([[text]]), TokenizerConfig(vocab=8192))


def make_model(folder: Path, tokenizer: TextTokenizer, layers: int, width: int) -> None:
    """Write GPT-2 with random weights, heads 64 wide and GPT-2's vocabulary size."""
    torch.manual_seed(1)
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64, eos_token_id=tokenizer.eos_id)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save(folder)


def windows(ids: list[int], count: int, stride: int) -> list[Pair]:
    """The text in windows."""
    return list(rolling_pairs(ids, ids[0], WINDOW, stride))[:count]


def words(ids: list[int], count: int) -> list[Pair]:
    """Passages whose last word is predicted, about as long as LAMBADA's."""
    part = part_of(ids)
    return [(part(60, 120), part(1, 3)) for _ in range(count)]


def choices(ids: list[int], count: int, examples: int) -> list[Pair]:
    """Questions of 30 to 90 tokens with four choices of 5 to 45 tokens, about as long as HellaSwag's, each after
    examples of its own."""
    part = part_of(ids)
    contexts = [part(30 + 60 * examples, 90 + 60 * examples) for _ in range(count)]
    return [(context, part(5, 45)) for context in contexts for _ in range(4)]


def letters(ids: list[int], count: int) -> list[Pair]:
    """Questions whose choices are single tokens; 50 of them follow the same five examples, as in MMLU."""
    part = part_of(ids)
    pairs: list[Pair] = []
    for number in range(count):
        if number % 50 == 0:
            examples = part(400, 700)
        context = examples + part(40, 140)
        pairs += [(context, [token]) for token in (32, 33, 34, 35)]
    return pairs


def part_of(ids: list[int]) -> Part:
    """Random parts of a text."""

    def part(least: int, most: int) -> list[int]:
        start = random.randrange(len(ids) - most)
        return ids[start : start + random.randint(least, most)]

    return part


WORK: dict[str, tuple[int, int, Callable[[list[int], int], list[Pair]]]] = {
    "windows": (1000, 6, lambda ids, count: windows(ids, count, WINDOW)),
    "overlapping": (1000, 6, lambda ids, count: windows(ids, count, WINDOW // 2)),
    "words": (5000, 64, words),
    "choices": (5000, 24, lambda ids, count: choices(ids, count, 0)),
    "few-shot": (500, 4, lambda ids, count: choices(ids, count, 10)),
    "letters": (1000, 16, letters),
}
"""How much on a GPU and on a CPU, and the texts: windows of 1,024 tokens; the same with a stride of 512; last words;
questions with four choices, alone and after ten examples; questions with four letters after five shared examples."""


def open_other(folder: Path, scorer: TorchScorer, use_lm_eval: bool) -> tuple[str, ScorePairs]:
    """lm-eval's model class for transformers, or a loop that does the same."""
    dtype, device = getattr(torch, scorer.precision), scorer.net.head.device
    if use_lm_eval and find_spec("lm_eval") is not None:
        from lm_eval.models.huggingface import HFLM

        model: Any = HFLM(pretrained=str(folder), device=str(device), dtype=scorer.precision, batch_size=1)

        def score(pairs: list[Pair], batch: int) -> list[float]:
            model.batch_size_per_gpu = batch
            requests = [((str(number), ""), *pair) for number, pair in enumerate(pairs)]
            return [value for value, _ in model._loglikelihood_tokens(requests, disable_tqdm=True)]

        return "lm-eval's HFLM", score
    net: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    return "a loop over transformers", lambda pairs, batch: loop(net, device, pairs, batch)


@torch.inference_mode()
def loop(net: Any, device: torch.device, pairs: list[Pair], batch: int) -> list[float]:
    """As HFLM: texts that differ in their last token only are read once; pad texts of similar length, compute all
    logits and their log-softmax, and gather those of the continuations."""
    texts: dict[tuple[int, ...], list[int]] = {}
    for number, (context, continuation) in enumerate(pairs):
        texts.setdefault((*context, *continuation[:-1])[-WINDOW:], []).append(number)
    order = sorted(texts, key=lambda text: -len(text))
    found = [0.0] * len(pairs)
    for begin in range(0, len(order), batch):
        rows = order[begin : begin + batch]
        inputs = torch.tensor([[*row, *[0] * (len(rows[0]) - len(row))] for row in rows], device=device)
        log_probabilities = torch.log_softmax(net(inputs).logits, -1)
        for row, text in zip(log_probabilities, rows, strict=True):
            counts = [len(pairs[number][1]) for number in texts[text]]
            scored = row[len(text) - max(counts) : len(text)]
            greedy = scored.argmax(-1)
            for number, count in zip(texts[text], counts, strict=True):
                labels = torch.tensor(pairs[number][1], device=device)
                chosen = scored[-count:].gather(-1, labels[:, None])
                found[number], _ = float(chosen.sum()), bool((greedy[-count:] == labels).all())
    return found


def compare(name: str, pairs: list[Pair], scorer: TorchScorer, other: ScorePairs) -> None:
    """Time both sides on the same pairs, after a warm-up."""
    is_gpu = torch.cuda.is_available()
    tried = pairs[: 1024 if is_gpu else 16]
    scorer.score_tokens(tried)
    best = find_batch(tried, other)
    ours, our_seconds = timed(lambda: [score.log_likelihood for score in scorer.score_tokens(pairs)])
    theirs, other_seconds = timed(lambda: other(pairs, best))
    ratio = other_seconds[is_gpu] / our_seconds[is_gpu]
    tokens = sum(len(context) + len(continuation) for context, continuation in pairs)
    difference = max(abs(one / two - 1) for one, two in zip(ours, theirs, strict=True))
    both = [f"{cpu:.2f} CPU seconds, {wall:.2f} s" for cpu, wall in (our_seconds, other_seconds)]
    print(
        f"{name}: {len(pairs):,} texts, {tokens:,} tokens; textmill {both[0]}; other {both[1]} at batch {best}; "
        f"{ratio:.2f} times as fast; log-likelihoods differ by {difference:.1e} at most",
        flush=True,
    )


def find_batch(pairs: list[Pair], other: ScorePairs) -> int:
    """The fastest batch size on the first pairs."""
    is_gpu = torch.cuda.is_available()
    times: dict[int, float] = {}
    for size in (16, 64, 256) if is_gpu else (1, 4, 16):
        try:
            other(pairs[:size], size)
            times[size] = timed(lambda size=size: other(pairs, size))[1][is_gpu]  # type: ignore[misc]
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    return min(times, key=times.__getitem__)


def timed(work: Callable[[], list[float]]) -> tuple[list[float], tuple[float, float]]:
    """The result, CPU seconds and seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start, cpu_start = time.perf_counter(), time.process_time()
    result = work()
    return result, (time.process_time() - cpu_start, time.perf_counter() - start)


def print_profile(pairs: list[Pair], scorer: TorchScorer) -> None:
    """The most costly operations, on a GPU its kernels."""
    with torch.profiler.profile() as profiler:
        scorer.score_tokens(pairs)
    key = f"self_{'device' if torch.cuda.is_available() else 'cpu'}_time_total"
    for one in sorted(profiler.key_averages(), key=lambda one: -getattr(one, key))[:20]:
        print(f"    {getattr(one, key) / 1e6:8.3f} s {one.count:6,} times  {one.key[:90]}")


if __name__ == "__main__":
    main()
