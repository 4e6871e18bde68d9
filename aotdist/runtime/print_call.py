"""Prints what runs at every call: fetch the tensors, check that the artifact fits, run, hand back.

The printed function returns `MISS` when the artifact does not fit, before anything has happened.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, assert_never

import torch

from aotdist.capture.ambient import Ambient, ambient
from aotdist.capture.arguments import Arguments, ConstantLeaf
from aotdist.capture.capture import Returned
from aotdist.capture.constants import same_constant
from aotdist.capture.source import Source
from aotdist.convention.dedupe import DedupePlan
from aotdist.convention.epilogue import EpiloguePlan
from aotdist.convention.metadata import rewrite
from aotdist.convention.put import put, take
from aotdist.convention.stack import Plans
from aotdist.convention.synthetic_base import BasePlan, Span, ViewBase, base_of, span_over
from aotdist.convention.version import rewind
from aotdist.facts import (
    Fresh,
    IsInput,
    Keep,
    Kept,
    MetadataWrite,
    NotATensor,
    Place,
    ViewOfInput,
    ViewOfIntermediate,
    ViewOfOutput,
    ViewStep,
)
from aotdist.program import OutIdx, PrimalIdx, Row, Slot
from aotdist.runtime.guard import no_overlap, place_in_storage, tensor_check
from aotdist.runtime.print_node import print_plains
from aotdist.runtime.printer import Printer, sequence
from aotdist.subclasses.protocol import Recipe, Wrapper, plain_tensors, wrapper_rule
from aotdist.torch_seam import pytree, tree_children

T = TypeVar("T")

MISS = object()
"""What a printed call returns when its artifact does not fit."""


@dataclass(frozen=True, slots=True)
class Fit:
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
        recipes: how each is put together.
        written: inputs that the program writes.
        storages: plain tensors beneath inputs, by position, whose storage must have the size that it had.
        ambient: the modes.
        holds: further conditions: each a name, a function, and its arguments.
        constants: closed-over constants, with their values.
        identities: closed-over functions and modules.
        prepare: functions to call first, each with its argument.
    """

    arguments: Arguments
    variables: tuple[str, ...]
    sources: tuple[Source, ...]
    dedupe: DedupePlan
    bases: BasePlan
    base_variables: tuple[str, ...]
    slots: Row[PrimalIdx, Slot]
    examples: Row[PrimalIdx, torch.Tensor]
    recipes: Row[PrimalIdx, Recipe]
    written: tuple[PrimalIdx, ...]
    storages: tuple[tuple[PrimalIdx, int, tuple[int, int]], ...]
    ambient: Ambient
    holds: tuple[tuple[str, Callable[[], bool]], ...]
    constants: tuple[tuple[Source, Any], ...]
    identities: tuple[tuple[Source, Any], ...]
    prepare: tuple[tuple[Callable[[Any], None], Any], ...]

    def reads_places(self) -> bool:
        """Whether a call has to look anything up besides its arguments."""
        return bool(self.sources or self.constants or self.identities or self.base_variables)

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
        """Of the plain tensors of each input, those that may not meet another's: none that lie in a base."""
        aliases, views = self.bases.aliases(), self.bases.views()
        for at, found in plains.enumerate():
            if at not in views:
                yield at, [plain for leaf, plain in enumerate(found) if (at, leaf) not in aliases]


def print_call(
    printer: Printer,
    fit: Fit,
    run: str,
    plans: Plans,
    returned: Returned,
    *,
    enables_grad: bool,
) -> None:
    """Print `call(args, kwargs)`.

    Args:
        printer: where to print.
        fit: when the artifact fits.
        run: an expression for the region: a function of the primals that returns a tuple.
        plans: what is done outside of the region.
        returned: how the user's result is put together.
        enables_grad: whether the program switches grad mode on where the caller has it off.
    """
    with printer.block("def call(args, kwargs):"):
        for function, argument in fit.prepare:
            printer.line(f"{printer.bind('prepare', function)}({printer.bind('module', argument)})")
        _print_arguments(printer, fit)
        with _missing_places_miss(printer) if fit.reads_places() else nullcontext():
            _print_sources(printer, fit)
            _print_bases(printer, fit)
            printer.comment("does this artifact fit?")
            _miss_unless(printer, _conditions(printer, fit))
        primals = fit.primal_variables()
        printer.comment("run")
        for idx in plans.switched_on.inputs:
            printer.line(f"{primals[idx]}.requires_grad_()")
        with _grad_enabled(printer) if enables_grad else nullcontext():
            given = list(primals)
            for primal, _, _ in plans.writes.writes:
                given[primal] = f"{primals[primal]}_before"
                taken = f"{given[primal]}, {primals[primal]}_rest"
                printer.line(f"{taken} = {printer.bind('take', take)}({primals[primal]})")
            printer.spread(f"values = {run}(", given, ")")
            for primal, value, bumps in plans.writes.writes:
                written = f"{primals[primal]}, {primals[primal]}_rest, values[{value}], {bumps}"
                printer.line(f"{printer.bind('put', put)}({written})")
        _print_outputs(printer, plans.epilogue, primals, fit.ambient)
        _print_return(printer, returned)


def _grad_enabled(printer: Printer) -> AbstractContextManager[None]:
    return printer.block(f"with {printer.bind('enable_grad', torch.enable_grad)}():")


@contextmanager
def _missing_places_miss(printer: Printer) -> Generator[None]:
    """What is printed inside reads places; one that is gone means that the artifact does not fit."""
    with printer.block("try:"):
        yield
    with printer.block("except (AttributeError, IndexError, KeyError):"):
        printer.line(f"return {printer.bind('MISS', MISS)}")


def _miss_unless(printer: Printer, conditions: Sequence[str]) -> None:
    """Print a return of `MISS` for when any of `conditions` fails; they are tested in order."""
    if not conditions:
        return
    miss = f"return {printer.bind('MISS', MISS)}"
    if len(conditions) == 1:
        with printer.block(f"if not ({conditions[0]}):"):
            printer.line(miss)
        return
    with printer.block("if not ("):
        for position, condition in enumerate(conditions):
            printer.line(condition if position == 0 else f"and {condition}")
    with printer.block("):"):
        printer.line(miss)


def _print_arguments(printer: Printer, fit: Fit) -> None:
    """Bind every tensor among the arguments to its variable; check structure and constants."""
    arguments = fit.arguments
    printer.comment("arguments")
    args_spec, kwargs_spec = tree_children(arguments.spec)
    positional, keyword = tree_children(args_spec), tree_children(kwargs_spec)
    if not all(spec.is_leaf() for spec in (*positional, *keyword)):
        _print_nested_arguments(printer, fit)
        return
    tensors = iter(fit.variables)
    names = [
        f"constant_{position}" if isinstance(leaf, ConstantLeaf) else next(tensors)
        for position, leaf in enumerate(arguments.leaves)
    ]
    keys = list(kwargs_spec.context)
    shape = [f"len(args) == {len(positional)}", f"len(kwargs) == {len(keys)}"]
    _miss_unless(printer, [*shape, *(f"{key!r} in kwargs" for key in keys)])
    if positional:
        printer.line(f"{sequence(names[: len(positional)])} = args")
    for name, key in zip(names[len(positional) :], keys, strict=True):
        printer.line(f"{name} = kwargs[{key!r}]")
    _miss_unless(
        printer,
        [
            _same(printer, name, leaf.value, leaf.path)
            for name, leaf in zip(names, arguments.leaves, strict=True)
            if isinstance(leaf, ConstantLeaf)
        ],
    )


def _print_nested_arguments(printer: Printer, fit: Fit) -> None:
    count = len(fit.arguments.tensor_paths())
    printer.line(f"tensors = {printer.bind('match', fit.arguments.match)}(args, kwargs)")
    _miss_unless(printer, ["tensors is not None"])
    if count:
        printer.spread("(", [*fit.variables[:count]], ",) = tensors")


def _same(printer: Printer, place: str, value: Any, hint: str) -> str:
    """A condition: is the constant at `place` still `value`?"""
    expected = printer.bind(f"{hint} at capture", value)
    return f"({place} is {expected} or {printer.bind('same_constant', same_constant)}({place}, {expected}))"


def _print_sources(printer: Printer, fit: Fit) -> None:
    start = len(fit.arguments.tensor_paths())
    if fit.sources:
        printer.comment("parameters, buffers and closed-over tensors")
    for name, source in zip(fit.variables[start:], fit.sources, strict=True):
        printer.line(f"{name} = {source.expression(printer.bind)}")


def _print_bases(printer: Printer, fit: Fit) -> None:
    """Bind every base to its variable: None where inputs do not share memory as they did at capture."""
    distinct, new = fit.distinct_variables(), iter(fit.base_variables)
    plains = [
        print_plains(recipe, name) for recipe, name in zip(fit.recipes, fit.primal_variables(), strict=True)
    ]
    if len(fit.bases.bases):
        printer.comment("memory that inputs share")
    for base in fit.bases.bases:
        match base:
            case Span(members=members, numel=numel, dtype=dtype):
                lies = [plains[fit.bases.position(member.input)][member.leaf] for member in members]
                span = printer.bind("span_over", span_over)
                kind = printer.bind(str(dtype).removeprefix("torch."), dtype)
                printer.line(f"{next(new)} = {span}({sequence(lies)}, {base.offsets()}, {numel}, {kind})")
            case ViewBase(views=views, offsets=offsets, itself=itself):
                known = "None" if itself is None else distinct[itself]
                shown = sequence([distinct[view] for view in views])
                made = f"{printer.bind('base_of', base_of)}({shown}, {offsets}, {known})"
                if itself is None:
                    printer.line(f"{next(new)} = {made}")
                else:
                    _miss_unless(printer, [f"{made} is not None"])
            case _:
                assert_never(base)


def _conditions(printer: Printer, fit: Fit) -> list[str]:
    """Everything that must be as it was at capture, cheap and telling things first."""
    conditions = [f"{printer.bind('ambient', ambient)}() == {printer.bind('AMBIENT', fit.ambient)}"]
    for source, value in fit.identities:
        conditions.append(
            f"{source.expression(printer.bind)} is {printer.bind(f'{source.path} at capture', value)}"
        )
    for source, value in fit.constants:
        conditions.append(_same(printer, source.expression(printer.bind), value, source.path))
    conditions += [f"{printer.bind(name, function)}()" for name, function in fit.holds]
    for idx, primal in fit.dedupe.source.enumerate():
        if fit.dedupe.kept[primal] != idx:
            conditions.append(f"{fit.variables[idx]} is {fit.variables[fit.dedupe.kept[primal]]}")
    conditions += _tensor_conditions(printer, fit)
    conditions += _storage_conditions(printer, fit)
    if fit.written:
        conditions.append(_overlap_condition(printer, fit))
    return conditions


def _storage_conditions(printer: Printer, fit: Fit) -> Iterator[str]:
    names = fit.primal_variables()
    for idx, leaf, place in fit.storages:
        plain = print_plains(fit.recipes[idx], names[idx])[leaf]
        yield f"{printer.bind('place_in_storage', place_in_storage)}({plain}) == {place}"


def _tensor_conditions(printer: Printer, fit: Fit) -> list[str]:
    """Type and metadata of every tensor; of a wrapper also its context and what is beneath it."""
    names = fit.primal_variables()
    conditions = [f"{printer.bind('fits', tensor_check(list(fit.examples)).check)}({', '.join(names)})"]
    plains: dict[int, str] = {}
    examples: list[torch.Tensor] = []
    for name, example, recipe in zip(names, fit.examples, fit.recipes, strict=True):
        if isinstance(recipe, Wrapper):
            conditions.append(_same_context(printer, name, example, recipe))
            for plain, beneath in zip(print_plains(recipe, name), plain_tensors(example), strict=True):
                if id(beneath) in plains:  # the check wants different objects
                    conditions.append(f"{plain} is {plains[id(beneath)]}")
                else:
                    plains[id(beneath)] = plain
                    examples.append(beneath)
    if plains:
        check = printer.bind("plain_fits", tensor_check(examples).check)
        conditions.append(f"{check}({', '.join(plains.values())})")
    return conditions if names else []


def _same_context(printer: Printer, name: str, example: torch.Tensor, recipe: Wrapper) -> str:
    rule = wrapper_rule(recipe.cls)
    if rule is not None:
        return rule.same_context_source(name, printer.bind(f"{name} at capture", rule.context_of(example)))
    same = printer.bind("has_context", _has_context)
    return f"{same}({name}, {printer.bind('context', recipe.context)})"


def _has_context(tensor: Any, context: Any) -> bool:
    return bool(tensor.__tensor_flatten__()[1] == context)


def _overlap_condition(printer: Printer, fit: Fit) -> str:
    names = fit.primal_variables()
    plains = Row[PrimalIdx, Sequence[str]](
        print_plains(recipe, name) for recipe, name in zip(fit.recipes, names, strict=True)
    )
    apart = dict(fit.plains_apart(plains))
    written = [plain for idx in fit.written for plain in apart[idx]]
    others = [plain for idx, found in apart.items() if idx not in fit.written for plain in found]
    return f"{printer.bind('no_overlap', no_overlap)}({sequence(written)}, {sequence(others)})"


def _print_outputs(printer: Printer, epilogue: EpiloguePlan, primals: Sequence[str], modes: Ambient) -> None:
    printed: set[OutIdx] = set()
    made: dict[int, str] = {}

    def print_one(idx: OutIdx) -> None:
        fact = epilogue.outputs[idx]
        if idx in printed or (isinstance(fact, NotATensor) and isinstance(fact.value, Returned)):
            return
        printed.add(idx)
        shown = _literal(printer, fact.value) if isinstance(fact, NotATensor) else place(fact)
        printer.line(f"o{idx} = {shown}")

    def place(at: Place) -> str:
        if isinstance(at, ViewOfOutput):
            print_one(at.base)
        return _place(printer, at, primals, modes, made)

    def print_write(write: MetadataWrite) -> None:
        args = [place(arg) if isinstance(arg, Place) else _literal(printer, arg) for arg in write.args]
        data = [] if write.data is None else [f"values[{write.data}]"]
        change = printer.bind(str(getattr(write.op, "__name__", write.op)), write)
        given = ", ".join([place(write.target), change, sequence(args), *data])
        printer.line(f"{printer.bind('rewrite', rewrite)}({given})")

    for idx, count in epilogue.rewinds:
        printer.line(f"{printer.bind('rewind', rewind)}({primals[idx]}, {count})")
    for item in epilogue.order:
        match item:
            case MetadataWrite():
                print_write(item)
            case Keep(number=number, place=kept):
                printer.line(f"kept_{number} = {place(kept)}")
            case _:
                print_one(item)


def _place(
    printer: Printer, place: Place, primals: Sequence[str], modes: Ambient, made: dict[int, str]
) -> str:
    """An expression for one tensor; bases that several may share are printed before, once."""
    match place:
        case Fresh(value=value):
            return f"values[{value}]"
        case IsInput(input=source):
            return primals[source]
        case ViewOfInput(base=base, steps=steps):
            return _view(printer, primals[base], steps, modes, made)
        case ViewOfIntermediate(base=base, steps=steps):
            return _view(printer, f"values[{base}]", steps, modes, made)
        case ViewOfOutput(base=base, steps=steps):
            return _view(printer, f"o{base}", steps, modes, made)
        case Kept(number=number):
            return f"kept_{number}"
        case _:
            assert_never(place)


def _view(
    printer: Printer, base: str, steps: Sequence[ViewStep], modes: Ambient, made: dict[int, str]
) -> str:
    for position, step in enumerate(steps):
        if step.ends_views() and step.serial in made:
            base = made[step.serial]
            continue
        op = printer.bind(str(step.op), step.op)
        more = [_literal(printer, value) for value in step.args]
        more += [f"{name}={_literal(printer, value)}" for name, value in step.kwargs]
        if step.grad == modes.grad:
            base = f"{op}({', '.join([base, *more])})"
        else:
            args = ", ".join([str(step.grad), op, base, *more])
            base = f"{printer.bind('in_grad_mode', _in_grad_mode)}({args})"
        if step.pick is not None:
            base += f"[{step.pick}]"
        if step.ends_views() and position + 1 < len(steps):
            name = f"base_{len(made)}"
            printer.line(f"{name} = {base}")
            base = made[step.serial] = name
    return base


def _in_grad_mode(grad: bool, view: Callable[..., Any], base: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.set_grad_enabled(grad):
        return view(base, *args, **kwargs)


def _print_return(printer: Printer, returned: Returned) -> None:
    positions = itertools.count()
    result = _display(printer, returned.spec, positions)
    for source, spec in returned.assigned:
        value = _display(printer, spec, positions)
        printer.line(f"{source.expression(printer.bind)} = {value}  # {source.path} is reassigned")
    printer.line(f"return {result}")


def _display(printer: Printer, spec: pytree.TreeSpec, positions: Any) -> str:
    """The user's result as an expression: built-in containers are spelled out."""
    if spec.is_leaf():
        return f"o{next(positions)}"
    if spec.type in (tuple, list):
        items = [_display(printer, child, positions) for child in tree_children(spec)]
        return sequence(items) if spec.type is tuple else f"[{', '.join(items)}]"
    if spec.type is dict:
        items = [
            f"{_literal(printer, key)}: {_display(printer, child, positions)}"
            for key, child in zip(spec.context, tree_children(spec), strict=True)
        ]
        return f"{{{', '.join(items)}}}"
    leaves = [f"o{next(positions)}" for _ in range(spec.num_leaves)]
    unflatten, structure = printer.bind("unflatten", pytree.tree_unflatten), printer.bind("structure", spec)
    return f"{unflatten}([{', '.join(leaves)}], {structure})"


def _literal(printer: Printer, value: Any) -> str:
    """`value` spelled out, where Python can, else a name for it."""
    plain = type(value) in (int, str, bool, type(None)) or (
        type(value) in (list, tuple) and all(type(item) is int for item in value)
    )
    return repr(value) if plain else printer.bind("value", value)
