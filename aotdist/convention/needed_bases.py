"""Plans the bases of inputs that share memory and are written.

`aotdist.convention.bases` describes the kinds of bases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    connected = _connected(program, [idx for group in groups for idx, _ in group], writes)
    view_bases = [_view_base(program, inputs, writes) for inputs in connected]
    base_of = {idx: base for base in view_bases for idx in (*base.views, base.itself)}
    spans: list[Span] = []
    for group in groups:
        written = next(idx for idx, _ in group if idx in writes.written)
        for other, _ in group:
            if base_of.get(other) is not base_of.get(written):
                how = "which autograd does not connect with it, and a write takes part in the backward"
                raise _refusal(program, written, other, how)
        if written not in base_of:
            spans.append(_span(program, group, written))
    bases: list[Base] = [*spans, *view_bases]
    if not bases:
        return NO_BASES
    themselves = {base.itself for base in view_bases}
    kept = tuple(idx for idx in program.ins.indices() if idx not in themselves)
    return BasePlan(Row[PrimalIdx, Base](bases), kept, len(program.ins))


_Plain: TypeAlias = tuple[DistinctIdx, int]
_Group: TypeAlias = list[_Plain]
"""Plain tensors that share memory, each by its input and its position among the plain tensors beneath it."""


def _groups(program: Program[DistinctIdx]) -> Iterator[_Group]:
    places: list[_Plain] = []
    plains: list[torch.Tensor] = []
    for idx, example in program.examples.enumerate():
        for leaf, plain in enumerate(plain_tensors(example)):
            places.append((idx, leaf))
            plains.append(plain)
    for positions in overlapping_groups(plains):
        yield [places[position] for position in positions]


def _connected(
    program: Program[DistinctIdx], overlapping: Sequence[DistinctIdx], writes: Writes
) -> Iterator[list[DistinctIdx]]:
    """Inputs that are views of one tensor to autograd, where one is written with history.

    Views of one base count even if they share no memory: the write changes the history of all.
    """
    views = [idx for idx, example in program.examples.enumerate() if base_behind(example) is not None]
    of_root: dict[int, list[DistinctIdx]] = {}
    for idx in dict.fromkeys([*overlapping, *views]):
        of_root.setdefault(id(_root_of(program.examples[idx])), []).append(idx)
    for inputs in of_root.values():
        needs_base = len(inputs) > 1 or any(is_made_again(program.examples[idx]) for idx in inputs)
        if needs_base and not writes.with_history.isdisjoint(inputs):
            yield inputs


def _view_base(program: Program[DistinctIdx], inputs: Sequence[DistinctIdx], writes: Writes) -> ViewBase:
    examples = {idx: program.examples[idx] for idx in inputs}
    root = _root_of(examples[inputs[0]])
    written = next(idx for idx in inputs if idx in writes.with_history)
    for idx, example in examples.items():
        other = next((one for one in inputs if one != written), written) if idx == written else idx
        if example.requires_grad != root.requires_grad:
            how = "but not its `requires_grad`, and the write takes part in the backward"
            raise _refusal(program, written, other, how)
        plains = [plain for plain in plain_tensors(example) if plain.numel()]
        if not all(any(share_memory(p, whole) for whole in plain_tensors(root)) for p in plains):
            raise _refusal(program, written, other, "but autograd records a different base for it")
    itself = next((idx for idx, example in examples.items() if example is root), None)
    views = tuple(idx for idx in inputs if idx != itself)
    offsets = tuple(int(examples[idx].storage_offset()) for idx in views)
    return ViewBase(views, offsets, itself, tuple(creation_meta(examples[idx]) for idx in views))


def _span(program: Program[DistinctIdx], group: _Group, written: DistinctIdx) -> Span:
    plains = [plain_tensors(program.examples[idx])[leaf] for idx, leaf in group]
    start, num_bytes = span(plains)
    if any(len(plain_tensors(program.examples[idx])) > 1 for idx, _ in group):
        # A class may compare where its parts begin (`TwoTensor` does): others of them keep their offsets.
        start, num_bytes = 0, start + num_bytes
    dtype = plains[0].dtype
    for (idx, _), plain in zip(group, plains, strict=True):
        if plain.dtype != dtype:
            other = group[0][0] if idx == written else idx
            raise _refusal(program, written, other, "as another dtype")
    members = (
        Member(idx, leaf, plain.size(), plain.stride(), (start_of(plain) - start) // dtype.itemsize)
        for (idx, leaf), plain in zip(group, plains, strict=True)
    )
    return Span(tuple(members), num_bytes // dtype.itemsize, dtype)


def _refusal(
    program: Program[DistinctIdx], written: DistinctIdx, other: DistinctIdx, how: str
) -> UnsupportedProgram:
    names = program.ins
    return UnsupportedProgram(
        f"`{names[written]}` is written and shares memory with `{names[other]}`, {how}",
        stage="convention",
        fix=f"pass `{names[other]}` as a view made inside the function, or clone one of them",
    )


def _root_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base
