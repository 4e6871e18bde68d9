"""From what a user names (`"fx"`, `"inductor"`, a function) to the `Backend` that it means."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from aotdist.codegen.contract import Backend, BoxedCall, Decompositions, Emission, Emitted, Kind
from aotdist.codegen.fx import FxBackend, print_graph
from aotdist.codegen.inductor import InductorBackend
from aotdist.codegen.inductor_rewrites import keep_for_backward
from aotdist.codegen.triton import TritonBackend
from aotdist.errors import BadSettings
from aotdist.program import Graph
from aotdist.torch_seam.inductor import tracing_context
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.trees import pytree

__all__ = ["Backend", "BoxedCall", "CallableBackend", "Compiler", "Emission", "Emitted", "Kind", "resolve"]

EAGER = "eager"
"""The name that asks for no backend: the program runs as it was written."""

Compiler: TypeAlias = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
"""`functorch.compile`'s shape of a compiler: graph module and fake arguments to a callable.

The result is boxed if it has a true attribute `_boxed_call`, else it takes one argument per placeholder.
"""

_NAMES = ("auto", "fx", "inductor", "triton")


def is_eager(backend: str | Compiler | Backend) -> bool:
    """Whether a user asks for nothing to be compiled."""
    return isinstance(backend, str) and backend == EAGER


def resolve(backend: str | Compiler | Backend) -> Backend:
    """The backend that a user means.

    Raises:
        BadSettings: the name is unknown, or means that nothing is compiled; or the value is neither a backend
            nor callable.
    """
    if isinstance(backend, str):
        return _named(backend)
    if isinstance(backend, Backend):
        return backend
    if callable(backend):
        return CallableBackend(backend)
    raise BadSettings(
        f"a backend cannot be a {type(backend).__name__}",
        fix=f"name one of {', '.join(_NAMES)}, or pass a function `(graph_module, arguments) -> callable`",
    )


def _named(name: str) -> Backend:
    match name:
        case "fx":
            return FxBackend()
        case "inductor":
            return InductorBackend()
        case "auto":
            return _best_available()
        case "triton":
            return TritonBackend()
        case "eager":
            raise BadSettings(
                'backend="eager" compiles nothing, and what is made here is compiled',
                fix=f"name one of {', '.join(_NAMES)}, or call the program as it is",
            )
        case _:
            near = difflib.get_close_matches(name, (*_NAMES, EAGER), n=1)
            raise BadSettings(
                f"there is no backend {name!r}",
                fix=f"did you mean {near[0]!r}?" if near else f"backends are {', '.join(_NAMES)}",
            )


def _best_available() -> Backend:
    inductor = InductorBackend(else_fx=True)
    try:
        inductor.check()
    except BadSettings:
        return FxBackend()
    return inductor


@dataclass(frozen=True, slots=True)
class CallableBackend(Backend):
    """Compilers that a user brings, in `functorch.compile`'s shape.

    Args:
        compiler: compiles forwards, and graphs of kinds without a compiler of their own.
        backward_compiler: compiles backwards.
        inference_compiler: compiles programs that are never differentiated.
        table: operators that the trace must break up.
        name: as reports show it; by default, that of `compiler`.
    """

    compiler: Compiler
    backward_compiler: Compiler | None = None
    inference_compiler: Compiler | None = None
    table: Decompositions = field(default_factory=dict[OpOverload, Callable[..., Any]])
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or _name_of(self.compiler))

    def decompositions(self) -> Decompositions:
        """The user's table."""
        return self.table

    def emit(self, graph: Graph, emission: Emission) -> Emitted:
        """Hand the user's compiler a copy of the graph, which it may change as it likes."""
        call, _ = self.compiled(graph.copied().gm, emission)
        return Emitted(call, print_graph(graph).source)

    def compiled(self, gm: GraphModule, emission: Emission) -> tuple[BoxedCall, Sequence[Any] | None]:
        """What the user's compiler makes of a graph, and the strides of its results if it reports them."""
        _hand_over(gm)
        examples = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
        results: Any = gm.graph.output_node().args[0]
        compiler, num_results = self._compiler_of(emission.kind), len(results)
        with tracing_context(emission.fake_mode) as context:
            compiled = compiler(gm, examples)
        what = f"the {emission.kind} graph of `{emission.name}`"
        return _boxed(compiled, compiler, what, num_results), context.output_strides or None

    def _compiler_of(self, kind: Kind) -> Compiler:
        match kind:
            case "forward":
                return self.compiler
            case "backward":
                return self.backward_compiler or self.compiler
            case "inference":
                return self.inference_compiler or self.compiler


def _hand_over(gm: GraphModule) -> None:
    """Prepare a graph for a user's compiler, in place.

    It then runs without grad mode, also on arguments that require grad, and says where its nodes come from.
    """
    _write_stack_traces(gm)
    keep_for_backward(gm)
    _detach_written_arguments(gm)
    name_generators(gm)


_LINE = re.compile(r"(.+):(\d+)   (.*)")


def _write_stack_traces(gm: GraphModule) -> None:
    """Give nodes with a `source` the `stack_trace` that PyTorch's tools read: one frame, the user's line."""
    for node in gm.graph.nodes:
        if found := _LINE.fullmatch(node.meta.get("source") or ""):
            file, number, code = found.groups()
            where = node.meta.get("module") or "<function>"
            node.meta["stack_trace"] = f'  File "{file}", line {number}, in {where}\n    {code}\n'


def name_generators(gm: GraphModule) -> None:
    """Make each generator that operators draw from an attribute of the module, in place: it has no text."""
    names: dict[int, str] = {}

    def named(node: Node, value: object) -> object:
        if not isinstance(value, torch.Generator):
            return value
        name = names.setdefault(id(value), f"_generator_{len(names)}")
        setattr(gm, name, value)
        with gm.graph.inserting_before(node):
            return gm.graph.create_node("get_attr", name)

    for node in list(gm.graph.nodes):
        if any(isinstance(leaf, torch.Generator) for leaf in pytree.tree_leaves((node.args, node.kwargs))):
            node.kwargs = {key: named(node, value) for key, value in node.kwargs.items()}
            node.args = tuple(named(node, value) for value in node.args)


def _detach_written_arguments(gm: GraphModule) -> None:
    """Detach the graph's arguments before `as_strided_scatter` takes them, in place.

    It refuses a tensor that requires grad if that has gaps or is transposed (torch 2.13), also where nothing
    is recorded.
    """
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided_scatter.default):
        written = node.args[0]
        if isinstance(written, Node) and written.op == "placeholder":
            with gm.graph.inserting_before(node):
                detached = gm.graph.call_function(torch.ops.aten.detach.default, (written,))
            detached.meta = dict(written.meta)
            node.replace_input_with(written, detached)


def _boxed(compiled: Callable[..., Any], compiler: Compiler, graph: str, num_results: int) -> BoxedCall:
    """What a user's compiler returned as a boxed call; an unboxed one keeps its arguments while it runs.

    Args:
        compiled: the callable. It returns a tuple or a list; a tensor is one result, as in PyTorch.
        compiler: returned it.
        graph: what it was compiled from, in words.
        num_results: how many results the graph has.

    Raises:
        BadSettings: it cannot be called; or, when it is called: it returns more or fewer results.
    """
    if not callable(compiled):
        raise BadSettings(
            f"the backend `{_name_of(compiler)}` returned a {type(compiled).__name__}",
            stage="codegen",
            fix="return a callable that takes what the graph takes: the graph module is one",
        )
    takes_a_list = getattr(compiled, "_boxed_call", False)

    def call(args: list[Any]) -> Sequence[Any]:
        if takes_a_list:
            results = compiled(args)
        else:
            taken = tuple(args)
            args.clear()
            results = compiled(*taken)
        flat = (results,) if isinstance(results, torch.Tensor) else results
        if not isinstance(flat, tuple | list) or len(flat) != num_results:
            raise _wrong_results(compiler, graph, num_results, results)
        return flat

    return call


def _wrong_results(compiler: Compiler, graph: str, expected: int, results: Any) -> BadSettings:
    is_many = isinstance(results, tuple | list)
    got = f"a {type(results).__name__} of {len(results)}" if is_many else f"a {type(results).__name__}"
    return BadSettings(
        f"what the backend `{_name_of(compiler)}` made of {graph} returned {got}, and the graph has "
        f"{expected} result{'s' * (expected != 1)}",
        stage="runtime",
        fix="return a tuple of the graph's results, all of them and in its order, as the graph module does",
    )


def _name_of(compiler: Any) -> str:
    """A function of the user's, or the class of an object, with its module: never the name of one of ours."""
    while isinstance(compiler, functools.partial):
        compiler = compiler.func
    named = compiler if hasattr(compiler, "__qualname__") else type(compiler)
    return f"{named.__module__}.{named.__qualname__.rpartition('<locals>.')[2]}"
