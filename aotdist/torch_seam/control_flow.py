"""Functions of PyTorch that behave differently when traced: control flow, checkpoints, fast paths."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction as _ReentrantCheckpoint
from torch.utils.checkpoint import _CachedTorchDispatchMode as _Recomputing
from torch.utils.checkpoint import checkpoint

from aotdist.torch_seam.autograd import Region, is_read_otherwise, next_sequence_nr
from aotdist.torch_seam.classes import overrides_torch_functions
from aotdist.torch_seam.patches import Patch, all_replaced_here, caller_of_replaced, replaced_here
from aotdist.torch_seam.trees import pytree

_CONTROL_FLOW = frozenset(
    {
        "torch._higher_order_ops.cond",
        "torch._higher_order_ops.while_loop",  # refused, by the line that calls it
        "torch._higher_order_ops.utils",  # for `scan` and `map`
        "torch.nn.attention.flex_attention",
    }
)


def calling_to_be_traced() -> AbstractContextManager[None]:
    """In this context and thread, `torch.cond` and the like, and selective checkpoints, can be traced.

    `torch.cond` has Dynamo trace its branches unless Dynamo is tracing already; here it is told so, and calls
    its operator with the branches themselves. Selective checkpoints save what their policy says and recompute
    the rest whenever the trace runs the backward; under a compiler they would save everything, with tags.
    """
    return all_replaced_here(
        (torch.compiler, "is_dynamo_compiling", _says_yes_to_control_flow),
        (_cond_module(), "cond_op", _cond_of_trees),
        (torch.utils.checkpoint, "_is_compiling", lambda *_: False),
        (_Recomputing, "__enter__", _takes_of_a_copy),
    )


def recomputing_reentrant_checkpoints() -> AbstractContextManager[None]:
    """In this context and thread, reentrant checkpoints recompute as others do; see `hands_out_more`.

    By themselves they call the autograd engine in a backward.
    """
    return _RECOMPUTES.applied([])


def hands_out_more(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether `tensors` depend on values inside of a reentrant checkpoint besides its results.

    In eager only the results of such a checkpoint have a history.
    """
    regions = _RECOMPUTES.value
    return bool(regions) and is_read_otherwise(tensors, regions)


def intercept_checkpoints(call: Callable[..., Any]) -> AbstractContextManager[None]:
    """In this context and thread, `checkpoint(*args, **kwargs)` runs as `call(run, *args, **kwargs)`.

    Users hold the function by other names. It asks the one beneath it for what Dynamo made of that.
    """
    return replaced_here(_beneath_checkpoint(), "__dynamo_disable", call)


@functools.cache
def _beneath_checkpoint() -> Any:
    fn = inspect.unwrap(checkpoint)
    if not hasattr(fn, "__dynamo_disable"):  # it is made, and Dynamo imported, when a checkpoint is first run
        disabled = functools.cache(lambda: torch._dynamo.disable(fn, wrapping=False))
        fn.__dynamo_disable = lambda *args, **kwargs: disabled()(*args, **kwargs)
    return fn


def said_to_be_compiling() -> AbstractContextManager[None]:
    """`torch.compiler.is_compiling()` is true in this thread."""
    return _SAID_TO_COMPILE.applied(True)


class _CompilesHere:
    """The flag behind `is_compiling`: true in threads that are said to compile, in others what it was."""

    def __bool__(self) -> bool:
        return bool(_SAID_TO_COMPILE.value or _SAID_TO_COMPILE.original(torch.compiler, "_is_compiling_flag"))


def _flag_as_bool() -> bool:
    """The code of `is_compiling` meanwhile, in the scope of that: what it returns is combined by `|`, too."""
    return bool(_is_compiling_flag)  # type: ignore[name-defined]  # noqa: F821


_SAID_TO_COMPILE = Patch[bool](
    "said_to_compile",
    lambda: [
        (torch.compiler, "_is_compiling_flag", _CompilesHere()),
        (torch.compiler.is_compiling, "__code__", _flag_as_bool.__code__),
    ],
)
_RECOMPUTES = Patch[list[Region]](
    "recomputes", lambda: [(_ReentrantCheckpoint, "apply", staticmethod(_recomputed))]
)


def _takes_of_a_copy(enter: Callable[..., Any], recomputing: Any) -> Any:
    """Reading what a selective checkpoint saved consumes it: give each backward a copy."""
    saved = vars(recomputing).setdefault("_all_saved", recomputing.storage)
    recomputing.storage = {key: copy.copy(found) for key, found in saved.items()}
    return enter(recomputing)


def _recomputed(fn: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Replaces the `apply` of reentrant checkpoints."""
    regions = _RECOMPUTES.value
    if regions is None:
        return _RECOMPUTES.original(_ReentrantCheckpoint, "apply")(fn, preserve_rng_state, *args)
    if not any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        with torch.no_grad():  # as a reentrant checkpoint does: parameters get no gradient then
            return fn(*args)
    first = next_sequence_nr()
    found = checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
    results = found if isinstance(found, tuple) else (found,)
    histories = [(one.grad_fn, one.output_nr) for one in results if isinstance(one, torch.Tensor)]
    regions.append((range(first, next_sequence_nr()), frozenset(histories)))
    return found


def _cond_module() -> Any:
    from importlib import import_module

    return import_module("torch._higher_order_ops.cond")  # the package has a function of that name


def _cond_of_trees(
    cond: Any, pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any
) -> Any:
    """The operator takes flat operands only; `torch.cond` takes trees, which Dynamo flattens elsewhere."""
    flat, spec = pytree.tree_flatten(tuple(operands))
    if spec == pytree.tree_structure((0,) * len(flat)):
        return cond(pred, true_fn, false_fn, operands)

    def flattened(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *leaves: fn(*pytree.tree_unflatten(leaves, spec))

    return cond(pred, flattened(true_fn), flattened(false_fn), tuple(flat))


def _says_yes_to_control_flow(is_dynamo_compiling: Callable[[], bool]) -> bool:
    return caller_of_replaced().f_globals.get("__name__") in _CONTROL_FLOW or is_dynamo_compiling()


_FAST_PATHS = {
    torch.nn.TransformerEncoder.forward.__code__,
    torch.nn.TransformerEncoderLayer.forward.__code__,
    torch.nn.MultiheadAttention.forward.__code__,
}

PACK_SEQUENCE: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch._VF._pack_padded_sequence
PAD_SEQUENCE: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch._VF._pad_packed_sequence
"""What `pack_padded_sequence` and `pad_packed_sequence` call."""

IS_LEFT_ALIGNED = torch._nested_tensor_from_mask_left_aligned
PACK = torch._nested_tensor_from_mask
"""`nn.TransformerEncoder`: its test before it packs a padded batch, and its packing."""


def fast_paths_on() -> AbstractContextManager[None]:
    """Let `nn.TransformerEncoder` and its layers take their fast path in a trace, where eager would.

    They ask whether a tensor overrides torch functions, and in a mode of ours all seem to.
    """

    def has_torch_function(asked: Callable[..., bool], values: Sequence[Any]) -> bool:
        if caller_of_replaced().f_code not in _FAST_PATHS:
            return asked(values)
        return any(
            overrides_torch_functions(type(value)) for value in values if isinstance(value, torch.Tensor)
        )

    return replaced_here(torch.overrides, "has_torch_function", has_torch_function)
