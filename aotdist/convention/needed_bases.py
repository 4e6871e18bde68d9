"""Plans the bases of inputs that share memory and are written.

`aotdist.convention.bases` describes the kinds of bases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from aotdist.aliasing.memory import overlapping_groups, share_memory, span, start_of
from aotdist.aliasing.overwrite import base_behind, is_made_again
from aotdist.convention.bases import NO_BASES, Base, BasePlan, Member, Span, ViewBase
from aotdist.convention.mutation import differentiable_writes
from aotdist.errors import UnsupportedProgram
from aotdist.facts import Facts
from aotdist.program import DistinctIdx, PrimalIdx, Program, Row
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam.autograd import creation_meta


@dataclass(frozen=True, slots=True)
class Writes:
    """The writes that traces showed.

    Args:
        written: inputs that are written, in forward or backward.
        with_history: inputs of which a write takes part in the backward.
    """

    written: frozenset[DistinctIdx] = frozenset()
    with_history: frozenset[DistinctIdx] = frozenset()

    def and_of(self, program: Program[DistinctIdx], facts: Facts, plan: BasePlan) -> Writes:
        """These, and those that a trace of `program` over the bases of `plan` showed."""
        at = {idx: plan.position(idx) for idx in program.ins.indices()}
        written = facts.written()
        with_history = {idx for idx, _, _ in differentiable_writes(facts)}
        return replace(
            self,
            written=self.written | {idx for idx, primal in at.items() if primal in written},
            with_history=self.with_history | {idx for idx, primal in at.items() if primal in with_history},
        )


def plan_bases(program: Program[DistinctIdx], writes: Writes) -> BasePlan:
    """The bases that `program` needs, given what traces of it showed; `NO_BASES` if none.

    Raises:
        UnsupportedProgram: inputs share memory in a way that has no base.
    """
    if not writes.written:
        return NO_BASES
    groups = [group for group in _groups(program) if any(idx in writes.written for idx, _ in group)]
    groups += _connected(program, writes)
    bases: list[Base] = []
    for cluster in _clusters(program, groups):
        bases += _Cluster(program, cluster, writes).bases()
    if not bases:
        return NO_BASES
    bases.sort(key=lambda base: isinstance(base, ViewBase))
    themselves = {base.itself for base in bases if isinstance(base, ViewBase)}
    kept = tuple(idx for idx in program.ins.indices() if idx not in themselves)
    return BasePlan(Row[PrimalIdx, Base](bases), kept, len(program.ins))


_Plain: TypeAlias = tuple[DistinctIdx, int]
_Group: TypeAlias = list[_Plain]
"""Plain tensors that share memory, each by its input and its position among the plain tensors beneath it."""
_Part: TypeAlias = tuple[DistinctIdx, int, bool]
"""A plain tensor, and whether it lies beneath the base of the input rather than the input."""


def _groups(program: Program[DistinctIdx]) -> Iterator[_Group]:
    places: list[_Plain] = []
    plains: list[torch.Tensor] = []
    for idx, example in program.examples.enumerate():
        for leaf, plain in enumerate(plain_tensors(example)):
            places.append((idx, leaf))
            plains.append(plain)
    for positions in overlapping_groups(plains):
        yield [places[position] for position in positions]


def _connected(program: Program[DistinctIdx], writes: Writes) -> Iterator[_Group]:
    """Views of one base whose history a write of one of them changes, even if they share no memory."""
    of_base: dict[int, list[DistinctIdx]] = {}
    for idx, example in program.examples.enumerate():
        if (base := base_behind(example)) is not None:
            of_base.setdefault(id(base), []).append(idx)
    for inputs in of_base.values():
        if not writes.with_history.isdisjoint(inputs) and _need_base([program.examples[i] for i in inputs]):
            for idx in inputs:
                yield from ([(idx, leaf)] for leaf, _ in enumerate(plain_tensors(program.examples[idx])))


def _need_base(inputs: Sequence[torch.Tensor]) -> bool:
    """Whether views of one base, one of them written with history, have to be traced over that base."""
    return len(inputs) > 1 or any(map(is_made_again, inputs))


def _clusters(program: Program[DistinctIdx], groups: Collection[_Group]) -> list[list[_Group]]:
    """The groups, joined where they have an input, or the base of inputs, in common."""
    found: list[tuple[set[int], list[_Group]]] = []
    for group in groups:
        roots = {id(_root_of(program.examples[idx])) for idx, _ in group}
        met = [cluster for cluster in found if not cluster[0].isdisjoint(roots)]
        found = [cluster for cluster in found if cluster not in met]
        together = [*(other for _, cluster in met for other in cluster), group]
        found.append((roots.union(*(others for others, _ in met)), together))
    return [cluster for _, cluster in found]


class _Cluster:
    """Groups of inputs that autograd may connect."""

    def __init__(self, program: Program[DistinctIdx], groups: Sequence[_Group], writes: Writes) -> None:
        self._program, self._groups, self._writes = program, groups, writes
        self._inputs = list(dict.fromkeys(idx for group in groups for idx, _ in group))

    def bases(self) -> list[Base]:
        """The bases to trace the inputs through."""
        view_bases = list(self._view_bases())
        base_of = {view: base for base in view_bases for view in base.views}
        merged: list[dict[_Part, None]] = []
        for group in self._groups:
            parts = dict.fromkeys(part for plain in group for part in self._parts(plain, base_of))
            met = [other for other in merged if not other.keys().isdisjoint(parts)]
            merged = [other for other in merged if other not in met]
            merged.append({part: None for some in (*met, parts) for part in some})
        return [*(self._span(list(parts)) for parts in merged if len(parts) > 1), *view_bases]

    def _view_bases(self) -> Iterator[ViewBase]:
        """Bases of inputs that are views of one tensor to autograd, where one is written with history."""
        by_root: dict[int, list[DistinctIdx]] = {}
        for idx in self._inputs:
            by_root.setdefault(id(_root_of(self._example(idx))), []).append(idx)
        for inputs in by_root.values():
            examples = [self._example(idx) for idx in inputs]
            if not self._writes.with_history.isdisjoint(inputs) and _need_base(examples):
                yield self._view_base(inputs)

    def _view_base(self, inputs: Sequence[DistinctIdx]) -> ViewBase:
        root = _root_of(self._example(inputs[0]))
        itself = next((idx for idx in inputs if self._example(idx) is root), None)
        if any(self._example(idx).requires_grad != root.requires_grad for idx in inputs):
            raise self._refuse(
                inputs, "but not its `requires_grad`, and the write takes part in the backward"
            )
        views = tuple(idx for idx in inputs if idx != itself)
        offsets = tuple(int(self._example(idx).storage_offset()) for idx in views)
        creations = tuple(creation_meta(self._example(idx)) for idx in views)
        return ViewBase(views, offsets, itself, creations)

    def _parts(self, plain: _Plain, base_of: dict[DistinctIdx, ViewBase]) -> Iterator[_Part]:
        """The parts of a span that stand for a plain tensor: those of its view base, if it has one."""
        idx, leaf = plain
        base = base_of.get(idx)
        if base is None:
            yield idx, leaf, False
            return
        own = plain_tensors(self._example(idx))[leaf]
        whole = plain_tensors(_root_of(self._example(idx)))
        met = [position for position, other in enumerate(whole) if share_memory(own, other)]
        if not met:
            raise self._refuse([idx], "but autograd records a different base for it")
        owner = base.views[0] if base.itself is None else base.itself
        yield from ((owner, position, base.itself is None) for position in met)

    def _span(self, parts: Sequence[_Part]) -> Span:
        plains = [self._plain(part) for part in parts]
        start, num_bytes = span(plains)
        if any(len(plain_tensors(self._example(idx))) > 1 for idx, _, _ in parts):
            # A class may compare where its parts begin (`TwoTensor` does): others of them keep their offsets.
            start, num_bytes = 0, start + num_bytes
        (dtype, *others) = {plain.dtype for plain in plains}
        if others:
            raise self._refuse([idx for idx, _, _ in parts], "as another dtype")
        members = (
            Member(
                input=idx,
                leaf=leaf,
                size=plain.size(),
                stride=plain.stride(),
                offset=(start_of(plain) - start) // dtype.itemsize,
                of_base=of_base,
            )
            for (idx, leaf, of_base), plain in zip(parts, plains, strict=True)
        )
        return Span(tuple(members), num_bytes // dtype.itemsize, dtype)

    def _plain(self, part: _Part) -> torch.Tensor:
        idx, leaf, of_base = part
        example = self._example(idx)
        return plain_tensors(_root_of(example) if of_base else example)[leaf]

    def _example(self, idx: DistinctIdx) -> torch.Tensor:
        return self._program.examples[idx]

    def _refuse(self, inputs: Sequence[DistinctIdx], how: str) -> UnsupportedProgram:
        candidates = dict.fromkeys([*inputs, *self._inputs])
        first = next((idx for idx in candidates if idx in self._writes.written), inputs[0])
        other = next((idx for idx in candidates if idx != first), first)
        names = self._program.ins
        return UnsupportedProgram(
            f"`{names[first]}` is written and shares memory with `{names[other]}`, {how}",
            stage="convention",
            fix=f"pass `{names[other]}` as a view made inside the function, or clone one of them",
        )


def _root_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base
