"""Inputs that share memory, one of them written: the program reads them through one base.

A write to one must be seen through the others, so they cannot be values of their own. Which inputs are
written is known from a first trace; if some of those meet others (`memory` decides, to the byte), the
program is traced a second time over *bases*, of which there are two kinds:

- a **span**, the stretch of storage that a group of inputs lies in, as a flat tensor without history. Each
  plain tensor of the group, also one inside a wrapper, is traced as a view of the span *beneath* autograd:
  what autograd knows of the inputs, and the gradients that they get, stay as they are.
- a **view base**, where the write takes part in the backward. Then autograd itself must see that one input
  is a view of another: `y = x[0]; x.mul_(w)` gives `y` a new history. The tensor that the inputs are views of
  (an input, or their common `_base`) is traced first, and the views are made of it again, under autograd.

The inputs stay inputs, for gradients, identity and views of them; bases are put in front of them. Source:
"Add an opaque epilogue in AOTAutograd for aliasing/mutations" (pytorch#85036), where one layer does both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from aotdist.convention.layer import Call
from aotdist.convention.memory import overlapping_groups, span, start_of
from aotdist.errors import UnsupportedProgram
from aotdist.facts import DataWritten, Facts
from aotdist.program import DistinctIdx, PrimalIdx, Program, Row, Slot
from aotdist.subclasses.protocol import leaves, plain_tensors, recipe_of
from aotdist.torch_seam import storage_id


@dataclass(frozen=True, slots=True)
class Member:
    """A plain tensor of an input, and where it lies.

    Args:
        input: the input.
        leaf: which of the plain tensors beneath it.
        size: its sizes; `stride`: its strides.
        dtype: of its elements.
        offset: of its first element, from the beginning of the span, in elements of the span.
    """

    input: DistinctIdx
    leaf: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of storage, as a flat tensor of its own.

    Args:
        members: the plain tensors that lie in it; the first tells where it is.
        numel: its length in elements.
        dtype: that of the members; bytes, where they differ.
    """

    members: tuple[Member, ...]
    numel: int
    dtype: torch.dtype

    def of(self, distinct: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The span of these inputs; None if they lie otherwise."""
        plains = [plain_tensors(distinct[member.input])[member.leaf] for member in self.members]
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
    """

    views: tuple[DistinctIdx, ...]
    offsets: tuple[int, ...]
    itself: DistinctIdx | None

    def of(self, distinct: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The base of these inputs; None if they are no such views."""
        base = None if self.itself is None else distinct[self.itself]
        return base_of([distinct[idx] for idx in self.views], self.offsets, base)


Base: TypeAlias = Span | ViewBase


@dataclass(frozen=True, slots=True)
class Alias:
    """A plain tensor as a part of a span."""

    span: PrimalIdx
    member: Member


@dataclass(frozen=True, slots=True)
class BasePlan:
    """What the traced program takes: bases, then the distinct inputs that are no bases themselves.

    Args:
        bases: how to make each.
        kept: the inputs that follow them.
        num_inputs: how many inputs there were when it was made; more, which only the trace meets, follow.
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

    def aliases(self) -> Mapping[tuple[PrimalIdx, int], Alias]:
        """For each plain tensor that lies in a span, by primal and leaf: where."""
        return {
            (self.position(member.input), member.leaf): Alias(at, member)
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
    """The memory that `members` lie in, as a flat tensor of `dtype` on a storage of its own.

    None if they do not start `offsets` elements behind its beginning, all on one storage.
    """
    first, size = members[0], dtype.itemsize
    start, storage = start_of(first) - offsets[0] * size, storage_id(first)
    for member, offset in zip(members, offsets, strict=True):
        if storage_id(member) != storage or start_of(member) - offset * size != start:
            return None
    memory = first.untyped_storage()[start : start + numel * size]
    flat = torch.empty(0, dtype=dtype, device=first.device)
    return flat.set_(memory)  # pyright: ignore[reportArgumentType]  # the stub wants a typed storage


def base_of(
    views: Sequence[torch.Tensor], offsets: Sequence[int], base: torch.Tensor | None
) -> torch.Tensor | None:
    """What `views` are views of: `base`, if it is given. None if they are not, or start elsewhere in it."""
    base = views[0]._base if base is None else base
    for view, offset in zip(views, offsets, strict=True):
        if view._base is not base or int(view.storage_offset()) != offset:
            return None
    return base


def plan_bases(program: Program[DistinctIdx], facts: Facts) -> BasePlan:
    """The bases that `program` needs, given what a trace of it without any showed; `NO_BASES` if none.

    Raises:
        UnsupportedProgram: inputs share memory in a way that has no base.
    """
    if not facts.written():
        return NO_BASES
    groups = [_Group(program, facts, members) for members in _groups(program)]
    needed = [group for group in groups if group.is_written()]
    bases = Row[PrimalIdx, Base](group.base() for group in _joined(needed))
    if not len(bases):
        return NO_BASES
    themselves = {base.itself for base in bases if isinstance(base, ViewBase)}
    kept = tuple(idx for idx in program.ins.indices() if idx not in themselves)
    return BasePlan(bases, kept, len(program.ins))


def lower(program: Program[DistinctIdx], plan: BasePlan) -> Program[PrimalIdx]:
    """The same function, given the bases too. It still reads the inputs: the trace lets them share memory."""
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


_Plain: TypeAlias = tuple[DistinctIdx, int]


def _groups(program: Program[DistinctIdx]) -> Iterator[list[_Plain]]:
    places: list[_Plain] = []
    plains: list[torch.Tensor] = []
    for idx, example in program.examples.enumerate():
        for leaf, plain in enumerate(plain_tensors(example)):
            places.append((idx, leaf))
            plains.append(plain)
    for positions in overlapping_groups(plains):
        yield [places[position] for position in positions]


class _Group:
    """Plain tensors that share memory."""

    def __init__(self, program: Program[DistinctIdx], facts: Facts, members: list[_Plain]) -> None:
        self.members = members
        self._program = program
        self._facts = facts

    def inputs(self) -> list[DistinctIdx]:
        """The inputs that they belong to."""
        return list(dict.fromkeys(idx for idx, _ in self.members))

    def is_written(self) -> bool:
        """Whether any is written, in forward or backward."""
        written = self._facts.written()
        return any(PrimalIdx(idx) in written for idx in self.inputs())

    def base(self) -> Base:
        """What to trace the group through.

        Raises:
            UnsupportedProgram: nothing fits.
        """
        if not self.has_history():
            return self._span()
        root, views = self._root()
        offsets = tuple(int(self._example(idx).storage_offset()) for idx in views)
        return ViewBase(views, offsets, root)

    def with_members_of(self, other: _Group) -> _Group:
        """Both groups as one."""
        return _Group(self._program, self._facts, [*other.members, *self.members])

    def _fact(self, idx: DistinctIdx) -> Any:
        return self._facts.inputs[PrimalIdx(idx)]

    def has_history(self) -> bool:
        """Whether a write takes part in the backward."""
        facts = map(self._fact, self.inputs())
        return any(isinstance(fact, DataWritten) and fact.differentiable for fact in facts)

    def _span(self) -> Span:
        plains = [plain_tensors(self._example(idx))[leaf] for idx, leaf in self.members]
        start, num_bytes = span(plains)
        (dtype, *others) = {plain.dtype for plain in plains}
        if others:
            dtype = torch.uint8
            if not all(plain.is_contiguous() for plain in plains):
                raise self._refuse("as another dtype and with gaps")
        members = (
            Member(
                idx,
                leaf,
                plain.size(),
                plain.stride(),
                plain.dtype,
                (start_of(plain) - start) // dtype.itemsize,
            )
            for (idx, leaf), plain in zip(self.members, plains, strict=True)
        )
        return Span(tuple(members), num_bytes // dtype.itemsize, dtype)

    def _root(self) -> tuple[DistinctIdx | None, tuple[DistinctIdx, ...]]:
        examples = {idx: self._example(idx) for idx in self.inputs()}
        (root, *others) = {id(_root_of(example)): _root_of(example) for example in examples.values()}.values()
        if others:
            raise self._refuse("without autograd knowing of it, and the write takes part in the backward")
        itself = next((idx for idx, example in examples.items() if example is root), None)
        if any(example.requires_grad != root.requires_grad for example in examples.values()):
            raise self._refuse("but not its `requires_grad`, and the write takes part in the backward")
        return itself, tuple(idx for idx in examples if idx != itself)

    def _example(self, idx: DistinctIdx) -> torch.Tensor:
        return self._program.examples[idx]

    def _refuse(self, how: str) -> UnsupportedProgram:
        written = next((idx for idx in self.inputs() if isinstance(self._fact(idx), DataWritten)), None)
        first = self.inputs()[0] if written is None else written
        other = next((idx for idx in self.inputs() if idx != first), first)
        names = self._program.ins
        return UnsupportedProgram(
            f"`{names[first]}` is written and shares memory with `{names[other]}`, {how}",
            stage="convention",
            fix=f"pass `{names[other]}` as a view made inside the function, or clone one of them",
        )


def _joined(groups: Collection[_Group]) -> list[_Group]:
    """The groups; as one where they share inputs and some write has history: autograd sees whole wrappers."""
    joined: list[_Group] = []
    for group in groups:
        met = [other for other in joined if not set(other.inputs()).isdisjoint(group.inputs())]
        if any(part.has_history() for part in (group, *met)):
            joined = [other for other in joined if other not in met]
            for other in met:
                group = group.with_members_of(other)
        joined.append(group)
    return joined


def _root_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base
