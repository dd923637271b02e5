"""Compares an export with its model as its reader opens it: a fresh process, the other library's own defaults.

`check_with_reader` asks reader_process.py for token ids of texts, pairs and chat turns, outputs of the net, greedy
tokens and the tokens that end a text. A difference is an error; a library that is not installed is named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from textmill.conversion.model import Array, Model
from textmill.conversion.reader_process import ANSWER
from textmill.errors import TextmillError
from textmill.models import has_masked_head, label_head_of
from textmill.models.base_torch import BaseNet
from textmill.models.bert.family import TASK_CLASSES
from textmill.models.family_files import find_family_file
from textmill.models.nets_torch import fill, new_net
from textmill.models.pooling import Pooling
from textmill.storage.remote_folders import first_line
from textmill.tokens.chat import ChatTemplate, JinjaTemplate
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

Tree = dict[str, Any]
BOUNDS = {"fp32": 1e-4, "fp16": 2e-3, "bf16": 2e-2}
"""The largest difference of an output, as a fraction of the largest one (or of 1 if that is less). Other kernels add
up in another order, so that fp32 has a wider bound than that of the same kernels."""
TABLE_BOUND = 5e-3
"""That of embeddings of length 1 by llama.cpp: its gelu is a table in fp16, of the tanh form. Both change a value by
up to 5e-4, in each layer."""
EMBEDDED = 3
EMBEDDED_CHARACTERS = 40
"""Texts whose embeddings are compared, and where they are cut: sentence-transformers truncates long ones."""
GREEDY_TOKENS = 12
CLEAR_LEAD = 1e-3
"""Greedy tokens are compared up to the first whose lead over the second is a smaller fraction of the largest logit."""
LARGEST = 1_000_000_000
"""Parameters of the largest model that is opened a second time; of a larger one only the tokenizer is."""
TIME_LIMIT = 900.0
TALK = [
    {"role": "user", "content": "Where is the mill? 물레방아는 어디에?"},
    {"role": "assistant", "content": "By the river."},
    {"role": "user", "content": "Warum 12?"},
]
READERS = {"hf": ("transformers",), "gguf": ("llama.cpp",), "onnx": ("onnxruntime", "transformers")}
"""The programs that open each format, in order; other formats have none that runs here."""
EMBEDDINGS = "sentence-transformers"
"""Opens a folder of `hf` too, if the model says how its embeddings are pooled."""


def check_with_reader(
    model: Model, folder: Path, kind: str, precision: str, texts: Sequence[str], where: str
) -> list[str]:
    """Raise unless the readers of a format give our ids, outputs and tokens; return what was compared, in words.

    `where` names the export in errors."""
    if model.tokenizer is None:
        return []
    if find_family_file(model.shape.family) is not None:
        return [f"not opened with other programs, which do not know the family {model.shape.family}"]
    has_vectors = kind == "hf" and model.pooling is not None and model.shape.parameters <= LARGEST
    programs = [*READERS.get(kind, ()), *([EMBEDDINGS] if has_vectors else [])]
    try:
        return [_check(model, folder, reader, kind, precision, texts) for reader in programs]
    except TextmillError as error:
        raise TextmillError(f"{where}: not written: {error}") from None


def _check(model: Model, folder: Path, reader: str, kind: str, precision: str, texts: Sequence[str]) -> str:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    special = [str(token) for token in tokenizer.roles.values()]
    texts = [*texts, *(f"a {token}b {token} c" for token in dict.fromkeys(special))]
    if reader == "llama.cpp":  # which leaves it to its caller to compose characters
        texts = [unicodedata.normalize("NFC", text) for text in texts]
        if strips_accents(json.loads(tokenizer.inner.to_str())["normalizer"]):  # llama.cpp strips more than BERT
            texts = [unicodedata.normalize("NFD", text) for text in texts]
            texts = [text for text in texts if all(unicodedata.category(one) != "Mc" for one in text)]
    prompt = tokenizer.encode(texts[0])[: max(1, min(16, model.shape.positions // 2))] or [tokenizer.eos_id]
    is_causal = model.shape.family != "bert"
    opens_net = model.shape.parameters <= LARGEST and not (kind == "onnx" and reader == "transformers")
    embeds = reader == EMBEDDINGS or (reader == "llama.cpp" and not is_causal)
    tokens = min(GREEDY_TOKENS, model.shape.positions - len(prompt)) if is_causal and opens_net else 0
    files = {"hf": folder, "onnx": folder / "model.onnx" if reader == "onnxruntime" else folder}
    request: Tree = {
        "reader": reader,
        "path": str(files.get(kind) or next(folder.glob("*.gguf"))),
        "texts": texts,
        "pairs": [["The mill", "by the river"]] if not is_causal else [],
        "talk": TALK if is_causal and reader != "onnxruntime" and _talk_of(tokenizer) is not None else None,
        "embedded": [text[:EMBEDDED_CHARACTERS] for text in texts[:EMBEDDED]] if embeds and opens_net else [],
        "has_logits": is_causal or has_masked_head(model.shape),
        "model_class": model_class(model.shape) if opens_net else None,
        "prompt": prompt,
        "tokens": tokens,
        "context": model.shape.positions,
    }
    found = _ask(request)
    if missing := found.get("not_installed"):
        return f"not opened with {reader}: {missing} is not installed"
    if message := found.get("error"):
        if tokenizer.has_template and _talk_of(tokenizer) is None:  # llama.cpp renders a template when it opens a file
            return f"not opened with {reader}: {first_line(Exception(message))}"
        raise TextmillError(f"{reader} cannot open it: {first_line(Exception(message))}")
    compared = [
        *_compare_ids(tokenizer, request, found),
        *_compare_outputs(model, tokenizer, request, found, precision),
    ]
    return f"opened with {reader} {found['version']}: {', '.join(compared)} are equal"


def model_class(shape: Any) -> str:
    """The class with which transformers' documentation opens a model of this head."""
    if shape.family != "bert":
        return "AutoModelForCausalLM"
    if head := label_head_of(shape):
        return f"AutoModelFor{TASK_CLASSES[head[0]]}"
    return "AutoModelForMaskedLM" if has_masked_head(shape) else "AutoModel"


def _ask(request: Tree) -> Tree:
    """The answers of a fresh process, which may not look for files on the network."""
    program = Path(__file__).with_name("reader_process.py")
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            [sys.executable, str(program)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            env={**os.environ, **offline, "PYTHONPATH": os.pathsep.join(place for place in sys.path if place)},
        )
    except subprocess.TimeoutExpired:
        raise TextmillError(
            f"{request['reader']} did not open it within {TIME_LIMIT:g} s; skip this check with export.reader=false"
        ) from None
    answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if not answers:
        raise TextmillError(
            f"{request['reader']} ended with code {done.returncode} while it opened it: {done.stderr.strip()[-300:]}"
        )
    found: Tree = json.loads(answers[-1].removeprefix(ANSWER))
    return found


def _compare_ids(tokenizer: TextTokenizer, request: Tree, found: Tree) -> list[str]:
    reader = request["reader"]
    if "ids" not in found:
        return []
    inner = Tokenizer.from_str(tokenizer.inner.to_str())
    inner.encode_special_tokens = bool(tokenizer.settings.get("split_special_tokens"))
    for text, actual in zip(request["texts"], found["ids"], strict=True):
        expected = inner.encode(text).ids
        if reader == "llama.cpp":  # which joins unknown characters between words too
            expected, actual = (join_unknown(ids, tokenizer.unk_id) for ids in (expected, actual))
        if actual != expected:
            raise TextmillError(f"{reader} gives other ids for {text[:40]!r}: {actual[:8]}, ours {expected[:8]}")
    compared = [f"ids of {len(found['ids'])} texts"]
    for pair, (ids, types) in zip(request["pairs"], found.get("pairs", []), strict=False):
        encoded = inner.encode(*pair)
        if ids != encoded.ids or (types or encoded.type_ids) != encoded.type_ids:
            raise TextmillError(f"{reader} gives other ids for the pair {pair}")
        compared.append("a pair")
    if (talk := found.get("talk")) is not None:
        wanted = _talk_of(tokenizer)
        actual = inner.encode(talk, add_special_tokens=False).ids if isinstance(talk, str) else talk
        # llama.cpp adds the begin token itself, to the text of a template.
        begin = [tokenizer.bos_id] if isinstance(talk, str) and tokenizer.adds_bos else []
        if wanted not in (actual, begin + actual):
            raise TextmillError(f"{reader} renders the chat template to other ids: {actual[:12]}, ours {wanted}")
        compared.append("chat turns")
    return compared


def join_unknown(ids: list[int], unknown: int | None) -> list[int]:
    """[5, 0, 0, 7] -> [5, 0, 7], if 0 is the unknown token."""
    pairs = zip([None, *ids], ids, strict=False)
    return [id_ for previous, id_ in pairs if id_ != unknown or previous != unknown]


def strips_accents(normalizer: Tree | None) -> bool:
    """Whether the normalizer of a tokenizer.json is BERT's and removes accents; by default it does with lower case."""
    if not normalizer or normalizer["type"] != "BertNormalizer":
        return False
    return bool(normalizer["lowercase"] if normalizer["strip_accents"] is None else normalizer["strip_accents"])


def _talk_of(tokenizer: TextTokenizer) -> list[int] | None:
    """The conversation as ids; None if there is no template, or it has no such turns."""
    if not tokenizer.has_template:
        return None
    try:
        if tokenizer.chat is not None and tokenizer.turn_tokens is not None:
            return ChatTemplate(tokenizer, tokenizer.turn_tokens, "").render(TALK, add_generation_prompt=True)
        return JinjaTemplate(tokenizer, tokenizer.jinja or "").render(TALK, add_generation_prompt=True)
    except TextmillError:
        return None


def _compare_outputs(model: Model, tokenizer: TextTokenizer, request: Tree, found: Tree, precision: str) -> list[str]:
    reader = request["reader"]
    if missing := found.get("missing"):
        raise TextmillError(f"{reader} finds no weights for {len(missing)} parameters, such as {missing[0]}")
    compared = []
    if (ends := found.get("ends")) is not None:
        named = tokenizer.generation.get("eos_token_id") or tokenizer.model_ids.get("eos_token_id")
        wanted = named if isinstance(named, list) else [model.shape.eos_id if named is None else named]
        if ends != wanted:
            raise TextmillError(f"{reader} ends a text at {ends}, the model at {wanted}")
        compared.append("ends of a text")
    if not (found.get("vectors") or "values" in found or (request["tokens"] and "new" in found)):
        return compared
    net = net_of(model)
    if "values" in found:
        expected = outputs_of(net, torch.tensor([request["prompt"]]), has_logits=request["has_logits"])[0]
        actual = np.array(found["values"], np.float32)
        bound = BOUNDS[precision] * max(1.0, float(np.abs(expected).max()))
        largest = float(np.abs(actual - expected).max()) if actual.shape == expected.shape else np.inf
        if not largest <= bound:
            raise TextmillError(
                f"{reader} computes other outputs: they differ by {largest:.2g}, the bound is {bound:.2g}"
            )
        compared.append(f"outputs (difference {largest:.2g})")
    if precision in BOUNDS and (vectors := found.get("vectors")):
        unit = reader == "llama.cpp" or bool(model.pooling and model.pooling.normalize)
        ids_by_text = [tokenizer.inner.encode(text).ids for text in request["embedded"]]
        expected = np.array([_embedding_of(net, ids, model.pooling, unit=unit) for ids in ids_by_text])
        largest = float(np.abs(np.array(vectors) - expected).max())
        scale = max(1.0, float(np.abs(expected).max()))
        bound = BOUNDS[precision] * scale if reader == EMBEDDINGS else max(BOUNDS[precision], TABLE_BOUND)
        if not largest <= bound:
            raise TextmillError(
                f"{reader} computes other embeddings: they differ by {largest:.2g}, the bound is {bound:.2g}"
            )
        compared.append(f"embeddings (difference {largest:.2g})")
    if request["tokens"] and precision == "fp32" and "new" in found:
        expected_new = _greedy_tokens(net, request["prompt"], request["tokens"], tokenizer.end_ids)
        actual_new = [id_ for id_ in found["new"] if id_ not in tokenizer.end_ids]
        if actual_new[: len(expected_new)] != expected_new:
            raise TextmillError(f"{reader} continues with {actual_new[:8]}, the model with {expected_new[:8]}")
        compared.append(f"{len(expected_new)} greedy tokens")
    return compared


def net_of(model: Model) -> BaseNet:
    """The net of a model on the CPU."""
    net = new_net(model.shape, torch.device("cpu"))
    fill(net, model.weights.items(), "the model")
    return net.eval()


def outputs_of(net: BaseNet, ids_NT: Tensor, *, has_logits: bool) -> Array:
    """The logits of texts or, of an encoder that predicts no tokens, its states."""
    with torch.no_grad():
        states = net(ids_NT)
        outputs: Array = (net.logits(states) if has_logits else states).float().numpy()
    return outputs


def _embedding_of(net: BaseNet, ids: list[int], pooling: Pooling | None, *, unit: bool) -> Array:
    """The embedding of a text, pooled as the model says; `unit`: of length 1."""
    states = outputs_of(net, torch.tensor([ids]), has_logits=False)[0]
    pooled: Array = states[0] if pooling and pooling.kind == "cls" else states.mean(0)
    return pooled / np.linalg.norm(pooled) if unit else pooled


def _greedy_tokens(net: BaseNet, prompt: list[int], count: int, end_ids: Collection[int]) -> list[int]:
    """The likeliest tokens up to an end of text, or to the first that does not clearly lead."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = net.logits(net(torch.tensor([ids])))[0, -1].float()
            first, second = logits.topk(2).values.tolist()
            token = int(logits.argmax())
            if token in end_ids or first - second < CLEAR_LEAD * max(1.0, float(logits.abs().max())):
                break
            ids.append(token)
    return ids[len(prompt) :]
