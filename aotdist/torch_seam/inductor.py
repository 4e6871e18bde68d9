"""Inductor: its passes, compiler, settings and C++ kernels."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

# Where backends look for the fake mode of a graph.
from torch._guards import TracingContext as TracingContext
from torch._guards import active_fake_mode as active_fake_mode
from torch._guards import tracing as tracing
from torch._library.utils import get_layout_constraint_tag

from aotdist.torch_seam.ambient import warnings_no_errors
from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.torch_seam.operators import OpOverload, can_decompose
from aotdist.torch_seam.patches import Patch, Place, replaced, replaced_here
from aotdist.torch_seam.symbols import ragged_hidden

T = TypeVar("T")


@contextmanager
def tracing_context(fake_mode: FakeTensorMode | None) -> Generator[TracingContext]:
    """Where compilers look for the fake mode, and where Inductor reports its output strides."""
    context = TracingContext(fake_mode)
    context.output_strides = []  # a list asks for the report
    context.fakify_first_call = fake_mode is not None and fake_mode.shape_env is not None  # as symbols
    with tracing(context):
        yield context


@contextmanager
def shape_environment(fake_mode: FakeTensorMode | None) -> Generator[None]:
    """Inductor keeps a graph in its cache only if the fake mode has a shape environment, if an empty one.

    One that is there has numbers only while Inductor reads it: no graph computes with ragged sizes.
    """
    if fake_mode is None:
        yield
        return
    if fake_mode.shape_env is not None:
        with ragged_hidden(fake_mode.shape_env):
            yield
        return
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    empty = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    with replaced(fake_mode, "shape_env", empty):
        yield


def constants_allowed(fake_mode: FakeTensorMode | None) -> AbstractContextManager[None]:
    """Let operators take the tensors that a graph holds (`torch.tensor([1.0, 2.5])`) beside fake ones."""
    return nullcontext() if fake_mode is None else replaced(fake_mode, "allow_non_fake_inputs", True)


def inductor_decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """The operators that Inductor has no lowering for, and what they are made of; none that draws."""
    table, aten = {op: made for op, made in _decompositions().items() if not _draws(op)}, torch.ops.aten
    for op in (aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default):
        if op in table:
            table[op] = _after_lowerings(table[op])
    return table


EAGER_ARGUMENTS = "eager_input_vals"
"""Where a node says what its operator is given in eager; without, Inductor holds to no strides."""


def needs_exact_strides(op: Any) -> bool:
    """Whether an operator's arguments must lie in memory as in eager; a user's must if it says nothing."""
    return isinstance(op, OpOverload) and get_layout_constraint_tag(op) == torch.Tag.needs_exact_strides


def inductor_random_decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """What Inductor makes of operators that draw: uniform and normal numbers, which its kernels draw."""
    return {op: made for op, made in _decompositions().items() if _draws(op)}


def _decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def _draws(op: Any) -> bool:
    """Whether an operator draws itself, and is not made of others that do."""
    is_random = isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags
    return is_random and not can_decompose(op)


def _after_lowerings(made: Callable[..., Any]) -> Callable[..., Any]:
    """`made`, which asks for a module as an attribute, and trusts that somebody imported it (0.3 s)."""

    @functools.wraps(made)
    def call(*args: Any, **kwargs: Any) -> Any:
        importlib.import_module("torch._inductor.lowering")
        return made(*args, **kwargs)

    return call


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

    with _triton_unread():
        return compile_fx_inner(
            gm,
            examples,
            static_input_idxs=static_ins,
            is_backward=backward,
            is_inference=inference,
            cudagraphs=BoxedBool(False),
        )


def _triton_unread() -> AbstractContextManager[None]:
    """Without a GPU, do not hash all files of Triton (0.4 s): the key of the machine then leaves that out."""
    from torch._inductor.runtime import triton_compat

    if torch.cuda.is_available():
        return nullcontext()
    return replaced_here(triton_compat, "triton_key", lambda _: None)


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


def inductor_config_is_per_thread() -> bool:
    """Whether `inductor_config` holds for its own thread alone: from torch 2.13; before, for the process."""
    from torch.utils import _config_module

    return hasattr(_config_module, "ContextVar")


def inductor_vector_isa_setting() -> bool | None:
    """What the user says about the CPU's vector instructions; None to find out."""
    from torch._inductor import config

    return config.cpp.vec_isa_ok


def sound_cpp_flags() -> dict[str, Any]:
    """Settings with which g++ builds kernels without its pass over dead stores (`-fno-dse`).

    That pass takes stores for dead which an inlined `memcpy` (`rep movs`) reads: with g++ 12 on AVX-512, two
    bfloat16 matrices of 64 by 64 that one program transposes are what lay in memory before
    (`torch.compile` of torch 2.13, too). Inductor has no setting for flags; the text of this one becomes one.
    """
    from torch._inductor import config
    from torch._inductor.cpp_builder import is_gcc

    contraction = config.cpp.enable_floating_point_contract_flag
    return {"cpp__enable_floating_point_contract_flag": f"{contraction} -fno-dse"} if is_gcc() else {}


def inductor_draws_as_eager() -> bool:
    """Whether the user has Inductor call PyTorch's own random operators."""
    from torch._inductor import config

    return config.fallback_random


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

    task = warnings_no_errors()(task)
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


def extension_module(path: Path) -> ModuleType:
    """The Python extension in a file, called as Inductor calls those of kernels."""
    # Kernels find torch's own `PyObject* -> data_ptr` through the environment; Inductor sets it as it loads.
    address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
    spec = importlib.util.spec_from_file_location("kernel", path)
    assert spec is not None and spec.loader is not None, "the name of the file ends as those of extensions do"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_OF_NO_CONSEQUENCE = re.compile(r"trace\.|worker_|compile_threads$|.*_cache$|.*cutlass_dir$")
"""Settings of Inductor's that say how it works, and not what it generates."""


def inductor_options() -> dict[str, Any]:
    """Inductor's settings that what it generates depends on, as they are for this thread now."""
    from torch._inductor import config

    options = config.get_config_copy()  # type: ignore[attr-defined]  # the module is of a class of its own
    return {name: value for name, value in options.items() if not _OF_NO_CONSEQUENCE.match(name)}


def merges_gathers() -> bool:
    """Whether Inductor may merge gathers: each rank's code then writes into its own part of a buffer.

    Source: `merge_all_gather_bucket` in `torch/_inductor/fx_passes/bucketing.py`.
    """
    options = inductor_options()
    schedules = options.get("aten_distributed_optimizations.enable_overlap_scheduling", False)
    return schedules or options.get("bucket_all_gathers_fx", "none") != "none"


def moves_collectives() -> bool:
    """Whether the user has Inductor order, merge or split collectives, for which it must see them."""
    options = inductor_options()
    moves = any(options.get(name) for name in _MOVES_COLLECTIVES)
    return moves or merges_gathers() or any(options.get(name, "none") != "none" for name in _MERGES_OTHERS)


def rewrites_whole_graphs() -> bool:
    """Whether the user has joint graphs rewritten by functions that may look at all of them."""
    options = inductor_options()
    return any(options.get(name) for name in _LOOK_AT_ALL)


_LOOK_AT_ALL = ("joint_custom_pre_pass", "joint_custom_post_pass", "auto_chunker.enable")
_MOVES_COLLECTIVES = ("reorder_for_compute_comm_overlap", "_micro_pipeline_tp", "_fuse_ddp_communication")
_MERGES_OTHERS = ("bucket_reduce_scatters_fx", "bucket_all_reduces_fx")


def inductor_extensions() -> Iterator[tuple[Any, Any]]:
    """Operators with what Inductor makes of each: PyTorch's own functions, and those that others registered.

    What has not been imported, nobody has added to.
    """
    for module, tables in (
        ("torch._inductor.lowering", ("lowerings",)),
        ("torch._inductor.decomposition", ("decompositions", "extra_random_decomps")),
    ):
        if module in sys.modules:
            for table in tables:
                yield from getattr(sys.modules[module], table, {}).items()


def cpp_kernels_batched(make_batch: Callable[[], Any]) -> AbstractContextManager[None]:
    """Modules that Inductor generates or loads in this thread meanwhile leave their C++ kernels to batches.

    Generated modules ask `torch._inductor.async_compile.AsyncCompile` for each kernel and then wait
    for all. They look the class up when they run, so a subclass under that name gets both calls; other
    threads that meet it meanwhile have no batch and get the original's behaviour.

    Args:
        make_batch: makes the batch of a module. Its `add(argtypes, source)` returns what the module's global
            for a kernel shall be, or None to leave the kernel to Inductor; its `submit(scope)` is called with
            the module's globals when all kernels are named.
    """
    return _KERNELS.applied(make_batch)


def _batching_class() -> list[Place]:
    from torch._inductor import async_compile

    class BatchingCompile(async_compile.AsyncCompile):
        def __init__(self) -> None:
            super().__init__()
            make_batch = _KERNELS.value
            self._batch = None if make_batch is None else make_batch()

        def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
            taken = None if self._batch is None else self._batch.add(argtypes, source_code)
            return super().cpp_pybinding(argtypes, source_code) if taken is None else taken

        def wait(self, scope: dict[str, Any]) -> None:
            if self._batch is not None:
                self._batch.submit(scope)
            super().wait(scope)

    return [(async_compile, "AsyncCompile", BatchingCompile)]


_KERNELS = Patch[Callable[[], Any]]("kernel_batches", _batching_class)
