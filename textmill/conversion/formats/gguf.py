"""GGUF, the file of llama.cpp and Ollama: a model with its own vocabulary, through the package gguf."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from textmill.config import ExportConfig
from textmill.config.tokenizer import CONTENT
from textmill.conversion import gguf_gpt2, gguf_llama
from textmill.conversion.model import Array, Files, Hints, Model, collect_weights, require_family
from textmill.errors import TextmillError, warn
from textmill.storage.files import manifest_entry, write_text
from textmill.storage.tensor_files import Named
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

PRECISIONS = ("fp32", "bf16", "fp16", "q8_0", "q4_0")
TYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
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
EMBEDDING = "token_embd.weight"
KEPT = ("position_embd.weight", "rope_freqs.weight")
"""Matrices and vectors that stay in F32."""
LAYOUTS: dict[str, Any] = {"gpt2": gguf_gpt2, "llama": gguf_llama}
"""How the models of each family are stored."""


def write(model: Model, folder: Path, config: ExportConfig) -> Files:
    """Write NAME.gguf and a Modelfile for Ollama."""
    gguf = _package()
    shape = model.shape
    require_family(shape, "gguf", *LAYOUTS)
    architecture = LAYOUTS[shape.family].architecture_of(shape)
    if model.tokenizer is None:
        raise TextmillError("export.kind: gguf holds the tokenizer, the model has none; put it next to the weights")
    name = re.sub(r"[^\w.-]+", "-", config.name or Path(str(config.folder)).name) or "model"
    path = folder / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    _add_keys(writer, model, gguf, config, name)
    odd = _add_tensors(writer, model, gguf, config.precision)
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
    if config.license:
        writer.add_license(config.license)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    LAYOUTS[shape.family].add_keys(writer, shape)
    writer.add_file_type(getattr(gguf.LlamaFileType, FILE_TYPES[config.precision]))
    if config.precision.startswith("q"):
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    assert model.tokenizer is not None
    for key, value in keys_of(model.tokenizer, shape.vocab).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"tokenizer.{key}", value)


def _add_tensors(writer: Any, model: Model, gguf: Any, precision: str) -> int:
    """Add every weight; norms, biases and positions stay in F32. Returns how many matrices could not be quantised."""
    wanted = getattr(gguf.GGMLQuantizationType, TYPES[precision])
    odd = 0
    for name, values in LAYOUTS[model.shape.family].tensors_of(model).items():
        values = np.ascontiguousarray(values, np.float32)
        if values.ndim < 2 or name in KEPT or precision == "fp32":
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
        reader = gguf.GGUFReader(path)
        keys = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:  # the package raises what its arithmetic on a damaged file raises
        raise TextmillError(f"{path}: not a readable GGUF file ({type(error).__name__}: {error})") from None
    layouts = {name: layout for layout in LAYOUTS.values() for name in layout.ARCHITECTURES}
    layout = layouts.get(str(keys.get("general.architecture")))
    if layout is None:
        raise TextmillError(
            f"{path}: its architecture is {keys.get('general.architecture')!r}; textmill reads {', '.join(layouts)}"
        )
    if EMBEDDING not in tensors:
        raise TextmillError(f"{path}: has no {EMBEDDING}; the file is damaged, or holds no weights")
    shape = layout.shape_of(keys, tensors, path)
    weights = collect_weights(shape, _named(tensors, shape, layout, gguf, path), str(path))
    tokenizer = open_tokenizer(hints.tokenizer) if hints.tokenizer else tokenizer_of(keys, str(path))
    return Model(shape, weights, tokenizer)


def _named(tensors: dict[str, Any], shape: Any, layout: Any, gguf: Any, path: Path) -> Iterator[Named]:
    for name, tensor in tensors.items():
        if name == gguf_llama.FACTORS:
            continue  # part of the shape
        found = layout.weight_of(name, _values_of(tensor, gguf, path), shape)
        if found is None:
            raise TextmillError(f"{path}: has '{name}', which a {shape.family} does not have")
        yield found


def _values_of(tensor: Any, gguf: Any, path: Path) -> Array:
    try:
        found: Array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        return found.reshape([int(side) for side in tensor.shape][::-1])
    except Exception as error:  # a type that the package cannot turn into numbers, or a damaged size
        raise TextmillError(
            f"{path}: '{tensor.name}' of type {tensor.tensor_type.name} cannot be read ({type(error).__name__}: "
            f"{error}); convert the file to F32, F16, BF16, Q8_0 or Q4"
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
    roles = {**tokenizer.roles, "eos_token": tokenizer.inner.id_to_token(tokenizer.eos_id)}
    for role, name in ROLES.items():
        role_id = tokenizer.inner.token_to_id(roles.get(role) or "")
        if role_id is not None:
            keys[f"ggml.{name}_token_id"] = role_id
    keys.setdefault("ggml.bos_token_id", tokenizer.eos_id)
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


def modelfile(file: str, shape: Any, tokenizer: TextTokenizer) -> str:
    """FROM the file, the chat template in Go's language, the longest context and the stop token."""
    lines = [f"FROM ./{file}", f'TEMPLATE """{_template(tokenizer)}"""', f"PARAMETER num_ctx {shape.positions}"]
    return "\n".join([*lines, f'PARAMETER stop "{tokenizer.inner.id_to_token(tokenizer.eos_id)}"']) + "\n"


def _template(tokenizer: TextTokenizer) -> str:
    """Turns of a conversation; a model without a chat template of ours continues the prompt."""
    if tokenizer.chat is None:
        return "{{ .Prompt }}"
    branches = []
    keyword = "if"
    for role, text in tokenizer.chat.turns:
        before, _, after = text.partition(CONTENT)
        branches.append(f'{{{{ {keyword} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}')
        keyword = "else if"
    return f"{{{{ range .Messages }}}}{''.join(branches)}{{{{ end }}}}{{{{ end }}}}{tokenizer.chat.prompt}"
