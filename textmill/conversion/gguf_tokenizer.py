"""A byte-level BPE tokenizer as the keys of a GGUF file, and back."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from textmill.errors import TextmillError
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""llama.cpp's types of tokens; a control token is found in a text only where the caller asks for it."""
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "gpt-2": (),
    "smollm": ("digits",),
    "qwen2": (_SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST,),
    "llama-bpe": (_SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST,),
}
"""How llama.cpp splits words, by its own names: what comes before GPT-2's splitting, or a pattern in its place."""
COMPOSING = ("qwen2",)
"""Those whose tokenizers compose characters (NFC) first; llama.cpp leaves that to its caller."""
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "mask_token": "mask"}


def keys_of(tokenizer: TextTokenizer, rows: int) -> dict[str, Any]:
    """The keys below `tokenizer.`; ids without a token up to `rows`, the rows of the embedding, are marked unused."""
    tree = json.loads(tokenizer.inner.to_str())
    model = tree["model"]
    composes = tree["normalizer"] == {"type": "NFC"}
    normalizes = bool(tree["normalizer"]) and not composes
    if model["type"] != "BPE" or normalizes or "ByteLevel" not in json.dumps(tree["pre_tokenizer"]):
        found = f"{model['type']}{' with a normalizer' if normalizes else ''}"
        raise TextmillError(
            f"export.kind: a model in gguf needs a byte-level BPE tokenizer without a normalizer; this one is {found}"
        )
    split = _split_name(tree["pre_tokenizer"], bool(model.get("ignore_merges")))
    if composes != (split in COMPOSING):
        raise TextmillError(
            f"export.kind: a tokenizer that llama.cpp names {split} has {'no' if composes else 'an'} NFC "
            "normalizer, so it would give other ids; use hf"
        )
    added = tokenizer.inner.get_added_tokens_decoder()
    by_id = {id_: (token, NORMAL) for token, id_ in model["vocab"].items()}
    by_id |= {id_: (one.content, CONTROL if one.special else USER_DEFINED) for id_, one in added.items()}
    entries = [by_id.get(id_, (f"[unused{id_}]", UNUSED)) for id_ in range(rows)]
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    keys: dict[str, Any] = {
        "ggml.model": "gpt2", "ggml.pre": split,
        "ggml.tokens": [token for token, _ in entries], "ggml.token_type": [kind for _, kind in entries],
        "ggml.merges": merges, "ggml.add_bos_token": False, "ggml.add_eos_token": False,
    }  # fmt: skip
    roles = {**tokenizer.roles, "eos_token": tokenizer.inner.id_to_token(tokenizer.end)}
    for role, name in ROLES.items():
        if (id_ := tokenizer.inner.token_to_id(roles.get(role) or "")) is not None:
            keys[f"ggml.{name}_token_id"] = id_
    keys.setdefault("ggml.bos_token_id", tokenizer.end)
    template = tokenizer.chat.jinja() if tokenizer.chat else tokenizer.jinja
    return {**keys, "chat_template": template} if template else keys


def _split_name(step: dict[str, Any], ignore_merges: bool) -> str:
    """llama.cpp's name for a way of splitting words; without the right one it would give other ids silently."""
    *before, last = step.get("pretokenizers", [step])
    kinds = tuple(
        "digits" if one["type"] == "Digits" and one["individual_digits"] else _pattern_of(one) for one in before
    )
    plain = last["type"] == "ByteLevel" and not last["add_prefix_space"]
    name = next((name for name, split in SPLITS.items() if split == kinds), None)
    own_pattern = bool(kinds) and kinds != ("digits",)
    if (
        name is None
        or not plain
        or last.get("use_regex", True) == own_pattern
        or ignore_merges != (name == "llama-bpe")
    ):
        raise TextmillError(
            "export.kind: llama.cpp has no name for how this tokenizer splits words, so it would give other ids; "
            "it knows GPT-2's way (tokenizer.kind=bpe), also with tokenizer.split_digits, and those of Llama 3 and Qwen"
        )
    return name


def _pattern_of(step: dict[str, Any]) -> str:
    isolated = step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]
    return str(step["pattern"].get("Regex")) if isolated else step["type"]


def tokenizer_of(keys: dict[str, Any], where: str) -> TextTokenizer | None:
    """The tokenizer in the keys of a GGUF file; None if it has none of a kind that textmill reads."""
    given: list[Any] = [keys.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type", "merges")]
    tokens, kinds, merges = given
    name = keys.get("tokenizer.ggml.pre", "gpt-2")
    if keys.get("tokenizer.ggml.model") != "gpt2" or name not in SPLITS or not _are_texts(tokens, merges):
        return None
    kinds = kinds if isinstance(kinds, list) and len(kinds) == len(tokens) else [NORMAL] * len(tokens)
    used = {token: id_ for id_, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}
    plain = {token: id_ for token, id_ in used.items() if kinds[id_] == NORMAL}
    pairs = [pair for one in merges if len(pair := tuple(one.split(" "))) == 2]
    try:
        inner = Tokenizer(models.BPE(vocab=used, merges=pairs, ignore_merges=name == "llama-bpe"))
    except Exception as error:  # the library raises plain Exception
        raise TextmillError(f"{where}: its vocabulary and its merges disagree ({error})") from None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name in ("gpt-2", "smollm"))
    steps = [
        pre_tokenizers.Digits(individual_digits=True)
        if one == "digits"
        else pre_tokenizers.Split(Regex(one), "isolated")
        for one in SPLITS[name]
    ]
    inner.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level]) if steps else byte_level
    if name in COMPOSING:
        inner.normalizer = normalizers.NFC()
    inner.decoder, inner.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    for token, id_ in used.items():
        if token not in plain:
            inner.add_tokens([AddedToken(token, special=kinds[id_] == CONTROL, normalized=False)])
    inner.encode_special_tokens = True
    end = keys.get("tokenizer.ggml.eos_token_id")
    if type(end) is not int or not 0 <= end < len(tokens):
        raise TextmillError(f"{where}: tokenizer.ggml.eos_token_id is {end!r}; the file names no end-of-text token")
    ids: dict[str, Any] = {role: keys.get(f"tokenizer.ggml.{short}_token_id") for role, short in ROLES.items()}
    roles = {role: tokens[id_] for role, id_ in ids.items() if type(id_) is int and 0 <= id_ < len(tokens)}
    template = keys.get("tokenizer.chat_template")
    return TextTokenizer(inner, end, roles, jinja=template if isinstance(template, str) else None)


def _are_texts(*lists: Any) -> bool:
    return all(isinstance(one, list) and all(isinstance(text, str) for text in one) for one in lists)
