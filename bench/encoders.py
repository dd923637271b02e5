"""Measures embeddings and pseudo-log-likelihoods of a BERT with random weights, next to transformers in the same run.

    python bench/encoders.py [size] [texts] [device]      default: tiny 2000 cpu

Texts have 3 to 120 random tokens. Transformers gets padded batches of 64 texts, in the order given and sorted by length
(as sentence-transformers does). For pseudo-log-likelihoods it gets the copies of one text at a time, and computes the
head for masks only.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from textmill.checkpoints.folders import Checkpoint
from textmill.config import SIZES, ModelConfig
from textmill.devices import autocast, open_device, torch_dtype
from textmill.evaluation.scorer_torch import MaskedScorer
from textmill.generation.embed import TextEncoder
from textmill.generation.encoder import Embedder
from textmill.models import initial_weights, open_family
from textmill.models.nets_torch import fill, new_net
from textmill.models.pooling import Pooling

VOCAB, BATCH = 30522, 64
FIRST, LAST, MASK = 101, 102, 103


def main() -> None:
    """Build the model in both libraries, and measure each twice."""
    size, count, name = (*sys.argv[1:], *("tiny", "2000", "cpu")[len(sys.argv) - 1 :])
    device = open_device(name)
    dtype = torch_dtype("auto", device)
    shape: Any = open_family("bert").shape_of(ModelConfig(family="bert", size=size), vocab=VOCAB, eos_id=LAST)
    assert size in SIZES["bert"]
    ours = new_net(shape, device)
    fill(ours, initial_weights(shape, 1), "random weights")
    theirs = their_net(shape, device, dtype)
    dice = np.random.default_rng(2)
    texts = [dice.integers(200, VOCAB, int(length)) for length in dice.integers(3, 121, int(count))]
    tokens = sum(map(len, texts))
    print(f"bert {size}, {count} texts, {tokens:,} tokens, {dtype} on {device}")
    scorer = MaskedScorer(Checkpoint(Path("random"), 0, {}), ours, special_tokens(), 64, dtype)
    some = texts[: max(len(texts) // 20, 1)]
    masks = sum(map(len, some))
    report("pseudo-log-likelihood, textmill", masks, lambda: scorer.score_tokens([((), text) for text in some]))
    report("pseudo-log-likelihood, transformers", masks, lambda: [their_score(theirs, text, device) for text in some])
    half = ours.to(dtype)
    embedder = Embedder(half, TextEncoder(special_tokens(), 512, shape.width), Pooling(), "random")
    report("embeddings, textmill", tokens, lambda: embedder.embed_ids(texts))
    ordered = sorted(texts, key=len)
    report("embeddings, transformers, sorted", tokens, lambda: their_embeddings(theirs, ordered, device))
    report("embeddings, transformers", tokens, lambda: their_embeddings(theirs, texts, device))
    found, wanted = embedder.embed_ids(texts[:8]), their_embeddings(theirs, texts[:8], device)
    print(f"largest difference {np.abs(found - wanted).max():.2g} of {np.abs(wanted).max():.2g}")


def special_tokens() -> Any:
    """What both need of a tokenizer."""
    return SimpleNamespace(vocab=VOCAB, eos_id=LAST, cls_id=FIRST, sep_id=LAST, mask_id=MASK)


def their_net(shape: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Transformers' net with the same weights."""
    from transformers import BertForPreTraining

    with tempfile.TemporaryDirectory() as folder:
        from textmill.config import ExportConfig
        from textmill.conversion.formats import hf
        from textmill.conversion.model import Model

        hf.write(Model(shape, dict(initial_weights(shape, 1))), Path(folder), ExportConfig(folder=folder))
        return BertForPreTraining.from_pretrained(folder).eval().to(device, dtype)


@torch.inference_mode()
def their_embeddings(net: Any, texts: list[Any], device: torch.device) -> Any:
    """Padded batches and their masked mean."""
    found = []
    for begin in range(0, len(texts), BATCH):
        some = texts[begin : begin + BATCH]
        longest = max(map(len, some))
        ids = torch.tensor(np.array([np.pad(text, (0, longest - len(text))) for text in some]), device=device)
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in some], device=device)
        states = net.bert(ids, attention_mask=mask).last_hidden_state.float()
        found.append(((states * mask[:, :, None]).sum(1) / mask.sum(1)[:, None]).cpu())
    return torch.cat(found).numpy()


@torch.inference_mode()
def their_score(net: Any, text: Any, device: torch.device) -> float:
    """All copies of one text in a batch."""
    rows = torch.tensor([[FIRST, *text, LAST]] * len(text), device=device)
    each = torch.arange(len(text), device=device)
    rows[each, each + 1] = MASK
    with autocast(device, next(net.parameters()).dtype):
        logits = net.cls.predictions(net.bert(rows).last_hidden_state[each, each + 1]).float()
    return float(logits.log_softmax(-1)[each, torch.tensor(text, device=device)].sum())


def report(what: str, amount: int, work: Callable[[], object]) -> None:
    """Print the rate of the second of two calls."""
    work()
    start = time.perf_counter()
    work()
    print(f"{what:<40} {amount / (time.perf_counter() - start):>12,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
