"""WikiText, or any text file, in the protocols that published figures use.

The protocols differ in what is one text, in the windows and in what is counted, so their perplexities of the same
model differ too. lm-eval reads each article alone in windows that do not overlap; Megatron-LM and transformers read the
file as one text with overlapping windows, and do not predict its first token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from textmill.config import EvaluateConfig
from textmill.errors import TextmillError
from textmill.evaluation.data_files import SAMPLE_SEED, DataFile, open_data_file, read_lines, sample
from textmill.evaluation.metrics import compute_metrics, document_interval, metric_intervals
from textmill.evaluation.split_tokens import temporary_store
from textmill.evaluation.task import LossPart, Measured, NextTokenScorer, Pair, StoreLoss, TaskEntry
from textmill.evaluation.tasks import perplexity


@dataclass(frozen=True)
class Protocol:
    """How the text is divided, read and counted."""

    articles: bool
    """Whether each article is read alone, its first token too; else the file is one text, its first token context."""
    detokenize: bool
    """Whether the text is detokenised first: "1 @,@ 234" becomes "1,234"."""
    stride: int | None
    """None: as long as the window."""
    shorter: int = 0
    """transformers counts the token after which nothing is predicted as part of the window."""


FILES = "wiki.test.tokens, or any text"
SOURCE = "WikiText-2 and WikiText-103 (their test file is the same), Salesforce/wikitext on the Hugging Face hub"
PROTOCOLS = {
    "lm-eval": Protocol(articles=True, detokenize=True, stride=None),
    "megatron": Protocol(articles=False, detokenize=True, stride=32),
    "transformers": Protocol(articles=False, detokenize=False, stride=512, shorter=1),
}


WORDS_ARE = {
    True: "separated by white space, before detokenising",
    False: "separated by single spaces, before detokenising, without the first",
}
"""What the card says of the counts, by whether each article is read alone."""


def measure(scorer: NextTokenScorer, settings: EvaluateConfig, entry: TaskEntry) -> Measured:
    """Sum the loss of the text and divide it by tokens, original words and original bytes."""
    data = open_data_file(entry)
    protocol = PROTOCOLS[settings.wikitext]
    original = _read(data)
    originals = split_articles(original) if protocol.articles else [original]
    texts = [detokenize(text) for text in originals] if protocol.detokenize else originals
    window, stride = find_windows(settings, scorer.positions)
    window = max(1, window - protocol.shorter)
    score = _score_articles if protocol.articles else _score_stream
    measured, tokens = score(scorer, texts, settings, window, stride)
    # Words and bytes are those before detokenising, as in published figures.
    words = sum(map(count_words, originals)) if protocol.articles else count_spaced_words(original)
    counts = {"tokens": tokens, "words": words, "bytes": len(original.encode())}
    # With evaluate.sample, the mean loss of the sample stands for that of all tokens.
    mean_loss = measured.loss / measured.tokens
    metrics = compute_metrics(mean_loss * tokens, counts, str(scorer.checkpoint.folder))
    interval, interval_method = document_interval(measured.parts)
    card = {
        **data.card,
        "protocol": settings.wikitext,
        "detokenised": protocol.detokenize,
        "articles": protocol.articles,
        "window": window + protocol.shorter,
        "stride": stride,
        "first_token": "predicted" if protocol.articles else "context",
        "count_end": False,
        "examples": measured.windows,
        **counts,
        "counted": measured.tokens,
        **({"sample": settings.sample, "seed": SAMPLE_SEED} if settings.sample else {}),
        "words_are": WORDS_ARE[protocol.articles],
        "interval": interval_method,
    }
    return Measured(metrics, card, metric_intervals(interval, counts), metrics["loss"])


def read_texts(entry: TaskEntry) -> Iterator[list[str]]:
    """The articles, each an example."""
    for article in split_articles(_read(open_data_file(entry))):
        yield [detokenize(article)]


def _read(data: DataFile) -> str:
    text = "".join(line for path in data.files for _, line in read_lines(path))
    if not text.strip():
        raise TextmillError(f"{data.path}: is empty")
    return text


def find_windows(settings: EvaluateConfig, positions: int, _: int | None = None) -> tuple[int, int]:
    """The tokens of a window, and those between the starts of two, by default as the protocol has them, whatever length
    the model was trained with."""
    protocol = PROTOCOLS[settings.wikitext]
    window, stride = perplexity.find_windows(settings, positions)
    if settings.stride is None and protocol.stride is not None:
        stride = min(protocol.stride, window)
    return window, stride


def _score_stream(
    scorer: NextTokenScorer, texts: list[str], settings: EvaluateConfig, window: int, stride: int
) -> tuple[StoreLoss, int]:
    """The file as one text, and how many tokens it has to predict: all but the first."""
    with temporary_store(texts, scorer.tokenizer, append_end=False) as store:
        measured = scorer.sum_losses(
            store, length=window, stride=stride, predict_first=False, sample=settings.sample, seed=SAMPLE_SEED
        )
        return measured, store.tokens - 1


def _score_articles(
    scorer: NextTokenScorer, texts: list[str], settings: EvaluateConfig, window: int, stride: int
) -> tuple[StoreLoss, int]:
    """Every article alone, and how many tokens they have; the first token of each is predicted from the tokenizer's
    first token."""
    articles = [ids.tolist() for ids in scorer.tokenizer.encode_many(texts)]
    pairs: list[Pair] = []
    article_of_pair: list[int] = []
    for number, ids in enumerate(sample(articles, settings)):
        article_pairs = list(rolling_pairs(ids, scorer.tokenizer.first_id, window, min(stride, window)))
        pairs += article_pairs
        article_of_pair += [number] * len(article_pairs)
    parts = [
        LossPart(number, -score.log_likelihood, score.tokens)
        for number, score in zip(article_of_pair, scorer.score_tokens(pairs), strict=True)
    ]
    loss = math.fsum(part.loss for part in parts)
    measured = StoreLoss(loss, sum(part.tokens for part in parts), 0, article_of_pair[-1] + 1, parts)
    return measured, sum(map(len, articles))


def rolling_pairs(ids: list[int], first: int, window: int, stride: int) -> Iterator[Pair]:
    """A text as contexts and continuations that predict each token once: a first window, then `stride` tokens at a
    time, each time with as much context as fits into the window.

    ids 1 to 6, first 0, window 4, stride 2: ([0], [1, 2, 3, 4]), then ([2, 3, 4], [5, 6]).
    """
    text: list[int] = [first, *ids]
    predicted = 0
    while predicted < len(ids):
        count = min(len(ids) - predicted, stride if predicted else window)
        predicted += count
        start = max(0, predicted - window)
        split = predicted + 1 - count
        yield text[start:split], text[split : predicted + 1]


LITERAL_FIRST = [
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    (" : ", ": "),
    (" ; ", "; "),
    (" . ", ". "),
    (" ! ", "! "),
    (" ? ", "? "),
    (" , ", ", "),
]
PAIRED = [
    (r"\(", r"\)", "(", ")"),
    (r"\[", r"\]", "[", "]"),
    ("{", "}", "{", "}"),
    ('"', '"', '"', '"'),
    ("'", "'", "'", "'"),
]
"""Brackets and quotes: white space just inside them is removed."""
LITERAL_LAST = [
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \u00b0 ", "\u00b0"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]
TITLE = re.compile(r"^(?= = [^=].*[^=] = $| = [^=] = $)", re.MULTILINE)
"""The first line of an article."""


def detokenize(text: str) -> str:
    """Undo the tokenisation of WikiText: separated punctuation, `@-@`, spaces inside brackets and quotes."""
    for old, new in LITERAL_FIRST:
        text = text.replace(old, new)
    for opening, closing, first, last in PAIRED:
        text = re.sub(rf"{opening}\s*([^{closing}]*?)\s*{closing}", rf"{first}\1{last}", text)
    for old, new in LITERAL_LAST:
        text = text.replace(old, new)
    return text


def split_articles(text: str) -> list[str]:
    """The articles of a file, each from its title line on; text before the first title belongs to the first."""
    parts = TITLE.split(text)
    if len(parts) > 1 and not parts[0].strip():
        parts[:2] = [parts[0] + parts[1]]
    return [part for part in parts if part]


def count_words(text: str) -> int:
    """Words as lm-evaluation-harness counts them: what white space separates, and an empty one at each end that has
    white space."""
    return len(re.split(r"\s+", text))


def count_spaced_words(text: str) -> int:
    """Words as Megatron-LM counts them: what single spaces separate in the stripped text, without the first."""
    return len(text.strip().split(" ")) - 1
