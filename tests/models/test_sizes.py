"""Named sizes have the published parameter counts; the largest nets are built on the meta device."""

from __future__ import annotations

import pytest
import torch

from textmill.config import ModelConfig, ShapeConfig
from textmill.models import open_family
from textmill.models.nets_torch import new_net, parameters_of


@pytest.mark.parametrize(
    ("size", "vocab", "published", "places"),
    [
        ("small", 50257, 124_439_808, 0),  # OpenAI's files, as transformers counts them
        ("medium", 50257, 354_823_168, 0),
        ("large", 50257, 774_030_080, 0),
        ("xl", 50257, 1_557_611_200, 0),
        ("megatron-8.3b", 50257, 8.3e9, 8),  # the paper's 8.3 billion
        ("yuan-4.7b", 53228, 4.7013e9, 5),  # the task's 4.7 billion, with its vocabulary
    ],
)
def test_published_counts(size: str, vocab: int, published: float, places: int) -> None:
    """`places` is how many of the count's last digits the publication leaves out."""
    family = open_family("gpt2")
    shape = family.shape_of(ModelConfig(size=size), vocab=vocab, eos_id=0)
    assert round(shape.parameters, -places) == round(published, -places)
    net = new_net(shape, torch.device("meta"))
    padding = (shape.padded_vocab - shape.vocab) * shape.width
    assert sum(parameter.numel() for _, parameter in parameters_of(net).values()) == shape.parameters + padding
    assert all(parameter.is_meta for _, parameter in parameters_of(net).values())


@pytest.mark.parametrize(("family", "size"), [("gpt2", "nano"), ("llama", "nano"), ("bert", "tiny")])
def test_attention_may_have_a_dropout_rate_of_its_own(family: str, size: str) -> None:
    """config.json has both rates, under the names that transformers reads."""
    names = {
        "gpt2": ("resid_pdrop", "attn_pdrop"),
        "llama": ("residual_dropout", "attention_dropout"),
        "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    }
    opened = open_family(family)
    for own, expected in ((None, [0.1, 0.1]), (0.0, [0.1, 0.0])):
        model = ModelConfig(family=family, size=size, shape=ShapeConfig(dropout=0.1, attention_dropout=own))
        written = opened.hf_config_of(opened.shape_of(model, vocab=100, eos_id=0))
        assert [written[name] for name in names[family]] == expected
