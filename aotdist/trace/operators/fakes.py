"""Corrected fake results, where PyTorch's differ from the kernels', or are refused (torch 2.13).

A trace decides by strides which `reshape` is a view, and what a result is a view of, so strides have to be
those of the kernels.

- Of batch normalisation on a CPU, fakes claim that whatever is permuted stays so; the kernels give a
  contiguous result, or one with the channels last if the input has them there.
- Of some backwards (of layer norms, losses, activations, paddings) fakes claim strides that the kernels do
  not give. A kernel behind them that needs a contiguous gradient (of group norms) would read it wrongly: the
  trace keeps no `contiguous()` of what is so already.
- Some fakes make numbers of symbolic sizes, unless PyTorch is told to run its kernels in Python: those of
  `constant_pad_nd`, Fourier transforms, `complex` and `polar`, and of linear algebra that solves triangular
  systems or broadcasts batches. Each size would have an artifact of its own.
- Grouped products (of experts) fakes allow in bf16 only, and without the gaps behind rows that the kernels
  leave: these begin at multiples of 16 bytes.
- What cannot be a view, fakes refuse with a `ValueError`; who then reshapes catches a `RuntimeError`.
- What writes into a part of a storage keeps its offset; the cache of fakes forgets it.
- A margin loss of one sample has no dimension if it is not reduced; fakes claim one.

In a trace on the CPU for a GPU each operator is called once more with fakes of a GPU, and the result gets
their metadata, as a fake of the CPU: a build of PyTorch for CPUs has no autograd for GPUs. Which kernel
convolves depends on cuDNN, which is not there either; the rule for its strides is here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aotdist.origins import current_module, note_kernels
from aotdist.sizes import is_symbolic
from aotdist.torch_seam.functional import FakeTensor, fake_on, uncached_fake
from aotdist.torch_seam.modes import no_modes, python_kernels, torch_functions_off
from aotdist.torch_seam.operators import (
    OpOverload,
    is_operator,
    makes_views,
    suggest_memory_format,
    writes_arguments,
)
from aotdist.torch_seam.symbols import SYMBOLIC, hint
from aotdist.torch_seam.trees import pytree

_ATEN = torch.ops.aten
CANNOT_VIEW = (
    "view size is not compatible with input tensor's size and stride (at least one dimension spans across "
    "two contiguous subspaces). Use .reshape(...) instead."
)
"""How PyTorch says that a tensor's strides do not allow a view."""


def _grouped_product(
    _func: OpOverload,
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Shapes: (m, k) or (g, m, k) by (k, n) or (g, k, n); without g, `offs` are the ends of the groups."""
    if a.device.type != "cpu" and a.dtype == torch.bfloat16:
        return NotImplemented
    rows, columns = a.size(-2), b.size(-1)
    in_groups = [a.size(0)] if a.dim() == 3 and b.dim() == 3 else []
    if a.dim() == 2 and b.dim() == 2 and offs is not None:
        in_groups = [offs.size(0)]
    dtype = out_dtype or a.dtype
    aligned = 16 // dtype.itemsize
    padded = (columns + aligned - 1) // aligned * aligned
    strides = [*([rows * padded] if in_groups else []), padded, 1]
    return torch.empty_strided((*in_groups, rows, columns), strides, dtype=dtype, device=a.device)


def in_python(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """By PyTorch's kernels in Python, which keep symbols."""
    numbers = [leaf.shape if isinstance(leaf, torch.Tensor) else leaf for leaf in pytree.tree_leaves(args)]
    if not is_symbolic(numbers):
        return NotImplemented
    with python_kernels():
        return func(*args, **kwargs)


def _padded(func: OpOverload, x: torch.Tensor, pad: Sequence[Any], *value: Any) -> Any:
    """What only cuts has the strides of what it is cut from; the kernel in Python claims that it is dense."""
    if not is_symbolic((tuple(x.shape), tuple(pad))) or not all(number <= 0 for number in pad):
        return in_python(func, x, pad, *value)
    for dim, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True), start=1):
        x = x.narrow(-dim, -before, x.size(-dim) + before + after)
    return x.clone()


def is_of_matrices(func: Any) -> bool:
    """Whether an operator is one of linear algebra."""
    return is_operator(func) and any(part in func.name() for part in ("::linalg_", "::_linalg_", "cholesky_"))


def _viewed(func: OpOverload, *args: Any, **kwargs: Any) -> torch.Tensor:
    try:
        return func(*args, **kwargs)
    except ValueError as error:
        raise RuntimeError(CANNOT_VIEW) from error


def _with_offset(func: OpOverload, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A result that starts as far into its storage as the first argument does into its own."""
    if args[0].storage_offset() == 0:
        return NotImplemented
    with uncached_fake(args[0]):
        return func(*args, **kwargs)


def _margin_loss(func: OpOverload, x: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    made = func(x, target, *args, **kwargs)
    loss, *others = made if isinstance(made, tuple) else (made,)
    if target.dim() == _DIMS_OF_LABELS[func] and loss.dim() == 1:
        loss = loss.new_empty(())
    return (loss, *others) if others else loss


def norms_laid_out(table: Mapping[OpOverload, Callable[..., Any]]) -> dict[OpOverload, Callable[..., Any]]:
    """Decompositions, of which those of batch norms give results that lie as eager's.

    They lie as the input otherwise: no `view` would take them, and dropout would draw in another order.
    """
    return {
        op: functools.partial(_made_and_laid_out, op, made) if op in NORMALISED else made
        for op, made in table.items()
    }


def _made_and_laid_out(op: OpOverload, made: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    first, *others = made(*args, **kwargs)
    kept = _BATCH_NORMS[op]([arg for arg in args if isinstance(arg, torch.Tensor)])
    if isinstance(first, torch.Tensor) and kept is not None and not first.is_contiguous(memory_format=kept):
        first = first.clone(memory_format=kept)
    return first, *others


def _laid_out(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Results with the strides that the tables say; if all arguments are contiguous, fakes are right."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if all(tensor.is_contiguous() for tensor in tensors):
        return NotImplemented
    layout = {**_BATCH_NORMS, **_LAYOUTS}[func](tensors)

    def laid_out(made: torch.Tensor) -> torch.Tensor:
        if isinstance(layout, torch.Tensor):
            return torch.empty_strided(made.size(), layout.stride(), dtype=made.dtype, device=made.device)
        return torch.empty_like(made, memory_format=layout if made.dim() > 3 else torch.contiguous_format)

    made = func(*args, **kwargs)
    return made if layout is None else pytree.tree_map_only(torch.Tensor, laid_out, made)


def _contiguous(_tensors: Sequence[torch.Tensor]) -> torch.memory_format:
    return torch.contiguous_format


def _as_sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """As the result of an elementwise operator: the first of the arguments decides."""
    return functools.reduce(torch.add, tensors)


def _as_on_cpu(position: int, tensors: Sequence[torch.Tensor]) -> torch.memory_format | None:
    """As one of the arguments suggests."""
    return suggest_memory_format(tensors[position]) if tensors[position].is_cpu else None


def _as_batch_norm(tensors: Sequence[torch.Tensor]) -> torch.memory_format | None:
    """As the input; the kernel asks first whether that is contiguous, which it may be in two formats."""
    is_contiguous = tensors[0].is_cpu and tensors[0].is_contiguous()
    return torch.contiguous_format if is_contiguous else _as_on_cpu(0, tensors)


def _contiguous_on_cpu(tensors: Sequence[torch.Tensor]) -> torch.memory_format | None:
    return torch.contiguous_format if tensors[0].is_cpu else None


_AS_FIRST, _AS_LAST = functools.partial(_as_on_cpu, 0), functools.partial(_as_on_cpu, -1)
_LAYOUTS: Mapping[Any, Callable[[Sequence[torch.Tensor]], torch.Tensor | torch.memory_format | None]] = {
    _ATEN.native_layer_norm_backward.default: _contiguous,
    _ATEN.mse_loss_backward.default: _contiguous,
    _ATEN.smooth_l1_loss_backward.default: _contiguous,
    _ATEN.huber_loss_backward.default: _contiguous,
    _ATEN._log_softmax_backward_data.default: _contiguous,
    _ATEN.log_sigmoid_forward.default: _contiguous_on_cpu,
    _ATEN.elu_backward.default: _as_sum,
    _ATEN.hardswish_backward.default: _as_sum,
    _ATEN.hardtanh_backward.default: _as_sum,
    _ATEN.logit_backward.default: _as_sum,
    _ATEN.native_dropout_backward.default: _as_sum,
    _ATEN.softplus_backward.default: _as_sum,
    _ATEN.xlogy.Tensor: _as_sum,
    _ATEN.channel_shuffle.default: _AS_FIRST,
    _ATEN.max_unpool2d.default: _AS_FIRST,
    _ATEN.reflection_pad2d_backward.default: _AS_LAST,
    _ATEN.reflection_pad3d.default: _AS_LAST,
    _ATEN.reflection_pad3d_backward.default: _AS_LAST,
    _ATEN.replication_pad2d_backward.default: _AS_LAST,
    _ATEN.replication_pad3d.default: _AS_LAST,
    _ATEN.replication_pad3d_backward.default: _AS_LAST,
}
_BATCH_NORMS: Mapping[Any, Callable[[Sequence[torch.Tensor]], torch.memory_format | None]] = {
    _ATEN.native_batch_norm.default: _as_batch_norm,
    _ATEN._native_batch_norm_legit.default: _as_batch_norm,
    _ATEN._native_batch_norm_legit.no_stats: _as_batch_norm,
    _ATEN._native_batch_norm_legit_functional.default: _as_batch_norm,
    _ATEN._native_batch_norm_legit_no_training.default: _as_batch_norm,
    _ATEN.native_batch_norm_backward.default: functools.partial(_as_on_cpu, 1),
}
NORMALISED: Mapping[Any, Callable[..., Any]] = dict.fromkeys(_BATCH_NORMS, _laid_out)
"""Operators whose first result is made like one of the arguments."""
LAID_OUT: Mapping[Any, Callable[..., Any]] = dict.fromkeys(_LAYOUTS, _laid_out)
"""Operators whose results lie otherwise than fakes claim, if an argument is not contiguous."""

GROUPED: Mapping[Any, Callable[..., Any]] = {_ATEN._grouped_mm.default: _grouped_product}
SETTLED: Mapping[Any, Callable[..., Any]] = dict.fromkeys(
    (
        _ATEN._fft_c2c.default,
        _ATEN._fft_c2r.default,
        _ATEN._fft_r2c.default,
        _ATEN.col2im.default,
        _ATEN.complex.default,
        _ATEN.im2col.default,
        _ATEN.polar.default,
    ),
    in_python,
) | {_ATEN.constant_pad_nd.default: _padded}
"""Operators whose fakes make numbers of symbolic sizes, but for the kernels in Python."""
VIEWS: Mapping[Any, Callable[..., Any]] = dict.fromkeys(
    (_ATEN.view.default, _ATEN._unsafe_view.default), _viewed
)
OFFSETS: Mapping[Any, Callable[..., Any]] = dict.fromkeys(
    (
        _ATEN.copy.default,
        _ATEN.slice_scatter.default,
        _ATEN.select_scatter.default,
        _ATEN.diagonal_scatter.default,
        _ATEN.as_strided_scatter.default,
    ),
    _with_offset,
)

_DIMS_OF_LABELS: Mapping[Any, int] = {
    _ATEN.multi_margin_loss.default: 0,
    _ATEN.multilabel_margin_loss_forward.default: 1,
}
"""Dimensions of the labels of one sample."""
MARGINS: Mapping[Any, Callable[..., Any]] = dict.fromkeys(_DIMS_OF_LABELS, _margin_loss)

_ABOUT_ARGUMENTS = (RuntimeError, IndexError, ValueError, TypeError)
_MOST_ELEMENTS = 1 << 16
"""Larger tensors are replaced by one element, expanded: a check of sizes does not read them."""


def as_in_eager(error: Exception, func: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> Exception:
    """The error that the operator's kernel raises for tensors of such sizes; `error` if it raises none.

    Args:
        error: what its fake raised.
        func: the operator.
        args: its arguments.
        kwargs: likewise.
    """
    if type(error) not in _ABOUT_ARGUMENTS or not is_operator(func) or func.namespace != "aten":
        return error
    if torch.Tag.nondeterministic_seeded in func.tags:
        return error
    try:
        with no_modes(), torch_functions_off(), torch.no_grad():
            given, named = pytree.tree_map(_real, (args, dict(kwargs)))
            func(*given, **named)
    except Exception as eagers:
        if type(eagers) is type(error):
            if module := current_module():
                eagers.add_note(f"(in module `{module}`)")
            note_kernels(eagers)
            return eagers.with_traceback(None)
    return error


def _real(value: Any) -> Any:
    """Zeros in the place of a traced tensor, on the CPU; its value in this call in that of a symbol."""
    if isinstance(value, SYMBOLIC):
        return hint(value)
    if not isinstance(value, torch.Tensor):
        return torch.device("cpu") if isinstance(value, torch.device) else value
    size, stride = (tuple(map(hint, numbers)) for numbers in (value.size(), value.stride()))
    if value.numel() <= _MOST_ELEMENTS:
        return torch.empty_strided(size, stride, dtype=value.dtype).zero_()
    return torch.zeros((), dtype=value.dtype).expand(size)


_GPU = torch.device("cuda", 0)
_CONVOLUTIONS: Mapping[OpOverload, tuple[int, int]] = {
    _ATEN.convolution.default: (0, 1),
    _ATEN.convolution_backward.default: (1, 2),
}
"""Where input and weight are among the arguments."""
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def as_on_gpu(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
    """What an operator gives on a GPU.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: the others.
        result: what it gives on the CPU.
    """
    if func in _CONVOLUTIONS:
        first, second = _CONVOLUTIONS[func]
        return _convolved(args[first], args[second], result)
    if makes_views(func) or writes_arguments(func):
        return result
    try:
        there = func(*pytree.tree_map(_to_gpu, args), **pytree.tree_map(_to_gpu, dict(kwargs)))
    except (RuntimeError, AssertionError):  # a build for CPUs does not know (`geqrf`), so nobody does here
        return result
    return pytree.tree_map(_like, result, there)


def _to_gpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _GPU
    return fake_on(value, _GPU) if isinstance(value, FakeTensor) else value


def _like(here: Any, there: Any) -> Any:
    """A result as it is on the GPU; where nothing differs, it is the one of the CPU."""
    if not isinstance(here, torch.Tensor):
        return here
    if (here.dtype, here.shape, here.stride()) == (there.dtype, there.shape, there.stride()):
        return here
    return torch.empty_strided(there.shape, there.stride(), dtype=there.dtype, device=here.device)


def _convolved(inputs: torch.Tensor, weight: torch.Tensor, result: Any) -> Any:
    """Results of cuDNN have channels last where an input or the weight has, but for float64."""
    channels_last = _CHANNELS_LAST.get(inputs.dim())
    if channels_last is None:
        return result
    asked = any(suggest_memory_format(tensor) == channels_last for tensor in (inputs, weight))
    kept = channels_last if asked and inputs.dtype is not torch.float64 else torch.contiguous_format

    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        is_of_bias = tensor.dim() == 1
        return tensor if is_of_bias else torch.empty_like(tensor, memory_format=kept)

    return pytree.tree_map_only(torch.Tensor, laid_out, result)
