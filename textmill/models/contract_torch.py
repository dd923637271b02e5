"""What every family must keep, checked on a tiny net of its kind in about a second: `check_family`.

Most mistakes in a net do not stop it: it trains, and its loss is too low, or its text is not what the loss promises.
So each property is compared with what it must equal: one changed token, a text alone, a pass without the cache.

Shapes in names: N samples, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from textmill.config import LoraConfig, ModelConfig, ShapeConfig
from textmill.errors import TextmillError
from textmill.kernels.dropout_torch import dropout_keys
from textmill.models import Family, Shape, initial_weights, open_family, to_checkpoint
from textmill.models.base_torch import BaseNet
from textmill.models.decode_torch import net_slots
from textmill.models.lora import adapter_weights, initial_adapters, target_weights, weights_with_adapters
from textmill.models.nets_torch import checkpoint_tensors, fill, new_net, parameters_of
from textmill.models.weights import sample_weights

VOCAB = 99
LENGTH = 24
SAMPLES = 6
NOISE = 0.15
"""What is added to the initial weights, so that no bias is 0, no scale is 1 and attention is not even."""
TOLERANCE = 2e-5
"""Largest difference of logits, relative to the largest logit."""
LOSS_TOLERANCE = 0.5
"""Largest difference of the initial loss from log(vocabulary)."""
CPU = torch.device("cpu")


class Broken(Exception):
    """A property does not hold; the message says where."""


class TinyNet:
    """A tiny net of a family, with noise in its weights, and a batch of random tokens for it."""

    def __init__(self, config: ModelConfig, shape: Shape) -> None:
        self.family: Family = open_family(shape.family)
        numbers = self.family.small_shape(shape, 1)
        sizes = getattr(self.family, "SIZES", {})  # with model.init_from, model.size says nothing
        size = config.size if not sizes or config.size in sizes else next(iter(sizes))
        small = config.model_copy(
            update={
                "size": size,
                "shape": ShapeConfig(**numbers, positions=LENGTH),
                "init_from": None,
                "init_layers": [],
            }
        )
        self.shape: Shape = self.family.shape_of(small, vocab=VOCAB, eos_id=0)
        self.causal = self.family.OBJECTIVE == "next_token"
        self.gradients: dict[str, Tensor] = {}
        """By weight, after `check_gradients`."""
        self.ids_NT = torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))

    @cached_property
    def net(self) -> BaseNet:
        """The net, filled with noise."""
        return self.build(None)

    def build(self, lora: LoraConfig | None) -> BaseNet:
        """A net of the shape, filled with the same noise."""
        net = new_net(self.shape, CPU, lora)
        fill(net, self.noisy_weights(lora), "the contract")
        return net

    def noisy_weights(self, lora: LoraConfig | None = None) -> Iterator[tuple[str, Any]]:
        """Initial weights with noise."""
        random = np.random.default_rng(3)
        for name, values in sample_weights(weights_with_adapters(self.shape, lora), 3):
            yield name, values + random.normal(0, NOISE, values.shape).astype(np.float32)

    def logits(self, ids_NT: Tensor, net: BaseNet | None = None, **given: Any) -> Tensor:
        """Logits of every token, without gradients."""
        net = net or self.net
        with torch.no_grad():
            logits_NTV: Tensor = net.logits(net(ids_NT, **given)).float()
        return logits_NTV

    def loss(self, net: BaseNet, **given: Any) -> Tensor:
        """A loss of every token, of every pair if there is a pair head, and what blocks add."""
        x_NTE = net(self.ids_NT, **given)
        labels_NT = self.ids_NT.roll(-1, 1)
        loss = F.cross_entropy(net.logits(x_NTE).flatten(0, 1), labels_NT.flatten())
        if net.has_pair_head:
            loss = loss + net.pair_logits(x_NTE[:, 0]).logsumexp(-1).mean()
        if net.has_auxiliary_loss:
            loss = loss + net.take_auxiliary_loss()
        return loss


def check_family(
    config: ModelConfig,
    shape: Shape,
    report: Callable[[str], None] = lambda line: None,
    *,
    activation_checkpointing: bool = True,
) -> None:
    """Check every property of a family on a tiny net like `shape`; the first that does not hold is an error.

    `activation_checkpointing`: that it changes nothing, too, for which torch imports its compiler, in seconds."""
    tiny = TinyNet(config, shape)
    for check in CHECKS:
        if check is check_activation_checkpointing and not activation_checkpointing:
            continue
        name = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            with torch.random.fork_rng(devices=[]):
                check(tiny)
        except Broken as broken:
            raise TextmillError(
                f"model.family: {config.family}: {name}: {broken}; docs/own-model.md says what a family must keep"
            ) from None
        except (RuntimeError, TypeError, AttributeError, IndexError, KeyError, ValueError) as error:
            raise TextmillError(
                f"model.family: {config.family}: {name}: fails with {type(error).__name__}: {error}"
            ) from error
        report(f"{name}: {' '.join((check.__doc__ or '').split())}")


def check_weights(tiny: TinyNet) -> None:
    """shape.weights lists every parameter of the net, once and with its size; nothing else has values."""
    net = new_net(tiny.shape, CPU)
    found = {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}
    listed = {weight.parameter: tuple(weight.memory_shape) for weight in tiny.shape.weights()}
    for name in found.keys() ^ listed.keys():
        where = "the net has it, shape.weights does not" if name in found else "shape.weights has it, the net does not"
        raise Broken(f"'{name}': {where}")
    for name, size in found.items():
        if size != listed[name]:
            raise Broken(f"'{name}' is {list(size)} in the net and {list(listed[name])} in shape.weights")
    for name, _ in net.named_buffers():
        raise Broken(
            f"the buffer '{name}' is not saved, and has no values in a net that is loaded; compute it in forward"
        )
    if net.head.shape[0] != tiny.shape.padded_vocab:
        raise Broken(f"the head has {net.head.shape[0]} rows, shape.padded_vocab is {tiny.shape.padded_vocab}")


def check_config(tiny: TinyNet) -> None:
    """config.json has every number of the shape."""
    hf = json.loads(json.dumps(tiny.family.hf_config_of(tiny.shape)))
    read = tiny.family.shape_of_hf(hf, "config.json")
    for name, value in vars(tiny.shape).items():
        if getattr(read, name) != value:
            raise Broken(f"'{name}' is {value!r}, and {getattr(read, name)!r} when it is read back from config.json")


def check_saving(tiny: TinyNet) -> None:
    """A net that is saved and loaded has the same weights and gives the same logits."""
    tensors = {parameter: parameter.detach() for parameter in tiny.net.parameters()}
    saved = list(checkpoint_tensors(tiny.net, tensors))
    loaded = new_net(tiny.shape, CPU)
    fill(loaded, saved, "the saved net")
    _same(tiny.logits(tiny.ids_NT), tiny.logits(tiny.ids_NT, loaded), "after loading", exact=True)
    for name, values in tiny.noisy_weights():
        weight, parameter = parameters_of(loaded)[name]
        if not np.array_equal(to_checkpoint(weight, parameter.detach()).numpy(), values):
            raise Broken(f"'{name}' does not survive a save; check its transposed, parts and groups")


def check_repeated_passes(tiny: TinyNet) -> None:
    """Two passes over the same tokens give the same logits: nothing is random or kept."""
    first = tiny.logits(tiny.ids_NT)
    tiny.logits(tiny.ids_NT.flip(0))
    _same(first, tiny.logits(tiny.ids_NT), "in the second pass", exact=True)


def check_samples(tiny: TinyNet) -> None:
    """A sample gives the same logits alone as in a batch."""
    together = tiny.logits(tiny.ids_NT)
    for row in (0, SAMPLES - 1):
        _same(together[row], tiny.logits(tiny.ids_NT[row : row + 1])[0], f"of sample {row} alone")


def check_causality(tiny: TinyNet) -> None:
    """A later token changes no earlier logit (and a token changes its own)."""
    if not tiny.causal:
        return
    before = tiny.logits(tiny.ids_NT)
    for place in (1, LENGTH // 2, LENGTH - 1):
        changed = tiny.ids_NT.clone()
        changed[:, place] = (changed[:, place] + 7) % VOCAB
        after = tiny.logits(changed)
        _same(before[:, :place], after[:, :place], f"after a change of the later token {place}")
        if torch.equal(before[:, place], after[:, place]):
            raise Broken(f"the token at position {place} does not change its own logits")


def check_documents(tiny: TinyNet) -> None:
    """With document numbers, each document gives the logits that it gives alone, from position 0 on."""
    if "documents" not in tiny.family.BATCH_FIELDS:
        return
    first = LENGTH // 3
    last = LENGTH - 3
    documents_NT = torch.zeros_like(tiny.ids_NT)
    documents_NT[:, :first] = 1
    documents_NT[:, first:last] = 2
    together = tiny.logits(tiny.ids_NT, documents_NT=documents_NT)
    for start, stop in ((0, first), (first, last)):
        ids_NT = tiny.ids_NT[:, start:stop]
        alone = tiny.logits(ids_NT, documents_NT=None if tiny.causal else torch.ones_like(ids_NT))
        _same(alone, together[:, start:stop], "of a document in a packed sample", start)
    padded = tiny.ids_NT.clone()
    padded[:, last:] = (padded[:, last:] + 7) % VOCAB
    after = tiny.logits(padded, documents_NT=documents_NT)
    _same(together[:, :last], after[:, :last], "after a change of the padding")


def check_generation(tiny: TinyNet) -> None:
    """Texts that are decoded token by token, copied and reordered, give the logits of a full pass."""
    if not tiny.causal:
        return
    full = tiny.logits(tiny.ids_NT)
    slots = net_slots(tiny.net, SAMPLES + 1, LENGTH)
    lengths = [9, 1, 4, 9, 12, 0]
    texts = [tiny.ids_NT[row, :length].tolist() for row, length in enumerate(lengths)]
    slots.prefill(0, [*reversed(texts)])  # fills all slots, so that new texts find old ones in their slots
    slots.decode(tiny.ids_NT[:, 0], lengths[::-1])
    hidden_NTE = slots.prefill(0, texts)
    for row, length in enumerate(lengths):
        with torch.inference_mode():
            _same(full[row, :length], tiny.net.logits(hidden_NTE[row, :length]), "when a prompt is read into the cache")
    if tiny.net.has_attention_cache:
        slots.resume(1, lengths[1], tiny.ids_NT[1, lengths[1] : lengths[4]].tolist())
        lengths[1] = lengths[4]
    slots.move(2, SAMPLES, lengths[2])
    order = [3, 1, 0, 2, 4, 5]
    slots.reorder([3, 1, 0, SAMPLES, 4, 5], max(lengths))
    for step in range(6):
        places = [lengths[text] + step for text in order]
        ids_N = torch.stack([tiny.ids_NT[text, place] for text, place in zip(order, places, strict=True)])
        logits_NV = slots.decode(ids_N, places)
        for row, (text, place) in enumerate(zip(order, places, strict=True)):
            _same(
                full[text, place][None],
                logits_NV[row][None],
                "when tokens are decoded one by one; use context.cache, or let new_cache return None",
                place,
            )


def check_gradients(tiny: TinyNet) -> None:
    """Every weight gets a gradient."""
    net = tiny.build(None)
    tiny.loss(net).backward()  # type: ignore[no-untyped-call]
    tiny.gradients = _gradients(net)


def check_activation_checkpointing(tiny: TinyNet) -> None:
    """With activation checkpointing the gradients are the same."""
    net = tiny.build(None)
    net.activation_checkpointing = 1
    tiny.loss(net).backward()  # type: ignore[no-untyped-call]
    for name, gradient in _gradients(net).items():
        if not torch.allclose(gradient, tiny.gradients[name], rtol=1e-3, atol=1e-6):
            raise Broken(f"'{name}' has another gradient with engine.activation_checkpointing")


def check_dropout(tiny: TinyNet) -> None:
    """Dropout acts in training, and is the same for the same keys."""
    shape = tiny.shape.with_dropout(0.5)
    if not shape.uses_dropout:
        return
    net = new_net(shape, CPU)
    fill(net, tiny.noisy_weights(), "the contract")
    keys = [torch.as_tensor(dropout_keys(1, step, np.arange(SAMPLES))) for step in (0, 1)]
    first, second = (tiny.logits(tiny.ids_NT, net, dropout_keys=key) for key in keys)
    if torch.equal(first, second):
        raise Broken("shape.uses_dropout is true, but different keys give the same logits; call Dropout in the block")
    _same(first, tiny.logits(tiny.ids_NT, net, dropout_keys=keys[0]), "with the same dropout keys", exact=True)
    _same(tiny.logits(tiny.ids_NT), tiny.logits(tiny.ids_NT, net), "in evaluation, which has no dropout", exact=True)


def check_adapters(tiny: TinyNet) -> None:
    """New LoRA adapters change nothing, and every one of them gets a gradient."""
    lora = LoraConfig(rank=2)
    if not any(weight.lora for weight in tiny.shape.weights()) or not target_weights(tiny.shape, lora):
        return
    net = new_net(tiny.shape, CPU, lora)
    fill(net, [*tiny.noisy_weights(), *initial_adapters(tiny.shape, lora, 1)], "the contract")
    _same(tiny.logits(tiny.ids_NT), tiny.logits(tiny.ids_NT, net), "with new adapters")
    trained = tiny.build(lora)
    tiny.loss(trained).backward()  # type: ignore[no-untyped-call]
    _gradients(trained, {weight.name for weight in adapter_weights(tiny.shape, lora)})


def check_initial_loss(tiny: TinyNet) -> None:
    """Before training, all tokens are about equally likely."""
    net = new_net(tiny.shape, CPU)
    fill(net, initial_weights(tiny.shape, 1), "the contract")
    logits_NTV = tiny.logits(tiny.ids_NT, net)
    loss = float(F.cross_entropy(logits_NTV[:, :-1].flatten(0, 1), tiny.ids_NT[:, 1:].flatten()))
    if not abs(loss - math.log(VOCAB)) <= LOSS_TOLERANCE:
        raise Broken(f"the loss is {loss:.2f}, log(vocabulary) is {math.log(VOCAB):.2f}; check std in shape.weights")


CHECKS: tuple[Callable[[TinyNet], None], ...] = (
    check_weights,
    check_config,
    check_repeated_passes,
    check_saving,
    check_samples,
    check_causality,
    check_documents,
    check_generation,
    check_gradients,
    check_activation_checkpointing,
    check_dropout,
    check_adapters,
    check_initial_loss,
)


def _gradients(net: BaseNet, names: set[str] | None = None) -> dict[str, Tensor]:
    """The gradients by name; raises if one of `names` (default: any) is missing, zero or not finite."""
    gradients = {}
    for name, (_, parameter) in parameters_of(net).items():
        if names is not None and name not in names:
            continue
        if parameter.grad is None or not parameter.grad.any():
            raise Broken(f"'{name}' gets no gradient from the loss")
        if not parameter.grad.isfinite().all():
            raise Broken(f"'{name}' has a gradient that is not finite")
        gradients[name] = parameter.grad
    return gradients


def _same(wanted: Tensor, found: Tensor, when: str, start: int = 0, *, exact: bool = False) -> None:
    """Raise if logits [..., T, V] differ; the first position is counted from `start`."""
    if wanted.numel() == 0:
        return
    differences = (wanted - found).abs().nan_to_num(math.inf).amax(-1).reshape(-1, wanted.shape[-2]).amax(0)
    bound = 0.0 if exact else TOLERANCE * max(1.0, float(wanted.abs().max()))
    beyond = (differences > bound).nonzero()
    if len(beyond):
        place = int(beyond[0])
        raise Broken(f"other logits at position {start + place} {when} (by {float(differences[place]):.1e})")
