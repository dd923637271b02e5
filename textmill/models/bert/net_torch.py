"""BERT's net in torch. Shapes in names: N samples, T tokens, E width, H heads, D head width, M tokens, P pairs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from textmill.errors import TextmillError
from textmill.kernels.dropout_torch import drop
from textmill.models.base_torch import (
    ACTIVATIONS,
    AttentionDropout,
    BaseBlock,
    BaseNet,
    Context,
    Dropout,
    Residual,
    add_fp8_mlp,
    add_linear,
    attention,
    linear_and_activation,
    linears,
    new_embedding,
    to_matmul_dtype,
    token_positions,
)
from textmill.models.bert.family import ANSWERS, PAIR_CLASSES, SEQUENCES, Shape
from textmill.models.hf_config import GELUS


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
        self.dropout = AttentionDropout(shape.attention_dropout)

    def forward(self, x_NTE: Tensor, context: Context) -> Tensor:
        N, T, _ = x_NTE.shape
        parts = linears(x_NTE, (self.query, self.key, self.value), context)
        q_NHTD, k_NHTD, v_NHTD = (part.view(N, T, -1, self.head_width).transpose(1, 2) for part in parts)
        return attention(q_NHTD, k_NHTD, v_NHTD, context, dropout=self.dropout, causal=False)


class Output(nn.Module):
    """The last matrix of a residual branch, and the LayerNorm after its sum with the stream if the net has it there."""

    def __init__(self, shape: Shape, inputs: int, site: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, shape.width)
        self.LayerNorm = nn.LayerNorm(shape.width, shape.epsilon) if shape.norm == "post" else None
        self.dropout = Dropout(shape.dropout, site)

    def forward(self, x_NTE: Tensor) -> Tensor:
        """The norm of the residual stream after the sum."""
        return x_NTE if self.LayerNorm is None else to_matmul_dtype(self.LayerNorm(x_NTE))


class Attention(nn.Module):
    """Attention with its residual sum."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self = SelfAttention(shape)
        self.output = Output(shape, shape.width, site=2)
        self.ln = nn.LayerNorm(shape.width, shape.epsilon) if shape.norm == "pre" else None

    def forward(self, x_NTE: Tensor, context: Context) -> Tensor:
        y_NTE = self.self(x_NTE if self.ln is None else self.ln(x_NTE), context)
        x_NTE = add_linear(y_NTE, self.output.dense, Residual(x_NTE), self.output.dropout, context)
        out: Tensor = self.output(x_NTE)
        return out


class Intermediate(nn.Module):
    """The first matrix of the MLP and its activation."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.width, shape.inner)
        self.activation = shape.activation

    def forward(self, x_NTE: Tensor, context: Context) -> Tensor:
        return linear_and_activation(x_NTE, self.dense, self.activation, context)


class Block(BaseBlock):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.ln = nn.LayerNorm(shape.width, shape.epsilon) if shape.norm == "pre" else None
        self.intermediate = Intermediate(shape)
        self.output = Output(shape, shape.inner, site=3)
        self.fp8 = False

    def compute(self, x_NTE: Tensor, context: Context) -> Tensor:
        """norm(x + attention(x)), then norm(x + MLP(x)); with `norm: pre` the norms are inside the branches."""
        if context.cache is not None:
            raise TextmillError("model.family: bert attends in both directions, so it has no KV cache to decode with")
        x_NTE = self.attention(x_NTE, context)
        y_NTE = x_NTE if self.ln is None else self.ln(x_NTE)
        last, residual, dropout = self.output.dense, Residual(x_NTE), self.output.dropout
        if self.fp8 and torch.is_grad_enabled():
            first = self.intermediate
            x_NTE = add_fp8_mlp(y_NTE, first.dense, first.activation, last, residual, dropout, context)
        else:
            x_NTE = add_linear(self.intermediate(y_NTE, context), last, residual, dropout, context)
        out: Tensor = self.output(x_NTE)
        return out


class Encoder(nn.Module):
    """The blocks, and the last LayerNorm if the others are before attention and MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln = nn.LayerNorm(shape.width, shape.epsilon) if shape.norm == "pre" else None


class Transform(nn.Module):
    """What is computed from hidden states before the masked tokens' head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.width, shape.width)
        self.LayerNorm = nn.LayerNorm(shape.width, shape.epsilon)
        self.activation = ACTIVATIONS[shape.activation]

    def forward(self, x_ME: Tensor) -> Tensor:
        out: Tensor = self.LayerNorm(self.activation(self.dense(x_ME)))
        return out


class Predictions(nn.Module):
    """The masked tokens' head; its matrix is the word embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(shape.padded_vocab))
        self.transform = Transform(shape)


class Heads(nn.Module):
    """The heads that the shape has, under transformers' names."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        if shape.masked_head:
            self.predictions = Predictions(shape)
        if shape.pair_head:
            self.seq_relationship = nn.Linear(shape.width, PAIR_CLASSES)


class Pooler(nn.Module):
    """What is computed from a sample's first token before the pairs' head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.width, shape.width)

    def forward(self, x_PE: Tensor) -> Tensor:
        return torch.tanh(self.dense(x_PE))


class Net(BaseNet):
    """BERT, with learned positions, a tied head for masked tokens and a head for sentence pairs."""

    shape: Shape
    blocks_name = "encoder.layer"
    embedding_name = "embeddings.word_embeddings"
    head_for_labels_only = True
    causal = False
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
        self.dropout = Dropout(shape.dropout, site=0)

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
        self, x_NTE: Tensor, positions_NK: Tensor, documents_NT: Tensor | None, dropout_keys: Tensor | None
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
        out: Tensor = self.classifier(drop(x_NKE, self.shape.dropout, dropout_keys, site))
        return out

    def embed_inputs(
        self, ids_NT: Tensor, context: Context, documents_NT: Tensor | None, types_NT: Tensor | None = None
    ) -> tuple[Tensor, Context]:
        """Word, position and segment embeddings; positions start at 0 in every document."""
        positions = token_positions(ids_NT, context.cache, documents_NT)
        types_NT = torch.zeros_like(ids_NT) if types_NT is None else types_NT
        x_NTE = to_matmul_dtype(self.embeddings(ids_NT, types_NT, positions))
        context = self.block_context(ids_NT, context, documents_NT)
        return self.dropout(x_NTE, context), context

    def final_norm(self, x_NTE: Tensor) -> Tensor:
        """The last LayerNorm, if there is one."""
        return x_NTE if self.encoder.ln is None else to_matmul_dtype(self.encoder.ln(x_NTE))
