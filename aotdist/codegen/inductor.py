"""The `inductor` backend: `compile_fx_inner` on forwards, backwards and inference graphs."""

from __future__ import annotations

import functools
import re
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import torch

from aotdist.codegen.contract import Backend, Decompositions, Emission, Emitted
from aotdist.codegen.cpp_toolchain import check_cpp_toolchain, vector_isa_is_sound
from aotdist.codegen.decompose import decompose
from aotdist.codegen.fx import FxBackend, print_graph, warn_of_fx
from aotdist.codegen.in_place import write_back
from aotdist.codegen.inductor_rewrites import (
    call_library,
    has_unknown_sizes,
    keep_for_backward,
    keeping_own_memory,
    lay_out_what_is_written,
    linear_algebra,
    products_by_onednn,
    restore_provenance,
    tell_strides,
)
from aotdist.codegen.kernel_batch import KernelBatch
from aotdist.codegen.portable import portable_of
from aotdist.codegen.random_operators import draws_as_eager, keep_draws_in_order, prepare_draws, restore_draws
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.program import Graph
from aotdist.subclasses.protocol import ADDED_ROWS
from aotdist.torch_seam.ambient import autocast_off, warnings_no_errors
from aotdist.torch_seam.functional import FakeTensor, FakeTensorMode
from aotdist.torch_seam.inductor import (
    TracingContext,
    compile_with_inductor,
    constants_allowed,
    cpp_kernels_batched,
    inductor_config,
    inductor_config_is_per_thread,
    inductor_decompositions,
    inductor_entry,
    inductor_joint_passes,
    inductor_source,
    inductor_vector_isa_setting,
    precompile_cpp_headers,
    shape_environment,
    sound_cpp_flags,
    submit_compilation,
    tracing_context,
)
from aotdist.torch_seam.symbols import depends_on_data
from aotdist.trace.operators import functionalised as operators
from aotdist.trace.operators.fakes import norms_laid_out


@dataclass(frozen=True, slots=True)
class InductorBackend(Backend):
    """Fuses with PyTorch's own compiler: C++ on CPU, Triton on GPU.

    Args:
        else_fx: emit a graph that it does not compile by `fx`, with a warning.
    """

    name: str = "inductor"
    partition: Literal["default", "min_cut"] = "min_cut"
    else_fx: bool = False

    def check(self) -> None:
        """Find the C++ compiler, and let it precompile headers while the program is traced.

        Raises:
            BadSettings: there is no C++ compiler, or it cannot build a Python extension.
        """
        check_cpp_toolchain()
        _start_on_headers()

    def decompositions(self) -> Decompositions:
        """Inductor's table, and batch norms of our own.

        Its `add` is of complex numbers alone, and fails for those that lie by columns (torch 2.13).
        """
        table = norms_laid_out({**inductor_decompositions(), **operators.MADE_OF})
        table.pop(torch.ops.aten.add.Tensor, None)
        return table

    def prepare_joint(self, graph: Graph) -> Graph:
        """Decompose a copy of a joint or an inference graph, and run Inductor's rewrites of such on it.

        They find attention that is written out (flash attention takes its place, dropout and all),
        and drop casts, constants and operations that do nothing.

        Raises:
            BadSettings: the graph runs on a GPU and Triton is not installed.
            UnsupportedProgram: Inductor fails.
        """
        values = [node.meta.get("val") for node in graph.placeholders()]
        fakes = [value for value in values if isinstance(value, FakeTensor)]
        on_meta = any(getattr(node.meta.get("val"), "is_meta", False) for node in graph.gm.graph.nodes)
        if not graph.outs or not fakes or on_meta:
            return graph  # the rewrites leave nodes without a size where no device computes (torch 2.13)
        _require_triton(fakes)
        gm = graph.copied().gm
        restore_own_memory = keeping_own_memory(Graph(gm, graph.ins, graph.outs))
        try:
            with _failing_by_name(gm, "the joint graph"), _compiling(gm, fakes[0].fake_mode):
                decompose(gm, {**self.decompositions(), **_WITH_MEMORY})
                prepare_draws(gm)
                rewritten = Graph(inductor_joint_passes(gm, fakes[0].device), graph.ins, graph.outs)
        except UnsupportedProgram:
            if self.else_fx:
                return graph
            raise
        restore_draws(rewritten.gm)
        restore_own_memory(rewritten)
        restore_provenance(rewritten)
        return rewritten

    def emit(self, graph: Graph, emission: Emission) -> Emitted:
        """Compile a copy of the graph; C++ compilers go on in the background until `finish`.

        Raises:
            UnsupportedProgram: Inductor fails.
        """
        gm = graph.copied().gm
        failing_by_name = functools.partial(
            _failing_by_name, gm, f"the {emission.kind} graph of `{emission.name}`"
        )
        try:
            with failing_by_name():
                emitted = self._emit(gm, graph, emission)
        except UnsupportedProgram as failure:
            if not self.else_fx:
                raise
            warn_of_fx(failure)
            return FxBackend().emit(graph, emission)
        return replace(emitted, finish=failing_by_name()(emitted.finish), else_fx=self.else_fx)

    def _emit(self, gm: torch.fx.GraphModule, graph: Graph, emission: Emission) -> Emitted:
        visible = [position for position, slot in enumerate(graph.outs) if slot.role in _VISIBLE]
        gm.graph.output_node().meta["user_visible_output_idxs"] = visible
        if emission.kind == "inference":
            write_back(gm, graph)
        _refuse_what_goes_wrong(gm)
        batch = KernelBatch.here()
        inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        with _compiling(gm, emission.fake_mode) as context, cpp_kernels_batched(lambda: batch):
            prepare_draws(gm)
            decompose(gm, {**self.decompositions(), **_WITH_MEMORY, **_MADE_OF})
            keep_draws_in_order(gm)
            lay_out_what_is_written(gm)
            products_by_onednn(gm)
            keep_for_backward(gm)
            keeps_layouts = _keeps_layouts(gm)
            call_library(gm)
            tell_strides(gm)
            with (
                inductor_config(size_asserts=False) if has_unknown_sizes(gm) else nullcontext(),
                inductor_config(layout_optimization=False) if keeps_layouts else nullcontext(),
            ):
                compiled = compile_with_inductor(
                    gm,
                    inputs,
                    static_ins=sorted(emission.static_ins),
                    backward=emission.kind == "backward",
                    inference=emission.kind == "inference",
                )
        strides = tuple(context.output_strides) if context.output_strides else None
        source = inductor_source(compiled) or print_graph(graph).source
        call = inductor_entry(compiled)
        return Emitted(
            call, source, strides, batch.finish, portable=lambda: portable_of(call, source, strides)
        )


def _keeps_layouts(gm: torch.fx.GraphModule) -> bool:
    """Whether a graph is a whole step on a CPU whose convolutions shall keep the layouts of the program.

    Inductor makes them channels-last. A step copies each weight for that, and gets gradients that lie
    otherwise than weights, so that the optimizer in the same graph reads them with gaps: 20 of 73 ms with SGD
    and 36 of 91 with AdamW, for a ResNet of 2.8 M parameters on a core of a Xeon. Where channels have
    convolutions of their own (ConvNeXt), weights are small, and channels-last is quicker by 15 percent.
    """
    nodes = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    backwards = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default)
    on_cpu = all(node.meta["val"].device.type == "cpu" for node in nodes)
    return bool(backwards) and on_cpu and all(node.args[8] == 1 for node in nodes)  # groups


def _add_without_alpha(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    """`add` without `alpha`, which Inductor drops when it makes an `addmm` of a product and a sum."""
    same = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.dtype == y.dtype
    return NotImplemented if not same or isinstance(alpha, int) and alpha == 1 else x + y * alpha


def _slice_scatter_at_data(
    x: torch.Tensor, part: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    """`slice_scatter` from or to a position read off a tensor: Inductor asks whether that is negative."""
    if not (depends_on_data(start) or depends_on_data(end)):
        return NotImplemented
    at = torch.arange(part.size(dim), device=x.device) * step + (start or 0)
    return torch.ops.aten.index_put.default(x, [*[None] * (dim % x.dim()), at], part)


_WITH_MEMORY: Decompositions = {torch.ops.aten._efficientzerotensor.default: torch.ops.aten.zeros.default}
"""Zeros that kernels can read; whole in a trace, since for eager products with these are zero, too."""

_MADE_OF: Decompositions = {
    torch.ops.aten.add.Tensor: _add_without_alpha,
    torch.ops.aten.slice_scatter.default: _slice_scatter_at_data,
    **ADDED_ROWS,
}
_USE_FX = 'use backend="fx"; "auto" does for graphs that Inductor refuses'

_MAKES_SPARSE = "_sparse_coo_tensor"
"""Operators whose results are sparse; rewrites of the joint graph lose the `val`s that say so."""


def _refuse_what_goes_wrong(gm: torch.fx.GraphModule) -> None:
    """Refuse linear algebra of complex numbers, what computes with sparse tensors, and negated inputs.

    The code would take sparse tensors for dense ones (they may be results), and inputs with the negative bit
    (`z.conj().imag`), whose numbers lie in memory negated, for what lies there.
    """
    made = (node for node in gm.graph.nodes if _MAKES_SPARSE in str(node.target))
    negated = filter(_is_negated, gm.graph.find_nodes(op="placeholder"))
    for nodes, of_what in (
        ((user for node in made for user in node.users if user.op != "output"), "a sparse tensor"),
        ((user for node in negated for user in node.users), "numbers that lie in memory negated"),
        (linear_algebra(gm), "complex numbers"),
    ):
        for node in nodes:
            raise UnsupportedProgram(
                f"Inductor does not compile `{node.target}` of {of_what}",
                where=node.meta.get("source"),
                stage="codegen",
                fix=_USE_FX,
            )


_EXECUTED = re.compile(r"While executing %(\w+) |^ *target: (\S+)", re.MULTILINE)
"""Finds the node or the operator that failed in the text of one of Inductor's errors."""


@contextmanager
def _failing_by_name(gm: torch.fx.GraphModule, what: str) -> Generator[None]:
    """Turn Inductor's errors into ones that name the graph and, if the node is known, the user's line.

    The user's warning filters do not turn its warnings into errors.
    """
    try:
        with warnings_no_errors():
            yield
    except UnsupportedProgram:
        raise
    except Exception as error:
        reason, found = str(error).partition("\n")[0] or type(error).__name__, _EXECUTED.search(str(error))
        name, target = (None, None) if found is None else found.groups()
        at = [node for node in gm.graph.nodes if node.name == name or str(node.target) == target]
        raise UnsupportedProgram(
            f"Inductor does not compile {f'`{at[0].target}` in ' if at else ''}{what}: {reason}",
            where=at[0].meta.get("source") if at else None,
            stage="codegen",
            fix=_USE_FX,
        ) from error


_VISIBLE = frozenset({"output", "grad", "kept"})
"""Roles whose strides the user sees; for the others the compiler may choose."""


def _is_negated(node: torch.fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.is_neg()


def _require_triton(fakes: Sequence[FakeTensor]) -> None:
    if any(fake.is_cuda for fake in fakes) and find_spec("triton") is None:
        raise BadSettings(
            "the inductor backend compiles GPU graphs with Triton, which is not installed",
            stage="codegen",
            fix='install `triton`, or use backend="fx"',
        )


@functools.cache
def _start_on_headers() -> None:
    """Precompile headers in the background, once: 4.7 s on a new machine, which tracing hides.

    Where settings hold for the whole process, another thread would see them come and go: there the
    first kernel waits for its headers.
    """
    if inductor_config_is_per_thread():
        with _configured():
            submit_compilation(precompile_cpp_headers)


@contextmanager
def _compiling(gm: torch.fx.GraphModule, fake_mode: FakeTensorMode | None) -> Generator[TracingContext]:
    """The context that Inductor expects, whatever context the user's call runs in.

    Its cache of graphs has no key for symbolic fractions, and warns at length.
    """
    with ExitStack() as around:
        context = around.enter_context(tracing_context(fake_mode))
        for of_mode in (shape_environment, constants_allowed):
            around.enter_context(of_mode(fake_mode))
        for manager in (torch.no_grad(), autocast_off(), _configured()):
            around.enter_context(manager)
        around.enter_context(inductor_config(fallback_random=draws_as_eager(gm)))
        if any(
            isinstance(node.meta.get("val"), torch.SymFloat) for node in gm.graph.find_nodes(op="placeholder")
        ):
            around.enter_context(inductor_config(fx_graph_cache=False))
        yield context


def _configured() -> AbstractContextManager[Any]:
    """Our settings of Inductor while we compile; the user's others stay.

    Graph partitions are for CUDA graphs, which are off here; looking for them took 0.47 of 16.2 s in a
    profile of an 8-layer Llama's forward.
    """
    options: dict[str, Any] = {"graph_partition": False, **sound_cpp_flags()}
    if inductor_vector_isa_setting() is None and vector_isa_is_sound():
        options["cpp__vec_isa_ok"] = True
    return inductor_config(**options)
