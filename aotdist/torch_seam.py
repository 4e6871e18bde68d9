"""The only module that imports PyTorch's private modules; torch 2.11 to 2.13 meet here.

Each re-export says why it is needed. Heavy imports stand inside small functions, so that
`import aotdist` stays quick. Sections are named after the stages that use them.
"""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import copyreg
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import itertools
import logging
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# What autograd knows of how a view was made.
from torch._C._autograd import CreationMeta as CreationMeta


# One C++ check for the metadata of many tensors.
from torch._C._dynamo.guards import TensorGuards as TensorGuards

# Public classes that their public module re-exports in a way which type checkers call private.
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore

# What `with torch.device(...)` enters.
from torch.utils._device import DeviceContext

# Kernels in Python, for a while.
from torch._dispatch.python import enable_python_dispatcher

# Where backends look for the fake mode of a graph.
from torch._guards import TracingContext as TracingContext
from torch._guards import active_fake_mode as active_fake_mode
from torch._guards import tracing as tracing

# The type of a resolved operator: graph targets, keys of decomposition tables.
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload

# What kernels make of a tensor's strides when they choose a memory format.
from torch._prims_common import suggest_memory_format as suggest_memory_format

# Tensors without data, and what they raise when data is asked for.
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# Tensors whose writes are recorded.
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode
from torch._subclasses.functional_tensor import _detect_infra_mode

from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.fx._lazy_graph_module import _LazyGraphModule

# Who holds the memory of a tensor, told without holding it.
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef

# Operations as nodes.
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode as ProxyTorchDispatchMode
from torch.fx.experimental.proxy_tensor import PythonKeyTracer as PythonKeyTracer
from torch.fx.experimental.proxy_tensor import _ProxyTensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot as _get_proxy_slot
from torch.fx.experimental.proxy_tensor import make_fx as make_fx

from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# Arguments and results of any nesting: flatten, unflatten, map, key paths.
from torch.utils import _pytree as pytree  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils.checkpoint import CheckpointFunction as _ReentrantCheckpoint
from torch.utils.checkpoint import _is_compiling as _checkpoint_is_compiling
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    # Imports sympy: 0.3 s that only symbolic sizes need.
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

T = TypeVar("T")

# --- every stage: operators, graphs, modes --------------------------------------------------------


def is_operator(func: Any) -> bool:
    """Whether a call is of an operator, not of a higher-order one."""
    return isinstance(func, OpOverload)


def writes_arguments(op: OpOverload) -> bool:
    """Whether an operator writes one of its arguments."""
    return op._schema.is_mutable


@functools.cache
def functional_twin(op: OpOverload) -> OpOverload | None:
    """The operator that computes what an in-place one writes (`sin` for `sin_`); None for any other."""
    namespace, _, name = op._schema.name.partition("::")
    if not name.endswith("_") or torch.Tag.inplace_view in op.tags or name == "copy_":
        return None
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    taken = [str(argument.type) for argument in op._schema.arguments]
    # Names alone do not tell: `pow_.Scalar` is the twin of `pow.Tensor_Scalar`.
    fitting = (o for o in overloads if [str(argument.type) for argument in o._schema.arguments] == taken)
    return next(fitting, None)


def with_defaults(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """`args`, and what the operator's schema gives for those that are not there."""
    missing = (a for a in op._schema.arguments[len(args) :] if not a.kwarg_only and a.name not in kwargs)
    return [*args, *(argument.default_value for argument in missing)]


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


def written_by(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call of an operator writes."""
    for position, name in written_arguments(op):
        given = args[position] if position < len(args) else kwargs.get(name)
        targets = given if isinstance(given, (list, tuple)) else (given,)
        yield from (target for target in targets if isinstance(target, torch.Tensor))


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


def schema_of(op: OpOverload) -> str:
    """What an operator takes, returns and writes."""
    return str(op._schema)


def fills_uninitialized_memory() -> bool:
    """Whether deterministic algorithms write to memory that `torch.empty` leaves as it is."""
    return bool(torch.utils.deterministic.fill_uninitialized_memory)  # type: ignore[attr-defined]


def kernel_choices() -> tuple[bool, ...]:
    """Which kernels operators may choose from.

    Of attention: flash, memory-efficient, math, cuDNN's. Of convolutions and recurrent layers: oneDNN's and
    cuDNN's.
    """
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_cudnn_enabled(),
    )


def choose_kernels(choices: tuple[bool, ...]) -> None:
    """Let operators choose from the kernels that `kernel_choices` told."""
    setters = (
        torch._C._set_sdp_use_flash,
        torch._C._set_sdp_use_mem_efficient,
        torch._C._set_sdp_use_math,
        torch._C._set_sdp_use_cudnn,
        torch._C._set_mkldnn_enabled,
        torch._C._set_cudnn_enabled,
    )
    for choose, choice in zip(setters, choices, strict=True):
        choose(choice)


def device_of_context() -> torch.device | None:
    """Where new tensors are made that nobody places, if a context or `torch.set_default_device` says so."""
    # `torch.get_default_device` takes 5 us, and asks the modes of a trace as well.
    num_modes = torch._C._len_torch_function_stack()
    for position in reversed(range(num_modes)) if num_modes else ():
        mode = torch._C._get_function_stack_at(position)
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


def can_decompose(op: OpOverload) -> bool:
    """Whether PyTorch itself breaks an operator up (CompositeImplicitAutograd)."""
    return torch._C._dispatch_has_kernel(op.name()) and op._can_decompose()


def is_left_whole_in_inference(func: Any) -> bool:
    """Whether a call is of an operator that eager breaks up, and that modes see whole in inference mode."""
    if not torch.is_inference_mode_enabled() or not is_operator(func) or func.namespace == "prim":
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def makes_views(op: OpOverload) -> bool:
    """Whether autograd sees to it, for an operator as a whole, that what it returns are views."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "ADInplaceOrView")


def broken_up(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """What an operator computes by the operators that eager breaks it up into.

    `OpOverload.decompose` prefers a decomposition in Python, which may copy where eager hands back what it
    was given (`dropout` of a model in evaluation).
    """
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def native_callable(op: OpOverload) -> Callable[..., Any]:
    """The C++ entry of an operator: the whole dispatcher, modes included, without a Python frame.

    1.52 us a call where `OpOverload.__call__` takes 1.97 (`mm` of 4x4). Script-object operators
    choose in Python whether to dispatch there, so they keep their own `__call__`.
    """
    return op._op if type(op).__call__ is OpOverload.__call__ else op


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Patch(Generic[T]):
    """A change of others' functions, made while any thread asks for it; what it does, each thread says.

    Args:
        name: what it is called.
        make: makes the change, or takes it back.
    """

    _lock = threading.Lock()

    def __init__(self, name: str, make: Callable[[bool], None]) -> None:
        self._said: ContextVar[T | None] = ContextVar(name, default=None)
        self._make, self._num_users = make, 0

    @property
    def said(self) -> T | None:
        """What this thread has said, if it asked for the change."""
        return self._said.get()

    @contextmanager
    def made(self, said: T) -> Generator[None]:
        """This thread asks for the change."""
        token = self._said.set(said)
        self._count(+1)
        try:
            yield
        finally:
            self._count(-1)
            self._said.reset(token)

    def _count(self, change: int) -> None:
        with self._lock:
            before, self._num_users = self._num_users, self._num_users + change
            if not before or not self._num_users:
                self._make(bool(self._num_users))


_CONTROL_FLOW = frozenset(
    {
        "torch._higher_order_ops.cond",
        "torch._higher_order_ops.while_loop",
        "torch._higher_order_ops.utils",  # for `scan` and `map`
        "torch.nn.attention.flex_attention",
    }
)


def calling_to_be_traced() -> AbstractContextManager[None]:
    """Functions of PyTorch's that cannot be traced as they are do in this thread what can.

    `torch.cond` and its like call their operators with the functions that they are given; elsewhere they have
    Dynamo trace these first. All of them ask whether Dynamo is at work already, and are told that it is.
    Reentrant checkpoints, which start the autograd engine from within, recompute as the others do. Selective
    ones keep what their policy says and compute the rest again, where they would keep all and tag it.
    """
    return _TRACES.made(True)


def said_to_be_compiling() -> AbstractContextManager[None]:
    """`torch.compiler.is_compiling()` is true; in all threads, as it is while Dynamo is at work."""
    return _replaced(torch.compiler, "_is_compiling_flag", True)


def _hook_calls(tracing: bool) -> None:
    torch.compiler.is_dynamo_compiling = _says_yes_to_control_flow if tracing else _asks_dynamo
    _cond_module().cond_op = _cond_of_trees if tracing else torch.ops.higher_order.cond
    checkpoints: Any = torch.utils.checkpoint
    checkpoints.CheckpointFunction = _Recomputed if tracing else _ReentrantCheckpoint
    checkpoints._is_compiling = _asks_for_tags if tracing else _checkpoint_is_compiling


_TRACES = Patch[bool]("calls_to_be_traced", _hook_calls)


def _asks_for_tags(*args: Any) -> bool:
    return not _TRACES.said and _checkpoint_is_compiling(*args)


class _Recomputed:
    """What stands for `CheckpointFunction` in `torch.utils.checkpoint`."""

    @staticmethod
    def apply(fn: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if not _TRACES.said:
            return _ReentrantCheckpoint.apply(fn, preserve_rng_state, *args)
        if not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            with torch.no_grad():  # as it does: parameters get no gradient then
                return fn(*args)
        return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _cond_module() -> Any:
    from importlib import import_module

    return import_module("torch._higher_order_ops.cond")  # the package has a function of that name


def _cond_of_trees(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any
) -> Any:
    """The operator takes flat operands only; `torch.cond` takes trees, which Dynamo flattens elsewhere."""
    flat, spec = pytree.tree_flatten(tuple(operands))
    if spec == pytree.tree_structure((0,) * len(flat)):
        return torch.ops.higher_order.cond(pred, true_fn, false_fn, operands)

    def flattened(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *leaves: fn(*pytree.tree_unflatten(leaves, spec))

    return torch.ops.higher_order.cond(pred, flattened(true_fn), flattened(false_fn), tuple(flat))


NoteCheck: TypeAlias = Callable[[type[Exception], torch.Tensor, Callable[[], object] | None], bool]
"""Takes what `torch._check_tensor_all_with` is given: an error, a condition, a message; is it seen to?"""

_check_now = torch._check_tensor_all_with


def hearing_of_checks(note: NoteCheck) -> AbstractContextManager[None]:
    """`torch._check_tensor_all` tells `note` in this thread, and checks what that does not see to."""
    return _CHECKS.made(note)


def raise_check(error: type[Exception], message: str | None) -> None:
    """Raise as `torch._check_tensor_all_with` does for what is false."""
    say: Any = None if message is None else lambda: message
    torch._check_with(error, False, say)  # noqa: FBT003


def _hook_checks(hearing: bool) -> None:
    torch._check_tensor_all_with = _tell_of_check if hearing else _check_now


_CHECKS = Patch[NoteCheck]("check_hearers", _hook_checks)


def _tell_of_check(
    error_type: type[Exception], cond: torch.Tensor, message: Callable[[], object] | None = None
) -> None:
    note = _CHECKS.said
    is_condition = isinstance(cond, torch.Tensor) and cond.dtype == torch.bool
    if note is None or not is_condition or not note(error_type, cond, message):
        _check_now(error_type, cond, message)


_swap_bodies = torch._C._swap_tensor_impl


def hearing_of_swaps(hear: Callable[[torch.Tensor, torch.Tensor], None]) -> AbstractContextManager[None]:
    """Where `torch.utils.swap_tensors` would exchange what two tensors are, in this thread, `hear` is called.

    By then its checks are done, and what the two have of their own as Python objects is exchanged already.
    """
    return _SWAPS.made(hear)


def _hook_swaps(hearing: bool) -> None:
    torch._C._swap_tensor_impl = _tell_of_swap if hearing else _swap_bodies


_SWAPS = Patch[Callable[[torch.Tensor, torch.Tensor], None]]("swap_hearers", _hook_swaps)


def _tell_of_swap(first: torch.Tensor, second: torch.Tensor) -> None:
    (_SWAPS.said or _swap_bodies)(first, second)


def swap_attributes(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange what two tensors have of their own as Python objects: class, attributes, slots."""
    slots = copyreg._slotnames(type(first))
    held = [{name: getattr(t, name) for name in slots if hasattr(t, name)} for t in (first, second)]
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    for tensor, before, now in ((first, *held), (second, *reversed(held))):
        for name in before:
            delattr(tensor, name)
        for name, value in now.items():
            setattr(tensor, name, value)


def swap_contents(first: torch.Tensor, second: torch.Tensor) -> None:
    """`torch.utils.swap_tensors` without its checks."""
    swap_attributes(first, second)
    _swap_bodies(first, second)


def swap_histories(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange what autograd knows of two tensors that are the same in all else: history, base, views."""
    _swap_bodies(first, second)


def use_count(tensor: torch.Tensor) -> int:
    """How many hold what a tensor is: its Python object, nodes that saved it, views of it."""
    with torch_functions_off():
        return tensor._use_count()


Remake: TypeAlias = Callable[[torch.Tensor, type[torch.Tensor], Callable[..., torch.Tensor]], Any]
"""Told of a tensor that is to be shown as another class, by what autograd knows of: `alias` or `detach`.

It returns the tensor of that class, or None to let PyTorch make it.
"""
_make_subclass = torch.Tensor._make_subclass


def hearing_of_classes(hear: Remake) -> AbstractContextManager[None]:
    """`hear` is called, in this thread, where a tensor is given another class.

    By `as_subclass`, `_make_subclass` (`nn.Parameter` calls it) or the class itself, called with a tensor.
    None of these is a torch function, so no mode hears of them.
    """
    return _CLASSES.made(hear)


def _hook_classes(hearing: bool) -> None:
    tensor: Any = torch.Tensor
    if hearing:
        tensor.as_subclass, tensor.__new__ = _as_subclass, staticmethod(_of_class)
        tensor._make_subclass = staticmethod(_subclass_of_data)
    else:
        del tensor.as_subclass, tensor.__new__, tensor._make_subclass


_CLASSES = Patch[Remake]("class_hearers", _hook_classes)


def _heard(tensor: torch.Tensor, cls: type[torch.Tensor], op: Callable[..., torch.Tensor]) -> Any:
    hear = _CLASSES.said
    return None if hear is None else hear(tensor, cls, op)


def _as_subclass(tensor: torch.Tensor, cls: type[torch.Tensor]) -> torch.Tensor:
    made = _heard(tensor, cls, torch.ops.aten.alias.default)
    return torch._C.TensorBase.as_subclass(tensor, cls) if made is None else made


def _subclass_of_data(
    cls: type[torch.Tensor], data: torch.Tensor, require_grad: bool = False, **options: Any
) -> torch.Tensor:
    made = None if options else _heard(data, cls, torch.ops.aten.detach.default)
    if made is None:
        return _make_subclass(cls, data, require_grad, **options)
    with class_functions_off():  # a mode hears of it, and notes it
        return made.requires_grad_() if require_grad else made


def _of_class(cls: type[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
        made = _heard(args[0], cls, torch.ops.aten.alias.default)
        if made is not None:
            return made
    return torch._C.TensorBase.__new__(cls, *args, **kwargs)


_asks_dynamo = torch.compiler.is_dynamo_compiling


def _says_yes_to_control_flow() -> bool:
    frame = inspect.currentframe()
    asking = "" if frame is None or frame.f_back is None else frame.f_back.f_globals.get("__name__", "")
    return bool(_TRACES.said and asking in _CONTROL_FLOW) or _asks_dynamo()


def dense_rule(op: HigherOrderOperator) -> Callable[..., Any]:
    """What a higher-order operator does with real tensors: for some, plain calls of other operators."""
    return op.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]


def handle_in_mode(
    op: HigherOrderOperator, mode_type: type[Any], mode: Any, *args: Any, **kwargs: Any
) -> Any:
    """What PyTorch's rule for `op` does in a mode of this type; `mode` may be of a class derived from it."""
    return op.python_key_table[mode_type](mode, *args, **kwargs)


def training_rnn(*args: Any) -> Any:
    """`mkldnn_rnn_layer` with grad mode on: by that it decides what it returns, and how it rounds."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


def inference_rnn(*args: Any) -> Any:
    """`mkldnn_rnn_layer` with grad mode off; see `training_rnn`."""
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


def graph_module(root: torch.nn.Module | dict[str, Any], graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A GraphModule that prints its Python code only when asked: 0.6 s less for 40,000 nodes."""
    return _LazyGraphModule(root, graph)


def no_modes() -> AbstractContextManager[Any]:
    """Every dispatch mode off: real tensors can be inspected in the middle of a trace."""
    return _disable_current_modes()


@contextmanager
def users_modes_off() -> Generator[None]:
    """Dispatch modes of the user's off: what counts operators (`FlopCounterMode`) is not to count a trace's.

    Those that PyTorch traces with (fake tensors) stay, beneath them.
    """
    modes = torch.utils._python_dispatch
    popped: list[Any] = []
    while (count := torch._C._len_torch_dispatch_stack()) > 0:
        if torch._C._get_dispatch_stack_at(count - 1).is_infra_mode():
            break
        popped.append(modes._pop_mode())
    try:
        yield
    finally:
        for mode in reversed(popped):
            modes._push_mode(mode)


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


@contextmanager
def autocast_only(devices: Sequence[tuple[str, torch.dtype]]) -> Generator[None]:
    """Autocast on for these devices, and off for all others."""
    with ExitStack() as stack:
        stack.enter_context(autocast_off())
        for device, dtype in devices:
            stack.enter_context(torch.autocast(device, dtype=dtype))
        yield


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


def hears_of_functions(cls: type[torch.Tensor]) -> bool:
    """Whether a tensor class is told of torch functions, by its own `__torch_function__` or the usual."""
    return cls is not torch.Tensor and cls.__torch_function__ is not torch._C._disabled_torch_function_impl


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


def class_functions_off() -> AbstractContextManager[Any]:
    """No `__torch_function__` of a subclass is called; those of modes are."""
    return torch._C.DisableTorchFunctionSubclass()


def class_functions_on() -> AbstractContextManager[Any]:
    """Every `__torch_function__` is called, whatever was switched off around."""
    return torch._C._EnableTorchFunction()


def class_functions_are_on() -> bool:
    """Whether a `__torch_function__` of a class is called."""
    return torch._C._is_torch_function_enabled()


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


# --- joint: symbolic sizes ------------------------------------------------------------------------

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""The types of numbers that are not known before a call."""


def number_kind(value: Any) -> type[int] | type[float] | None:
    """Whether a value is a whole number or a float, known or not; None if it is neither."""
    if type(value) in (int, torch.SymInt):
        return int
    return float if type(value) in (float, torch.SymFloat) else None


def shape_env() -> ShapeEnv:
    """Keeps symbols, and what a trace decides by them. Equal sizes do not share a symbol: `s0`, `s1`, ..."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    class NumberedShapeEnv(ShapeEnv):
        def _generate_unique_id(self, source_name: str) -> int:
            return len(self.var_to_range)

    return NumberedShapeEnv(
        allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False
    )


def python_kernels() -> AbstractContextManager[None]:
    """Kernels written in Python go before those in C++, some of which make numbers of symbolic sizes."""
    return enable_python_dispatcher()


@contextmanager
def quiet_fakes() -> Generator[None]:
    """Operators that fail on fake tensors raise, and do not log the C++ stack as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def new_symbol(env: ShapeEnv, value: int, place: str) -> torch.SymInt:
    """A symbol that is `value` in this call; `place` says where it is read."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    symbol = env.create_symbol(value, _place(place), dynamic_dim=DimDynamic.DYNAMIC)
    made: Any = env.create_symintnode(symbol, hint=value)
    return made


def new_count(env: ShapeEnv, value: float, place: str) -> torch.SymInt | torch.SymFloat:
    """As `new_symbol`, for a number that is no size: of either sign, zero and one included, or a float."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    symbol = env.create_unspecified_symbol(value, _place(place), DimDynamic.DYNAMIC)
    create = env.create_symfloatnode if isinstance(value, float) else env.create_symintnode
    made: Any = create(symbol, hint=value)
    return made


def _place(text: str) -> Any:
    from torch._guards import GuardSource, Source

    class Place(Source):
        _name_template: str = text  # type: ignore[assignment]
        guard_source: GuardSource = GuardSource.CONSTANT  # type: ignore[assignment]

    return Place()


def expression(value: Any) -> str:
    """A symbolic number as Python source, in terms of `math`, `torch` and symbols."""
    from torch.utils._sympy.printers import PythonPrinter

    return PythonPrinter().doprint(value.node.expr)


def hint(value: Any) -> Any:
    """A number, symbolic or not, as it is in the call that is traced."""
    return value.node.hint if isinstance(value, SYMBOLIC) else value


def surely_equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two sequences of numbers are equal in every call; nothing is decided for symbols."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def spell_number(number: Any, symbols: Mapping[str, torch.fx.Node], graph: torch.fx.Graph) -> Any:
    """Nodes at the graph's insertion point that compute a symbolic number from nodes of the symbols."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    expr = number.node.expr
    if expr.is_number:
        return number.node.hint
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    env: Any = {symbol: torch.fx.Proxy(symbols[str(symbol)], tracer) for symbol in expr.free_symbols}
    node = sympy_interp(PythonReferenceAnalysis, env, expr).node
    for made in graph.nodes:
        if "val" not in made.meta and made.op == "call_function":
            made.meta["val"] = made.target(*torch.fx.node.map_arg(made.args, lambda n: n.meta["val"]))
    return node


def products_of(number: torch.SymInt) -> list[tuple[int, list[torch.SymInt]]]:
    """A symbolic whole number as a sum of products: of each its coefficient, and its factors, maybe none.

    A factor is a symbol, or what is no sum of products of symbols.
    """
    env: Any = number.node.shape_env
    total = env.simplify(number.node.expr).expand(deep=False)
    products: list[tuple[int, list[torch.SymInt]]] = []
    for product, scale in total.as_coefficients_dict().items():
        powers = {base: power for base, power in product.as_powers_dict().items() if base != 1}
        if not (scale.is_Integer and all(power.is_Integer and power > 0 for power in powers.values())):
            return [(1, [number])]
        factors = [env.create_symintnode(base, hint=None) for base in powers for _ in range(powers[base])]
        products.append((int(scale), factors))
    return products


def symbols_in(number: torch.SymInt | torch.SymFloat) -> list[str]:
    """The names of the symbols that a symbolic number is made of."""
    return sorted(map(str, number.node.expr.free_symbols))


def quotient_of(number: torch.SymFloat) -> tuple[float | torch.SymInt, float | torch.SymInt] | None:
    """The two numbers that Python's `/` makes a symbolic one of, each known or whole; None if it does not."""
    from torch.utils._sympy.functions import FloatTrueDiv, IntTrueDiv, ToFloat

    env: Any = number.node.shape_env
    if not isinstance(number.node.expr, FloatTrueDiv | IntTrueDiv):
        return None
    parts: list[Any] = [part.args[0] if isinstance(part, ToFloat) else part for part in number.node.expr.args]
    if not all(part.is_number or part.is_integer for part in parts):
        return None
    left, right = (
        float(part) if part.is_number else env.create_symintnode(part, hint=None) for part in parts
    )
    return left, right


def computes_exactly(number: Any) -> bool:
    """Whether the expression of a symbolic number is computed as Python computed it, to the last bit.

    Whole numbers are. Sums and products of fractions are not: sympy makes one of several, in its own order.
    """
    if isinstance(number, torch.SymInt):
        return True
    return isinstance(number, torch.SymFloat) and _is_exact(number.node.expr)


def _is_exact(expr: Any) -> bool:
    if expr.is_number or expr.is_integer:
        return True
    if expr.is_Add:  # a bias correction, 1 - beta**steps
        first, *rest = expr.args
        is_one = first.is_number and abs(float(first)) == 1
        return is_one and len(rest) == 1 and (_is_exact(rest[0]) or _is_exact(-rest[0]))
    return not expr.is_Symbol and not expr.is_Mul and all(map(_is_exact, expr.args))


def least_of(number: torch.SymInt) -> int | None:
    """The least that a symbolic whole number may be; None if there is no such."""
    env: Any = number.node.shape_env
    lower = env.bound_sympy(number.node.expr).lower
    return int(lower) if lower.is_Integer else None


def marked_dims(tensor: torch.Tensor) -> frozenset[int]:
    """Dimensions that `mark_dims`, or PyTorch's `mark_dynamic`, was called for."""
    return frozenset(getattr(tensor, "_dynamo_dynamic_indices", ()))


_FAST_PATHS = {
    module.forward.__code__ for module in (torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
}


@contextmanager
def fast_paths_on() -> Generator[None]:
    """Let layers of transformers take their fast path in a trace, where eager would.

    They ask whether a tensor hears of torch functions, and in a mode of ours all seem to. The whole encoder
    is told so still: it would make nested tensors of masks.
    """
    asked = torch.overrides.has_torch_function

    def has_torch_function(values: Sequence[Any]) -> bool:
        if sys._getframe(1).f_code not in _FAST_PATHS:
            return asked(values)
        return any(hears_of_functions(type(value)) for value in values if isinstance(value, torch.Tensor))

    torch.overrides.has_torch_function = has_torch_function
    try:
        yield
    finally:
        torch.overrides.has_torch_function = asked


def mark_dims(tensor: torch.Tensor, dims: Collection[int]) -> None:
    """Mark dimensions of a tensor where PyTorch's own front end looks for marks too."""
    vars(tensor)["_dynamo_dynamic_indices"] = {*marked_dims(tensor), *dims}


def guards_of(env: ShapeEnv) -> tuple[list[str], list[str]]:
    """What was decided by symbols, as Python conditions: without what follows from others, and all of it."""
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.printers import PythonPrinter

    doprint = PythonPrinter().doprint
    kept: dict[str, None] = {}
    for symbol, bounds in env.var_to_range.items():
        if symbol in env.replacements:
            kept[f"{symbol} == {doprint(env.replace(symbol))}"] = None
            continue
        if bounds.lower != -int_oo and not bounds.lower.is_infinite:
            kept[f"{bounds.lower} <= {symbol}"] = None
        if bounds.upper != int_oo and not bounds.upper.is_infinite:
            kept[f"{symbol} <= {bounds.upper}"] = None
    for guard in env.guards:
        left = env.replace(guard.expr)
        if str(left) != "True" and str(env.bound_sympy(left).lower) != "True":
            kept[doprint(left)] = None
    return list(kept), list(dict.fromkeys(doprint(guard.expr) for guard in env.guards))


def specialised_at(env: ShapeEnv, symbol: Any) -> str | None:
    """The line where a symbol was found to be one certain number; None if it may still differ."""
    if not symbol.node.expr.is_number:
        return None
    named = symbol.node._expr
    lines = (str(guard.sloc).strip("()") for guard in env.guards if guard.expr.has(named))
    return next(lines, "")


# --- joint: functional tensors, nodes, the backward of a trace ------------------------------------


def fake_of_its_own(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake of `tensor`, on a storage that no other fake has: what tensors share is for traces to say."""
    converter = mode.fake_tensor_converter.meta_converter
    known, converter.storage_memo = converter.storage_memo, WeakValueDictionary()
    try:
        return mode.from_tensor(tensor, static_shapes=True)
    finally:
        converter.storage_memo = known


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
    with torch_functions_off(), no_dispatch():
        if tensor.dtype != other.dtype:
            tensor.data = other
            return
        # `.data =` would make autograd forget the node that takes the gradient of a leaf.
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_COUNTS_WRITES):
            torch.ops.aten.set_.source_Tensor(tensor, other)


_COUNTS_WRITES = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def views_unnoticed() -> AbstractContextManager[Any]:
    """Autograd notes no views in here: what shows all of a new tensor's memory is as good as new."""
    return torch._C._ExcludeDispatchKeyGuard(_COUNTS_WRITES)


def part_of(
    memory: FunctionalTensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
) -> FunctionalTensor:
    """A functional tensor in the memory of a flat one, of which autograd does not know that.

    Where `memory` is bytes and the part something else, `offset` counts bytes. `as_strided` comes first:
    functionalisation writes through it only where no other view comes before.
    """
    with torch.no_grad():
        if dtype == memory.dtype:
            return second_shell(memory.as_strided(size, stride, offset))  # type: ignore[arg-type]
        count = dtype.itemsize
        elements = memory.as_strided((*size, count), (*(step * count for step in stride), 1), offset)
        return second_shell(elements.view(dtype).squeeze(-1))  # type: ignore[arg-type]


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


def memory_of(tensor: torch.Tensor) -> int:
    """A number that two plain tensors, functional or not, share exactly when they share memory."""
    return functional_storage_id(tensor) if isinstance(tensor, FunctionalTensor) else storage_id(tensor)


def is_functional_base(tensor: FunctionalTensor) -> bool:
    """Whether a functional tensor owns its memory, rather than being a view of another."""
    return torch._is_functional_tensor_base(tensor.elem)


@contextmanager
def uncached_fake(tensor: torch.Tensor) -> Generator[None]:
    """The mode of a fake tensor computes every result anew, instead of recalling its sizes and strides."""
    if not isinstance(tensor, FakeTensor):
        yield
        return
    mode = tensor.fake_mode
    cached, mode.cache_enabled = mode.cache_enabled, False
    try:
        yield
    finally:
        mode.cache_enabled = cached


def replace_functional_value(tensor: FunctionalTensor, value: torch.Tensor) -> None:
    """Let a functional tensor that owns its memory hold `value` from now on."""
    torch._functionalize_replace(tensor.elem, value)
    torch._functionalize_commit_update(tensor.elem)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What `torch.func` transforms have wrapped, if they have."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def stands_for_another(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is one of a trace's own: functional (either shell of it) or fake.

    `torch.func` transforms wrap tensors once more; then what is inside tells.
    """
    tensor = unwrapped(tensor)
    if isinstance(tensor, (FunctionalTensor, FakeTensor)) or torch._is_functional_tensor(tensor):
        return True
    return is_disguised(tensor)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a bare fake: a trace shows its own in functional shells only."""
    return isinstance(tensor, FakeTensor)


def mode_of_fake(tensor: torch.Tensor) -> FakeTensorMode | None:
    """The mode of a fake tensor; None of any other."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None


def is_disguised(tensor: torch.Tensor) -> bool:
    """Whether a functional tensor shows the class of another (`aotdist.capture.guise`).

    Operators on it are dispatched in Python, which its class knows nothing of.
    """
    return not dispatches(type(tensor)) and torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


_OWN_ATTRIBUTES = frozenset({"elem", "_inference_mode_base", "_is_param"})


def given_attributes(tensor: FunctionalTensor) -> dict[str, Any]:
    """The attributes that a functional tensor has not from PyTorch, nor from `as_parameter`."""
    return {name: value for name, value in vars(tensor).items() if name not in _OWN_ATTRIBUTES}


def keep_bases_of_views(mode: FunctionalTensorMode, args: Any) -> None:
    """Let `mode` know the memory that an operator in inference mode may make views of.

    It learns of what was made in inference mode; of anything else, torch 2.11 cannot make a view there.
    """
    for arg in pytree.tree_leaves(args):
        if isinstance(arg, FunctionalTensor):
            mode._storage_to_base.setdefault(arg.elem.untyped_storage(), arg)


def unknown_to_the_innermost_tracer(args: Any) -> FunctionalTensor | None:
    """A functional tensor among arguments that the proxy mode which is on has not recorded, if any."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None:
        return None
    tensors = (arg for arg in pytree.tree_leaves(args) if isinstance(arg, FunctionalTensor))
    return next(
        (t for t in tensors if node_of(torch._from_functional_tensor(t.elem), mode.tracer) is None), None
    )


def track(fake: torch.Tensor, node: torch.fx.Node, tracer: PythonKeyTracer) -> None:
    """From now on, `fake` stands for `node` in what `tracer` records."""
    tracer.tensor_tracker[fake] = _ProxyTensor(torch.fx.Proxy(node, tracer), None)


def track_number(number: Any, node: torch.fx.Node, tracer: PythonKeyTracer) -> None:
    """From now on, a symbolic `number` stands for `node` in what PyTorch's own proxy mode records.

    That mode reads a size off the first tensor that it met with it, by a node of its own, unless it is told.
    """
    from torch.fx.experimental.proxy_tensor import thunkify

    tracer.symnode_tracker[number] = thunkify(tracer, lambda: torch.fx.Proxy(node, tracer))


def node_of(fake: torch.Tensor, tracer: PythonKeyTracer) -> torch.fx.Node | None:
    """The node that computed `fake`, or None when it was not recorded."""
    slot = _get_proxy_slot(fake, tracer, None)
    return None if slot is None else slot.proxy.node


def node_here(tensor: torch.Tensor) -> torch.fx.Node:
    """The node that computes the current value of a functional tensor, in what is recorded now."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    assert mode is not None and isinstance(tensor, FunctionalTensor), (
        "a trace runs, and the tensor is its own"
    )
    node = node_of(functional_value(tensor), mode.tracer)
    assert node is not None, "the trace made the tensor"
    return node


def whole_numbers(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments of an operator that are sizes, indices or the like, and not numbers to compute with."""
    schema = func._schema.arguments
    given = [
        *zip(schema, args, strict=False),
        *((arg, kwargs[arg.name]) for arg in schema if arg.name in kwargs),
    ]
    return [value for argument, value in given if _is_whole(argument.type)]


def _is_whole(kind: Any) -> bool:
    if kind.kind() in ("OptionalType", "ListType"):
        return _is_whole(kind.getElementType())
    return kind.kind() in ("IntType", "SymIntType")


def next_sequence_nr() -> int:
    """The number that the next autograd node made by this thread will carry."""
    return torch.autograd._get_sequence_nr()


def takes_gradients_of(tensor: torch.Tensor) -> bool:
    """Whether the node that made a tensor takes a gradient of its sizes.

    The history of a view that was reshaped in place under `no_grad` may be that of before.
    """
    node = tensor.grad_fn
    return node is not None and list(node._input_metadata[tensor.output_nr].shape) == list(tensor.size())


def sequence_nr(node: Any) -> int:
    """The number of an autograd node: no two that one thread makes have the same."""
    return node._sequence_nr()


def running_node() -> tuple[int | None, str]:
    """Sequence number and name of the autograd node whose backward is running; None outside backward."""
    node = torch._C._current_autograd_node()
    return (None, "") if node is None else (node._sequence_nr(), node.name())


def run_backward(
    outs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor | GradientEdge],
    tangents: Sequence[torch.Tensor],
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad(outs, wanted, tangents, allow_unused=True)`, without being a torch function.

    The public one is overridable, so a torch-function mode is popped for as long as it runs.
    """
    return _engine_run_backward(
        tuple(outs), tuple(tangents), retain_graph, create_graph, tuple(wanted), True, accumulate_grad=False
    )


def hear_of_gradient(leaf: torch.Tensor, hook: Callable[[Any], None]) -> Any:
    """`leaf.register_hook(hook)`, without being a torch function."""
    with torch_functions_off():
        return leaf.register_hook(hook)


def run_accumulating_backward(
    outs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
    *,
    retain_graph: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """`run_backward` by way of the `.grad` of leaves, which reentrant checkpoints insist on."""
    _engine_run_backward(tuple(outs), tuple(tangents), retain_graph, False, (), True, accumulate_grad=True)
    with torch_functions_off():  # the mode that traces refuses to read `.grad`
        grads = tuple(leaf.grad for leaf in wanted)
        for leaf in wanted:
            leaf.grad = None
    return grads


def global_module_hooks() -> list[Mapping[int, Callable[..., Any]]]:
    """The hooks that are called for all modules."""
    module = torch.nn.modules.module
    return [
        module._global_forward_hooks,
        module._global_forward_pre_hooks,
        module._global_backward_hooks,
        module._global_backward_pre_hooks,
    ]


REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"
"""What autograd calls a checkpoint with `use_reentrant=True`."""


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


def has_history_of_its_own(tensor: torch.Tensor) -> bool:
    """Whether a tensor that shows the memory of another has a history that replaying views would lose.

    A user's `autograd.Function` made it, or it was written, and autograd does not know it as a view.
    """
    history = history_of(tensor)
    return isinstance(history, torch.autograd.function.BackwardCFunction) or (
        history is not None and not tensor._is_view()
    )


def history_of(tensor: torch.Tensor) -> Any | None:
    """The autograd node that made a tensor, if autograd can tell."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view made under `no_grad`, of a base that was written since
        return None


def is_leaf_with_grad(tensor: torch.Tensor) -> bool:
    """Whether a tensor requires grad and nothing made it; False where autograd cannot tell."""
    try:
        return tensor.requires_grad and tensor.is_leaf
    except RuntimeError:
        return False


def preserved_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Lets writes inside of the context leave the version counter of `tensor` alone."""
    return _unsafe_preserve_version_counter(tensor)


def creation_meta(tensor: torch.Tensor) -> Any:
    """What autograd knows of how a view was made: by which it decides what to say of a write."""
    return torch._C._autograd._get_creation_meta(tensor) if tensor._is_view() else None


def set_creation_meta(tensor: torch.Tensor, creation: Any) -> None:
    """Let autograd know that of a view, if it is one."""
    if creation is not None and tensor._is_view():
        torch._C._autograd._set_creation_meta(tensor, creation)


def custom_functions(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Names of the Python autograd functions in the history of `tensors`, each once."""
    return list(dict.fromkeys(node.name() for node in _custom_nodes(tensors)))


def mixes_gradients(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a Python autograd function is in the history of `tensors` that may tell None from zeros.

    That takes several results; or a list operator after it, which sends None to some functions, and so zeros
    beyond them. One of ours says that it does not by `passes_gradients_on`.
    """
    lists = [node for node in nodes_behind(tensors) if node.name().startswith("Foreach")]
    nodes = [node for node in _custom_nodes(tensors) if len(node._input_metadata) > 1]
    return any(
        node.name() != REENTRANT_CHECKPOINT and not getattr(node._forward_cls, "passes_gradients_on", False)
        for node in (*nodes, *filter(_is_custom, _nodes_from(lists)))
    )


def _custom_nodes(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return list(filter(_is_custom, nodes_behind(tensors)))


def _is_custom(node: Any) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def result_size(tensor: torch.Tensor) -> torch.Size:
    """The size of a tensor when its node made it."""
    return torch.Size(tensor.grad_fn._input_metadata[tensor.output_nr].shape)  # type: ignore[union-attr]


def nodes_behind(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The autograd nodes in the history of `tensors`, each once."""
    return _nodes_from([tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None])


def save_tensors(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a node in the history of `tensors` has saved some, which one backward frees for the next."""
    return any(map(_saves_tensors, nodes_behind(tensors)))


def _saves_tensors(node: Any) -> bool:
    """Read raw: what a checkpoint saved is computed again when it is asked for."""
    for name in _names_of_saved(type(node)):
        raw = getattr(node, name)
        if any(saved.data is not None for saved in (raw if isinstance(raw, tuple) else (raw,))):
            return True
    return False


@functools.cache
def _names_of_saved(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _nodes_from(nodes: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    pending = list(nodes)
    seen = set(pending)
    while pending:
        node = pending.pop()
        found.append(node)
        for source, _ in node.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                pending.append(source)
    return found


def retains_grad(tensor: torch.Tensor) -> bool:
    """Whether a tensor with history keeps its gradient (`retain_grad`)."""
    with torch_functions_off():
        return tensor.retains_grad


def spent_history(tensor: torch.Tensor) -> str | None:
    """What autograd says of a tensor on all of whose ways to leaves it has freed what it saved; else None."""
    said = None
    pending = [] if tensor.grad_fn is None else [tensor.grad_fn]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            return None
        freed = _freed(node)
        said = said or freed
        sources = () if freed else [source for source, _ in node.next_functions if source is not None]
        pending += [source for source in sources if source not in seen]
        seen.update(sources)
    return said


def _freed(node: Any) -> str | None:
    """What autograd says when it is asked for what a node of its own saved, if that was freed."""
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                getattr(node, name)
            except RuntimeError as error:
                return str(error)
    return None


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


def primals_and_values(gm: torch.fx.GraphModule) -> tuple[int, int] | None:
    """The numbers that `call_with_primals_and_tangents` was given for a graph; None if it was not."""
    from torch.fx.graph import _PyTreeCodeGen

    codegen = gm.graph._codegen
    if not isinstance(codegen, _PyTreeCodeGen) or codegen.pytree_info.orig_args != ["primals", "tangents"]:
        return None
    info = codegen.pytree_info
    assert info.out_spec is not None, "a joint graph returns values and gradients"
    return tree_children(info.in_spec)[0].num_leaves, tree_children(info.out_spec)[0].num_leaves


def operator_name(target: Any) -> str | None:
    """What PyTorch's tracer calls a node of this target: `add` for `aten.add.Tensor`; None for others."""
    return target.overloadpacket.__name__ if isinstance(target, OpOverload) else None


# --- codegen: which library runs a collective -----------------------------------------------------


def runs_on_gloo(group_name: Any, device: torch.device) -> bool:
    """Whether collectives of tensors on `device` in this process group are gloo's."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(group_name)._get_backend(device).name() == "gloo"


# --- codegen: marks in the profiler's traces -----------------------------------------------------------


RecordFunctionFast = torch._C._profiler._RecordFunctionFast
"""A mark around what a block runs, in C++: `record_function` takes twenty times as long."""


def is_profiling() -> bool:
    """Whether a profiler of PyTorch's records in this process."""
    return torch.autograd.profiler._is_profiler_enabled


def group_words(group_name: Any) -> str:
    """A process group for a reader: its description, if its maker gave it one, and how many ranks it has."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        group = _resolve_process_group(group_name)
    except (RuntimeError, ValueError):  # it was destroyed since
        return f"group {group_name}"
    description = group.group_desc
    word = f"group {group_name}" if description in ("", "undefined") else description
    return f"{word} ({group.size()} ranks)"


# --- codegen: Inductor ----------------------------------------------------------------------------


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


@contextmanager
def constants_allowed(fake_mode: FakeTensorMode | None) -> Generator[None]:
    """Let operators take the tensors that a graph holds (`torch.tensor([1.0, 2.5])`) beside fake ones."""
    if fake_mode is None:
        yield
        return
    before, fake_mode.allow_non_fake_inputs = fake_mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        fake_mode.allow_non_fake_inputs = before


def inductor_decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """The operators that Inductor has no lowering for, and what they are made of."""
    from torch._inductor.decomposition import select_decomp_table

    table, aten = dict(select_decomp_table()), torch.ops.aten
    for op in (aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default):
        if op in table:
            table[op] = _after_lowerings(table[op])
    return table


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


def another_storage(memory: torch.Tensor) -> torch.UntypedStorage:
    """A storage over the same bytes, which it keeps alive; who holds it can be told from who holds `memory`.

    By DLPack's capsules in 0.7 us; `torch.from_dlpack` asks for streams besides, and takes 15.
    """
    return torch._C._from_dlpack(torch._C._to_dlpack(memory)).untyped_storage()


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """`copy_` for many tensors, in few launches on a GPU."""
    torch._foreach_copy_(targets, sources)


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


def inductor_extensions() -> Iterator[tuple[Any, Any]]:
    """Operators with what Inductor makes of each: PyTorch's own functions, and those that others registered.

    What has not been imported, nobody has added to.
    """
    for module, tables in (
        ("torch._inductor.lowering", ("lowerings",)),
        ("torch._inductor.decomposition", ("decompositions", "extra_random_decomps")),
    ):
        for table in tables if module in sys.modules else ():
            yield from getattr(sys.modules[module], table, {}).items()


def size_of_group(name: str) -> int:
    """How many ranks a process group has, by what PyTorch calls it in this process."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(cast("Any", name)).size()


class CppKernelBatch(Protocol):
    """Takes over the C++ kernels of one generated module."""

    def add(self, argtypes: Sequence[str], source: str) -> Any | None:
        """What the module's global for this kernel shall be; None leaves the kernel to Inductor."""
        ...

    def submit(self, scope: dict[str, Any]) -> None:
        """The module, whose globals are `scope`, has named all its kernels."""
        ...


def cpp_kernels_batched(make_batch: Callable[[], CppKernelBatch]) -> AbstractContextManager[None]:
    """Modules that Inductor generates or loads in this thread meanwhile leave their C++ kernels to batches.

    Generated modules ask `torch._inductor.async_compile.AsyncCompile` for each kernel and then wait
    for all. They look the class up when they run, so a subclass under that name hears both; other
    threads that meet it meanwhile have no batch and get the original's behaviour.
    """
    return _KERNELS.made(make_batch)


def _hook_kernels(batched: bool) -> None:
    from torch._inductor import async_compile

    original, batching = _async_compile_classes()
    async_compile.AsyncCompile = batching if batched else original


_KERNELS = Patch[Callable[[], CppKernelBatch]]("kernel_batches", _hook_kernels)


@functools.cache
def _async_compile_classes() -> tuple[type[Any], type[Any]]:
    from torch._inductor.async_compile import AsyncCompile

    class BatchingCompile(AsyncCompile):
        def __init__(self) -> None:
            super().__init__()
            make_batch = _KERNELS.said
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
    # An order beside strided shards (views make such) says that these are no order; the context forgets that.
    options: dict[str, Any] = {"shard_order": shard_order}
    flag = "use_strided_shard_as_shard_order"
    if shard_order is not None and flag in DTensorSpec.__dataclass_fields__:
        options[flag] = False
    return DTensorSpec(mesh, placements, tensor_meta=metadata, **options)


def with_placements(context: Any, placements: tuple[Any, ...]) -> Any:
    """The flatten context of a DTensor with other placements."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    first, *rest = context
    if isinstance(first, DTensorSpec):
        return (DTensorSpec(first.mesh, placements, tensor_meta=first.tensor_meta), *rest)
    return (placements, *rest)


def retyped_spec(tensor: DTensor, dtype: torch.dtype) -> Any:
    """The spec of a DTensor placed like `tensor`, of another dtype."""
    spec: Any = tensor._spec
    if spec.tensor_meta.dtype == dtype:
        return spec
    return dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))


def make_dtensor(local: torch.Tensor, spec: Any, *, requires_grad: bool = False) -> torch.Tensor:
    """A DTensor without history, without the decorated constructor: 1.1 us instead of 2.4."""
    return torch.Tensor._dtensor__new__(DTensor, local, spec, requires_grad=requires_grad)


_DISPATCHER: Any = DTensor._op_dispatcher
_OWN_HANDLERS = _DISPATCHER._custom_op_handlers
_NUM_OWN_HANDLERS = len(_OWN_HANDLERS)


def dtensor_dispatch() -> Hashable:
    """What contexts (`loss_parallel`, `context_parallel`, `implicit_replication`) make of DTensors.

    About 0.1 us where there is none.
    """
    handlers, implicit = _DISPATCHER._custom_op_handlers, _DISPATCHER._allow_implicit_replication
    if handlers is _OWN_HANDLERS and len(handlers) == _NUM_OWN_HANDLERS:
        return implicit
    return implicit, tuple(handlers.items()), _context_parallel_options()


def _context_parallel_options() -> Hashable:
    """How `context_parallel` goes round the ring, and over which mesh."""
    ring = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if ring is None:
        return None
    attention = torch.nn.functional.scaled_dot_product_attention
    patched = inspect.getclosurevars(attention).nonlocals if inspect.isfunction(attention) else {}
    return patched.get("device_mesh"), *dataclasses.astuple(ring._cp_options)


@contextmanager
def dtensor_traced() -> Generator[None]:
    """Around a trace through operators on DTensors, which keep things, and compute, besides the program."""
    with ExitStack() as stack:
        for context in (_handlers_kept(), _masks_apart(), _shards_measured_aside()):
            stack.enter_context(context)
        yield


@contextmanager
def _handlers_kept() -> Generator[None]:
    """The table of handlers is that of before when the trace is over, however it ends.

    What `loss_parallel` puts there for the backward stays until then: where a program enters it for the
    forward, the backward is to run inside of it too, says its documentation.
    """
    from torch.distributed.tensor.parallel import loss

    handlers = _DISPATCHER._custom_op_handlers
    before = dict(handlers)
    disable = loss._disable_custom_loss_ops

    def disable_for_forward() -> None:
        kept = {op: handlers[op] for op in loss.customized_loss_ops if "backward" in op.name()}
        disable()
        handlers.update(kept)

    with _replaced(loss, "_disable_custom_loss_ops", disable_for_forward):
        try:
            yield
        finally:
            _DISPATCHER._custom_op_handlers = handlers
            handlers.clear()
            handlers.update(before)


@contextmanager
def _masks_apart() -> Generator[None]:
    """Placements remember which rows of a sharded vocabulary are whose; a trace's do so for itself alone."""
    from torch.distributed.tensor.placement_types import _MaskPartial

    before: dict[int, tuple[Any, Any, int]] = {}
    buffer_class = type(_MaskPartial().mask_buffer)
    materialize = buffer_class.materialize_mask

    def materialize_apart(buffer: Any, mask: torch.Tensor) -> None:
        if id(buffer) not in before:
            before[id(buffer)] = buffer, buffer.data, buffer.refcount
            buffer.data, buffer.refcount = None, 0
        materialize(buffer, mask)

    with _replaced(buffer_class, "materialize_mask", materialize_apart):
        try:
            yield
        finally:
            for buffer, data, refcount in before.values():
                buffer.data, buffer.refcount = data, refcount


@contextmanager
def _shards_measured_aside() -> Generator[None]:
    """Sizes and offsets of shards are found, with small tensors of numbers, as if nothing was traced."""
    from torch.distributed.tensor import _utils
    from torch.distributed.tensor.placement_types import _StridedShard

    def aside(measure: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(number, SYMBOLIC) for number in pytree.tree_leaves((args, kwargs))):
                return measure(*args, **kwargs)
            with no_modes(), torch_functions_off():
                return measure(*args, **kwargs)

        return measured

    with ExitStack() as stack:
        for owner, name in (
            (_utils, "_compute_local_shape_and_global_offset"),
            (_StridedShard, "local_shard_size_and_offset"),
        ):
            measure = vars(owner).get(name)
            if inspect.isfunction(measure):  # an inherited one is another kind of method
                stack.enter_context(_replaced(owner, name, aside(measure)))
        yield


def masks_rows(placement: Any) -> bool:
    """Whether the summands of a partial sum are still to be masked by who has the rows of a vocabulary."""
    from torch.distributed.tensor.placement_types import _MaskPartial

    return isinstance(placement, _MaskPartial)


class ObjectsExchangedError(RuntimeError):
    """A traced program sends Python objects to its peers."""


@contextmanager
def no_objects_exchanged() -> Generator[None]:
    """Collectives of Python objects (`all_gather_object`) raise `ObjectsExchangedError`."""
    from torch.distributed import distributed_c10d

    def refuse(*_: Any) -> Any:
        raise ObjectsExchangedError

    with _replaced(distributed_c10d, "_object_to_tensor", refuse):
        yield


def finished(tensor: DTensor) -> DTensor:
    """The same, around a plain tensor where it was around one whose collective still runs."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    local = tensor._local_tensor
    if not isinstance(local, AsyncCollectiveTensor) or tensor.requires_grad:
        return tensor
    return make_dtensor(local.wait(), tensor._spec)  # type: ignore[return-value]


def in_backward() -> bool:
    """Whether the autograd engine is running: a forward inside it is a recomputation (checkpointing)."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(call: Callable[[], None]) -> None:
    """Let the running backward call `call` when it is over, unless it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def hooks_of_gradient(tensor: torch.Tensor) -> Any:
    """What `register_hook` registered, if anything."""
    return tensor._backward_hooks


def with_hooks(positions: Iterable[int], tensors: Sequence[Any]) -> list[int]:
    """Those of the positions whose tensors have hooks of either kind; 0.06 us each."""
    return [k for k in positions if tensors[k]._backward_hooks or tensors[k]._post_accumulate_grad_hooks]


def hooks_after_accumulation(leaf: torch.Tensor) -> Any:
    """What `register_post_accumulate_grad_hook` registered, if anything."""
    return leaf._post_accumulate_grad_hooks


def set_hooks_of_gradient(leaf: torch.Tensor, hooks: Any) -> None:
    """Let what `hooks_of_gradient` returned be called, or nothing if `hooks` is None."""
    leaf._backward_hooks = hooks


def in_thread_of_engine() -> bool:
    """Whether a backward runs in a thread of the autograd engine's own, not in the one that asked for it."""
    return in_backward() and isinstance(threading.current_thread(), threading._DummyThread)


def default_generator_is(generator: torch.Generator) -> AbstractContextManager[None]:
    """`torch.random` seeds `generator` for the default one, and asks it for its state, in this thread.

    In threads of the autograd engine's, too: they run backwards of this one.
    """
    stand_in = _DefaultGenerator(generator, torch.random.default_generator)
    return _replaced(torch.random, "default_generator", stand_in)


class _DefaultGenerator:
    """What stands for the default generator in `torch.random`."""

    def __init__(self, generator: torch.Generator, elsewhere: Any) -> None:
        self._generator, self._elsewhere = generator, elsewhere
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        is_here = threading.get_ident() == self._thread or in_thread_of_engine()
        return getattr(self._generator if is_here else self._elsewhere, name)


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], container: Any) -> Any:
    """`fn` on every tensor that FSDP2 finds in a container: dataclasses, packed sequences too."""
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(fn, container)


def replace_differentiable(
    container: Any, replace: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]
) -> Any:
    """`container` with others in the place of the tensors in it that require grad, as FSDP2 finds them.

    Before torch 2.13 it finds them where pytrees do.
    """
    try:
        from torch.distributed.fsdp._common_utils import collect_grad_tensors, replace_grad_tensors
    except ImportError:
        leaves, spec = pytree.tree_flatten(container)
        found = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
        others = iter(replace(tuple(itertools.compress(leaves, found))))
        mixed = [next(others) if is_one else leaf for leaf, is_one in zip(leaves, found, strict=True)]
        return pytree.tree_unflatten(mixed, spec)
    return replace_grad_tensors(container, iter(replace(collect_grad_tensors(container))))


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


def local_part(tensor: Any) -> Any:
    """What this rank holds of a DTensor; any other tensor itself."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


# --- subclasses: 2:4 sparse -----------------------------------------------------------------------


def cutlass_word_places(words: torch.Tensor) -> torch.Tensor:
    """Where CUTLASS keeps each word of 2:4 metadata. Shapes: (R, W) int16 or int32 -> (R * W,) int64."""
    from torch.sparse._semi_structured_conversions import _calculate_meta_reordering_scatter_offsets

    rows, columns = words.shape
    return _calculate_meta_reordering_scatter_offsets(rows, columns, words.dtype, words.device)


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
    """Whether a `torch.func` transform (`grad`, `vmap`, `jvp`) or forward-mode differentiation is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


class _Node(_SingleLevelFunction):
    """What autograd's nodes of compiled programs are.

    It is not `torch.autograd.Function`, whose `apply` first looks through every argument for what a
    `torch.func` transform left behind: 10 us for 100. A compiled call under a transform does not get as far.
    """

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int]:
        """What tells nodes apart on a tape that is compiled; it runs the backwards of ours as they are."""
        cls = ctx._forward_cls
        if not hasattr(cls.backward, "_torchdynamo_orig_callable"):
            cls.backward = staticmethod(torch.compiler.disable(cls.backward))
        return (ctx._autograd_function_id,)


def node_base() -> type[Any]:
    """The base of autograd's nodes of ours, whose `apply` is C++ alone."""
    return _Node


def keeps_graph() -> bool:
    """Whether the running backward was asked to keep what it saved (`retain_graph=True`)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def failing_in_backward(tensor: torch.Tensor, reason: str) -> torch.Tensor:
    """`tensor` as one that requires grad, and whose backward raises a `RuntimeError`."""
    with torch.enable_grad():
        return torch._C._functions.DelayedError(reason.encode(), 1)(tensor.detach().requires_grad_())


def is_once_differentiable(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether the history of `tensors` ends at a function that is `@once_differentiable`."""
    return any(node.name() == "torch::autograd::Error" for node in nodes_behind(tensors))


def backward_task() -> int:
    """A number for the running backward, different for each."""
    return torch._C._current_graph_task_id()


def runs_in_backward(leaf: torch.Tensor) -> bool:
    """Whether the running backward will accumulate into `leaf`."""
    return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)


def hooks_of(tensor: torch.Tensor) -> Mapping[int, Callable[..., Any]]:
    """The hooks on a tensor with history: those that are there, and those that will be.

    Without keeping the tensor alive: this is what `register_hook` makes for the first hook.
    """
    if tensor.grad_fn is not None and tensor._backward_hooks is None:
        set_hooks(tensor, OrderedDict())
    hooks: Any = tensor._backward_hooks
    return hooks


def set_hooks(tensor: torch.Tensor, hooks: OrderedDict[int, Callable[..., Any]]) -> None:
    """Let `register_hook` put the hooks of a tensor with history here."""
    node = tensor.grad_fn  # that of a view whose base was written is made now, which forgets hooks
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)  # type: ignore[union-attr]


def default_store() -> Store | None:
    """The store that `init_process_group` met in; None where ranks met without one (MPI)."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def group_name_of(group: Any) -> str:
    """The name of a process group as an operator takes it: as an object of TorchScript's."""
    return torch.distributed.ProcessGroup.unbox(group).group_name


def name_of_reduction(reduction: Any) -> str:
    """How functional collectives call a reduction that is an object of TorchScript's: `sum`."""
    return torch.distributed.ReduceOp.RedOpType(reduction.op()).name.lower()


def finished_work() -> Any:
    """What a collective returns that is over."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


def held_process_groups() -> list[tuple[str, tuple[int, ...], str]]:
    """Name, global ranks and backend of each process group of this rank, in the order of creation."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world  # looked up now: tests that run ranks as threads replace it
    return [
        (world.pg_names[group], tuple(sorted(world.pg_group_ranks[group])), backend)
        for group, (backend, _) in world.pg_map.items()
    ]


# --- store: artifacts in files --------------------------------------------------------------------


def fake_world(rank: int, world_size: int) -> AbstractContextManager[None]:
    """A process group without other ranks, whose collectives do nothing; none at all for a world of one."""
    return nullcontext() if world_size == 1 else _fake_world(rank, world_size)


@contextmanager
def _fake_world(rank: int, world_size: int) -> Generator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    _forget_shardings()
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        _forget_shardings()


def _forget_shardings() -> None:
    """Meshes of other ranks are equal, and so DTensor would find the sizes of another rank's shards."""
    _DISPATCHER.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


def hearing_of_autocast(hear: Callable[[], None]) -> AbstractContextManager[None]:
    """Inside, `hear` is called when an autocast is made that is on, for devices that are here or not."""
    make = torch.autocast.__init__

    @functools.wraps(make)
    def heard(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any) -> None:
        if enabled:
            hear()
        make(self, device_type, dtype, enabled, *args)

    return _replaced(torch.autocast, "__init__", heard)


def operator_named(name: str) -> OpOverload | None:
    """The operator of that name (`aten.add.Tensor`); None if there is none.

    Some of those that Inductor breaks others up into are only known once it is imported, in a second.
    """
    namespace, packet, overload = name.split(".")
    for late in (False, True):
        if late and namespace == "prims":
            importlib.import_module("torch._inductor.inductor_prims")
        found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
        if isinstance(found, OpOverload):
            return found
    return None


def mesh_of_context(context: Any) -> DeviceMesh | None:
    """The mesh in the flatten context of a DTensor, before torch 2.13; since then it is an attribute."""
    first = context[0] if isinstance(context, tuple) and context else None
    return getattr(first, "mesh", None)


def parts_of_mesh(mesh: DeviceMesh) -> list[DeviceMesh]:
    """The axes of a mesh of several, as meshes of their own, and the mesh that it is itself a part of."""
    axes = mesh.mesh_dim_names or ()
    parts = [mesh[axis] for axis in axes] if len(axes) > 1 else []
    root: DeviceMesh | None = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else None
    return parts if root is None or root is mesh else [*parts, root]


def world_group_name() -> str | None:
    """The name of the group of all ranks; None where there is none."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    world = torch.distributed.group.WORLD
    return None if world is None else world.group_name


def layout_kinds() -> dict[str, tuple[type[Any], tuple[str, ...]]]:
    """The classes that say how a DTensor is laid out, by name, each with its constructor's arguments."""
    from torch.distributed.tensor import Partial, Replicate, Shard, placement_types
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    fields = ("mesh", "placements", "tensor_meta", "shard_order")
    kinds: dict[str, tuple[type[Any], tuple[str, ...]]] = {
        "Shard": (Shard, ("dim",)),
        "Replicate": (Replicate, ()),
        "Partial": (Partial, ("reduce_op",)),
        "TensorMeta": (TensorMeta, ("shape", "stride", "dtype")),
        "DTensorSpec": (
            DTensorSpec,
            tuple(name for name in fields if name in DTensorSpec.__dataclass_fields__),
        ),
    }
    strided = getattr(placement_types, "_StridedShard", None)
    if strided is not None:
        kinds["_StridedShard"] = (strided, ("dim", "split_factor"))
    try:
        from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
    except ImportError:  # not in every torch has a spec an order of its own
        return kinds
    return kinds | {"ShardOrderEntry": (ShardOrderEntry, ("tensor_dim", "mesh_dims"))}


def tree_of(kind: Any, context: Any, children: list[TreeSpec]) -> TreeSpec:
    """A pytree's structure from its parts; of a leaf, all are empty."""
    return pytree.tree_structure(0) if kind is None else TreeSpec(kind, context, children)


# --- dynamo: what graphs of Dynamo's say of their inputs, and the tape of a backward -------------------


def dynamo_source(placeholder: torch.fx.Node) -> str:
    """Where Dynamo reads an input of a graph (`L['x']`), or an empty string."""
    argument = placeholder.meta.get("grapharg")
    source = None if argument is None else argument.source
    return "" if source is None else source.name


def is_wrapped_number(placeholder: torch.fx.Node) -> bool:
    """Whether an input of a graph of Dynamo's is a Python number that is passed as a tensor."""
    argument = placeholder.meta.get("grapharg")
    return argument is not None and argument.pass_arg_as_tensor


def is_open(size: Any) -> bool:
    """Whether a size is a symbol, and nothing that was found out made a number of it."""
    return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None


def dynamo_locks() -> tuple[threading.RLock, ...]:
    """What a thread holds while Dynamo compiles in it; nothing before Dynamo is loaded."""
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    return () if frames is None else (frames.compile_lock,)


def dynamo_frame() -> str:
    """What Dynamo compiles now: name of the function, number of the frame and of its compilation."""
    from torch._dynamo import external_utils
    from torch._guards import CompileContext

    code = (TracingContext.get_traced_code() or [None])[0]
    number = CompileContext.current_compile_id()
    # Modules of PyTorch's own are called by a function of Dynamo's; tapes are modules made for it.
    name = "forward" if code is None or code.co_filename == external_utils.__file__ else code.co_name
    name = "backward" if name == "forward" and str(number).startswith("!") else name
    return f"{name} [{number}]"


_compilations = itertools.count()


def is_tracing() -> bool:
    """Whether somebody reads PyTorch's structured trace (`TORCH_TRACE` names a folder)."""
    from torch._logging._internal import LazyTraceHandler, trace_log

    # Without a folder a handler is there until the first message, which it is too late to make then.
    unused = (isinstance(one, LazyTraceHandler) and one.root_dir is None for one in trace_log.handlers)
    return not all(unused)


def trace_artifacts(texts: Mapping[str, str]) -> None:
    """Add texts, by name, to PyTorch's structured trace: to what Dynamo compiles now, or as a new frame.

    The graphs of ahead-of-time compilation have names there that `tlparse` knows.
    """
    from torch._guards import CompileContext, CompileId
    from torch._logging import trace_structured

    number = CompileContext.current_compile_id()
    if number is None:
        number = CompileId(frame_id=next(_compilations), frame_compile_id=0)
    for name, text in texts.items():
        payload = functools.partial(str, text)
        if name.endswith("_graph"):
            trace_structured(f"aot_{name}", payload_fn=payload, compile_id=number)
        else:
            facts = functools.partial(dict, name=f"aotdist_{name}", encoding="string")
            trace_structured("artifact", facts, payload_fn=payload, compile_id=number)


def compiling_tapes(
    compiler: Callable[[torch.fx.GraphModule], Any], *, dynamic: bool
) -> AbstractContextManager[None]:
    """Have `compiler` compile the backwards of this thread, each as one graph of what is on the tape.

    Args:
        compiler: from a graph to what is called in its place.
        dynamic: whether one graph serves all sizes.
    """
    from torch._dynamo import compiled_autograd

    return compiled_autograd._enable(compiler, dynamic=dynamic)


def forget_tapes() -> None:
    """Forget the tapes that were compiled."""
    torch._C._dynamo.compiled_autograd.clear_cache()


def tapes_off() -> AbstractContextManager[None]:
    """Backwards run as autograd runs them: a trace is not to be compiled."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled_autograd is None or not compiled_autograd.compiled_autograd_enabled:
        return nullcontext()
    return compiled_autograd._disable()


# --- launch: what the trainer needs ---------------------------------------------------------------


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...]) -> None:
    """Give `mesh` the product of some of its axes as one more, so that DTensor reduces over them at once."""
    mesh[axes]._flatten("_".join(axes))


def record_memory_history(enabled: bool) -> None:
    """Begin, or end, to note where a GPU's memory is taken."""
    torch.cuda.memory._record_memory_history(enabled="all" if enabled else None)


def dump_memory_snapshot(path: Path) -> None:
    """Write what was noted, for PyTorch's memory viewer."""
    torch.cuda.memory._dump_snapshot(str(path))


# --- step: what optimizers and scalers keep to themselves -----------------------------------------


def scaler_state(scaler: torch.amp.GradScaler) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale, and how many steps in a row did not overflow."""
    assert scaler._scale is not None and scaler._growth_tracker is not None, "the scaler has scaled a loss"
    return scaler._scale, scaler._growth_tracker


def has_scaled(scaler: torch.amp.GradScaler) -> bool:
    """Whether a scaler has scaled a loss: its tensors are made then."""
    return scaler._scale is not None


def takes_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer unscales gradients, and skips steps, by itself."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether there are hooks of an optimizer's step, its own or of all optimizers."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Let learning-rate schedulers know that a step was done: they warn where none was."""
    optimizer._opt_called = True
