"""Prints the function that runs at every call: fetch the tensors, test the guards, run, return.

If a guard fails, the printed function returns `MISS` before anything has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, assert_never

import torch

from aotdist.aliasing.overwrite import are_written_alone, bump, refuse_forbidden, rewind
from aotdist.capture.ambient import ambient_guard
from aotdist.capture.argument_mutation import are_distinct
from aotdist.capture.arguments import ConstantLeaf
from aotdist.capture.captured import Returned
from aotdist.capture.constants import same_constant
from aotdist.capture.source import held_in
from aotdist.convention.bases import Span, ViewBase, base_of, span_over
from aotdist.convention.epilogue import EpiloguePlan
from aotdist.convention.mutation import DifferentiableWrites
from aotdist.convention.stack import Plans
from aotdist.facts import Action
from aotdist.program import PrimalIdx, Row
from aotdist.runtime.guards import MISS, Guards, are_outside, no_overlap, place_in_storage, tensor_check
from aotdist.runtime.hooks import HookPlan, shield, with_silenced_hooks
from aotdist.runtime.print_node import print_classes_off, print_plains
from aotdist.runtime.print_outputs import action_printer, print_return, print_steps, print_write
from aotdist.runtime.printer import Printer, binder, print_size, sequence
from aotdist.sizes import is_symbolic
from aotdist.subclasses.protocol import (
    Constant,
    Recipe,
    Wrapper,
    WrapperRule,
    leaves,
    plain_tensors,
    recipe_of,
    wrapper_rule,
)
from aotdist.torch_seam.jagged import have_same_rows, rows_of
from aotdist.torch_seam.trees import tree_children


def print_call(
    printer: Printer,
    fit: Guards,
    run: str,
    plans: Plans,
    returned: Returned,
    hooks: HookPlan,
    *,
    enables_grad: bool,
) -> None:
    """Print `call(args, kwargs)`.

    Args:
        printer: where to print.
        fit: the guards.
        run: an expression for a function that takes the primals, runs the graph, and returns a tuple.
        plans: the plans of the convention layers.
        returned: how the user's result is put together.
        hooks: what is done for hooks.
        enables_grad: whether the program switches grad mode on although the caller has it off.
    """
    classes_off = print_classes_off(printer) if fit.has_classes() else nullcontext()
    with printer.block("def call(args, kwargs):"), classes_off:
        for function, argument in fit.environment.prepare:
            printer.line(f"{printer.bind('prepare', function)}({printer.bind('module', argument)})")
        _print_arguments(printer, fit)
        held = held_in([*returned.log.places(), *(count.place for count in fit.numbers.counts)])
        bind = binder(printer, fit.variables, held)
        with _missing_places_miss(printer) if held or fit.reads_places() else nullcontext():
            _print_sources(printer, fit, bind)
            if held:
                printer.comment("what is written, besides tensors")
            for position, each in enumerate(held):
                printer.line(f"held_{position} = {each.source.expression(bind)}")
            _print_bases(printer, fit)
            for count in fit.numbers.counts:
                printer.line(f"{count.name} = {count.place.expression(bind)}")
            printer.comment("does this artifact fit?")
            _miss_unless(printer, _conditions(printer, fit, bind, changes_arguments=returned.changes_given()))
        primals = fit.primal_variables()
        _print_sizes(printer, fit, primals)
        _miss_unless(printer, list(_conditions_on_data(printer, fit)))
        printer.comment("run")
        for idx in plans.epilogue.switched_on:
            printer.line(f"{primals[idx]}.requires_grad_()")
        do = action_printer(printer, plans.epilogue, primals, fit.environment.ambient)
        with printer.block(f"with {printer.call(torch.enable_grad)}:") if enables_grad else nullcontext():
            _print_run(printer, run, _print_given(printer, plans.writes, primals, hooks), fit)
            if names := [f"values[{idx}]" for idx in hooks.at_once()]:
                printer.spread(f"{printer.bind('shield', shield)}(", names, ")")
            if not hooks.gated:
                for write in plans.writes.writes:
                    print_write(printer, primals, write)
        _print_epilogue(printer, plans.epilogue, primals, hooks, do)
        if fit.leave_objects is not None:
            printer.line(f"{printer.bind('leave_objects', fit.leave_objects)}()")
        print_return(printer, returned, plans.epilogue.outputs, bind)


def _print_epilogue(
    printer: Printer,
    epilogue: EpiloguePlan,
    primals: Sequence[str],
    hooks: HookPlan,
    do: Callable[[Action], None],
) -> None:
    """Print that version counters are set back, then the actions, with gates among them if there are any."""
    for idx, count in epilogue.rewinds:
        printer.line(printer.call(rewind, primals[idx], count))
    if hooks.gated:
        print_steps(printer, hooks, primals, do)
        return
    for action in epilogue.order:
        do(action)


def _print_run(printer: Printer, run: str, given: Sequence[str], fit: Guards) -> None:
    """Print the call of the region, and bind the numbers that it has read from tensors."""
    printer.spread(f"values = {run}(", [*given, *(["symbols"] if fit.numbers else [])], ")")
    for name in fit.numbers.unbacked:
        printer.line(f"{name} = symbols[{name!r}]")


def _print_given(
    printer: Printer, writes: DifferentiableWrites, primals: Sequence[str], hooks: HookPlan
) -> list[str]:
    """Print `DifferentiableWrites.prepare`, and what is done for hooks; returns expressions for arguments."""
    if writes.writes:
        printer.line(printer.call(refuse_forbidden, *(primals[primal] for primal, _, _ in writes.writes)))
    for primal, bumps in writes.counted:
        printer.line(printer.call(bump, primals[primal], bumps))
    given = list(primals)
    for idx in hooks.detached:
        given[idx] += ".detach()"
    if not hooks.silenced:
        return given
    silence = printer.bind("with_silenced_hooks", with_silenced_hooks)
    printer.spread(f"given = {silence}({printer.bind('SILENCED', hooks.silenced)}, ", given, ")")
    return ["*given"]


@contextmanager
def _missing_places_miss(printer: Printer) -> Generator[None]:
    """A block in which places are read; the call returns `MISS` if one does not exist.

    `TypeError` is for None, or another object without items, where there was a container.
    """
    with printer.block("try:"):
        yield
    with printer.block("except (AttributeError, IndexError, KeyError, TypeError):"):
        printer.line(f"return {printer.bind('MISS', MISS)}")


def _miss_unless(printer: Printer, conditions: Sequence[str]) -> None:
    """Print that `MISS` is returned if any of `conditions`, tested in order, is false."""
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


def _print_arguments(printer: Printer, fit: Guards) -> None:
    """Print that each tensor among the arguments is bound to its variable, with guards on their structure."""
    arguments = fit.arguments
    printer.comment("arguments")
    args_spec, kwargs_spec = tree_children(arguments.spec)
    positional, keyword = tree_children(args_spec), tree_children(kwargs_spec)
    if not arguments.is_plain or not all(spec.is_leaf() for spec in (*positional, *keyword)):
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


def _print_nested_arguments(printer: Printer, fit: Guards) -> None:
    printer.line(f"matched = {printer.bind('match', fit.arguments.match)}(args, kwargs)")
    _miss_unless(printer, ["matched is not None"])
    printer.line("tensors, objects, numbers = matched")
    if count := len(fit.arguments.tensor_paths()):
        printer.spread("(", [*fit.variables[:count]], ",) = tensors")


def _same(printer: Printer, place: str, value: Any, hint: str) -> str:
    """The condition that the constant at `place` is still `value`."""
    if value is None or isinstance(value, bool):
        return f"{place} is {value}"
    expected = printer.bind(f"{hint} at capture", value)
    return f"({place} is {expected} or {printer.call(same_constant, place, expected)})"


def _print_sources(printer: Printer, fit: Guards, bind: Callable[[str, Any], str]) -> None:
    start = len(fit.arguments.tensor_paths())
    if fit.sources:
        printer.comment("parameters, buffers and closed-over tensors")
    for name, source in zip(fit.variables[start:], fit.sources, strict=True):
        printer.line(f"{name} = {source.expression(bind)}")


def _print_sizes(printer: Printer, fit: Guards, primals: Sequence[str]) -> None:
    """Print that each symbol is bound to a variable of its name, with guards on the symbols."""
    if not fit.numbers:
        return
    sizes, symbols = fit.numbers.sizes, fit.numbers.symbols()
    printer.comment("sizes")
    for name, measure in sizes.symbols:
        printer.line(f"{name} = {measure.spelled(primals[measure.input])}")
    conditions = [
        f"{measure.spelled(primals[measure.input])} == {print_size(printer, expected)}"
        for measure, expected in sizes.conditions
    ]
    _miss_unless(printer, [*conditions, *(print_size(printer, guard) for guard in sizes.guards)])
    printer.line(f"symbols = {{{', '.join(f'{name!r}: {name}' for name in symbols)}}}")


def _print_bases(printer: Printer, fit: Guards) -> None:
    """Print that each base is bound to its variable, which fails if inputs share memory in another way."""
    distinct, new = fit.distinct_variables(), iter(fit.base_variables)
    plains = list(map(print_plains, fit.facts.recipes, fit.primal_variables()))
    if len(fit.bases.bases):
        printer.comment("memory that inputs share")
    names = [next(new) if fit.bases.is_new(at) else "" for at in fit.bases.bases.indices()]
    # Bases of views come first, as spans may contain them.
    for name, base in sorted(
        zip(names, fit.bases.bases, strict=True), key=lambda pair: isinstance(pair[1], Span)
    ):
        match base:
            case Span(members=members, numel=numel, dtype=dtype):
                inside = [plains[fit.bases.position(member.input)][member.leaf] for member in members]
                kind = printer.bind(str(dtype).removeprefix("torch."), dtype)
                span = printer.call(span_over, sequence(inside), base.offsets(), numel, kind)
                printer.line(f"{name} = {span}")
            case ViewBase(views=views, offsets=offsets, itself=itself, creations=creations):
                expected = "None" if itself is None else distinct[itself]
                inside = sequence([distinct[view] for view in views])
                made = printer.call(base_of, inside, offsets, printer.bind("creations", creations), expected)
                if itself is None:
                    printer.line(f"{name} = {made}")
                    _miss_unless(printer, [f"{name} is not None"])
                else:
                    _miss_unless(printer, [f"{made} is not None"])
            case _:
                assert_never(base)


def _conditions(
    printer: Printer, fit: Guards, bind: Callable[[str, Any], str], *, changes_arguments: bool
) -> list[str]:
    """The guards, as expressions; those that are cheap and likely to fail come first."""
    conditions = [f"{printer.bind('modes_hold', ambient_guard(fit.environment.ambient))}()"]
    if changes_arguments:
        conditions.append(printer.call(are_distinct, "args", "kwargs"))
    for source, value in fit.environment.identities:
        expected = printer.bind(f"{source.path} at capture", value)
        conditions.append(f"{source.expression(bind)} is {expected}")
    conditions += [
        f"{source.expression(bind)} is {first.expression(bind)}"
        for source, first in fit.environment.same_objects
    ]
    for source, value in fit.environment.constants:
        conditions.append(_same(printer, source.expression(bind), value, source.path))
    for count in fit.numbers.counts:
        name = count.kind.__name__
        kind = name if count.kind in (int, float) else printer.bind(name, count.kind)
        conditions.append(f"type({count.name}) is {kind}")
    conditions += [f"{printer.bind(name, function)}()" for name, function in fit.environment.holds]
    for idx, primal in fit.dedupe.source.enumerate():
        if fit.dedupe.kept[primal] != idx:
            conditions.append(f"{fit.variables[idx]} is {fit.variables[fit.dedupe.kept[primal]]}")
    conditions += _tensor_conditions(printer, fit)
    conditions += _conditions_of_autograd(fit)
    conditions += _storage_conditions(printer, fit)
    if fit.written:
        conditions += _overlap_conditions(printer, fit)
    if with_history := fit.with_history():
        conditions.append(_alone_condition(printer, fit, with_history))
    return conditions


def _conditions_of_autograd(fit: Guards) -> Iterator[str]:
    names = fit.primal_variables()
    for idx, asked, answer in fit.facts.asked:
        place = f"{names[idx]}.{asked}"
        is_there = asked in ("grad", "grad_fn")
        yield f"({place} is not None) is {answer}" if is_there else f"{place} == {answer}"


def _conditions_on_data(printer: Printer, fit: Guards) -> Iterator[str]:
    """The guards on data that the program branched on; they may read symbols, which are bound before."""
    names = fit.primal_variables()
    for guard in fit.facts.data_guards:
        plains = [print_plains(fit.facts.recipes[idx], names[idx])[leaf] for idx, leaf in guard.of]
        given = [*plains, *(print_size(printer, size) for size in guard.sizes)]
        yield f"{printer.bind('answer_is_same', guard.is_same)}({', '.join(given)})"


def _storage_conditions(printer: Printer, fit: Guards) -> Iterator[str]:
    names = fit.primal_variables()
    for idx, leaf, place in fit.storages:
        plain = print_plains(fit.facts.recipes[idx], names[idx])[leaf]
        yield f"{printer.call(place_in_storage, plain)} == {place}"


def _tensor_conditions(printer: Printer, fit: Guards) -> list[str]:
    """Guards on type and metadata of every tensor, and on the context of wrappers and the tensors inside."""
    names = fit.primal_variables()
    check = tensor_check(list(fit.examples), list(fit.facts.recipes))
    conditions = [f"{printer.bind('fits', check.check)}({', '.join(names)})"]
    plains: dict[int, str] = {}
    examples: list[torch.Tensor] = []
    recipes: list[Recipe] = []
    for name, example, recipe in zip(names, fit.examples, fit.facts.recipes, strict=True):
        if isinstance(recipe, Wrapper):
            conditions += _same_contexts(printer, name, example, recipe)
            parts = zip(print_plains(recipe, name), plain_tensors(example), leaves(recipe), strict=True)
            for plain, inside, (_, leaf) in parts:
                if id(inside) in plains:  # the C++ check takes different objects
                    conditions.append(f"{plain} is {plains[id(inside)]}")
                else:
                    plains[id(inside)] = plain
                    examples.append(inside)
                    recipes.append(leaf)
    if plains:
        check = printer.bind("plain_fits", tensor_check(examples, recipes).check)
        conditions.append(f"{check}({', '.join(plains.values())})")
        conditions += _same_rows_conditions(printer, fit, names)
    return conditions if names else []


def _same_rows_conditions(printer: Printer, fit: Guards, names: Sequence[str]) -> Iterator[str]:
    """The guards that jagged tensors (and offsets) which had the same rows at capture still do."""
    together: dict[int, list[str]] = {}
    for name, example in zip(names, fit.examples, strict=True):
        if (number := rows_of(example)) is not None:
            together.setdefault(number, []).append(name)
    for group in together.values():
        if len(group) > 1:
            yield printer.call(have_same_rows, *group)


def _same_contexts(printer: Printer, name: str, example: torch.Tensor, recipe: Wrapper) -> Iterator[str]:
    """The guards on the context and constants of a wrapper, and on the classes of wrappers inside it."""
    yield _same_context(printer, name, example, recipe)
    # A rule with a context of its own includes the constants in it.
    compares_all = type(wrapper_rule(recipe.cls)).context_of is not WrapperRule.context_of
    for attribute, part in recipe.attributes:
        place = f"{name}.{attribute}"
        match part:
            case Constant(value=value) if not compares_all:
                yield _same(printer, place, value, place)
            case Wrapper(cls=cls):
                yield f"type({place}) is {printer.bind(cls.__name__, cls)}"
                yield from _same_contexts(printer, place, getattr(example, attribute), part)
            case _:
                pass


def _same_context(printer: Printer, name: str, example: torch.Tensor, recipe: Wrapper) -> str:
    rule = wrapper_rule(recipe.cls)
    if is_symbolic(recipe):
        return printer.call(rule.same_layout, printer.call(recipe_of, name), printer.bind("recipe", recipe))
    return rule.same_context_source(name, printer.bind(f"{name} at capture", rule.context_of(example)))


def _alone_condition(printer: Printer, fit: Guards, with_history: Collection[PrimalIdx]) -> str:
    """The guard that `put` can write each input that is written with history, without its base."""
    names, views = fit.primal_variables(), fit.bases.views()
    others = [at for at in fit.slots.indices() if at not in views and at not in with_history]
    given = (sequence([names[at] for at in group]) for group in (with_history, others))
    return printer.call(are_written_alone, *given)


def _overlap_conditions(printer: Printer, fit: Guards) -> Iterator[str]:
    """The guards that written inputs share memory only with those that they shared it with at capture."""
    names = fit.primal_variables()
    plains = Row[PrimalIdx, Sequence[str]](
        print_plains(recipe, name) for recipe, name in zip(fit.facts.recipes, names, strict=True)
    )
    apart = dict(fit.plains_apart(plains))
    written = [plain for idx in fit.written for plain in apart[idx]]
    others = [plain for idx, found in apart.items() if idx not in fit.written for plain in found]
    yield printer.call(no_overlap, sequence(written), sequence(others))
    elsewhere = [plain for idx, found in apart.items() if not fit.bases.is_span(idx) for plain in found]
    spans = [base for base in fit.bases.bases if isinstance(base, Span)]
    for span in reversed(spans):
        members = [plains[fit.bases.position(member.input)][member.leaf] for member in span.members]
        if elsewhere:
            yield printer.call(are_outside, sequence(elsewhere), sequence(members))
        elsewhere += members
