"""The workload: a small Llama, and the ways in which people spread it over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of the model and of one rank's batch."""

    dim: int = 256
    num_layers: int = 8
    num_heads: int = 4
    vocab: int = 2048
    sequence: int = 128
    batch: int = 4

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.dim // self.num_heads

    @property
    def hidden_dim(self) -> int:
        """Elements inside the SwiGLU."""
        return 3 * self.dim


class RMSNorm(nn.Module):
    """Scale by the root mean square over the last dim, composed of primitive operations."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (..., dim) -> (..., dim)."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding.

    Shapes: x (batch, head, sequence, head_dim); cos and sin (sequence, head_dim / 2).
    """
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Attention(nn.Module):
    """Causal self-attention.

    The number of heads is read off the projections' outputs: under tensor parallelism a rank has
    its share of them.
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.query = nn.Linear(shape.dim, shape.dim, bias=False)
        self.key = nn.Linear(shape.dim, shape.dim, bias=False)
        self.value = nn.Linear(shape.dim, shape.dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Shapes: (batch, sequence, dim) -> (batch, sequence, dim)."""
        query, key, value = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """The gated feed-forward."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.hidden_dim, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden_dim, bias=False)
        self.down = nn.Linear(shape.hidden_dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (..., dim) -> (..., dim)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.dim)
        self.attention = Attention(shape)
        self.feed_forward_norm = RMSNorm(shape.dim)
        self.feed_forward = SwiGLU(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Shapes: (batch, sequence, dim) -> (batch, sequence, dim)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """A decoder whose forward returns the loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        frequency = 10_000.0 ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angle = torch.outer(torch.arange(shape.sequence).float(), frequency)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy. Shapes: (batch, sequence), (batch, sequence) -> ()."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def make_batch(shape: LlamaShape, *, seed: int) -> tuple[Tensor, Tensor]:
    """Random tokens and targets, each (batch, sequence)."""
    generator = torch.Generator().manual_seed(seed)
    size = (2, shape.batch, shape.sequence)
    tokens, targets = torch.randint(shape.vocab, size, generator=generator)
    return tokens, targets


def shard_blocks(model: Llama, mesh: DeviceMesh) -> Llama:
    """FSDP2 as its tutorial does it: every block a unit, the rest in the root's."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def split_matrices(model: Llama, mesh: DeviceMesh) -> Llama:
    """Tensor parallelism as its tutorial does it: columns in, rows out, two all-reduces a block."""
    plan: dict[str, ParallelStyle] = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model
