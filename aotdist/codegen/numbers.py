"""Graphs that compute Python numbers (`aotdist.trace.numbers.scalars`), for compilers that only know tensors.

Numbers that follow from single elements on the CPU (step counts, a learning rate) are computed ahead of the
graph, in Python, exactly as in eager, and handed to the graph as one tensor. Numbers that follow from other
values of the graph become float64 tensors in it, and operators that take numbers are decomposed into ones
that take tensors.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch.fx import Node

from aotdist.codegen.contract import Emitted
from aotdist.codegen.decompose import inline
from aotdist.codegen.fx import PrintedGraph, print_graph
from aotdist.codegen.python_source import load_function
from aotdist.errors import UnsupportedProgram
from aotdist.partition.builder import GraphBuilder
from aotdist.partition.traits import is_random
from aotdist.program import Graph, Slot
from aotdist.subclasses.protocol import ADDED_ROWS
from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.symbols import SYMBOLIC, depends_on_data, expression, symbols_in

_ATEN = torch.ops.aten
_NUMBERS = Slot("primal", "numbers")


def split_off_numbers(
    graph: Graph, fake_mode: FakeTensorMode
) -> tuple[Graph, Callable[[Emitted], Emitted]] | None:
    """Cut a graph in two if it computes numbers: what is computed ahead, and the rest.

    Returns:
        the rest, which takes one more tensor of all numbers that it needs, if any, and returns None for the
        results that are ready before it runs; and a function from the rest, compiled, to the whole graph.

    Raises:
        UnsupportedProgram: an operator takes a number, and there is no rule for a tensor in its place.
    """
    nodes = [node for node in graph.gm.graph.nodes if node.op == "call_function"]
    if not any(map(_is_number, (*graph.placeholders(), *nodes))):
        return None
    early = {
        node for node in graph.placeholders() if _is_single(node) or isinstance(node.meta["val"], SYMBOLIC)
    }
    for node in nodes:
        if _is_early(node, early):
            early.add(node)
    gm = graph.copied().gm
    copies = dict(zip(graph.gm.graph.nodes, gm.graph.nodes, strict=True))
    everything = (*graph.placeholders(), *nodes)
    wanted = [n for n in everything if n in early and _is_number(n) and not early.issuperset(n.users)]
    ready = tuple(at for at, n in enumerate(graph.results()) if n in early and n not in graph.placeholders())
    placeholders = gm.graph.find_nodes(op="placeholder")
    values = [placeholder.meta["val"] for placeholder in placeholders]
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    devices = (tensor.device for tensor in tensors if not (tensor.is_cpu or tensor.is_meta))
    device = next(devices, torch.device("cpu"))
    ins, numbers = graph.ins, set[Node]()
    if wanted:
        with no_modes(), fake_mode:
            value = torch.empty(len(wanted), dtype=torch.float64, device=device)
        numbers = _take_numbers(gm.graph, placeholders[-1], [copies[node] for node in wanted], value)
        ins = (*ins, _NUMBERS)
    _without_results(gm.graph, ready)
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and (_is_number(node) or not numbers.isdisjoint(node.all_input_nodes)):
            numbers |= _take_tensors(gm.graph, node, numbers)
    gm.graph.eliminate_dead_code()
    printed = print_graph(_early(graph, early, ready, wanted))
    as_tensor = partial(torch.tensor, dtype=torch.float64, device=device)
    given: Callable[[Sequence[Any]], Any] = (lambda numbers: [as_tensor(numbers)]) if wanted else list
    return Graph(gm, ins, graph.outs), partial(_with_numbers, printed, ready, given)


def _with_numbers(
    early: PrintedGraph, ready: Sequence[int], given: Callable[[Sequence[Any]], Any], rest: Emitted
) -> Emitted:
    """The whole graph.

    Args:
        early: computes the results that are ready ahead, and the numbers that the rest needs.
        ready: positions of these results.
        given: as what the rest takes the numbers.
        rest: the rest, compiled.
    """
    compute, run = load_function(early.source, "forward", early.bound, "numbers"), rest.call

    def call(args: list[Any]) -> Sequence[Any]:
        values = compute(list(args))
        args.extend(given(values[len(ready) :]))
        results = list(run(args))
        for at, value in zip(ready, values, strict=False):
            results[at] = value
        return results

    return replace(rest, call=call, source=f"{early.source}\n\n{rest.source}")


def read_sizes_ahead(graph: Graph) -> tuple[Graph, Callable[[Emitted], Emitted]] | None:
    """Cut a graph in two if sizes of arguments are computed from numbers that it reads off tensors.

    An all-to-all receives as many rows as all ranks sent: its backward gets these, and reads how many each of
    them sent. Inductor (torch 2.13) takes all numbers in the sizes of arguments for arguments.

    Returns:
        the rest, which takes these numbers as arguments; and a function from the rest, compiled, to the
        whole graph.
    """
    values = [node.meta["val"] for node in graph.placeholders()]
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    sizes: list[Any] = [size for tensor in tensors for size in tensor.shape if depends_on_data(size)]
    taken = {expression(number) for number in (*sizes, *values) if isinstance(number, SYMBOLIC)}
    missing = sorted({name for size in sizes for name in symbols_in(size)} - taken)
    readers = {
        expression(node.meta["val"]): node
        for node in reversed(graph.gm.graph.nodes)
        if node.op == "call_function" and depends_on_data(node.meta["val"])
    }
    if not missing or not readers.keys() >= set(missing):
        return None
    read = [readers[name] for name in missing]
    printed = print_graph(_early(graph, graph.ancestors(read), (), read))
    gm = graph.copied().gm
    copies = dict(zip(graph.gm.graph.nodes, gm.graph.nodes, strict=True))
    last = copies[graph.placeholders()[-1]]
    for name, node in zip(missing, read, strict=True):
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(name)
        last.meta = {"val": node.meta["val"]}
        copies[node].replace_all_uses_with(last)
    gm.graph.eliminate_dead_code()
    ins = (*graph.ins, *(Slot("size", name) for name in missing))
    return Graph(gm, ins, graph.outs), partial(_with_numbers, printed, (), list)


def _without_results(graph: torch.fx.Graph, ready: Sequence[int]) -> None:
    """Let a graph return None for some results, and drop what is only needed for these."""
    output = graph.output_node()
    values: Any = output.args[0]
    output.args = (tuple(None if at in ready else value for at, value in enumerate(values)),)
    graph.eliminate_dead_code()


def _is_number(node: Node) -> bool:
    """Whether a node computes a number, or is a float among the arguments; compilers know sizes."""
    kinds = (int, float, bool, torch.SymFloat) if node.op == "call_function" else (torch.SymFloat,)
    return type(node.meta.get("val")) in kinds


def _is_single(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_cpu and value.dim() == 0


def _is_early(node: Node, early: set[Node]) -> bool:
    """Whether a node follows from numbers and single elements that are there before the graph runs."""
    if not early.issuperset(node.all_input_nodes) or not node.all_input_nodes:
        return False
    return not is_random(node) and (_is_number(node) or _is_single(node))


def _early(graph: Graph, early: set[Node], ready: Sequence[int], wanted: Sequence[Node]) -> Graph:
    """What is computed ahead of the graph, as one of its own."""
    builder = GraphBuilder(graph.gm)
    for node in graph.gm.graph.nodes:
        if node.op == "placeholder":
            builder.placeholder(node)
        elif node in early:
            builder.copy(node)
    old_results = graph.results()
    results = [builder.env[cast("Node", old_results[at])] for at in ready] + [builder.env[n] for n in wanted]
    outs = [graph.outs[at] for at in ready] + [Slot("output", f"numbers[{k}]") for k in range(len(wanted))]
    return builder.finish(results, graph.ins, outs)


def _take_numbers(
    graph: torch.fx.Graph, last: Node, wanted: Sequence[Node], value: torch.Tensor
) -> set[Node]:
    """Let numbers be elements of one more argument; returns these."""
    with graph.inserting_after(last):
        after = argument = graph.placeholder("numbers")
    argument.meta["val"] = value
    elements = set[Node]()
    for at, node in enumerate(wanted):
        with graph.inserting_after(after):
            after = graph.call_function(_ATEN.select.int, (argument, 0, at))
        after.meta = {**node.meta, "val": value[at]}
        node.replace_all_uses_with(after)
        elements.add(after)
    return elements


def _take_tensors(graph: torch.fx.Graph, node: Node, numbers: set[Node]) -> set[Node]:
    """Replace a node that makes or takes numbers by operators on tensors; returns the new numbers."""
    rule = _RULES.get(node.target)
    if rule is None:
        raise UnsupportedProgram(
            f"`{node.target}` takes a number that differs from call to call, and knows no tensor for it",
            where=node.meta.get("source"),
            stage="codegen",
            fix='use backend="fx"',
        )
    if _is_number(node):
        return {inline(graph, node, rule, {})}
    inline(graph, node, _like(rule, node.meta["val"]), {})
    return set()


def _like(rule: Callable[..., Any], value: Any) -> Callable[..., Any]:
    """`rule`, with results of the dtypes of `value`: a tensor without dimensions counts for its dtype."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = rule(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            return result.to(value.dtype)
        return [one.to(like.dtype) for one, like in zip(result, value, strict=True)]

    return call


def _add(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return x + y * alpha


def _sub(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return x - y * alpha


def _addcmul(x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    return x + a * b * value


def _addcdiv(x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    return x + a / b * value


def _lerp(x: Any, y: Any, weight: Any) -> Any:
    return x + (y - x) * weight


def _rsub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return y - x * alpha


def _clamp(x: torch.Tensor, low: Any = None, high: Any = None, **bounds: Any) -> torch.Tensor:
    low, high = bounds.get("min", low), bounds.get("max", high)
    x = x if low is None else torch.clamp_min(x, low)
    return x if high is None else torch.clamp_max(x, high)


def _masked_fill(x: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    return torch.where(mask, _tensor(value).to(x.dtype), x)


def _filled_like(x: torch.Tensor, value: Any, **_: Any) -> torch.Tensor:
    return _tensor(value).to(device=x.device).expand(x.size()).clone()


def _each(rule: Callable[..., Any]) -> Callable[..., Any]:
    """`rule` for each tensor of lists; a number, or a tensor instead of one, is the same for all."""

    def call(xs: Sequence[torch.Tensor], *others: Any, **kwargs: Any) -> list[Any]:
        rows = [other if isinstance(other, (list, tuple)) else [other] * len(xs) for other in others]
        return [rule(*row, **kwargs) for row in zip(xs, *rows, strict=True)]

    return call


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=torch.float64)


def _of_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: function(*map(_tensor, values))


def _reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: functools.reduce(function, map(_tensor, values))


def _read(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(()).to(torch.float64)


def _made(value: torch.Tensor, *, dtype: torch.dtype, device: torch.device | None = None, **_: Any) -> Any:
    return value.to(device=device, dtype=dtype)


def _filled(size: Sequence[int], value: torch.Tensor, **options: Any) -> torch.Tensor:
    return _made(value, **options).expand(size).clone()


_IN_LISTS: Mapping[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
    "lerp": _lerp,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
    "maximum": torch.clamp_min,  # which takes a number, too
    "minimum": torch.clamp_max,
}
_OF_NUMBERS: Mapping[str, Callable[..., Any]] = {
    "rsub": _rsub,
    "clamp": _clamp,
    "masked_fill": _masked_fill,
    "full_like": _filled_like,
    "fill": _filled_like,
    **{name: getattr(torch, name) for name in ("gt", "ge", "lt", "le", "eq", "ne", "remainder")},
}
_RULES: dict[Any, Callable[..., Any]] = {
    _ATEN._local_scalar_dense.default: _read,
    _ATEN.scalar_tensor.default: _made,
    _ATEN.full.default: _filled,
    builtins.max: _reduced(torch.maximum),
    builtins.min: _reduced(torch.minimum),
    math.pow: _of_tensors(torch.pow),
    **{
        getattr(math, name): _of_tensors(getattr(torch, name))
        for name in ("sqrt", "exp", "log", "cos", "sin", "tanh")
    },
    **{
        getattr(operator, name): _of_tensors(getattr(operator, name))
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs")
    },
    **{
        getattr(getattr(_ATEN, prefix + name), overload): _each(rule) if prefix else rule
        for name, rule in {**_IN_LISTS, **_OF_NUMBERS}.items()
        for prefix in (("", "_foreach_") if name in _IN_LISTS else ("",))
        for overload in getattr(_ATEN, prefix + name).overloads()
        if not overload.endswith("out")
    },
    **ADDED_ROWS,
}
"""Decompositions of operators and of functions of numbers, for tensors in the place of numbers."""
