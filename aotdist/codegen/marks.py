"""Marks in a trace of PyTorch's profiler: which graph runs, and which module an operator belongs to.

While nobody profiles, nothing is marked and no other code runs. The same wrapper names the user's lines when
a C++ kernel fails on a bad index.
"""

from __future__ import annotations

import functools
import itertools
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from aotdist.codegen.contract import Emitted
from aotdist.errors import IndexOutOfBounds
from aotdist.partition.traits import is_collective, is_wait
from aotdist.program import Graph
from aotdist.torch_seam.operators import OpOverload, argument_names
from aotdist.torch_seam.profiling import RecordFunctionFast, is_profiling

GRAPH_MARK = "aotdist graph "
"""Begins the mark around a graph that runs; its number and its name follow: `7: Llama forward`."""

MODULE_MARK = "aotdist module "
"""Begins the mark around the operators of a module; its path follows."""

_serial = itertools.count()
_communications: dict[int, tuple[Communication, ...]] = {}
"""Of the graphs that are there, by their number: what starts a collective or waits for one, in order."""


@dataclass(frozen=True, slots=True)
class Communication:
    """An operator of a graph that starts a collective or waits for one.

    Args:
        op: name of the operator, with its namespace: `_c10d_functional::wait_tensor`.
        collective: name of the collective: that of the operator that starts it.
        serves: the unit of FSDP, else the module, that it is for.
    """

    op: str
    collective: str
    serves: str


def communications_of(mark: str) -> tuple[Communication, ...]:
    """Those of the graph that a mark of a trace names; none of a graph that is gone."""
    serial = mark.removeprefix(GRAPH_MARK).partition(":")[0]
    return _communications.get(int(serial), ())


def with_marks(emitted: Emitted, graph: Graph, name: str) -> Emitted:
    """Wrap an emitted graph so that profilers see its name, modules and collectives.

    Args:
        emitted: the graph, compiled.
        graph: the graph.
        name: of the program and the graph: `Llama forward`.
    """
    communicating = graph.calls(lambda node: is_collective(node) or is_wait(node))
    serial, run = next(_serial), emitted.call
    mark, lines = f"{GRAPH_MARK}{serial}: {name}", lines_with_indices(graph)
    with_modules = functools.cache(emitted.with_modules or (lambda: run))

    def marked(args: list[Any]) -> Sequence[Any]:
        call = with_modules()
        with RecordFunctionFast(mark):
            return call(args)

    @functools.wraps(run)
    def call(args: list[Any]) -> Sequence[Any]:
        try:
            return marked(args) if is_profiling() else run(args)
        except RuntimeError as error:
            raise_if_bad_index(error, lines, name)
            raise

    _communications[serial] = tuple(map(_communication, communicating))
    weakref.finalize(call, _communications.pop, serial)
    return replace(emitted, call=call)


def module_mark(node: Node) -> str:
    """The mark of a node's module; empty outside of modules."""
    path = node.meta.get("module")
    if not path:
        return ""
    is_backward = node.meta.get("phase") == "backward" or "function" in node.meta
    return f"{MODULE_MARK}{path}{' (backward)' if is_backward else ''}"


def _communication(node: Node) -> Communication:
    start = node if is_collective(node) else _start_of(node)
    if start is None:
        return Communication(_name(node), "", "")
    collective = _name(start).partition("::")[2].removesuffix("_out")
    serves = start.meta.get("unit") or start.meta.get("module") or ""
    return Communication(_name(node), collective, serves)


def _name(node: Node) -> str:
    """The operator's name as traces have it: without the overload."""
    assert isinstance(node.target, OpOverload), f"{node.name} calls no operator"
    return node.target.name().partition(".")[0]


def _start_of(wait: Node) -> Node | None:
    """What starts the collective that a node waits for, also by parts; None if another graph does."""
    node = wait
    while not is_collective(node):
        if not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
    return node


# Names the user's lines where an index is out of bounds: a C++ kernel of Inductor's names its own variables.

_FAILED = re.compile(r"index out of bounds: .* < (\d*)")
_INDICES = frozenset({"index", "indices", "target"})
"""Names of the arguments by which PyTorch's operators pick elements."""


def lines_with_indices(graph: Graph) -> tuple[str, ...]:
    """The lines of the user's program whose operators pick elements by tensors."""

    def takes_indices(node: Node) -> bool:
        op = node.target
        return isinstance(op, OpOverload) and not _INDICES.isdisjoint(argument_names(op))

    lines = (node.meta.get("source") for node in graph.calls(takes_indices))
    return tuple(dict.fromkeys(line for line in lines if line))


def raise_if_bad_index(error: RuntimeError, lines: Sequence[str], name: str) -> None:
    """Raise an error with the user's lines, if a kernel failed for a bad index.

    Args:
        error: what running a graph raised.
        lines: those of the program that pick elements in this graph.
        name: of the graph.

    Raises:
        IndexOutOfBounds: an index is outside of its dimension.
    """
    match = None if isinstance(error, IndexOutOfBounds) else _FAILED.search(str(error))
    if match is None:
        return
    size = f" of {match[1]} elements" if match[1] else ""
    raise IndexOutOfBounds(
        f"an index, or a label, is out of bounds for a dimension{size} in `{name}`",
        where="\n     ".join(lines) or None,
        stage="runtime",
        fix='correct the data; with backend="fx" the message names the index, as in eager',
    ) from error
