"""Writes to what a tensor is, rather than to what it holds: `t_`, `resize_`, `set_`, `requires_grad_`.

They are repeated on the user's tensor, outside of the region and in the program's order, by the operations
that the program used. The region sees the tensor as it was: new data is returned, and written, in the old
sizes and strides, before these change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.facts import Facts, MetadataWrite
from aotdist.program import Call, PrimalIdx, Program
from aotdist.sizes import is_symbolic
from aotdist.subclasses.protocol import Plain, is_wrapper, plain_tensors
from aotdist.torch_seam.autograd import end_of_size, history_of


@dataclass(frozen=True, slots=True)
class SwitchedOn:
    """Inputs that begin to require grad, or whose gradients are of other sizes than they are.

    Args:
        inputs: those that begin to require grad; done before the call, whose node gives them gradients.
        sized: leaves with gradients of other sizes, and the sizes that they have where the program first uses
            them. Autograd checks gradients against these, so their accumulation nodes are made for these
            sizes, before the call.
    """

    inputs: tuple[PrimalIdx, ...] = ()
    sized: tuple[tuple[PrimalIdx, tuple[int, ...]], ...] = ()

    def lift(self, call: Call) -> Call:
        """`call`, after `requires_grad_` of the inputs and the making of accumulation nodes."""

        def lifted(primals: Sequence[Any]) -> list[Any]:
            for idx in self.inputs:
                primals[idx].requires_grad_()
            held = [end_of_size(primals[idx], size) for idx, size in self.sized]
            results = call(primals)
            del held
            return results

        return lifted


def rewrite(
    tensor: torch.Tensor, write: MetadataWrite, args: Sequence[Any], data: torch.Tensor | None = None
) -> None:
    """Repeat one write of metadata on `tensor`, with `args` in the place of the write's own.

    Args:
        tensor: the caller's.
        write: the write.
        args: its arguments, tensors of the trace replaced by those of the call.
        data: what the tensor's plain tensors are to hold afterwards; None to leave them as they are.
    """
    history_of(tensor)  # makes it: a view whose base got one is a leaf to autograd until it is asked for
    with torch.set_grad_enabled(write.grad):
        write.op(tensor, *args, **dict(write.kwargs))
    if data is not None:
        for plain, value in zip(plain_tensors(tensor), plain_tensors(data), strict=True):
            plain.data.copy_(value)


def switched_on(program: Program[PrimalIdx], facts: Facts) -> SwitchedOn:
    """What is to be done before the call."""
    return SwitchedOn(facts.switched_on, tuple(_sized(program, facts)))


def takes_any_size(example: torch.Tensor, size: Sequence[Any]) -> bool:
    """Whether an input may get a gradient of this size, though it has another: a plain leaf."""
    return example.is_leaf and not is_wrapper(example) and not is_symbolic(tuple(size))


def _sized(program: Program[PrimalIdx], facts: Facts) -> Iterator[tuple[PrimalIdx, tuple[int, ...]]]:
    for idx in sorted(facts.reshaped()):
        grad, known = facts.backward.grads[idx], facts.recipes[idx]
        if not (isinstance(grad, Plain) and isinstance(known, Plain)):
            continue
        if grad.size != known.size and takes_any_size(program.examples[idx], grad.size):
            yield idx, tuple(grad.size)
