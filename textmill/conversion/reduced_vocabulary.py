"""A model with the tokens that some text uses: embeddings gathered, logits of the kept tokens compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from textmill.conversion.compare import LOGIT_BOUNDS, logits_of, measure, sample_ids
from textmill.conversion.model import Model
from textmill.errors import TextmillError
from textmill.models import Shape, weights_of
from textmill.tokens.vocabulary.reduction import Reduction


def reduce_shape(shape: Shape, reduction: Reduction) -> Shape:
    """The shape with as many tokens as are kept."""
    end = np.flatnonzero(reduction.kept == shape.end).tolist()
    return replace(shape, vocab=len(reduction.kept), end=end[0] if end else reduction.tokenizer.end)


def reduce_model(model: Model, reduction: Reduction) -> Model:
    """The model with the kept tokens; raises unless it computes the same logits for them."""
    by_token = {weight.name for weight in weights_of(model.shape) if weight.by_token}
    weights = {name: values[reduction.kept] if name in by_token else values for name, values in model.weights.items()}
    reduced = Model(
        reduce_shape(model.shape, reduction), weights, reduction.tokenizer, card=model.card, pooling=model.pooling
    )
    ids = sample_ids(reduced)
    found = measure(logits_of(model, reduction.kept[ids])[..., reduction.kept], logits_of(reduced, ids))
    if not found.largest <= LOGIT_BOUNDS["fp32"] * found.scale:
        raise TextmillError(f"export.vocab_used_in: the logits of kept tokens differ by {found.largest:.2g}")
    print(
        f"export: {len(reduction.kept):,} of {model.shape.vocab:,} tokens are kept; their logits differ by at most "
        f"{found.largest:.2g}"
    )
    return reduced
