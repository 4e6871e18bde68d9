"""Functions of PyTorch that read, in C++, what a trace does not have: data, or numbers for symbolic sizes.

- *Checks* (`istft`, `cov`, `gaussian_nll_loss`): a function asks whether a condition holds, and gets the
  answer with which it goes on; the condition becomes a check (`capture/effects.py`), in a backward a node
  that raises.
- *Linear algebra* asks whether a tensor is a plain one, and computes vectors otherwise along with the values
  that are asked for, by another algorithm, which rounds otherwise; and leaves `out=` as it is.
- *Sparse gradients* of bags have no rows where they are fakes.
- *Results of unknown sizes*: the forward of a CTC loss keeps for the backward as much as the longest target
  needs; the fake result has the size that the targets' own allows, and only the backward's kernel looks at
  it. `linalg.lstsq` leaves residuals out where a matrix is not of full rank; the fake result has them.
- *A weighted and smoothed `cross_entropy`* sums what a mask selects, where all tensors are plain ones. For
  subclasses, modes and transforms, so in a trace, PyTorch takes another formula, which needs no data and
  rounds otherwise.
- *Interpolation* takes sizes and scales to C++, which wants numbers, and so do its fakes.

Where such an operator has no fake that is right, it is an operator of our own in the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from aotdist.origins import holding
from aotdist.sizes import is_symbolic
from aotdist.subclasses.protocol import SparseRows
from aotdist.torch_seam.autograd import running_node
from aotdist.torch_seam.checks import check_all
from aotdist.torch_seam.functional import DataDependentOutputException, FunctionalTensor
from aotdist.torch_seam.functions import interpolated_size, interpolation
from aotdist.torch_seam.modes import under_transform
from aotdist.torch_seam.operators import OpOverload, schema_of, suggest_memory_format, with_defaults

_ATEN = torch.ops.aten
_LIBRARY = torch.library.Library("aotdist", "FRAGMENT")

_Expected = tuple[bool, type[Exception], str]
"""The answer with which a function goes on, and the error that it raises otherwise, with its message."""
_ASKED: ContextVar[Iterator[_Expected] | None] = ContextVar("asked_by_a_function_of_pytorch", default=None)
_VALUES_ALONE: ContextVar[bool] = ContextVar("values_alone", default=False)
_PHASE = (
    "svd_backward: The singular vectors in the complex case are specified up to multiplication by e^{i phi}. "
    "The specified loss function depends on this phase term, making it ill-defined."
)


def _checked(
    expected: Callable[..., Iterable[_Expected]], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call `function`, and give it the answers that it expects to its questions, which come in that order."""
    return _within(_ASKED, iter(expected(*args, **kwargs)), function, *args, **kwargs)


def _within(
    variable: ContextVar[Any], value: Any, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with holding(variable, value):
        return function(*args, **kwargs)


def _answer(func: OpOverload, condition: Tensor, *true: Tensor) -> bool:
    """What `equal(condition, true)`, or `bool(condition)`, is where the function goes on."""
    asked = _ASKED.get()
    if asked is None:
        return NotImplemented
    holds, error, message = next(asked)
    try:
        if true and _within(_ASKED, None, func, condition, *true) is holds:  # it is known at capture
            return holds
    except DataDependentOutputException:
        pass
    check_all(error, condition if holds else condition.logical_not(), message)
    return holds


def _check_in_backward(_func: OpOverload, *args: Any, **kwargs: Any) -> bool:
    if not args[0].is_cpu or "SvdBackward" not in running_node()[1]:
        return NotImplemented
    _ATEN._assert_async.msg(torch.isclose(*args, **kwargs).all(), _PHASE)
    return True


def _of_istft(*_args: Any, **_kwargs: Any) -> list[_Expected]:
    message = "istft: window overlap add min: 1 (somewhere the windows add up to zero)"
    return [(False, RuntimeError, message)]


def _of_cov(
    _input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Iterator[_Expected]:
    if fweights is not None:
        yield True, RuntimeError, "cov(): fweights cannot be negative"
    if aweights is not None:
        yield True, RuntimeError, "cov(): aweights cannot be negative"
    if fweights is not None or aweights is not None:
        yield True, RuntimeError, "cov(): weights sum to zero, can't be normalized"
    message = (
        f"cov(): degrees of freedom is <= 0 (eager warns, and divides by zero); correction is {correction}"
    )
    yield False, RuntimeError, message


def _of_gaussian_nll_loss(*_args: Any, **_kwargs: Any) -> list[_Expected]:
    return [(False, ValueError, "var has negative entry/entries")]


CHECKS: Mapping[Any, Callable[..., Any]] = {
    getattr(owner, name): functools.partial(_checked, expected)
    for owner in (torch, torch.Tensor)
    for name, expected in (("istft", _of_istft), ("cov", _of_cov))
} | {functional.gaussian_nll_loss: functools.partial(_checked, _of_gaussian_nll_loss)}
"""What is called for functions that check data."""
ANSWERS: Mapping[Any, Callable[..., Any]] = {
    _ATEN.equal.default: _answer,
    _ATEN._local_scalar_dense.default: _answer,
    _ATEN.allclose.default: _check_in_backward,
}
"""What answers the questions of these functions."""


def _of_values(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what needs singular values or eigenvalues only."""
    return _within(_VALUES_ALONE, True, function, *args, **kwargs)  # noqa: FBT003


def _matrix_rank(
    function: Callable[..., Any], *args: Any, out: Tensor | None = None, **kwargs: Any
) -> Tensor:
    rank = _of_values(function, *args, **kwargs)
    return torch.mul(rank, 1, out=torch.empty_like(rank) if out is None else out)


def _without_vectors(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """A decomposition that computes no vectors, where eager computes none: no gradient needs them."""
    matrix, how, with_vectors = with_defaults(func, args, kwargs)
    needed = not _VALUES_ALONE.get() or (matrix.requires_grad and torch.is_grad_enabled())
    return NotImplemented if needed or not with_vectors else func(matrix, how, False, **kwargs)  # noqa: FBT003


VALUES: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            torch.linalg.cond,
            torch.linalg.eigvalsh,
            torch.linalg.matrix_norm,
            torch.linalg.norm,
            torch.linalg.svdvals,
            torch.norm,
            torch.nuclear_norm,
        ),
        _of_values,
    ),
    torch.linalg.matrix_rank: _matrix_rank,
}
"""What is called for functions of singular values or eigenvalues."""
DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    _ATEN._linalg_svd.default: _without_vectors,
    _ATEN._linalg_eigh.default: _without_vectors,
}
"""What is called for the decompositions in them; the third argument of each asks for the vectors."""


def _bag_backward(
    _func: OpOverload,
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag_of: Tensor,
    *others: Any,
) -> Tensor:
    is_sparse = others[5]
    return SparseRows.of_bags(grad, indices, offsets, bag_of, *others) if is_sparse else NotImplemented


BAGS: Mapping[Any, Callable[..., Any]] = {_ATEN._embedding_bag_backward.default: _bag_backward}
"""What is called for backwards of bags."""


def _like_loss(log_probs: Tensor, targets: Tensor, *_lengths: Any) -> tuple[Tensor, Tensor]:
    """Shapes: (time, batch, classes), (batch, length) or (sum of lengths,) -> (batch,), and what is kept."""
    time, batch, _ = log_probs.shape
    kept = log_probs.new_empty((batch, time, 2 * targets.shape[-1] + 1))
    return log_probs.new_empty((batch,)), kept


def _like_loss_backward(_grad: Tensor, log_probs: Tensor, *_rest: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _like_lstsq(
    a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shapes: (*, m, n), (*, m, k) or (*, m) -> (*, n, k) or (*, n), (*, k), (*), (*, min(m, n)).

    The solution lies in memory by columns, of as many elements as the longer side has.
    """
    *batch, rows, columns = a.shape
    right = () if b.dim() < a.dim() else (b.shape[-1],)
    in_memory = a.new_empty((*batch, *right, max(rows, columns)))[..., :columns]
    solution = in_memory.mT if right else in_memory
    of_rank, of_residuals = driver != "gels", rows > columns and driver not in (None, "gelsy")
    residuals = a.new_empty((*batch, *(right or (1,))) if of_residuals else (0,), dtype=a.real.dtype)
    rank = a.new_empty(batch if of_rank else (0,), dtype=torch.int64)
    of_values = driver in ("gelsd", "gelss")
    values = a.new_empty((*batch, min(rows, columns)) if of_values else (0,), dtype=a.real.dtype)
    return solution, residuals, rank, values


def _like_resized(tensor: Tensor, size: Sequence[int]) -> Tensor:
    """Shapes: (batch, channels, *), of the rest or all -> (batch, channels, *size)."""
    full = size if len(size) == tensor.dim() else (*tensor.shape[:2], *size)
    kept = torch.contiguous_format if tensor.dim() == 3 else suggest_memory_format(tensor)
    return torch.empty(tuple(full), dtype=tensor.dtype, device=tensor.device, memory_format=kept)


def _like_resized_backward(grad: Tensor, _size: Any, size: Sequence[int], *_rest: Any) -> Tensor:
    return _like_resized(grad, size)


_INTERPOLATIONS = (
    *("upsample_nearest1d", "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    "_upsample_bicubic2d_aa",
)
"""Those whose fakes want numbers."""


def _of_our_own(op: OpOverload, like: Callable[..., Any]) -> OpOverload:
    """An operator that runs `op`, and whose fake results are those of `like`."""
    name = op.name().removeprefix("aten::").removeprefix("_").replace(".", "_")
    _LIBRARY.define(schema_of(op).replace(op.name(), name))
    _LIBRARY.impl(name, functools.partial(op.__call__), "CompositeExplicitAutograd")
    torch.library.register_fake(f"aotdist::{name}", like, lib=_LIBRARY)
    return getattr(torch.ops.aotdist, name).default


OF_OUR_OWN: Mapping[OpOverload, OpOverload] = {
    op: _of_our_own(op, like)
    for op, like in (
        (_ATEN._ctc_loss.default, _like_loss),
        (_ATEN._ctc_loss.Tensor, _like_loss),
        (_ATEN._ctc_loss_backward.default, _like_loss_backward),
        (_ATEN._ctc_loss_backward.Tensor, _like_loss_backward),
        (_ATEN.linalg_lstsq.default, _like_lstsq),
        *((getattr(_ATEN, f"{n}_backward").default, _like_resized_backward) for n in _INTERPOLATIONS),
    )
}
"""What stands in a graph for PyTorch's operators."""


def _by_our_own(func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    return OF_OUR_OWN[func](*args, **kwargs)


def _ctc_loss(
    function: Callable[..., Tensor],
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss`: its mean divides by a tensor that C++ fills with the lengths."""
    if reduction != "mean" or isinstance(target_lengths, Tensor):
        return NotImplemented
    losses = function(log_probs, targets, input_lengths, target_lengths, blank, "none", zero_infinity)
    lengths = torch.tensor(target_lengths, dtype=losses.dtype, device=losses.device)
    return (losses / lengths.clamp_min(1)).mean()


LOSSES: Mapping[Any, Callable[..., Any]] = {functional.ctc_loss: _ctc_loss}
"""What is called for losses."""
OPERATORS: Mapping[Any, Callable[..., Any]] = dict.fromkeys(OF_OUR_OWN, _by_our_own)
"""What is called for the operators."""


def _resized(_func: OpOverload, tensor: Tensor, size: Sequence[int], *_rest: Any) -> Tensor:
    """The fake result of an interpolation."""
    return _like_resized(tensor, size) if is_symbolic((tuple(tensor.shape), size)) else NotImplemented


RESIZED: Mapping[Any, Callable[..., Any]] = {getattr(_ATEN, n).default: _resized for n in _INTERPOLATIONS}
"""What gives the fake results of interpolations."""


def _interpolate(
    _func: Callable[..., Tensor],
    tensor: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """`torch.nn.functional.interpolate`, which checks the arguments if there are no symbols."""
    function = interpolation(mode, tensor.dim() - 2, antialias=antialias)
    is_nearest = mode.startswith("nearest")
    is_usual = (size is None) is not (scale_factor is None) and not (is_nearest and align_corners is not None)
    if function is None or not is_usual or not is_symbolic((tuple(tensor.shape[2:]), size)):
        return NotImplemented
    scales = _for_each(scale_factor, tensor.dim() - 2)
    sizes = interpolated_size(tensor.shape, _for_each(size, tensor.dim() - 2), scales)
    flags = [] if is_nearest else [bool(align_corners)]
    return function(tensor, sizes, *flags, *(scales if scales and not recompute_scale_factor else ()))


def _for_each(value: Any, num_dims: int) -> Sequence[Any] | None:
    return value if value is None or isinstance(value, (list, tuple)) else [value] * num_dims


INTERPOLATION: Mapping[Any, Callable[..., Any]] = {functional.interpolate: _interpolate}
"""What is called for interpolation."""


_LIBRARY.define("weight_of_targets(Tensor weight, Tensor target, int ignore_index) -> Tensor")
_WEIGHT_OF_TARGETS = torch.ops.aotdist.weight_of_targets.default


@torch.library.impl(_LIBRARY, "weight_of_targets", "CompositeExplicitAutograd")
def _weight_of_targets(weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    return weight.gather(0, target.masked_select(target != ignore_index)).sum()


def _like_weight(weight: Tensor, _target: Tensor, _ignore_index: int) -> Tensor:
    return weight.new_empty(())


torch.library.register_fake("aotdist::weight_of_targets", _like_weight, lib=_LIBRARY)


def _cross_entropy(
    _func: Callable[..., Tensor],
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy`: the mean of smoothed losses is by the weight of all targets."""
    is_mean = reduction == "mean" and size_average is None and reduce is None
    if (
        weight is None
        or not (is_mean and 0 < label_smoothing <= 1 and _is_plain(input, target, weight))
        or input.size() == target.size()  # of probabilities
        or weight.requires_grad
        or torch.is_autocast_enabled(input.device.type)
    ):
        return NotImplemented
    dim = min(input.dim() - 1, 1)
    log_p = functional.log_softmax(input, dim, dtype=input.dtype)
    loss = functional.nll_loss(log_p, target, weight, ignore_index=ignore_index)
    of_classes = weight.view([-1 if at == dim else 1 for at in range(input.dim())])
    smooth = -(log_p * of_classes).sum(dim)
    smooth.masked_fill_(target == ignore_index, 0.0)
    smooth_loss = smooth.sum() / _WEIGHT_OF_TARGETS(weight, target, ignore_index)
    return (1 - label_smoothing) * loss + smooth_loss * (label_smoothing / input.size(dim))


def _is_plain(*tensors: Tensor) -> bool:
    """Whether eager takes the formula for plain tensors; of wrappers and in transforms it takes the other."""
    return all(isinstance(tensor, FunctionalTensor) for tensor in tensors) and not under_transform()


FORMULAS: Mapping[Any, Callable[..., Any]] = {functional.cross_entropy: _cross_entropy}
"""What is called in a trace for PyTorch's functions, where results are to have eager's bits."""
