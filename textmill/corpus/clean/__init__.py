"""Cleaning: rules that change a text, then filters that drop a document; one small pure function each."""

from __future__ import annotations

from textmill.corpus.clean.cleaner import Cleaner
from textmill.corpus.clean.rules import RULES, clean

__all__ = ["RULES", "Cleaner", "clean"]
