"""Reduces a vocabulary to the tokens that some text uses; text made of these tokens is encoded as before.

A BPE vocabulary of 50,257 tokens, of which a text uses 9,000: kept are these, the tokens that they are merged from, all
256 bytes and the special tokens; they are renumbered from 0, in their old order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from textmill.corpus.document import SPLITS
from textmill.errors import TextmillError
from textmill.storage.stages import MANIFEST, open_manifest
from textmill.tokens.store import BLOCK, TokenStore, open_store, store_paths, store_prefix
from textmill.tokens.vocabulary.token_bytes import BYTE_TOKEN, is_byte_level
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

Tree = dict[str, Any]
CHECKED_TOKENS = 20_000
"""Tokens of each store whose text is encoded with both tokenizers."""


@dataclass(frozen=True)
class Reduction:
    """A tokenizer with fewer tokens."""

    tokenizer: TextTokenizer
    kept: NDArray[np.int64]
    """The old id of each token; the order does not change."""


def reduce_vocabulary(tokenizer: TextTokenizer, where: str) -> Reduction:
    """Keep the tokens of the token stores in `where`, those they are merged from, bytes and special tokens."""
    stores = _open_stores(where, tokenizer)
    used = np.zeros(tokenizer.vocab, bool)  # by id
    for store in stores:
        for start in range(0, store.tokens, BLOCK):
            ids = np.unique(np.asarray(store.ids[start : start + BLOCK], np.int64))
            if len(ids) and not 0 <= ids[0] <= ids[-1] < len(used):
                raise TextmillError(
                    f"{where}: has the id {ids[-1]:,}, the tokenizer has {len(used):,} tokens; name tokens that were "
                    "made with the model's own tokenizer"
                )
            used[ids] = True
    if not used.any():
        raise TextmillError(f"{where}: has no tokens, so that none would be kept; name a folder with text")
    reduction = keep_tokens(tokenizer, used)
    for store in stores:
        _check_encoding(tokenizer, reduction, np.asarray(store.ids[:CHECKED_TOKENS]).tolist(), where)
    return reduction


def _check_encoding(tokenizer: TextTokenizer, reduction: Reduction, ids: list[int], where: str) -> None:
    """Raise unless a text of kept tokens gets the same tokens from both tokenizers."""
    text = tokenizer.inner.decode(ids, skip_special_tokens=True)
    ids_before = tokenizer.encode(text)
    if not set(ids_before) <= set(reduction.kept.tolist()):
        return
    ids_after = reduction.kept[reduction.tokenizer.encode(text)].tolist()
    if ids_after != ids_before:
        raise TextmillError(f"{where}: the reduced vocabulary would split its text differently; keep all tokens")


def _open_stores(where: str, tokenizer: TextTokenizer) -> list[TokenStore]:
    path = Path(where)
    if (path / MANIFEST).is_file() and open_manifest(path).get("verb") == "tokenize":
        if open_manifest(path)["tokenizer"] != tokenizer.fingerprint:
            raise TextmillError(
                f"{where}: was made with another tokenizer; tokenize the text with that of the model: tokenizer.use"
            )
        return [open_store(path / split) for split in SPLITS]
    if store_paths(store_prefix(path))[0].is_file():
        return [open_store(store_prefix(path))]
    raise TextmillError(
        f"{where}: no tokens found; name a folder written by textmill tokenize, or a prefix of .bin and .idx files"
    )


def keep_tokens(tokenizer: TextTokenizer, used: NDArray[np.bool_]) -> Reduction:
    """A tokenizer with the used tokens, what they are merged from, all bytes and all special tokens."""
    tree: Tree = json.loads(tokenizer.inner.to_str())
    reduce_model = _MODELS.get(tree["model"]["type"])
    if reduce_model is None:
        raise TextmillError(f"a vocabulary of type {tree['model']['type']} cannot be reduced; use {', '.join(_MODELS)}")
    ids: dict[str, int] = tokenizer.inner.get_vocab(with_added_tokens=True)
    kept = {token for token, id_ in ids.items() if used[id_]}
    kept |= {token["content"] for token in tree["added_tokens"]} & ids.keys()
    kept |= {token for token in ids if _is_byte(token, tree)}
    kept = reduce_model(tree["model"], kept)
    kept_ids = sorted(ids[token] for token in kept)
    new_ids = {old: new for new, old in enumerate(kept_ids)}
    vocab = tree["model"]["vocab"]
    if isinstance(vocab, dict):
        tree["model"]["vocab"] = {token: new_ids[id_] for token, id_ in vocab.items() if id_ in new_ids}
    for token in tree["added_tokens"]:
        token["id"] = new_ids[token["id"]]
    _renumber(tree["post_processor"], new_ids)
    inner = Tokenizer.from_str(json.dumps(tree))
    inner.encode_special_tokens = True
    if inner.get_vocab(with_added_tokens=True) != {token: new_ids[ids[token]] for token in kept}:
        raise TextmillError("the vocabulary cannot be reduced: its added tokens are numbered before other tokens")
    reduced = replace(
        tokenizer,
        inner=inner,
        eos_id=new_ids[tokenizer.eos_id],
        model_ids=_renumber_settings(tokenizer.model_ids, new_ids),
        generation=_renumber_settings(tokenizer.generation, new_ids),
    )
    return Reduction(reduced, np.array(kept_ids, np.int64))


def _renumber_settings(settings: Mapping[str, Any], new_ids: dict[int, int]) -> Tree:
    """Settings with the new ids of special tokens, such as eos_token_id; those without a token left are dropped."""
    changed: Tree = {}
    for key, value in settings.items():
        if not key.endswith(("_token_id", "_token_ids", "_tokens", "_ids")) or value is None:
            changed[key] = value
        elif isinstance(value, list):
            if known := [new_ids[id_] for id_ in value if isinstance(id_, int) and id_ in new_ids]:
                changed[key] = known
        elif not isinstance(value, int) or key.startswith(("max_", "min_", "num_")):
            changed[key] = value  # a count of tokens, such as max_new_tokens
        elif value in new_ids:
            changed[key] = new_ids[value]
    return changed


def _is_byte(token: str, tree: Tree) -> bool:
    return len(token) == 1 if is_byte_level(tree) else BYTE_TOKEN.fullmatch(token) is not None


def _reduce_bpe(model: Tree, kept: set[str]) -> set[str]:
    """Add what tokens are merged from, and keep the merges among them.

    A merge that is dropped was never applied in a text made of kept tokens, so that such a text keeps its ids.
    """
    prefix = model.get("continuing_subword_prefix") or ""
    merges = [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"]]
    merged_from: dict[str, list[str]] = {}
    for left, right in merges:
        merged_from.setdefault(left + right.removeprefix(prefix), []).extend((left, right))
    unvisited = list(kept)
    while unvisited:
        new_tokens = set(merged_from.get(unvisited.pop(), ())) - kept
        kept |= new_tokens
        unvisited += new_tokens
    model["merges"] = [
        [left, right] for left, right in merges if {left, right, left + right.removeprefix(prefix)} <= kept
    ]
    return kept | {model["unk_token"]} if model.get("unk_token") else kept


def _reduce_wordpiece(model: Tree, kept: set[str]) -> set[str]:
    """The longest match is the same one; a word may only lose tokens that it is not made of."""
    return kept | {model["unk_token"]}


def _reduce_unigram(model: Tree, kept: set[str]) -> set[str]:
    """The best path is the same one; the lowest score stays, because that of unknown characters depends on it."""
    pieces = model["vocab"]  # (token, score)
    lowest_token, _ = min(pieces, key=lambda piece: float(piece[1]))
    unknown = None if model["unk_id"] is None else pieces[model["unk_id"]][0]
    kept = kept | {lowest_token} | ({unknown} if unknown is not None else set())
    model["vocab"] = [piece for piece in pieces if piece[0] in kept]
    tokens = [token for token, _ in model["vocab"]]
    model["unk_id"] = None if unknown is None else tokens.index(unknown)
    return kept


_MODELS: dict[str, Callable[[Tree, set[str]], set[str]]] = {
    "BPE": _reduce_bpe,
    "WordPiece": _reduce_wordpiece,
    "Unigram": _reduce_unigram,
}


def _renumber(part: Any, new_ids: dict[int, int]) -> None:
    """Replace the ids in what adds special tokens around a text."""
    if not isinstance(part, dict):
        return
    for processor in part.get("processors", []):
        _renumber(processor, new_ids)
    for role in ("cls", "sep"):
        if isinstance(part.get(role), list):
            part[role][1] = new_ids[part[role][1]]
    for token in (part.get("special_tokens") or {}).values():
        token["ids"] = [new_ids[id_] for id_ in token["ids"]]
