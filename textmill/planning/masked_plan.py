"""What differs in the plan of a model that predicts masked tokens: sentences, WordPiece, and the masked layout."""

from __future__ import annotations

from dataclasses import replace

from textmill.planning.facts import TextFacts
from textmill.planning.plan import Plan

Row = tuple[str, object, str]
"""A key, its value, and its comment; a key without a value is a group, and the rows after it are indented by the
caller."""
MIN_VOCAB = 2048
MANY_CHARACTERS_VOCAB = 8192
"""The smallest WordPiece vocabularies: for alphabets, and for scripts with thousands of characters."""
MANY_CHARACTERS = ("Cjk", "Hangul", "Hiragana", "Katakana")
MIN_SECTION = 1000
"""Characters of a document that plain text is cut into, at least: enough for several sentences."""
MIN_PAIR_BYTES = 400
"""Shorter documents have too few sentences for pairs."""


def limit_vocabs(text: TextFacts) -> TextFacts:
    """The text with only those vocabularies that hold its characters, each twice: at the start of a word and inside."""
    many = sum(share for script, share in text.scripts.items() if script in MANY_CHARACTERS) > 0.01
    least = MANY_CHARACTERS_VOCAB if many else MIN_VOCAB
    allowed = {vocab: size for vocab, size in text.bytes_per_token.items() if vocab >= least}
    largest = max(text.bytes_per_token)
    return replace(text, bytes_per_token=allowed or {largest: text.bytes_per_token[largest]})


def has_pairs(text: TextFacts) -> bool:
    """Whether documents are long enough for sentence pairs."""
    return text.document_bytes >= MIN_PAIR_BYTES


def masked_sections(sections: dict[str, list[Row]], text: TextFacts, plan: Plan, family: str) -> dict[str, list[Row]]:
    """The sections of a plan, changed for a model of this family."""
    pairs: Row = ("  pairs", "next", "sentence pairs: does the second follow the first?")
    if not has_pairs(text):
        pairs = ("  pairs", "none", f"full sentences: documents of {text.document_bytes:.0f} bytes are short for pairs")
    shape = (
        sections["model"] if has_pairs(text) else [*sections["model"], ("  pair_head", "false", "there are no pairs")]
    )
    return {
        "corpus": [*sections["corpus"], ("sentences", "split", "one sentence per line")],
        "tokenizer": [
            ("kind", "wordpiece", "as in BERT"),
            ("vocab", plan.vocab, "holds the characters of the text"),
            *(row for row in sections["tokenizer"] if row[0] == "fit_sample"),
        ],
        "tokens": [
            ("level", "sentence", "samples are made of full sentences"),
            ("append_end", "false", "samples have their own [SEP]"),
        ],
        "model": [("family", family, "predicts masked tokens"), *shape],
        "train": [
            ("layout", "masked", "15 % of the tokens are masked, others in each epoch"),
            ("masked", "", ""),
            pairs,
            *sections["train"],
        ],
        **{name: rows for name, rows in sections.items() if name == "engine"},
    }
