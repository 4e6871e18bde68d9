"""Data guards: conditions on data that a program branches on, evaluated at capture and at each call.

A tensor that follows from no argument, no random number and no collective (`torch.arange(n)`, for example) is
the same at every call. A program may read it and branch on it: the nodes that lead to it are run at capture.
Libraries do so with masks and positions that they make themselves.

A value that follows from data which exists before a call may differ from call to call. The capture evaluates
a condition on it, and the program is for calls with the same answer: each call evaluates the condition before
it runs (`DataGuard`), and the program is compiled again for another answer. Two kinds of programs may do so.
One is an optimizer of a whole step (`aotdist.trace.numbers.scalars`). The other is code of PyTorch's modules
or of an installed package, about arguments, buffers and closed-over tensors that no gradient is taken of, and
symbolic sizes: `nn.TransformerEncoder` tests whether its mask is the causal one, models of transformers
whether theirs masks anything, quantizers whether their codebook has been initialised. Conditions in the
user's own code are refused: it is better to decide them on the device, each time.

Whole numbers that an installed package reads off such data, and sizes that it gets by a mask, are symbols
at first. If the program needs the value of one (`range(count)`, `if chosen.shape[0] > 1`), it is traced
again, and all are those of the call, to which each call compares its own: grids of images, for example.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence
from types import BuiltinFunctionType, MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from aotdist.facts import DataGuard
from aotdist.program import PrimalIdx
from aotdist.sizes import Expression
from aotdist.torch_seam.ambient import autocast_off
from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.operators import is_operator

_MADE_BY = ("aten", "prims")
"""Namespaces whose operators compute from their arguments alone, but for those that draw random numbers."""
_MOST_STEPS = 48
"""Operators that a condition may take: they run at every call, before the program does.

Labels shifted to the right, and whether these have padding, take 18; whether there is padding in what seven
convolutions make of a padded batch of sound (wav2vec2) takes 34.
"""


WHOLE: Mapping[torch.dtype, type[int]] = {
    torch.bool: bool,
    **dict.fromkeys((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), int),
}
"""The types of the whole numbers that Python reads off tensors."""


class NotKnown(Exception):
    """The value depends on something that only exists at a call."""


def result_of(
    target: Callable[..., Any],
    args: Any,
    kwargs: Any,
    root: torch.nn.Module,
    given: Mapping[Node, torch.Tensor | float] = MappingProxyType({}),
) -> Any:
    """What `target` returns, computed with real tensors.

    Args:
        target: an operator, or a function of numbers.
        args: its positional arguments, with nodes in the place of tensors.
        kwargs: its named ones.
        root: the module that holds the graph's literal tensors.
        given: nodes whose values are known beforehand.

    Raises:
        NotKnown: a node leads to an argument, to a random number, or out of the process.
    """
    values: dict[Node, Any] = dict(given)
    with no_modes(), autocast_off(), torch.no_grad():
        for node in leading_to((args, kwargs), given):
            values[node] = _value(node, values, root)
        real_args, real_kwargs = map_arg((args, kwargs), values.__getitem__)
        return target(*real_args, **real_kwargs)


def as_function(asked: Any, given: Sequence[Node], root: torch.nn.Module) -> GraphModule:
    """A graph module that computes some nodes from others.

    Args:
        asked: the nodes to return, in any structure; apart from `given`, they follow from what is known.
        given: the nodes that become arguments.
        root: holds the constants of the graph.
    """
    graph, copies = Graph(), dict[Node, Node]()
    for at, node in enumerate(given):
        copies[node] = graph.placeholder(f"given_{at}")
    for node in leading_to(asked, given):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(map_arg(asked, copies.__getitem__))
    return GraphModule(root, graph)


def leading_to(last: Any, given: Container[Node]) -> list[Node]:
    """The nodes in `last` and all that they are computed from, in graph order, up to `given` nodes.

    Raises:
        NotKnown: a node leads to an argument, to a random number, or out of the process.
    """
    found: set[Node] = set()
    waiting: list[Node] = []
    map_arg(last, waiting.append)
    while waiting:
        node = waiting.pop()
        if node not in found and node not in given:
            _require_known(node)
            found.add(node)
            waiting += node.all_input_nodes
    return sorted(found)


def _require_known(node: Node) -> None:
    if node.op != "get_attr" and not (node.op == "call_function" and _follows_from_arguments(node.target)):
        raise NotKnown(node)


def _follows_from_arguments(target: Any) -> bool:
    if isinstance(target, BuiltinFunctionType):  # `operator.getitem`, or arithmetic of numbers
        return True
    is_computed = is_operator(target) and target.namespace in _MADE_BY
    return is_computed and torch.Tag.nondeterministic_seeded not in target.tags


def _value(node: Node, values: dict[Node, Any], root: torch.nn.Module) -> Any:
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(root)
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    assert callable(node.target), "an operator"
    return node.target(*args, **kwargs)


def positions(index: Any) -> Sequence[Any]:
    """What selects as an index does, without a mask."""
    is_mask = isinstance(index, torch.Tensor) and index.dtype is torch.bool
    return torch.ops.aten.nonzero.default(index).unbind(1) if is_mask else (index,)


def form_of(result: Any) -> Any:
    """Size, stride, dtype and device of a tensor, or of each in a list."""
    if isinstance(result, torch.Tensor):
        return result.shape, result.stride(), result.dtype, result.device
    return [form_of(one) for one in result]


def made_like(form: Any) -> Any:
    """A new tensor of a form, or a tuple of them."""
    if isinstance(form, list):
        return tuple(map(made_like, form))  # pyright: ignore[reportUnknownArgumentType]
    size, stride, dtype, device = form
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


class NeedsSizes(Exception):
    """Sizes cannot be symbols here: the program is traced again, with numbers."""


class DataGuards:
    """The conditions that a program has branched on.

    Attributes:
        takes_numbers: whether whole numbers that a library reads, and sizes that it gets by masks, are
            answered, too; else they are symbols.
        given: the conditions with their answers, in order.
    """

    def __init__(self) -> None:
        self.takes_numbers = False
        self.given: list[DataGuard] = []
        self._inputs: dict[Node, tuple[PrimalIdx, int]] = {}
        self._sizes: dict[Node, Expression] = {}
        self._reals: dict[Node, torch.Tensor | float] = {}

    def note_data(self, node: Node, at: PrimalIdx, leaf: int, real: torch.Tensor) -> None:
        """Note that the data of a plain tensor of an input exists before a call.

        Args:
            node: stands for the plain tensor.
            at: the input.
            leaf: which of its plain tensors.
            real: the plain tensor.
        """
        self._inputs[node], self._reals[node] = (at, leaf), real

    def note_size(self, node: Node, spelled: Expression, number: float) -> None:
        """Note that a symbolic number is known before a call.

        Args:
            node: stands for it.
            spelled: what it is in terms of symbols.
            number: what it is in the call that is traced.
        """
        self._sizes[node], self._reals[node] = spelled, number

    def answer(self, condition: Node, root: torch.nn.Module, read: Callable[[Any], Any] = bool) -> Any:
        """Whether a condition holds, or what else is read off it; every call compares that with its own.

        Args:
            condition: a tensor of one boolean, or what has the numbers.
            root: holds the constants of the graph.
            read: reads the answer off its value.

        Raises:
            NotKnown: it depends on something that is not there before a call, or takes too many operators.
        """
        steps = leading_to(condition, self._reals)
        if len(steps) > _MOST_STEPS:
            raise NotKnown(condition)
        holds = result_of(read, (condition,), {}, root, self._reals)
        needed = {condition}.union(*(step.all_input_nodes for step in steps))
        used = [node for node in self._inputs if node in needed]
        sizes = [node for node in self._sizes if node in needed]
        ask = as_function((condition,), [*used, *sizes], root)
        of, numbers = (self._inputs[node] for node in used), (self._sizes[node] for node in sizes)
        if used or sizes:
            self.given.append(DataGuard(ask, (holds,), tuple(of), tuple(numbers), read))
        return holds

    def forget(self) -> None:
        """Drop the caller's tensors: the program has returned, and no more conditions are evaluated."""
        self._inputs.clear()
        self._sizes.clear()
        self._reals.clear()
