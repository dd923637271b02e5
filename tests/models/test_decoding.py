"""Decoding many texts gives the logits of a full pass, with the code for any family and with a family's fast code.

On a GPU the fast code is captured kernels: warming up captures exactly the CUDA graphs that requests can need. On a CPU
it is the same step with formulas in place of the kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.decode_kernels import run_without_capture
from tests.support.weights import noisy_weights, shape_of
from textmill.config import LoraConfig
from textmill.models import find_family_module, open_family
from textmill.models.base_torch import BaseNet
from textmill.models.decode_torch import CapturedSlots, NetSlots, open_slots, prefill_shapes, step_sizes
from textmill.models.gpt2 import family as gpt2
from textmill.models.gpt2 import net_torch as gpt2_torch
from textmill.models.nets_torch import fill, new_net

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 24}
NETS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2"},
    "gpt2 with relu": {"model_type": "gpt2", "activation": "relu"},
    "llama": {},
    "as many heads of keys, relu2": {"num_key_value_heads": 6, "head_dim": 16, "hidden_act": "relu2"},
    "one head of keys, tanh": {"num_key_value_heads": 1, "tie_word_embeddings": False, "hidden_act": "tanh"},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "rope_scaling": YARN},
    "qwen3": {"model_type": "qwen3", "head_dim": 20},
}
LENGTHS = [9, 1, 20, 31, 2, 33, 3, 17, 8]


def new_random_net(device: str, model_type: str = "llama", lora: LoraConfig | None = None, **changes: Any) -> BaseNet:
    """A small GPT-2 with changes of its shape, or a small Llama with changes of its config.json."""
    hf = {
        "model_type": model_type,
        "vocab_size": 300,
        "hidden_size": 72,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 48,
        "tie_word_embeddings": True,
        **changes,
    }
    gpt2 = model_type == "gpt2"
    shape = shape_of("nano", changes, 300) if gpt2 else open_family("llama").shape_of_hf(hf, "config.json")
    net = new_net(shape, torch.device(device), lora)
    fill(net, noisy_weights(shape, lora=lora), "test")
    return net


def fast_slots(net: BaseNet, slots: int, length: int) -> NetSlots:
    """The family's own, also on a CPU."""
    module: Any = find_family_module(net.shape, "decode_torch")
    opened: NetSlots = module.FastSlots(net, slots, length)
    return opened


def full_logits(net: BaseNet, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return net.logits(net(torch.tensor([ids], device=net.head.device)))[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
@pytest.mark.parametrize(("name", "texts"), [*((name, 3) for name in NETS), ("gpt2", 9), ("qwen3", 9)])
def test_decoding_gives_the_logits_of_a_full_pass(
    monkeypatch: pytest.MonkeyPatch, name: str, texts: int, device: str
) -> None:
    """Texts of different lengths in slots: prefilled, copied, decoded token by token."""
    net = new_random_net(device, **NETS[name])
    ids = torch.randint(0, 300, (texts, 48), generator=torch.Generator().manual_seed(1)).tolist()
    wanted = [full_logits(net, text) for text in ids]
    if device == "cpu":
        check_decoding(net, open_slots(net, texts + 1, 48), ids, wanted)
        run_without_capture(monkeypatch)
    for kind in (NetSlots, fast_slots):
        check_decoding(net, kind(net, texts + 1, 48), ids, wanted)
    assert all((full_logits(net, text) - before).abs().max() < 1e-5 for text, before in zip(ids, wanted, strict=True))


def check_decoding(net: BaseNet, slots: NetSlots, ids: list[list[int]], wanted: list[torch.Tensor]) -> None:
    lengths = LENGTHS[: len(ids)]
    hidden = slots.prefill(0, [text[:length] for text, length in zip(ids, lengths, strict=True)])
    for row, length in enumerate(lengths):
        with torch.inference_mode():
            found = net.logits(hidden[row, :length])
        assert (found - wanted[row][:length]).abs().max() < 1e-4
    order = [2, 0, 1, *range(3, len(ids))]
    slots.move(0, len(ids), lengths[0])
    slots.reorder([2, len(ids), 1, *range(3, len(ids))], max(lengths))
    for step in range(8):
        places = [lengths[text] + step for text in order]
        given = torch.tensor([ids[text][place] for text, place in zip(order, places, strict=True)], device=slots.device)
        found = slots.decode(given, places)
        for row, (text, place) in enumerate(zip(order, places, strict=True)):
            assert (found[row] - wanted[text][place]).abs().max() < 1e-4
    text = order[0]
    for place in range(lengths[text] + 8, lengths[text] + 12):
        [found_V] = slots.decode(torch.tensor([ids[text][place]], device=slots.device), [place])
        assert (found_V - wanted[text][place]).abs().max() < 1e-4, "the first text goes on alone"


def test_a_cpu_gets_the_code_of_the_family_without_capture() -> None:
    for name in NETS:
        net = new_random_net("cpu", **NETS[name])
        slots = open_slots(net, 2, 16)
        assert (type(slots) is NetSlots) == (name == "one head of keys, tanh"), name
        assert slots.warm_up() == 0, "a CPU captures nothing"
        assert type(open_slots(net.to(torch.bfloat16), 2, 16)) is NetSlots
    assert type(open_slots(new_random_net("cpu", lora=LoraConfig(rank=3)), 2, 16)) is NetSlots, "adapters"


@pytest.mark.parametrize("kind", [fast_slots, open_slots], ids=["captured", "cpu"])
@pytest.mark.parametrize("name", ["llama", "biases"])
def test_joined_weights_need_no_more_memory(monkeypatch: pytest.MonkeyPatch, name: str, kind: Any) -> None:
    """Two sets of slots, one after the other: the layers' weights and the joined ones are the same memory."""
    run_without_capture(monkeypatch)
    net = new_random_net("cpu", **NETS[name])
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    joined: list[Any] = [kind(net, 2, 16) for _ in range(2)]
    block: Any = net.blocks[1]
    for slots in joined:
        assert torch.equal(
            slots.qkv[1].weight, torch.cat([before[f"layers.1.self_attn.{x}_proj.weight"] for x in "qkv"])
        )
        assert slots.qkv[1].weight.data_ptr() == block.self_attn.q_proj.weight.data_ptr()
        assert slots.gate_up[1].weight.data_ptr() == block.mlp.gate_proj.weight.data_ptr()
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, before[name]), name
    held = {parameter.untyped_storage().data_ptr(): parameter.untyped_storage() for parameter in net.parameters()}
    assert sum(storage.nbytes() for storage in held.values()) == sum(x.nbytes for x in before.values())


class Needed(Exception):
    """Raised when a shape is captured that was not captured in advance."""


@pytest.mark.parametrize(("slots", "length"), [(1, 16), (3, 40), (6, 64), (8, 33), (70, 130), (5, 4200)])
def test_every_needed_shape_is_captured_in_advance(monkeypatch: pytest.MonkeyPatch, slots: int, length: int) -> None:
    net = gpt2_torch.Net(gpt2.Shape(layers=1, heads=1, width=4, inner=4, positions=length, vocab=8, eos_id=0))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    memory, steps, prefills = CapturedSlots(net, slots, length), set[int](), set[tuple[int, int]]()

    def step(count: int) -> None:
        steps.add(count)
        raise Needed

    def prefill(rows: int, tokens: int) -> None:
        prefills.add((rows, tokens))
        raise Needed

    monkeypatch.setattr(memory, "_step_graph", step)
    monkeypatch.setattr(memory, "_prefill_graph", prefill)
    monkeypatch.setattr(memory, "_read", lambda *_: None)
    near = {2**power + more for power in range(5, 13) for more in (-1, 0, 1)} | {1, 2, length - 1}
    for count in range(1, slots + 1):
        with pytest.raises(Needed):
            memory.decode(torch.zeros(count, dtype=torch.long), [0] * count)
        for tokens in [tokens for tokens in near if tokens < length]:
            try:
                memory.prefill(0, [[0] * tokens] * count)
            except Needed:
                continue
    assert step_sizes(slots) == sorted(steps)
    assert prefill_shapes(slots, length) == sorted(prefills)
