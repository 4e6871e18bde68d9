"""The backend of the drop-ins: the user's partition cuts, the user's compilers compile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.fx import GraphModule

from aotdist.aliasing.overwrite import all_uncounted
from aotdist.codegen.backend import CallableBackend, boxed, hand_over, name_generators
from aotdist.codegen.contract import Backend, BoxedCall, Decompositions, Emission, Emitted
from aotdist.codegen.fx import FxBackend, print_graph
from aotdist.codegen.in_place import copy_back, new_values
from aotdist.compiled import running_eagerly
from aotdist.functorch.convention import Order, flat_results, joint_module, named_as_theirs
from aotdist.functorch.cut import cut_of, is_computed, is_cut, joined, with_arguments
from aotdist.functorch.partitions import PartitionFn
from aotdist.passes.run import run_passes
from aotdist.program import Graph, Slot
from aotdist.settings import Settings
from aotdist.sizes import concrete
from aotdist.torch_seam.inductor import tracing_context


@dataclass(frozen=True, slots=True)
class FunctorchBackend(Backend):
    """Cuts joint graphs with the user's partition, and hands graphs to the user's compilers.

    Args:
        compilers: what the user brought.
        partition_fn: cuts the joint graph.
        num_params_buffers: how many of the first tensors are parameters and buffers.
        writes_in_graph: whether forwards copy new values to the inputs themselves, and do not return them.
        settings: for what happens before the cut.
    """

    compilers: CallableBackend
    partition_fn: PartitionFn
    num_params_buffers: int = 0
    writes_in_graph: bool = False
    settings: Settings = field(default_factory=Settings.from_environment)
    name: str = "functorch"
    any_tangents: bool = False
    owns_cut: bool = True

    def decompositions(self) -> Decompositions:
        """The user's table."""
        return self.compilers.decompositions()

    def prepare_joint(self, graph: Graph) -> Graph:
        """Clean the graph up and let the user's partition cut it, if it is a joint one."""
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
        """Compile a copy of the graph in PyTorch's convention."""
        source = print_graph(graph).source
        match emission.kind:
            case "inference":
                order = Order.of(graph)
                gm = with_arguments(graph, graph.ins, order.values, "arg{}_1", first=0)
                return self._emit(gm, graph, order, order.values, emission, source)
            case "forward":
                cut = cut_of(graph)
                outs = frozenset(graph.outs)
                slots = (*cut.order.values, *(s for s in cut.saved if not is_computed(s) or s in outs))
                gm = with_arguments(graph, graph.ins, slots, "primals_{}")
                return self._emit(gm, graph, cut.order, slots, emission, source)
            case "backward":
                if not is_cut(graph):  # a part, or for gradients of other kinds: no partition saw it
                    return FxBackend().emit(graph, emission)
                return Emitted(self._backward(graph, emission), source)

    def _emit(
        self,
        gm: GraphModule,
        graph: Graph,
        order: Order,
        slots: Sequence[Slot],
        emission: Emission,
        source: str,
    ) -> Emitted:
        written = _written_in_graph(gm, graph.ins, slots, order) if self.writes_in_graph else {}
        returned = [slot for slot in slots if slot not in written]
        picks = _picks([*returned, *written], graph.outs)
        call, strides = self._compile(gm, emission)
        call = _returning(call, tuple(written.values())) if written else call
        strides = None if strides is None else [*strides, *[None] * len(written)]
        chosen = None if strides is None else tuple(strides[pick] for pick in picks)
        return Emitted(lambda args: _picked(call(args), picks), source, chosen)

    def _backward(self, graph: Graph, emission: Emission) -> BoxedCall:
        """The backward, compiled when it is called for the first time, as PyTorch does.

        Ahead of time if the program communicates: ranks must not find out in the middle of a step that one
        cannot compile it. With tangents missing it is the same one again, see `_with_zeros`.
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

    def _compile(self, gm: GraphModule, emission: Emission) -> tuple[BoxedCall, list[Any] | None]:
        """The user's callable, boxed, and the strides of its results where the compiler says them."""
        hand_over(gm)
        examples = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
        compiler = self.compilers.compiler_of(emission.kind)
        with running_eagerly(), tracing_context(emission.fake_mode) as context:
            compiled = compiler(gm, examples)
        strides = context.output_strides
        call = boxed(compiled, compiler, f"the {emission.kind} graph", len(flat_results(gm)))
        return call, list(strides) if strides else None


def _written_in_graph(
    gm: GraphModule, ins: Sequence[Slot], outs: Sequence[Slot], order: Order
) -> dict[Slot, int]:
    """Let `gm` copy new values without history to its arguments, and not return these.

    Returns:
        the results that it returned, and positions of the arguments that it writes instead.
    """
    arguments, written = gm.graph.find_nodes(op="placeholder"), dict[Slot, int]()
    with_history = {(tangent.path, tangent.inner) for tangent in order.tangents}
    for at, argument, new in list(new_values(gm, ins, outs)):
        if (outs[at].path, outs[at].inner) not in with_history:
            copy_back(gm, argument, new)
            written[outs[at]] = arguments.index(argument)
    kept = (result for slot, result in zip(outs, flat_results(gm), strict=True) if slot not in written)
    gm.graph.output_node().args = (tuple(kept),)
    gm.recompile()
    return written


def _returning(call: BoxedCall, positions: Sequence[int]) -> BoxedCall:
    """`call`, which writes the arguments at `positions`, and returns these after its results.

    Their version counters are as before: who gets them counts the program's writes, which are others.
    """

    def returning(args: list[Any]) -> list[Any]:
        written = [args[position] for position in positions]
        with all_uncounted(written):
            results = call(args)
        return [*results, *written]

    return returning


def _positions(slots: Sequence[Slot]) -> dict[Slot, int]:
    return {slot: position for position, slot in enumerate(slots)}


def _picks(there: Sequence[Slot], wanted: Sequence[Slot]) -> list[int]:
    """Where each slot that is wanted stands."""
    position = _positions(there)
    return [position[slot] for slot in wanted]


def _picked(results: Sequence[Any], picks: Sequence[int]) -> list[Any]:
    return [results[pick] for pick in picks]


def _with_zeros(whole: Graph, call: BoxedCall, reduced: Graph) -> BoxedCall:
    """A backward for which tangents are missing, by the one for all: a compiler is not asked a second time.

    Gradients that depend on nothing else are None, as in eager.
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
