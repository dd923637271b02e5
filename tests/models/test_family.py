"""GPT-2: transformers' logits, exact layouts, initial weights from seed and name only.

The contract of all families is tests/engines/test_contract.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.weights import noisy_weights, shape_of
from textmill.config import SIZES, ModelConfig, ShapeConfig
from textmill.errors import TextmillError
from textmill.models import initial_weights, open_family, read_shape, to_memory
from textmill.models.nets_torch import fill, new_net

CPU = torch.device("cpu")
SHAPES = [
    ("nano", {}, 500),
    ("nano", {"layers": 3, "heads": 5, "width": 80, "inner": 200, "positions": 33}, 129),
    ("dsgpt2-112m-half", {"layers": 2, "width": 96}, 700),
    ("micro", {"layers": 3, "positions": 40, "activation": "gelu"}, 1001),
    ("nano", {"layers": 1, "positions": 24, "activation": "relu"}, 300),
    ("nano", {"layers": 1, "positions": 24, "activation": "relu2"}, 300),
    ("nano", {"layers": 1, "positions": 24, "activation": "silu"}, 300),
    ("nano", {"layers": 1, "positions": 24, "activation": "tanh"}, 300),
    ("nano", {"layers": 1, "positions": 24, "untied": True}, 300),
    ("megatron-345m", {"layers": 1, "heads": 8, "width": 64, "positions": 64}, 256),
]


@pytest.mark.parametrize(("size", "numbers", "vocab"), SHAPES)
def test_logits_equal_transformers(size: str, numbers: dict[str, Any], vocab: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = shape_of(size, numbers, vocab)
    named = noisy_weights(shape)
    theirs = GPT2LMHeadModel(GPT2Config(**open_family("gpt2").hf_config_of(shape))).eval()
    loaded = theirs.load_state_dict({name: torch.from_numpy(values) for name, values in named}, strict=False)
    assert loaded.missing_keys == ([] if numbers.get("untied") else ["lm_head.weight"])
    assert loaded.unexpected_keys == []
    theirs.tie_weights()
    net = new_net(shape, CPU)
    fill(net, named, "test")
    ids = torch.randint(0, vocab, (3, shape.positions), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, got = theirs(ids).logits, net.logits(net(ids))
    assert got.shape == wanted.shape
    assert (got - wanted).abs().max() < 1e-5
    assert shape.parameters == sum(parameter.numel() for parameter in theirs.parameters())


def test_padding_rows_do_not_change_logits() -> None:
    shape = shape_of("nano", {"layers": 1}, 130)
    assert shape.padded_vocab == 256
    net = new_net(shape, CPU)
    fill(net, noisy_weights(shape), "test")
    ids = torch.tensor([[1, 2, 3]])
    loss = torch.logsumexp(net.logits(net(ids)), -1).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = dict(net.named_parameters())["wte.weight"].grad
    assert gradient is not None
    assert gradient[130:].abs().max() == 0


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    shape = shape_of("nano", {}, 300)
    one, two = dict(initial_weights(shape, 1)), dict(initial_weights(shape, 2))
    deeper = dict(initial_weights(shape_of("nano", {"layers": 5}, 300), 1))
    name = "transformer.h.1.mlp.c_fc.weight"
    assert np.array_equal(one[name], deeper[name])
    assert not np.array_equal(one[name], two[name])
    assert one[name].std() == pytest.approx(0.02, rel=0.02)
    assert one["transformer.h.1.mlp.c_proj.weight"].std() == pytest.approx(0.02 / np.sqrt(4), rel=0.02), (
        "residual branches start smaller"
    )
    assert (one["transformer.ln_f.weight"] == 1).all()
    assert (one["transformer.ln_f.bias"] == 0).all()


# Parameters that others publish for these shapes with GPT-2's vocabulary.
@pytest.mark.parametrize(
    ("size", "parameters"), [("small", 124439808), ("medium", 354823168), ("large", 774030080), ("xl", 1557611200)]
)
def test_named_sizes_are_gpt2s(size: str, parameters: int) -> None:
    assert shape_of(size, {}, 50257).parameters == parameters


def test_every_named_size_has_a_shape() -> None:
    for size in SIZES["gpt2"]:
        assert shape_of(size, {}, 1000).width % shape_of(size, {}, 1000).heads == 0


def test_positions_follow_a_shorter_length() -> None:
    family = open_family("gpt2")
    assert family.shape_of(ModelConfig(size="nano"), vocab=300, eos_id=0, length=64).positions == 64
    config = ModelConfig(size="nano", shape=ShapeConfig(positions=200))
    assert family.shape_of(config, vocab=300, eos_id=0, length=64).positions == 200


def test_weights_that_do_not_fit_are_named() -> None:
    shape = shape_of("nano", {"layers": 1}, 300)
    net, named = new_net(shape, CPU), noisy_weights(shape)
    with pytest.raises(TextmillError, match=r"lacks 1 weights, such as 'transformer\.ln_f\.bias'"):
        fill(net, named[:-1], "here")
    with pytest.raises(TextmillError, match=r"'transformer\.wte\.weight' is \[299, 96\]; this model's is \[300, 96\]"):
        fill(net, [(named[0][0], named[0][1][:-1])], "here")
    with pytest.raises(TextmillError, match=r"has 'transformer\.h\.9\.ln_1\.weight'"):
        fill(net, [("h.9.ln_1.weight", named[2][1])], "here")


def test_unsupported_configs_are_refused(tmp_path: Path) -> None:
    family = open_family("gpt2")
    hf = family.hf_config_of(shape_of("nano", {}, 300))
    with pytest.raises(TextmillError, match="scale_attn_by_inverse_layer_idx is True"):
        family.shape_of_hf({**hf, "scale_attn_by_inverse_layer_idx": True}, "config.json")
    with pytest.raises(TextmillError, match="activation_function is 'mish'"):
        family.shape_of_hf({**hf, "activation_function": "mish"}, "config.json")
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(TextmillError, match="model_type is 'mamba'"):
        read_shape(tmp_path)


@pytest.mark.parametrize("activation", ["gelu", "relu", "relu2", "silu", "tanh"])
def test_the_jax_net_has_the_same_activations(activation: str) -> None:
    jax = pytest.importorskip("jax", reason="needs the extra jax")
    from textmill.models.gpt2 import net_jax

    shape = shape_of("nano", {"layers": 1, "positions": 24, "activation": activation}, 300)
    named = noisy_weights(shape)
    net = new_net(shape, CPU)
    fill(net, named, "test")
    ids = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    known = {weight.name: weight for weight in shape.weights()}
    weights = {name: jax.numpy.asarray(to_memory(known[name], values)) for name, values in named}
    found = net_jax.states(weights, shape, net_jax.NetOptions(jax.numpy.float32), jax.numpy.asarray(ids.numpy()))
    with torch.no_grad():
        assert (torch.tensor(found.tolist()) - net(ids)).abs().max() < 1e-4
