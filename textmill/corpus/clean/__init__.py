"""Clean documents: rules change a text, then filters drop a document."""

from __future__ import annotations

from textmill.corpus.clean.cleaner import Cleaner
from textmill.corpus.clean.rules import RULES, clean

__all__ = ["RULES", "Cleaner", "clean"]
