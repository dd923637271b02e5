"""Llama, Qwen2 and Qwen3: transformers' logits with every scaling, far positions, padding and packed documents."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.weights import noisy_weights
from textmill.config import SIZES, ModelConfig, TrainConfig
from textmill.engines.memory import saved_bytes
from textmill.errors import TextmillError
from textmill.models import open_family, to_memory
from textmill.models.base_torch import BaseNet, Context
from textmill.models.decode_torch import NetSlots
from textmill.models.nets_torch import fill, new_net
from textmill.models.parameter_groups import rules_of

CPU = torch.device("cpu")
FAMILY = open_family("llama")
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FAR = {"max_position_embeddings": 9000, "num_hidden_layers": 1}
"""Far positions show rounding errors of rates that near ones hide."""
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "one head of keys for each of queries": {"num_key_value_heads": None},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 16},
    "squared relu": {"hidden_act": "relu2"},
    "far": {**FAR, "rope_theta": 1e6},
    "linear": {**FAR, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3": {**FAR, "rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 2000}},
    "llama3 in a new config": {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    "yarn": {**FAR, "rope_scaling": {**YARN, "original_max_position_embeddings": 2000}},
    "yarn with options": {
        "rope_scaling": {
            **YARN,
            "beta_fast": 16,
            "beta_slow": 2,
            "truncate": False,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
        }
    },
    "yarn's attention": {"rope_scaling": {**YARN, "attention_factor": 0.8}},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6},
    "qwen2 with yarn": {"model_type": "qwen2", "rope_scaling": YARN, "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3 with biases": {"model_type": "qwen3", "head_dim": 8, "attention_bias": True},
}


def opened(changes: dict[str, Any]) -> tuple[Any, BaseNet, Any]:
    """Our net and transformers' with the same weights; theirs is built from the config.json that we write."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = {**CONFIG, **changes}
    shape: Any = FAMILY.shape_of_hf(hf, "config.json")
    named = noisy_weights(shape)
    config = AutoConfig.for_model(**FAMILY.hf_config_of(shape))
    assert config.architectures == [type(AutoModelForCausalLM.from_config(config)).__name__]
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf), attn_implementation="eager").eval()
    loaded = theirs.load_state_dict({name: torch.from_numpy(values) for name, values in named}, strict=False)
    assert loaded.missing_keys == ([] if shape.untied else ["lm_head.weight"])
    assert loaded.unexpected_keys == []
    theirs.tie_weights()
    assert FAMILY.shape_of_hf(FAMILY.hf_config_of(shape), "ours") == shape
    net = new_net(shape, CPU)
    fill(net, named, "test")
    return shape, net, theirs


def random_ids(*size: int) -> torch.Tensor:
    return torch.randint(0, 160, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str) -> None:
    shape, net, theirs = opened(CONFIGS[name])
    assert shape.parameters == sum(parameter.numel() for parameter in theirs.parameters())
    ids = random_ids(2, min(shape.positions, 64))
    with torch.no_grad():
        assert (net.logits(net(ids)) - theirs(ids).logits).abs().max() < 1e-5
    if shape.positions > 64:
        check_far_positions(shape, net, theirs)


def check_far_positions(shape: Any, net: BaseNet, theirs: Any) -> None:
    """A window of tokens at the end of the longest context, as decoding reaches it."""
    first, ids = shape.positions - 40, random_ids(1, 40)
    places = torch.arange(first, shape.positions)[None]
    cache: Any = SimpleNamespace(positions_NT=places)
    x, context = net.embed_inputs(ids, Context(cache=cache), None)
    for block in net.blocks:
        x = block(x, context._replace(cache=None))
    with torch.no_grad():
        wanted = theirs(ids, position_ids=places).logits
    assert (net.logits(net.final_norm(x)) - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3"])
def test_packed_documents_equal_separate_ones(name: str) -> None:
    """Positions start at 0 in every document, and no document sees another."""
    _, net, theirs = opened(CONFIGS[name])
    ids, lengths = random_ids(1, 50), [17, 1, 32]
    documents = torch.repeat_interleave(torch.arange(1, 4), torch.tensor(lengths))[None]
    with torch.no_grad():
        found = net.logits(net(ids, documents_NT=documents))
        wanted = torch.cat([theirs(part).logits for part in ids.split(lengths, 1)], 1)
    assert (found - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["yarn", "qwen2", "qwen3"])
def test_padding_and_decoding_equal_transformers(name: str) -> None:
    """Texts of unequal length are padded on the right when they are read, and continued token by token."""
    _, net, theirs = opened(CONFIGS[name])
    ids, lengths = random_ids(3, 30), [9, 1, 20]
    slots = NetSlots(net, 3, 32)
    assert slots.cache.memory.shape[3] == 2, "it has the heads of keys only"
    slots.prefill(0, [text[:length] for text, length in zip(ids.tolist(), lengths, strict=True)])
    with torch.no_grad():
        wanted = theirs(ids).logits
    for step in range(6):
        places = [length + step for length in lengths]
        found = slots.decode(ids[range(3), places], places)
        assert (found - wanted[range(3), places]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope'; textmill knows default, linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor is None"),
        ({"rope_scaling": {**LLAMA3, "factor": "8"}}, r"rope_scaling\.factor is '8'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types is \['sliding_attention'\]"),
        ({"layer_types": 2}, "layer_types is 2"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters has settings for full_att"),
        ({"model_type": "mixtral"}, "model_type is 'mixtral'; textmill's llama reads llama, qwen2, qwen3"),
        ({"model_type": "mistral", "sliding_window": 4}, "sliding_window is 4"),
        ({"head_dim": 7}, "a head has 7 channels"),
        ({"num_key_value_heads": 4}, "4 key heads do not divide 6 heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
    ],
)
def test_unsupported_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TextmillError, match=message):
        FAMILY.shape_of_hf({**CONFIG, **changes}, "config.json")


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"kv_heads": 5}, r"model\.shape\.kv_heads: 5 do not divide 12 heads"),
        ({"heads": 256}, "a head has 3 channels"),
        ({"qk_norm": True, "qkv_bias": True}, "no model of transformers has it"),
    ],
)
def test_unsupported_shapes_are_refused(numbers: dict[str, Any], message: str) -> None:
    config = ModelConfig(family="llama", shape=numbers)
    with pytest.raises(TextmillError, match=message):
        FAMILY.shape_of(config, vocab=100, eos_id=0)


# Parameters that the publishers' files have, or that they state.
@pytest.mark.parametrize(
    ("size", "vocab", "parameters"),
    [
        ("smollm2-135m", 49152, 134_515_008),
        ("smollm2-360m", 49152, 361_821_120),
        ("qwen2.5-0.5b", 151936, 494_032_768),
        ("qwen2.5-1.5b", 151936, 1_543_714_304),
        ("qwen3-0.6b", 151936, 596_049_920),
        ("tinyllama-1.1b", 32000, 1_100_048_384),
        ("llama-3.2-1b", 128256, 1_235_814_400),
    ],
)
def test_published_sizes(size: str, vocab: int, parameters: int) -> None:
    assert FAMILY.shape_of(ModelConfig(family="llama", size=size), vocab=vocab, eos_id=0).parameters == parameters


@pytest.mark.parametrize("size", [size for size in SIZES["llama"] if size in SIZES["gpt2"]])
def test_a_size_is_about_as_large_as_gpt2s(size: str) -> None:
    ours, theirs = (
        open_family(family).shape_of(ModelConfig(family=family, size=size), vocab=50257, eos_id=0).parameters
        for family in ("llama", "gpt2")
    )
    assert ours == pytest.approx(theirs, rel=0.03)


@pytest.mark.parametrize(
    "changes",
    [{**CONFIGS["llama3 in a new config"], **CONFIGS["biases"]}, {**CONFIGS["qwen2 with yarn"], **CONFIGS["qwen3"]}],
    ids=["llama3 with biases", "qwen3 with yarn"],
)
def test_the_jax_net_has_the_same_states(changes: dict[str, Any]) -> None:
    jax = pytest.importorskip("jax", reason="needs the extra jax")
    from textmill.models.llama import net_jax

    shape: Any = FAMILY.shape_of_hf({**CONFIG, **changes}, "config.json")
    named, net, ids = noisy_weights(shape), new_net(shape, CPU), random_ids(2, 50)
    fill(net, named, "test")
    known = {weight.name: weight for weight in shape.weights()}
    weights = {name: jax.numpy.asarray(to_memory(known[name], values)) for name, values in named}
    documents = torch.repeat_interleave(torch.arange(1, 4), torch.tensor([17, 1, 32]))[None].repeat(2, 1)
    for given in (None, documents):
        arrays = [jax.numpy.asarray(ids.numpy()), None, None if given is None else jax.numpy.asarray(given.numpy())]
        found = net_jax.states(weights, shape, net_jax.NetOptions(jax.numpy.float32), *arrays)
        with torch.no_grad():
            assert (torch.tensor(found.tolist()) - net(ids, documents_NT=given)).abs().max() < 1e-4


@pytest.mark.parametrize("numbers", [{"inner": 2048}, {"inner": 2048, "qk_norm": True}, {"inner": 4096}])
def test_activations_are_estimated_from_gpt2s(numbers: dict[str, Any]) -> None:
    """A plan for a GPU has constants that were measured with GPT-2."""
    own_numbers: dict[str, dict[str, Any]] = {"gpt2": {"inner": 3072}, "llama": numbers}
    shapes = [
        open_family(family).shape_of(ModelConfig(family=family, shape={"layers": 2, **own}), vocab=1000, eos_id=0)
        for family, own in own_numbers.items()
    ]
    gpt2, llama = (
        saved_bytes(shape, 1, 256, torch.float32) - saved_bytes(replace(shape, layers=1), 1, 256, torch.float32)
        for shape in shapes
    )
    assert shapes[1].activation_factor == pytest.approx(llama / gpt2, rel=0.03)


def test_embeddings_that_are_not_the_head_have_a_rate_of_their_own() -> None:
    rates = {}
    for untied in (False, True):
        shape = replace(FAMILY.shape_of_hf(CONFIG, "config.json"), layers=3, untied=untied)
        rates[untied] = rules_of(shape, TrainConfig(layer_decay=0.5, embedding_rate_factor=6))
    assert rates[False]["model.embed_tokens.weight"].rate == 0.5**4
    assert rates[True]["model.embed_tokens.weight"].rate == 6 * 0.5**4
    assert rates[True]["lm_head.weight"].rate == 1
