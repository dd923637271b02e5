"""What the masked layout reads from tokenizers: special tokens, words, and counts of tokens."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from textmill.config import MaskedConfig, TokenizerConfig, TrainConfig
from textmill.errors import TextmillError
from textmill.tokens.batches.loader import open_batches, valid_batches
from textmill.tokens.batches.masking import (
    count_tokens,
    find_word_starts,
    masked_tokens_of,
    read_token_counts,
    write_token_counts,
)
from textmill.tokens.splits import Splits, WeightedStore
from textmill.tokens.store import StoreWriter, open_store
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit

TEXT = "The miller's wheel turns slowly, and the mill grinds wheat; 방앗간의 물레방아가 천천히 돈다. 水车慢慢转动。"


def tokenizer_of(kind: str, **options: object) -> TextTokenizer:
    return fit(iter([[TEXT] * 3]), TokenizerConfig(kind=kind, vocab=400, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bpe"])
def test_words_start_where_the_text_has_a_space(kind: str) -> None:
    """Against the words of the tokenizers library, for a text without punctuation."""
    tokenizer = tokenizer_of(kind)
    text = "the millerturns slowly 돈다천천 wheat"
    encoding = tokenizer.inner.encode(text, add_special_tokens=False)
    starts, special = find_word_starts(tokenizer)
    assert starts[encoding.ids][1:].tolist() == [one != two for one, two in pairwise(encoding.word_ids)]
    assert len(encoding.ids) > len(text.split()), "some words have several tokens"
    assert not special[encoding.ids].any()


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bpe"])
def test_punctuation_and_chinese_characters_are_words(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    starts, _ = find_word_starts(tokenizer)
    ids = tokenizer.encode("mill; 水车")
    assert starts[ids[-2:]].all() or kind == "bpe"
    assert starts[tokenizer.encode(";")[0]]


def test_special_tokens_of_each_kind(tmp_path: Path) -> None:
    wordpiece = masked_tokens_of(tokenizer_of("wordpiece"), MaskedConfig())
    named = [tokenizer_of("wordpiece").inner.token_to_id(name) for name in ("[CLS]", "[SEP]", "[PAD]", "[MASK]")]
    assert [wordpiece.cls_id, wordpiece.sep_id, wordpiece.pad_id, wordpiece.rule.mask_id] == named
    fitted = tokenizer_of("unigram", special_tokens=["<mask>"])
    unigram = masked_tokens_of(fitted, MaskedConfig())
    assert [unigram.cls_id, unigram.sep_id, unigram.pad_id, unigram.rule.mask_id] == [
        fitted.inner.token_to_id(name) for name in ("<s>", "</s>", "<pad>", "<mask>")
    ]
    fitted.save(tmp_path)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    assert opened("mill", "wheel")["input_ids"][0] == unigram.cls_id
    assert opened("mill", "wheel")["input_ids"].count(unigram.sep_id) == 2
    with pytest.raises(TextmillError, match=r"no mask token.*tokenizer\.special_tokens=<mask>"):
        masked_tokens_of(tokenizer_of("unigram"), MaskedConfig())


def test_counts_are_written_and_read(tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(5, 400, 5000)
    with StoreWriter(tmp_path / "s", np.dtype(np.uint16)) as writer:
        writer.add_flat(ids, np.array([3000, 2000]))
    counts = count_tokens([open_store(tmp_path / "s")] * 2, 400)
    assert counts.tolist() == (2 * np.bincount(ids, minlength=400)).tolist()
    assert count_tokens([open_store(tmp_path / "s")] * 2, 400, most=6000).sum() == 6000
    tokenizer, path = tokenizer_of("wordpiece"), tmp_path / "counts.json"
    counts = counts[: tokenizer.vocab]
    write_token_counts(path, counts, tokenizer.fingerprint)
    rule = masked_tokens_of(tokenizer, MaskedConfig(counts=str(path))).rule
    assert rule.weights is not None
    assert rule.weights.tolist() == [max(1, count) ** -0.7 for count in counts.tolist()]
    pickled = tmp_path / "token_counts.pickle"  # of the distillation scripts: a list of counts
    pickled.write_bytes(pickle.dumps(counts.tolist()))
    again = masked_tokens_of(tokenizer, MaskedConfig(counts=str(pickled))).rule
    assert again.weights is not None
    assert again.weights.tolist() == rule.weights.tolist()
    with pytest.raises(TextmillError, match=r"has counts of \d+ ids, the tokenizer has 7"):
        read_token_counts(pickled, "", 7)
    with pytest.raises(TextmillError, match="another tokenizer"):
        read_token_counts(path, "other", 400)
    with pytest.raises(TextmillError, match="file not found"):
        read_token_counts(tmp_path / "none.json", "", 400)
    path.write_text(json.dumps([1, 2]))
    with pytest.raises(TextmillError, match="not a file of token counts"):
        read_token_counts(path, "", 400)


def test_batches_of_a_config(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("wordpiece")
    sentences = [np.array(tokenizer.encode(part)) for part in TEXT.split(" ")]
    with StoreWriter(tmp_path / "s", np.dtype(np.uint16)) as writer:
        for _ in range(30):
            writer.add_flat(np.concatenate(sentences), np.array([*map(len, sentences)]), np.array([len(sentences)]))
    store = open_store(tmp_path / "s")
    stores = {"train": [WeightedStore(store, 1.0)], "valid": [WeightedStore(store.slice(0, 3), 1.0)], "test": []}
    splits = Splits(stores, tokenizer, "", {}, sources=[("", 1.0)])
    train = TrainConfig(layout="masked", batch=4, length=40)
    batch = open_batches(train, splits, length=40, folder=tmp_path).batch_at(3)
    assert batch.pair_labels is not None
    assert batch.types is not None
    assert batch.inputs.shape == batch.pair_labels.shape == batch.types.shape == (4, 40)
    one, two = ([batch.inputs.tolist() for batch in valid_batches(train, splits, length=40)] for _ in range(2))
    assert one == two, "each evaluation masks the same tokens"
    assert one
    singly = train.model_copy(update={"evaluate_batch": 1})
    rows = [batch.inputs for batch in valid_batches(singly, splits, length=40)]
    assert {len(row) for row in rows} == {1}
    assert np.concatenate(rows).tolist() == [row for batch in one for row in batch], "the same samples"


def test_settings_of_the_layout_need_the_layout() -> None:
    with pytest.raises(TextmillError, match=r"train\.masked\.pairs: is for train\.layout=masked"):
        TrainConfig(masked=MaskedConfig(pairs="order"))
