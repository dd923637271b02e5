"""BERT without a framework: its shape, its weights under transformers' names, its config.json.

With LayerNorms after each residual sum (post, as in BERT) a checkpoint is transformers' `bert`; with LayerNorms before
attention and MLP (pre, as in Megatron-LM) it is `megatron-bert`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.config import ModelConfig, shape_numbers
from textmill.errors import TextmillError
from textmill.models.family import Shape as BaseShape
from textmill.models.hf_config import WHOLE_NUMBERS, HfConfig, read_config_file
from textmill.models.weights import Weight, count_flops

Array = NDArray[np.float32]

NAME = "bert"
OBJECTIVE = "masked"
BATCH_FIELDS = frozenset({"documents", "types", "pair_labels"})
PAIR_CLASSES = 2
HEADS = ("bert.pooler", "cls.", "classifier.", "qa_outputs.")
"""How the names of weights start that are multiplied with labelled tokens only."""
SEQUENCES = "sequence-classification"
WORDS = "token-classification"
ANSWERS = "question-answering"
TASK_CLASSES = {SEQUENCES: "SequenceClassification", WORDS: "TokenClassification", ANSWERS: "QuestionAnswering"}
"""The end of transformers' class for each task with labels."""
PREFIXES = ("bert.", *HEADS)
"""How all names of weights start; files of a bare encoder lack "bert."."""
LABELLED = 0.15
"""The fraction of tokens that get a label, and so logits, for the count of FLOPs."""
MODEL_TYPES = {"post": "bert", "pre": "megatron-bert"}
"""`model_type` of config.json by the place of the LayerNorms."""
DROPOUTS = {"hidden_dropout_prob": "dropout", "attention_probs_dropout_prob": "attention_dropout"}
"""Dropout rates, by transformers' names and ours."""
MUST_BE = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Shape(BaseShape):
    """Every number that the net is built from."""

    types: int = 2
    """Segments that a position can belong to."""
    norm: str = "post"
    """Where the LayerNorms are: post or pre."""
    masked_head: bool = True
    """Whether a head predicts masked tokens; a plain encoder has none."""
    pair_head: bool = True
    """Whether a second head predicts a class for each sentence pair."""
    pooler: bool = True
    """Whether there is a matrix for the first token of a sample; the pair head needs it."""
    deep_init: bool = False
    """Whether the last matrix of each residual branch starts smaller, by the root of twice the layers."""
    task: str = ""
    """The task of a finetuned head, such as sequence-classification; empty: the heads of pretraining."""
    labels: tuple[str, ...] = ()
    """The names of the classes that a finetuned head predicts; none for answers, whose labels are positions."""
    activation: str = "gelu"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    epsilon: float = 1e-12
    family: str = NAME

    def weights(self) -> list[Weight]:
        """Every weight, under transformers' name."""
        width = self.width
        layers = self.layers
        rows: Any = {"by_token": True, "padded_rows": self.padded_vocab, "split": 0}
        tables = [
            Weight("bert.embeddings.word_embeddings.weight", (self.vocab, width), 0.02, **rows),
            Weight("bert.embeddings.position_embeddings.weight", (self.positions, width), 0.02, by_position=True),
            Weight("bert.embeddings.token_type_embeddings.weight", (self.types, width), 0.02),
        ]
        weights = [replace(table, decay=True, depth=layers + 1) for table in tables]
        if self.norm == "post":
            weights += [replace(one, depth=layers + 1) for one in _norm("bert.embeddings.LayerNorm", width)]
        for layer in range(layers):
            weights += [replace(weight, depth=layers - layer) for weight in _block(self, layer)]
        if self.norm == "pre":
            weights += _norm("bert.encoder.ln", width)
        # Tensor-parallel ranks divide the vocabulary after the heads' other matrices, so each computes a part of their
        # gradient; of a finetuned head's loss, each has a part.
        heads = []
        if self.masked_head:
            heads += _linear("cls.predictions.transform.dense", width, width)
            heads += _norm("cls.predictions.transform.LayerNorm", width)
        heads += _linear("bert.pooler.dense", width, width) if self.pooler else []
        heads += _linear("cls.seq_relationship", width, PAIR_CLASSES) if self.pair_head else []
        heads += _linear("classifier", width, len(self.labels)) if self.labels else []
        heads += _linear("qa_outputs", width, 2) if self.task == ANSWERS else []
        weights += [replace(weight, partial_gradient=True, head=True) for weight in heads]
        if self.masked_head:
            weights.append(Weight("cls.predictions.bias", (self.vocab,), head=True, **rows))
        return [replace(weight, parameter=weight.name.removeprefix("bert.")) for weight in weights]

    def flops_per_token(self, length: int, trained: Iterable[Weight] | None = None) -> float:
        """FLOPs of the forward and backward pass for one token; the head is computed for labelled tokens only."""
        every = self.weights()
        trained = every if trained is None else list(trained)
        weights, rest = ([one for one in some if not one.name.startswith(HEADS)] for some in (every, trained))
        table = weights[0]
        flops = count_flops(weights, self.layers, self.width, length, rest or trained)
        # The matrix before the head, and the head, which count_flops counts for every token.
        head = table.size * (4.0 + 2.0 * any(one.name == table.name for one in trained))
        labelled = 0.0 if self.task else LABELLED
        return flops - (1 - labelled) * head + labelled * 6 * self.width**2


def shape_of(config: ModelConfig, *, vocab: int, eos_id: int, length: int | None = None) -> Shape:
    """The shape that the `model` section describes; `length` limits positions unless `model.shape.positions` is set."""
    if isinstance(config.shape, str):
        return replace(shape_of_hf(*read_config_file(config.shape)), vocab=vocab, eos_id=eos_id)
    numbers = dict(shape_numbers(config))
    if length and config.shape.positions is None:
        numbers["positions"] = length
    numbers.setdefault("inner", 4 * numbers["width"])
    return Shape(vocab=vocab, eos_id=eos_id, pooler=numbers["pair_head"], **numbers)


def shape_of_hf(hf: dict[str, Any], where: str) -> Shape:
    """The shape of a transformers config.json; an unsupported setting is an error that names it."""
    config = HfConfig(hf, where, "BERT")
    numbers = {**dict.fromkeys(WHOLE_NUMBERS), "type_vocab_size": 2}
    config.check(MUST_BE, numbers, (*DROPOUTS, "layer_norm_eps"), "num_attention_heads", "hidden_size")
    end = hf.get("eos_token_id")
    names = [name for name in hf.get("architectures") or () if isinstance(name, str)]
    plain, masked = (any(name.endswith(kind) for name in names) for kind in ("BertModel", "MaskedLM"))
    task = next((task for task, kind in TASK_CLASSES.items() if any(name.endswith(kind) for name in names)), "")
    tokens = not plain and not task
    return Shape(
        eos_id=end if type(end) is int else 0,
        types=hf.get("type_vocab_size", 2),
        activation=config.activation("hidden_act", "gelu"),
        norm=next((norm for norm, kind in MODEL_TYPES.items() if kind == hf.get("model_type")), "post"),
        masked_head=tokens,
        pair_head=tokens and not masked,
        pooler=task == SEQUENCES if task else not masked,
        task=task,
        labels=_labels_of(hf, where) if task in (SEQUENCES, WORDS) else (),
        epsilon=hf.get("layer_norm_eps", 1e-12),
        **{ours: hf[key] for key, ours in WHOLE_NUMBERS.items()},
        **{ours: hf.get(key, 0.1) for key, ours in DROPOUTS.items()},
    )


def _labels_of(hf: dict[str, Any], where: str) -> tuple[str, ...]:
    """The names in id2label, by their numbers; transformers' default is two labels."""
    names = hf.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})
    known = names if isinstance(names, dict) else {}
    found = tuple(known.get(str(number)) for number in range(len(known)))
    if not found or not all(isinstance(name, str) for name in found):
        raise TextmillError(f"{where}: id2label is {names!r}; it needs a name for each number from 0 on")
    return found  # type: ignore[return-value]


def shape_with_labels(shape: Shape, task: str, labels: Iterable[str]) -> Shape:
    """The same encoder with a head for this task, in place of the heads that it has."""
    return replace(shape, masked_head=False, pair_head=False, pooler=task == SEQUENCES, task=task, labels=tuple(labels))


def shape_with_weights(shape: Shape, names: Iterable[str]) -> Shape:
    """The shape with the heads that a file with these weights has; config.json often names another class."""
    ends = ("predictions.transform.dense.weight", "seq_relationship.weight", "pooler.dense.weight")
    found = list(names)
    if shape.task and any(name.startswith(("classifier.", "qa_outputs.")) for name in found):
        return shape_with_labels(shape, shape.task, shape.labels)
    masked, pairs, pooler = (any(name.endswith(end) for name in found) for end in ends)
    pooler = pooler and (pairs or not masked)
    return replace(shape, masked_head=masked, pair_head=pairs, pooler=pooler, task="", labels=())


def unneeded_weights(shape: Shape) -> frozenset[str]:
    """Weights that a file may have and a net of this shape does not use: a pooler without a head after it; with a
    finetuned head, all other heads."""
    every = {f"bert.pooler.dense.{part}" for part in ("weight", "bias")}
    if shape.task:
        heads = replace(shape, task="", labels=(), masked_head=True, pair_head=True, pooler=True)
        every |= {weight.name for weight in heads.weights() if weight.head}
        every |= {f"{head}.{part}" for head in ("classifier", "qa_outputs") for part in ("weight", "bias")}
    return frozenset(every - {weight.name for weight in shape.weights()})


def hf_config_of(shape: Shape) -> dict[str, Any]:
    """The config.json with which transformers opens the checkpoint."""
    kind = "ForPreTraining" if shape.pair_head else "ForMaskedLM" if shape.masked_head else "Model"
    kind = f"For{TASK_CLASSES[shape.task]}" if shape.task else kind
    kind = ("MegatronBert" if shape.norm == "pre" else "Bert") + kind
    numbers = {key: getattr(shape, ours) for key, ours in (WHOLE_NUMBERS | DROPOUTS).items()}
    return {
        "architectures": [kind],
        "model_type": MODEL_TYPES[shape.norm],
        "dtype": "float32",
        **numbers,
        "type_vocab_size": shape.types,
        "hidden_act": shape.activation,
        "layer_norm_eps": shape.epsilon,
        "initializer_range": 0.02,
        "pad_token_id": None,
        "eos_token_id": shape.eos_id,
        "tie_word_embeddings": True,
        **(
            {
                "id2label": {str(number): name for number, name in enumerate(shape.labels)},
                "label2id": {name: number for number, name in enumerate(shape.labels)},
            }
            if shape.labels
            else {}
        ),
    }


def _block(shape: Shape, layer: int) -> list[Weight]:
    width = shape.width
    name = f"bert.encoder.layer.{layer}"
    residual = 0.02 / math.sqrt(2 * shape.layers) if shape.deep_init else 0.02
    pre = shape.norm == "pre"
    flags: Any = {"muon": True, "lora": True}
    attention = [
        *(_norm(f"{name}.attention.ln", width) if pre else []),
        *(
            one
            for part in ("query", "key", "value")
            for one in _linear(f"{name}.attention.self.{part}", width, width, split=0, **flags)
        ),
        *_linear(f"{name}.attention.output.dense", width, width, residual, split=1, **flags),
        *([] if pre else _norm(f"{name}.attention.output.LayerNorm", width)),
    ]
    mlp = [
        *(_norm(f"{name}.ln", width) if pre else []),
        *_linear(f"{name}.intermediate.dense", width, shape.inner, split=0, **flags),
        *_linear(f"{name}.output.dense", shape.inner, width, residual, split=1, **flags),
        *([] if pre else _norm(f"{name}.output.LayerNorm", width)),
    ]
    return attention + mlp


def _norm(name: str, width: int) -> list[Weight]:
    return [Weight(f"{name}.weight", (width,), ones=True), Weight(f"{name}.bias", (width,))]


def _linear(
    name: str, inputs: int, outputs: int, std: float = 0.02, split: int | None = None, **flags: Any
) -> list[Weight]:
    # A row-parallel matrix's bias is added after the sum over ranks, so every rank has all of it.
    bias = Weight(f"{name}.bias", (outputs,), split=0 if split == 0 else None)
    return [Weight(f"{name}.weight", (outputs, inputs), std, decay=True, split=split, **flags), bias]


def known_weights(named: Iterable[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
    """Weights of any BERT file under transformers' names: adds a missing prefix, drops buffers and the tied head."""
    for name, values in named:
        if name.endswith("position_ids") or name.startswith("cls.predictions.decoder."):
            continue
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        yield (name if name.startswith(PREFIXES) else f"bert.{name}"), values


def small_shape(shape: Shape, tensor: int) -> dict[str, Any]:
    """A tiny net of the same kind, with the larger of the two dropout rates."""
    heads = 2 * tensor
    head_width = 8
    width = heads * head_width
    return {
        "layers": 2,
        "heads": heads,
        "width": width,
        "inner": 4 * width,
        "activation": shape.activation,
        "norm": shape.norm,
        "pair_head": shape.pair_head,
        "dropout": max(shape.dropout, shape.attention_dropout),
    }
