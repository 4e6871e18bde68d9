"""A launch of a graph: kernels as source, with their blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from aotdist.kernels.gpus import USUAL, Gpu
from aotdist.kernels.ir import Kernel
from aotdist.kernels.launching import Config, num_blocks_of
from aotdist.kernels.polynomial import Whole
from aotdist.kernels.printing import Printed


@dataclass(frozen=True, slots=True, eq=False)
class EmittedKernel:
    """One launch.

    Args:
        members: the kernel, or several that differ in nothing but their tensors and numbers.
        printed: its source.
        ways: how it may be cut into blocks, by estimated cost, cheapest first.
        nodes: the nodes that it computes, in order.
        num_bytes: what it reads and writes.
        looped: its source with loops, if it depends on the call whether one block holds what it reduces.
        gpu: which it is for.
    """

    members: tuple[Kernel, ...]
    printed: Printed
    ways: tuple[Config, ...]
    nodes: tuple[Node, ...]
    num_bytes: int
    looped: Printed | None = None
    gpu: Gpu = USUAL

    @property
    def forms(self) -> list[Printed]:
        """All its sources, of which a call runs one."""
        return [self.printed] if self.looped is None else [self.printed, self.looped]

    @property
    def is_sized(self) -> bool:
        """Whether it takes sizes, which differ from call to call."""
        return any(form.sizes for form in self.forms)

    @property
    def kernel(self) -> Kernel:
        """The first of its members; the others differ in tensors and numbers only."""
        return self.members[0]

    @property
    def config(self) -> Config:
        """How it is cut into blocks if nothing was measured."""
        return self.ways[0]

    @property
    def num_blocks(self) -> int:
        """How many blocks run side by side."""
        return self.num_blocks_in(self.config)

    def num_blocks_in(self, way: Config) -> int:
        """How many blocks run if it is cut in a given way."""
        return sum(num_blocks_of(member, way) for member in self.members)

    @property
    def num_results(self) -> Whole:
        """Places along `x`, of all members."""
        return sum(member.num_results for member in self.members)
