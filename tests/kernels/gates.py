"""Compiles the kernels of small programs for a GPU, and says what is wrong with them.

`python -m tests.kernels.gates TARGET [EVERY]` in a process that does not interpret; of every program, or of
every third, a line for each fault, and last how many kernels there were. A process of its own, because the
kernels of tests are interpreted.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aotdist
from aotdist.codegen.triton import with_kernels
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.gpus import Target
from aotdist.kernels.launching import is_persistent
from aotdist.kernels.polynomial import hint_of
from aotdist.program import Graph
from aotdist.subclasses.sparse24_operators import choose_24, compress_24
from benchmarks.kernels.binaries import Binary, compile_kernel, num_vectors
from benchmarks.kernels.graphs import graphs_of
from benchmarks.kernels.optimizers import clipped_adamw, random_state, sgd
from benchmarks.models import Block, LlamaShape

_SHAPE = LlamaShape(dim=256, num_heads=2, sequence=128, batch=4)
MAX_POINTWISE_REGISTERS = 64


def _numbers(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(*sizes, dtype=dtype, requires_grad=True)


def mlp(dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    module = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(dtype)
    return lambda x: module(x).sum(), (_numbers(512, 256, dtype=dtype),)


def llama_block(dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    block = Block(_SHAPE).to(dtype)
    angles = torch.zeros(2, _SHAPE.sequence, _SHAPE.head_dim // 2, dtype=dtype)
    x = _numbers(_SHAPE.batch, _SHAPE.sequence, _SHAPE.dim, dtype=dtype)
    return lambda x: block(x, *angles).sum(), (x,)


def softmax(dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    return lambda x: (torch.softmax(x, -1) * x).sum(), (_numbers(256, 4096, dtype=dtype),)


def cross_entropy(dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A vocabulary that no block holds."""
    targets = torch.zeros(256, dtype=torch.int64)
    return lambda x: F.cross_entropy(x.float(), targets), (_numbers(256, 32000, dtype=dtype),)


def dropout(dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Random numbers, drawn in kernels."""
    return lambda x: F.dropout(F.gelu(x), 0.1).sum(), (_numbers(512, 1024, dtype=dtype),)


def float8(dtype: torch.dtype) -> tuple[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """A norm by a scale for each row, the largest of all, and both layouts of what is cast."""

    def program(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        y = F.rms_norm(x, x.shape[-1:]).float()
        by_row = y / y.abs().amax(-1, keepdim=True)
        cast = (x * scale).to(torch.float8_e4m3fn)
        return by_row.to(torch.float8_e4m3fn), y.abs().amax(), cast, cast.t().contiguous()

    return program, (torch.zeros(512, 1024, dtype=dtype), torch.ones(()))


def large(dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Kernels that take long enough to have several ways."""

    def program(x: Tensor, weight: Tensor) -> Tensor:
        y = F.gelu(F.rms_norm(x, x.shape[-1:], weight))
        return torch.logsumexp(y.view(-1, 32768), -1).sum()

    return program, (_numbers(16384, 2048, dtype=dtype), _numbers(2048, dtype=dtype))


def sparse24(dtype: torch.dtype) -> tuple[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """A matrix, chosen from and packed."""

    def program(x: Tensor) -> tuple[Tensor, ...]:
        meta = choose_24(x, transposable=False)
        return compress_24(x, meta), meta

    return program, (torch.zeros(512, 1024, dtype=dtype),)


def softmax_of_any_size(dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    function, (x,) = softmax(dtype)
    return function, (_of_any_size(x, 0, 1),)


def cross_entropy_of_any_size(dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    function, (x,) = cross_entropy(dtype)
    return function, (_of_any_size(x, 1),)


def llama_block_of_any_size(dtype: torch.dtype) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    function, (x,) = llama_block(dtype)
    return function, (_of_any_size(x, 0),)


def _of_any_size(x: Tensor, *dims: int) -> Tensor:
    for dim in dims:
        aotdist.mark_dynamic(x, dim)
    return x


PROGRAMS = (mlp, llama_block, softmax, cross_entropy, dropout, float8)
IN_BFLOAT16 = (
    softmax_of_any_size,
    cross_entropy_of_any_size,
    llama_block_of_any_size,
    large,
    sparse24,
)
"""What is compiled in one precision, to spare time."""


def kernels(every: int) -> Iterator[tuple[str, EmittedKernel]]:
    """The kernels of every so many programs, with where each is from."""
    of_both = itertools.product(PROGRAMS, (torch.float32, torch.bfloat16))
    programs = [*of_both, *((program, torch.bfloat16) for program in IN_BFLOAT16)]
    for program, dtype in programs[::every]:
        function, args = program(dtype)
        for kind, graph in graphs_of(function, *args, settings={"functional_rng": True}):
            yield from kernels_of(f"{program.__name__} {dtype} {kind}", graph)
    for step in (clipped_adamw, sgd) if every == 1 else ():
        for _, graph in graphs_of(step, random_state(_SHAPE), settings={"is_compiling": True}):
            yield from kernels_of(step.__name__, graph)


def kernels_of(label: str, graph: Graph) -> Iterator[tuple[str, EmittedKernel]]:
    """The kernels of a graph, with where it is from."""
    for emitted in with_kernels(graph, keeps_casts=False, label=label).kernels:
        yield label, emitted


def faults(emitted: EmittedKernel, binary: Binary) -> Iterator[str]:
    """What is wrong with a kernel."""
    if binary.usage.spilled:
        yield f"spills {binary.usage.spilled} bytes"
    if emitted.kernel.r and not emitted.kernel.is_tiled and is_persistent(emitted.kernel):
        if any(hint_of(member.num_reduced) > emitted.config.rblock for member in emitted.members):
            yield f"holds {emitted.config.rblock} of what it reduces at once"
    if not emitted.kernel.r and binary.usage.registers > MAX_POINTWISE_REGISTERS:
        yield f"takes {binary.usage.registers} registers to no more than go through"
    if binary.target.startswith("sm_"):
        for word, wanted in zip(("LDG", "STG"), num_vectors(emitted), strict=True):
            found = binary.count(word, "128") + binary.count(f"{word}STS", "128")  # into shared memory
            if found < wanted:
                yield f"has {found} {word}.128 of {wanted}: {binary.instructions}"


def main(target: Target, every: int = 1) -> None:
    """Print faults, in every way that a kernel may be cut, and how many kernels there were."""
    count = 0
    for label, emitted in kernels(every):
        count += 1
        for way in emitted.ways:
            one = replace(emitted, ways=(way,))
            for fault in faults(one, compile_kernel(one, target)):
                print(f"{label}: {emitted.printed.name} {fault}\n{way}\n{emitted.printed.source}")
    print(f"{count} kernels")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))  # type: ignore[arg-type]
