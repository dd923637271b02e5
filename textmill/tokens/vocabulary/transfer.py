"""A vocabulary on a model that had another: which tokens are the same, and the pieces that the text of new ones was made of before."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from textmill.errors import TextmillError
from textmill.tokens.vocabulary.token_bytes import Spelling, spellings_of
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

ROLES = ("end", "begin", "pad", "unknown", "mask")
SHOWN = 3
"""New pieces that are told with their parts."""


@dataclass(frozen=True)
class Inherited:
    """Which of a model's vectors each token starts from."""

    rows: int
    """Vectors that the model will have."""
    kept: dict[int, int] | None = None
    """The old id of each token that there was; none: every old token keeps its id."""
    new: dict[int, list[int]] = field(default_factory=dict)
    """The old pieces of each token that there was not."""
    told: str | None = None
    """What a person should know of it."""


def inherited(folder: Path, tokenizer: TextTokenizer, rows: int) -> Inherited:
    """What a tokenizer takes over from that of a model's folder, whose embedding has `rows`; all as it is, where the folder has none."""
    try:
        before = open_tokenizer(folder)
    except TextmillError:
        return Inherited(rows)
    known, now = (one.inner.get_vocab(with_added_tokens=True) for one in (before, tokenizer))
    if any(now.get(token) != id_ for token, id_ in known.items()):
        return _mapped(folder, before, tokenizer, rows)
    added = sorted((id_, token) for token, id_ in now.items() if token not in known)
    new = {id_: before.encode(token) or [before.end] for id_, token in added}
    names = ", ".join(token for _, token in added[:8])
    told = (
        f"{len(new):,} new tokens get vectors, each the mean of the pieces its text was made of: {names}"
        if new
        else None
    )
    return Inherited(max([rows, *(id_ + 1 for id_ in new)]), new=new, told=told)


def _mapped(folder: Path, before: TextTokenizer, tokenizer: TextTokenizer, rows: int) -> Inherited:
    """Another vocabulary: what spells the same is the same, and so is what plays the same part."""
    old = {id_: spelling for id_, spelling in spellings_of(before).items() if id_ < rows}
    # Where a byte stands there twice, once as a piece of text and once to fall back on, the piece of text is the one that was trained.
    order = sorted(old, key=lambda id_: (not str(before.inner.id_to_token(id_)).startswith("<0x"), -id_))
    places, now = {old[id_]: id_ for id_ in order}, spellings_of(tokenizer)
    kept = {id_: places[spelling] for id_, spelling in now.items() if spelling in places}
    for role in ROLES:
        mine, theirs = getattr(tokenizer, role), getattr(before, role)
        if mine is not None and theirs in old:
            kept.setdefault(mine, theirs)
    new = {id_: _parts(now[id_], before, places, rows) for id_ in sorted(now.keys() - kept.keys())}
    gone = len(old.keys() - set(kept.values()))
    examples = ", ".join(
        f"{_shown(now[id_])} from {' + '.join(_shown(old[part]) for part in new[id_])}" for id_ in list(new)[-SHOWN:]
    )
    told = (
        f"another tokenizer than that of {folder}: {len(kept):,} of {len(now):,} pieces keep their vectors, {len(new):,} new ones start "
        f"from the mean of the old pieces of their text{f' ({examples})' if examples else ''}, {gone:,} old ones go; "
        f"the model's own is had with tokenizer.use={folder}"
    )
    return Inherited(tokenizer.vocab, kept, new, told)


def _parts(spelling: Spelling, before: TextTokenizer, places: dict[Spelling, int], rows: int) -> list[int]:
    """The old pieces of a text; of bytes that are no text, the old pieces of each byte; where there are none, the old end of text."""
    try:
        ids = before.encode(spelling.data.decode())
    except UnicodeDecodeError:
        ids = [places[one] for byte in spelling.data if (one := Spelling(bytes([byte]))) in places]
    return [id_ for id_ in ids if id_ != before.unknown and id_ < rows] or [before.end]


def _shown(spelling: Spelling) -> str:
    return repr(spelling.data.decode(errors="backslashreplace"))
