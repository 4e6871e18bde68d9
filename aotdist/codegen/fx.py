"""The reference emitter: a graph printed as one straight-line Python function.

The operators that run are those that were traced, in the same order, but for a few that give the same bits
(`rewrites.py`), so results are equal to eager bit for bit. Printing is linear in the
number of nodes.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch.fx import Node

from aotdist.codegen.contract import Backend, BoxedCall, CompiledRegion, Emission, Emitted, Kind
from aotdist.codegen.in_place import in_place
from aotdist.codegen.layers import Statement, by_layers, lines_of
from aotdist.codegen.marks import module_mark
from aotdist.codegen.python_source import Bindings, load_function, tensor_text
from aotdist.codegen.rewrites import reshapes, takes_any_strides
from aotdist.errors import InternalError, UnsupportedProgram
from aotdist.program import Graph, Slot
from aotdist.torch_seam.functions import function_of, num_function_modes
from aotdist.torch_seam.nodes import inputs_of
from aotdist.torch_seam.operators import OpOverload, inference_rnn, native_callable, training_rnn
from aotdist.torch_seam.profiling import RecordFunctionFast

_NO_TARGETS: Mapping[Node, OpOverload] = {}


def warn_of_fx(failure: UnsupportedProgram) -> None:
    """Say that `fx` emits what another backend does not compile."""
    warnings.warn(f"aotdist: {failure.what}; it runs operator by operator, by `fx`", stacklevel=3)


@dataclass(frozen=True, slots=True)
class FxBackend(Backend):
    """Runs a graph operator by operator, with eager's bits."""

    name: str = "fx"
    partition: Literal["default", "min_cut"] = "default"
    any_tangents: bool = True

    def emit(self, graph: Graph, emission: Emission) -> Emitted:
        """Print the graph and load what was printed."""
        label, (runs, targets) = f"{emission.name} {emission.kind}", _rewritten(graph, emission.kind)
        printed = print_graph(runs, targets)
        call = load_graph(printed, runs, label, targets)

        def with_modules() -> BoxedCall:
            # The caller's graph is alive anyway; the rewritten one would be a second.
            runs, targets = _rewritten(graph, emission.kind)
            return marked_call(runs, label, targets)

        return Emitted(call, printed.source, with_modules=with_modules, graphs=(graph,))


def _rewritten(graph: Graph, kind: Kind) -> tuple[Graph, Mapping[Node, OpOverload]]:
    """The graph that runs, and what its nodes call in place of their own operators."""
    if kind == "backward" and takes_any_strides(graph):
        return graph, reshapes(graph)
    return in_place(graph) if kind == "inference" else graph, {}


@dataclass(frozen=True, slots=True)
class PrintedGraph:
    """A graph as text.

    Args:
        source: defines `forward(args)`, which takes one list and empties it.
        bound: the objects that the text names: operators, constants, dtypes.
    """

    source: str
    bound: Mapping[str, Any]


def load_graph(
    printed: PrintedGraph, graph: Graph, label: str, targets: Mapping[Node, OpOverload] = _NO_TARGETS
) -> BoxedCall:
    """Load a printed graph, with PyTorch's own functions for operators: they are quicker than its dispatcher.

    A `TorchFunctionMode` would intercept these, and must not see what is compiled; while one is active, the
    operators themselves run.

    Args:
        printed: the graph as text.
        graph: the graph.
        label: a word for the file name that tracebacks show.
        targets: what nodes call in place of their own operators.
    """
    functions = _functions(graph, targets)
    quick = {name: functions.get(id(value), value) for name, value in printed.bound.items()}
    run = load_function(printed.source, "forward", quick, label)
    if not functions:
        return run
    by_operators = functools.cache(lambda: load_function(printed.source, "forward", printed.bound, label))

    def call(args: list[Any]) -> Sequence[Any]:
        return by_operators()(args) if num_function_modes() else run(args)

    return call


def _functions(graph: Graph, targets: Mapping[Node, OpOverload]) -> dict[int, Callable[..., Any]]:
    """The functions that replace operators, by the `id` of the object that the text binds for each."""
    functions: dict[int, Callable[..., Any] | None] = {}
    inner = (module for module in graph.gm.modules() if isinstance(module, torch.fx.GraphModule))
    for node in (node for gm in inner for node in gm.graph.nodes if isinstance(node.target, OpOverload)):
        op = targets.get(node, node.target)
        bound, function = id(native_callable(op)), function_of(op, node.args, node.kwargs)
        if functions.setdefault(bound, function) != function:
            functions[bound] = None  # no one function does for all its calls
    return {bound: function for bound, function in functions.items() if function is not None}


def marked_call(graph: Graph, label: str, targets: Mapping[Node, OpOverload] = _NO_TARGETS) -> BoxedCall:
    """Print and load `graph` with a mark around the operators of each module, for profilers.

    Args:
        graph: to be printed.
        label: a word for the file name that tracebacks show.
        targets: what nodes call in place of their own operators.
    """
    printed = print_graph(graph, targets, marked=True)
    return load_function(printed.source, "forward", printed.bound, f"{label} with marks")


def print_graph(
    graph: Graph,
    targets: Mapping[Node, OpOverload] = _NO_TARGETS,
    *,
    marked: bool = False,
    flat: bool = False,
) -> PrintedGraph:
    """Print `graph` as `def forward(args)`, with each local deleted after its last use.

    Args:
        graph: functional.
        targets: what nodes call in place of their own operators.
        marked: put a mark around the operators of each module, in one straight line.
        flat: in one straight line, without functions for layers.

    Raises:
        InternalError: the graph calls modules or methods, which a functional graph never does.
    """
    bindings = Bindings({"forward", "slice", "Ellipsis", *_local_names(graph.gm)})
    writer = _Writer(graph.gm, bindings, targets)
    arguments, statements = _arguments(graph, writer.args), _statements(graph.gm.graph, writer, marked=marked)
    if marked or flat:
        mark = bindings.name(RecordFunctionFast, "mark") if marked else ""
        functions, lines = list[str](), list(lines_of(statements, mark))
    else:
        functions, lines = by_layers(statements, writer.args, bindings.reserve)
    body = (f"    {line}" for line in (*arguments, *lines, *_return(graph, writer)))
    text = "\n".join((*writer.functions, *functions, f"def forward({writer.args}):", *body))
    return PrintedGraph(text + "\n", bindings.values())


def _local_names(gm: torch.fx.GraphModule) -> Iterator[str]:
    """Names of the values of a graph, and of the graphs inside it."""
    for node in gm.graph.nodes:
        if node.op != "get_attr":
            yield node.name
        elif isinstance(inner := attribute_of(gm, node), torch.fx.GraphModule):
            yield from _local_names(inner)


def attribute_of(gm: torch.fx.GraphModule, node: Node) -> Any:
    """The attribute that a `get_attr` node reads."""
    value: Any = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _function(name: str, writer: _Writer) -> Iterator[str]:
    """A graph inside of the graph, as a function."""
    graph = writer.gm.graph
    yield f"def {name}("
    for node in graph.find_nodes(op="placeholder"):
        yield f"    {node.name},  # {_shape(node)}".rstrip(" #")
    yield "):"
    for line in lines_of(_statements(graph, writer)):
        yield f"    {line}"
    yield f"    return {writer.text(graph.output_node().args[0])}"
    yield ""


def _arguments(graph: Graph, args: str) -> Iterator[str]:
    names = [(node, slot) for slot, node in zip(graph.ins, graph.placeholders(), strict=True)]
    if names:
        yield "("
        for node, slot in names:
            yield f"    {node.name},  # {_slot(slot)} {_shape(node)}".rstrip()
        yield f") = {args}"
    yield f"{args}.clear()"
    unused = [node.name for node, _ in names if not node.users]
    if unused:
        yield f"del {', '.join(unused)}"


def _statements(graph: torch.fx.Graph, writer: _Writer, *, marked: bool = False) -> list[Statement]:
    deaths = _deaths(graph)
    statements = list[Statement]()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or _is_region_result(node):
            continue
        printed = _region if isinstance(node.target, CompiledRegion) else _statement
        statement = printed(node, writer, [dead.name for dead in deaths.get(node, ())])
        statement.place = _provenance(node.meta.get("module") or "", node.meta.get("source") or "")
        statement.mark = module_mark(node) if marked else ""
        statements.append(statement)
    return statements


def _statement(node: Node, writer: _Writer, dying: list[str]) -> Statement:
    call, read = writer.call(node)
    made = [node.name] if node.users else []
    text = f"%s = {call}" if made else call
    if dying:
        text += f"; del {_places(dying)}"
    if shape := _shape(node):
        text += f"  # {shape}"
    return Statement(text, [*made, *read, *dying], made, dying)


def _is_region_result(node: Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and isinstance(source.target, CompiledRegion)


def _region(node: Node, writer: _Writer, dying: list[str]) -> Statement:
    """A call that frees its arguments: nobody else has those that die here."""
    region = cast("CompiledRegion", node.target)
    arguments, read = writer.template(node.args[0])
    made = [result.name for result in node.users]
    freed = f"; del {_places(dying)}" if dying else ""
    results = f"{_places(made)}," if made else ""
    call = f"{writer.bindings.name(region.call, region.name)}({writer.args})"
    text = f"{writer.args} = {arguments}{freed}\n({results}) = {call}"
    return Statement(text, [*read, *dying, *made], made, dying)


def _places(names: Sequence[str]) -> str:
    return "%s" if len(names) == 1 else ", ".join(["%s"] * len(names))


def _return(graph: Graph, writer: _Writer) -> Iterator[str]:
    yield "return ("
    for slot, result in zip(graph.outs, graph.results(), strict=True):
        yield f"    {writer.text(result)},  # {_slot(slot)}"
    yield ")"


def _deaths(graph: torch.fx.Graph) -> dict[Node, list[Node]]:
    """For each node, the locals whose last use it is; what the output returns never dies."""
    last_use: dict[Node, Node] = {}
    for user in graph.nodes:
        for used in inputs_of(user):
            last_use[used] = user
    deaths: dict[Node, list[Node]] = {}
    for used, user in last_use.items():
        if used.op != "get_attr" and user.op != "output":
            deaths.setdefault(user, []).append(used)
    return deaths


class _Writer:
    """Spells nodes and constants as Python expressions, in which `%s` stands for each local."""

    def __init__(
        self, gm: torch.fx.GraphModule, bindings: Bindings, targets: Mapping[Node, OpOverload]
    ) -> None:
        self.gm = gm
        self._targets = targets
        self.functions: list[str] = []  # lines that define the graphs inside this one
        self.bindings = bindings
        self.args = bindings.reserve("args")  # what a graph, a layer or a region is called with
        self._read: list[str] = []  # the locals of the expression that is being spelled
        self._interned: dict[str, Any] = {}  # equal constants that come as separate objects
        self._names: dict[int, str] = {}
        self._operators: dict[int, str] = {}

    def call(self, node: Node) -> tuple[str, list[str]]:
        """The expression that computes `node`, and the locals in it."""
        self._read = []
        return self._call(node), self._read

    def template(self, value: Any) -> tuple[str, list[str]]:
        """The expression for a value, and the locals in it."""
        self._read = []
        return self._spell(value), self._read

    def text(self, value: Any) -> str:
        """The expression for a value, with its locals."""
        template, read = self.template(value)
        return template % tuple(read)

    def _call(self, node: Node) -> str:
        if node.op != "call_function":
            raise InternalError(f"`{node.name}` is a {node.op} in a functional graph", stage="codegen")
        if node.target is operator.getitem:
            source, index = node.args
            return f"{self._spell(source)}[{self._spell(index)}]"
        if node.target is _COND:
            pred, if_so, if_not, operands = node.args
            branch = f"({self._spell(if_so)} if {self._spell(pred)} else {self._spell(if_not)})"
            return f"{branch}{self._spell(operands)}"  # a tuple, so it is a call
        arguments = [self._spell(value) for value in node.args]
        arguments += [f"{key}={self._spell(value)}" for key, value in node.kwargs.items()]
        return f"{self._target(node)}({', '.join(arguments)})"

    def _spell(self, value: Any) -> str:
        """A place for a node's name, a literal, or the name of a bound object."""
        kind = type(value)
        if kind is Node:
            if value.op == "get_attr":
                return self._attribute(value)
            self._read.append(value.name)
            return "%s"
        if kind is str:
            return repr(value).replace("%", "%%")
        if kind in _LITERALS or (kind is float and math.isfinite(value)):
            return repr(value)
        if isinstance(value, list):
            return f"[{', '.join(map(self._spell, cast('list[Any]', value)))}]"
        if isinstance(value, tuple):
            return self._tuple(cast("tuple[Any, ...]", value))
        if isinstance(value, dict):
            items = cast("dict[Any, Any]", value).items()
            return f"{{{', '.join(f'{self._spell(key)}: {self._spell(item)}' for key, item in items)}}}"
        if kind is slice:
            return f"slice({self._spell(value.start)}, {self._spell(value.stop)}, {self._spell(value.step)})"
        return self._constant(value)

    def _tuple(self, value: tuple[Any, ...]) -> str:
        items = "".join(f"{self._spell(item)}, " for item in value)
        if hasattr(value, "_fields"):
            return f"{self.bindings.name(type(value), type(value).__name__)}({items})"
        return f"({items.removesuffix(' ') if len(value) == 1 else items.removesuffix(', ')})"

    def _constant(self, value: Any) -> str:
        match value:
            case float():
                text = str(value).replace("-", "minus_")  # inf, minus_inf, nan
                return self.bindings.name(self._interned.setdefault(text, value), text)
            case torch.device():
                return self.bindings.name(self._interned.setdefault(str(value), value), str(value))
            case torch.dtype() | torch.layout() | torch.memory_format():
                return self.bindings.name(value, str(value).removeprefix("torch."))
            case _:
                return self.bindings.name(value, type(value).__name__.lower())

    def _attribute(self, node: Node) -> str:
        value = attribute_of(self.gm, node)
        if isinstance(value, torch.fx.GraphModule):
            return self._names.get(id(value)) or self._define(value, str(node.target))
        return self.bindings.name(value, str(node.target))

    def _define(self, gm: torch.fx.GraphModule, path: str) -> str:
        name = self._names[id(gm)] = self.bindings.reserve(path)
        inner = _Writer(gm, self.bindings, self._targets)
        lines = list(_function(name, inner))
        self.functions += [*inner.functions, *lines]
        return name

    def _target(self, node: Node) -> str:
        target: Any = self._targets.get(node, node.target)
        if target is _AS_STRIDED_SCATTER:
            return self.bindings.name(as_strided_scatter, as_strided_scatter.__name__)
        if target is _MKLDNN_RNN:
            layer = training_rnn if node.meta.get("grad", True) else inference_rnn
            return self.bindings.name(layer, str(target).removesuffix(".default"))
        if isinstance(target, OpOverload):
            if id(target) not in self._operators:
                name = self.bindings.name(native_callable(target), str(target).removesuffix(".default"))
                self._operators[id(target)] = name
            return self._operators[id(target)]
        return self.bindings.name(target, getattr(target, "__name__", type(target).__name__))


_COND = torch.ops.higher_order.cond
_MKLDNN_RNN = torch.ops.aten.mkldnn_rnn_layer.default
_AS_STRIDED_SCATTER = torch.ops.aten.as_strided_scatter.default


def as_strided_scatter(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The operator, also on a tensor with gaps or transposed that requires grad, which PyTorch refuses."""
    return _AS_STRIDED_SCATTER(tensor.detach(), *args, **kwargs)


_LITERALS = frozenset({int, bool, type(None), type(Ellipsis)})


@functools.lru_cache(4096)
def _provenance(module: str, source: str) -> str:
    """Where the user's program asked for a node: the module's path and the source line, if known."""
    return " ".join("   ".join(filter(None, (module, source))).splitlines())


def _slot(slot: Slot) -> str:
    text = str(slot) if slot.role in ("primal", "output") else f"{slot.role} {slot}"
    return " ".join(text.splitlines())


def _shape(node: Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    try:
        return _known_text(value.dtype, value.shape)
    except TypeError:  # a symbol has no hash
        return tensor_text(value.dtype, value.shape)


_known_text = functools.lru_cache(4096)(tensor_text)
"""The texts of sizes, of which a graph has few; it takes 1 us to format one."""
