"""WikiText, or any text file, in the protocols that published figures use."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from textmill.config import EvaluateConfig, RunConfig
from textmill.errors import TextmillError
from textmill.evaluation.data_files import DataFile, open_data_file, sample
from textmill.evaluation.metrics import compute_metrics, metric_intervals
from textmill.evaluation.statistics import mean_loss_interval
from textmill.evaluation.task import Measured, Pair, Scorer, StoreLoss, TaskEntry
from textmill.evaluation.text_stores import temporary_store
from textmill.evaluation.wikitext_text import count_spaced_words, count_words, detokenize, split_articles


@dataclass(frozen=True)
class Protocol:
    """How the text is cut, read and counted."""

    articles: bool
    detokenize: bool
    stride: int | None
    first_token: Literal["predicted", "context"]
    shorter: int = 0
    """transformers counts the token after which nothing is predicted as part of the window."""


PROTOCOLS = {
    "lm-eval": Protocol(articles=True, detokenize=True, stride=None, first_token="predicted"),
    "megatron": Protocol(articles=False, detokenize=True, stride=32, first_token="context"),
    "transformers": Protocol(articles=False, detokenize=False, stride=512, first_token="context", shorter=1),
}


def measure(scorer: Scorer, config: RunConfig, entry: TaskEntry) -> Measured:
    """Sum the loss of the text and divide it by tokens, original words and original bytes."""
    data, settings, own = open_data_file(entry), config.evaluate, config.evaluate.wikitext
    protocol = PROTOCOLS[own.protocol]
    articles = protocol.articles if own.articles is None else own.articles
    undone = protocol.detokenize if own.detokenize is None else own.detokenize
    first = settings.first_token or ("predicted" if articles else protocol.first_token)
    if articles and first == "context":
        raise TextmillError(
            "evaluate.first_token: articles that are read alone have their first token predicted; set "
            "evaluate.wikitext.articles=false too"
        )
    original = _read(data)
    parts = split_articles(original) if articles else [original]
    texts = [detokenize(part) if undone else part for part in parts]
    window, stride = _window(scorer, settings, protocol)
    score = _score_articles if articles else _score_stream
    found, tokens = score(scorer, texts, settings, window, stride, first == "predicted")
    words = sum(map(count_words, parts)) if articles else count_spaced_words(original)
    counts = {"tokens": tokens, "words": words, "bytes": len(original.encode())}
    metrics = compute_metrics(found.loss / found.tokens * tokens, counts, str(scorer.checkpoint.folder))
    card = {
        **data.card, "protocol": own.protocol, "detokenised": undone, "articles": articles,
        "window": window + protocol.shorter, "stride": stride, "first_token": first,
        "count_end": bool(settings.count_end), "examples": len(found.window_losses), **counts,
        "counted": found.tokens, **({"seed": settings.seed} if settings.sample else {}),
        "words_are": "separated by white space, before detokenising" if articles
        else "separated by single spaces, before detokenising, without the first",
        "interval": f"95%, of {'articles' if articles else 'windows'}",
    }  # fmt: skip
    interval = mean_loss_interval(found.window_losses, found.window_tokens)
    return Measured(metrics, card, metric_intervals(interval, counts), metrics["loss"])


def read_texts(entry: TaskEntry) -> Iterator[list[str]]:
    """The articles, each an example."""
    for article in split_articles(_read(open_data_file(entry))):
        yield [detokenize(article)]


def _read(data: DataFile) -> str:
    try:
        text = data.path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextmillError(f"{data.path}: not UTF-8 (byte {error.start + 1:,}); the file is damaged") from None
    if not text.strip():
        raise TextmillError(f"{data.path}: is empty")
    return text


def _window(scorer: Scorer, config: EvaluateConfig, protocol: Protocol) -> tuple[int, int]:
    """The tokens of a window that predict, and the stride."""
    window = min(config.window or scorer.positions, scorer.positions)
    if config.window and config.window > scorer.positions:
        raise TextmillError(f"evaluate.window: {config.window} is more than the model's {scorer.positions} positions")
    stride = config.stride or min(protocol.stride or window, window)
    if stride > window:
        raise TextmillError(
            f"evaluate.stride: {stride} is more than the window of {window} tokens, so some would be left out; lower it"
        )
    return max(1, window - protocol.shorter), stride


def _score_stream(
    scorer: Scorer, texts: list[str], settings: EvaluateConfig, window: int, stride: int, predict_first: bool
) -> tuple[StoreLoss, int]:
    """The file as one text, and how many tokens it has to predict."""
    with temporary_store(texts, scorer.tokenizer, append_end=bool(settings.count_end)) as store:
        found = scorer.sum_losses(
            store, length=window, stride=stride, predict_first=predict_first, sample=settings.sample, seed=settings.seed
        )
        return found, store.tokens - (not predict_first)


def _score_articles(
    scorer: Scorer, texts: list[str], settings: EvaluateConfig, window: int, stride: int, predict_first: bool
) -> tuple[StoreLoss, int]:
    """Every article alone, and how many tokens they have; the first token of each is predicted from an end-of-text
    token."""
    end = [scorer.tokenizer.end] if settings.count_end else []
    every = [[*ids.tolist(), *end] for ids in scorer.tokenizer.encode_many(texts)]
    pairs: list[Pair] = []
    articles: list[int] = []
    for number, ids in enumerate(sample(every, settings)):
        own = list(rolling_pairs(ids, scorer.tokenizer.end, window, min(stride, window)))
        pairs += own
        articles += [number] * len(own)
    losses, tokens = [0.0] * len(every), [0] * len(every)
    for number, score in zip(articles, scorer.score_tokens(pairs), strict=True):
        losses[number] -= score.log_likelihood
        tokens[number] += score.tokens
    used = articles[-1] + 1
    return StoreLoss(math.fsum(losses), sum(tokens), 0, losses[:used], tokens[:used]), sum(map(len, every))


def rolling_pairs(ids: list[int], first: int, window: int, stride: int) -> Iterator[Pair]:
    """A text as contexts and continuations that predict each token once: a first window, then `stride` tokens at a
    time, each time with as much context as fits into the window. The last one is no shorter than the others."""
    text: list[int] = [first, *ids]
    done = 0
    while done < len(ids):
        count = min(len(ids) - done, stride if done else window)
        done += count
        start = max(0, done - window)
        yield text[start : done + 1 - count], text[done + 1 - count : done + 1]
