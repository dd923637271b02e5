"""FLOPs of a step: our formula against torch's counter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from textmill.config import LoraConfig, ModelConfig, RunConfig, ShapeConfig, TorchEngine, TrainConfig
from textmill.engines import open_engine
from textmill.models import initial_weights, open_family
from textmill.models.lora import initial_adapters, weights_with_adapters
from textmill.models.parameter_groups import rules_of
from textmill.tokens.batches.batch import Batch

aten = torch.ops.aten
VOCAB, LENGTH, ROWS, LAYERS, WIDTH = 256, 16, 4, 4, 64
OURS = {
    aten.addmm_: lambda _, one, other, **__: 2 * one[0] * one[1] * other[1],
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda dy, q, k, v, *_, **__: sdpa_backward_flop_count(
        dy, q, k, v
    ),
}
"""Operators that torch's counter knows under other names."""


@pytest.mark.parametrize(
    ("freeze", "lora"),
    [
        ([], None),
        (["h.0", "h.1", "wte", "wpe"], None),
        (["h.*"], None),
        (["wte", "wpe"], None),
        ([], LoraConfig(rank=4)),
    ],
    ids=["all", "the upper half", "embeddings alone", "the blocks", "adapters"],
)
def test_the_formula_matches_torchs_counter(freeze: list[str], lora: LoraConfig | None) -> None:
    shape_config = ShapeConfig(layers=LAYERS, heads=2, width=WIDTH, positions=LENGTH, dropout=0.0)
    config = RunConfig(
        model=ModelConfig(size="nano", shape=shape_config),
        train=TrainConfig(batch=ROWS, length=LENGTH, freeze=freeze),
        engine=TorchEngine(device="cpu", micro_batch=ROWS),
    )
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})
    family = open_family("gpt2")
    shape = family.shape_of(config.model, vocab=VOCAB, eos_id=0)
    assert shape.padded_vocab == VOCAB
    engine = open_engine(config.engine, config.train, shape, config.model.lora)
    engine.load(
        [*initial_weights(shape, 1), *(initial_adapters(shape, lora, 1) if lora else [])], [], 0, "the first weights"
    )
    ids = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    with FlopCounterMode(display=False, custom_mapping=OURS) as counter:
        engine.train_step(Batch(ids[:, :-1], ids[:, 1:], np.arange(ROWS)), 0, 1e-3)
    rules = rules_of(shape, config.train, lora)
    trained = [weight for weight in weights_with_adapters(shape, lora) if rules[weight.name].trained]
    found = counter.get_total_flops() / (ROWS * LENGTH)
    assert shape.flops_per_token(LENGTH, trained) == pytest.approx(found, rel=0.05)
    if not freeze and lora is None:
        assert shape.flops_per_token(LENGTH, trained) == shape.flops_per_token(LENGTH)
