"""The backend of `functorch.compile`'s entry points: the user's partition and the user's compilers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.fx import GraphModule

from aotdist.codegen.backend import CallableBackend, name_generators
from aotdist.codegen.contract import Backend, BoxedCall, Decompositions, Emission, Emitted
from aotdist.codegen.fx import FxBackend, print_graph
from aotdist.compiled import running_eagerly
from aotdist.functorch.convention import Order, joint_module, named_as_theirs
from aotdist.functorch.partitions import PartitionFn, cut_of, is_computed, is_cut, joined, with_arguments
from aotdist.passes.run import run_passes
from aotdist.program import Graph, Slot
from aotdist.settings import Settings
from aotdist.sizes import concrete


@dataclass(frozen=True, slots=True)
class FunctorchBackend(Backend):
    """Cuts joint graphs with the user's partition, and hands graphs to the user's compilers.

    Args:
        num_params_buffers: how many of the first tensors are parameters and buffers.
    """

    compilers: CallableBackend
    partition_fn: PartitionFn
    num_params_buffers: int = 0
    settings: Settings = field(default_factory=Settings.from_environment)
    name: str = "functorch"
    any_tangents: bool = False
    owns_cut: bool = True

    def decompositions(self) -> Decompositions:
        """The user's table."""
        return self.compilers.decompositions()

    def prepare_joint(self, graph: Graph) -> Graph:
        """Run the joint passes, and let the user's partition cut the graph if it has a backward."""
        joint, _ = run_passes(graph, "joint", self.settings)
        order = Order.of(joint)
        if not order.tangents:
            return Graph(named_as_theirs(joint.gm), joint.ins, joint.outs)
        module = joint_module(joint, order)
        name_generators(module)
        vals = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        count = len(order.primals)
        halves = self.partition_fn(
            module,
            (vals[:count], vals[count:]),
            num_fwd_outputs=len(order.values),
            static_lifetime_input_indices=list(range(min(self.num_params_buffers, count))),
        )
        return joined(*halves, joint, order)

    def emit(self, graph: Graph, emission: Emission) -> Emitted:
        """Compile a copy of the graph that keeps PyTorch's convention."""
        source = print_graph(graph).source
        match emission.kind:
            case "inference":
                order = Order.of(graph)
                gm = with_arguments(graph, graph.ins, order.values, "arg{}_1", first=0)
                return self._emit(gm, graph, order.values, emission, source)
            case "forward":
                cut = cut_of(graph)
                outs = frozenset(graph.outs)
                slots = (*cut.order.values, *(s for s in cut.saved if not is_computed(s) or s in outs))
                gm = with_arguments(graph, graph.ins, slots, "primals_{}")
                return self._emit(gm, graph, slots, emission, source)
            case "backward":
                if not is_cut(graph):  # derived from the saved values: the partition never saw it
                    return FxBackend().emit(graph, emission)
                return Emitted(self._backward(graph, emission), source)

    def _emit(
        self, gm: GraphModule, graph: Graph, slots: Sequence[Slot], emission: Emission, source: str
    ) -> Emitted:
        picks = _picks(slots, graph.outs)
        call, strides = self._compile(gm, emission)
        chosen = None if strides is None else tuple(strides[pick] for pick in picks)
        return Emitted(lambda args: _picked(call(args), picks), source, chosen)

    def _backward(self, graph: Graph, emission: Emission) -> BoxedCall:
        """The backward, compiled at its first call, as PyTorch does.

        If the program communicates it is compiled ahead of time: ranks must not find out in the middle of a
        step that one of them cannot compile it. A backward with fewer tangents is not compiled, see
        `_with_zeros`.
        """
        cut = cut_of(graph)
        if cut.backward is not None:
            return _with_zeros(*cut.backward, graph)
        position = _positions(graph.ins)
        ins = [slot for slot in (*cut.taken, *cut.order.tangents) if slot in position]
        gm = with_arguments(graph, ins, cut.order.grads, "tangents_{}")
        sources = [position[slot] for slot in ins]
        picks = _picks(cut.order.grads, graph.outs)
        compiled = functools.cache(lambda: self._compile(gm, emission)[0])
        if cut.communicates:
            compiled()

        def call(args: list[Any]) -> list[Any]:
            taken = [args[source] for source in sources]
            args.clear()
            return _picked(compiled()(taken), picks)

        cut.backward = graph, call
        return call

    def _compile(self, gm: GraphModule, emission: Emission) -> tuple[BoxedCall, Sequence[Any] | None]:
        with running_eagerly():  # backwards are compiled when they are called
            return self.compilers.compiled(gm, emission)


def _positions(slots: Sequence[Slot]) -> dict[Slot, int]:
    return {slot: position for position, slot in enumerate(slots)}


def _picks(there: Sequence[Slot], wanted: Sequence[Slot]) -> list[int]:
    """The position of each wanted slot."""
    position = _positions(there)
    return [position[slot] for slot in wanted]


def _picked(results: Sequence[Any], picks: Sequence[int]) -> list[Any]:
    return [results[pick] for pick in picks]


def _with_zeros(whole: Graph, call: BoxedCall, reduced: Graph) -> BoxedCall:
    """A backward with fewer tangents: the whole backward, called with zeros for the missing ones.

    So the user's compiler is called once. Gradients that depend on missing tangents alone are None, as in
    eager.
    """
    absent = {position for position, node in enumerate(reduced.results()) if node is None}
    arguments = [(slot, node.meta["val"]) for slot, node in whole.named_placeholders().items()]
    given = frozenset(reduced.ins)

    def filled(args: list[Any]) -> list[Any]:
        symbols = {
            slot.path: value for slot, value in zip(reduced.ins, args, strict=True) if slot.role == "size"
        }
        remaining = iter(args)
        all_of_them = [
            next(remaining) if slot in given else _zero_like(val, symbols) for slot, val in arguments
        ]
        args.clear()
        return [None if at in absent else grad for at, grad in enumerate(call(all_of_them))]

    return filled


def _zero_like(val: torch.Tensor, symbols: Mapping[str, int]) -> torch.Tensor:
    size, stride = concrete((tuple(val.size()), val.stride()), symbols)
    return torch.empty_strided(size, stride, dtype=val.dtype, device=val.device).zero_()


def make_boxed_func(f: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """`f(*args)` as a call that takes its arguments as one list."""

    @functools.wraps(f, updated=())
    def boxed(args: list[Any]) -> Any:
        return f(*args)

    cast(Any, boxed)._boxed_call = True
    return boxed


def make_boxed_compiler(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler whose result is boxed, from one whose result is not."""

    @functools.wraps(compiler)
    def boxing(fx_g: GraphModule, inps: Any) -> Any:
        return make_boxed_func(compiler(fx_g, inps))

    return boxing


@make_boxed_compiler
def nop(fx_g: GraphModule, _: Any) -> GraphModule:
    """The compiler that leaves a graph as it is."""
    return fx_g


@make_boxed_compiler
def print_compile(fx_g: GraphModule, _: Any) -> GraphModule:
    """The compiler that prints a graph's code and leaves it as it is."""
    print(fx_g.code)
    return fx_g
