"""Training with a head of its own, on every engine: the losses of transformers' net with torch's AdamW."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engine_runs import ENGINES, VOCAB, batch_of, config_of, first_of, run, started
from textmill.models import open_family
from textmill.tokens.batches.batch import IGNORED

STEPS, RATE = 4, 1e-2
MARKS = {"jax": pytest.mark.long, "deepspeed": pytest.mark.long}


def their_losses(config: Any, steps: int) -> list[float]:
    """Of transformers' net, trained with torch's AdamW on the same batches."""
    from transformers import GPT2Config, GPT2LMHeadModel

    family = open_family("gpt2")
    shape = family.shape_of(config.model, vocab=VOCAB, eos_id=0)
    net = GPT2LMHeadModel(GPT2Config(**family.hf_config_of(shape), attn_implementation="eager"))
    net.load_state_dict({name: torch.from_numpy(values) for name, values in first_of(config, shape)})
    train, losses = config.train, []
    adam = torch.optim.AdamW(net.parameters(), RATE, betas=tuple(train.betas), eps=train.epsilon, weight_decay=0.0)
    for step in range(steps):
        batch = batch_of(step)
        logits = net(torch.from_numpy(batch.inputs).long()).logits.flatten(0, 1)
        labels = torch.from_numpy(batch.labels).long().flatten()
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), train.clip)
        adam.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("engine", [pytest.param(one, marks=MARKS.get(one, ())) for one in ENGINES])
def test_losses_equal_those_of_transformers(engine: str) -> None:
    config = config_of(engine, weight_decay=0.0)
    shape = config.model.shape.model_copy(update={"untied": True})
    config = config.model_copy(update={"model": config.model.model_copy(update={"shape": shape})})
    ours = started(config)
    assert run(ours, range(STEPS)) == pytest.approx(their_losses(config, STEPS), rel=2e-6)
    after = dict(ours.weights())
    assert after["lm_head.weight"].shape == after["transformer.wte.weight"].shape == (VOCAB, 32)
    assert not np.allclose(after["lm_head.weight"], after["transformer.wte.weight"], atol=1e-3)
