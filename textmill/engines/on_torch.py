"""PyTorch on one device: micro-batches, mixed precision, fused AdamW, clipping, and no wait inside a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from textmill.config import RunConfig, TrainConfig
from textmill.devices import arithmetic, open_device, peak_flops_of, precision_of
from textmill.engines import Named, Sums
from textmill.engines.torch_parts import decay_groups, on_device, token_losses, token_shares
from textmill.models.dropout_torch import dropout_keys
from textmill.models.nets_torch import Net, fill, named_copies, new_net, to_memory, weights_of
from textmill.tokens.batches.batch import IGNORED, Batch

LOGIT_SHARE = 16
"""`micro_batch: auto` lets the fp32 logits of a micro-batch take one part in so many of the device's memory."""
CPU_LOGITS = 1 << 30
"""Bytes of them on a CPU, whose caches are small."""


@dataclass(frozen=True)
class TorchStep:
    """Numbers still on the device; reading one waits for it."""

    loss_sum: Tensor
    norm_value: Tensor
    asked: int

    @property
    def loss(self) -> float:
        """The step's loss before the update."""
        return float(self.loss_sum)

    @property
    def norm(self) -> float:
        """The global gradient norm before clipping."""
        return float(self.norm_value)

    @property
    def skipped(self) -> bool:
        """Whether the update was left out, because loss or gradient was not finite."""
        return not bool(torch.isfinite(self.norm_value))


class TorchOnOneDevice:
    """The Engine of `engine.kind: torch`."""

    first = True

    def __init__(self, net: Net, train: TrainConfig, micro_batch: int, precision: torch.dtype, compiled: bool) -> None:
        self.net, self.train, self.micro_batch, self.precision = net, train, micro_batch, precision
        self.device = next(parameter.device for _, parameter in net.named_parameters())
        self.forward = torch.compile(token_losses) if compiled else token_losses
        groups = decay_groups(net, train.weight_decay)
        betas = (train.betas[0], train.betas[1])
        self.optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, eps=train.epsilon, fused=True)
        self.parameters = [parameter for group in groups for parameter in group["params"]]

    def samples_of(self, batch: int) -> slice:
        """One process takes the whole batch."""
        return slice(0, batch)

    def train_step(self, batch: Batch, step: int, lr: float) -> TorchStep:
        """Forward and backward by micro-batches, then one update; a non-finite gradient leaves the weights alone."""
        shares = token_shares(batch, self.train.loss)
        keys_N = dropout_keys(self.train.seed, step, batch.samples) if self._drops() else None
        total = torch.zeros((), device=self.device)
        for start in range(0, len(batch.inputs), self.micro_batch):
            rows = slice(start, start + self.micro_batch)
            inputs, labels, share = (on_device(array[rows], self.device) for array in (batch.inputs, batch.labels, shares))
            keys = None if keys_N is None else keys_N[rows].to(self.device)
            with arithmetic(self.device, self.precision):
                losses, _ = self.forward(self.net, inputs, labels, keys, self._documents(batch, rows))
            loss = (losses * share).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        norm = self._update(lr)
        return TorchStep(total, norm, int((batch.labels != IGNORED).sum()))

    def _update(self, lr: float) -> Tensor:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.train.clip:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.train.clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # The fused update reads this flag on the device, so that skipping costs no wait.
        self.optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    @torch.no_grad()
    def eval_step(self, batch: Batch) -> Sums:
        """Losses of a batch by micro-batches, without dropout."""
        sums, correct = [], []
        for start in range(0, len(batch.inputs), self.micro_batch):
            rows = slice(start, start + self.micro_batch)
            inputs, labels = on_device(batch.inputs[rows], self.device), on_device(batch.labels[rows], self.device)
            with arithmetic(self.device, self.precision):
                losses, logits = token_losses(self.net, inputs, labels, None, self._documents(batch, rows))
            sums.append(losses.sum())
            correct.append(((logits.argmax(-1) == labels) & (labels != IGNORED)).sum())
        # Doubles are for the host: not every device has them.
        total = float(torch.stack(sums).cpu().double().sum())
        return Sums(total, int((batch.labels != IGNORED).sum()), int(torch.stack(correct).sum()))

    def _documents(self, batch: Batch, rows: slice) -> Tensor | None:
        return None if batch.documents is None else on_device(batch.documents[rows], self.device)

    def weights(self) -> Iterator[Named]:
        """Host copies of the weights."""
        return named_copies(self.net, {parameter: parameter for parameter in self.parameters})

    def moments(self) -> Iterator[Named]:
        """Host copies of Adam's two moments; none before the first update."""
        if self.updates():
            for prefix, key in (("m/", "exp_avg"), ("v/", "exp_avg_sq")):
                state = {parameter: self.optimizer.state[parameter][key] for parameter in self.parameters}
                yield from named_copies(self.net, state, prefix)

    def updates(self) -> int:
        """Updates done; Adam's own count."""
        state = self.optimizer.state.get(self.parameters[0])
        return int(state["step"]) if state else 0

    def load(self, weights: Iterable[Named], moments: Iterable[Named], updates: int, where: str) -> None:
        """Take weights and moments in checkpoint names and layout."""
        fill(self.net, weights, where)
        if not updates:
            return
        known, keys = weights_of(self.net), {"m": "exp_avg", "v": "exp_avg_sq"}
        for name, values in moments:
            kind, _, of = name.partition("/")
            weight, parameter = known[of]
            state = self.optimizer.state[parameter]
            state["step"] = torch.tensor(float(updates), device=self.device)
            state[keys[kind]] = to_memory(self.net, weight, values, where).to(self.device)

    def facts(self) -> dict[str, Any]:
        """Device, arithmetic and size."""
        return {
            "device": str(self.device), "precision": str(self.precision).removeprefix("torch."), "micro_batch": self.micro_batch,
            "parameters": self.net.shape.parameters, "peak_flops": peak_flops_of(self.device),
        }  # fmt: skip

    def close(self) -> None:
        """Nothing is held beyond memory."""

    def _drops(self) -> bool:
        shape = self.net.shape
        return bool(shape.embedding_dropout or shape.attention_dropout or shape.residual_dropout)


def new_engine(config: RunConfig, shape: Any) -> TorchOnOneDevice:
    """The engine with an empty net; `load` fills it."""
    device = open_device(config.engine.device)
    precision = precision_of(config.engine.precision, device)
    if config.engine.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")
    length = config.train.length or shape.positions
    asked, batch = config.engine.micro_batch, config.train.batch
    room = torch.cuda.get_device_properties(device).total_memory // LOGIT_SHARE if device.type == "cuda" else CPU_LOGITS
    fits = max(1, room // (4 * length * shape.padded_vocab))
    micro_batch = asked if asked != "auto" else max(size for size in range(1, batch + 1) if batch % size == 0 and size <= fits)
    return TorchOnOneDevice(new_net(shape, device), config.train, micro_batch, precision, config.engine.compile)
