"""Operators that PyTorch's functionalisation refuses, or runs in another way than eager.

- *Fused optimizer steps* (`_fused_adamw_`) fail for their empty lists. Their functional variants return new
  tensors, which are written where the step would have written them.
- *Batch norms of GPUs* (cuDNN's, MIOpen's, and what `SyncBatchNorm` gathers statistics with) write running
  statistics without saying so in their schemas. Each has a twin here that returns the new ones.
- *Writes with symbolic sizes* are run on meta tensors first, to find wrong shapes, and many fail there:
  `clamp_`, and all that promote 16-bit floats. They are done by the functional twin.
- *Binary cross entropies* of logits of 16 bits and labels of 32 have a gradient that eager computes in place,
  in 16 bits; where writes are to be seen, PyTorch computes it in 32.
- *Products in place* of 16 bits and a number round that first, on a CPU, and functional ones do not.
- *Averages over all pixels* become channels-last by `as_strided_`: here, by a copy.
- *Random masks* are drawn in the order of memory, which a functional operator does not keep.
- *Lists of tensors* are written one after the other, so each may show what was written before.

Each correction is called with the functionalisation mode on, as `instead(operator, *arguments)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from aotdist.aliasing.memory import by_stride
from aotdist.sizes import is_symbolic
from aotdist.torch_seam.functional import (
    FunctionalTensor,
    functional_storage_id,
    functional_value,
    replace_functional_value,
)
from aotdist.torch_seam.modes import under_transform
from aotdist.torch_seam.operators import (
    OpOverload,
    argument_names,
    cached_by_operator,
    functional_twin,
    schema_of,
    suggest_memory_format,
    with_defaults,
    writes_arguments,
    written_arguments,
)
from aotdist.torch_seam.symbols import are_equal
from aotdist.trace.failures import refusal

_ATEN = torch.ops.aten
_LIBRARY = torch.library.Library("aotdist", "FRAGMENT")
_SCALED = ("grad_scale", "found_inf")
_RUNNING = ("running_mean", "running_var")
_BROKEN_UP = _ATEN._native_batch_norm_legit_functional.default
"""An operator that compilers decompose, with the results of MIOpen's twin."""


def _step(func: OpOverload, *args: Any, **kwargs: Any) -> None:
    """Do an optimizer's fused step by its functional variant, and write the results."""
    results = _TWIN_OF_STEP[func](*args, **kwargs)
    for (position, name), new in zip(written_arguments(func), results, strict=True):
        # Gradients are written only where they are unscaled on the way.
        if name != "grads" or any(kwargs.get(scaled) is not None for scaled in _SCALED):
            for target, value in zip(args[position], new, strict=True):
                target.copy_(value)


def _steps() -> list[OpOverload]:
    packets = (getattr(torch.ops.aten, f"_fused_{name}_") for name in ("adam", "adamw", "sgd", "adagrad"))
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


_TWIN_OF_STEP = {step: twin for step in _steps() if (twin := functional_twin(step)) is not None}
STEPS: Mapping[Any, Callable[..., Any]] = dict.fromkeys(_TWIN_OF_STEP, _step)
"""What is called for fused steps."""


def _norm_twin(op: OpOverload) -> OpOverload:
    """The operator with two more results: the new running mean, and the new running variance."""
    names = argument_names(op)
    at = [names.index(name) for name in _RUNNING]

    def run(*args: Any) -> tuple[Tensor, ...]:
        given = list(args)
        for position in at:
            given[position] = args[position].clone()
        return (*op(*given), *(given[position] for position in at))

    name = f"{op.name().removeprefix('aten::')}_functional"
    arguments, _, results = schema_of(op).partition("(")[2].rpartition(") -> (")
    _LIBRARY.define(f"{name}({arguments}) -> ({results.removesuffix(')')}, Tensor, Tensor)")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"aotdist::{name}", run, lib=_LIBRARY)
    return getattr(torch.ops.aotdist, name).default


_TWIN_OF_NORM: Mapping[OpOverload, OpOverload] = {
    op: _norm_twin(op)
    for op in (
        _ATEN.cudnn_batch_norm.default,
        _ATEN.miopen_batch_norm.default,
        _ATEN.batch_norm_gather_stats.default,
        _ATEN.batch_norm_gather_stats_with_counts.default,
    )
}


def _norm(func: OpOverload, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """A batch norm, with what it writes as results that are written."""
    given = {**dict(zip(argument_names(func), args, strict=False)), **kwargs}  # there are no defaults
    running = [given[name] for name in _RUNNING]
    if not given.get("training", True) or running[0] is None:
        return NotImplemented
    *results, mean, variance = _TWIN_OF_NORM[func](*given.values())
    for statistic, new in zip(running, (mean, variance), strict=True):
        statistic.copy_(new)
    return tuple(results)


NORMS: Mapping[Any, Callable[..., Any]] = dict.fromkeys(_TWIN_OF_NORM, _norm)
"""What is called for batch norms of GPUs."""


def _as_cudnn(*args: Any) -> tuple[Tensor, ...]:
    """The same, and the workspace that cuDNN's backward takes."""
    out, mean, deviation, *new = _BROKEN_UP(*args)
    return out, mean, deviation, out.new_empty((0,), dtype=torch.uint8), *new


def _multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """The loss, and which classes are labels; PyTorch's own takes class 0 for each that is missing."""
    rows, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = torch.arange(rows.shape[1], device=x.device)
    is_label = classes < torch.where(labels < 0, classes, rows.shape[1]).amin(-1, keepdim=True)
    chosen = torch.where(is_label, labels, 0)
    is_target = ((classes[:, None] == chosen[:, None]) & is_label[:, None]).any(-1)
    margins = (1 - rows.gather(1, chosen)[:, :, None] + rows[:, None]).clamp_min(0)
    counts = is_label[:, :, None] & ~is_target[:, None]
    losses = torch.where(counts, margins, 0).sum((1, 2)) / rows.shape[1]
    if reduction != 0:
        losses = losses.mean() if reduction == 1 else losses.sum()
    return losses.reshape(target.shape[:-1] if reduction == 0 else ()), is_target.to(x.dtype).reshape(x.shape)


MADE_OF: Mapping[OpOverload, Callable[..., Any]] = {
    _ATEN.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    _TWIN_OF_NORM[_ATEN.cudnn_batch_norm.default]: _as_cudnn,
    _TWIN_OF_NORM[_ATEN.miopen_batch_norm.default]: _BROKEN_UP,
}
"""Decompositions for compilers: of these batch norms, and of one that is wrong in PyTorch's table."""


HALVES = frozenset({torch.float16, torch.bfloat16})
ROUNDING = (_ATEN.mul_.Scalar, _ATEN._foreach_mul_.Scalar, _ATEN._foreach_mul_.ScalarList)
"""Products in place that round a number to the 16 bits of the tensor first, on a CPU (torch 2.13): the same
products that are not in place do not."""


def _product(func: OpOverload, tensors: Any, numbers: Any) -> Any:
    """Multiply in place by numbers in tensors, which are rounded; `NotImplemented` where none is."""
    listed = [tensors] if isinstance(tensors, Tensor) else tensors
    each = numbers if isinstance(numbers, (list, tuple)) else [numbers] * len(listed)
    on_cpu = all(tensor.is_floating_point() and tensor.device.type == "cpu" for tensor in listed)
    if not on_cpu or HALVES.isdisjoint(tensor.dtype for tensor in listed):
        return NotImplemented
    factors = [
        torch.scalar_tensor(number, dtype=tensor.dtype) for tensor, number in zip(listed, each, strict=True)
    ]
    return (
        tensors.mul_(*factors) if isinstance(tensors, Tensor) else _ATEN._foreach_mul_.List(tensors, factors)
    )


PRODUCTS: Mapping[Any, Callable[..., Any]] = dict.fromkeys(ROUNDING, _product)
"""What is called for these."""


@cached_by_operator
def is_list_write(func: Any) -> bool:
    """Whether an operator writes lists of tensors."""
    return func.name().startswith("aten::_foreach_") and writes_arguments(func)


def one_by_one(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Write one tensor of a list after the other, where some of the tensors share memory."""
    items = [item for arg in args if isinstance(arg, list) for item in arg]
    memory = [functional_storage_id(item) for item in items if isinstance(item, FunctionalTensor)]
    if len(args[0]) == 1 or len(set(memory)) == len(memory):
        return NotImplemented
    for position in range(len(args[0])):
        func(*([arg[position : position + 1] if isinstance(arg, list) else arg for arg in args]), **kwargs)
    return None


def has_twin(func: Any) -> bool:
    """Whether an operator writes its first argument, and has a functional twin."""
    return functional_twin(func) is not None


def with_twin(func: OpOverload, *args: Any, **kwargs: Any) -> Tensor:
    """Let the first argument, of a symbolic size, hold what the functional twin computes."""
    target, twin = args[0], functional_twin(func)
    shapes = [value.shape for value in args if isinstance(value, FunctionalTensor)]
    if twin is None or not isinstance(target, FunctionalTensor) or not any(map(is_symbolic, shapes)):
        return NotImplemented
    value = twin(*with_defaults(func, args, kwargs), **kwargs)
    if not are_equal(value.size(), target.size()):
        raise RuntimeError(f"`{twin}` gives {list(value.size())}, to be written into {list(target.size())}")
    replace_functional_value(target, functional_value(value))
    return target


def _draw(func: OpOverload, tensor: Tensor, *probability: Any, **kwargs: Any) -> Tensor:
    """Draw in the order of the tensor's memory, as eager does and the functional twin does not."""
    order = by_stride(tensor.size(), tensor.stride())
    if tensor.is_contiguous() or order == list(range(tensor.dim())):
        return NotImplemented
    given = [p.expand(tensor.shape).permute(order) if isinstance(p, Tensor) else p for p in probability]
    func(tensor.permute(order), *given, **kwargs)
    return tensor


DRAWS: Mapping[Any, Callable[..., Any]] = {
    _ATEN.bernoulli_.float: _draw,
    _ATEN.bernoulli_.Tensor: _draw,
}
"""What is called for random masks."""


def _averaged(func: Callable[..., Any], input: Tensor, output_size: Any) -> Tensor:
    """The average of each channel where the input is channels-last: in eager, so is this."""
    num_dims, channels_last = _POOLED[func]
    each: Sequence[Any] = (output_size,) * num_dims if isinstance(output_size, int) else output_size
    made = [size if to is None else to for size, to in zip(input.shape[-num_dims:], each, strict=False)]
    images = input.unsqueeze(-2) if num_dims == 1 else input
    if made != [1] * num_dims or suggest_memory_format(images) is not channels_last:
        return NotImplemented
    average = images.mean(tuple(range(2, images.dim())), keepdim=True)
    # Where a gradient passes `as_strided_`, it comes to lie by rows, as it does where it passes `flatten`.
    laid_out = average.flatten().view(average.shape).clone(memory_format=channels_last)
    return laid_out.squeeze(-2) if num_dims == 1 else laid_out


_POOLED = {
    functional.adaptive_avg_pool1d: (1, torch.channels_last),
    functional.adaptive_avg_pool2d: (2, torch.channels_last),
    functional.adaptive_avg_pool3d: (3, torch.channels_last_3d),
}
AVERAGES: Mapping[Any, Callable[..., Any]] = dict.fromkeys(_POOLED, _averaged)
"""What is called for averages of windows, which may be of all pixels."""


def _polygamma(_func: OpOverload, tensor: Tensor, order: int) -> Tensor:
    return tensor.copy_(torch.polygamma(order, tensor))


def _of_number(_func: OpOverload, number: Any, **options: Any) -> Tensor:
    if isinstance(number, Tensor):
        return NotImplemented
    return torch.full((), number, **{name: options[name] for name in ("dtype", "device") if name in options})


def _squeeze(_func: OpOverload, tensor: Tensor, dim: int) -> Tensor:
    return _ATEN.squeeze_.dims(tensor, [dim]) if is_symbolic(tensor.shape) else NotImplemented


POLYGAMMA: Mapping[Any, Callable[..., Any]] = {_ATEN.polygamma_.default: _polygamma}
NUMBERS: Mapping[Any, Callable[..., Any]] = {_ATEN._to_copy.default: _of_number}
SQUEEZE: Mapping[Any, Callable[..., Any]] = {_ATEN.squeeze_.dim: _squeeze}


def _refuse_sparse(_func: OpOverload, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise refusal(
        "the program makes a sparse tensor",
        fix="make it outside of the compiled function, or work on its indices and values",
    )


class _RoundedInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, reduction: str) -> Tensor:
        ctx.save_for_backward(x, target, weight)
        ctx.num_averaged = x.numel() if reduction == "mean" else 1
        return functional.binary_cross_entropy_with_logits(x, target, weight, reduction=reduction)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, target, weight = ctx.saved_tensors
        # Eager writes the gradient in place, and so rounds it, unless it is to be differentiated in turn.
        dtype = target.dtype if torch.is_grad_enabled() else x.dtype
        grad = (x.sigmoid() - target).to(dtype)
        for factor in (*grads, *(() if weight is None else (weight,))):
            grad = (grad * factor).to(dtype)
        return grad / ctx.num_averaged, None, None, None


def _binary_cross_entropy(
    _func: Callable[..., Tensor], x: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any
) -> Tensor:
    plain = [tensor for tensor in (x, target, weight) if tensor is not None]
    reduction = options.pop("reduction", "mean")
    if (
        (x.dtype, target.dtype) not in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32))
        or not (torch.is_grad_enabled() and x.requires_grad and x.size() == target.size())
        or not all(isinstance(tensor, FunctionalTensor) for tensor in plain)
        or under_transform()
        or any(tensor.requires_grad for tensor in plain[1:])
        or any(option is not None for option in options.values())
    ):
        return NotImplemented
    return _RoundedInPlace.apply(x, target, weight, reduction)


GRADIENTS: Mapping[Any, Callable[..., Any]] = {
    functional.binary_cross_entropy_with_logits: _binary_cross_entropy
}
"""What is called for losses whose gradients eager rounds otherwise."""


def _observe(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    tensor, _, _, running_min, *_, channels, per_channel, _ = with_defaults(func, args, kwargs)
    if per_channel and running_min.numel() != tensor.size(channels):
        raise refusal(
            "an observer of `torch.ao.quantization` is called for the first time: it resizes buffers",
            fix="run the model once before it is compiled",
        )
    return NotImplemented


REFUSED: Mapping[Any, Callable[..., Any]] = {
    _ATEN._coalesce.default: _refuse_sparse,
    _ATEN._to_sparse.default: _refuse_sparse,
    _ATEN._to_sparse.sparse_dim: _refuse_sparse,
    _ATEN._fused_moving_avg_obs_fq_helper.default: _observe,
}
"""Operators whose results are not what their fake kernels say."""
