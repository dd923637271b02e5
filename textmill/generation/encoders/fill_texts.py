"""Texts with masks as token ids; without torch, since the server checks texts too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from textmill.errors import TextmillError
from textmill.tokens.vocabulary.tokenizer import TextTokenizer


@dataclass(frozen=True)
class MaskedTexts:
    """A tokenizer with its mask, and the longest text of a model."""

    tokenizer: TextTokenizer
    longest: int
    """In tokens, special ones included."""
    mask_id: int
    first_id: int

    @property
    def mask(self) -> str:
        """How the mask is written."""
        return str(self.tokenizer.inner.id_to_token(self.mask_id))

    def encode(self, prompt: str) -> list[int]:
        """[CLS], the text with its masks, [SEP]; other text that looks like a special token is plain text."""
        ids: list[int] = [self.first_id]
        for number, part in enumerate(prompt.split(self.mask)):
            ids += [self.mask_id] if number else []
            ids += self.tokenizer.encode(part)
        return [*ids, self.tokenizer.separator]

    def check(self, prompt: str, field: str = "sample.prompt") -> int:
        """Refuse a text without a mask, or one that is too long; return the number of its tokens."""
        if self.mask not in prompt:
            raise TextmillError(f"{field}: {prompt[:60]!r} has no {self.mask}; write it where a token is missing")
        if (count := len(self.encode(prompt))) > self.longest:
            raise TextmillError(
                f"{field}: {prompt[:60]!r} has {count:,} tokens, the model reads {self.longest:,}; shorten it"
            )
        return count


def new_masked_texts(tokenizer: TextTokenizer, longest: int, where: Path | str) -> MaskedTexts:
    """The masked texts of a model; `where` names it in errors."""
    mask = tokenizer.mask
    first = tokenizer.classifier
    if mask is None or first is None:
        raise TextmillError(f"{where}: its tokenizer has no mask token such as [MASK], or no [CLS]; use another one")
    return MaskedTexts(tokenizer, longest, mask, first)
