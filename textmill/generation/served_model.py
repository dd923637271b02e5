"""Opens a model for the server: a scheduler that generates text, an encoder for embeddings and masks, or both."""

from __future__ import annotations

from collections.abc import Callable

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EmbedConfig, EngineConfig, ServeConfig
from textmill.generation.encoders.embedder_torch import Embedder, open_embedder
from textmill.generation.encoders.embedding_texts import can_embed, new_text_encoder
from textmill.generation.encoders.encoder import EncoderThread
from textmill.generation.encoders.fill_texts import new_masked_texts
from textmill.generation.encoders.filler_torch import Filler
from textmill.generation.scheduler import Scheduler, open_scheduler
from textmill.generation.turns import Turns
from textmill.models import has_masked_head, open_family, read_shape


def open_served_model(
    checkpoint: Checkpoint, engine: EngineConfig, serve: ServeConfig, embed: EmbedConfig, after_step: Callable[[], None]
) -> tuple[Scheduler | None, EncoderThread | None]:
    """Load a checkpoint once. What both compute with, they use in turns."""
    turns = Turns()
    where = str(checkpoint.folder)
    shape = read_shape(checkpoint.folder)
    limits = {"slots": serve.slots, "queue": serve.queue}
    if open_family(shape.family).OBJECTIVE == "masked":
        embedder = open_embedder(checkpoint, engine, embed)
        net = embedder.net
        tokenizer = embedder.texts.tokenizer
        texts = new_masked_texts(tokenizer, shape.positions, where) if has_masked_head(shape) else None
        filler = None if texts is None else Filler(net, texts)
        return None, EncoderThread(embedder, filler, turns=turns, after_step=after_step, **limits)
    scheduler = open_scheduler(checkpoint, engine, serve, after_step, turns)
    if not can_embed(shape):
        return scheduler, None
    generator = scheduler.generator
    encoder, pooling = new_text_encoder(shape, generator.tokenizer, embed, checkpoint.folder)
    embedder = Embedder(generator.net, encoder, pooling, where)
    return scheduler, EncoderThread(embedder, None, turns=turns, after_step=after_step, **limits)
