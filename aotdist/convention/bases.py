"""Inputs that share memory, one of them written: the program reads them through one base.

A write to one must be seen through the others, so they cannot be separate values. Which inputs are written is
known from a first trace; if some of them overlap others (`aliasing/memory.py` decides, to the byte), the
program is traced a second time over *bases*, of which there are two kinds:

- a **span**, the part of the storage that contains a group of inputs, as a flat tensor without history. Each
  plain tensor of the group, also one inside a wrapper, is traced as a view of the span *beneath* autograd:
  the histories of the inputs, and their gradients, stay as they are.
- a **view base**, where a write with history changes the history of other inputs: autograd must see that one
  is a view of another. `y = x[0]; x.mul_(w)` gives `y` a new history. The tensor that the inputs are views of
  (an input, or their common `_base`) is traced first, and the views are made of it again. This concerns views
  that share no memory, too. A single plain view needs no base: autograd knows its place in the base.

`needed_bases.py` decides which are needed. Inputs of a view base must not share memory with others, which
autograd does not connect with them: `f(x, x[0], x.detach())` is refused if it writes `x` with history.

The inputs stay inputs, for gradients, identity and views of them; bases are put in front of them. Source:
"Add an opaque epilogue in AOTAutograd for aliasing/mutations" (pytorch#85036), where one layer does both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from aotdist.aliasing.memory import start_of
from aotdist.program import Call, DistinctIdx, PrimalIdx, Program, Row, Slot
from aotdist.subclasses.protocol import leaves, plain_tensors, recipe_of
from aotdist.torch_seam.autograd import creation_meta
from aotdist.torch_seam.tensors import storage_id


@dataclass(frozen=True, slots=True)
class Member:
    """A plain tensor of an input, and its place in a span.

    Args:
        input: the input.
        leaf: which of the plain tensors beneath it.
        size: its sizes.
        stride: its strides.
        offset: of its first element in the span, in elements.
    """

    input: DistinctIdx
    leaf: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def plain(self, distinct: Sequence[torch.Tensor]) -> torch.Tensor:
        """The plain tensor."""
        return plain_tensors(distinct[self.input])[self.leaf]


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a storage, as a flat tensor.

    Args:
        members: the plain tensors that lie in it; the first tells where it is.
        numel: its length in elements.
        dtype: that of the members.
    """

    members: tuple[Member, ...]
    numel: int
    dtype: torch.dtype

    def of(self, distinct: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The span of these inputs; None if they lie otherwise."""
        plains = [member.plain(distinct) for member in self.members]
        return span_over(plains, self.offsets(), self.numel, self.dtype)

    def offsets(self) -> tuple[int, ...]:
        """Where each member starts."""
        return tuple(member.offset for member in self.members)


@dataclass(frozen=True, slots=True)
class ViewBase:
    """The tensor that some inputs are views of, to autograd.

    Args:
        views: the inputs that are views of it.
        offsets: where each view starts in the storage.
        itself: the input that it is, if it is one.
        creations: what autograd knows of how each view was made.
    """

    views: tuple[DistinctIdx, ...]
    offsets: tuple[int, ...]
    itself: DistinctIdx | None
    creations: tuple[Any, ...]

    def of(self, distinct: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The base of these inputs; None if they are no such views."""
        base = None if self.itself is None else distinct[self.itself]
        return base_of([distinct[idx] for idx in self.views], self.offsets, self.creations, base)


Base: TypeAlias = Span | ViewBase


@dataclass(frozen=True, slots=True)
class BasePlan:
    """The inputs of the traced program: bases, then the distinct inputs that are no bases themselves.

    Args:
        bases: how to make each.
        kept: the inputs that follow them.
        num_inputs: how many inputs there were before the trace; those that the trace adds follow them.
    """

    bases: Row[PrimalIdx, Base] = field(default_factory=lambda: Row[PrimalIdx, Base]())
    kept: tuple[DistinctIdx, ...] = ()
    num_inputs: int = 0

    def lift(self, call: Call) -> Call:
        """Make the bases."""

        def lifted(distinct: Sequence[Any]) -> list[Any]:
            made = [base.of(distinct) for base in self.bases]
            return call([*made, *(distinct[idx] for idx in self.inputs(len(distinct)))])

        return lifted

    def inputs(self, count: int) -> list[DistinctIdx]:
        """Which of `count` inputs follow the bases."""
        return [*self.kept, *map(DistinctIdx, range(self.num_inputs, count))]

    def position(self, idx: DistinctIdx) -> PrimalIdx:
        """Where an input stands among the primals."""
        for at, base in self.bases.enumerate():
            if isinstance(base, ViewBase) and base.itself == idx:
                return at
        later = idx - self.num_inputs
        return PrimalIdx(len(self.bases) + (self.kept.index(idx) if later < 0 else len(self.kept) + later))

    def is_new(self, at: PrimalIdx) -> bool:
        """Whether a primal is none of the inputs."""
        if at >= len(self.bases):
            return False
        base = self.bases[at]
        return isinstance(base, Span) or base.itself is None

    def is_span(self, at: PrimalIdx) -> bool:
        """Whether a primal is a span."""
        return at < len(self.bases) and isinstance(self.bases[at], Span)

    def aliases(self) -> Mapping[tuple[PrimalIdx, int], tuple[PrimalIdx, Member]]:
        """For each plain tensor that lies in a span, by primal and leaf: which span, and where in it."""
        return {
            (self.position(member.input), member.leaf): (at, member)
            for at, base in self.bases.enumerate()
            if isinstance(base, Span)
            for member in base.members
        }

    def views(self) -> Mapping[PrimalIdx, PrimalIdx]:
        """For each primal that is made again as a view: of which base."""
        return {
            self.position(idx): at
            for at, base in self.bases.enumerate()
            if isinstance(base, ViewBase)
            for idx in base.views
        }


NO_BASES = BasePlan()


def span_over(
    members: Sequence[torch.Tensor], offsets: Sequence[int], numel: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """The memory that contains `members`, as a flat tensor of `dtype`.

    None if they are not on one storage, or do not start at `offsets`, in elements from its beginning.
    """
    first, size = members[0], dtype.itemsize
    start, storage = start_of(first) - offsets[0] * size, storage_id(first)
    if start < 0:
        return None
    for member, offset in zip(members, offsets, strict=True):
        if storage_id(member) != storage or start_of(member) - offset * size != start:
            return None
    memory = first.untyped_storage()[start : start + numel * size]
    flat = torch.empty(0, dtype=dtype, device=first.device)
    return flat.set_(memory)  # pyright: ignore[reportArgumentType]  # the stub wants a typed storage


def base_of(
    views: Sequence[torch.Tensor],
    offsets: Sequence[int],
    creations: Sequence[Any],
    base: torch.Tensor | None,
) -> torch.Tensor | None:
    """The tensor that `views` are views of: `base`, if that is given.

    None if they are not views of it, start at other offsets, or have other `CreationMeta`s.
    """
    base = views[0]._base if base is None else base
    for view, offset, creation in zip(views, offsets, creations, strict=True):
        if view._base is not base or int(view.storage_offset()) != offset:
            return None
        if creation_meta(view) != creation:
            return None
    return base


def lower(program: Program[DistinctIdx], plan: BasePlan) -> Program[PrimalIdx]:
    """The same function, with the bases as inputs too; the trace makes the other inputs views of these."""
    order = [plan.position(idx) for idx in program.ins.indices()]

    def fn(*primals: Any) -> list[Any]:
        return program.fn(*(primals[at] for at in order))

    distinct = list(program.examples)
    made = [base.of(distinct) for base in plan.bases]
    kept = plan.inputs(len(distinct))
    examples = [*(base for base in made if base is not None), *(distinct[idx] for idx in kept)]
    slots = [*(_slot(base, program) for base in plan.bases), *(program.ins[idx] for idx in kept)]
    return Program(fn, Row(slots), Row(examples))


def _slot(base: Base, program: Program[DistinctIdx]) -> Slot:
    if isinstance(base, ViewBase):
        if base.itself is not None:
            return program.ins[base.itself]
        return Slot("primal", f"{program.ins[base.views[0]].path}._base")
    names = (_name(program, member) for member in base.members)
    return Slot("primal", f"the memory of {', '.join(names)}")


def _name(program: Program[DistinctIdx], member: Member) -> str:
    inner = [path for path, _ in leaves(recipe_of(program.examples[member.input]))]
    return f"{program.ins[member.input].path}{inner[member.leaf]}"
