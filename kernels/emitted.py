"""A launch of a graph: kernels as source, with their blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from aotdist.kernels.ir import Kernel
from aotdist.kernels.launching import Config, num_blocks_of
from aotdist.kernels.printing import Printed


@dataclass(frozen=True, slots=True, eq=False)
class EmittedKernel:
    """One launch.

    Args:
        members: what it computes: a kernel, or several that differ in nothing but their tensors and numbers.
        printed: its source.
        config: its blocks.
        nodes: the nodes that it computes, in order.
        num_bytes: what it reads and writes.
    """

    members: tuple[Kernel, ...]
    printed: Printed
    config: Config
    nodes: tuple[Node, ...]
    num_bytes: int

    @property
    def kernel(self) -> Kernel:
        """The first of its members, which the others are like."""
        return self.members[0]

    @property
    def num_blocks(self) -> int:
        """How many blocks run side by side."""
        return sum(num_blocks_of(member, self.config) for member in self.members)

    @property
    def num_results(self) -> int:
        """Places along `x`, of all members."""
        return sum(member.num_results for member in self.members)
