"""Gives a model a new vocabulary: which token vectors are kept, and which old tokens a new token starts from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from textmill.errors import TextmillError
from textmill.tokens.vocabulary.token_bytes import TokenBytes, read_token_bytes
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

ROLES = ("eos_id", "bos_id", "pad_id", "unk_id", "mask_id")
EXAMPLES = 3
"""New tokens that the summary shows with the old tokens they start from."""


@dataclass(frozen=True)
class VocabularyTransfer:
    """Which old token vectors each token of the new vocabulary starts from."""

    rows: int
    """Token vectors of the new model."""
    kept: dict[int, int] | None = None
    """New id -> old id of each token that keeps its vector; None: every old token keeps its id."""
    new: dict[int, list[int]] = field(default_factory=dict)
    """New id -> old ids whose mean is the first vector of a new token."""
    summary: str | None = None
    """A message for the user; None: nothing changes."""


def transfer_vocabulary(folder: Path, tokenizer: TextTokenizer, rows: int) -> VocabularyTransfer:
    """Compare a tokenizer with that of a model, whose embedding has `rows`; no change if the model has no tokenizer."""
    try:
        before = open_tokenizer(folder)
    except TextmillError:
        return VocabularyTransfer(rows)
    old_vocab, new_vocab = (one.inner.get_vocab(with_added_tokens=True) for one in (before, tokenizer))
    if any(new_vocab.get(token) != id_ for token, id_ in old_vocab.items()):
        return _match_tokens(folder, before, tokenizer, rows)
    added = sorted((id_, token) for token, id_ in new_vocab.items() if token not in old_vocab)
    new = {id_: before.encode(token) or [before.eos_id] for id_, token in added}
    names = ", ".join(token for _, token in added[:8])
    summary = (
        f"{len(new):,} new tokens get vectors, each the mean of the old tokens of its text: {names}" if new else None
    )
    return VocabularyTransfer(max([rows, *(id_ + 1 for id_ in new)]), new=new, summary=summary)


def _match_tokens(folder: Path, before: TextTokenizer, tokenizer: TextTokenizer, rows: int) -> VocabularyTransfer:
    """Match two different vocabularies: tokens with the same bytes, or with the same role, keep their vectors."""
    old = {id_: token for id_, token in read_token_bytes(before.inner).items() if id_ < rows}
    # A byte may occur twice, as normal token and as fallback token <0x..>; only the normal token was trained.
    order = sorted(old, key=lambda id_: (not str(before.inner.id_to_token(id_)).startswith("<0x"), -id_))
    old_ids = {old[id_]: id_ for id_ in order}
    now = read_token_bytes(tokenizer.inner)
    kept = {id_: old_ids[token] for id_, token in now.items() if token in old_ids}
    for role in ROLES:
        mine = getattr(tokenizer, role)
        theirs = getattr(before, role)
        if mine is not None and theirs in old:
            kept.setdefault(mine, theirs)
    new = {id_: _old_tokens(now[id_], before, old_ids, rows) for id_ in sorted(now.keys() - kept.keys())}
    dropped = len(old.keys() - set(kept.values()))
    examples = ", ".join(
        f"{_format(now[id_])} from {' + '.join(_format(old[part]) for part in new[id_])}"
        for id_ in list(new)[-EXAMPLES:]
    )
    summary = (
        f"the tokenizer is not that of {folder}: {len(kept):,} of {len(now):,} tokens keep their vectors, "
        f"{len(new):,} new ones start from the mean of the old tokens of their text"
        f"{f' ({examples})' if examples else ''}, {dropped:,} old ones are dropped; "
        f"to use the model's own tokenizer, set tokenizer.use={folder}"
    )
    return VocabularyTransfer(tokenizer.vocab, kept, new, summary)


def _old_tokens(token: TokenBytes, before: TextTokenizer, old_ids: dict[TokenBytes, int], rows: int) -> list[int]:
    """The old tokens of a new token's text; of each byte if it is not UTF-8; if there are none, the end of text."""
    try:
        ids = before.encode(token.data.decode())
    except UnicodeDecodeError:
        ids = [old_ids[one] for byte in token.data if (one := TokenBytes(bytes([byte]))) in old_ids]
    return [id_ for id_ in ids if id_ != before.unk_id and id_ < rows] or [before.eos_id]


def _format(token: TokenBytes) -> str:
    return repr(token.data.decode(errors="backslashreplace"))
