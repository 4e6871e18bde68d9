"""When an artifact fits a call: the same structure, places, objects, metadata and modes as at capture.

`aotdist.runtime.print_call` prints the test.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from aotdist.aliasing.memory import share_memory
from aotdist.capture.ambient import Ambient
from aotdist.capture.arguments import Arguments
from aotdist.capture.captured import Captured
from aotdist.capture.environment import constants_but, items_of
from aotdist.capture.modules import ModuleGuard
from aotdist.capture.source import Applied, Source, held_in
from aotdist.convention.bases import BasePlan, ViewBase
from aotdist.convention.dedupe import DedupePlan
from aotdist.convention.mutation import differentiable_writes
from aotdist.errors import UnsupportedProgram
from aotdist.facts import Facts
from aotdist.program import ArgIdx, DistinctIdx, NodeOutIdx, PrimalIdx, Row, Slot
from aotdist.runtime.compilation import Compilation, shell
from aotdist.runtime.printer import Told, variable_names
from aotdist.sizes import SCOPE, NumberStep, Sizes, is_symbolic
from aotdist.subclasses.protocol import Constant, Recipe, Wrapper, leaves, plain_tensors, wrapper_rule
from aotdist.torch_seam.classes import hears_of_functions
from aotdist.torch_seam.symbols import SYMBOLIC
from aotdist.torch_seam.tensors import TensorGuards, storage_id
from aotdist.trace.numbers.symbols import Count

T = TypeVar("T")

MISS = object()
"""What a printed call returns when its artifact does not fit."""


@dataclass(frozen=True, slots=True)
class EnvironmentGuards:
    """What a call has to find besides its tensors, for an artifact to fit.

    Args:
        ambient: the modes that were on at capture.
        holds: further conditions, each with a name.
        constants: closed-over constants, with their values.
        identities: closed-over functions and modules.
        again: pairs of places that hold the same object.
        prepare: functions to call first, each with its argument.
    """

    ambient: Ambient
    holds: tuple[tuple[str, Callable[[], bool]], ...]
    constants: tuple[tuple[Source, Any], ...]
    identities: tuple[tuple[Source, Any], ...]
    again: tuple[tuple[Source, Source], ...]
    prepare: tuple[tuple[Callable[[Any], None], Any], ...]


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers that differ from call to call.

    Args:
        sizes: the symbols in sizes of the call's tensors.
        counts: numbers that the program finds and changes.
        told: unbacked symbols, each with the position of the plain result that holds its value, or with how
            Python computes it from those before.
    """

    sizes: Sizes
    counts: tuple[Count, ...]
    told: Told

    def symbols(self) -> list[str]:
        """The names of those that are known before the call."""
        return [*(name for name, _ in self.sizes.symbols), *(count.name for count in self.counts)]

    def __bool__(self) -> bool:
        return bool(self.symbols() or self.told)


@dataclass(frozen=True, slots=True)
class Guards:
    """When an artifact fits a call, and where the call's tensors are.

    Args:
        arguments: structure and constants of the call.
        variables: a name for each flat tensor: the arguments', then those of `sources`.
        sources: where to read the tensors that are not arguments, in the order of the flat inputs.
        dedupe: which of all these are the same tensor.
        bases: which of the distinct ones share memory.
        base_variables: a name for each base that is none of them.
        slots: names of what the program takes: bases, then the distinct tensors.
        examples: what it took at capture.
        facts: what the trace showed of them.
        numbers: those that differ from call to call.
        written: inputs that the program writes.
        storages: plain tensors beneath inputs, by position, and the offset and bytes of storage to be found.
        around: what the call has to find besides its tensors.
        leaves: puts back the objects that the program leaves in Python; the artifact then fits one call only.
    """

    arguments: Arguments
    variables: tuple[str, ...]
    sources: tuple[Source, ...]
    dedupe: DedupePlan
    bases: BasePlan
    base_variables: tuple[str, ...]
    slots: Row[PrimalIdx, Slot]
    examples: Row[PrimalIdx, torch.Tensor]
    facts: Facts
    numbers: Numbers
    written: tuple[PrimalIdx, ...]
    storages: tuple[tuple[PrimalIdx, int, tuple[int, int]], ...]
    around: EnvironmentGuards
    leaves: Callable[[], None] | None

    def with_history(self) -> tuple[PrimalIdx, ...]:
        """The inputs that the program writes with history."""
        return tuple(idx for idx, _, _ in differentiable_writes(self.facts))

    def has_classes(self) -> bool:
        """Whether tensors of the call have a `__torch_function__`, which must not be called."""
        return any(hears_of_functions(type(example)) for example in self.examples)

    def without_tensors(self) -> Guards:
        """The same with shells for the tensors of the call."""
        return replace(self, examples=self.examples.map(shell))

    def numbers_found(self) -> Iterator[tuple[Source, Any]]:
        """The places of constants, numbers among them, and these; of containers, their items."""
        for source, value in self.around.constants:
            if source.steps[-1:] == (Applied(items_of),):
                held = source.owner()
                keys = value if isinstance(held.read_or(None), Mapping) else enumerate(value)
                yield from ((held.item(key), item) for key, item in keys)
            else:
                yield source, value
        for _, holds in self.around.holds:
            if isinstance(holds, ModuleGuard):
                yield from holds.constants()

    def reads_places(self) -> bool:
        """Whether a call has to look anything up besides its arguments."""
        places = self.sources or self.around.constants or self.numbers.counts
        return bool(places or self.around.identities or self.around.again or self.base_variables)

    def distinct_variables(self) -> list[str]:
        """The variable that holds each distinct tensor."""
        return [self.variables[idx] for idx in self.dedupe.kept]

    def primal_variables(self) -> list[str]:
        """The variable that holds each tensor that the program takes."""
        distinct, new = self.distinct_variables(), iter(self.base_variables)
        themselves = [base.itself if isinstance(base, ViewBase) else None for base in self.bases.bases]
        bases = [next(new) if itself is None else distinct[itself] for itself in themselves]
        return [*bases, *(distinct[idx] for idx in self.bases.inputs(len(distinct)))]

    def plains_apart(self, plains: Row[PrimalIdx, Sequence[T]]) -> Iterator[tuple[PrimalIdx, list[T]]]:
        """The plain tensors of each input that must not overlap another input's: those in no base."""
        aliases, views = self.bases.aliases(), self.bases.views()
        for at, found in plains.enumerate():
            if at not in views:
                yield at, [plain for leaf, plain in enumerate(found) if (at, leaf) not in aliases]


def fit_of(compilation: Compilation) -> Guards:
    """When the compiled program fits a call."""
    captured, traced = compilation.captured, compilation.traced
    environment = captured.environment
    facts = traced.facts
    written = set(facts.written())
    written |= {idx for idx in compilation.bases.bases.indices() if compilation.bases.is_span(idx)}
    counts = traced.symbols.counts()
    open_ = {count.place.spot() for count in counts}
    guard = ModuleGuard(environment.modules, environment.state, environment.reached.names, open_)
    holds: list[tuple[str, Callable[[], bool]]] = [("modules_hold", guard)] if environment.modules else []
    holds += [(f"{claim.rule.name}_holds", claim.holds) for claim in environment.rules]
    if captured.leaves is not None:
        holds.append(("not_called_yet", itertools.chain([True], itertools.repeat(False)).__next__))
    sources = _sources(compilation)
    inputs = {source.spot() for source in sources}
    paths = [*captured.arguments.tensor_paths(), *(source.path for source in sources)]
    base_paths = [slot.path for at, slot in traced.program.ins.enumerate() if compilation.bases.is_new(at)]
    told = {name: t if isinstance(t, NumberStep) else _first_leaf(facts, t) for name, t in facts.numbers}
    numbers = Numbers(traced.symbols.sizes(), counts, told)
    names = variable_names([*paths, *base_paths], [*SCOPE, *numbers.symbols(), *told])
    return Guards(
        arguments=captured.arguments,
        variables=tuple(names[: len(paths)]),
        sources=sources,
        dedupe=_with_closed_over(compilation),
        bases=compilation.bases,
        base_variables=tuple(names[len(paths) :]),
        slots=traced.program.ins,
        examples=traced.program.examples,
        facts=facts,
        numbers=numbers,
        written=tuple(sorted(written)),
        storages=tuple(
            (idx, leaf, place_in_storage(plain_tensors(traced.program.examples[idx])[leaf]))
            for idx, leaf in facts.storages
        ),
        around=EnvironmentGuards(
            ambient=captured.ambient,
            holds=tuple(holds),
            # As they are after the trace: what happens at capture only (in sets, to objects) has happened.
            constants=tuple(
                (source, source.read()) for source in constants_but(environment.reached, open_, inputs)
            ),
            identities=(*environment.reached.identities, *_written_in_backward(captured)),
            again=tuple(environment.reached.ties),
            prepare=tuple((claim.rule.prepare, claim.root) for claim in environment.rules),
        ),
        leaves=captured.leaves,
    )


def _first_leaf(facts: Facts, idx: NodeOutIdx) -> int:
    """The position of the first plain tensor of what the node returns, among all of these."""
    return sum(1 for out in list(facts.node_outs)[:idx] for _ in leaves(out.recipe))


def _written_in_backward(captured: Captured) -> Iterator[tuple[Source, Any]]:
    """Objects and containers that a backward writes: those of the capture, so calls must find the same."""
    for held in held_in(captured.in_backward.whole.places()):
        yield held.source, held.example


def _sources(compilation: Compilation) -> tuple[Source, ...]:
    captured = compilation.captured
    state = [tensor.source() for tensor in captured.environment.state]
    examples = compilation.traced.program.examples
    return (*state, *(captured.source_of(examples[idx]) for idx in compilation.met()))


def _with_closed_over(compilation: Compilation) -> DedupePlan:
    """The plan with the closed-over tensors, which are distinct, at the end."""
    deduped = compilation.deduped
    num_args, num_distinct = len(deduped.source), len(deduped.kept)
    extra = range(len(compilation.met()))
    kept = [*deduped.kept, *(ArgIdx(num_args + offset) for offset in extra)]
    source = [*deduped.source, *(DistinctIdx(num_distinct + offset) for offset in extra)]
    return DedupePlan(Row(kept), Row(source))


def refuse_overlap(fit: Guards) -> None:
    """Refuse a program that writes an input which shares memory with another, and with no base in common.

    Raises:
        UnsupportedProgram: naming both.
    """
    apart = dict(fit.plains_apart(fit.examples.map(plain_tensors)))
    for idx in fit.written:
        for other, plains in apart.items():
            if other != idx and not no_overlap(apart[idx], plains):
                raise UnsupportedProgram(
                    f"`{fit.slots[idx]}` is written and shares memory with `{fit.slots[other]}`",
                    stage="convention",
                    fix=f"pass `{fit.slots[other]}` as a view made inside the function, or clone one of them",
                )


def tensor_check(examples: Sequence[torch.Tensor], recipes: Sequence[Recipe]) -> TensorGuards:
    """A check of many tensors at once, in C++ (5.5 us for 100).

    `check(*tensors)` is true when each has the type, dtype, device, dispatch keys, sizes, strides and
    `requires_grad` of its example, and all are different objects. Symbolic sizes and strides are left open.
    """
    if not is_symbolic(tuple(recipes)) and all(map(_is_sized, recipes)):
        return TensorGuards(*examples, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    sizes: Any
    strides: Any
    numbers = map(_numbers, examples, recipes)
    sizes, strides = ([_known(each) for each in of] for of in zip(*numbers, strict=True))
    return TensorGuards(*examples, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def _is_sized(recipe: Recipe) -> bool:
    return not isinstance(recipe, Wrapper) or wrapper_rule(recipe.cls).sized


def _numbers(example: torch.Tensor, recipe: Recipe) -> tuple[Sequence[Any], Sequence[Any]]:
    assert not isinstance(recipe, Constant), "a tensor's recipe"
    if _is_sized(recipe):
        return recipe.size, recipe.stride
    left_open = [None] * example.dim()  # they follow from what lies inside
    return left_open, left_open


def _known(numbers: Sequence[Any]) -> list[int | None]:
    return [None if isinstance(number, SYMBOLIC) else number for number in numbers]


def place_in_storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins in its storage (in elements), and how large the storage is (in bytes)."""
    return int(tensor.storage_offset()), tensor.untyped_storage().nbytes()


def no_overlap(written: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether no tensor of `written` shares memory with another of `written` or one of `others`.

    Tensors on different storages never do (0.1 us each); each is compared with those on its own.
    """
    everything = [*written, *others]
    storages = [storage_id(tensor) for tensor in everything]
    count = Counter(storages)
    if len(count) == len(storages):
        return True
    together: dict[int, list[int]] = {}
    for position, storage in enumerate(storages):
        if count[storage] > 1:
            together.setdefault(storage, []).append(position)
    return not any(
        share_memory(everything[a], everything[b])
        for positions in together.values()
        for a, b in itertools.combinations(positions, 2)
        if a < len(written)
    )


def are_outside(others: Sequence[torch.Tensor], members: Sequence[torch.Tensor]) -> bool:
    """Whether none of `others` shares memory with the tensors that lie in a span.

    The span itself is on a storage of its own, which `no_overlap` takes for other memory.
    """
    storage = storage_id(members[0])
    near = [other for other in others if storage_id(other) == storage]
    return not any(share_memory(member, other) for member in members for other in near)
