"""Chooses the tokens that a masked language model predicts, and what stands in their place (BERT's rules).

Of the sample [CLS] the un ##believ ##able cat [SEP] with whole words, the words are "the", "un ##believ ##able" and
"cat". `choose_tokens` takes words in random order while they fit into the number of predictions; with one prediction
that is "the" or "cat". `replace_tokens` then writes [MASK], a random token or the token itself in their place.
`masked_tokens_of` finds what this needs of a tokenizer: special tokens, which tokens start a word, and weights from a
file of token counts, which `textmill show --counts` writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.config import MaskedConfig
from textmill.counters import draw, to_uniform
from textmill.errors import TextmillError
from textmill.storage.files import read_json, write_json
from textmill.tokens.array_rows import is_array_file, read_count_list
from textmill.tokens.store import BLOCK, TokenStore
from textmill.tokens.vocabulary.token_bytes import read_token_bytes
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

MASKED_FRACTION = 0.8
KEPT_FRACTION = 0.1
"""Of the chosen tokens, 80 % become the mask token, 10 % stay, 10 % become a random token."""
COUNTS_POWER = 0.7
"""With counts, a token seen n times is chosen with the weight n to the power of minus this."""
_ORDER = 1 << 24
_REPLACE = 1 << 26
_RANDOM = 1 << 27
"""What the random numbers of a position are used for; see `counters.draw`."""
_NO_WORD = 1 << 30
"""The size of a word that does not exist: it never fits."""

_NO_SPACES = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""Scripts without spaces between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""
_LEAD_BYTES = range(0xE3, 0xEA)
"""The first byte of most Japanese and Chinese characters in UTF-8."""


def masked_tokens_of(tokenizer: TextTokenizer, settings: MaskedConfig) -> MaskedTokens:
    """The special tokens of a tokenizer, and the masking rule of the settings."""
    mask_id = tokenizer.mask_id
    cls_id = tokenizer.cls_id
    if mask_id is None or cls_id is None:
        missing = "mask token such as [MASK] or <mask>" if mask_id is None else "token such as [CLS] or <s>"
        raise TextmillError(
            f"the tokenizer has no {missing}, which train.layout=masked needs; set tokenizer.kind=wordpiece, or "
            f"tokenizer.kind=unigram with tokenizer.special_tokens=<mask>, and make the tokenizer again"
        )
    return MaskedTokens(
        cls_id=cls_id,
        sep_id=tokenizer.sep_id,
        pad_id=tokenizer.padding_id,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        rule=_masking_rule(tokenizer, mask_id, settings),
    )


@dataclass(frozen=True)
class MaskedTokens:
    """The special tokens of a masked model, and its masking rule."""

    cls_id: int
    sep_id: int
    pad_id: int
    bos_id: int | None
    """The token that may be at the start of each document in the store; samples do not contain it."""
    eos_id: int
    """The token that may be at the end of each document in the store; samples do not contain it."""
    rule: MaskingRule

    @property
    def vocab(self) -> int:
        """The number of token ids."""
        return len(self.rule.special)


def _masking_rule(tokenizer: TextTokenizer, mask_id: int, settings: MaskedConfig) -> MaskingRule:
    word_starts, special = find_word_starts(tokenizer)
    if special.all():
        raise TextmillError("the tokenizer has only special tokens, so nothing can be masked; fit one on text")
    weights = None
    if settings.counts is not None:
        counts = read_token_counts(Path(settings.counts), tokenizer.fingerprint, tokenizer.vocab)
        weights = np.maximum(counts, 1).astype(np.float64) ** -COUNTS_POWER
    return MaskingRule(
        mask_id=mask_id,
        special=special,
        word_starts=word_starts if settings.whole_words else None,
        probability=settings.probability,
        max_predictions=settings.max_predictions,
        weights=weights,
    )


def find_word_starts(tokenizer: TextTokenizer) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """[vocabulary]: true for tokens that start a word; and true for special tokens, and for ids without a token.

    WordPiece: tokens without the prefix ##. Others: tokens that begin with a space (▁ in sentencepiece), a punctuation
    mark, or a character of a script without spaces.
    """
    starts = np.zeros(tokenizer.vocab, np.bool_)
    special = np.ones(tokenizer.vocab, np.bool_)
    is_wordpiece = json.loads(tokenizer.inner.to_str())["model"]["type"] == "WordPiece"
    for id_, token in read_token_bytes(tokenizer.inner).items():
        starts[id_] = token.data[:1] == b" " if is_wordpiece else _starts_word(token.data)
        special[id_] = token.special
    special[[id_ for id_ in map(tokenizer.inner.token_to_id, tokenizer.roles.values()) if id_ is not None]] = True
    return starts, special


def _starts_word(data: bytes) -> bool:
    first = data.decode("utf-8", "ignore")[:1]
    if not first or not data.startswith(first.encode()):  # part of a character
        return data[:1] != b"" and data[0] in _LEAD_BYTES
    return not first.isalnum() or _NO_SPACES.match(first) is not None


def check_counts_file(path: Path) -> None:
    """Raise an error if there is no such file."""
    if not path.is_file():
        raise TextmillError(
            f"train.masked.counts: {path}: file not found; write it with: textmill show WHERE --counts {path}"
        )


def read_token_counts(path: Path, tokenizer: str, vocab: int) -> NDArray[np.int64]:
    """[vocab]: the counts in a file; raises an error if they are of another tokenizer."""
    check_counts_file(path)
    if is_array_file(path):  # token_counts.pickle of the distillation scripts, which names no tokenizer
        listed = read_count_list(path)
        if len(listed) != vocab:
            raise TextmillError(f"{path}: has counts of {len(listed):,} ids, the tokenizer has {vocab:,}; count again")
        return listed
    found = read_json(path)
    counts = found.get("counts") if isinstance(found, dict) else None
    if not isinstance(counts, list) or not all(isinstance(count, int) and count >= 0 for count in counts):
        raise TextmillError(f"{path}: not a file of token counts; write one with: textmill show WHERE --counts {path}")
    if found.get("tokenizer") != tokenizer:
        raise TextmillError(
            f"{path}: counts the ids of another tokenizer; write it again with: textmill show WHERE --counts {path}"
        )
    return np.array(counts, np.int64)


def write_token_counts(path: Path, counts: NDArray[np.int64], tokenizer: str) -> None:
    """Write counts, and the fingerprint of the tokenizer whose ids were counted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"tokenizer": tokenizer, "counts": counts.tolist()})


def count_tokens(stores: Iterable[TokenStore], vocab: int, most: int | None = None) -> NDArray[np.int64]:
    """[vocab]: how often each id occurs in these stores, or in their first `most` tokens."""
    counts = np.zeros(vocab, np.int64)
    for store in stores:
        stop = store.tokens if most is None else min(most, store.tokens)
        for start in range(0, stop, BLOCK):
            ids = np.asarray(store.ids[start : min(start + BLOCK, stop)], np.int64)
            counts += np.bincount(ids, minlength=vocab)[:vocab]
        most = None if most is None else most - stop
    return counts


@dataclass(frozen=True)
class MaskingRule:
    """What may be masked, and how much of it."""

    mask_id: int
    """The id of the mask token."""
    special: NDArray[np.bool_]
    """[vocabulary]: true for special tokens, which are neither masked nor used as random tokens."""
    word_starts: NDArray[np.bool_] | None
    """[vocabulary]: true for tokens that start a word; None: every token is masked on its own."""
    probability: float = 0.15
    max_predictions: int | None = None
    weights: NDArray[np.float64] | None = None
    """[vocabulary]: how likely a token is masked, relative to the others; None: all are equally likely."""

    def predictions(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many tokens to choose in samples of these lengths, which include [CLS] and [SEP]."""
        exact = lengths * self.probability
        counts = np.ceil(exact) if self.weights is not None else np.maximum(1, np.rint(exact))
        found: NDArray[np.int64] = counts.astype(np.int64)
        return found if self.max_predictions is None else np.minimum(found, self.max_predictions)


def choose_tokens(
    ids: NDArray[np.int32],
    lengths: NDArray[np.int64],
    keys: NDArray[np.uint64],
    rule: MaskingRule,
    starts: NDArray[np.bool_] | None = None,
) -> NDArray[np.bool_]:
    """Which tokens to predict. `ids` are samples of the given lengths, joined, each starting with a special token.

    Words are taken in random order while they fit into the number of predictions, as Megatron does it. `starts` are
    positions where a word starts whatever its token is.
    """
    words = _find_words(ids, lengths, rule, starts)
    # Two tables [samples, words]; a sample with fewer words than others ends with words that never fit.
    table = len(lengths), int(words.per_sample.max(initial=0)) + 1
    sizes = np.full(table, _NO_WORD, np.int64)
    sort_values = np.full(table, np.inf)
    sizes[words.sample, words.number] = words.tokens
    sort_values[words.sample, words.number] = _order_values(ids, words, keys, rule)
    order = np.argsort(sort_values, axis=1)
    predictions = rule.predictions(lengths)
    chosen_words = _choose_words(sizes, order, predictions)
    chosen = words.may_mask.copy()
    chosen[chosen] = chosen_words[words.sample, words.number][words.of_token]
    return chosen


@dataclass(frozen=True)
class _Words:
    """The words of samples that are joined; the fields after the first three have an entry for each word."""

    may_mask: NDArray[np.bool_]
    """[tokens]: false for special tokens."""
    per_sample: NDArray[np.int64]
    """How many words each sample has."""
    of_token: NDArray[np.int64]
    """The word of each token that may be masked, as a number among all words."""
    sample: NDArray[np.int64]
    number: NDArray[np.int64]
    """Its number within its sample."""
    position: NDArray[np.int64]
    """The position of its first token within its sample."""
    tokens: NDArray[np.int64]
    """How many tokens it has."""


def _find_words(
    ids: NDArray[np.int32], lengths: NDArray[np.int64], rule: MaskingRule, starts: NDArray[np.bool_] | None
) -> _Words:
    """A word starts where a token starts one, after a special token, and at `starts`; special tokens have none."""
    may_mask = ~rule.special[ids]
    is_word_start = may_mask.copy()
    if rule.word_starts is not None:
        is_word_start[1:] &= rule.word_starts[ids[1:]] | ~may_mask[:-1]
        if starts is not None:
            is_word_start |= starts & may_mask
    first_token = np.flatnonzero(is_word_start)
    sample = np.repeat(np.arange(len(lengths)), lengths)[first_token]
    per_sample = np.bincount(sample, minlength=len(lengths))
    first_word = np.cumsum(per_sample) - per_sample
    first_of_sample = np.cumsum(lengths) - lengths
    of_token = (np.cumsum(is_word_start) - 1)[may_mask]
    return _Words(
        may_mask=may_mask,
        per_sample=per_sample,
        of_token=of_token,
        sample=sample,
        number=np.arange(len(first_token)) - first_word[sample],
        position=first_token - first_of_sample[sample],
        tokens=np.bincount(of_token, minlength=len(first_token)),
    )


def _order_values(
    ids: NDArray[np.int32], words: _Words, keys: NDArray[np.uint64], rule: MaskingRule
) -> NDArray[np.float64]:
    """A value for each word; in ascending order they are a random order of the words.

    With weights, the order is that of drawing without replacement in proportion to the words' weights
    (Efraimidis and Spirakis).
    """
    uniform = to_uniform(draw(keys[words.sample], _ORDER + words.position))
    if rule.weights is None:
        return uniform
    token_weights = rule.weights[ids[words.may_mask]]
    return -np.log1p(-uniform) / np.bincount(words.of_token, token_weights, len(words.tokens))


def _choose_words(
    sizes: NDArray[np.int64], order: NDArray[np.int64], predictions: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """[samples, words]: which words are chosen, of the given sizes in tokens.

    All samples go through their words at once, each in its own random order, until no predictions are left.
    """
    samples = np.arange(len(sizes))
    left = predictions.copy()
    chosen = np.zeros(sizes.shape, np.bool_)
    for word in np.ascontiguousarray(order.T):  # [samples]: the next word of each
        size = sizes[samples, word]
        fits = size <= left
        chosen[samples[fits], word[fits]] = True
        left -= np.where(fits, size, 0)
        if not left.any():
            break
    return chosen


def replace_tokens(
    ids: NDArray[np.int32],
    chosen: NDArray[np.bool_],
    lengths: NDArray[np.int64],
    keys: NDArray[np.uint64],
    rule: MaskingRule,
) -> NDArray[np.int32]:
    """The inputs: each chosen token is masked, kept, or replaced by a random one that is not special."""
    inputs = ids.copy()
    tokens = np.flatnonzero(chosen)
    ends = np.cumsum(lengths)
    sample = np.searchsorted(ends, tokens, side="right")
    position = tokens - (ends - lengths)[sample]
    token_keys = keys[sample]
    uniform = to_uniform(draw(token_keys, _REPLACE + position))
    inputs[tokens[uniform < MASKED_FRACTION]] = rule.mask_id
    is_random = uniform >= MASKED_FRACTION + KEPT_FRACTION
    ordinary_ids = np.flatnonzero(~rule.special)
    numbers = draw(token_keys[is_random], _RANDOM + position[is_random]) % np.uint64(len(ordinary_ids))
    inputs[tokens[is_random]] = ordinary_ids[numbers.astype(np.int64)]
    return inputs
