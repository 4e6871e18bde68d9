"""The guards of an artifact: a call must have the structure, objects, metadata and modes of the capture.

`aotdist.runtime.print_call` prints the test.
"""

from __future__ import annotations

import functools
import itertools
import operator
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
from aotdist.errors import BadSettings, InternalError, UnsupportedProgram
from aotdist.facts import Facts
from aotdist.program import ArgIdx, DistinctIdx, NodeOutIdx, PrimalIdx, Row, Slot
from aotdist.runtime.compilation import Compilation, shell
from aotdist.runtime.printer import Unbacked, variable_names
from aotdist.sizes import SCOPE, Expression, NumberStep, Sizes, is_symbolic
from aotdist.subclasses.protocol import Constant, Recipe, Wrapper, leaves, plain_tensors, wrapper_rule
from aotdist.torch_seam.classes import overrides_torch_functions
from aotdist.torch_seam.symbols import SYMBOLIC
from aotdist.torch_seam.tensors import TensorGuards, storage_id
from aotdist.trace.numbers.symbols import Count

T = TypeVar("T")

MISS = object()
"""What a printed call returns when its artifact does not fit."""


@dataclass(frozen=True, slots=True)
class EnvironmentGuards:
    """Guards on everything besides the tensors of a call.

    Args:
        ambient: the modes at capture.
        holds: further conditions, each with a name.
        constants: places of closed-over constants, with the values.
        identities: places of closed-over functions and modules, with the objects.
        same_objects: pairs of places that hold the same object.
        prepare: functions to call first, each with its argument.
    """

    ambient: Ambient
    holds: tuple[tuple[str, Callable[[], bool]], ...]
    constants: tuple[tuple[Source, Any], ...]
    identities: tuple[tuple[Source, Any], ...]
    same_objects: tuple[tuple[Source, Source], ...]
    prepare: tuple[tuple[Callable[[Any], None], Any], ...]


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers that differ from call to call.

    Args:
        sizes: the symbols in sizes of the call's tensors.
        counts: Python numbers that the program reads and changes.
        unbacked: unbacked symbols, each with the position of the plain result that holds its value, or with
            how Python computes it from earlier ones.
    """

    sizes: Sizes
    counts: tuple[Count, ...]
    unbacked: Unbacked

    def symbols(self) -> list[str]:
        """The names of the numbers that are known before the graph runs."""
        return [*(name for name, _ in self.sizes.symbols), *(count.name for count in self.counts)]

    def __bool__(self) -> bool:
        return bool(self.symbols() or self.unbacked)


@dataclass(frozen=True, slots=True)
class Guards:
    """The guards of an artifact, and where to find the tensors of a call.

    Args:
        arguments: structure and constants of the arguments.
        variables: a name for each flat tensor: arguments, then those of `sources`.
        sources: where to read the tensors that are not arguments, in the order of the flat inputs.
        dedupe: which flat tensors are the same.
        bases: which distinct tensors share memory.
        base_variables: a name for each base that is not an input itself.
        slots: names of the primals: bases, then distinct tensors.
        examples: the primals at capture.
        facts: what the trace showed of them.
        numbers: those that differ from call to call.
        written: inputs that the program writes.
        storages: plain tensors beneath inputs, with the storage offset and storage bytes that they must have.
        environment: guards on everything besides the tensors.
        leave_objects: puts objects that the program stores in Python in their places; the artifact then fits
            this one call only.
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
    environment: EnvironmentGuards
    leave_objects: Callable[[], None] | None

    def with_history(self) -> tuple[PrimalIdx, ...]:
        """The inputs that the program writes with history."""
        return tuple(idx for idx, _, _ in differentiable_writes(self.facts))

    def has_classes(self) -> bool:
        """Whether tensors of the call have a `__torch_function__`, which the printed call must not run."""
        return any(overrides_torch_functions(type(example)) for example in self.examples)

    def without_tensors(self) -> Guards:
        """The same with a `shell` for each tensor of the call."""
        return replace(self, examples=self.examples.map(shell))

    def numbers_found(self) -> Iterator[tuple[Source, Any]]:
        """The places of closed-over constants, with the values; for a container, those of its items."""
        for source, value in self.environment.constants:
            if source.steps[-1:] == (Applied(items_of),):
                container = source.owner()
                keys = value if isinstance(container.read_or(None), Mapping) else enumerate(value)
                yield from ((container.item(key), item) for key, item in keys)
            else:
                yield source, value
        for _, holds in self.environment.holds:
            if isinstance(holds, ModuleGuard):
                yield from holds.constants()

    def reads_places(self) -> bool:
        """Whether a call reads places besides its arguments."""
        around = self.environment
        places = self.sources or around.constants or self.numbers.counts or around.identities
        return bool(places or around.same_objects or self.base_variables)

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
        """The plain tensors of each input that lie in no base, and so must not overlap another input's."""
        aliases, views = self.bases.aliases(), self.bases.views()
        for at, found in plains.enumerate():
            if at not in views:
                yield at, [plain for leaf, plain in enumerate(found) if (at, leaf) not in aliases]


def fit_of(compilation: Compilation) -> Guards:
    """The guards of a compiled program."""
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
    unbacked = {name: t if isinstance(t, NumberStep) else _first_leaf(facts, t) for name, t in facts.numbers}
    numbers = Numbers(traced.symbols.sizes(), counts, unbacked)
    names = variable_names([*paths, *base_paths], [*SCOPE, *numbers.symbols(), *unbacked])
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
        environment=EnvironmentGuards(
            ambient=captured.ambient,
            holds=tuple(holds),
            # Read after the trace, so with what the capture itself changed (sets, objects).
            constants=tuple(
                (source, source.read()) for source in constants_but(environment.reached, open_, inputs)
            ),
            identities=(*environment.reached.identities, *_written_in_backward(captured)),
            same_objects=tuple(environment.reached.ties),
            prepare=tuple((claim.rule.prepare, claim.root) for claim in environment.rules),
        ),
        leave_objects=captured.leaves,
    )


def _first_leaf(facts: Facts, idx: NodeOutIdx) -> int:
    """The position of the first plain tensor of a node output among those of all outputs."""
    return sum(1 for out in list(facts.node_outs)[:idx] for _ in leaves(out.recipe))


def _written_in_backward(captured: Captured) -> Iterator[tuple[Source, Any]]:
    """Objects and containers that a backward writes: it writes those of the capture, so they are guarded."""
    for held in held_in(captured.in_backward.whole.places()):
        yield held.source, held.example


def _sources(compilation: Compilation) -> tuple[Source, ...]:
    captured = compilation.captured
    state = [tensor.source() for tensor in captured.environment.state]
    examples = compilation.traced.program.examples
    return (*state, *(captured.source_of(examples[idx]) for idx in compilation.lifted_inputs()))


def _with_closed_over(compilation: Compilation) -> DedupePlan:
    """The plan with the closed-over tensors, which are distinct, at the end."""
    deduped = compilation.deduped
    num_args, num_distinct = len(deduped.source), len(deduped.kept)
    extra = range(len(compilation.lifted_inputs()))
    kept = [*deduped.kept, *(ArgIdx(num_args + offset) for offset in extra)]
    source = [*deduped.source, *(DistinctIdx(num_distinct + offset) for offset in extra)]
    return DedupePlan(Row(kept), Row(source))


def refuse_overlap(fit: Guards) -> None:
    """Refuse a program that writes an input which shares memory with another, where they have no base.

    Raises:
        UnsupportedProgram: it does; both are named.
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
    """A guard on the metadata of many tensors, in C++ (5.5 us for 100).

    `check(*tensors)` is true if each has the type, dtype, device, dispatch keys, sizes, strides and
    `requires_grad` of its example, and all are different objects. Symbolic sizes and strides may differ.
    """
    if not is_symbolic(tuple(recipes)) and all(map(_is_sized, recipes)):
        return TensorGuards(*examples, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    sizes: Any
    strides: Any
    numbers = map(_numbers, examples, recipes)
    sizes, strides = (
        [[None if isinstance(number, SYMBOLIC) else number for number in each] for each in of]
        for of in zip(*numbers, strict=True)
    )
    return TensorGuards(*examples, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def _is_sized(recipe: Recipe) -> bool:
    return not isinstance(recipe, Wrapper) or wrapper_rule(recipe.cls).sized


def _numbers(example: torch.Tensor, recipe: Recipe) -> tuple[Sequence[Any], Sequence[Any]]:
    assert not isinstance(recipe, Constant), "a tensor's recipe"
    if _is_sized(recipe):
        return recipe.size, recipe.stride
    unguarded = [None] * example.dim()  # they follow from the tensors inside
    return unguarded, unguarded


def place_in_storage(tensor: torch.Tensor) -> tuple[int, int]:
    """The storage offset of a tensor (in elements), and the size of its storage (in bytes)."""
    return int(tensor.storage_offset()), tensor.untyped_storage().nbytes()


def no_overlap(written: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether no tensor of `written` shares memory with another of `written` or one of `others`.

    Only tensors of one storage are compared; finding that there are none takes 0.1 us for each.
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
    """Whether none of `others` shares memory with the members of a span.

    The span itself has a storage object of its own, so `no_overlap` would not see it.
    """
    storage = storage_id(members[0])
    near = [other for other in others if storage_id(other) == storage]
    return not any(share_memory(member, other) for member in members for other in near)


_TIMEOUT_MS = 10_000


def prove_guards(sizes: Sizes, counts: Sequence[str] = ()) -> None:
    """Prove with Z3 that the guards on sizes imply every decision that the trace made by symbolic sizes.

    Guards are simplified, and implied ones dropped: a mistake there would let a program run on sizes that it
    was not traced for. The proof reads the same expressions that the printed call tests.
    Decisions that Z3 cannot express (a square root), or settle within ten seconds, count as proved.

    Raises:
        BadSettings: Z3 is not installed.
        InternalError: there are such sizes.
    """
    if not sizes.decided:
        return
    try:
        import z3  # pyright: ignore[reportMissingImports]  # an extra
    except ImportError:
        raise BadSettings(
            "`validate_guards` needs Z3, which is not installed", fix="pip install 'aotdist[validate]'"
        ) from None
    scope = {name: z3.Int(name) for name in (*(name for name, _ in sizes.symbols), *counts)}
    scope |= {"max": _pick(z3, operator.ge), "min": _pick(z3, operator.le)}
    solver = z3.Solver()
    solver.set("timeout", _TIMEOUT_MS)
    solver.add(*(formula for guard in sizes.guards if (formula := _formula(guard, scope)) is not None))
    for decided in sizes.decided:
        formula = _formula(decided, scope)
        if formula is not None and solver.check(z3.Not(formula)) == z3.sat:
            raise InternalError(
                f"sizes pass the guards that break `{decided}`: {solver.model()}; "
                f"guards are {', '.join(sizes.guards)}",
                stage="runtime",
                fix="report this; `aotdist.Settings(dynamic=False)` compiles each size by itself",
            )


def _formula(guard: Expression, scope: dict[str, Any]) -> Any:
    """A guard as a formula, or None if Z3 cannot express it. Of positive integers, its `/` is `//`."""
    spelled = guard.replace("//", "/")
    try:
        return None if spelled.count("/") != guard.count("//") else eval(spelled, {}, scope)
    except (NameError, TypeError):
        return None


def _pick(z3: Any, is_better: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *numbers: functools.reduce(lambda a, b: z3.If(is_better(a, b), a, b), numbers)
