"""A new vocabulary for a model: tokens with the same bytes keep their vectors."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from textmill.config import TokenizerConfig
from textmill.tokens.vocabulary.token_bytes import read_token_bytes
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit, open_tokenizer
from textmill.tokens.vocabulary.transfer import transfer_vocabulary

KINDS = {
    "bpe": TokenizerConfig(vocab=360),
    "unigram": TokenizerConfig(kind="unigram", vocab=420),
    "wordpiece": TokenizerConfig(kind="wordpiece", vocab=400, character_coverage=1.0),
}


def fitted(config: TokenizerConfig, texts: Path) -> TextTokenizer:
    return fit(iter([[path.read_text(encoding="utf-8")] for path in sorted(texts.iterdir())]), config)


def permuted(tokenizer: TextTokenizer, folder: Path) -> TextTokenizer:
    """The same byte-level tokens with other ids."""
    tree = json.loads(tokenizer.inner.to_str())
    ids = list(range(tokenizer.vocab))
    random.Random(5).shuffle(ids)
    tree["model"]["vocab"] = {token: ids[id_] for token, id_ in tree["model"]["vocab"].items()}
    for token in tree["added_tokens"]:
        token["id"] = ids[token["id"]]
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
    return open_tokenizer(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_token_bytes_equal_the_decoded_text(kind: str, tiny_texts: Path) -> None:
    tokenizer = fitted(KINDS[kind], tiny_texts)
    inner: Tokenizer = tokenizer.inner
    spelled = read_token_bytes(tokenizer.inner)
    assert spelled.keys() == set(inner.get_vocab().values())
    before = tokenizer.encode("The mill")
    seen = 0
    for id_, spelling in spelled.items():
        text = inner.decode([*before, id_], skip_special_tokens=False).removeprefix(inner.decode(before))
        if spelling.special:
            assert text.strip() == spelling.data.decode()
        elif "\N{REPLACEMENT CHARACTER}" not in text:
            assert text.encode() == spelling.data, inner.id_to_token(id_)
            seen += 1
    assert seen > 90


@pytest.mark.parametrize(
    ("old", "new"), [("bpe", "unigram"), ("unigram", "bpe"), ("wordpiece", "bpe"), ("bpe", "wordpiece")]
)
def test_different_kinds_match_by_token_bytes(old: str, new: str, tiny_texts: Path, tmp_path: Path) -> None:
    before, now = fitted(KINDS[old], tiny_texts), fitted(KINDS[new], tiny_texts)
    before.save(tmp_path)
    transfer = transfer_vocabulary(tmp_path, now, before.vocab)
    assert transfer.kept is not None
    assert transfer.rows == now.vocab
    assert transfer.kept.keys() | transfer.new.keys() == set(range(now.vocab))
    old_bytes, new_bytes = read_token_bytes(before.inner), read_token_bytes(now.inner)
    texts = {id_: old_id for id_, old_id in transfer.kept.items() if not new_bytes[id_].special}
    assert len(texts) > 60
    assert all(new_bytes[id_] == old_bytes[old_id] for id_, old_id in texts.items())
    assert transfer.kept[now.eos_id] == before.eos_id, "the end-of-text token is matched by its role"
    for id_, parts in transfer.new.items():
        joined = b"".join(old_bytes[part].data for part in parts)
        if parts != [before.eos_id] and before.unk_id is None:
            assert joined.strip() == new_bytes[id_].data.strip()
    assert f"{len(transfer.kept):,} of {now.vocab:,} tokens keep their vectors, {len(transfer.new):,} new ones" in str(
        transfer.summary
    )


def test_the_same_tokens_with_other_ids_keep_their_vectors(tiny_texts: Path, tmp_path: Path) -> None:
    before = fitted(KINDS["bpe"], tiny_texts)
    (tmp_path / "old").mkdir()
    before.save(tmp_path / "old")
    now = permuted(before, tmp_path / "new")
    transfer = transfer_vocabulary(tmp_path / "old", now, before.vocab)
    assert transfer.kept == {now.inner.token_to_id(token): id_ for token, id_ in before.inner.get_vocab().items()}
    assert not transfer.new
    assert transfer_vocabulary(tmp_path / "old", before, 400).kept is None
    assert transfer_vocabulary(tmp_path / "old", before, 400).rows == 400, "rows without a token stay"
    assert transfer_vocabulary(tmp_path / "nowhere", now, 400).kept is None


def test_invalid_utf8_tokens_start_from_single_bytes(tiny_texts: Path, tmp_path: Path) -> None:
    """A Korean vocabulary on an English model: some tokens end inside a character."""
    english = fit(iter([[(tiny_texts / "english.txt").read_text()]]), TokenizerConfig(vocab=300))
    english.save(tmp_path)
    korean = fit(iter([[(tiny_texts / "korean.txt").read_text(encoding="utf-8")]]), TokenizerConfig(vocab=340))
    transfer, spelled = transfer_vocabulary(tmp_path, korean, english.vocab), read_token_bytes(korean.inner)
    broken = {
        id_: parts
        for id_, parts in transfer.new.items()
        if spelled[id_].data.decode(errors="ignore").encode() != spelled[id_].data
    }
    assert broken
    for id_, parts in broken.items():
        assert [english.inner.id_to_token(part) for part in parts] == list(str(korean.inner.id_to_token(id_)))
