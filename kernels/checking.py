"""Checks that tensors have the strides of the trace, which a library's results need not have.

A kernel finds elements by the strides of the trace. Those of a library's results come from its operators'
fake kernels, and a device may choose others. `CheckedLaunch` compares them before a kernel runs. A tensor
with other strides is copied to the traced ones, and the kernel's results get the strides that its operators
would have given them. `with_real_strides` gives the graph as it should have been traced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from aotdist.errors import UnsupportedProgram
from aotdist.kernels.launching import Launch
from aotdist.kernels.polynomial import Values, names_in, number_at
from aotdist.kernels.rule import val_of
from aotdist.kernels.rules import rule_of
from aotdist.kernels.running import copied
from aotdist.kernels.sized import SizedLaunch
from aotdist.kernels.symbols import natural
from aotdist.program import Graph
from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.operators import native_callable
from aotdist.torch_seam.patches import process_lock

Strides: TypeAlias = tuple[int, ...]
T = TypeVar("T")

_VIEW = torch.ops.aten.view.default
_RESHAPE = torch.ops.aten.reshape.default


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that a kernel reads, and whose strides are not those of the trace.

    Args:
        node: of the tensor, in the graph with kernels.
        sizes: its sizes.
        traced: its strides in the trace.
        real: its strides in the call.
    """

    node: Node
    sizes: Strides
    traced: Strides
    real: Strides

    def line(self) -> str | None:
        """A line for a report; None for a kernel's result, which another difference causes."""
        maker = _maker(self.node)
        if isinstance(maker.target, Launch | SizedLaunch):
            return None
        return f"{_called(maker)}: strides {self.real}, traced as {self.traced}"


_differences: ContextVar[dict[str, Difference]] = ContextVar("differences")
"""Of the call that is being checked, by the name of the node."""


_fakes = process_lock()
"""Fake tensors of one trace are used by one thread at a time; no other lock is taken inside of this one."""


def checked(call: Callable[[list[Any]], T], args: list[Any]) -> tuple[T, dict[str, Difference]]:
    """The results of a call, and the stride differences that its checked launches found."""
    differences: dict[str, Difference] = {}
    token = _differences.set(differences)
    try:
        return call(args), differences
    finally:
        _differences.reset(token)


def with_checks(bound: Mapping[str, Any], graph: Graph, of: Callable[[], Graph]) -> dict[str, Any]:
    """The bindings of a graph's source, with checked launches, and reshapes instead of views.

    Args:
        bound: the objects that names of the text are bound to.
        graph: with kernels.
        of: see `CheckedLaunch`.
    """
    checking: dict[int, Any] = {id(node.target): CheckedLaunch(node, of) for node in launching(graph)}
    checking[id(native_callable(_VIEW))] = native_callable(_RESHAPE)
    return {name: checking.get(id(value), value) for name, value in bound.items()}


def launching(graph: Graph) -> list[Node]:
    """The nodes that launch kernels."""
    return [node for node in graph.gm.graph.nodes if isinstance(node.target, Launch | SizedLaunch)]


class CheckedLaunch:
    """A launch that compares the strides of its inputs with those of the trace.

    Args:
        call: the node that launches the kernel.
        of: makes the graph with the kernel's nodes in the place of the launch.
    """

    def __init__(self, call: Node, of: Callable[[], Graph]) -> None:
        self._launch = cast("Launch | SizedLaunch", call.target)
        self._names = self._launch.names if isinstance(self._launch, SizedLaunch) else ()
        args = cast("Sequence[Node]", call.args)
        self._inputs = args[: len(args) - len(self._names)]
        is_one = isinstance(call.meta.get("val"), torch.Tensor)
        self._outputs = [call] if is_one else sorted(call.users, key=lambda pick: cast("int", pick.args[1]))
        self._of = of
        self._strides: dict[Any, Sequence[Strides | None]] = {}

    def __call__(self, *args: Any) -> Any:
        """Launch the kernel on its inputs, in the traced strides."""
        tensors, numbers = args[: len(self._inputs)], args[len(self._inputs) :]
        values = dict(zip(self._names, numbers, strict=True))
        pairs = zip(self._inputs, tensors, strict=True)
        placed = [_placed(node, tensor, values) for node, tensor in pairs]
        returned = self._launch(*placed, *numbers)
        if all(map(operator.is_, placed, tensors)):
            return returned
        results = returned if isinstance(returned, tuple) else (returned,)
        original = {id(copy): tensor for copy, tensor in zip(placed, tensors, strict=True)}
        strides = self._result_strides(tensors, values)
        moved = [_moved(result, original, to) for result, to in zip(results, strides, strict=True)]
        return moved[0] if len(moved) == 1 else tuple(moved)

    def _result_strides(self, tensors: Sequence[torch.Tensor], values: Values) -> Sequence[Strides | None]:
        """The strides that eager's operators would give the results; None where the kernel chooses them."""
        key = (*(tensor.stride() for tensor in tensors), *values.values())
        if key not in self._strides:
            graph = self._of()
            by_name = {node.name: node for node in graph.gm.graph.nodes}  # less the halves of sums
            outputs = [by_name.get(node.name) for node in self._outputs]
            with _fakes:
                known = {
                    by_name[node.name]: _restrided(val_of(node), tensor.shape, tensor.stride())
                    for node, tensor in zip(self._inputs, tensors, strict=True)
                    if node.name in by_name
                }
                vals = _propagated(graph, known, graph.ancestors(filter(None, outputs), stop=known))
            self._strides[key] = [_strides_at(vals[one], values) if one in vals else None for one in outputs]
        return self._strides[key]


def with_real_strides(graph: Graph, differences: Iterable[Difference]) -> Graph:
    """Give the `val`s of a graph their real strides, in place; views become reshapes.

    Args:
        graph: a private copy.
        differences: of a call.
    """
    by_name = {one.node.name: one for one in differences}
    nodes = graph.gm.graph.nodes
    differ = {node: by_name[node.name] for node in nodes if node.name in by_name}
    with _fakes:
        known = {node: _restrided(val_of(node), one.sizes, one.real) for node, one in differ.items()}
        vals = _propagated(graph, known, set(nodes))
    for node, val in vals.items():
        node.meta["val"] = val
        if node.target is _VIEW:
            node.target = _RESHAPE
    return graph


def _placed(node: Node, tensor: torch.Tensor, values: Values) -> torch.Tensor:
    """`tensor`, or a copy of it with the strides that its node has, in a call."""
    val = val_of(node)
    sizes = _numbers_at(val.shape, values)
    is_alike = all(size in (None, real) for size, real in zip(sizes, tensor.shape, strict=False))
    if tensor.dtype is not val.dtype or tensor.dim() != val.dim() or not is_alike:
        raise UnsupportedProgram(
            f"{_called(_maker(node))} returns {tensor.dtype} {tuple(tensor.shape)}, and its fake kernel says "
            f"{val.dtype} {tuple(val.shape)}",
            stage="codegen",
            fix="correct its fake kernel (`torch.library.register_fake`)",
        )
    dims = zip(tensor.shape, tensor.stride(), _numbers_at(val.stride(), values), strict=True)
    traced = tuple(real if size < 2 or stride is None else stride for size, real, stride in dims)
    if traced == tensor.stride():
        return tensor
    _differences.get()[node.name] = Difference(node, tuple(tensor.shape), traced, tensor.stride())
    return copied(tensor, traced)


def _moved(
    result: torch.Tensor, original: Mapping[int, torch.Tensor], strides: Strides | None
) -> torch.Tensor:
    """A result in the strides that it should have, or in the memory of the input that it overwrites."""
    if id(result) in original:
        overwritten = original[id(result)]
        return overwritten if overwritten is result else overwritten.copy_(result)
    return result if strides in (None, result.stride()) else copied(result, strides)


def _restrided(val: Any, sizes: Sequence[int], strides: Strides) -> Any:
    """A fake tensor with real strides; dense strides become expressions of its symbolic sizes."""
    order = sorted(range(len(sizes)), key=lambda dim: (strides[dim], sizes[dim]))
    dense = _dense(sizes, order)
    if all(size < 2 or one == other for size, one, other in zip(sizes, dense, strides, strict=True)):
        strides = _dense(val.shape, order)
    with no_modes(), val.fake_mode:
        return torch.empty_strided(val.shape, strides, dtype=val.dtype, device=val.device)


def _dense(sizes: Sequence[int], order: Sequence[int]) -> Strides:
    """Strides without gaps; the first of `order` are neighbours."""
    strides, step = [0] * len(sizes), 1
    for dim in order:
        strides[dim], step = step, step * sizes[dim]
    return tuple(strides)


def _propagated(graph: Graph, known: Mapping[Node, Any], nodes: Collection[Node]) -> dict[Node, Any]:
    """`known`, and the nodes that views and kernels compute from it, whose strides follow.

    Args:
        graph: whose nodes these are.
        known: fake tensors in the place of `val`s.
        nodes: those to compute.
    """
    vals = dict(known)
    for node in graph.gm.graph.nodes:
        if node not in nodes or node in known or vals.keys().isdisjoint(node.all_input_nodes):
            continue
        if rule_of(node) is not None or any(
            user.target is operator.getitem and rule_of(user) is not None for user in node.users
        ):
            args, kwargs = map_arg((node.args, node.kwargs), lambda one: vals.get(one, one.meta.get("val")))
            target: Any = _RESHAPE if node.target is _VIEW else node.target
            mode = next(iter(known.values())).fake_mode
            with no_modes(), mode:
                vals[node] = target(*args, **kwargs)
    return vals


def _strides_at(val: torch.Tensor, values: Values) -> Strides | None:
    strides = _numbers_at(val.stride(), values)
    return None if None in strides else cast("Strides", strides)


def _numbers_at(numbers: Sequence[int | torch.SymInt], values: Values) -> tuple[int | None, ...]:
    """Sizes or strides in a call; None for one with symbols that the kernel does not take."""
    whole = [*map(natural, numbers)]
    return tuple(number_at(one, values) if names_in([one]) <= values.keys() else None for one in whole)


def _maker(node: Node) -> Node:
    """The node that a node is a view of, or an item of."""
    while node.target is operator.getitem or getattr(node.target, "is_view", False):
        node = node.all_input_nodes[0]
    return node


def _called(node: Node) -> str:
    """A node's operator and where it was asked for."""
    what = f"`{node.name}`" if node.op == "placeholder" else str(node.target).removesuffix(".default")
    where = [str(node.meta[key]) for key in ("module", "source") if node.meta.get(key)]
    return f"{what} ({'   '.join(where)})" if where else what
