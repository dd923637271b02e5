"""Two encoders: fastokens where its ids are known to equal those of the tokenizers library, else tokenizers itself."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from textmill.tokens.vocabulary.foreign_files import LLAMA_3, QWEN, REST, SUFFIXES
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

REFERENCE = "tokenizers"
FAST = "fastokens"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = frozenset(
    (
        LLAMA_3,
        QWEN,
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{SUFFIXES}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{SUFFIXES}?|\p{{N}}{{1,3}}"
        + REST.replace(r"[\r\n]*", r"[\r\n/]*", 1),
    )
)
"""Word-splitting patterns with which both libraries gave the same ids on all tests: GPT-4 and Llama 3, Qwen, GPT-4o.

With other patterns they may disagree whether a rare character is a letter. GPT-2's own splitting is built into both
libraries and gives the same ids.
"""


class Encoder(Protocol):
    """Turns texts into ids. Adds no special tokens; text that looks like a special token is encoded as plain text."""

    @property
    def name(self) -> str:
        """The library and its version."""
        ...

    def encode(self, texts: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The ids of all texts, concatenated, and the number of ids of each text."""
        ...


@dataclass(frozen=True)
class ReferenceEncoder:
    """Encodes with the tokenizers library; its ids are the reference."""

    tokenizer: TextTokenizer

    @property
    def name(self) -> str:
        return f"{REFERENCE} {metadata.version(REFERENCE)}"

    def encode(self, texts: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        rows = list(self.tokenizer.encode_many(texts))
        return np.concatenate([np.zeros(0, np.int64), *rows]), np.fromiter(map(len, rows), np.int64, len(rows))


@dataclass(frozen=True)
class FastEncoder:
    """Encodes with fastokens: the same vocabulary and rules, a bounded cache, and no Python object per token."""

    inner: Any

    @property
    def name(self) -> str:
        return f"{FAST} {metadata.version(FAST)}"

    def encode(self, texts: list[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        ids, offsets = self.inner.encode_batch_flat(texts, add_special_tokens=False, split_special_tokens=True)
        bounds = np.frombuffer(offsets, "<u8").astype(np.int64)
        return np.frombuffer(ids, "<u4"), bounds[1:] - bounds[:-1]


def open_encoder_in(folder: Path, kind: str) -> Encoder:
    """The encoder of the given kind (REFERENCE or FAST) for the tokenizer in a folder."""
    if kind == FAST:
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        import fastokens

        return FastEncoder(fastokens.Tokenizer.from_json_str((folder / "tokenizer.json").read_text(encoding="utf-8")))
    # There is one worker per core already; more threads would only compete with each other.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return ReferenceEncoder(open_tokenizer(folder))


def why_not_fast(tokenizer: TextTokenizer) -> str | None:
    """Why the fast encoder cannot be used for a tokenizer; None: it can."""
    rules = json.loads(tokenizer.inner.to_str())
    model = rules["model"]
    splitter = rules["pre_tokenizer"] or {}
    if model["type"] != "BPE":
        return f"it does not support {model['type']}"
    if any(model.get(key) for key in ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")):
        return "it is only tested with byte-level BPE"
    if (rules["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        return f"it is not tested with the normalizer {rules['normalizer']['type']}"
    steps = splitter.get("pretokenizers", [splitter])
    if steps[-1].get("type") != "ByteLevel" or not all(map(_is_tested, steps)):
        return "it is not tested with this way of splitting words"
    try:
        metadata.version(FAST)
    except metadata.PackageNotFoundError:
        return f"{FAST} is not installed"
    return None


def _is_tested(step: dict[str, Any]) -> bool:
    if step["type"] == "Split":
        return step["pattern"].get("Regex") in PATTERNS and step["behavior"] == "Isolated" and not step["invert"]
    return step["type"] in ("ByteLevel", "Digits")


@dataclass(frozen=True)
class NamedText:
    """A text on which encoders are compared, with a name for messages."""

    name: str
    text: str


def first_difference(encoder: Encoder, reference: Encoder, texts: Iterable[NamedText]) -> NamedText | None:
    """The first text that the two encode differently; an error of only one of them counts as a difference."""
    for text in (*hard_texts(), *texts):
        if _encode_or_none(encoder, text.text) != _encode_or_none(reference, text.text):
            return text
    return None


def _encode_or_none(encoder: Encoder, text: str) -> list[int] | None:
    try:
        return list(map(int, encoder.encode([text])[0]))
    except BaseException as error:
        if not is_encoding_error(error):
            raise
        return None


def is_encoding_error(error: BaseException) -> bool:
    """Whether the error means that a library cannot encode a text; a panic in Rust is not an `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def hard_texts() -> Iterator[NamedText]:
    """Texts on which libraries are known to disagree, and every character of the common scripts between letters."""
    texts = [
        "",
        " ",
        "  ",
        "\n",
        "\r\n",
        " \n \n  x",
        "\t\t tab",
        "a" * 5000,
        " " * 5000 + "x",
        "-" * 3000,
        "\x00\x01\x1b\x7f\x85",
        "\ufeffBOM",
        "don't I'LL we've it's 'S 'twas O'Neill's ‘quoted’",
        "1234567890 3.14 1,000,000 ١٢٣ ५६७ ½ ² Ⅷ 0x7f",
        "<|endoftext|> <|endoftext|><|im_start|>[MASK] <s></s> <unk> [CLS][SEP] <pad>",
        "x<|endoftext|>y",
        "e\u0301 é n\u0303 ñ ṩ s\u0323\u0307 가각 \u1100\u1161\u11a8 \u0344 \u212b \u2126",
        "ﬁ ﬂ ① ㍿ ｆｕｌｌ ｶﾞ ǆ ſ K",
        "İstanbul ışık ΣΑΣ straße ẞ",
        "👩‍👩‍👧‍👦 🇰🇷🇹🇷 👍🏽 ☺️ 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
        "漢字かな交じり文。中文，标点！한국어 문장입니다.",
        "עברית العَرَبِيَّة‎ हिन्दी ไทย ລາວ မြန်မာ ភាសា",
        "\u00a0\u2003\u2009\u200b\u200c\u200d\u2028\u2029\u202f\u205f\u3000x",
        "\U0010ffff\ue000\U000f0000\ufffd\ufffe\uffff",
        "def f(x):\n    return {k: v for k, v in x.items()}  # ok\n\n\n",
        "https://example.org/a_b-c?d=e&f=%20g#h",
        "CamelCase snake_case UPPER lower12 a1b2",
    ]
    texts += [
        "".join(f"a{chr(code)}b {chr(code)}" for code in range(start, start + 0x400))
        for start in range(0, 0x3400, 0x400)
    ]
    return (NamedText(f"hard text {number}", text) for number, text in enumerate(texts))
