"""BERT against transformers: both heads' logits with padding, segments and packing; files in both directions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.weights import noisy_weights
from textmill.config import SIZES, LoraConfig, ModelConfig, ShapeConfig
from textmill.errors import TextmillError
from textmill.models import initial_weights, open_family, read_shape
from textmill.models.base_torch import BaseNet
from textmill.models.bert.family import Shape
from textmill.models.lora import adapter_weights, peft_config_of
from textmill.models.nets_torch import fill, new_net, open_net

CPU = torch.device("cpu")
SHAPES = [
    ("tiny", {}, 500),
    ("tiny", {"layers": 3, "heads": 5, "width": 80, "inner": 200, "positions": 33, "activation": "gelu_new"}, 129),
    ("megatron-345m", {"layers": 2, "heads": 4, "width": 64, "positions": 40}, 300),
    ("mini", {"layers": 1, "positions": 24, "activation": "relu", "norm": "pre"}, 1001),
]


def shape_of(size: str, numbers: dict[str, Any], vocab: int) -> Shape:
    config = ModelConfig(family="bert", size=size, shape=ShapeConfig(**numbers))
    shape = open_family("bert").shape_of(config, vocab=vocab, eos_id=3)
    assert isinstance(shape, Shape)
    return shape


def filled(shape: Shape) -> BaseNet:
    net = new_net(shape, CPU)
    fill(net, noisy_weights(shape), "test")
    return net


def theirs_of(shape: Shape) -> Any:
    """Transformers' net with the same weights."""
    from transformers import BertConfig, BertForPreTraining, MegatronBertConfig, MegatronBertForPreTraining

    kinds: Any = {"post": (BertConfig, BertForPreTraining), "pre": (MegatronBertConfig, MegatronBertForPreTraining)}
    config, net = kinds[shape.norm]
    theirs = net(config(**open_family("bert").hf_config_of(shape))).eval()
    named = {name: torch.from_numpy(values) for name, values in noisy_weights(shape)}
    loaded = theirs.load_state_dict(named, strict=False)
    assert sorted(loaded.missing_keys) == ["cls.predictions.decoder.bias", "cls.predictions.decoder.weight"]
    assert loaded.unexpected_keys == []
    theirs.tie_weights()
    return theirs


def packed(shape: Shape, lengths: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Random ids, segments and documents of rows with samples of these lengths, padded to all positions."""
    dice = torch.Generator().manual_seed(1)
    ids = torch.randint(0, shape.vocab, (len(lengths), shape.positions), generator=dice)
    types, documents = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, counts in enumerate(lengths):
        start = 0
        for number, count in enumerate(counts, 1):
            documents[row, start : start + count] = number
            types[row, start + count // 3 : start + count] = 1
            start += count
    return ids, types, documents


@pytest.mark.parametrize(("size", "numbers", "vocab"), SHAPES)
def test_logits_equal_transformers(size: str, numbers: dict[str, Any], vocab: int) -> None:
    """Each packed sample has the logits that transformers gives it alone, and padded ones those of a padded row."""
    shape = shape_of(size, numbers, vocab)
    net, theirs, most = filled(shape), theirs_of(shape), shape.positions
    lengths = [[most], [most - 5], [7, 9, 5], [3, most - 3]]
    ids, types, documents = packed(shape, lengths)
    with torch.no_grad():
        x_NTE = net(ids, documents_NT=documents, types_NT=types)
        logits, pairs = net.logits(x_NTE), net.pair_logits(x_NTE.flatten(0, 1)).view(*ids.shape, 2)
        for row, counts in enumerate(lengths):
            start = 0
            for count in counts:
                part = slice(start, start + count)
                wanted = theirs(ids[row : row + 1, part], token_type_ids=types[row : row + 1, part])
                assert (logits[row, part] - wanted.prediction_logits[0]).abs().max() < 1e-5
                assert (pairs[row, start] - wanted.seq_relationship_logits[0]).abs().max() < 1e-5
                start += count
        padded = theirs(ids[1:2], token_type_ids=types[1:2], attention_mask=(documents[1:2] > 0).long())
        assert (logits[1, : most - 5] - padded.prediction_logits[0, : most - 5]).abs().max() < 1e-5
        whole = net.logits(net(ids[:1], types_NT=types[:1]))
        assert (whole - logits[:1]).abs().max() < 1e-5, "one sample without a mask"
    assert shape.parameters == sum(parameter.numel() for parameter in theirs.parameters())


def test_pre_layer_norm_equals_the_formula() -> None:
    """Written out with matrices, one head at a time, in fp64."""
    shape = shape_of("tiny", {"layers": 2, "heads": 2, "width": 16, "positions": 12, "norm": "pre"}, 50)
    net, named = filled(shape), {name: torch.from_numpy(values).double() for name, values in noisy_weights(shape)}
    ids, types, _ = packed(shape, [[12]])

    def affine(name: str, x: Tensor) -> Tensor:
        return x @ named[f"{name}.weight"].T + named[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt()
        return scaled * named[f"{name}.weight"] + named[f"{name}.bias"]

    x = named["bert.embeddings.word_embeddings.weight"][ids[0]]
    x = (
        x
        + named["bert.embeddings.position_embeddings.weight"]
        + named["bert.embeddings.token_type_embeddings.weight"][types[0]]
    )
    for layer in range(2):
        h = f"bert.encoder.layer.{layer}"
        y = norm(f"{h}.attention.ln", x)
        q, k, v = (affine(f"{h}.attention.self.{part}", y) for part in ("query", "key", "value"))
        heads = [slice(0, 8), slice(8, 16)]
        mixed = [torch.softmax(q[:, part] @ k[:, part].T / 8**0.5, -1) @ v[:, part] for part in heads]
        x = x + affine(f"{h}.attention.output.dense", torch.cat(mixed, 1))
        inner = affine(f"{h}.intermediate.dense", norm(f"{h}.ln", x))
        x = x + affine(f"{h}.output.dense", inner * 0.5 * (1 + torch.erf(inner / 2**0.5)))
    x = norm("bert.encoder.ln", x)
    y = affine("cls.predictions.transform.dense", x)
    y = norm("cls.predictions.transform.LayerNorm", F.gelu(y))
    wanted = y @ named["bert.embeddings.word_embeddings.weight"].T + named["cls.predictions.bias"]
    pair = affine("cls.seq_relationship", torch.tanh(affine("bert.pooler.dense", x[0])))
    with torch.no_grad():
        states = net(ids, types_NT=types)
        assert (net.logits(states)[0] - wanted).abs().max() < 1e-5
        assert (net.pair_logits(states[0, :1])[0] - pair).abs().max() < 1e-5


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("kind", ["PreTraining", "MaskedLM"])
def test_transformers_folders_open(norm: str, kind: str, tmp_path: Path) -> None:
    import transformers

    shape = shape_of("tiny", {"layers": 1, "width": 32, "positions": 16, "norm": norm}, 90)
    theirs = theirs_of(shape)
    if kind == "MaskedLM":
        prefix = "MegatronBert" if norm == "pre" else "Bert"
        masked = getattr(transformers, f"{prefix}ForMaskedLM")(theirs.config).eval()
        masked.load_state_dict(theirs.state_dict(), strict=False)
        theirs = masked
    theirs.save_pretrained(tmp_path)
    found = read_shape(tmp_path)
    assert found == replace(shape, pair_head=kind == "PreTraining", pooler=kind == "PreTraining")
    ids, types, _ = packed(shape, [[16]])
    net = open_net(tmp_path, CPU)
    with torch.no_grad():
        wanted = theirs(ids, token_type_ids=types)
        logits = wanted.prediction_logits if kind == "PreTraining" else wanted.logits
        assert (net.logits(net(ids, types_NT=types)) - logits).abs().max() < 1e-5
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    assert read_shape(tmp_path) == found, "the weights say which heads there are"


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("pooler", [True, False])
def test_plain_encoders_open(norm: str, pooler: bool, tmp_path: Path) -> None:
    """Transformers' BertModel, without a head for masked tokens; its hidden states are the same."""
    import transformers

    shape = shape_of("tiny", {"layers": 1, "width": 32, "positions": 16, "norm": norm}, 90)
    prefix = "MegatronBert" if norm == "pre" else "Bert"
    theirs = getattr(transformers, f"{prefix}Model")(theirs_of(shape).config, add_pooling_layer=pooler).eval()
    theirs.save_pretrained(tmp_path)
    found = read_shape(tmp_path)
    assert found == replace(shape, masked_head=False, pair_head=False, pooler=pooler)
    assert found.parameters == theirs.num_parameters()
    assert open_family("bert").hf_config_of(found)["architectures"] == [f"{prefix}Model"]
    ids, types, _ = packed(shape, [[16]])
    with torch.no_grad():
        states = theirs(ids, token_type_ids=types).last_hidden_state
        assert (open_net(tmp_path, CPU)(ids, types_NT=types) - states).abs().max() < 1e-5


def test_a_pooler_without_a_pair_head_is_left_out(tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import load_file, save_file

    shape = shape_of("tiny", {"layers": 1, "width": 32, "positions": 16}, 90)
    theirs = theirs_of(shape)
    theirs.save_pretrained(tmp_path)
    named = {key: one for key, one in load_file(tmp_path / "model.safetensors").items() if "seq_rel" not in key}
    save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    assert any("pooler" in name for name in named)
    assert read_shape(tmp_path) == replace(shape, pair_head=False, pooler=False)
    ids, types, _ = packed(shape, [[16]])
    net, masked = open_net(tmp_path, CPU), transformers.BertForMaskedLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        wanted = masked(ids, token_type_ids=types).logits
        assert (net.logits(net(ids, types_NT=types)) - wanted).abs().max() < 1e-5


def test_old_names_and_buffers_are_known() -> None:
    shape = shape_of("tiny", {"layers": 1, "width": 32, "positions": 16}, 90)
    named = dict(noisy_weights(shape))
    old = {
        name.removeprefix("bert.")
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): values
        for name, values in named.items()
    }
    old |= {
        "embeddings.position_ids": np.zeros((1, 16), np.float32),
        "cls.predictions.decoder.weight": np.zeros((90, 32), np.float32),
    }
    back = dict(open_family("bert").known_weights(old.items()))
    assert back.keys() == named.keys()
    assert all(np.array_equal(back[name], named[name]) for name in named)


def test_deep_init_makes_residual_branches_smaller() -> None:
    numbers = {"layers": 8, "width": 64, "positions": 16}
    for deep, std in ((False, 0.02), (True, 0.02 / 4)):
        named = dict(initial_weights(shape_of("tiny", {**numbers, "deep_init": deep}, 90), 1))
        for name in ("attention.output.dense", "output.dense"):
            assert named[f"bert.encoder.layer.1.{name}.weight"].std() == pytest.approx(std, rel=0.03)
        assert named["bert.encoder.layer.1.intermediate.dense.weight"].std() == pytest.approx(0.02, rel=0.03)
        assert not named["cls.predictions.bias"].any()


# Parameters of Google's models with 30,522 tokens, as transformers counts them with both heads.
@pytest.mark.parametrize(("size", "parameters"), [("base", 110106428), ("large", 336226108)])
def test_named_sizes_are_berts(size: str, parameters: int) -> None:
    assert shape_of(size, {}, 30522).parameters == parameters


def test_every_named_size_has_a_shape() -> None:
    for size in SIZES["bert"]:
        shape = shape_of(size, {}, 1000)
        assert shape.width % shape.heads == 0
        assert shape.norm == ("pre" if size.startswith("megatron") else "post")


def test_unsupported_configs_are_refused(tmp_path: Path) -> None:
    family = open_family("bert")
    hf = family.hf_config_of(shape_of("tiny", {}, 300))
    for key, value in (
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("hidden_act", "mish"),
        ("num_hidden_layers", 0),
        ("hidden_dropout_prob", 2),
        ("type_vocab_size", "two"),
        ("num_attention_heads", 3),
    ):
        with pytest.raises(TextmillError, match=f"{value} heads" if key == "num_attention_heads" else f"{key} is "):
            family.shape_of_hf({**hf, key: value}, "config.json")
    with pytest.raises(TextmillError, match=r"model\.shape\.norm: the family gpt2 does not have it"):
        open_family("gpt2").shape_of(ModelConfig(size="nano", shape=ShapeConfig(norm="pre")), vocab=90, eos_id=0)


def test_flops_count_the_head_for_labelled_tokens() -> None:
    """Of base with 512 tokens: 6 for each weight of the blocks, 12 for attention, the heads at 15% of the tokens."""
    shape, width, layers = shape_of("base", {}, 30522), 768, 12
    blocks, attention = layers * 12 * width**2, layers * width * 512
    wanted = 6 * blocks + 12 * attention + 0.15 * 6 * (30522 * width + width**2)
    assert shape.flops_per_token(512) == pytest.approx(wanted, rel=2e-3), "norms and biases are few"
    adapters = adapter_weights(shape, LoraConfig(rank=8))
    without = wanted - 2 * blocks - 0.15 * 2 * 30522 * width + 6 * sum(one.size for one in adapters)
    assert shape.flops_per_token(512, iter(adapters)) == pytest.approx(without, rel=2e-3)


def test_an_adapter_opens_in_peft(tmp_path: Path) -> None:
    """Names are complete, since matrices outside of the blocks have the same last names."""
    peft = pytest.importorskip("peft", reason="needs peft")
    shape = shape_of("tiny", {"layers": 2, "width": 32, "positions": 16}, 90)
    theirs, lora = theirs_of(shape), LoraConfig(rank=4)
    config = peft.LoraConfig(**peft_config_of(shape, lora, "base"))
    adapted = peft.get_peft_model(theirs, config)
    names = {name for name, _ in adapted.named_parameters() if ".lora_A." in name}
    wanted = {
        f"base_model.model.{one.stem.removesuffix('.lora_A')}"
        for one in adapter_weights(shape, lora)
        if ".lora_A" in one.name
    }
    assert {name.partition(".lora_A.")[0] for name in names} == wanted
    assert len(names) == 2 * 6
