"""GGUF, the file of llama.cpp and Ollama: a model with its own vocabulary, through the package gguf."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from textmill.config import ExportConfig
from textmill.config.tokenizer import CONTENT
from textmill.conversion.gguf_models import (
    EMBEDDING,
    FACTORS,
    FAMILIES,
    TYPES,
    add_keys,
    architecture_of,
    change_layout,
    gguf_names,
    shape_of,
    tensors_of,
)
from textmill.conversion.model import Array, Files, Hints, Model, check_layers, collect_weights, require_family
from textmill.conversion.model_card import format_card, parse_card
from textmill.conversion.readers import strips_accents
from textmill.errors import TextmillError, warn
from textmill.models.pooling import Pooling
from textmill.storage.files import manifest_entry, write_text
from textmill.storage.tensor_files import Named
from textmill.tokens.chat import JinjaTemplate
from textmill.tokens.vocabulary.algorithms import CONTINUATION
from textmill.tokens.vocabulary.foreign_files import LLAMA_3, QWEN, add_special_around, new_wordpiece
from textmill.tokens.vocabulary.sentencepiece_model import (
    BPE,
    BYTE,
    UNIGRAM,
    SentencePiece,
    SpmModel,
    build_tokenizer,
    describe_tokenizer,
    is_sentencepiece,
)
from textmill.tokens.vocabulary.token_bytes import SPACE
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, TurnTemplates, open_tokenizer

PRECISIONS = ("fp32", "bf16", "fp16", "q8_0", "q4_0")
TENSOR_TYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
FILE_TYPES = {
    "fp32": "ALL_F32",
    "bf16": "MOSTLY_BF16",
    "fp16": "MOSTLY_F16",
    "q8_0": "MOSTLY_Q8_0",
    "q4_0": "MOSTLY_Q4_0",
}
BLOCK = 32
"""Values that share a scale in a quantised type; rows of another length are written in F16."""
MAGIC = b"GGUF"
CARD_KEY = "textmill.card"
"""The model card."""
MAX_BASES = 16
POOLING = {1: Pooling("mean", normalize=True), 2: Pooling("cls", normalize=True)}
"""llama.cpp's numbers of how embeddings are computed; its server makes each of length 1."""
UNQUANTISED = ("position_embd.weight", TYPES)
"""Matrices that stay in F32."""


def write(model: Model, folder: Path, config: ExportConfig) -> Files:
    """Write NAME.gguf and a Modelfile for Ollama."""
    gguf = _package()
    shape = model.shape
    require_family(shape, "gguf", *dict.fromkeys(FAMILIES.values()))
    architecture = architecture_of(shape)
    if model.tokenizer is None:
        raise TextmillError("export.kind: gguf holds the tokenizer, the model has none; put it next to the weights")
    name = re.sub(r"[^\w.-]+", "-", config.name or Path(str(config.folder)).name) or "model"
    path = folder / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    _add_keys(writer, model, gguf, config, name)
    odd = _add_tensors(writer, tensors_of(model, architecture, gguf), gguf, config.precision)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
    if odd:
        warn(f"{odd} matrices have rows that are no multiple of {BLOCK}; they are written in F16")
    files = {path.name: manifest_entry(path)}
    return files | {"Modelfile": write_text(folder / "Modelfile", modelfile(path.name, shape, model.tokenizer))}


def _add_keys(writer: Any, model: Model, gguf: Any, config: ExportConfig, name: str) -> None:
    shape = model.shape
    writer.add_name(name)
    _add_card(writer, model.card, config.license)
    add_keys(writer, shape)
    if shape.family == "bert":
        kind = model.pooling.kind if model.pooling else "mean"
        writer.add_pooling_type(gguf.PoolingType[kind.upper()])
    writer.add_file_type(getattr(gguf.LlamaFileType, FILE_TYPES[config.precision]))
    if config.precision.startswith("q"):
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    assert model.tokenizer is not None
    for key, value in keys_of(model.tokenizer, shape.vocab).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}.get(type(value), writer.add_array)
        add(f"tokenizer.{key}", value)
    carried = {name: dict(getattr(model.tokenizer, name)) for name in CARRIED_FIELDS}
    if any(carried.values()):
        writer.add_string(CARRIED, json.dumps(carried, ensure_ascii=False))


def _add_card(writer: Any, card: str | None, given_license: str | None) -> None:
    """What the head of the model card says: licence, languages, base models; and the card itself, for import."""
    head = parse_card(card).head
    licence = given_license or head.get("license")
    languages, bases = (_texts_of(head.get(key)) for key in ("language", "base_model"))
    if isinstance(licence, str):
        writer.add_license(licence)
    if languages:
        writer.add_languages(languages)
    if bases:
        writer.add_base_model_count(len(bases))
    for number, base in enumerate(bases):
        writer.add_base_model_name(number, base)
    if card:
        writer.add_string(CARD_KEY, card)


def _texts_of(value: Any) -> list[str]:
    """A text or a list of texts, as a list."""
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str) and text]


def _card_of(keys: dict[str, Any]) -> str | None:
    """The card that textmill wrote into a file, or one of what the file says about itself."""
    if isinstance(card := keys.get(CARD_KEY), str):
        return card
    count = keys.get("general.base_model.count")
    numbers = range(min(count, MAX_BASES) if isinstance(count, int) else 0)
    bases = [keys.get(f"general.base_model.{number}.name") for number in numbers]
    head = {
        "license": keys.get("general.license"),
        "language": _texts_of(keys.get("general.languages")),
        "base_model": _texts_of(bases),
    }
    known = {key: value for key, value in head.items() if value}
    name = keys.get("general.name")
    return format_card(known, f"\n# {name}\n" if isinstance(name, str) else "\n") if known else None


def _add_tensors(writer: Any, tensors: dict[str, Array], gguf: Any, precision: str) -> int:
    """Add every tensor; norms, biases and positions stay in F32. Returns how many matrices could not be quantised."""
    wanted = getattr(gguf.GGMLQuantizationType, TENSOR_TYPES[precision])
    odd = 0
    for name, values in tensors.items():
        values = np.ascontiguousarray(values, np.float32)
        if values.ndim < 2 or name in UNQUANTISED or precision == "fp32":
            writer.add_tensor(name, values)
            continue
        kind = wanted
        if precision.startswith("q") and values.shape[-1] % BLOCK:
            kind = gguf.GGMLQuantizationType.F16
            odd = odd + 1
        if kind == gguf.GGMLQuantizationType.F16 and np.abs(values).max() > np.finfo(np.float16).max:
            raise TextmillError(
                f"'{name}' holds {np.abs(values).max():.4g}, more than fp16 can represent; use bf16 or fp32"
            )
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    return odd


def matches(path: Path) -> bool:
    """A file that begins as GGUF does, or a folder with one."""
    try:
        with open(_file_of(path), "rb") as stream:
            return stream.read(4) == MAGIC
    except (OSError, TextmillError):
        return False


def _file_of(path: Path) -> Path:
    found = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(found) != 1:
        raise TextmillError(f"{path}: has {len(found)} files *.gguf; name one of them")
    return found[0]


def read(path: Path, hints: Hints) -> Model:
    """Read a model; quantised weights are turned into fp32."""
    path = _file_of(path)
    gguf = _package()
    try:
        with warnings.catch_warnings(action="ignore"):  # of numpy, about sums that overflow
            reader = gguf.GGUFReader(path)
            keys = {name: field.contents() for name, field in reader.fields.items()}
            tensors = {tensor.name: tensor for tensor in reader.tensors}
    except Exception:  # the package raises what its arithmetic on a damaged file raises
        raise TextmillError(
            f"{path}: not a readable GGUF file: its {path.stat().st_size:,} bytes end too early, or its header is "
            "damaged; copy it again"
        ) from None
    kind = str(keys.get("general.architecture"))
    if kind not in FAMILIES:
        raise TextmillError(f"{path}: its architecture is {kind!r}; textmill reads {', '.join(FAMILIES)}")
    if EMBEDDING not in tensors:
        raise TextmillError(f"{path}: has no {EMBEDDING}; the file is damaged, or holds no weights")
    shape = shape_of(keys, tensors, path)
    check_layers(shape, len(tensors), str(path))
    names = {gguf_name: name for name, gguf_name in gguf_names(shape, kind, gguf).items()}
    tensors.pop(FACTORS, None)  # part of the shape
    weights = collect_weights(shape, _named(tensors, shape, names, gguf, path), str(path))
    tokenizer = open_tokenizer(hints.tokenizer) if hints.tokenizer else tokenizer_of(keys, str(path))
    pooling = POOLING.get(keys.get(f"{kind}.pooling_type", 0)) if shape.family == "bert" else None
    return Model(shape, weights, tokenizer, card=_card_of(keys), pooling=pooling)


def _named(tensors: dict[str, Any], shape: Any, names: dict[str, str], gguf: Any, path: Path) -> Iterator[Named]:
    for gguf_name, tensor in tensors.items():
        if gguf_name not in names:
            raise TextmillError(f"{path}: has '{gguf_name}', which a {shape.family} does not have")
        name = names[gguf_name]
        yield name, change_layout(name, _values_of(tensor, gguf, path), shape, to_file=False)


def _values_of(tensor: Any, gguf: Any, path: Path) -> Array:
    try:
        found: Array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        return found.reshape([int(side) for side in tensor.shape][::-1])
    except NotImplementedError:
        raise TextmillError(
            f"{path}: '{tensor.name}' is of type {tensor.tensor_type.name}, which the package gguf cannot turn into "
            "numbers; convert the file to F32, F16, BF16, Q8_0 or Q4"
        ) from None
    except Exception:  # what numpy raises where the sizes do not fit
        raise TextmillError(
            f"{path}: '{tensor.name}' has other sizes than its {tensor.n_bytes:,} bytes; the file is damaged"
        ) from None


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise TextmillError("gguf: needs the package gguf; run: pip install 'textmill[export]'") from None
    return gguf


NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
"""llama.cpp's types of tokens; a control token is found in a text only where the caller asks for it."""
SPLITS = {"gpt-2": (), "smollm": ("digits",), "qwen2": (QWEN,), "llama-bpe": (LLAMA_3,)}
"""How llama.cpp splits words, by its own names: what comes before GPT-2's splitting, or a pattern in its place."""
COMPOSING = ("qwen2",)
"""Those whose tokenizers compose characters (NFC) first; llama.cpp leaves that to its caller."""
OTHER_ENDS = ("eot", "eom")
"""llama.cpp's names of further tokens that end a text: end of turn and end of message."""
ADDING_BOS = ("llama-bpe",)
"""Ways of splitting words with which llama.cpp adds the begin token if a file does not say whether it should."""
CARRIED = "textmill.tokenizer"
"""JSON of what llama.cpp's keys have no place for: settings of tokenizer_config.json, config.json and
generation_config.json."""
CARRIED_FIELDS = ("settings", "model_ids", "generation")
SENTENCEPIECE = {"llama": BPE, "t5": UNIGRAM}
"""llama.cpp's names of the tokenizers that work as sentencepiece does, and sentencepiece's types of models."""
IN_BRACKETS = re.compile(r"\[.+\]")
"""Tokens of a BERT that have no mark for where a word begins."""
NEVER_FOUND = -1e4
"""The score of unused tokens, which llama.cpp would otherwise find in a text."""
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "mask_token": "mask"}
ROLES |= {"cls_token": "cls", "sep_token": "seperator"}


def keys_of(tokenizer: TextTokenizer, rows: int) -> dict[str, Any]:
    """The keys below `tokenizer.`; ids without a token up to `rows`, the rows of the embedding, are marked unused."""
    tree = json.loads(tokenizer.inner.to_str())
    is_wordpiece = tree["model"]["type"] == "WordPiece"
    vocabulary = _sentencepiece_keys if is_sentencepiece(tree) else _byte_level_keys
    vocabulary = _wordpiece_keys if is_wordpiece else vocabulary
    keys: dict[str, Any] = {
        **vocabulary(tokenizer, tree, rows),
        "ggml.add_bos_token": tokenizer.adds_bos,
        "ggml.add_eos_token": tokenizer.adds_eos,
    }
    roles = {**tokenizer.roles, "eos_token": tokenizer.inner.id_to_token(tokenizer.eos_id)}
    for role, name in ROLES.items():
        role_id = tokenizer.inner.token_to_id(roles.get(role) or "")
        if role_id is not None:
            keys[f"ggml.{name}_token_id"] = role_id
    begin = tokenizer.model_ids.get("bos_token_id")
    keys.setdefault("ggml.bos_token_id", tokenizer.eos_id if type(begin) is not int or begin < 0 else begin)
    others = [id_ for id_ in tokenizer.end_ids if id_ != tokenizer.eos_id]
    if len(others) > len(OTHER_ENDS):
        names = [str(tokenizer.inner.id_to_token(id_)) for id_ in others[len(OTHER_ENDS) :]]
        warn(f"llama.cpp has no place for more than three tokens that end a text; without {', '.join(names)}")
    keys |= {f"ggml.{name}_token_id": id_ for name, id_ in zip(OTHER_ENDS, others, strict=False)}
    template = tokenizer.chat.jinja() if tokenizer.chat else tokenizer.jinja
    return {**keys, "chat_template": template} if template else keys


def _byte_level_keys(tokenizer: TextTokenizer, tree: dict[str, Any], rows: int) -> dict[str, Any]:
    """The vocabulary of a byte-level BPE tokenizer."""
    split = _find_split(tree)
    by_id = {id_: (token, NORMAL) for token, id_ in tree["model"]["vocab"].items()}
    for id_, added in tokenizer.inner.get_added_tokens_decoder().items():
        by_id[id_] = added.content, CONTROL if added.special else USER_DEFINED
    entries = [by_id.get(id_, (_unused(id_), UNUSED)) for id_ in range(rows)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tree["model"]["merges"]]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": split,
        "ggml.tokens": [token for token, _ in entries],
        "ggml.token_type": [kind for _, kind in entries],
        "ggml.merges": merges,
    }


def _unused(id_: int) -> str:
    return f"[unused{id_}]"


def _wordpiece_keys(tokenizer: TextTokenizer, tree: dict[str, Any], rows: int) -> dict[str, Any]:
    """The vocabulary of a BERT: words begin with SPACE, what continues a word has no mark."""
    normalizer = tree["normalizer"] or {}
    is_bert = normalizer.get("type") == "BertNormalizer" and normalizer["clean_text"]
    if not is_bert or not normalizer["handle_chinese_chars"] or tree["pre_tokenizer"] != {"type": "BertPreTokenizer"}:
        raise TextmillError("export.kind: llama.cpp splits words as BERT does, and this tokenizer does not; use hf")
    special = {id_ for id_, token in tokenizer.inner.get_added_tokens_decoder().items() if token.special}
    by_id = {id_: token for token, id_ in tokenizer.inner.get_vocab(with_added_tokens=True).items()}
    prefix = tree["model"]["continuing_subword_prefix"]
    tokens = [by_id.get(id_, _unused(id_)) for id_ in range(rows)]
    marked = [
        token
        if number in special or IN_BRACKETS.fullmatch(token)
        else token.removeprefix(prefix)
        if token.startswith(prefix)
        else SPACE + token
        for number, token in enumerate(tokens)
    ]
    if prefix != CONTINUATION or len(set(marked)) < len(marked):
        raise TextmillError("export.kind: llama.cpp would take two tokens of this vocabulary for one; use hf")
    strips = strips_accents(normalizer)
    if strips:
        warn(
            "llama.cpp strips more accents than this tokenizer and does not decompose Korean: it gives other ids for "
            "Indic vowel signs, and for Korean text that is not in NFD"
        )
    return {
        "ggml.model": "bert",
        "ggml.tokens": marked,
        "ggml.token_type": [CONTROL if number in special else NORMAL for number in range(rows)],
        "ggml.token_type_count": 2,
        "ggml.normalizer.lowercase": normalizer["lowercase"],
        "ggml.normalizer.strip_accents": strips,
        "ggml.bos_token_id": tokenizer.cls_id,
    }


def _sentencepiece_keys(tokenizer: TextTokenizer, tree: dict[str, Any], rows: int) -> dict[str, Any]:
    """The vocabulary and the normalizer of a tokenizer that works as sentencepiece does."""
    try:
        model = describe_tokenizer(tokenizer.inner)
    except TextmillError as error:
        raise TextmillError(f"export.kind: llama.cpp would give other ids: {error}; use hf") from None
    if reason := _find_difference(model, tree):
        raise TextmillError(f"export.kind: llama.cpp would give other ids, because {reason}")
    if model.type == UNIGRAM:
        warn("llama.cpp makes one token of unknown characters in a row, also where this tokenizer splits words")
    if model.charsmap:
        warn("llama.cpp normalises some combining characters as sentencepiece does, not as transformers")
    unused = [SentencePiece(_unused(id_), NEVER_FOUND, UNUSED) for id_ in range(len(model.pieces), rows)]
    pieces = [*model.pieces, *unused]
    return {
        "ggml.model": next(name for name, kind in SENTENCEPIECE.items() if kind == model.type),
        "ggml.pre": "default",
        "ggml.tokens": [piece.text for piece in pieces],
        "ggml.scores": [piece.score for piece in pieces],
        "ggml.token_type": [piece.type for piece in pieces],
        "ggml.add_space_prefix": model.dummy_prefix,
        "ggml.remove_extra_whitespaces": model.remove_extra,
        **({"ggml.precompiled_charsmap": model.charsmap} if model.charsmap else {}),
    }


def _find_difference(model: SpmModel, tree: dict[str, Any]) -> str | None:
    """What llama.cpp does in another way than this tokenizer, and what to do; None if nothing."""
    has_bytes = sum(piece.type == BYTE for piece in model.pieces) == 256
    once = any(piece.type == USER_DEFINED for piece in model.pieces) or '"first"' in json.dumps(tree["pre_tokenizer"])
    if not model.escape:
        return "its tokens have spaces as they are; use hf"
    if model.dummy_prefix and once:
        return "it also puts a space before the text after a special token, and this tokenizer does not; use hf"
    if model.type == UNIGRAM:
        if model.byte_fallback:
            return "it has no byte fallback for unigram; fit with tokenizer.byte_fallback=false, or use hf"
        return None if model.dummy_prefix == model.remove_extra else "it counts blanks differently; use hf"
    if not has_bytes or not model.byte_fallback:
        return "it writes unknown characters as bytes, and this vocabulary has no byte fallback; use hf"
    if model.charsmap or model.remove_extra:
        return "it does not normalise the text of a BPE vocabulary; use hf"
    rebuilt = json.loads(build_tokenizer(model).to_str())["model"]
    merged, known = (["".join(merge) for merge in one["merges"]] for one in (rebuilt, tree["model"]))
    return None if merged == known else "it merges all tokens whose union is one, and this tokenizer some; use hf"


def _find_split(tree: dict[str, Any]) -> str:
    """llama.cpp's name for how a tokenizer splits words; an error if llama.cpp would give other ids."""
    model = tree["model"]
    has_nfc = tree["normalizer"] == {"type": "NFC"}
    has_other_normalizer = bool(tree["normalizer"]) and not has_nfc
    if model["type"] != "BPE" or has_other_normalizer or "ByteLevel" not in json.dumps(tree["pre_tokenizer"]):
        kind = f"{model['type']}{' with a normalizer' if has_other_normalizer else ''}"
        raise TextmillError(
            f"export.kind: a model in gguf needs a byte-level BPE tokenizer without a normalizer, or one that works as "
            f"sentencepiece does; this one is {kind}"
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
    kind = keys.get("tokenizer.ggml.model")
    split = keys.get("tokenizer.ggml.pre", "gpt-2")
    if not _is_text_list(tokens):
        return None
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        kinds = [NORMAL] * len(tokens)
    if kind in SENTENCEPIECE:
        spm = _spm_of(keys, tokens, kinds, kind)
        if spm is None:
            return None
        inner = build_tokenizer(spm)
        inner.encode_special_tokens = True
    elif kind == "bert":
        inner = _build_wordpiece(keys, tokens, kinds)
    elif kind == "gpt2" and split in SPLITS and _is_text_list(merges):
        inner = _build_byte_level(tokens, kinds, merges, split, where)
    else:
        return None
    end = keys.get("tokenizer.ggml.eos_token_id", keys.get("tokenizer.ggml.seperator_token_id"))
    if type(end) is not int or not 0 <= end < len(tokens):
        raise TextmillError(f"{where}: tokenizer.ggml.eos_token_id is {end!r}; the file names no end-of-text token")
    roles = {}
    for role, name in ROLES.items():
        id_: Any = keys.get(f"tokenizer.ggml.{name}_token_id")
        if type(id_) is int and 0 <= id_ < len(tokens):
            roles[role] = tokens[id_]
    if kind == "bert":  # these are llama.cpp's other names of both
        roles = {role: token for role, token in roles.items() if role not in ("bos_token", "eos_token")}
    template = keys.get("tokenizer.chat_template")
    jinja = template if isinstance(template, str) else None
    tokenizer = replace(TextTokenizer(inner, end, roles, jinja=jinja), **_carried_of(keys, where))
    adds_bos = keys.get("tokenizer.ggml.add_bos_token", kind == "llama" or split in ADDING_BOS)
    adds_eos = keys.get("tokenizer.ggml.add_eos_token", kind == "t5")
    if kind == "bert":
        return tokenizer
    if tokenizer.bos_id is not None and (adds_bos or adds_eos):
        begin = roles["bos_token"] if adds_bos else None
        add_special_around(inner, begin, tokens[end] if adds_eos else None)
    return tokenizer


def _carried_of(keys: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of a tokenizer that textmill wrote as JSON; of another file, its special tokens."""
    text = keys.get(CARRIED)
    if text is not None:
        try:
            tree = json.loads(text)
            return {name: dict(tree.get(name, {})) for name in CARRIED_FIELDS}
        except (TypeError, ValueError, AttributeError):
            raise TextmillError(f"{where}: {CARRIED} is no JSON of settings; the file is damaged") from None
    found = {name: keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding", *OTHER_ENDS)}
    ends = list(dict.fromkeys(found[name] for name in ("eos", *OTHER_ENDS) if type(found[name]) is int))
    ids: dict[str, Any] = {"bos_token_id": found["bos"], "eos_token_id": ends[0] if len(ends) == 1 else ends}
    if found["padding"] is not None:
        ids["pad_token_id"] = found["padding"]
    return {"model_ids": ids}


def _build_wordpiece(keys: dict[str, Any], tokens: list[str], kinds: list[int]) -> Tokenizer:
    """The tokenizer of a BERT."""
    names = [
        token
        if kind == CONTROL or IN_BRACKETS.fullmatch(token)
        else token.removeprefix(SPACE)
        if token.startswith(SPACE)
        else CONTINUATION + token
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    numbers = {name: keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("unknown", "cls", "seperator")}
    known = {name: names[id_] for name, id_ in numbers.items() if type(id_) is int and 0 <= id_ < len(names)}
    unknown, cls, sep = (
        known.get(name, usual) for name, usual in zip(numbers, ("[UNK]", "[CLS]", "[SEP]"), strict=True)
    )
    lowercase = bool(keys.get("tokenizer.ggml.normalizer.lowercase", True))
    inner = new_wordpiece({name: id_ for id_, name in enumerate(names)}, unknown)
    inner.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=bool(keys.get("tokenizer.ggml.normalizer.strip_accents", lowercase))
    )
    inner.add_special_tokens([name for name, kind in zip(names, kinds, strict=True) if kind == CONTROL])
    ends = [(token, id_) for token in (cls, sep) if (id_ := inner.token_to_id(token)) is not None]
    if len(ends) == 2:
        inner.post_processor = processors.TemplateProcessing(
            f"{cls}:0 $A:0 {sep}:0", f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1", ends
        )
    inner.encode_special_tokens = True
    return inner


def _spm_of(keys: dict[str, Any], tokens: list[str], kinds: list[int], kind: str) -> SpmModel | None:
    """The model of a tokenizer that works as sentencepiece does; None if its keys are incomplete, or tokens between
    others are unused."""
    scores: Any = keys.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        return None
    pieces = list(map(SentencePiece, tokens, scores, kinds))
    while pieces and pieces[-1].type == UNUSED:
        pieces.pop()
    if any(piece.type == UNUSED for piece in pieces) or len({piece.text for piece in pieces}) != len(pieces):
        return None
    is_bpe = kind == "llama"
    return SpmModel(
        pieces=pieces,
        type=SENTENCEPIECE[kind],
        byte_fallback=is_bpe,
        suffix=False,
        roles={},
        charsmap=b"" if is_bpe else bytes(keys.get("tokenizer.ggml.precompiled_charsmap", b"")),
        dummy_prefix=bool(keys.get("tokenizer.ggml.add_space_prefix", is_bpe)),
        remove_extra=not is_bpe and bool(keys.get("tokenizer.ggml.remove_extra_whitespaces", False)),
        escape=True,
    )


def _build_byte_level(tokens: list[str], kinds: list[int], merges: list[str], split: str, where: str) -> Tokenizer:
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


def modelfile(file: str, shape: Any, tokenizer: TextTokenizer) -> str:
    """FROM the file, textmill's own chat template in Go's language, the longest context and the stop tokens.

    The chat template of another model is left to Ollama, which recognises common ones in the file.
    """
    lines = [f"FROM ./{file}"]
    if shape.family == "bert":
        return f"{lines[0]}\n"
    stops = [str(tokenizer.inner.id_to_token(id_)) for id_ in tokenizer.end_ids]
    if tokenizer.chat is not None:
        lines.append(_go_template(tokenizer.chat))
    elif tokenizer.jinja is not None:
        stops += [str(tokenizer.inner.id_to_token(id_)) for id_ in JinjaTemplate(tokenizer, tokenizer.jinja).stop_ids]
    else:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    lines.append(f"PARAMETER num_ctx {shape.positions}")
    return "\n".join([*lines, *(f'PARAMETER stop "{stop}"' for stop in dict.fromkeys(stops))]) + "\n"


def _go_template(chat: TurnTemplates) -> str:
    branches = []
    keyword = "if"
    for role, text in chat.turns:
        branches.append(f'{{{{ {keyword} eq .Role "{role}" }}}}{text.replace(CONTENT, "{{ .Content }}")}')
        keyword = "else if"
    loop = f"{{{{ range .Messages }}}}{''.join(branches)}{{{{ end }}}}{{{{ end }}}}"
    return f'TEMPLATE """{loop}{chat.prompt}"""'
