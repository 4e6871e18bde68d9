"""Whether tensors lie as the trace said, which nobody can promise of what a library returns.

A kernel finds elements by the strides of the trace. Those of a library's results are what its operators'
fakes say, and a device may lay results out otherwise. `CheckedLaunch` looks before a kernel runs. What lies
otherwise is copied to where the kernel looks for it, and what the kernel computes gets the strides that its
operators would have given it. `with_real_strides` gives the graph as it should have been traced.
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
    """A tensor that a kernel read and that lay otherwise.

    Args:
        node: which, in the graph with kernels.
        sizes: its sizes.
        traced: its strides as the trace has them.
        real: as they were.
    """

    node: Node
    sizes: Strides
    traced: Strides
    real: Strides

    def line(self) -> str | None:
        """What to tell a reader; None if it follows from another: a kernel computed it."""
        maker = _maker(self.node)
        if isinstance(maker.target, Launch | SizedLaunch):
            return None
        return f"{_called(maker)}: strides {self.real}, traced as {self.traced}"


_found: ContextVar[dict[str, Difference]] = ContextVar("found")
"""What differs in the call that is being checked, by the name of the node."""


_fakes = process_lock()
"""Fake tensors of one trace are for one thread at a time; no other lock is taken within."""


def checked(call: Callable[[list[Any]], T], args: list[Any]) -> tuple[T, dict[str, Difference]]:
    """What a call with launches that look returns, and what lay otherwise."""
    found: dict[str, Difference] = {}
    token = _found.set(found)
    try:
        return call(args), found
    finally:
        _found.reset(token)


def with_checks(bound: Mapping[str, Any], graph: Graph, of: Callable[[], Graph]) -> dict[str, Any]:
    """Names of a text that runs a graph, with launches that look; and views that copy where they must.

    Args:
        bound: what the names stand for.
        graph: with kernels.
        of: see `CheckedLaunch`.
    """
    looking: dict[int, Any] = {id(node.target): CheckedLaunch(node, of) for node in launching(graph)}
    looking[id(native_callable(_VIEW))] = native_callable(_RESHAPE)
    return {name: looking.get(id(value), value) for name, value in bound.items()}


def launching(graph: Graph) -> list[Node]:
    """The nodes that launch kernels."""
    return [node for node in graph.gm.graph.nodes if isinstance(node.target, Launch | SizedLaunch)]


class CheckedLaunch:
    """A launch that looks where its inputs lie.

    Args:
        call: the node that launches the kernel.
        of: makes the graph in which its nodes still stand.
    """

    def __init__(self, call: Node, of: Callable[[], Graph]) -> None:
        self._launch = cast("Launch | SizedLaunch", call.target)
        self._names = self._launch.names if isinstance(self._launch, SizedLaunch) else ()
        given = cast("Sequence[Node]", call.args)
        self._inputs = given[: len(given) - len(self._names)]
        is_one = isinstance(call.meta.get("val"), torch.Tensor)
        self._outputs = [call] if is_one else sorted(call.users, key=lambda pick: cast("int", pick.args[1]))
        self._of = of
        self._strides: dict[Any, Sequence[Strides | None]] = {}

    def __call__(self, *given: Any) -> Any:
        """Launch the kernel on what it reads."""
        tensors, numbers = given[: len(self._inputs)], given[len(self._inputs) :]
        values = dict(zip(self._names, numbers, strict=True))
        pairs = zip(self._inputs, tensors, strict=True)
        placed = [_placed(node, tensor, values) for node, tensor in pairs]
        returned = self._launch(*placed, *numbers)
        if all(map(operator.is_, placed, tensors)):
            return returned
        results = returned if isinstance(returned, tuple) else (returned,)
        given_of = {id(copy): tensor for copy, tensor in zip(placed, tensors, strict=True)}
        strides = self._result_strides(tensors, values)
        laid = [_laid(result, given_of, to) for result, to in zip(results, strides, strict=True)]
        return laid[0] if len(laid) == 1 else tuple(laid)

    def _result_strides(self, tensors: Sequence[torch.Tensor], values: Values) -> Sequence[Strides | None]:
        """Those that the operators would give the results; None where the kernel's own will do."""
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
                vals = _followed(graph, known, graph.ancestors(filter(None, outputs), stop=known))
            self._strides[key] = [_strides_at(vals[one], values) if one in vals else None for one in outputs]
        return self._strides[key]


def with_real_strides(graph: Graph, found: Iterable[Difference]) -> Graph:
    """A graph whose `val`s have the strides that were found; views that these do not allow are reshapes.

    Args:
        graph: which; it is changed.
        found: what differed in a call.
    """
    by_name = {one.node.name: one for one in found}
    nodes = graph.gm.graph.nodes
    differ = {node: by_name[node.name] for node in nodes if node.name in by_name}
    with _fakes:
        known = {node: _restrided(val_of(node), one.sizes, one.real) for node, one in differ.items()}
        vals = _followed(graph, known, set(nodes))
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
    _found.get()[node.name] = Difference(node, tuple(tensor.shape), traced, tensor.stride())
    return copied(tensor, traced)


def _laid(
    result: torch.Tensor, given_of: Mapping[int, torch.Tensor], strides: Strides | None
) -> torch.Tensor:
    """A result in the strides that it should have; or in the memory of the input that it is stored over."""
    if id(result) in given_of:
        given = given_of[id(result)]
        return given if given is result else given.copy_(result)
    return result if strides in (None, result.stride()) else copied(result, strides)


def _restrided(val: Any, sizes: Sequence[int], strides: Strides) -> Any:
    """A fake tensor with strides that were found; for all calls, if there are no gaps."""
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


def _followed(graph: Graph, known: Mapping[Node, Any], nodes: Collection[Node]) -> dict[Node, Any]:
    """`known`, and what views and kernels make of it; what libraries do is never known before they have.

    Args:
        graph: which.
        known: fake tensors in the place of `val`s.
        nodes: which to look at.
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
    """Sizes or strides in a call; None where a kernel is not told, and so need not know."""
    whole = [*map(natural, numbers)]
    return tuple(number_at(one, values) if names_in([one]) <= values.keys() else None for one in whole)


def _maker(node: Node) -> Node:
    """What a node is a view of, or picked from."""
    while node.target is operator.getitem or getattr(node.target, "is_view", False):
        node = node.all_input_nodes[0]
    return node


def _called(node: Node) -> str:
    """A node's operator and where it was asked for."""
    what = f"`{node.name}`" if node.op == "placeholder" else str(node.target).removesuffix(".default")
    where = [str(node.meta[key]) for key in ("module", "source") if node.meta.get(key)]
    return f"{what} ({'   '.join(where)})" if where else what
