"""The data types that all stages share: rows, slots, programs, graphs.

All of them are frozen: a stage takes such values and returns new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NewType, NoReturn, TypeAlias, TypeVar, cast

import torch

from aotdist.errors import InternalError
from aotdist.torch_seam.nodes import calls_of, copied_graph, inputs_of
from aotdist.torch_seam.proxies import graph_module

ArgIdx = NewType("ArgIdx", int)
"""Position among the tensors that the user's call brings: arguments, then lifted state."""
DistinctIdx = NewType("DistinctIdx", int)
"""Position among the distinct tensors of a call (after dedupe)."""
PrimalIdx = NewType("PrimalIdx", int)
"""Position among the tensors that the traced function takes: synthetic bases, then distinct tensors."""
PlainIdx = NewType("PlainIdx", int)
"""Position among the plain tensors beneath the primals (after unwrapping subclasses)."""
OutIdx = NewType("OutIdx", int)
"""Position among the flat values that the user's function returns."""
NodeOutIdx = NewType("NodeOutIdx", int)
"""Position among the tensors that the autograd node returns, wrappers still on."""

I = TypeVar("I", bound=int)
T = TypeVar("T")
U = TypeVar("U")


class Row(Generic[I, T]):
    """An immutable sequence that is indexed by one convention's index type.

    A type checker refuses to read a `Row[ArgIdx, Slot]` with a `PlainIdx`. At run time it is a tuple.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items: tuple[T, ...] = tuple(items)

    def __getitem__(self, idx: I) -> T:
        return self._items[idx]

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Row) and self._items == other._items

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return f"Row{list(self._items)!r}"

    def indices(self) -> list[I]:
        """Every index of this row, typed."""
        return cast("list[I]", list(range(len(self._items))))

    def enumerate(self) -> Iterator[tuple[I, T]]:
        """Pairs of typed index and item."""
        return cast("Iterator[tuple[I, T]]", enumerate(self._items))

    def map(self, fn: Callable[[T], U]) -> Row[I, U]:
        """A row of the same convention with `fn` applied to each item."""
        return Row(fn(item) for item in self._items)


Role = Literal[
    "primal", "size", "output", "write", "saved", "tangent", "total", "buffer", "rng",
    "grad", "piece", "backward_write", "kept",
]  # fmt: skip
"""What a graph argument or result is to the program.

- `primal`: a plain tensor of the user's (argument, parameter, buffer, lifted constant).
- `size`: a number that differs from call to call; its path is an expression (`aotdist.sizes`).
- `output`: a tensor that the forward returns, or a base that an output is rebuilt from.
- `write`: the new value of an input that the forward wrote.
- `saved`: handed from forward to backward.
- `tangent`: gradient of the loss with respect to a differentiable `output` or `write`.
- `total`: the whole gradient of a waypoint (`aotdist.facts.ObservedGrad`): a result before hooks on it, an
    argument after them.
- `buffer`: the value, when the backward begins, of an input or a result that the backward writes.
- `rng`: seed and offset of all random numbers, last among the arguments.
- `grad`: gradient with respect to a `primal`.
- `piece`: a summand of the gradient of a waypoint.
- `backward_write`: the new value of an input, or of a result, that the backward wrote.
- `kept`: a tensor that user code in the backward (a hook) keeps.
"""

GRADIENT_ROLES = frozenset[Role](("tangent", "total"))
"""Arguments that are gradients."""
LATE_ROLES: frozenset[Role] = frozenset({"tangent", "total", "buffer"})
"""Arguments that only exist in the backward."""
FORWARD_ROLES: frozenset[Role] = frozenset({"output", "write"})
"""Results of the forward."""
BACKWARD_ROLES: frozenset[Role] = frozenset({"grad", "piece", "backward_write", "kept"})
"""Results of the backward."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The name of one graph argument or result.

    Args:
        role: what it is to the program.
        path: as the user would write it: `args[0]`, `blocks.3.scale`, `out[0]`.
        inner: attribute path of a plain tensor inside a wrapper (`._local_tensor`), else empty.
    """

    role: Role
    path: str
    inner: str = ""

    def __str__(self) -> str:
        return f"{self.path}{self.inner}"


@dataclass(frozen=True, slots=True)
class Program(Generic[I]):
    """A function of flat tensors, the names of its inputs, and tensors to trace it with.

    Shapes: `fn(*tensors) -> list`, one result per output; `ins` and `examples` have one item per
    tensor argument, in the convention that `I` names.
    """

    fn: Callable[..., list[Any]]
    ins: Row[I, Slot]
    examples: Row[I, torch.Tensor]


def uncalled(*args: Any) -> NoReturn:
    """The function of a program whose graph is all that runs."""
    raise InternalError(
        "a program is called after it was compiled; only its graph is to run", stage="runtime"
    )


@dataclass(frozen=True, slots=True)
class Graph:
    """A flat functional FX graph with a name for every argument and result.

    `gm`'s placeholders stand in the order of `ins`; its output is one flat tuple in the order of
    `outs` (an out may be None: a gradient that is not needed). Nodes carry, in `node.meta`:

    - `val`: the fake tensor; `phase`: `"forward"` or `"backward"`, when it was recorded;
    - `source`: the user's line as `file:line   code`; `module`: the path of the innermost module;
    - `seq_nr`: the autograd sequence number; a backward node has that of its forward node;
    - `function`: name of the autograd node that a backward node belongs to;
    - `unit`: name of the FSDP unit that a collective serves, if any;
    - `grad`: whether grad mode was on; in the backward it is for what is computed again (a checkpoint);
    - `serial`: number of the recorded operation, the same for all copies of the node;
    - `on_host`: whether it is computed on the CPU in a program for a GPU;
    - `policy`: `"must_save"` or `"must_recompute"`, if the program requests it;
    - `overwritten`: whether the program writes this argument;
    - `reshaped`: whether the program reshapes this argument in place, so that no view of it may be saved;
    - `strides_asked`: whether a backward of the user's reads the strides.
    """

    gm: torch.fx.GraphModule
    ins: tuple[Slot, ...]
    outs: tuple[Slot, ...]

    def copied(self) -> Graph:
        """The same graph with nodes of its own, and the same tensors and submodules."""
        return Graph(graph_module(self.gm, copied_graph(self.gm.graph)), self.ins, self.outs)

    def held(self) -> list[Any]:
        """The tensors and graphs that its `get_attr` nodes name."""
        return [getattr(self.gm, str(node.target)) for node in self.gm.graph.find_nodes(op="get_attr")]

    def placeholders(self) -> list[torch.fx.Node]:
        """The argument nodes, in the order of `ins`."""
        return self.gm.graph.find_nodes(op="placeholder")

    def calls(self, is_wanted: Callable[[torch.fx.Node], bool]) -> list[torch.fx.Node]:
        """The calls of wanted functions, in order; `is_wanted` is given the first call of each function."""
        return calls_of(self.gm.graph, is_wanted)

    def is_backward(self) -> bool:
        """Whether it is a backward, and not a joint or forward graph."""
        roles = {slot.role for slot in self.outs}
        return not roles.isdisjoint(BACKWARD_ROLES) and roles.isdisjoint(FORWARD_ROLES)

    def sizes(self) -> tuple[str, ...]:
        """The expressions of the numbers that it takes, in the order of `ins`."""
        return tuple(slot.path for slot in self.ins if slot.role == "size")

    def named_sizes(self) -> dict[str, torch.fx.Node]:
        """The numbers that it takes, by expression."""
        return {slot.path: node for slot, node in self.named_placeholders().items() if slot.role == "size"}

    def results(self) -> Sequence[torch.fx.Node | None]:
        """The result nodes, in the order of `outs`; None where a result is absent."""
        (values,) = self.gm.graph.output_node().args
        return cast("Sequence[torch.fx.Node | None]", values)

    def named_placeholders(self) -> dict[Slot, torch.fx.Node]:
        """Argument nodes by slot."""
        return dict(zip(self.ins, self.placeholders(), strict=True))

    def named_results(self) -> dict[Slot, torch.fx.Node | None]:
        """Result nodes by slot."""
        return dict(zip(self.outs, self.results(), strict=True))

    def ancestors(
        self, roots: Iterable[torch.fx.Node], stop: Container[torch.fx.Node] = ()
    ) -> set[torch.fx.Node]:
        """`roots` and all nodes that they are computed from; inputs of `stop` nodes are not followed."""
        needed = set(roots)
        for node in reversed(self.gm.graph.nodes):
            if node in needed and node not in stop:
                needed.update(inputs_of(node))
        return needed

    def descendants(self, roots: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
        """`roots` and all nodes that are computed from them, without the output node."""
        reached = set(roots)
        for node in self.gm.graph.nodes:
            if node.op != "output" and not reached.isdisjoint(inputs_of(node)):
                reached.add(node)
        return reached


@dataclass(frozen=True, slots=True)
class Split:
    """A joint graph, partitioned into forward and backward.

    `forward.outs` is the joint graph's `output` and `write` slots followed by the `saved` slots that
    the forward computes. `backward.ins` is `saved`, in order, followed by `size`, then by `tangent` slots. If
    the joint graph has `rng` slots, they come last among the arguments of both.
    A saved slot whose path and inner name a primal is that primal itself: the forward does not return it.

    Args:
        forward: primals, sizes -> outputs, writes, computed saved values.
        backward: saved values, sizes, tangents -> grads, backward writes.
        saved: every tensor that the backward needs, in the order of the backward's arguments: primals first.
        saved_primals: for each saved slot that *is* a primal, that primal's slot.
        saved_bytes: bytes that are kept alive for the backward alone: without storage that a primal or an
            output keeps alive anyway, and with shared storage counted once.
    """

    forward: Graph
    backward: Graph
    saved: tuple[Slot, ...]
    saved_primals: dict[Slot, Slot]
    saved_bytes: int


Call: TypeAlias = Callable[[Sequence[Any]], list[Any]]
"""A program's function, taking its arguments as one sequence."""
