"""Compile the Triton kernels that nets launch, for a GPU that is not here.

    python -m tests.support.compile_kernels [all]

Nets, losses, optimizers and decoding run on fake tensors, which have a shape and a dtype but no memory, and say that
they are on a GPU. So the same code as on a GPU chooses each kernel's sizes and constants; Triton compiles the kernel
instead of launching it. Prints a line of JSON for each kernel, and for each case that fails. `all`: every known size.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import cuda_torch  # noqa: F401 - before textmill's modules
from textmill.config import SIZES, ModelConfig, SampleConfig, TrainConfig
from textmill.engines.losses_torch import WeightedLabels, loss_and_correct, summed_loss
from textmill.engines.optimizers import AdamW, Member
from textmill.engines.optimizers.muon_torch import Muon
from textmill.generation import sampling
from textmill.kernels import matmul_torch
from textmill.kernels.triton_support import triton
from textmill.models import find_family_module, open_family
from textmill.models.nets_torch import build_net, parameters_of
from textmill.models.parameter_groups import rules_of

TARGET = ("cuda", 90, 32)
"""An H200: compute capability 9.0, warps of 32 threads."""
VOCAB, TOKENS, CACHE = 50257, 1 << 16, 1024
"""Tokens of the vocabulary, of a batch and of a text's slot."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
DEVICE = torch.device("cpu")  # torch without CUDA has no gradients of fake tensors on a GPU
SAMPLES = [
    {"temperature": 0},
    {"temperature": 0, "min_tokens": 5},
    {"top_k": 50},
    {"temperature": 0.8, "top_k": 0, "min_tokens": 5},
    {"top_p": 0.9},
    {"top_k": 50, "top_p": 0.9, "min_tokens": 5},
]


class Driver:
    """What Triton asks about the current GPU."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*TARGET)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class Argument:
    """A tensor as Triton sees it: its dtype, and an address that shows the alignment."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.address = tensor.dtype, address_of(tensor)

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return 0


def address_of(tensor: Tensor) -> int:
    """The address inside its storage; storages are aligned."""
    return tensor.storage_offset() * tensor.itemsize


class RunOwnOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs the code of textmill's operators, from which fake tensors would only get the shapes of the results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "textmill":
            return func(*args, **(kwargs or {}))
        with self:
            return OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))


@contextmanager
def compile_launches(compiled: dict[str, tuple[Any, Any]]) -> Iterator[None]:
    """Compile what is launched, once for each set of types and constants."""
    kernel_class = triton.runtime.jit.JITFunction
    compile_or_launch = kernel_class.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = [Argument(value) if isinstance(value, Tensor) else value for value in args]
        kernel = compile_or_launch(self, *given, grid=grid, warmup=True, **kwargs)
        compiled[kernel.hash] = self, kernel

    triton.runtime.driver.set_active(Driver())
    with ExitStack() as stack:
        for target, name, value in (
            (kernel_class, "run", run),
            (Tensor, "is_cuda", True),
            (Tensor, "data_ptr", address_of),
            (torch.cuda, "graph_pool_handle", lambda: None),
            (matmul_torch, "library", lambda: None),
        ):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(RunOwnOperators())
        yield


def fake_net(family: str, size: str, dtype: torch.dtype = torch.float32, **shape: Any) -> Any:
    """A net of a known size, with two layers."""
    model = ModelConfig(family=family, size=size, shape={"layers": 2, **shape})  # type: ignore[arg-type]
    with torch.device("meta"):
        net = build_net(open_family(family).shape_of(model, vocab=VOCAB, eos_id=0)).eval()
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=DEVICE)))
    return net


def train(family: str, size: str, precision: str, optimizer: str = "adamw", smoothing: float = 0.0) -> None:
    """A compiled net's training step: both passes with the loss, and an update; and the loss of an evaluation."""
    net, dtype = fake_net(family, size), DTYPES[precision]
    if precision == "fp8":
        net.use_fp8()
    length = min(net.shape.positions, CACHE)
    ids = torch.zeros(TOKENS // length, length, dtype=torch.long, device=DEVICE)
    labels, weights = ids.flatten().int(), torch.ones(ids.numel(), device=DEVICE)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        with patch.object(torch.compiler, "is_compiling", lambda: True):
            hidden = net(ids).flatten(0, 1)
        x = net.head_input(hidden).to(dtype)
        options: dict[str, Any] = {"smoothing": smoothing, "bias_V": net.head_bias, "fp8": precision == "fp8"}
        loss = summed_loss(x, net.head, WeightedLabels(labels, weights), VOCAB, **options)
        loss_and_correct(x.detach(), net.head, labels, VOCAB, net.head_bias)
    loss.backward()  # type: ignore[no-untyped-call]
    update(net, optimizer)


def update(net: Any, optimizer: str) -> None:
    """One step of the optimizer."""
    train, one, members = TrainConfig(), torch.ones((), device=DEVICE), parameters_of(net)
    rules = rules_of(net.shape, train)
    muon = [name for name, (weight, _) in members.items() if optimizer == "muon" and weight.muon]
    Muon([(*members[name], rules[name]) for name in muon], 0.95, compiled=False).step(1e-3, one, one.bool())
    rest = [Member(*member, rules[name]) for name, member in members.items() if name not in muon]
    AdamW(rest, train).step(1e-3, one, one.bool(), one.long())


def decode(family: str, size: str, precision: str, texts: int, **shape: Any) -> None:
    """A decoding step, and the choice of the next tokens."""
    net = fake_net(family, size, DTYPES[precision], **shape)
    slots: Any = find_family_module(net.shape, "decode_torch").FastSlots(net, texts, CACHE)  # type: ignore[union-attr]
    with torch.inference_mode():
        logits = slots._step(texts, few=texts <= slots.kernels.MAX_FUSED_TEXTS and slots.can_fuse())
        for settings in SAMPLES:
            sample, options = SampleConfig(**settings), {"ends": (0,), "bias": (), "vocab": VOCAB, "device": DEVICE}  # type: ignore[arg-type]
            states = [sampling.new_state(sample, [1], **options) for _ in range(texts)]  # type: ignore[arg-type]
            sampling.choose_next_ids(logits, states, sampling.collect_rules(states, DEVICE))


def usual_cases() -> Iterator[Callable[[], None]]:
    """A size of each family with every precision and optimizer, wide MLPs, and decoding of few and many texts."""
    for family, size in (("gpt2", "small"), ("bert", "base"), ("llama", "qwen2.5-1.5b")):
        yield from (partial(train, family, size, precision) for precision in ("bf16", "fp8"))
    yield partial(train, "gpt2", "small", "fp32", smoothing=0.1)
    yield partial(train, "gpt2", "small", "fp16", optimizer="muon")
    for family, size in (("gpt2", "small"), ("llama", "small"), ("llama", "qwen3-0.6b")):
        yield from (partial(decode, family, size, "bf16", texts) for texts in (1, 8))
    yield partial(decode, "llama", "qwen2.5-0.5b", "fp32", 2)
    yield partial(decode, "llama", "small", "fp16", 4, activation="relu2")


def all_cases() -> Iterator[Callable[[], None]]:
    """Every known size in every precision, and decoding with every number of texts that changes a kernel."""
    yield from usual_cases()
    for family, size in ((family, size) for family, sizes in SIZES.items() for size in sizes):
        yield from (partial(train, family, size, precision, "muon", 0.1) for precision in DTYPES)
        for texts in (1, 2, 4, 8, 64) if family != "bert" else ():
            yield from (partial(decode, family, size, precision, texts) for precision in ("bf16", "fp16", "fp32"))


def main(words: list[str]) -> None:
    """Compile all kernels of the cases."""
    compiled: dict[str, tuple[Any, Any]] = {}
    with compile_launches(compiled):
        for case in all_cases() if words == ["all"] else usual_cases():
            named, before = case.func.__name__, set(compiled)  # type: ignore[attr-defined]
            name = f"{named} {case.args} {case.keywords}"  # type: ignore[attr-defined]
            try:
                case()
            except Exception:
                print(json.dumps({"case": name, "error": traceback.format_exc()}), flush=True)
            for kernel, result in (compiled[key] for key in compiled if key not in before):
                facts = {"kernel": f"{kernel.__module__}.{kernel.__name__}", "shared": result.metadata.shared}
                facts |= {"warps": result.metadata.num_warps, "cubin": len(result.asm["cubin"]), "case": name}
                print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
