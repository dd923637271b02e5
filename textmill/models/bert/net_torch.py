"""BERT's net in torch. Shapes in names: N samples, T tokens, E width, H heads, D head width, M tokens, P pairs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from textmill.errors import TextmillError
from textmill.kernels.dropout_torch import drop
from textmill.kernels.fp8_torch import fp8_mlp
from textmill.kernels.gelu_torch import bias_gelu
from textmill.kernels.matmul_torch import linear
from textmill.kernels.triton_support import HAS_TRITON
from textmill.models.activations import GELUS
from textmill.models.base_torch import ACTIVATIONS, BaseBlock, BaseNet, new_embedding, to_matmul_dtype
from textmill.models.bert.facts import ANSWERS, SEQUENCES, Shape
from textmill.models.bert.heads_torch import Heads, Pooler
from textmill.models.cache_torch import Cache
from textmill.models.lora_torch import apply_linear, join_linears
from textmill.models.masks_torch import Mask, token_positions, two_way_block_mask, two_way_mask, use_block_mask


class Embeddings(nn.Module):
    """Word, position and segment embeddings; with a LayerNorm if the net has it after residual sums."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word_embeddings = new_embedding(shape.padded_vocab, shape.width)
        self.position_embeddings = new_embedding(shape.positions, shape.width)
        self.token_type_embeddings = new_embedding(shape.types, shape.width)
        self.LayerNorm = nn.LayerNorm(shape.width, shape.epsilon) if shape.norm == "post" else None

    def forward(self, ids_NT: Tensor, types_NT: Tensor, positions: Tensor) -> Tensor:
        x_NTE: Tensor = self.word_embeddings(ids_NT) + self.token_type_embeddings(types_NT)
        x_NTE = x_NTE + self.position_embeddings(positions)
        return x_NTE if self.LayerNorm is None else self.LayerNorm(x_NTE)


class SelfAttention(nn.Module):
    """Attention in both directions, before its last matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(shape.width, shape.width) for _ in range(3))
        self.head_width = shape.width // shape.heads
        self.dropout = shape.attention_dropout
        self.heads_part = 0
        """Which of several equal parts of the heads a tensor-parallel rank has."""

    def forward(self, x_NTE: Tensor, keys_N: Tensor | None, mask: Mask | None) -> Tensor:
        """Attention's weighted values, heads joined."""
        N, T, _ = x_NTE.shape
        parts = join_linears((self.query, self.key, self.value), x_NTE, keys_N)
        q_NHTD, k_NHTD, v_NHTD = (part.view(N, T, -1, self.head_width).transpose(1, 2) for part in parts)
        if isinstance(mask, BlockMask):
            y_NHTD = flex_attention(q_NHTD, k_NHTD, v_NHTD, block_mask=mask)
        elif keys_N is not None and self.dropout:
            y_NHTD = self._attention_weights(q_NHTD, k_NHTD, keys_N, mask) @ v_NHTD
        else:
            y_NHTD = F.scaled_dot_product_attention(q_NHTD, k_NHTD, v_NHTD, attn_mask=mask)
        return y_NHTD.transpose(1, 2).reshape(N, T, -1)

    def _attention_weights(self, q_NHTD: Tensor, k_NHTD: Tensor, keys_N: Tensor, mask_N1TT: Tensor | None) -> Tensor:
        """Explicit attention weights, for dropout on them."""
        scores = (q_NHTD @ k_NHTD.transpose(2, 3)) * self.head_width**-0.5
        scores = scores if mask_N1TT is None else scores.masked_fill(~mask_N1TT, float("-inf"))
        return drop(scores.softmax(-1, dtype=torch.float32), self.dropout, keys_N, 1, self.heads_part).to(q_NHTD.dtype)


class Output(nn.Module):
    """The last matrix of a residual branch, and the LayerNorm after its sum with the stream if the net has it there."""

    def __init__(self, shape: Shape, inputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, shape.width)
        self.LayerNorm = nn.LayerNorm(shape.width, shape.epsilon) if shape.norm == "post" else None
        self.dropout = shape.dropout
        self.tokens_part = 0
        """Which of several equal parts of the tokens a sequence-parallel rank has."""

    def forward(self, y: Tensor, stream_NTE: Tensor, keys_N: Tensor | None, site: int) -> Tensor:
        """The residual stream after the branch."""
        return self.add(apply_linear(self.dense, y, keys_N), stream_NTE, keys_N, site)

    def add(self, y_NTE: Tensor, stream_NTE: Tensor, keys_N: Tensor | None, site: int) -> Tensor:
        """The residual stream plus the matrix's outputs."""
        x_NTE = stream_NTE + drop(y_NTE, self.dropout, keys_N, site, self.tokens_part)
        return x_NTE if self.LayerNorm is None else to_matmul_dtype(self.LayerNorm(x_NTE))


class Attention(nn.Module):
    """Attention with its residual sum."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self = SelfAttention(shape)
        self.output = Output(shape, shape.width)
        self.ln = nn.LayerNorm(shape.width, shape.epsilon) if shape.norm == "pre" else None

    def forward(self, x_NTE: Tensor, keys_N: Tensor | None, mask: Mask | None) -> Tensor:
        y_NTE = x_NTE if self.ln is None else self.ln(x_NTE)
        out: Tensor = self.output(self.self(y_NTE, keys_N, mask), x_NTE, keys_N, 2)
        return out


class Intermediate(nn.Module):
    """The first matrix of the MLP and its activation."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.width, shape.inner)
        self.activation = shape.activation

    def forward(self, x_NTE: Tensor, keys_N: Tensor | None) -> Tensor:
        fused = HAS_TRITON and x_NTE.is_cuda and torch.is_grad_enabled() and type(self.dense) is nn.Linear
        if fused and self.activation in GELUS:
            x_NTF = linear(x_NTE, self.dense.weight, None)
            y_MF: Tensor = bias_gelu(x_NTF.flatten(0, -2), self.dense.bias, self.activation == "gelu_new")
            return y_MF.view(x_NTF.shape)
        return ACTIVATIONS[self.activation](apply_linear(self.dense, x_NTE, keys_N))


class Block(BaseBlock):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.ln = nn.LayerNorm(shape.width, shape.epsilon) if shape.norm == "pre" else None
        self.intermediate = Intermediate(shape)
        self.output = Output(shape, shape.inner)
        self.fp8 = False

    def compute(self, x_NTE: Tensor, keys_N: Tensor | None, cache: Cache | None, context: Mask | None) -> Tensor:
        """The residual stream after this block; the context is the mask."""
        if cache is not None:
            raise TextmillError("model.family: bert attends in both directions, so it has no KV cache to decode with")
        x_NTE = self.attention(x_NTE, keys_N, context)
        y_NTE = x_NTE if self.ln is None else self.ln(x_NTE)
        if self.fp8 and torch.is_grad_enabled():
            return self.output.add(self._mlp_in_fp8(y_NTE), x_NTE, keys_N, 3)
        out: Tensor = self.output(self.intermediate(y_NTE, keys_N), x_NTE, keys_N, 3)
        return out

    def _mlp_in_fp8(self, x_NTE: Tensor) -> Tensor:
        first = self.intermediate.dense
        last = self.output.dense
        tanh = self.intermediate.activation == "gelu_new"
        y_NTE = fp8_mlp(x_NTE.flatten(0, -2), first.weight, first.bias, last.weight, tanh).view(x_NTE.shape)
        return y_NTE + last.bias.to(y_NTE.dtype)


class Encoder(nn.Module):
    """The blocks, and the last LayerNorm if the others are before attention and MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln = nn.LayerNorm(shape.width, shape.epsilon) if shape.norm == "pre" else None


class Net(BaseNet):
    """BERT, with learned positions, a tied head for masked tokens and a head for sentence pairs."""

    shape: Shape
    few_labels = True
    fp8_activations = GELUS

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.embeddings, self.encoder, self.cls = Embeddings(shape), Encoder(shape), Heads(shape)
        self.has_pair_head, self.has_label_head = shape.pair_head, bool(shape.task)
        if shape.labels:
            self.classifier = nn.Linear(shape.width, len(shape.labels))
        if shape.task == ANSWERS:
            self.qa_outputs = nn.Linear(shape.width, 2)
        if shape.pooler:
            self.pooler = Pooler(shape)
        self.tokens_part = 0

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks, first to last."""
        return self.encoder.layer

    @property
    def embedding(self) -> nn.Embedding:
        """The token embedding, with its padding rows."""
        return self.embeddings.word_embeddings

    @property
    def head(self) -> Tensor:
        """The embedding: the head is tied to it."""
        return self.embeddings.word_embeddings.weight

    @property
    def head_bias(self) -> Tensor | None:
        """One number for each token."""
        return self.cls.predictions.bias if self.shape.masked_head else None

    def head_input(self, x_ME: Tensor) -> Tensor:
        """A matrix, the activation and a LayerNorm; without a head for masked tokens, the hidden states."""
        return to_matmul_dtype(self.cls.predictions.transform(x_ME)) if self.shape.masked_head else x_ME

    def pair_logits(self, x_PE: Tensor) -> Tensor:
        """The logits of both classes."""
        out: Tensor = self.cls.seq_relationship(self.pooler(x_PE))
        return out

    def label_logits(
        self, x_NTE: Tensor, positions_NK: Tensor, documents_NT: Tensor | None, keys_N: Tensor | None
    ) -> Tensor:
        """The classes of labelled tokens; of answers, the first and the last position, which padding cannot be."""
        if self.shape.task == ANSWERS:
            logits_N2T: Tensor = self.qa_outputs(x_NTE).float().transpose(1, 2)
            return (
                logits_N2T if documents_NT is None else logits_N2T.masked_fill(documents_NT[:, None] == 0, -torch.inf)
            )
        x_NKE = x_NTE.flatten(0, 1)[positions_NK]
        x_NKE = self.pooler(x_NKE) if self.shape.task == SEQUENCES else x_NKE
        site = 3 * self.shape.layers + 1  # after those of the blocks
        out: Tensor = self.classifier(drop(x_NKE, self.shape.dropout, keys_N, site))
        return out

    def begin(
        self,
        ids_NT: Tensor,
        keys_N: Tensor | None,
        positions_NT: Tensor | None,
        documents_NT: Tensor | None,
        types_NT: Tensor | None = None,
    ) -> tuple[Tensor, Mask | None]:
        """The residual stream before the first block, and the mask; positions start at 0 in every document."""
        mask = None if documents_NT is None else self._mask(documents_NT, keys_N)
        positions = token_positions(ids_NT, positions_NT, documents_NT)
        types_NT = torch.zeros_like(ids_NT) if types_NT is None else types_NT
        x_NTE = to_matmul_dtype(self.embeddings(ids_NT, types_NT, positions))
        return drop(x_NTE, self.shape.dropout, keys_N, 0, self.tokens_part), mask

    def end(self, x_NTE: Tensor) -> Tensor:
        """The last LayerNorm, if there is one."""
        return x_NTE if self.encoder.ln is None else to_matmul_dtype(self.encoder.ln(x_NTE))

    def _mask(self, documents_NT: Tensor, keys_N: Tensor | None) -> Mask:
        """The mask inside documents; attention dropout and activation checkpointing need the explicit mask."""
        explicit = self.recompute or (keys_N is not None and self.shape.attention_dropout)
        blocks = not explicit and use_block_mask(documents_NT, self.shape.width // self.shape.heads)
        return two_way_block_mask(documents_NT) if blocks else two_way_mask(documents_NT)
