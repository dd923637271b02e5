"""Embedder: a net that turns texts into vectors, many texts in one forward pass.

Shapes in names: N rows, T tokens of a row, U texts, M tokens of all texts, E width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EmbedConfig, EngineConfig
from textmill.devices import open_device, torch_dtype
from textmill.errors import TextmillError
from textmill.generation.encoders.embedding_texts import Ids, TextEncoder, new_text_encoder
from textmill.models.base_torch import BaseNet
from textmill.models.nets_torch import open_net
from textmill.models.packed_texts import PackedTexts, pack_texts
from textmill.models.pooling import Pooling
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

GPU_ROW_TOKENS = 512
CPU_ROW_TOKENS = 64
"""Short texts share rows of this many tokens: few rows are fast on a GPU, short rows cost less attention."""
GPU_BATCH_TOKENS = 1 << 16
CPU_BATCH_TOKENS = 2048
"""Tokens in one forward pass; more do not fit into a CPU's caches."""

Vectors = NDArray[np.float32]


class Embedder:
    """A net, and how a vector is made of its hidden states. Texts do not affect each other."""

    def __init__(self, net: BaseNet, texts: TextEncoder, pooling: Pooling, where: str) -> None:
        self.net = net
        self.texts = texts
        self.pooling = pooling
        self.where = where

    def embed(self, texts: list[str]) -> Vectors:
        """The embeddings [U, E] of texts."""
        return self.embed_ids([one.ids for one in self.texts.encode(texts)])

    def embed_ids(self, ids: Sequence[Ids]) -> Vectors:
        """The embeddings of encoded texts, special tokens included, in the order given."""
        vectors: Vectors = np.zeros((len(ids), self.texts.dimension), np.float32)
        for numbers, found in self.batches(ids):
            vectors[numbers] = found
        return vectors

    def batches(self, ids: Sequence[Ids]) -> Iterator[tuple[Ids, Vectors]]:
        """The same batch by batch, longest texts first: which texts, and their embeddings."""
        on_cpu = self.net.head.device.type == "cpu"
        packed = pack_texts(
            ids,
            row_tokens=CPU_ROW_TOKENS if on_cpu else GPU_ROW_TOKENS,
            batch_tokens=CPU_BATCH_TOKENS if on_cpu else GPU_BATCH_TOKENS,
        )
        for one in packed:
            vectors = self._embed(one)
            if not np.isfinite(vectors).all():
                raise TextmillError(
                    f"{self.where}: an embedding is not finite; the weights are damaged or training diverged"
                )
            yield one.numbers_U, vectors

    @torch.inference_mode()
    def _embed(self, packed: PackedTexts) -> Vectors:
        device = self.net.head.device
        documents = None if packed.documents_NT is None else torch.from_numpy(packed.documents_NT).to(device)
        states_NTE = self.net(torch.from_numpy(packed.ids_NT).to(device), documents_NT=documents)
        pooled_UE = self._pool(states_NTE.flatten(0, 1), packed)
        vectors: Vectors = (F.normalize(pooled_UE) if self.pooling.normalize else pooled_UE).cpu().numpy()
        return vectors

    def _pool(self, flat: Tensor, packed: PackedTexts) -> Tensor:
        def on_device(array: Ids) -> Tensor:
            return torch.from_numpy(array).to(flat.device)

        if self.pooling.kind == "cls":
            return flat[on_device(packed.starts_U)].float()
        sums_UE = torch.zeros(len(packed.lengths_U), flat.shape[1], device=flat.device)
        sums_UE.index_add_(0, on_device(packed.texts_M), flat[on_device(packed.places_M)].float())
        return sums_UE / on_device(packed.lengths_U)[:, None]


def open_embedder(checkpoint: Checkpoint, engine: EngineConfig, config: EmbedConfig) -> Embedder:
    """Load a checkpoint's net and tokenizer; an adapter is merged into its base."""
    tokenizer = open_tokenizer(checkpoint.tokenizer)
    device = open_device(engine.device)
    net = open_net(checkpoint.folder, device)
    texts, pooling = new_text_encoder(net.shape, tokenizer, config, checkpoint.folder)
    return Embedder(net.to(torch_dtype(engine.precision, device)), texts, pooling, str(checkpoint.folder))
