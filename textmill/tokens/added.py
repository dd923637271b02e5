"""Tokens added to a vocabulary: which they are, and the pieces that their text was made of before."""

from __future__ import annotations

from pathlib import Path

from textmill.errors import TextmillError, warn
from textmill.tokens.tokenizer import TextTokenizer, open_tokenizer


def added_since(folder: Path, tokenizer: TextTokenizer) -> dict[int, list[int]]:
    """For each token that a tokenizer has more than the one in a model's folder, its pieces there.

    None are told where the folder has no tokenizer. One whose tokens have other ids is another vocabulary, and is warned of.
    """
    try:
        before = open_tokenizer(folder)
    except TextmillError:
        return {}
    known, now = (one.inner.get_vocab(with_added_tokens=True) for one in (before, tokenizer))
    if other := sum(now.get(token) != id_ for token, id_ in known.items()):
        warn(
            f"{other:,} of {len(known):,} tokens of {folder} have other ids in the tokenizer of this run, or none, so the model's vectors "
            f"will not fit them; take its own: tokenizer.use={folder}"
        )
        return {}
    new = sorted((id_, token) for token, id_ in now.items() if token not in known)
    return {id_: before.encode(token) or [before.end] for id_, token in new}
