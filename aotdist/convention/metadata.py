"""Writes to what a tensor is, rather than to what it holds: `t_`, `resize_`, `set_`, `requires_grad_`.

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
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam.autograd import history_of


@dataclass(frozen=True, slots=True)
class SwitchedOn:
    """Inputs that begin to require grad.

    Args:
        inputs: which; before the call, which is to give them gradients.
    """

    inputs: tuple[PrimalIdx, ...]

    def lift(self, call: Call) -> Call:
        """Switch it on."""

        def lifted(primals: Sequence[Any]) -> list[Any]:
            for idx in self.inputs:
                primals[idx].requires_grad_()
            return call(primals)

        return lifted


def rewrite(
    tensor: torch.Tensor, write: MetadataWrite, args: Sequence[Any], data: torch.Tensor | None = None
) -> None:
    """Do one write of metadata to `tensor`, with `args` in the place of the write's own."""
    history_of(tensor)  # a view whose base got one is a leaf to autograd until somebody asks for it
    with torch.set_grad_enabled(write.grad):
        write.op(tensor, *args, **dict(write.kwargs))
    if data is not None:
        for plain, value in zip(plain_tensors(tensor), plain_tensors(data), strict=True):
            plain.data.copy_(value)


class Metadata:
    """See `aotdist.convention.layer.Layer`."""

    def lower(self, program: Program[PrimalIdx], facts: Facts) -> tuple[Program[PrimalIdx], SwitchedOn]:
        """The inner program writes the metadata of other names for the same tensors."""
        changed = facts.reshaped()

        def fn(*primals: Any) -> list[Any]:
            own = [p.view_as(p) if PrimalIdx(k) in changed else p for k, p in enumerate(primals)]
            return program.fn(*own)

        return Program(fn, program.ins, program.examples), SwitchedOn(facts.switched_on)


METADATA = Metadata()
