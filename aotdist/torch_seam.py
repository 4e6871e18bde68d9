"""The only module that imports PyTorch's private modules; torch 2.11 to 2.13 meet here.

Each re-export says why it is needed. Heavy imports stand inside small functions, so that
`import aotdist` stays quick. Sections are named after the rooms that use them.
"""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from types import ModuleType
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# One C++ check for the metadata of many tensors.
from torch._C._dynamo.guards import TensorGuards as TensorGuards

# Public classes that their public module re-exports in a way which type checkers call private.
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore

# Where backends look for the fake mode of a graph.
from torch._guards import TracingContext as TracingContext
from torch._guards import tracing as tracing

# The type of a resolved operator: graph targets, keys of decomposition tables.
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload

# Tensors without data, and what they raise when data is asked for.
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# Tensors whose writes are recorded.
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode
from torch._subclasses.functional_tensor import _detect_infra_mode

from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.fx._lazy_graph_module import _LazyGraphModule

# Operations as nodes.
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode as ProxyTorchDispatchMode
from torch.fx.experimental.proxy_tensor import PythonKeyTracer as PythonKeyTracer
from torch.fx.experimental.proxy_tensor import _ProxyTensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot as _get_proxy_slot
from torch.fx.experimental.proxy_tensor import make_fx as make_fx

# Arguments and results of any nesting: flatten, unflatten, map, key paths.
# Arguments and results of any nesting: flatten, unflatten, map, key paths.
from torch.utils import _pytree as pytree  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec as TreeSpec

T = TypeVar("T")

# --- every stage: operators, graphs, modes --------------------------------------------------------


def is_operator(func: Any) -> bool:
    """Whether a call is of an operator, not of a higher-order one."""
    return isinstance(func, OpOverload)


def writes_arguments(op: OpOverload) -> bool:
    """Whether an operator writes one of its arguments."""
    return op._schema.is_mutable


@functools.cache
def out_of_place(op: OpOverload) -> OpOverload | None:
    """The view that an in-place one makes (`t` for `t_`); None for what makes none (`resize_`, `set_`)."""
    namespace, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    twins = [] if packet is None else (getattr(packet, overload) for overload in packet.overloads())
    names = argument_names(op)  # the overload may have another name: `transpose.int` for `transpose_`
    return next((twin for twin in twins if twin.is_view and argument_names(twin) == names), None)


@functools.cache
def written_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that the operator's schema says it writes."""
    arguments = enumerate(op._schema.arguments)
    return tuple((k, a.name) for k, a in arguments if a.alias_info is not None and a.alias_info.is_write)


@functools.cache
def out_names(op: OpOverload) -> tuple[str, ...]:
    """Names of the tensors that an operator writes its results to (`out=`), and may give another size."""
    return tuple(a.name for a in op._schema.arguments if a.is_out and a.kwarg_only)


@functools.cache
def without_outs(op: OpOverload) -> OpOverload | None:
    """The operator that makes what this one writes to `out=`; None if there is none."""
    namespace, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    wanted = [a.name for a in op._schema.arguments if not a.is_out]
    makers = (getattr(packet, overload) for overload in packet.overloads())
    return next((m for m in makers if argument_names(m) == wanted and not writes_arguments(m)), None)


def argument_names(op: OpOverload) -> list[str]:
    """The names that the operator's schema gives its arguments, in order."""
    return [argument.name for argument in op._schema.arguments]


def can_decompose(op: OpOverload) -> bool:
    """Whether PyTorch itself breaks an operator up (CompositeImplicitAutograd)."""
    return op._can_decompose()


def native_callable(op: OpOverload) -> Callable[..., Any]:
    """The C++ entry of an operator: the whole dispatcher, modes included, without a Python frame.

    1.52 us a call where `OpOverload.__call__` takes 1.97 (`mm` of 4x4). Script-object operators
    choose in Python whether to dispatch there, so they keep their own `__call__`.
    """
    return op._op if type(op).__call__ is OpOverload.__call__ else op


def training_rnn(*args: Any) -> Any:
    """`mkldnn_rnn_layer` as a training step calls it: by the grad mode it decides what it returns."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


def graph_module(root: torch.nn.Module | dict[str, Any], graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A GraphModule that prints its Python code only when asked: 0.6 s less for 40,000 nodes."""
    return _LazyGraphModule(root, graph)


def no_modes() -> AbstractContextManager[Any]:
    """Every dispatch mode off: real tensors can be inspected in the middle of a trace."""
    return _disable_current_modes()


def any_autocast() -> bool:
    """Whether autocast is on for any device."""
    return torch._C._is_any_autocast_enabled()


@contextmanager
def own_autocast_cache() -> Generator[None]:
    """The cast parameters that autocast keeps are those of this context alone; afterwards none are left."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def autocast_off() -> AbstractContextManager[Any]:
    """Autocast disabled on every device, whatever is on outside."""
    return torch._C._DisableAutocast()


def tree_children(spec: TreeSpec) -> list[TreeSpec]:
    """The children of a pytree structure; a method from torch 2.13 on, an attribute before."""
    children: Any = getattr(spec, "children", None)
    specs: Any = children() if callable(children) else spec.children_specs
    return specs


def flatten_protocol(tensor: Any) -> tuple[list[str], Any]:
    """Attribute names and context of a wrapper tensor."""
    return tensor.__tensor_flatten__()


def dispatches(cls: Any) -> bool:
    """Whether a tensor class handles operators itself, below autograd."""
    return cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def generator_id(generator: torch.Generator) -> int:
    """A number that two Python objects share exactly when they are one generator; an operator wraps anew."""
    return generator._cdata


def storage_id(tensor: torch.Tensor) -> int:
    """A number that two tensors share exactly when they share their storage."""
    return tensor.untyped_storage()._cdata


def torch_functions_off() -> AbstractContextManager[Any]:
    """No torch-function mode, and no subclass, hears of what is called."""
    return torch._C.DisableTorchFunction()


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Let autograd believe that `tensor` was written `version` times."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


# --- capture: modules whose call is compiled ------------------------------------------------------


def uncompiled_call(module: torch.nn.Module) -> Callable[..., Any]:
    """What calling a module runs when nothing has compiled it: its forward and its hooks."""
    return module._call_impl


def compiled_call_of(module: torch.nn.Module) -> Any:
    """What calling a module runs instead, or None."""
    return module._compiled_call_impl


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Run `call` instead when the module is called; its type and `state_dict` stay as they are."""
    module._compiled_call_impl = call


# --- capture and joint: tensors that stand for parameters -----------------------------------------


def as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, for which `isinstance(_, nn.Parameter)` holds: it stands for a parameter."""
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor


# --- joint: functional tensors, nodes, the backward of a trace ------------------------------------


def functional(fake: torch.Tensor) -> FunctionalTensor:
    """A functional tensor around `fake`: writes to it are recorded, and never reach `fake`."""
    return FunctionalTensor.to_functional(fake)


def second_shell(tensor: FunctionalTensor) -> FunctionalTensor:
    """Another functional tensor of the same memory, of which autograd does not know that."""
    mode = _detect_infra_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    assert mode is not None, "functional tensors are made under their mode"
    with mode:
        return FunctionalTensor(tensor.elem, mode)


def rebind(tensor: FunctionalTensor, other: FunctionalTensor) -> None:
    """Let `tensor` have the memory, sizes and strides of `other`; its history and version counter stay."""
    tensor.elem = other.elem
    with torch._C.DisableTorchFunction(), no_dispatch():
        if tensor.dtype != other.dtype:
            tensor.data = other
            return
        # `.data =` would make autograd forget the node that takes the gradient of a leaf.
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_COUNTS_WRITES):
            torch.ops.aten.set_.source_Tensor(tensor, other)


_COUNTS_WRITES = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def part_of(
    memory: FunctionalTensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
) -> FunctionalTensor:
    """A functional tensor in the memory of a flat one, of which autograd does not know that.

    Where `memory` is bytes and the part something else, `offset` counts bytes, and the part is contiguous:
    functionalisation writes through `as_strided` only where no other view comes before.
    """
    with torch.no_grad():
        if dtype == memory.dtype:
            return second_shell(memory.as_strided(size, stride, offset))  # type: ignore[arg-type]
        part = memory.narrow(0, offset, math.prod(size) * dtype.itemsize).view(dtype)
        return second_shell(part.view(size))  # type: ignore[arg-type]


def made_again(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The view of `base` that `view` is of its own."""
    return view._view_func_unsafe(base)


def functional_value(tensor: FunctionalTensor) -> torch.Tensor:
    """The current fake value of a functional tensor, with every pending write applied."""
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor.elem)


def data_writes(tensor: FunctionalTensor) -> int:
    """How many times the data of a functional tensor, or of a view of it, was written."""
    return torch._functionalize_mutation_counter(tensor.elem)


def storage_changes(tensor: FunctionalTensor) -> int:
    """How many times the storage was resized or replaced (`resize_`, `set_`)."""
    return torch._functionalize_storage_changed_counter(tensor.elem)


def metadata_written(tensor: FunctionalTensor) -> bool:
    """Whether size, stride or offset were written in place (`t_`, `unsqueeze_`)."""
    return torch._functionalize_has_metadata_mutation(tensor.elem)


def functional_storage_id(tensor: FunctionalTensor) -> int:
    """A number that a functional tensor shares exactly with its views."""
    return tensor.elem.untyped_storage()._cdata


def is_functional_base(tensor: FunctionalTensor) -> bool:
    """Whether a functional tensor owns its memory, rather than being a view of another."""
    return torch._is_functional_tensor_base(tensor.elem)


def replace_functional_value(tensor: FunctionalTensor, value: torch.Tensor) -> None:
    """Let a functional tensor that owns its memory hold `value` from now on."""
    torch._functionalize_replace(tensor.elem, value)
    torch._functionalize_commit_update(tensor.elem)


def stands_for_another(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is one of a trace's own: functional (either shell of it) or fake.

    `torch.func` transforms wrap tensors once more; then what is inside tells.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return isinstance(tensor, (FunctionalTensor, FakeTensor)) or torch._is_functional_tensor(tensor)


def track(fake: torch.Tensor, node: torch.fx.Node, tracer: PythonKeyTracer) -> None:
    """From now on, `fake` stands for `node` in what `tracer` records."""
    tracer.tensor_tracker[fake] = _ProxyTensor(torch.fx.Proxy(node, tracer), None)


def node_of(fake: torch.Tensor, tracer: PythonKeyTracer) -> torch.fx.Node | None:
    """The node that computed `fake`, or None when it was not recorded."""
    slot = _get_proxy_slot(fake, tracer, None)
    return None if slot is None else slot.proxy.node


def next_sequence_nr() -> int:
    """The number that the next autograd node made by this thread will carry."""
    return torch.autograd._get_sequence_nr()


def sequence_nr(node: Any) -> int:
    """The number of an autograd node: no two that one thread makes have the same."""
    return node._sequence_nr()


def running_sequence_nr() -> int | None:
    """The sequence number of the autograd node whose backward is running, or None outside backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def run_backward(
    outs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor | GradientEdge],
    tangents: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad(outs, wanted, tangents, allow_unused=True)`, without being a torch function.

    The public one is overridable, so a torch-function mode is popped for as long as it runs.
    """
    return _engine_run_backward(
        tuple(outs), tuple(tangents), False, False, tuple(wanted), True, accumulate_grad=False
    )


@contextmanager
def saved_tensor_hooks_off() -> Generator[None]:
    """No hooks on saved tensors: a checkpoint around a call must not see what its capture saves."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def made_by_custom_function(tensor: torch.Tensor) -> bool:
    """Whether a user's `autograd.Function` made this tensor: its backward must not be replayed away."""
    return isinstance(history_of(tensor), torch.autograd.function.BackwardCFunction)


def history_of(tensor: torch.Tensor) -> Any | None:
    """The autograd node that made a tensor, if autograd can tell."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view made under `no_grad`, of a base that was written since
        return None


def custom_functions(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Names of the Python autograd functions in the history of `tensors`, each once."""
    found: dict[str, None] = {}
    pending: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found.setdefault(node.name())
        for source, _ in node.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                pending.append(source)
    return list(found)


_PROXY_MODE_OPTIONS = inspect.signature(ProxyTorchDispatchMode).parameters


def decomposition_option(table: Mapping[OpOverload, Callable[..., Any]]) -> dict[str, Any]:
    """How a proxy mode is told its decompositions: an argument from torch 2.12 on, a global before."""
    return {"decomposition_table": dict(table)} if "decomposition_table" in _PROXY_MODE_OPTIONS else {}


def decomposing(table: Mapping[OpOverload, Callable[..., Any]]) -> AbstractContextManager[Any]:
    """The other half of `decomposition_option`: the context that sets the global."""
    if "decomposition_table" in _PROXY_MODE_OPTIONS:
        return nullcontext()
    from torch.fx.experimental.proxy_tensor import decompose

    return decompose(dict(table))


def record_on_fakes(
    call: Callable[..., Any], fakes: Sequence[torch.Tensor], table: Mapping[OpOverload, Callable[..., Any]]
) -> torch.fx.GraphModule:
    """What `call` does with these fake tensors, as a graph; operators in `table` are broken up."""
    return make_fx(call, decomposition_table=dict(table), tracing_mode="real")(*fakes)


def call_with_primals_and_tangents(gm: torch.fx.GraphModule, num_primals: int, num_values: int) -> None:
    """Let a flat joint graph be called as PyTorch's: `(primals, tangents)` -> `(values, gradients)`."""
    from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

    num_tangents = len(gm.graph.find_nodes(op="placeholder")) - num_primals
    results: Any = gm.graph.output_node().args[0]
    ins: Any = [[0] * num_primals, [0] * num_tangents]
    outs: Any = ([0] * num_values, [0] * (len(results) - num_values))
    info = _PyTreeInfo(["primals", "tangents"], pytree.tree_structure(ins), pytree.tree_structure(outs))
    gm.graph.set_codegen(_PyTreeCodeGen(info))
    gm.recompile()


def operator_name(target: Any) -> str | None:
    """What PyTorch's tracer calls a node of this target: `add` for `aten.add.Tensor`; None for others."""
    return target.overloadpacket.__name__ if isinstance(target, OpOverload) else None


# --- codegen: which library runs a collective -----------------------------------------------------


def runs_on_gloo(group_name: Any, device: torch.device) -> bool:
    """Whether collectives of tensors on `device` in this process group are gloo's."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(group_name)._get_backend(device).name() == "gloo"


# --- codegen: Inductor ----------------------------------------------------------------------------


@contextmanager
def tracing_context(fake_mode: FakeTensorMode | None) -> Generator[TracingContext]:
    """Where compilers look for the fake mode, and where Inductor reports its output strides."""
    context = TracingContext(fake_mode)
    context.output_strides = []  # a list asks for the report
    with tracing(context):
        yield context


@contextmanager
def shape_environment(fake_mode: FakeTensorMode | None) -> Generator[None]:
    """Inductor keeps a graph in its cache only if the fake mode has a shape environment, if an empty one."""
    if fake_mode is None or fake_mode.shape_env is not None:
        yield
        return
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake_mode.shape_env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    try:
        yield
    finally:
        fake_mode.shape_env = None


def inductor_decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """The operators that Inductor has no lowering for, and what they are made of."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def inductor_joint_passes(gm: torch.fx.GraphModule, device: torch.device) -> torch.fx.GraphModule:
    """Inductor's rewrites of an uncut graph (attention patterns, constants, no-ops), in place.

    The caller's tracing context says which fake mode new nodes are computed in.
    """
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.virtualized import V

    with V.set_fake_mode(TracingContext.get().fake_mode):
        return _recursive_joint_graph_passes(gm, input_device=device)


def compile_with_inductor(
    gm: torch.fx.GraphModule,
    examples: Sequence[Any],
    *,
    static_ins: Sequence[int],
    backward: bool,
    inference: bool,
) -> Callable[[list[Any]], Sequence[Any]]:
    """One graph through Inductor; `gm` is changed. Without CUDA graphs: they would pin saved tensors."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    return compile_fx_inner(
        gm,
        examples,
        static_input_idxs=static_ins,
        is_backward=backward,
        is_inference=inference,
        cudagraphs=BoxedBool(False),
    )


def inductor_entry(compiled: Callable[..., Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """What to call.

    On CPU the generated function itself: Inductor's shell (profiler, autotuning) takes 3.2 us a call.
    """
    on_cpu = getattr(compiled, "device_types", None) == {"cpu"}
    return compiled.current_callable if on_cpu else compiled


def inductor_source(compiled: Callable[..., Any]) -> str:
    """The module that Inductor generated, or nothing for a graph that it only interprets."""
    return getattr(compiled, "source_code", "")


def inductor_config(**options: Any) -> AbstractContextManager[Any]:
    """Inductor's settings, changed for a while; `__` stands for a dot."""
    from torch._inductor import config

    return config.patch({name.replace("__", "."): value for name, value in options.items()})


def inductor_counters() -> Mapping[str, int]:
    """What Inductor counts: patterns that matched, graphs that its cache held."""
    from torch._dynamo.utils import counters

    return counters["inductor"]


def inductor_config_is_per_thread() -> bool:
    """Whether `inductor_config` holds for its own thread alone: from torch 2.13; before, for the process."""
    from torch.utils import _config_module

    return hasattr(_config_module, "ContextVar")


def inductor_vector_isa_setting() -> bool | None:
    """What the user says about the CPU's vector instructions; None to find out."""
    from torch._inductor import config

    return config.cpp.vec_isa_ok


def find_cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use, if it runs at all."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):
        return None


def compile_threads() -> int:
    """How many compilers Inductor may run at a time."""
    from torch._inductor.async_compile import get_compile_threads

    return get_compile_threads()


def submit_compilation(task: Callable[[], T]) -> Callable[[], T]:
    """Run `task` on one of Inductor's compile threads, in this thread's context; call the result to wait."""
    from torch._inductor.async_compile import AsyncCompile

    if compile_threads() <= 1:
        value = task()
        return lambda: value
    return AsyncCompile.pool().submit(copy_context().run, task).result


def submit_cpp_module(source: str) -> Callable[[], ModuleType]:
    """Start building a Python extension called `kernel` as Inductor builds its kernels, through its cache."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return submit_compilation(lambda: CppPythonBindingsCodeCache.load_async(source, "cpu")())


def load_cpp_kernel(argtypes: Sequence[str], source: str) -> Callable[..., Any]:
    """One kernel built on its own, the way Inductor does it."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    return CppPythonBindingsCodeCache.load_pybinding(argtypes, source)


def precompile_cpp_headers() -> None:
    """Choose the vector instructions and precompile the headers of kernels; both are kept."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    CppPythonBindingsCodeCache.load_async("#include <torch/csrc/inductor/cpp_prefix.h>\n", "cpu")


class CppKernelBatch(Protocol):
    """Takes over the C++ kernels of one generated module."""

    def add(self, argtypes: Sequence[str], source: str) -> Any | None:
        """What the module's global for this kernel shall be; None leaves the kernel to Inductor."""
        ...

    def submit(self, scope: dict[str, Any]) -> None:
        """The module, whose globals are `scope`, has named all its kernels."""
        ...


_kernel_batches: ContextVar[Callable[[], CppKernelBatch] | None] = ContextVar("kernel_batches", default=None)
_hook_lock = threading.Lock()
_hook_users = 0


@contextmanager
def cpp_kernels_batched(make_batch: Callable[[], CppKernelBatch]) -> Generator[None]:
    """Modules that Inductor generates or loads in this thread meanwhile leave their C++ kernels to batches.

    Generated modules ask `torch._inductor.async_compile.AsyncCompile` for each kernel and then wait
    for all. They look the class up when they run, so a subclass under that name hears both; other
    threads that meet it meanwhile have no batch and get the original's behaviour.
    """
    token = _kernel_batches.set(make_batch)
    _hook_kernels(+1)
    try:
        yield
    finally:
        _hook_kernels(-1)
        _kernel_batches.reset(token)


def _hook_kernels(change: int) -> None:
    global _hook_users
    from torch._inductor import async_compile

    with _hook_lock:
        _hook_users += change
        original, batching = _async_compile_classes()
        async_compile.AsyncCompile = batching if _hook_users else original


@functools.cache
def _async_compile_classes() -> tuple[type[Any], type[Any]]:
    from torch._inductor.async_compile import AsyncCompile

    class BatchingCompile(AsyncCompile):
        def __init__(self) -> None:
            super().__init__()
            make_batch = _kernel_batches.get()
            self._batch = None if make_batch is None else make_batch()

        def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
            taken = None if self._batch is None else self._batch.add(argtypes, source_code)
            return super().cpp_pybinding(argtypes, source_code) if taken is None else taken

        def wait(self, scope: dict[str, Any]) -> None:
            if self._batch is not None:
                self._batch.submit(scope)
            super().wait(scope)

    return AsyncCompile, BatchingCompile


# --- subclasses: DTensor and FSDP2 ----------------------------------------------------------------


def dtensor_spec(context: Any, mesh: DeviceMesh | None, size: torch.Size, stride: tuple[int, ...]) -> Any:
    """The spec that `DTensor.__tensor_unflatten__` makes, once instead of at every call.

    Before torch 2.13 the flatten context is `(spec, requires_grad)`; then it is spelled out, and the mesh is
    an attribute of its own.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    if mesh is None:
        old, _ = context
        metadata = TensorMeta(shape=size, stride=stride, dtype=old.tensor_meta.dtype)
        return DTensorSpec(old.mesh, old.placements, tensor_meta=metadata)
    placements, tensor_meta, shard_order, _ = context
    metadata = TensorMeta(shape=size, stride=stride, dtype=tensor_meta.dtype)
    return DTensorSpec(mesh, placements, tensor_meta=metadata, shard_order=shard_order)


def with_placements(context: Any, placements: tuple[Any, ...]) -> Any:
    """The flatten context of a DTensor with other placements."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    first, *rest = context
    if isinstance(first, DTensorSpec):
        return (DTensorSpec(first.mesh, placements, tensor_meta=first.tensor_meta), *rest)
    return (placements, *rest)


def make_dtensor(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """A DTensor without history, without the decorated constructor: 1.1 us instead of 2.4."""
    return torch.Tensor._dtensor__new__(DTensor, local, spec, requires_grad=False)


def in_backward() -> bool:
    """Whether the autograd engine is running: a forward inside it is a recomputation (checkpointing)."""
    return torch._C._current_graph_task_id() != -1


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], container: Any) -> Any:
    """`fn` on every tensor that FSDP2 finds in a container: dataclasses, packed sequences too."""
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(fn, container)


def to_device(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A root's arguments on `device`, moved by the same rules as FSDP2 and DDP move them."""
    from torch.distributed.utils import _to_kwargs

    moved_args, moved_kwargs = _to_kwargs(args, kwargs, device, False)
    return moved_args[0], moved_kwargs[0]


def fsdp_divide_factors(*args: Any) -> tuple[float | None, float | None, Any, Any]:
    """FSDP2's own choice: divide before, divide after, operation of the reduce-scatter, of the all-reduce."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    return _get_gradient_divide_factors(*args)


def fsdp_default_comms() -> tuple[type[Any], type[Any]]:
    """The classes of FSDP2's own all-gather and reduce-scatter; any other was set by the user."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    return DefaultAllGather, DefaultReduceScatter


def fsdp_groups(state: Any) -> list[Any]:
    """The parameter groups of an FSDP state; torch 2.11 has one at most, under another name."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def fsdp_unsharded_spec(record: Any) -> Any | None:
    """The DTensor spec that a parameter had before `fully_shard`, if any; torch 2.11 calls it the TP spec."""
    return getattr(record, "_unsharded_dtensor_spec", None) or getattr(record, "_tp_spec", None)


def fsdp_state(module: Any) -> Any:
    """What FSDP2 knows of a module that `fully_shard` was given."""
    return module._get_fsdp_state()


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's part of a DTensor, without a node in its autograd history (`to_local` makes one)."""
    return tensor._local_tensor


# --- subclasses: DDP ------------------------------------------------------------------------------


def reduces_plainly(ddp: Any) -> bool:
    """Whether DDP's reducer averages gradients and does nothing else: no hooks, no `join()`."""
    return not (
        ddp._comm_hooks
        or ddp._delay_all_reduce_params
        or ddp._join_config.enable
        or ddp._use_python_reducer
        or ddp._get_ddp_logging_data().get("comm_hook")
    )


def has_grad_hooks(param: torch.Tensor) -> bool:
    """Whether the user is called with this leaf's gradient, before or after it is accumulated."""
    return bool(param._backward_hooks) or bool(getattr(param, "_post_accumulate_grad_hooks", None))


# --- runtime: the autograd node, and the store that ranks met in ----------------------------------


def under_transform() -> bool:
    """Whether a `torch.func` transform (`grad`, `vmap`, `jvp`) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def node_base() -> type[Any]:
    """The base of `torch.autograd.Function`, whose `apply` is C++ alone.

    The public one first looks through every argument for what a `torch.func` transform left behind: 10 us
    for 100. A compiled call under a transform does not get as far.
    """
    return _SingleLevelFunction


def keeps_graph() -> bool:
    """Whether the running backward was asked to keep what it saved (`retain_graph=True`)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def default_store() -> Store | None:
    """The store that `init_process_group` met in; None where ranks met without one (MPI)."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def held_process_groups() -> list[tuple[str, tuple[int, ...], str]]:
    """Name, global ranks and backend of each process group of this rank, in the order of creation."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world  # looked up now: tests that run ranks as threads replace it
    return [
        (world.pg_names[group], tuple(sorted(world.pg_group_ranks[group])), backend)
        for group, (backend, _) in world.pg_map.items()
    ]


# --- launch: what the trainer needs ---------------------------------------------------------------


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...]) -> None:
    """Give `mesh` the product of some of its axes as one more, so that DTensor reduces over them at once."""
    mesh[axes]._flatten("_".join(axes))
