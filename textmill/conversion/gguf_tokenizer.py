"""A byte-level BPE tokenizer as the keys of a GGUF file, and back.

    tokenizer.ggml.model            "gpt2": byte-level BPE
    tokenizer.ggml.pre              how words are split before BPE, by llama.cpp's name: gpt-2, smollm, qwen2, llama-bpe
    tokenizer.ggml.tokens           the token of each id
    tokenizer.ggml.token_type       its type: 1 normal, 3 control, 4 user-defined, 5 unused
    tokenizer.ggml.merges           "t h", "th e" ...
    tokenizer.ggml.eos_token_id     and bos, unknown, padding, mask
    tokenizer.chat_template         in Jinja

A file does not contain the pattern that splits words, only its name. So a tokenizer whose way of splitting has no name
is refused: llama.cpp would give other ids.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from textmill.errors import TextmillError
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
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
    split = _find_split(tree)
    by_id = {id_: (token, NORMAL) for token, id_ in tree["model"]["vocab"].items()}
    for id_, added in tokenizer.inner.get_added_tokens_decoder().items():
        by_id[id_] = added.content, CONTROL if added.special else USER_DEFINED
    entries = [by_id.get(id_, (f"[unused{id_}]", UNUSED)) for id_ in range(rows)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tree["model"]["merges"]]
    keys: dict[str, Any] = {
        "ggml.model": "gpt2",
        "ggml.pre": split,
        "ggml.tokens": [token for token, _ in entries],
        "ggml.token_type": [kind for _, kind in entries],
        "ggml.merges": merges,
        "ggml.add_bos_token": False,
        "ggml.add_eos_token": False,
    }
    roles = {**tokenizer.roles, "eos_token": tokenizer.inner.id_to_token(tokenizer.end)}
    for role, name in ROLES.items():
        role_id = tokenizer.inner.token_to_id(roles.get(role) or "")
        if role_id is not None:
            keys[f"ggml.{name}_token_id"] = role_id
    keys.setdefault("ggml.bos_token_id", tokenizer.end)
    template = tokenizer.chat.jinja() if tokenizer.chat else tokenizer.jinja
    return {**keys, "chat_template": template} if template else keys


def _find_split(tree: dict[str, Any]) -> str:
    """llama.cpp's name for how a tokenizer splits words; an error if llama.cpp would give other ids."""
    model = tree["model"]
    has_nfc = tree["normalizer"] == {"type": "NFC"}
    has_other_normalizer = bool(tree["normalizer"]) and not has_nfc
    if model["type"] != "BPE" or has_other_normalizer or "ByteLevel" not in json.dumps(tree["pre_tokenizer"]):
        kind = f"{model['type']}{' with a normalizer' if has_other_normalizer else ''}"
        raise TextmillError(
            f"export.kind: a model in gguf needs a byte-level BPE tokenizer without a normalizer; this one is {kind}"
        )
    split = _split_name(tree["pre_tokenizer"], bool(model.get("ignore_merges")))
    if has_nfc != (split in COMPOSING):
        raise TextmillError(
            f"export.kind: a tokenizer that llama.cpp names {split} has {'no' if has_nfc else 'an'} NFC "
            "normalizer, so it would give other ids; use hf"
        )
    return split


def _split_name(step: dict[str, Any], ignore_merges: bool) -> str:
    """llama.cpp's name for a way of splitting words; without the right one it would give other ids silently."""
    *first_steps, last_step = step.get("pretokenizers", [step])
    splits = tuple(_describe_split(first_step) for first_step in first_steps)
    name = next((name for name, known_splits in SPLITS.items() if known_splits == splits), None)
    has_own_pattern = bool(splits) and splits != ("digits",)
    is_known = (
        name is not None
        and last_step["type"] == "ByteLevel"
        and not last_step["add_prefix_space"]
        and last_step.get("use_regex", True) != has_own_pattern
        and ignore_merges == (name == "llama-bpe")
    )
    if name is None or not is_known:
        raise TextmillError(
            "export.kind: llama.cpp has no name for how this tokenizer splits words, so it would give other ids; "
            "it knows GPT-2's way (tokenizer.kind=bpe), also with tokenizer.split_digits, and those of Llama 3 and Qwen"
        )
    return name


def _describe_split(step: dict[str, Any]) -> str:
    """A step before the byte level as SPLITS has it: "digits", a pattern, or another type, which is in no split."""
    if step["type"] == "Digits" and step["individual_digits"]:
        return "digits"
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return str(step["pattern"].get("Regex"))
    return str(step["type"])


def tokenizer_of(keys: dict[str, Any], where: str) -> TextTokenizer | None:
    """The tokenizer in the keys of a GGUF file; None if it has none of a kind that textmill reads."""
    tokens: Any = keys.get("tokenizer.ggml.tokens")
    kinds: Any = keys.get("tokenizer.ggml.token_type")
    merges: Any = keys.get("tokenizer.ggml.merges")
    split = keys.get("tokenizer.ggml.pre", "gpt-2")
    if keys.get("tokenizer.ggml.model") != "gpt2" or split not in SPLITS:
        return None
    if not _is_text_list(tokens) or not _is_text_list(merges):
        return None
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        kinds = [NORMAL] * len(tokens)
    inner = _build_tokenizer(tokens, kinds, merges, split, where)
    end = keys.get("tokenizer.ggml.eos_token_id")
    if type(end) is not int or not 0 <= end < len(tokens):
        raise TextmillError(f"{where}: tokenizer.ggml.eos_token_id is {end!r}; the file names no end-of-text token")
    roles = {}
    for role, name in ROLES.items():
        id_: Any = keys.get(f"tokenizer.ggml.{name}_token_id")
        if type(id_) is int and 0 <= id_ < len(tokens):
            roles[role] = tokens[id_]
    template = keys.get("tokenizer.chat_template")
    return TextTokenizer(inner, end, roles, jinja=template if isinstance(template, str) else None)


def _build_tokenizer(tokens: list[str], kinds: list[int], merges: list[str], split: str, where: str) -> Tokenizer:
    """The tokenizer of these tokens, in the library that the rest of textmill uses."""
    vocab = {token: id_ for id_, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        if merge.count(" ") == 1:
            left, right = merge.split(" ")
            pairs.append((left, right))
    try:
        inner = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=split == "llama-bpe"))
    except Exception as error:  # the library raises plain Exception
        raise TextmillError(f"{where}: its vocabulary and its merges disagree ({error})") from None
    steps: list[Any] = []
    for pattern in SPLITS[split]:
        if pattern == "digits":
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        else:
            steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in ("gpt-2", "smollm"))
    inner.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level]) if steps else byte_level
    if split in COMPOSING:
        inner.normalizer = normalizers.NFC()
    inner.decoder, inner.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    for token, id_ in vocab.items():
        if kinds[id_] != NORMAL:
            inner.add_tokens([AddedToken(token, special=kinds[id_] == CONTROL, normalized=False)])
    inner.encode_special_tokens = True
    return inner


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
