"""Writes to what an input is, rather than to what it holds: `t_`, `squeeze_`, `detach_`, `requires_grad_`.

They are done to the user's tensor, outside of the region and in the order of the program, by the very
operations that the program used. The region sees the tensor as it was: new data comes back, and is written,
in the old sizes and strides, before these change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.convention.layer import Call
from aotdist.facts import Facts, MetadataWrite
from aotdist.program import PrimalIdx, Program


@dataclass(frozen=True, slots=True)
class MetadataPlan:
    """What to do to inputs.

    Args:
        switched_on: inputs that begin to require grad: before the call, which is to give them gradients.
        writes: what to do after it, in order.
    """

    switched_on: tuple[PrimalIdx, ...]
    writes: tuple[MetadataWrite, ...]

    def lift(self, call: Call) -> Call:
        """Do it."""

        def lifted(primals: Sequence[Any]) -> list[Any]:
            for idx in self.switched_on:
                primals[idx].requires_grad_()
            outs = call(primals)
            for write in self.writes:
                rewrite(primals[write.input], write)
            return outs

        return lifted


def rewrite(tensor: torch.Tensor, write: MetadataWrite) -> None:
    """Do one such write to `tensor`."""
    with torch.set_grad_enabled(write.grad):
        write.op(tensor, *write.args, **dict(write.kwargs))


class Metadata:
    """See `aotdist.convention.layer.Layer`."""

    def lower(self, program: Program[PrimalIdx], facts: Facts) -> tuple[Program[PrimalIdx], MetadataPlan]:
        """The inner program does it to other names for the same tensors."""
        changed = {write.input for write in facts.metadata}

        def fn(*primals: Any) -> list[Any]:
            own = [p.view_as(p) if PrimalIdx(k) in changed else p for k, p in enumerate(primals)]
            return program.fn(*own)

        return Program(fn, program.ins, program.examples), MetadataPlan(facts.switched_on, facts.metadata)


METADATA = Metadata()
