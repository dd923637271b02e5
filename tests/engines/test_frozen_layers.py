"""Training of a part of the net: what is frozen stays, deeper layers move less, and a run goes on bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engine_runs import VOCAB, batch_of, config_of, run, started
from textmill.config import LoraConfig
from textmill.engines import Engine, open_engine
from textmill.models import initial_weights, open_family
from textmill.models.lora import initial_adapters

FROZEN = ["wte", "h.0.*", "*.bias"]


def weights_of(engine: Engine) -> dict[str, Any]:
    return {name: values.copy() for name, values in engine.weights()}


@pytest.mark.parametrize("freeze", [[], FROZEN])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_optimizer_state_is_known_before_the_first_step(optimizer: str, freeze: list[str]) -> None:
    """Memory for the copies that a save takes is had then."""
    engine: Any = started(config_of("torch", optimizer=optimizer, freeze=freeze))
    stated = sorted(engine.optimizer.state_sizes())
    assert not list(engine.optimizer_state())
    run(engine, range(1))
    assert sorted(values.size for _, values in engine.optimizer_state()) == stated


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_weights_stay_and_a_resume_is_bitwise(optimizer: str) -> None:
    config = config_of("torch", dropout=0.1, optimizer=optimizer, freeze=FROZEN, layer_decay=0.7)
    straight = started(config)
    first = weights_of(straight)
    run(straight, range(3))
    weights, moments = weights_of(straight), list(straight.optimizer_state())
    stays = {name for name, values in weights.items() if np.array_equal(values, first[name])}
    assert stays == {
        name for name in first if name.startswith(("transformer.wte", "transformer.h.0.")) or name.endswith(".bias")
    }
    assert {name.partition("/")[2] for name, _ in moments} == set(first) - stays
    facts = straight.describe()
    assert facts["trained"] == sum(first[name].size for name in set(first) - stays)
    assert facts["parameters"] == sum(values.size for values in first.values())

    again = open_engine(config.engine, config.train, open_family("gpt2").shape_of(config.model, vocab=VOCAB, eos_id=0))
    again.load(weights.items(), moments, straight.updates(), "saved")
    assert again.updates() == 3
    assert run(again, range(3, 6)) == run(straight, range(3, 6))
    for name, values in weights_of(straight).items():
        assert np.array_equal(weights_of(again)[name], values), name


def test_only_matrices_under_muon() -> None:
    engine = started(config_of("torch", optimizer="muon", freeze=["wte", "wpe", "*ln_*", "*.bias"]))
    losses = run(engine, range(3))
    assert engine.updates() == 3
    assert {name.partition("/")[0] for name, _ in engine.optimizer_state()} == {"momentum"}
    assert losses[2] != losses[0]


def test_learning_rates_and_decay_match_torchs_parameter_groups() -> None:
    """The same groups given to torch's AdamW by hand, on transformers' net, lead to the same weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    decay, lr, steps = 0.6, 1e-2, 4
    settings = {"layer_decay": decay, "freeze": ["wpe", "h.0.mlp"], "weight_decay": 0.2, "clip": 0.0, "epsilon": 1e-3}
    engine = started(config_of("torch", **settings))
    theirs = GPT2LMHeadModel(GPT2Config(**open_family("gpt2").hf_config_of(engine.net.shape))).eval()  # type: ignore[attr-defined]
    theirs.load_state_dict(
        {name: torch.from_numpy(values) for name, values in weights_of(engine).items()}, strict=False
    )
    theirs.tie_weights()
    groups = []
    for name, parameter in theirs.transformer.named_parameters():
        power = 3 if name.startswith(("wte", "wpe")) else 0 if name.startswith("ln_f") else 2 - int(name.split(".")[1])
        decays = parameter.ndim == 2
        if name == "wpe.weight" or name.startswith("h.0.mlp"):
            parameter.requires_grad_(False)
        else:
            groups.append({"params": [parameter], "lr": lr * decay**power, "weight_decay": 0.2 * decays})
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-3)
    for step in range(steps):
        batch = batch_of(step)
        logits = theirs(torch.from_numpy(batch.inputs).long()).logits
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(batch.labels).long().flatten()
        ).backward()
        adam.step()
        adam.zero_grad()
        engine.train_step(batch, step, lr)
    wanted = {
        f"transformer.{name}": parameter.detach().numpy() for name, parameter in theirs.transformer.named_parameters()
    }
    for name, values in weights_of(engine).items():
        assert np.abs(values - wanted[name]).max() < 1e-5, name


def test_adapters_are_saved_even_if_frozen() -> None:
    config, lora = config_of("torch", freeze=["h.0"]), LoraConfig(rank=2)
    shape = open_family("gpt2").shape_of(config.model, vocab=VOCAB, eos_id=0)
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora, "init_from": "given"})})
    base = list(initial_weights(shape, 5))

    def engine_of(adapters: Any, moments: Any, updates: int) -> Engine:
        engine = open_engine(config.engine, config.train, shape, config.model.lora)
        engine.load([*base, *adapters], moments, updates, "given")
        return engine

    straight = engine_of(initial_adapters(shape, lora, 5), [], 0)
    first = weights_of(straight)
    assert len(first) == 2 * 4 * 2
    run(straight, range(3))
    kept, moments = weights_of(straight), list(straight.optimizer_state())
    assert {name for name, values in kept.items() if np.array_equal(values, first[name])} == {
        name for name in first if ".h.0." in name
    }
    again = engine_of(kept.items(), moments, straight.updates())
    assert run(again, range(3, 5)) == run(straight, range(3, 5))
