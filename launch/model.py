"""A Llama-style decoder over bytes, written to be read.

Shape suffixes: B sequences, T positions, D model width, H query heads, K key/value heads, W head width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aotdist.launch.config import ModelOptions

VOCABULARY = 256
"""One token per byte value."""


class RMSNorm(nn.Module):
    """Normalises each position to a root mean square of one, and scales it by a learned weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (..., D) -> (..., D). The mean is taken in fp32 whatever `x` is."""
        wide = x.float()
        inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * inverse_rms).type_as(x) * self.weight


class Rope(nn.Module):
    """The rotary tables: cosine and sine of position times frequency.

    Source: Su et al., "RoFormer", arXiv:2104.09864, section 3.2.2; pairs are (i, i + W/2), as in Llama.
    """

    table: Tensor

    def __init__(self, head_dim: int, seq_len: int, theta: float) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles_TW = torch.outer(torch.arange(seq_len, dtype=torch.float32), theta**-exponents)
        self.register_buffer("table", torch.stack([angles_TW.cos(), angles_TW.sin()]), persistent=False)

    def forward(self, seq_len: int) -> Tensor:
        """Shapes: -> (2, T, W/2), cosines then sines of the first `seq_len` positions."""
        return self.table[:, :seq_len]


def rotate(x_BHTW: Tensor, rope: Tensor) -> Tensor:
    """Turns each pair of features by its position's angle.

    Shapes: (B, H, T, W), (2, T, W/2) -> (B, H, T, W).
    """
    cos, sin = rope.unbind()
    left, right = x_BHTW.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1).type_as(x_BHTW)


class Attention(nn.Module):
    """Causal self-attention whose key/value heads are shared by groups of query heads.

    The number of heads is read off the projections' outputs, so that tensor parallelism, which gives every
    rank a share of the heads, needs no code here.
    """

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.head_dim = options.head_dim
        kv_dim = options.num_kv_heads * options.head_dim
        self.query = nn.Linear(options.dim, options.dim, bias=False)
        self.key = nn.Linear(options.dim, kv_dim, bias=False)
        self.value = nn.Linear(options.dim, kv_dim, bias=False)
        self.out = nn.Linear(options.dim, options.dim, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """Shapes: (B, T, D), (2, T, W/2) -> (B, T, D)."""
        q_BHTW = rotate(self._heads(self.query(x)), rope)
        k_BKTW = rotate(self._heads(self.key(x)), rope)
        v_BKTW = self._heads(self.value(x))
        mixed_BHTW = F.scaled_dot_product_attention(q_BHTW, k_BKTW, v_BKTW, is_causal=True, enable_gqa=True)
        return self.out(mixed_BHTW.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """The gated feed-forward layer.

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202.
    """

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (B, T, D) -> (B, T, D)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One decoder block, pre-norm: attention, then SwiGLU, each added to the residual stream."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(options.dim, options.norm_eps)
        self.attention = Attention(options)
        self.mlp_norm = RMSNorm(options.dim, options.norm_eps)
        self.mlp = SwiGLU(options.dim, options.swiglu_dim)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """Shapes: (B, T, D), (2, T, W/2) -> (B, T, D)."""
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Bytes in, logits or the loss out.

    Args:
        options: the shape.
        seq_len: longest sequence that it will see.
    """

    def __init__(self, options: ModelOptions, seq_len: int) -> None:
        super().__init__()
        self.tie_head = options.tie_head
        self.embedding = nn.Embedding(VOCABULARY, options.dim)
        self.rope = Rope(options.head_dim, seq_len, options.rope_theta)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.num_layers))
        self.norm = RMSNorm(options.dim, options.norm_eps)
        self.head = nn.Linear(options.dim, VOCABULARY, bias=False)
        self.tie()

    def tie(self) -> None:
        """Ties head and embedding, if the options say so; to be repeated when either is replaced."""
        if self.tie_head:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or with `targets` the mean cross-entropy, in nats and fp32.

        Shapes: tokens (B, T) int64, targets (B, T) int64 -> (B, T, 256), or a scalar with targets.
        """
        rope = self.rope(tokens.shape[1])
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rope)
        logits = self.head(self.norm(x)).float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draws the initial parameters, which depend on the seed alone.

        Projections into the residual stream have a smaller deviation, by the root of their number.
        Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), section 2.3.
        """
        generator = torch.Generator().manual_seed(seed)
        residual_scale = 1 / math.sqrt(2 * len(self.blocks))
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                weight.fill_(1.0)
                continue
            scale = residual_scale if name.endswith(("out.weight", "down.weight")) else 1.0
            weight.normal_(0.0, scale * weight.shape[1] ** -0.5, generator=generator)


def build_decoder(options: ModelOptions, *, seq_len: int, seed: int) -> Decoder:
    """A decoder on the CPU with its initial parameters drawn from `seed`."""
    model = Decoder(options, seq_len)
    model.initialise(seed)
    return model


def num_parameters(model: nn.Module) -> int:
    """Parameters of the whole model, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
