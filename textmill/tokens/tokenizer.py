"""Tokenizers: fitted on a corpus or opened from existing files, kept in a folder that transformers opens too."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from textmill.config import TokenizerConfig
from textmill.errors import TextmillError
from textmill.files import hash_json, read_json, write_text

END = "<|endoftext|>"
GPT2_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class TextTokenizer:
    """Text to ids and back; text that looks like a special token is plain text."""

    inner: Tokenizer
    end: int
    """The end-of-text token."""

    @property
    def vocab(self) -> int:
        """Ids in the vocabulary: one more than the largest."""
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokenizers, wherever they stand."""
        return hash_json(json.loads(self.inner.to_str()))

    def encode(self, text: str) -> list[int]:
        """The ids of one text, nothing added."""
        ids: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        return ids

    def encode_many(self, texts: list[str]) -> Iterator[NDArray[np.int64]]:
        """The ids of many texts."""
        encodings: list[Encoding] = self.inner.encode_batch_fast(texts, add_special_tokens=False)
        return (np.array(encoding.ids, np.int64) for encoding in encodings)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens shown."""
        text: str = self.inner.decode(list(ids), skip_special_tokens=False)
        return text

    def save(self, folder: Path, longest: int | None = None) -> None:
        """Write the files that transformers' AutoTokenizer opens."""
        for name, text in self.files(longest).items():
            write_text(folder / name, text)

    def files(self, longest: int | None = None) -> dict[str, str]:
        """tokenizer.json and what transformers wants beside it."""
        end = self.inner.id_to_token(self.end)
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end, "unk_token": end,
            "clean_up_tokenization_spaces": False, "add_prefix_space": False,
        }  # fmt: skip
        if longest:
            settings["model_max_length"] = longest
        return {"tokenizer.json": self.inner.to_str(pretty=True), "tokenizer_config.json": json.dumps(settings, indent=2) + "\n"}


def fit(texts: Iterator[list[str]], config: TokenizerConfig) -> TextTokenizer:
    """Fit byte-level BPE on texts; every byte is in the vocabulary, so nothing is unknown."""
    inner = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab,
        min_frequency=config.min_frequency,
        special_tokens=[END, *config.special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return _wrapped(inner, END, "the fitted tokenizer")


def open_tokenizer(where: Path) -> TextTokenizer:
    """A folder or file of tokenizer.json, or a folder with GPT-2's vocabulary and merges."""
    path = where / "tokenizer.json" if where.is_dir() else where
    if path.is_file():
        try:
            inner = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TextmillError(f"{path}: not a tokenizer.json ({error})") from None
        return _wrapped(inner, _end_named_in(path.parent), str(path))
    for vocab, merges in GPT2_PAIRS:
        if (where / vocab).is_file() and (where / merges).is_file():
            inner = _byte_level(models.BPE.from_file(str(where / vocab), str(where / merges)))
            return _wrapped(inner, END, str(where))
    raise TextmillError(
        f"{where}: no tokenizer there; a tokenizer is a tokenizer.json, or vocab.json with merges.txt, or encoder.json with vocab.bpe"
    )


def _byte_level(model: models.Model) -> Tokenizer:
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    return inner


def _wrapped(inner: Tokenizer, end: str | None, where: str) -> TextTokenizer:
    if end is None or (id_ := inner.token_to_id(end)) is None:
        raise TextmillError(f"{where}: has no end-of-text token ({end or END}); name one as eos_token in tokenizer_config.json")
    if end not in {token.content for token in inner.get_added_tokens_decoder().values()}:
        inner.add_special_tokens([end])
    inner.encode_special_tokens = True
    inner.no_truncation()
    inner.no_padding()
    return TextTokenizer(inner, id_)


def _end_named_in(folder: Path) -> str | None:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return END
    named = read_json(path).get("eos_token", END)
    name: str | None = named["content"] if isinstance(named, dict) else named
    return name
