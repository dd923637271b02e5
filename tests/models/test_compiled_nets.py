"""A compiled net gives the results of the eager one, and all blocks share one compilation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from textmill.config import LoraConfig
from textmill.kernels import matmul_torch
from textmill.kernels.dropout_torch import dropout_keys
from textmill.models import base_torch
from textmill.models.base_torch import CompiledParts, compile_parts
from textmill.models.gpt2 import family as gpt2
from textmill.models.gpt2 import net_torch as gpt2_torch
from textmill.models.nets_torch import add_adapters

SHAPE = {"layers": 4, "heads": 2, "width": 32, "inner": 24, "positions": 128, "vocab": 10, "eos_id": 0}
CASES: dict[str, tuple[dict[str, float], int, bool]] = {
    "as it is": ({}, 0, False),
    "with dropout": ({"embedding_dropout": 0.2, "attention_dropout": 0.3, "residual_dropout": 0.4}, 0, False),
    "activation checkpointing": ({}, 3, False),
    "with dropout, made again": ({"residual_dropout": 0.4}, 1, True),
    "isolated documents": ({}, 0, True),
}


@pytest.mark.long
def test_adapters_with_dropout_share_one_compiled_block() -> None:
    """Every block has its own dropout keys, so that the sites are the same in every block."""
    torch.manual_seed(1)
    net = gpt2_torch.Net(gpt2.Shape(**SHAPE))  # type: ignore[arg-type]
    add_adapters(net, LoraConfig(rank=2, dropout=0.3))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    ids, keys = torch.randint(0, 10, (2, 128)), dropout_keys(1, 2, np.arange(2))
    compiled = compile_parts(backend=backend, fullgraph=True)
    torch.testing.assert_close(net(ids, keys, compiled=compiled), net(ids, keys), rtol=1e-4, atol=1e-4)
    assert backend.frame_count == 3


def _run(
    net: gpt2_torch.Net, compiled: CompiledParts | None, documents: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The hidden states of a net and the gradients of its weights."""
    torch.manual_seed(3)
    ids, dy = torch.randint(0, 10, (2, 128)), torch.randn(2, 128, 32)
    keys = dropout_keys(1, 2, np.arange(2)) if net.shape.uses_dropout else None
    net.zero_grad()
    states = net(ids, keys, documents_NT=documents, compiled=compiled)
    states.backward(dy)
    return states.detach(), {
        name: parameter.grad.clone() for name, parameter in net.named_parameters() if parameter.grad is not None
    }


@pytest.mark.long_with("as it is", "activation checkpointing", "isolated documents")
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_net_matches_and_compiles_one_block(case: str) -> None:
    dropout, recompute, isolated = CASES[case]
    torch.manual_seed(1)
    net = gpt2_torch.Net(gpt2.Shape(**SHAPE, **dropout))  # type: ignore[arg-type]
    net.activation_checkpointing = recompute
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    documents = torch.arange(128).expand(2, 128) // 50 if isolated else None
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    plain, ours = (
        _run(net, compiled, documents) for compiled in (None, compile_parts(backend=backend, fullgraph=True))
    )
    assert backend.frame_count == 3, "what is before the blocks, a block, and what is after"
    torch.testing.assert_close(ours[0], plain[0])
    assert ours[1].keys() == plain[1].keys()
    for name, gradient in plain[1].items():
        torch.testing.assert_close(
            ours[1][name], gradient, rtol=1e-4, atol=1e-5, msg=lambda message, name=name: f"{name}: {message}"
        )


@pytest.mark.long
def test_a_compiled_block_uses_block_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with block masks; a batch with other documents does not compile again."""
    monkeypatch.setattr(base_torch, "use_block_mask", lambda documents, width: torch.compiler.is_compiling())
    torch.manual_seed(1)
    net = gpt2_torch.Net(gpt2.Shape(**SHAPE))  # type: ignore[arg-type]
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled, ids, counts = compile_parts(backend=backend), torch.randint(0, 10, (2, 128)), list[int]()
    with torch.no_grad():  # torch trains in blocks on a GPU alone
        for size in (50, 31):
            documents = torch.arange(128).expand(2, 128) // size
            torch.testing.assert_close(
                net(ids, documents_NT=documents, compiled=compiled),
                net(ids, documents_NT=documents),
                rtol=1e-4,
                atol=1e-4,
            )
            counts.append(backend.frame_count)
    assert counts[0] == counts[1]


def _mlp(x: Tensor, fc: Tensor, bias: Tensor, proj: Tensor, tanh: bool) -> Tensor:
    return F.linear(F.gelu(F.linear(x, fc, bias), approximate="tanh" if tanh else "none"), proj)


@pytest.mark.long_with(1, True)
@pytest.mark.parametrize(
    ("device", "backend", "recompute", "fp8"),
    [
        ("cpu", "aot_eager", 0, False),
        ("cpu", "aot_eager", 1, False),
        ("cpu", "aot_eager", 0, True),
        pytest.param(
            "cuda",
            "inductor",
            0,
            False,
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
        ),
    ],
)
def test_a_net_with_tuned_matmuls_has_the_same_gradients(
    device: str, backend: str, recompute: int, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, for any size: one graph, and the eager gradients. fp8 is replaced: its rounding hides errors."""
    monkeypatch.setattr(base_torch, "fp8_mlp", _mlp)
    torch.manual_seed(3)
    net = gpt2_torch.Net(gpt2.Shape(layers=2, heads=2, width=32, inner=48, positions=16, vocab=10, eos_id=0))
    net.activation_checkpointing = recompute
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    net.use_fp8() if fp8 else None
    net, ids, dy, gradients = (
        net.to(device),
        torch.randint(0, 10, (2, 16)).to(device),
        torch.randn(2, 16, 32).to(device),
        [],
    )
    for chosen in (False, True):
        monkeypatch.setattr(matmul_torch, "use_tuned_matmul", lambda x, weight, chosen=chosen: chosen)
        net.zero_grad()
        run = torch.compile(net, dynamic=False, fullgraph=True, backend=backend) if chosen else net
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            run(ids).backward(dy)
        assert any(event.key == "textmill::norm_backward" for event in seen.key_averages()) == chosen
        gradients.append(
            {name: parameter.grad.clone() for name, parameter in net.named_parameters() if parameter.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(
            gradients[1][name], gradient, rtol=1e-4, atol=1e-4, msg=lambda message, name=name: f"{name}: {message}"
        )
