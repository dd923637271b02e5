"""GPT-2's net in torch. Shapes in names: N samples, T tokens, E width, H heads, D head width, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from textmill.errors import TextmillError
from textmill.kernels.attention_torch import attended, is_written
from textmill.kernels.dropout_torch import drop, keys_in
from textmill.kernels.fp8_torch import MULTIPLE, mlp8
from textmill.kernels.matmul_torch import are_chosen, linear, onto
from textmill.kernels.norms_torch import parted
from textmill.kernels.qkv_torch import project
from textmill.models.blockwise_torch import PLAIN, Parts
from textmill.models.gpt2.facts import Shape
from textmill.models.lora_torch import through

try:
    from textmill.kernels.gelu_triton import bias_gelu
except ImportError:  # no kernel can be built here
    bias_gelu = None  # type: ignore[assignment]


BLOCK = 128
"""Places of one block of a mask."""
Mask = Tensor | BlockMask
"""Which tokens each one may look at: [N, 1, T, T], or blocks of that."""


class Cache:
    """Keys and values of the tokens seen so far, in memory taken once."""

    def __init__(self, shape: Shape, samples: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        size = (shape.layers, samples, shape.heads, length, shape.width // shape.heads)
        self.keys = torch.zeros(size, device=device, dtype=dtype)
        self.values = torch.zeros(size, device=device, dtype=dtype)
        self.used = 0

    def extend(self, layer: int, k_NHTD: Tensor, v_NHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values; return all of that layer's."""
        end = self.used + k_NHTD.shape[2]
        self.keys[layer, :, :, self.used : end] = k_NHTD
        self.values[layer, :, :, self.used : end] = v_NHTD
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Attention(nn.Module):
    """Causal self-attention; QKV stands by head, so that whole heads can be shared out."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(shape.width, 3 * shape.width)
        self.c_proj = nn.Linear(shape.width, shape.width)
        self.shape, self.layer = shape, layer
        self.part = 0
        """Which of its equal parts of the heads a tensor-parallel peer holds."""

    def forward(
        self,
        x_NTE: Tensor,
        keys_N: Tensor | None,
        cache: Cache | None,
        mask: Mask | None,
        stream_NTE: Tensor | None = None,
    ) -> Tensor:
        """What attention makes of x; added to the stream, if that is given, which has the last bias's gradient."""
        y_NTE = self._looked_up(x_NTE, keys_N, cache, mask)
        return through(self.c_proj, y_NTE, keys_N) if stream_NTE is None else onto(stream_NTE, self.c_proj, y_NTE)

    def _looked_up(self, x_NTE: Tensor, keys_N: Tensor | None, cache: Cache | None, mask: Mask | None) -> Tensor:
        """What each token finds in those that it may look at, heads joined."""
        N, T, _ = x_NTE.shape
        share, D = self.shape.attention_dropout, self.shape.width // self.shape.heads
        if mask is None and cache is None and (keys_N is None or not share) and is_written(x_NTE, self.c_attn, D):
            return attended(x_NTE, self.c_attn, D)
        q_NHTD, k_NHTD, v_NHTD = self._split(x_NTE, keys_N)
        if cache is not None:
            k_NHTD, v_NHTD = cache.extend(self.layer, k_NHTD, v_NHTD)
        if isinstance(mask, BlockMask):
            y_NHTD = flex_attention(q_NHTD, k_NHTD, v_NHTD, block_mask=mask)
        elif keys_N is not None and share:
            y_NHTD = self._plain(q_NHTD, k_NHTD, share, keys_N, mask) @ v_NHTD
        elif mask is not None:
            y_NHTD = F.scaled_dot_product_attention(q_NHTD, k_NHTD, v_NHTD, attn_mask=mask)
        elif k_NHTD.shape[2] == T:
            y_NHTD = F.scaled_dot_product_attention(q_NHTD, k_NHTD, v_NHTD, is_causal=True)
        else:
            seen = None if T == 1 else _causal(T, k_NHTD.shape[2], x_NTE.device)
            y_NHTD = F.scaled_dot_product_attention(q_NHTD, k_NHTD, v_NHTD, attn_mask=seen)
        return y_NHTD.transpose(1, 2).reshape(N, T, -1)

    def _split(self, x_NTE: Tensor, keys_N: Tensor | None) -> tuple[Tensor, ...]:
        """Queries, keys and values of every head."""
        D = self.shape.width // self.shape.heads
        if type(self.c_attn) is nn.Linear and are_chosen(x_NTE, self.c_attn.weight):
            return project(x_NTE, self.c_attn.weight, self.c_attn.bias, D)
        qkv = through(self.c_attn, x_NTE, keys_N).view(*x_NTE.shape[:2], -1, 3, D)
        return tuple(part.transpose(1, 2) for part in qkv.unbind(3))

    def _plain(self, q_NHTD: Tensor, k_NHTD: Tensor, share: float, keys_N: Tensor, mask_N1TT: Tensor | None) -> Tensor:
        """Attention weights written out, for dropout on them."""
        scores = (q_NHTD @ k_NHTD.transpose(2, 3)) * q_NHTD.shape[-1] ** -0.5
        mask = _causal(scores.shape[2], scores.shape[3], scores.device) if mask_N1TT is None else mask_N1TT
        scores = scores.masked_fill(~mask, float("-inf"))
        return drop(scores.softmax(-1, dtype=torch.float32), share, keys_N, 1, self.part).to(q_NHTD.dtype)


def _causal(asking: int, seen: int, device: torch.device) -> Tensor:
    """Which of the seen tokens each asking one, the last of them, may look at."""
    return torch.ones(asking, seen, dtype=torch.bool, device=device).tril(seen - asking)


def _apart(documents_NT: Tensor) -> Tensor:
    """Which tokens each one may look at when attention stays inside its document."""
    same_NTT = documents_NT[:, :, None] == documents_NT[:, None, :]
    return (same_NTT & _causal(same_NTT.shape[1], same_NTT.shape[2], same_NTT.device))[:, None]


def _blocks_apart(documents_NT: Tensor) -> BlockMask:
    """The same in blocks, so that attention leaves out those in which nothing is looked at."""
    N, T = documents_NT.shape

    def seen(n: Tensor, h: Tensor, asking: Tensor, place: Tensor) -> Tensor:
        return (asking >= place) & (documents_NT[n, asking] == documents_NT[n, place])

    return create_block_mask(seen, N, None, T, T, device=documents_NT.device)


def _in_blocks(documents_NT: Tensor, heads_width: int) -> bool:
    """Whether masks in blocks pay: in a net that is compiled for a GPU, with shapes that fill the blocks."""
    fills = documents_NT.shape[1] % BLOCK == 0 and heads_width in (16, 32, 64, 128, 256)
    return documents_NT.is_cuda and torch.compiler.is_compiling() and fills


def _begins(documents_NT: Tensor) -> Tensor:
    """The place at which each token's document begins."""
    places_T = torch.arange(documents_NT.shape[1], device=documents_NT.device)
    new_NT = F.pad(documents_NT[:, 1:] != documents_NT[:, :-1], (1, 0), value=False)
    return torch.where(new_NT, places_T, 0).cummax(1).values


def _narrow(x: Tensor) -> Tensor:
    """The residual stream in the precision of the products: half the bytes between them."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class MLP(nn.Module):
    """Two matrices and a GELU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.width, shape.inner)
        self.c_proj = nn.Linear(shape.inner, shape.width)
        self.approximate = "tanh" if shape.activation == "gelu_new" else "none"
        self.fp8 = False

    def forward(self, x_NTE: Tensor, keys_N: Tensor | None = None, stream_NTE: Tensor | None = None) -> Tensor:
        """What the two make of x; added to the stream, if that is given, which has the last bias's gradient."""
        if self.fp8 and torch.is_grad_enabled():
            y_NTE = self._in_fp8(x_NTE.flatten(0, -2)).view(x_NTE.shape)
            bias_E = self.c_proj.bias.to(y_NTE.dtype)
            return y_NTE + bias_E if stream_NTE is None else stream_NTE + (y_NTE + bias_E.detach())
        y_NTF = self.inner(x_NTE, keys_N)
        return through(self.c_proj, y_NTF, keys_N) if stream_NTE is None else onto(stream_NTE, self.c_proj, y_NTF)

    def _in_fp8(self, x_ME: Tensor) -> Tensor:
        return mlp8(x_ME, self.c_fc.weight, self.c_fc.bias, self.c_proj.weight, self.approximate == "tanh")

    def inner(self, x_NTE: Tensor, keys_N: Tensor | None = None) -> Tensor:
        """What stands between the two matrices."""
        if bias_gelu is not None and x_NTE.is_cuda and torch.is_grad_enabled() and type(self.c_fc) is nn.Linear:
            x_NTF = linear(x_NTE, self.c_fc.weight, None)
            y_MF: Tensor = bias_gelu(x_NTF.flatten(0, -2), self.c_fc.bias, self.approximate == "tanh")
            return y_MF.view(x_NTF.shape)
        return F.gelu(through(self.c_fc, x_NTE, keys_N), approximate=self.approximate)


class Block(nn.Module):
    """Pre-LayerNorm attention and MLP, each added to the stream."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width, shape.epsilon)
        self.attn = Attention(shape, layer)
        self.ln_2 = nn.LayerNorm(shape.width, shape.epsilon)
        self.mlp = MLP(shape)
        self.share = shape.residual_dropout
        self.part = 0
        """Which of its equal parts of the tokens a sequence-parallel peer holds."""

    def forward(
        self, x_NTE: Tensor, keys_N: Tensor | None, cache: Cache | None, mask: Mask | None, parts: Parts = PLAIN
    ) -> Tensor:
        """The stream after this block; `keys_N` are the block's own."""
        out: Tensor = parts.work(self, x_NTE, keys_N, cache, mask)
        return out

    def work(self, x_NTE: Tensor, keys_N: Tensor | None, cache: Cache | None, mask: Mask | None) -> Tensor:
        """What a block does."""
        if (keys_N is None or not self.share) and self._adds(x_NTE):
            y_NTE, x_NTE = parted(x_NTE, self.ln_1)
            x_NTE = self.attn(y_NTE, keys_N, cache, mask, x_NTE)
            y_NTE, x_NTE = parted(x_NTE, self.ln_2, self.attn.c_proj.bias, self.mlp.c_proj.bias)
            out: Tensor = self.mlp(y_NTE, keys_N, x_NTE)
            return out
        x_NTE = x_NTE + drop(self.attn(self.ln_1(x_NTE), keys_N, cache, mask), self.share, keys_N, 2, self.part)
        return x_NTE + drop(self.mlp(self.ln_2(x_NTE), keys_N), self.share, keys_N, 3, self.part)

    def _adds(self, x_NTE: Tensor) -> bool:
        """Whether the last matrix of each half adds to the stream by itself: where nothing stands in between, and products are chosen."""
        plain = all(type(half.c_proj) is nn.Linear for half in (self.attn, self.mlp))
        return plain and are_chosen(x_NTE, self.attn.c_proj.weight)


class Net(nn.Module):
    """Ids in, hidden states out; `logits` is the tied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.wte = _embedding(shape.padded_vocab, shape.width)
        self.wpe = _embedding(shape.positions, shape.width)
        self.h = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width, shape.epsilon)
        self.recompute, self.lora, self.part = 0, None, 0
        self.fp8 = False

    def use_fp8(self) -> None:
        """From now on training makes the MLPs' products in fp8; the head's are the loss's to make."""
        if self.shape.width % MULTIPLE or self.shape.inner % MULTIPLE:
            widths = f"{self.shape.width} and {self.shape.inner}"
            raise TextmillError(
                f"engine.precision: fp8 needs widths that {MULTIPLE} divides, found {widths}; set engine.precision=auto"
            )
        if self.lora is not None:
            raise TextmillError(
                "engine.precision: fp8 is not made for the narrow matrices of model.lora; set engine.precision=auto"
            )
        self.fp8 = True
        for module in self.modules():
            if isinstance(module, MLP):
                module.fp8 = True

    def forward(
        self,
        ids_NT: Tensor,
        keys_N: Tensor | None = None,
        cache: Cache | None = None,
        documents_NT: Tensor | None = None,
        parts: Parts = PLAIN,
    ) -> Tensor:
        """Hidden states of every token, in the precision of the products; `keys_N` asks for dropout, `cache` holds what came before,
        documents are kept apart if given."""
        before = cache.used if cache is not None else 0
        x_NTE, mask = parts.begin(self, ids_NT, keys_N, before, documents_NT)
        again = self.recompute if cache is None and torch.is_grad_enabled() else 0
        for start in range(0, len(self.h), again or len(self.h)):
            part = (start, start + (again or len(self.h)), x_NTE, keys_N, cache, mask, parts)
            # Dropout is a hash of places, so that nothing random needs to be kept and replayed.
            x_NTE = (
                checkpoint(self._blocks, *part, use_reentrant=False, preserve_rng_state=False)
                if again
                else self._blocks(*part)
            )
        if cache is not None:
            cache.used += ids_NT.shape[1]
        out: Tensor = parts.end(self, x_NTE)
        return out

    def begin(
        self, ids_NT: Tensor, keys_N: Tensor | None, before: int, documents_NT: Tensor | None
    ) -> tuple[Tensor, Mask | None]:
        """The stream before the first block, and what its tokens may look at."""
        positions = torch.arange(before, before + ids_NT.shape[1], device=ids_NT.device)
        mask: Mask | None = None
        if documents_NT is not None:
            mask = self._mask(documents_NT, keys_N)
            positions = positions - _begins(documents_NT)
        x_NTE = _narrow(self.wte(ids_NT) + self.wpe(positions))
        return drop(x_NTE, self.shape.embedding_dropout, keys_N, 0, self.part), mask

    def end(self, x_NTE: Tensor) -> Tensor:
        """What comes after the last block."""
        return _narrow(self.ln_f(x_NTE))

    def _blocks(
        self,
        start: int,
        stop: int,
        x_NTE: Tensor,
        keys_N: Tensor | None,
        cache: Cache | None,
        mask: Mask | None,
        parts: Parts,
    ) -> Tensor:
        for layer, block in enumerate(self.h[start:stop], start):
            x_NTE = block(x_NTE, keys_in(keys_N, layer), cache, mask, parts)
        return x_NTE

    def _mask(self, documents_NT: Tensor, keys_N: Tensor | None) -> Mask:
        """What keeps documents apart; dropout on attention's weights and states made again need it written out."""
        written = self.recompute or (keys_N is not None and self.shape.attention_dropout)
        blocks = not written and _in_blocks(documents_NT, self.shape.width // self.shape.heads)
        return _blocks_apart(documents_NT) if blocks else _apart(documents_NT)

    @property
    def head(self) -> Tensor:
        """The matrix that scores a token's successors: the embedding, with its padding rows."""
        return self.wte.weight

    def logits(self, x_NTE: Tensor) -> Tensor:
        """Scores of the real vocabulary; the padding rows never reach a softmax."""
        return F.linear(x_NTE, self.head)[..., : self.shape.vocab]


def _embedding(rows: int, width: int) -> nn.Embedding:
    """One without first values: to draw them where there is no memory yet, torch would import its compiler."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))
