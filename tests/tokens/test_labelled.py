"""Examples as token ids: truncation and windows of the tokenizers library, answers by characters, labels of words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from textmill.config import TokenizerConfig
from textmill.corpus.labelled import Example
from textmill.errors import TextmillError
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.batches.labelled import LabelledLayout
from textmill.tokens.labelled import ExampleEncoder
from textmill.tokens.store import StoreWriter, labels_path, open_store
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit

CONTEXTS = {
    "ko": (
        "세종대왕은 1443년에 훈민정음을 창제하였고, 집현전 학자들이 해례본을 만들었다. 각 글자는 소리를 적는다.",
        ["세종대왕", "1443년", "훈민정음", "해례본", "소리"],
    ),
    "zh": (
        "北京是中华人民共和国的首都，人口约2100万。长城在北京的北部，故宫在市中心。",
        ["北京", "2100万", "长城", "故宫"],
    ),
    "tr": (
        "İstanbul Boğazı, Karadeniz'i Marmara'ya bağlar. IĞDIR'da yaşayan İlker, çok güzel şiirler yazdı.",
        ["İstanbul Boğazı", "Marmara", "IĞDIR", "İlker", "şiirler"],
    ),
    "en": (
        "Zoë  paid\u00a0£5 for cafe\u0301 cre\u0301me (two cups) in   New York; the naïve waiter smiled.",
        ["£5", "New York", "naïve", "two cups"],
    ),
}
SEQUENCES, WORDS, ANSWERS = "sequence-classification", "token-classification", "question-answering"


@pytest.fixture(scope="module", params=[True, False], ids=["lowercase", "cased"])
def tokenizer(request: pytest.FixtureRequest) -> TextTokenizer:
    texts = [text for text, _ in CONTEXTS.values()] + ["who what where when why 누구 어디 kim ne"]
    return fit(iter([texts * 3]), TokenizerConfig(kind="wordpiece", vocab=400, lowercase=request.param))


def copy_of(tokenizer: TextTokenizer) -> Tokenizer:
    return Tokenizer.from_str(tokenizer.inner.to_str())


@pytest.mark.parametrize("language", CONTEXTS)
def test_answers_are_found_by_their_characters(tokenizer: TextTokenizer, language: str) -> None:
    context, answers = CONTEXTS[language]
    encoder = ExampleEncoder(tokenizer, ANSWERS, 16, 4, [])
    examples = [
        Example("f", "line 1", ("who?", context), answers=((text, context.index(text)),), id=text) for text in answers
    ]
    for text, samples in zip(answers, encoder.encode(examples), strict=True):
        start, end = context.index(text), context.index(text) + len(text)
        found = 0
        for sample in samples:
            assert sample.spans is not None
            first, last = sample.labels[:2].tolist()
            inside = sample.spans[sample.spans[:, 0] >= 0]
            if (first, last) == (0, 0):
                assert inside[0, 0] > start or inside[-1, 1] < end, "the answer is not fully in this window"
                continue
            found += 1
            assert sample.spans[first, 0] <= start < sample.spans[first, 1]
            assert sample.spans[last, 0] < end <= sample.spans[last, 1]
            assert text in context[sample.spans[first, 0] : sample.spans[last, 1]]
        assert found, text
    assert max(len(samples) for samples in encoder.encode(examples)) > 1, "no context has two windows"


def test_windows_are_those_of_the_tokenizers_library(tokenizer: TextTokenizer) -> None:
    length, overlap = 24, 7
    encoder, theirs = ExampleEncoder(tokenizer, ANSWERS, length, overlap, []), copy_of(tokenizer)
    theirs.enable_truncation(length - 3, stride=overlap, strategy="only_second")
    for question, (context, _) in zip(["who?", "what where", "why", ""], CONTEXTS.values(), strict=True):
        (samples,) = encoder.encode([Example("f", "line 1", (question, context))])
        first = theirs.encode(question, context, add_special_tokens=False)
        windows = [first, *first.overflowing]
        question_ids = len(tokenizer.encode(question))
        assert len(samples) == len(windows)
        for sample, window in zip(samples, windows, strict=True):
            text = np.delete(sample.ids, [0, question_ids + 1, len(sample.ids) - 1])
            assert text.tolist() == window.ids
            assert (sample.labels == IGNORED).all()
            assert sample.spans is not None
            assert sample.spans[question_ids + 2 : -1].tolist() == [
                list(span) for span in window.offsets[question_ids:]
            ]


@pytest.mark.parametrize("length", [8, 9, 12, 17, 60])
def test_pairs_are_truncated_as_the_tokenizers_library_does(tokenizer: TextTokenizer, length: int) -> None:
    texts = [text for text, _ in CONTEXTS.values()] + ["who", "what where when"]
    encoder, theirs = ExampleEncoder(tokenizer, SEQUENCES, length, 0, ["no", "yes"]), copy_of(tokenizer)
    theirs.enable_truncation(length - 3, strategy="longest_first")
    pairs = [(first, second) for first in texts for second in texts]
    examples = [Example("f", "line 1", pair, ("yes",)) for pair in pairs]
    for pair, (sample,) in zip(pairs, encoder.encode(examples), strict=True):
        wanted = theirs.encode(*pair, add_special_tokens=False)
        first = [id_ for id_, type_ in zip(wanted.ids, wanted.type_ids, strict=True) if type_ == 0]
        second = wanted.ids[len(first) :]
        separator = tokenizer.sep_id
        assert sample.ids.tolist() == [encoder.first, *first, separator, *second, separator]
        assert sample.labels.tolist() == [1, *[IGNORED] * (len(sample.ids) - 1)]


def test_each_word_has_one_label_in_some_window(tokenizer: TextTokenizer) -> None:
    words = [word for text, _ in CONTEXTS.values() for word in text.split()] + ["\u200d", "훈민정음해례본" * 9, "new"]
    names = [f"L{number}" for number in range(len(words))]
    encoder = ExampleEncoder(tokenizer, WORDS, 16, 0, names)
    (samples,) = encoder.encode([Example("f", "line 1", tuple(words), tuple(names))])
    assert len(samples) > 3
    assert max(len(sample.ids) for sample in samples) == 16
    seen = [label for sample in samples for label in sample.labels.tolist() if label != IGNORED]
    with_tokens = [number for number, word in enumerate(words) if tokenizer.encode(word)]
    assert seen == with_tokens
    for sample in samples:
        for place in np.flatnonzero(sample.labels != IGNORED).tolist():
            assert sample.ids[place] == tokenizer.encode(words[sample.labels[place]])[0]


def test_a_label_of_another_model_is_named(tokenizer: TextTokenizer) -> None:
    encoder = ExampleEncoder(tokenizer, SEQUENCES, 16, 0, ["no", "yes"])
    with pytest.raises(TextmillError, match=r"^reviews\.csv:7: the label 'maybe' is not one of the model's: no, yes$"):
        list(encoder.encode([Example("reviews.csv", "line 7", ("who",), ("maybe",))]))


def new_layout(tmp_path: Path, lengths: list[int], seed: int | None = 3) -> LabelledLayout:
    with StoreWriter(tmp_path / "train", np.dtype(np.uint16)) as store:
        store.add([[1, *[10 + number] * (length - 2), 2] for number, length in enumerate(lengths)])
    labels = np.concatenate([[number, *[IGNORED] * (length - 1)] for number, length in enumerate(lengths)])
    labels.astype(np.int32).tofile(labels_path(tmp_path / "train"))
    return LabelledLayout(open_store(tmp_path / "train"), length=200, seed=seed, pad_id=0, sep_id=2)


def test_each_sample_once_in_an_epoch_and_the_same_for_any_part(tmp_path: Path) -> None:
    lengths = [5, 70, 130, 9, 64, 65, 3, 31]
    layout = new_layout(tmp_path, lengths)
    epochs = [layout.build_samples(np.arange(8 * epoch, 8 * epoch + 8)) for epoch in (0, 1)]
    orders = [arrays.labels[:, 0].tolist() for arrays in epochs]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(8))
    assert orders[0] != orders[1]
    for row, number in enumerate(orders[0]):
        alone = layout.build_samples(np.array([row]))
        width = alone.inputs.shape[1]
        assert width == -(-lengths[number] // 64) * 64
        for name in ("inputs", "labels", "documents", "types"):
            assert (getattr(alone, name)[0] == getattr(epochs[0], name)[row, :width]).all()
        assert epochs[0].documents is not None
        assert int(epochs[0].documents[row].sum()) == lengths[number]


def test_the_second_segment_starts_after_the_first_separator(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "train", np.dtype(np.uint16)) as store:
        store.add([[1, 7, 8, 2, 9, 2], [1, 7, 2]])
    np.full(9, IGNORED, np.int32).tofile(labels_path(tmp_path / "train"))
    layout = LabelledLayout(open_store(tmp_path / "train"), length=8, seed=None, pad_id=2, sep_id=2)
    types = layout.build_samples(np.arange(2)).types
    assert types is not None
    assert types.tolist() == [[0, 0, 0, 0, 1, 1, 0, 0], [0] * 8]


def test_a_store_without_labels_is_refused(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "train", np.dtype(np.uint16)) as store:
        store.add([[1, 7, 2]])
    with pytest.raises(TextmillError, match=r"has no labels, which train\.layout=labelled needs"):
        LabelledLayout(open_store(tmp_path / "train"), length=8, seed=None, pad_id=0, sep_id=2)


@pytest.mark.parametrize("task", [SEQUENCES, WORDS, ANSWERS])
def test_the_shortest_sample(tokenizer: TextTokenizer, task: str) -> None:
    with pytest.raises(TextmillError, match=r"train\.length: 7 has no space for an example; set at least 8"):
        ExampleEncoder(tokenizer, task, 7, 2, ["O"])
    texts = ("who what where", "kim ne who what where")
    labels, answers = (None, (("kim", 0),)) if task == ANSWERS else (("O", "O"), None)
    [samples] = ExampleEncoder(tokenizer, task, 8, 2, ["O"]).encode([Example("f", "line 1", texts, labels, answers)])
    assert all(3 <= len(sample.ids) <= 8 for sample in samples)


def test_an_unknown_label_of_a_word_without_tokens_is_named(tokenizer: TextTokenizer) -> None:
    encoder = ExampleEncoder(tokenizer, WORDS, 16, 4, ["O", "B"])
    example = Example("f", "line 3", ("kim", " "), ("O", "X"))
    with pytest.raises(TextmillError, match="f:3: the label 'X' is not one of the model's: O, B"):
        list(encoder.encode([example]))
