"""Encoders: the fastest library whose ids are those of tokenizers, proved on the texts at hand, and tokenizers itself otherwise."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.tokens.vocabulary.encoder import Encoder
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

REFERENCE = "tokenizers"
FAST = "fastokens"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = frozenset((
    _WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST,
    _WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST,
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_WORDS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_WORDS}?|\p{{N}}{{1,3}}"
    + _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1),
))  # fmt: skip
"""Splitting patterns on which both libraries gave the same ids for any text tried: GPT-4's and Llama 3's, Qwen's, GPT-4o's.

With others they may take some rare sign for a letter or not; GPT-2's own is no pattern in the file, and is the same in both.
"""


@dataclass(frozen=True)
class ReferenceEncoder:
    """The tokenizer as it is."""

    tokenizer: TextTokenizer

    @property
    def name(self) -> str:
        return f"{REFERENCE} {metadata.version(REFERENCE)}"

    def encode(self, texts: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        rows = list(self.tokenizer.encode_many(texts))
        return np.concatenate([np.zeros(0, np.int64), *rows]), np.fromiter(map(len, rows), np.int64, len(rows))


@dataclass(frozen=True)
class FastEncoder:
    """The same vocabulary and rules in fastokens; its cache is bounded, and it makes no object of a token."""

    inner: Any

    @property
    def name(self) -> str:
        return f"{FAST} {metadata.version(FAST)}"

    def encode(self, texts: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        ids, offsets = self.inner.encode_batch_flat(texts, add_special_tokens=False, split_special_tokens=True)
        bounds = np.frombuffer(offsets, "<u8").astype(np.int64)
        return np.frombuffer(ids, "<u4"), bounds[1:] - bounds[:-1]


def open_encoder(tokenizer: TextTokenizer) -> Encoder:
    """The fastest encoder that may be trusted with a tokenizer."""
    return ReferenceEncoder(tokenizer) if doubt_of(tokenizer) else _open_fast(tokenizer.inner.to_str())


def open_encoder_in(folder: Path, kind: str) -> Encoder:
    """The encoder of a kind for the tokenizer in a folder; the fast one is opened without the other."""
    if kind == FAST:
        return _open_fast((folder / "tokenizer.json").read_text(encoding="utf-8"))
    from textmill.tokens.vocabulary.tokenizer import open_tokenizer

    # One worker a core already: a second thread each would only make them wait for one another.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return ReferenceEncoder(open_tokenizer(folder))


def _open_fast(rules: str) -> Encoder:
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
    import fastokens

    return FastEncoder(fastokens.Tokenizer.from_json_str(rules))


def doubt_of(tokenizer: TextTokenizer) -> str | None:
    """Why the fast encoder is not to be had for a tokenizer, in a few words; None: it is."""
    if not hasattr(tokenizer.inner, "to_str"):
        return "it reads tokenizer.json only"
    rules = json.loads(tokenizer.inner.to_str())
    model, shape = rules["model"], rules["pre_tokenizer"] or {}
    if model["type"] != "BPE":
        return f"it knows no {model['type']}"
    if any(model.get(key) for key in ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")):
        return "it is trusted with byte-level BPE only"
    if (rules["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        return f"it is not trusted with the normaliser {rules['normalizer']['type']}"
    steps = shape.get("pretokenizers", [shape])
    if steps[-1].get("type") != "ByteLevel" or not all(map(_known, steps)):
        return "it is not trusted with this way of splitting words"
    try:
        metadata.version(FAST)
    except metadata.PackageNotFoundError:
        return f"{FAST} is not installed"
    return None


def _known(step: dict[str, Any]) -> bool:
    if step["type"] == "Split":
        return step["pattern"].get("Regex") in PATTERNS and step["behavior"] == "Isolated" and not step["invert"]
    return step["type"] in ("ByteLevel", "Digits")


@dataclass(frozen=True)
class Sample:
    """A text on which encoders are compared, and what to call it."""

    name: str
    text: str


def first_difference(encoder: Encoder, reference: Encoder, samples: Iterable[Sample]) -> Sample | None:
    """The first text that the two encode otherwise; a text that either refuses counts."""
    for sample in (*hard_samples(), *samples):
        if _outcome(encoder, sample.text) != _outcome(reference, sample.text):
            return sample
    return None


def _outcome(encoder: Encoder, text: str) -> list[int] | None:
    try:
        return list(map(int, encoder.encode([text])[0]))
    except BaseException as error:
        if not is_refusal(error):
            raise
        return None


def is_refusal(error: BaseException) -> bool:
    """Whether a library said that it cannot encode a text; a panic in Rust is no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def hard_samples() -> Iterator[Sample]:
    """What libraries are known to disagree on, and every sign of the common scripts between letters."""
    texts = [
        "", " ", "  ", "\n", "\r\n", " \n \n  x", "\t\t tab", "a" * 5000, " " * 5000 + "x", "-" * 3000, "\x00\x01\x1b\x7f\x85", "\ufeffBOM",
        "don't I'LL we've it's 'S 'twas O'Neill's ‘quoted’", "1234567890 3.14 1,000,000 ١٢٣ ५६७ ½ ² Ⅷ 0x7f",
        "<|endoftext|> <|endoftext|><|im_start|>[MASK] <s></s> <unk> [CLS][SEP] <pad>", "x<|endoftext|>y",
        "e\u0301 é n\u0303 ñ ṩ s\u0323\u0307 가각 \u1100\u1161\u11a8 \u0344 \u212b \u2126", "ﬁ ﬂ ① ㍿ ｆｕｌｌ ｶﾞ ǆ ſ K",
        "İstanbul ışık ΣΑΣ straße ẞ",
        "👩‍👩‍👧‍👦 🇰🇷🇹🇷 👍🏽 ☺️ 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿", "漢字かな交じり文。中文，标点！한국어 문장입니다.", "עברית العَرَبِيَّة‎ हिन्दी ไทย ລາວ မြန်မာ ភាសា",
        "\u00a0\u2003\u2009\u200b\u200c\u200d\u2028\u2029\u202f\u205f\u3000x", "\U0010ffff\ue000\U000f0000\ufffd\ufffe\uffff",
        "def f(x):\n    return {k: v for k, v in x.items()}  # ok\n\n\n", "https://example.org/a_b-c?d=e&f=%20g#h",
        "CamelCase snake_case UPPER lower12 a1b2",
    ]  # fmt: skip
    texts += [
        "".join(f"a{chr(sign)}b {chr(sign)}" for sign in range(start, start + 0x400))
        for start in range(0, 0x3400, 0x400)
    ]
    return (Sample(f"the hard text {number}", text) for number, text in enumerate(texts))
