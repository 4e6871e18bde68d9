"""Prints the autograd node around a compiled forward and backward, from its plan (`plan.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from aotdist.aliasing.overwrite import bump
from aotdist.capture.effects import EffectLog
from aotdist.codegen.contract import BoxedCall
from aotdist.convention.mutation import PlainWrites, write_plain
from aotdist.convention.stack import InsidePlans
from aotdist.runtime.backward import Backward
from aotdist.runtime.held import check_unwritten, let_go, run_once
from aotdist.runtime.hooks import is_watched
from aotdist.runtime.plan import NodePlan
from aotdist.runtime.printer import Printer, Unbacked, print_size, print_step, remark, sequence
from aotdist.runtime.tangent import Tangent, TangentMismatch, rebuilt
from aotdist.sizes import Expression, NumberStep, concrete, is_symbolic
from aotdist.subclasses.protocol import Constant, Plain, Recipe, Wrapper, leaves, wrapper_rule
from aotdist.torch_seam.autograd import node_base
from aotdist.torch_seam.modes import class_functions_off
from aotdist.torch_seam.tensors import counter_of


def print_plains(recipe: Recipe, name: str) -> list[str]:
    """Expressions for the plain tensors inside the variable `name`."""
    match recipe:
        case Plain():
            return [name]
        case Constant():
            return []
        case Wrapper():
            return list(wrapper_rule(recipe.cls).unwrap_source(name, recipe))


def print_rebuild(printer: Printer, recipe: Recipe, plains: list[str], hint: str) -> str:
    """An expression for the tensor that `recipe` makes of `plains`."""
    if isinstance(recipe, Plain):
        return plains[0]
    if is_symbolic(recipe) and _has_sizes(recipe):
        return f"{printer.call(rebuilt, printer.concrete(hint, recipe))}({', '.join(plains)})"
    return f"{printer.bind(f'rebuild_{hint}', rebuilt(recipe))}({', '.join(plains)})"


def _has_sizes(recipe: Recipe) -> bool:
    """Whether rebuilding a wrapper takes sizes, besides the tensors inside it."""
    is_wrapper = isinstance(recipe, Wrapper)
    return is_wrapper and (wrapper_rule(recipe.cls).sized or is_symbolic(recipe.context))


def print_results(
    printer: Printer, recipes: Sequence[Recipe], names: Iterable[str], hints: Sequence[str]
) -> list[str]:
    """Expressions for the tensors that `recipes` make of consecutive `names`."""
    remaining = iter(names)
    return [
        print_rebuild(printer, recipe, [next(remaining) for _ in leaves(recipe)], hint)
        for recipe, hint in zip(recipes, hints, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class ForwardPrinter:
    """Prints the call of a forward or inference graph.

    Args:
        printer: where to print.
        names: a variable for each primal.
        symbols: names of the symbols, whose values are one more argument: a dictionary.
        unbacked: symbols that are added to that dictionary once the graph has run.
        call: plain inputs, sizes -> results, then saved values.
    """

    printer: Printer
    names: Sequence[str]
    symbols: Sequence[str]
    unbacked: Unbacked
    call: BoxedCall

    def parameters(self) -> list[str]:
        """The parameters of the printed function."""
        return [*self.names, "symbols"] if self.all_symbols() else list(self.names)

    def all_symbols(self) -> list[str]:
        """The symbols, then the unbacked ones."""
        return [*self.symbols, *self.unbacked]

    def print_run(self, inside: InsidePlans, sizes: Sequence[Expression]) -> list[str]:
        """Print the call of the graph, the writes, and the unbacked symbols; returns the plain inputs."""
        printer, unwrap, writes, rng = self.printer, inside.unwrap, inside.writes, inside.rng
        _print_symbols(printer, self.symbols, "symbols")
        pairs = zip(unwrap.ins, self.names, strict=True)
        plains = [plain for recipe, name in pairs for plain in print_plains(recipe, name)]
        if rng.draw is not None:
            printer.line(f"rng = {printer.bind('draw_state', rng.draw)}()  # seed and offset")
        given = [*plains, *(print_size(printer, size) for size in sizes)]
        given += [] if rng.draw is None else ["*rng"]
        printer.spread(f"results = {printer.bind('FORWARD', self.call)}([", given, "])")
        if writes.writes:
            with printer.block(f"with {printer.call(torch.no_grad)}:"):
                for plain, position, bumps in writes.writes:
                    printer.line(_write(printer, plains[plain], f"results[{position}]", bumps))
        for idx, count in unwrap.bumps:
            printer.line(printer.call(bump, self.names[idx], count))
        _print_unbacked(printer, self.unbacked)
        return plains


def print_node(
    region: ForwardPrinter,
    plan: NodePlan,
    backward: Backward,
    changes: EffectLog,
    *,
    has_classes: bool,
) -> None:
    """Print the class `Node`.

    Args:
        region: prints the call of its forward.
        plan: how tensors pass through the node.
        backward: runs every backward but that of all results in one go, which is printed.
        changes: what the backward changes in Python.
        has_classes: whether inputs have a `__torch_function__`, which must not be called.
    """
    printer = region.printer
    with printer.block(f"class Node({printer.bind('Function', node_base())}):"):
        _print_forward(region, plan)
        printer.line()
        classes_off = print_classes_off(printer) if has_classes else nullcontext()
        tangents = [f"t{idx}" for idx in plan.outs.indices()]
        printer.line("@staticmethod")
        with printer.block(f"def backward(ctx, {', '.join(tangents)}):"), classes_off:
            _print_backward(printer, tangents, region.all_symbols(), plan, backward, changes)
    printer.line()


def print_inference(
    region: ForwardPrinter,
    inside: InsidePlans,
    sizes: Sequence[Expression],
    *,
    views: frozenset[int],
    recorded: bool,
) -> None:
    """Print the function `region`, which runs an inference graph: the node's forward without a node.

    Args:
        region: prints the call of the graph.
        inside: the convention layers around the graph.
        sizes: the numbers that the graph takes.
        views: results that have to be detached, see `aotdist.runtime.plan.result_views`.
        recorded: whether autograd would record the graph's operations, and has to be switched off.
    """
    printer, recipes = region.printer, list(inside.unwrap.outs)
    printer.spread("def region(", region.parameters(), "):")
    off = printer.block(f"with {printer.call(torch.no_grad)}:") if recorded else nullcontext()
    with printer.indented(), off:
        region.print_run(inside, sizes)
        outs = print_results(printer, recipes, _values(inside.writes, views), ["out"] * len(recipes))
        printer.line(f"return {sequence(outs)}")
    printer.line()


def _values(writes: PlainWrites, views: frozenset[int]) -> list[str]:
    """Expressions for the results that come before the new values of inputs."""
    return [f"results[{k}]{'.detach()' if k in views else ''}" for k in range(writes.num_values)]


def _write(printer: Printer, plain: str, value: str, bumps: int) -> str:
    if bumps == 1:
        return f"{plain}.copy_({value})"
    return printer.call(write_plain, plain, value, bumps)


def _print_forward(region: ForwardPrinter, plan: NodePlan) -> None:
    printer, names = region.printer, region.names
    printer.line("@staticmethod")
    printer.spread("def forward(", ["ctx", *region.parameters()], "):")
    with printer.indented():
        plains = region.print_run(plan.inside, plan.sizes)
        if plan.inside.rng.draw is not None:
            printer.line("ctx.rng = rng")
        values = _values(plan.inside.writes, plan.views)
        hints = [str(out.slot) for out in plan.outs]
        outs = print_results(printer, list(plan.inside.unwrap.outs), values, hints)
        for idx, out in plan.outs.enumerate():
            printer.line(f"o{idx} = {outs[idx]}{remark(f'{out.slot.role} {out.slot}')}")
        printer.spread("ctx.save_for_backward(", _saved(plan, plains), ")")
        if plan.kept_inputs.primals:
            printer.spread("ctx.kept_primals = (", [names[idx] for idx in plan.kept_inputs.primals], ",)")
        if plan.kept_inputs.unsaved:
            kept = [plan.kept_inputs.primals[k] for k, _ in plan.kept_inputs.unsaved]
            printer.spread("ctx.versions = (", [f"{names[idx]}._version" for idx in kept], ",)")
        if region.all_symbols():
            printer.line("ctx.symbols = symbols")
        writes = plan.backward_writes
        if writes.plains:
            printer.line(f"ctx.written = {sequence([plains[idx] for idx in writes.plains])}")
        if writes.wrappers:
            printer.line(f"ctx.bumped = {sequence([names[idx] for idx, _ in writes.wrappers])}")
        printer.line("ctx.set_materialize_grads(False)")
        if wrappers := plan.saved.wrappers:
            noted = [f"({names[idx]}, {names[idx]}._version)" for idx in wrappers.ins]
            noted += [f"({printer.call(counter_of, f'o{idx}')}, o{idx}._version)" for idx in wrappers.outs]
            printer.spread("ctx.wrappers = (", noted, ",)")
        constant = [f"o{idx}" for idx, out in plan.outs.enumerate() if not out.differentiable]
        if constant:
            printer.line(f"ctx.mark_non_differentiable({', '.join(constant)})")
        printer.spread("return (", [f"o{idx}" for idx in plan.outs.indices()], ",)")


def _saved(plan: NodePlan, plains: Sequence[str]) -> list[str]:
    """Expressions for the values to save."""
    inputs = [f"{plains[plain]}{'.detach()' if changes else ''}" for plain, changes in plan.saved.inputs]
    return inputs + [f"results[{position}]" for position in plan.saved.results]


def print_classes_off(printer: Printer) -> AbstractContextManager[None]:
    """A block that calls no `__torch_function__`: the trace contains what those calls did."""
    return printer.block(f"with {printer.call(class_functions_off)}:")


def _print_backward(
    printer: Printer,
    names: Sequence[str],
    symbols: Sequence[str],
    plan: NodePlan,
    backward: Backward,
    changes: EffectLog,
) -> None:
    """Print the call of the backward graph, and when `Backward` runs another in its place."""
    if wrappers := plan.saved.wrappers:
        printer.line(printer.call(check_unwritten, "ctx.wrappers", printer.bind("WRAPPERS", wrappers.names)))
    if plan.backward.once:
        printer.line(printer.call(run_once, "ctx"))
    arrived = [names[idx] for idx in plan.differentiable()]
    another = f"{printer.bind('ANOTHER_BACKWARD', backward)}(ctx, {', '.join(arrived)})"
    another = f"return (*{another}, None)" if symbols else f"return {another}"
    if plan.shares:
        printer.line(another)
        return
    _print_other_ways(printer, names, symbols, plan, another)
    given = ["*ctx.saved_tensors"] if plan.saved.frees else []
    given += [print_size(printer, size) for size in plan.backward_sizes]
    pairs = list(zip(arrived, plan.tangents, strict=True))
    given += [
        name if tangent.is_any_plain() else f"*{_tangent(printer, tangent)}({name})"
        for name, tangent in pairs
    ]
    given += [f"ctx.written[{position}]" for position in plan.backward_writes.read.values()]
    given += ["*ctx.rng"] if plan.inside.rng.draw is not None else []
    args = f"args = [{', '.join(given)}]"
    if not plan.other_kinds or all(tangent.is_any_plain() for _, tangent in pairs):
        printer.line(args)
    else:
        with printer.block("try:"):
            printer.line(args)
        with printer.block(f"except {printer.bind('TangentMismatch', TangentMismatch)}:"):
            printer.line(another)
    printer.line(f"del {', '.join(names)}")
    if plan.saved.frees:
        printer.line(printer.call(let_go, "ctx"))
    printer.line(f"results = {printer.bind('BACKWARD', backward.program.of_all())}(args)")
    _print_gradients(printer, plan, backward.after, changes, has_symbols=bool(symbols))


def _print_gradients(
    printer: Printer,
    plan: NodePlan,
    after: Callable[[], None] | None,
    changes: EffectLog,
    *,
    has_symbols: bool,
) -> None:
    """Print what is done with the results of the backward graph."""
    grads = [recipe for recipe in plan.backward.grads if recipe is not None]
    count = sum(1 for recipe in grads for _ in leaves(recipe))
    writes = plan.backward_writes
    for offset, bumps in enumerate(writes.bumps):
        printer.line(_write(printer, f"ctx.written[{offset}]", f"results[{count + offset}]", bumps))
    for offset, (_, count_of_writes) in enumerate(writes.wrappers):
        printer.line(printer.call(bump, f"ctx.bumped[{offset}]", count_of_writes))
    built = iter(
        print_results(printer, grads, [f"results[{k}]" for k in range(count)], ["grad"] * len(grads))
    )
    if after is not None:
        printer.line(f"{printer.bind('after_backward', after)}()")
    first = count + len(writes.plains)
    plains = (f"results[{k}]" for k in itertools.count(first))
    if changes:
        kept = print_results(printer, changes.kept, plains, ["kept"] * len(changes.kept))
        replay = f"{printer.bind('CHANGES', changes)}.replay(["
        what = remark(f"changes {', '.join(place.path for place in changes.places())}")
        printer.spread(replay, kept, f"], {'symbols' if has_symbols else '{}'}){what}")
    returned = ["None" if recipe is None else next(built) for recipe in plan.backward.grads]
    returned += ["None"] if has_symbols else []
    printer.spread("return (", returned, ",)")


def _print_other_ways(
    printer: Printer, names: Sequence[str], symbols: Sequence[str], plan: NodePlan, returned: str
) -> None:
    """Print `returned` for requests other than all results in one go, with tangents as the trace assumed."""
    pairs = list(zip((names[idx] for idx in plan.differentiable()), plan.tangents, strict=True))
    conditions = [printer.call(torch.is_grad_enabled)]
    conditions += [_differs(printer, name, tangent) for name, tangent in pairs]
    if plan.backward.waypoints:
        conditions.append(printer.call(is_watched, "ctx"))
    with printer.block(f"if {' or '.join(conditions)}:"):
        printer.line(returned)
    _print_symbols(printer, symbols, "ctx.symbols")
    as_assumed = [
        _lies_as_assumed(printer, name, tangent.recipe)
        for name, tangent in pairs
        if isinstance(tangent.recipe, Wrapper) and None in tangent.strides
    ]
    if as_assumed:
        with printer.block(f"if not ({' and '.join(as_assumed)}):"):
            printer.line(returned)


def _differs(printer: Printer, name: str, tangent: Tangent) -> str:
    """The condition that a tangent is missing, or no plain tensor where the graph takes one."""
    recipe = tangent.recipe
    if not isinstance(recipe, Plain) or not tangent.is_any_plain():
        return f"{name} is None"
    bits = ("is_neg", "_is_zerotensor", *(["is_conj"] if recipe.dtype.is_complex else []))
    is_lazy = [f"{name}.{bit}()" for bit in bits]
    return " or ".join([f"type({name}) is not {printer.bind('Tensor', torch.Tensor)}", *is_lazy])


def _lies_as_assumed(printer: Printer, name: str, recipe: Wrapper) -> str:
    """The condition that the tensors inside a tangent have the strides that the trace assumed."""
    strides = tuple(leaf.stride for _, leaf in leaves(recipe))
    plains = wrapper_rule(recipe.cls).unwrap_source(name, recipe)
    found = sequence([f"{plain}.stride()" for plain in plains])
    assumed = printer.concrete("STRIDES", strides) if is_symbolic(strides) else repr(strides)
    return f"type({name}) is {printer.bind(recipe.cls.__name__, recipe.cls)} and {found} == {assumed}"


def _print_symbols(printer: Printer, symbols: Sequence[str], place: str) -> None:
    """Print that each symbol is bound to a variable of its name, and all of them to `symbols`."""
    if not symbols:
        return
    if place != "symbols":
        printer.line(f"symbols = {place}")
    printer.line(f"{sequence(list(symbols))} = symbols.values()")


def _print_unbacked(printer: Printer, unbacked: Unbacked) -> None:
    """Print that numbers that depend on data are read from results, or computed from such numbers."""
    for name, one in unbacked.items():
        value = print_step(printer, one) if isinstance(one, NumberStep) else f"results[{one}].item()"
        printer.line(f"{name} = symbols[{name!r}] = {value}")


def _tangent(printer: Printer, tangent: Tangent) -> str:
    name = printer.bind(f"tangent_{tangent.path}", tangent)
    return printer.call(concrete, name, "symbols") if tangent.needs_sizes() else name
