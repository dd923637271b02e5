"""Text survives encoding and decoding, and transformers reads the same ids from the folder."""

from __future__ import annotations

import itertools
import json
import lzma
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from textmill.config import TokenizerConfig
from textmill.errors import TextmillError
from textmill.tokens.vocabulary.foreign_files import END
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit, open_tokenizer, open_used
from textmill.where import PACKAGE

KINDS = ("bpe", "wordpiece", "unigram")
LANGUAGES = ("en", "ko", "tr", "zh")
DSGPT2 = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<sys>", "<usr>", "<unused{0..99}>"]
TRICKY = [
    "  two  spaces\n\n\n",
    "물레방아 İstanbul 🙂",
    "e\u0301 \u200b\u200d 👩\u200d👩\u200d👧",
    "x" * 5000,
    "tab\there\r\n",
    "天地玄黃1234",
]


def texts_of(shared_data: Path, language: str, count: int) -> list[str]:
    with lzma.open(shared_data / f"{language}.jsonl.xz", "rt", encoding="utf-8") as stream:
        return [json.loads(line)["text"] for line in itertools.islice(stream, count)]


def fitted(kind: str, **settings: Any) -> TextTokenizer:
    text = (PACKAGE / "corpora" / "tinyshakespeare.txt").read_text(encoding="utf-8")[:60_000]
    foreign = ["물레방아는 강가에 서 있다. Değirmen ırmağın kıyısında. 天地玄黃，宇宙洪荒。 3 + 14"] * 30
    return fit(
        iter([text.split("\n\n"), foreign]), TokenizerConfig.model_validate({"kind": kind, "vocab": 700, **settings})
    )


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return fitted("bpe")


@pytest.fixture(scope="module")
def unigram() -> TextTokenizer:
    return fitted("unigram")


@settings(max_examples=80, deadline=None)
@given(
    st.text(max_size=60)
    | st.text(st.characters(min_codepoint=0x1F300, max_codepoint=0x1FAFF))
    | st.sampled_from([END, f"a{END}b", "é", "​‍"])
)
def test_decode_undoes_encode(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id not in ids, "text that looks like a special token is plain text"


@settings(max_examples=80, deadline=None)
@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\u2581"), max_size=60)
    | st.sampled_from(["<s>", "a</s>b", "<0x41>", "<unk>", *TRICKY])
)
def test_unigram_falls_back_to_bytes(unigram: TextTokenizer, text: str) -> None:
    ids = unigram.encode(text)
    assert unigram.decode(ids) == text
    assert not set(ids) & {unigram.inner.token_to_id(token) for token in ("<unk>", "<s>", "</s>", "<pad>")}


@pytest.mark.long_with(2000)
@pytest.mark.parametrize("count", [200, 2000])
@pytest.mark.parametrize("language", LANGUAGES)
def test_real_documents_survive_a_round_trip(shared_data: Path, language: str, count: int) -> None:
    documents = texts_of(shared_data, language, count // 2)
    paragraphs = [text for document in documents for text in document.split("\n\n")][:count]
    gpt2 = open_tokenizer(shared_data / "gpt2_bpe")
    own = fit(iter([paragraphs[::20]]), TokenizerConfig(vocab=2000, split_digits=True))
    for tokenizer in (gpt2, own):
        assert [tokenizer.decode(ids) for ids in tokenizer.encode_many(paragraphs)] == paragraphs


@pytest.mark.parametrize(
    ("kind", "settings_"),
    [
        *((kind, {}) for kind in KINDS),
        ("wordpiece", {"lowercase": True, "split_digits": True}),
        ("unigram", {"byte_fallback": False}),
        ("bpe", {"split_digits": True}),
        ("bpe", {"special_tokens": DSGPT2, "end_token": "</s>"}),
    ],
)
def test_transformers_opens_every_kind(kind: str, settings_: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = fitted(kind, **settings_)
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("KING RICHARD:\nNow is the winter of 1483", *TRICKY):
        assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
    assert (theirs.pad_token_id, theirs.mask_token_id) == (tokenizer.pad_id, tokenizer.mask_id)
    assert tokenizer.eos_id == (theirs.sep_token_id if kind == "wordpiece" else theirs.eos_token_id)
    assert tokenizer.bos_id == (theirs.cls_token_id if kind == "wordpiece" else theirs.bos_token_id)
    assert tokenizer.unk_id == (theirs.unk_token_id if theirs.unk_token_id != tokenizer.eos_id else None)
    assert (len(theirs), open_tokenizer(tmp_path).fingerprint) == (tokenizer.vocab, tokenizer.fingerprint)
    if kind == "wordpiece":
        assert theirs("Now").input_ids == [theirs.cls_token_id, *tokenizer.encode("Now"), theirs.sep_token_id]


def test_special_tokens_of_dsgpt2_keep_their_ids(tmp_path: Path) -> None:
    tokenizer = fitted("bpe", special_tokens=DSGPT2, end_token="</s>")
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<sys>", "<usr>", "<unused0>", "<unused99>"]
    assert [tokenizer.inner.token_to_id(name) for name in names] == [0, 1, 2, 3, 4, 5, 6, 7, 106]
    assert tokenizer.inner.token_to_id(END) is None
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id, tokenizer.unk_id, tokenizer.mask_id) == (
        2,
        0,
        1,
        3,
        4,
    )
    tokenizer.inner.model.save(str(tmp_path), "web")
    again = open_tokenizer(tmp_path)  # dsGPT2's own names: web-vocab.json and web-merges.txt
    assert sorted(path.name for path in tmp_path.iterdir()) == ["web-merges.txt", "web-vocab.json"]
    assert (again.vocab, again.eos_id, again.pad_id) == (700, 2, 1)
    assert again.encode("Now is <usr> the winter") == tokenizer.encode("Now is <usr> the winter")


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_looks_special_is_plain(kind: str) -> None:
    tokenizer = fitted(kind, special_tokens=["<usr>"])
    special = {token_id for token_id, token in tokenizer.inner.get_added_tokens_decoder().items() if token.special} - {
        tokenizer.unk_id
    }
    text = " ".join(["<usr>", "[SEP]", "</s>", END, "[PAD]", "<s>"])
    assert special >= {tokenizer.eos_id, tokenizer.inner.token_to_id("<usr>")}
    assert not special & set(tokenizer.encode(text))


def test_options_for_splitting_words() -> None:
    def split_words(kind: str, text: str, **settings_: Any) -> list[str]:
        inner = fitted(kind, **settings_).inner
        cut = inner.pre_tokenizer.pre_tokenize_str(inner.normalizer.normalize_str(text) if inner.normalizer else text)
        return [word for word, _ in cut]

    assert split_words("bpe", "in 1483 AD") == ["in", "Ġ1483", "ĠAD"]
    assert split_words("bpe", "in 1483 AD", split_digits=True) == ["in", "Ġ", "1", "4", "8", "3", "ĠAD"]
    assert split_words("wordpiece", "天地 İyi CAFÉ") == ["天", "地", "İyi", "CAFÉ"]
    assert split_words("wordpiece", "天地 CAFÉ", lowercase=True) == ["天", "地", "café"]
    assert split_words("unigram", "Now, 12\nA", lowercase=True, split_digits=True) == [
        "now",
        ",",
        "▁",
        "1",
        "2",
        "\n",
        "a",
    ]


def test_rare_characters_are_bytes_or_unknown() -> None:
    texts = ["the mill stands by the river"] * 500 + ["字"]
    alphabet = {"vocab": 400, "character_coverage": 0.999}
    known = fit(iter([texts]), TokenizerConfig.model_validate({"kind": "unigram", **alphabet}))
    lost = fit(iter([texts]), TokenizerConfig.model_validate({"kind": "unigram", "byte_fallback": False, **alphabet}))
    assert [known.inner.id_to_token(id_) for id_ in known.encode("字")] == ["<0xE5>", "<0xAD>", "<0x97>"]
    assert lost.encode("字") == [lost.unk_id]
    wordpiece = fit(iter([texts]), TokenizerConfig.model_validate({"kind": "wordpiece", **alphabet}))
    assert wordpiece.encode("the 字 mill")[1] == wordpiece.unk_id


def test_transformers_opens_the_folder(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path, longest=64)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("KING RICHARD:\nNow is the winter", "물레방아 İstanbul 🙂", "  two  spaces\n\n\n"):
        assert theirs(text).input_ids == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.eos_id
    assert theirs.model_max_length == 64
    assert len(theirs) == tokenizer.vocab


def test_a_saved_tokenizer_opens_unchanged(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    for where in (tmp_path, tmp_path / "tokenizer.json"):
        again = open_tokenizer(where)
        assert (again.fingerprint, again.vocab, again.eos_id) == (
            tokenizer.fingerprint,
            tokenizer.vocab,
            tokenizer.eos_id,
        )
    other = fit(iter([["another text altogether"]]), TokenizerConfig(vocab=270))
    assert other.fingerprint != tokenizer.fingerprint


def test_gpt2s_own_files(shared_data: Path) -> None:
    gpt2 = open_tokenizer(shared_data / "gpt2_bpe")
    assert (gpt2.vocab, gpt2.eos_id) == (50257, 50256)
    assert gpt2.encode("Hello world") == [15496, 995]


def test_berts_own_vocabulary(shared_data: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BertTokenizer

    bert = open_tokenizer(shared_data / "bert_vocab" / "vocab.txt")
    theirs = BertTokenizer(str(shared_data / "bert_vocab" / "vocab.txt"), do_lower_case=True)
    texts = [text[:2000] for language in LANGUAGES for text in texts_of(shared_data, language, 40)]
    assert all(bert.encode(text) == theirs(text, add_special_tokens=False).input_ids for text in texts)
    assert bert.inner.encode(texts[0]).ids == theirs(texts[0]).input_ids
    assert (bert.vocab, bert.eos_id, bert.bos_id, bert.pad_id, bert.unk_id, bert.mask_id) == (
        30522,
        102,
        101,
        0,
        100,
        103,
    )
    cased = open_tokenizer(shared_data / "bert_vocab" / "vocab.txt", lowercase=False)
    theirs = BertTokenizer(str(shared_data / "bert_vocab" / "vocab.txt"), do_lower_case=False)
    assert all(cased.encode(text) == theirs(text, add_special_tokens=False).input_ids for text in texts[::5])
    bert.save(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(texts[0]).input_ids == bert.inner.encode(texts[0]).ids
    assert (again.cls_token, again.sep_token, again.mask_token, again.eos_token) == ("[CLS]", "[SEP]", "[MASK]", None)


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json"])
def test_the_settings_of_a_bert_folder_are_respected(name: str, lower: bool, tmp_path: Path) -> None:
    """do_lower_case of tokenizer_config.json counts, also if tokenizer.json has the opposite."""
    from transformers import AutoTokenizer, BertTokenizer

    words = "[PAD] [UNK] [CLS] [SEP] [MASK] a A hello Hello ##s é e".split()
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower}
    if name == "tokenizer.json":
        BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=not lower).save_pretrained(tmp_path)
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"do_lower_case": lower}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    text = "Hello A é hellos"
    theirs = AutoTokenizer.from_pretrained(tmp_path)(text, add_special_tokens=False).input_ids
    assert open_tokenizer(tmp_path).encode(text) == theirs
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"do_lower_case": "no"}))
    with pytest.raises(TextmillError, match="do_lower_case is 'no'; it must be true or false"):
        open_tokenizer(tmp_path)


def test_special_tokens_are_found_by_usual_names(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    tree = json.loads(tokenizer.inner.to_str())
    tree["pre_tokenizer"]["add_prefix_space"] = True  # as RoBERTa has it
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": END}, "pad_token": "Ġthe", "unk_token": None})
    )
    opened = open_tokenizer(tmp_path)
    assert (opened.pad_id, opened.bos_id, opened.unk_id) == (opened.inner.token_to_id("Ġthe"), None, None)
    (tmp_path / "again").mkdir()
    (tmp_path / "named").mkdir()
    opened.save(tmp_path / "again")
    from transformers import AutoTokenizer

    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again("the end").input_ids == opened.encode("the end") != tokenizer.encode("the end")
    assert (again.pad_token, again.bos_token) == ("Ġthe", None)
    named = open_tokenizer(tmp_path, end="Ġthe")
    named.save(tmp_path / "named")
    assert open_tokenizer(tmp_path / "named").eos_id == named.eos_id == opened.pad_id


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"byte_fallback": True}, "byte_fallback: is for unigram"),
        ({"kind": "wordpiece", "byte_fallback": False}, "byte_fallback: is for unigram"),
        ({"special_tokens": ["usr"]}, "could be plain text"),
        ({"special_tokens": ["<|>"]}, "could be plain text"),
        ({"special_tokens": ["<a b>"]}, "could be plain text"),
        ({"special_tokens": ["<a>", "<a>"]}, "twice"),
        ({"vocab": 300, "special_tokens": ["<u{0..99}>"]}, "357"),
        ({"kind": "unigram", "special_tokens": ["</s>", "<s>"]}, "needs a token"),
        ({"end_token": "nothing"}, "tokenizer.end_token"),
    ],
)
def test_contradicting_settings_are_an_error(mistake: dict[str, Any], message: str) -> None:
    with pytest.raises(TextmillError, match=re.escape(message)):
        TokenizerConfig.model_validate(mistake)


def test_a_vocabulary_smaller_than_the_alphabet_is_an_error() -> None:
    texts = ["".join(map(chr, range(0xAC00, 0xAC00 + 400)))] * 3
    kinds: list[Literal["wordpiece", "unigram"]] = ["wordpiece", "unigram"]
    for kind in kinds:
        with pytest.raises(TextmillError, match=r"tokenizer\.vocab: 600 is too small"):
            fit(iter([texts]), TokenizerConfig(kind=kind, vocab=600, character_coverage=1.0))
    with pytest.raises(TextmillError, match="no text to fit on"):
        fit(iter([[]]), TokenizerConfig())


def test_special_tokens_come_after_the_end() -> None:
    tokenizer = fit(iter([["some text"]]), TokenizerConfig(vocab=300, special_tokens=["<usr>", "<sys>"]))
    assert [tokenizer.inner.token_to_id(token) for token in (END, "<usr>", "<sys>")] == [0, 1, 2]


def test_a_missing_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TextmillError, match="no tokenizer found"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TextmillError, match=r"not a tokenizer\.json"):
        open_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_text("just\nwords\n")
    with pytest.raises(TextmillError, match=r"vocab\.txt: \[UNK\] is missing"):
        open_tokenizer(tmp_path / "vocab.txt")
    (tmp_path / "a-vocab.json").write_text('{"a": 0}')
    (tmp_path / "a-merges.txt").write_text("a b\n")
    with pytest.raises(TextmillError, match="not a vocabulary with merges"):
        open_tokenizer(tmp_path / "a-vocab.json")
    with pytest.raises(TextmillError, match=r"tokenizer\.use: \./nowhere: no such folder"):
        open_used(TokenizerConfig(use="./nowhere"), "packed")


def test_a_project_is_named_for_its_tokenizer(tmp_path: Path) -> None:
    """As in model.init_from=mine tokenizer.use=mine."""
    (tmp_path / "mine" / "tokenizer").mkdir(parents=True)
    fit(iter([["a mill by the river"] * 9]), TokenizerConfig(vocab=300)).save(tmp_path / "mine" / "tokenizer")
    used = open_used(TokenizerConfig(use=str(tmp_path / "mine")), "packed")
    assert used.fingerprint == open_tokenizer(tmp_path / "mine/tokenizer").fingerprint
