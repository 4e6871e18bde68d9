"""Fake tensors, which have no data, and functional ones, whose writes are recorded."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._ops import OpOverload

# Tensors without data, and what they raise when data is asked for.
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException

# Tensors whose writes are recorded.
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode
from torch._subclasses.functional_tensor import _detect_infra_mode
from torch.utils._mode_utils import no_dispatch

from aotdist.torch_seam.classes import CACHED_SIZES
from aotdist.torch_seam.modes import torch_functions_off, unrecorded_numbers
from aotdist.torch_seam.patches import replaced, replaced_here
from aotdist.torch_seam.symbols import depends_on_data
from aotdist.torch_seam.tensors import storage_id, unwrapped
from aotdist.torch_seam.trees import pytree

_META = torch.device("meta")
_NOTHING = nullcontext()
_COUNTS_WRITES = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def quiet_fakes() -> AbstractContextManager[None]:
    """Operators that fail on fake tensors in this thread raise, and do not log the C++ stack as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    return replaced_here(logger, "isEnabledFor", lambda is_enabled, level: False)


def fake_of_its_own(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake of `tensor` with a storage of its own: which tensors share memory is decided by the trace.

    A dense tensor takes 10 us, any other 300.
    """
    if (memory := _memory_of_dense(tensor)) is not None:
        size, stride, offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return new_fake(mode, size, stride, tensor.dtype, tensor.device, offset=offset, num_bytes=memory)
    converter = mode.fake_tensor_converter.meta_converter
    with replaced(converter, "storage_memo", WeakValueDictionary()):
        return mode.from_tensor(tensor, static_shapes=True)


def _memory_of_dense(tensor: torch.Tensor) -> int | None:
    """Size in bytes of the storage of a dense tensor of ordinary bits; None for any other."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    if not is_plain or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
        return None
    memory = tensor.untyped_storage().nbytes()
    return memory if memory >= tensor.nbytes else None  # FSDP2 takes the memory of a parameter away


def fake_on(fake: FakeTensor, device: torch.device) -> FakeTensor:
    """A fake on another device."""
    return new_fake(fake.fake_mode, fake.shape, fake.stride(), fake.dtype, device)


@contextmanager
def below_modes() -> Generator[None]:
    """Neither modes nor subclasses see what is computed in this context; to enter it takes 2 us."""
    with torch_functions_off(), torch._C._DisableTorchDispatch():
        yield


def new_fake_below_modes(
    mode: FakeTensorMode,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    offset: int = 0,
    num_bytes: int | None = None,
    memory: torch.UntypedStorage | None = None,
) -> FakeTensor:
    """A dense fake, in 7 us, where `torch.empty_strided` in a fake mode takes 90.

    It is made beneath autograd, which a build of PyTorch may lack for the device.

    Args:
        mode: whose fake it is.
        size: sizes, in elements.
        stride: strides, in elements.
        dtype: of its elements.
        device: that it claims to be on.
        offset: where it begins in its storage, in elements.
        num_bytes: size of a storage of its own, in bytes; as large as need be, if not given.
        memory: a storage that it lies in; one of its own, if not given.
    """
    meta = torch.empty_strided(size, stride, dtype=dtype, device=_META)
    if memory is None:
        own = meta.untyped_storage().nbytes()
        if comparable(offset) == 0 and (num_bytes is None or comparable(num_bytes) == comparable(own)):
            return _fake_of(mode, meta, device)
        room = own + offset * dtype.itemsize if num_bytes is None else num_bytes
        memory = torch.empty(room, dtype=torch.uint8, device=_META).untyped_storage()
    meta.set_(memory, offset, size, stride)
    return _fake_of(mode, meta, device)


new_fake = below_modes()(new_fake_below_modes)
"""The same in any mode."""


def _fake_of(mode: FakeTensorMode, meta: torch.Tensor, device: torch.device) -> FakeTensor:
    """`FakeTensor(mode, meta, device)` in 3 us instead of 12, from the second of a device on."""
    states = vars(mode).setdefault("states_of_fakes", {})
    state = states.get(device)
    if state is None:
        fake = FakeTensor(mode, meta, device)
        states[device] = dict(vars(fake))
        return fake
    fake = torch._C.TensorBase._make_subclass(  # which no patch of `torch.Tensor` replaces
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(state)
    return fake


@dataclass(frozen=True, slots=True)
class Symbolic:
    """A symbolic size, equal to others of the same expression: to compare these themselves is a guard.

    Args:
        expression: of sympy's.
        number: the size.
    """

    expression: Any
    number: torch.SymInt = field(compare=False)


Number = int | Symbolic
"""A size that can be compared."""


def comparable(size: int | torch.SymInt) -> Number:
    """A size as something to compare and hash."""
    return Symbolic(size.node.expr, size) if isinstance(size, torch.SymInt) else size


def number_of(size: Number) -> Any:
    """The size that was made `comparable`."""
    return size.number if isinstance(size, Symbolic) else size


@dataclass(frozen=True, slots=True)
class FakeMetadata:
    """The metadata of a dense fake: all that decides what operators make of it.

    Args:
        size: sizes, in elements.
        stride: strides, in elements.
        offset: where it begins in its storage, in elements.
        memory: size of the storage, in bytes.
        dtype: of its elements.
        device: that it claims to be on.
        keys: its dispatch keys, as bits; they include those of conjugates and of inference mode.
        symbols: those of its numbers that are symbolic.
    """

    size: tuple[Number, ...]
    stride: tuple[Number, ...]
    offset: Number
    memory: Number
    dtype: torch.dtype
    device: torch.device
    keys: int
    symbols: tuple[torch.SymInt, ...] = field(compare=False)

    @classmethod
    def of(cls, fake: FakeTensor) -> FakeMetadata | None:
        """The metadata of a fake; None if they do not describe it, or if its size depends on data."""
        if fake.constant is not None or fake.layout is not torch.strided or fake.requires_grad:
            return None
        size, stride = tuple(map(comparable, fake.size())), tuple(map(comparable, fake.stride()))
        offset, memory = comparable(fake.storage_offset()), comparable(fake.untyped_storage().nbytes())
        keys = torch._C._dispatch_keys(fake).raw_repr()
        numbers = (*size, *stride, offset, memory)
        symbols = tuple(number.number for number in numbers if isinstance(number, Symbolic))
        if any(map(depends_on_data, symbols)):
            return None
        return cls(size, stride, offset, memory, fake.dtype, fake.fake_device, keys, symbols)

    def made_below_modes(self, mode: FakeTensorMode, owner: torch.Tensor | None) -> FakeTensor:
        """A fake with these metadata, in new memory or in that of `owner`."""
        numbers: Any = self.size, self.stride, self.offset, self.memory
        if self.symbols:
            size, stride, *others = numbers
            numbers = [*map(number_of, size)], [*map(number_of, stride)], *map(number_of, others)
        size, stride, offset, num_bytes = numbers
        memory = None if owner is None else owner.untyped_storage()
        own = mode, size, stride, self.dtype, self.device
        with unrecorded_numbers() if self.symbols else _NOTHING:
            return new_fake_below_modes(*own, offset=offset, num_bytes=num_bytes, memory=memory)

    made = below_modes()(made_below_modes)


def may_be_made_anew(mode: FakeTensorMode) -> bool:
    """Whether a mode's fakes are described by their metadata: it computes no real tensors along with them."""
    return mode.cache_enabled and not (mode.cache_crosscheck_enabled or mode.propagate_real_tensors)


def functional(fake: torch.Tensor, mode: FunctionalTensorMode) -> FunctionalTensor:
    """A functional tensor around `fake`, of no history: writes to it are recorded, and never reach `fake`.

    `FunctionalTensor.to_functional` takes 300 us, this 20: it is made below all modes.
    """
    with torch._C._DisableTorchDispatch():
        return FunctionalTensor(torch._to_functional_tensor(fake), mode)


def functional_results(mode: FunctionalTensorMode, result: Any) -> Any:
    """A functional operator's result, a fake or several, each in a functional tensor."""
    if isinstance(result, torch.Tensor):
        return functional(result, mode)
    if isinstance(result, (list, tuple)):
        return type(result)([functional_results(mode, one) for one in result])
    return result


def functional_of_one(
    mode: FunctionalTensorMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What functionalisation's rule for an operator of one tensor gives: a view of that, or several.

    PyTorch's mode asks twenty questions first, of which `is_of_one_tensor` knows the answers.
    """
    given, key = args[0], torch._C.DispatchKey.Functionalize
    torch._sync(given)
    include = torch._C._dispatch_tls_local_include_set() | torch._C.DispatchKeySet(key)
    exclude = torch._C._dispatch_tls_local_exclude_set().remove(key) - FunctionalTensor._extra_dispatch_keys
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        before = torch._functionalize_enable_reapply_views(True)
        try:
            made = func._op_dk(key, given.elem, *args[1:], **kwargs)
        finally:
            torch._functionalize_enable_reapply_views(before)
    results = [FunctionalTensor(one, mode) for one in (made if isinstance(made, (list, tuple)) else (made,))]
    if func.is_view:
        for view in results:
            torch._functionalize_unsafe_set(view, given)
    return type(made)(results) if isinstance(made, (list, tuple)) else results[0]


def second_shell(tensor: FunctionalTensor) -> FunctionalTensor:
    """Another functional tensor of the same memory, which autograd does not take for a view."""
    mode = _detect_infra_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    assert mode is not None, "functional tensors are made under their mode"
    with torch._C._DisableTorchDispatch():
        return FunctionalTensor(tensor.elem, mode)


def rebind(tensor: FunctionalTensor, other: FunctionalTensor) -> None:
    """Let `tensor` have the memory, sizes and strides of `other`; its history and version counter stay.

    PyTorch's `set_` of these takes no symbols for sizes.
    """
    tensor.elem = other.elem
    with torch_functions_off(), no_dispatch():
        if tensor.dtype != other.dtype:
            tensor.data = other
            return
        # `.data =` would make autograd forget the node that takes the gradient of a leaf.
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(_COUNTS_WRITES):
            torch.ops.aten.set_.source_Tensor(tensor, other)


def views_unnoticed() -> AbstractContextManager[Any]:
    """In this context autograd notes no views: one that shows all of a new tensor is as good as new."""
    return torch._C._ExcludeDispatchKeyGuard(_COUNTS_WRITES)


def part_of(
    memory: FunctionalTensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> FunctionalTensor:
    """A functional tensor in the memory of a flat one, which autograd does not take for a view."""
    return second_shell(memory.as_strided(size, stride, offset))  # type: ignore[arg-type]


def made_again(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The view of `base` that `view` is of its own base."""
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


def uncached_fake(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """In this context, the mode of a fake tensor does not use its cache of results."""
    is_cached = isinstance(tensor, FakeTensor)
    return replaced(tensor.fake_mode, "cache_enabled", False) if is_cached else nullcontext()


def replace_functional_value(tensor: FunctionalTensor, value: torch.Tensor) -> None:
    """Let a functional tensor that owns its memory hold `value` from now on."""
    torch._functionalize_replace(tensor.elem, value)
    torch._functionalize_commit_update(tensor.elem)


def stands_for_another(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is one of a trace's own: functional (either shell of it) or fake.

    Where `torch.func` transforms have wrapped it, the tensor inside of the wrappers decides.
    """
    tensor = unwrapped(tensor)
    return isinstance(tensor, (FunctionalTensor, FakeTensor)) or torch._is_functional_tensor(tensor)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a bare fake: those of a trace appear inside of functional tensors only."""
    return isinstance(tensor, FakeTensor)


def mode_of_fake(tensor: torch.Tensor) -> FakeTensorMode | None:
    """The mode of a fake tensor; None for any other."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None


def let_be_of(tensor: FunctionalTensor, cls: type[torch.Tensor]) -> None:
    """Make a functional tensor an instance of a user's class as well, with its methods and properties."""
    tensor.__class__ = type(cls.__name__, (FunctionalTensor, cls), {})


_OWN_ATTRIBUTES = CACHED_SIZES | {"elem", "_inference_mode_base", "_is_param"}


def given_attributes(tensor: FunctionalTensor) -> dict[str, Any]:
    """The attributes of a functional tensor that neither PyTorch nor `as_parameter` set."""
    return {name: value for name, value in vars(tensor).items() if name not in _OWN_ATTRIBUTES}


def keep_bases_of_views(mode: FunctionalTensorMode, args: Any) -> None:
    """Let `mode` know the bases of which an operator in inference mode may make views.

    It knows of tensors that were made in inference mode; torch 2.11 cannot make views of others there.
    """
    for arg in pytree.tree_leaves(args):
        if isinstance(arg, FunctionalTensor):
            mode._storage_to_base.setdefault(arg.elem.untyped_storage(), arg)
