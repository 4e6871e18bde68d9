"""The table of corrections: what PyTorch does differently in a trace than in eager, and what runs instead.

A correction acts at one level: on a *function* as the program calls it, on an *operator* before it is made
functional, on a *node* before it is recorded, or on the *fake* results of an operator, on any device or on a
CPU. It is called as `instead(what it corrects, *arguments)`, and returns `NotImplemented` where PyTorch is
right.

`tests/trace/test_corrections.py` has a program for each row, by its name, which goes wrong without it: a row
that the release at hand no longer needs fails there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from aotdist.subclasses.protocol import is_real, sparse_made
from aotdist.trace.operators import attention, fakes, functions_of_data, padded_batches
from aotdist.trace.operators import functionalised as operators

Level: TypeAlias = Literal["function", "operator", "node", "fake", "fake on a CPU"]
Instead: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Correction:
    """A row of the table.

    Args:
        name: its name.
        level: where it acts.
        instead: from functions or operators to what is called in their place.
        why: what these do in a trace.
        kinds: the same for kinds of operators, each recognised by a function.
        of_bits: whether it is needed only where results are to have eager's bits.
        release: the last release of PyTorch that was seen to need it.
    """

    name: str
    level: Level
    instead: Mapping[Any, Instead]
    why: str
    kinds: tuple[tuple[Callable[[Any], bool], Instead], ...] = ()
    of_bits: bool = False
    release: str = "2.14"


def _conjugate_written(func: Any, tensor: torch.Tensor) -> torch.Tensor:
    return func(tensor.resolve_conj()) if tensor.is_conj() else NotImplemented


def _tensor_of(_func: Any, data: Any, *, dtype: Any = None, device: Any = None, **others: Any) -> Any:
    """`torch.tensor([a.max(), b.max()])`; and of one tensor, where eager has an array."""
    if isinstance(data, torch.Tensor) and not is_real(data) and not others:
        return data.detach().to(torch.get_default_device() if device is None else device, dtype, copy=True)
    is_list = isinstance(data, (list, tuple)) and all(isinstance(one, torch.Tensor) for one in data)
    if others or not is_list or len({(one.dtype, one.device) for one in data}) != 1:
        return NotImplemented
    if any(one.dim() for one in data) or all(map(is_real, data)):
        return NotImplemented
    together = torch.stack([one.detach() for one in data])
    return together.to(torch.get_default_device() if device is None else device, dtype)


def _assert_with_text(_func: Any, condition: torch.Tensor) -> Any:
    return torch.ops.aten._assert_async.msg(
        condition, "Expected Tensor with single nonzero value, but got zero"
    )


CORRECTIONS: tuple[Correction, ...] = (
    Correction(
        "formulas by data",
        "function",
        functions_of_data.FORMULAS,
        "a loss is computed by a formula that asks for no data, and that rounds otherwise",
        of_bits=True,
    ),
    Correction(
        "losses of two dtypes",
        "function",
        operators.GRADIENTS,
        "the gradient of logits of 16 bits is computed in the 32 of their labels, and not in place",
        of_bits=True,
    ),
    Correction(
        "tensors of numbers in tensors",
        "function",
        {torch.tensor: _tensor_of},
        "the numbers are put together as tensors; PyTorch reads them",
    ),
    Correction(
        "singular values alone",
        "function",
        functions_of_data.VALUES,
        "vectors are computed along with the values that are asked for, by another algorithm",
    ),
    Correction(
        "decompositions without vectors",
        "operator",
        functions_of_data.DECOMPOSITIONS,
        "vectors are computed along with the values that are asked for, by another algorithm",
    ),
    Correction(
        "checks of data",
        "function",
        functions_of_data.CHECKS,
        "data are asked whether they are in order",
    ),
    Correction(
        "answers to checks",
        "operator",
        functions_of_data.ANSWERS,
        "data are asked whether they are in order",
    ),
    Correction(
        "mean of a CTC loss",
        "function",
        functions_of_data.LOSSES,
        "lengths that are Python numbers are written into a tensor that has no memory",
    ),
    Correction(
        "results of unknown sizes",
        "operator",
        functions_of_data.OPERATORS,
        "there is no fake result, since its size depends on data, or it takes numbers for sizes only",
    ),
    Correction(
        "interpolation",
        "function",
        functions_of_data.INTERPOLATION,
        "sizes that are symbols are asked for their numbers, in C++",
    ),
    Correction(
        "interpolated sizes",
        "fake",
        functions_of_data.RESIZED,
        "sizes that are symbols are asked for their numbers, in C++",
    ),
    Correction(
        "averages over all pixels",
        "function",
        operators.AVERAGES,
        "they become channels-last by `as_strided_`, which is refused",
    ),
    Correction(
        "packed sequences",
        "function",
        padded_batches.SEQUENCES,
        "lengths that are Python numbers are read from a tensor that has no memory",
    ),
    Correction(
        "padded encoders",
        "function",
        padded_batches.ENCODERS,
        "a mask is asked where its padding is, and a batch becomes a nested tensor",
    ),
    Correction(
        "fused steps",
        "operator",
        operators.STEPS,
        "functionalisation fails for empty lists",
    ),
    Correction(
        "batch norms of GPUs",
        "operator",
        operators.NORMS,
        "running statistics are written, and the schema does not say so",
    ),
    Correction(
        "masks in the order of memory",
        "operator",
        operators.DRAWS,
        "the functional operator draws in the order of a contiguous tensor",
    ),
    Correction(
        "lists that share memory",
        "operator",
        {},
        "what one write of a list changes, the next does not see",
        kinds=((operators.is_list_write, operators.one_by_one),),
    ),
    Correction(
        "polygamma",
        "operator",
        operators.POLYGAMMA,
        "the functional twin takes its arguments the other way round",
    ),
    Correction(
        "numbers in a batch",
        "operator",
        operators.NUMBERS,
        "`vmap` gives a number the dtype that it has beside a batch of single elements, and its product with "
        "zeros that have no memory is looked up on the device `meta`",
    ),
    Correction(
        "squeezed symbols",
        "operator",
        operators.SQUEEZE,
        "the fake kernel recurses until the process dies",
    ),
    Correction(
        "writes with symbols",
        "operator",
        {},
        "in-place operators are run on meta tensors to find wrong shapes, and fail for symbols",
        kinds=((operators.has_twin, operators.with_twin),),
    ),
    Correction(
        "backward of bags",
        "operator",
        functions_of_data.BAGS,
        "a fake of a sparse gradient has no rows",
    ),
    Correction(
        "sparse matrices",
        "operator",
        {torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default: sparse_made},
        "fakes of them have no values: rows would be none, and a history would be lost",
    ),
    Correction(
        "refused operators",
        "operator",
        operators.REFUSED,
        "results are not what the fake kernel says",
    ),
    Correction(
        "parts of conjugates",
        "node",
        {torch.ops.aten.view_as_real.default: _conjugate_written},
        "a written base has lost its bit when its views are made again, and gets it back after that",
    ),
    Correction(
        "assertions without a message",
        "node",
        {torch.ops.aten._assert_async.default: _assert_with_text},
        "graphs drop the overload that takes no message",
    ),
    Correction(
        "grouped products",
        "fake",
        fakes.GROUPED,
        "only bf16 is taken, and rows have no gaps behind them",
    ),
    Correction(
        "products of 16 bits in place",
        "operator",
        operators.PRODUCTS,
        "numbers are not rounded to 16 bits first, as a CPU does in place",
    ),
    Correction(
        "settled sizes",
        "fake",
        fakes.SETTLED,
        "numbers are made of symbolic sizes",
        kinds=((fakes.is_of_matrices, fakes.in_python),),
    ),
    Correction(
        "refused views",
        "fake",
        fakes.VIEWS,
        "what cannot be a view is refused with a `ValueError`",
    ),
    Correction(
        "offsets of scattered parts",
        "fake",
        fakes.OFFSETS,
        "the cache of fakes forgets offsets of what is no view",
    ),
    Correction(
        "margin losses of one sample",
        "fake",
        fakes.MARGINS,
        "a loss that is not reduced has a dimension",
    ),
    Correction(
        "layouts of backwards",
        "fake",
        fakes.LAID_OUT,
        "strides are those of a decomposition, and not of the kernel",
    ),
    Correction(
        "layouts of batch norms",
        "fake on a CPU",
        fakes.NORMALISED,
        "whatever is permuted is claimed to stay so",
    ),
)


def functions(*, of_bits: bool, target: str | None) -> dict[Any, Instead]:
    """What is called for which functions, with their own arguments.

    Args:
        of_bits: whether results are to have eager's bits.
        target: the generation of the GPUs that a trace on the CPU is for, if it is for any.
    """
    rows = (row for row in CORRECTIONS if row.level == "function" and (of_bits or not row.of_bits))
    found: dict[Any, Instead] = {
        function: functools.partial(_or_itself, instead, function)
        for row in rows
        for function, instead in row.instead.items()
    }
    return found if target is None else {**found, **attention.instead(target)}


def _or_itself(instead: Instead, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = instead(function, *args, **kwargs)
    return function(*args, **kwargs) if result is NotImplemented else result


@functools.cache
def of(level: Level, operator: Any) -> tuple[Instead, ...]:
    """The corrections of an operator at one level."""
    rows = [row for row in CORRECTIONS if row.level == level]
    own = (row.instead[operator] for row in rows if operator in row.instead)
    return (*own, *(instead for row in rows for is_kind, instead in row.kinds if is_kind(operator)))


def corrected(corrections: tuple[Instead, ...], operator: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What the first of the corrections that applies returns; `NotImplemented` if none does."""
    for instead in corrections:
        result = instead(operator, *args, **kwargs)
        if result is not NotImplemented:
            return result
    return NotImplemented


def fake_result(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, on_gpu: bool) -> Any:
    """The fake result of an operator, with the sizes and strides that its kernel gives.

    Args:
        operator: the operator.
        args: its positional arguments.
        kwargs: the others.
        on_gpu: whether the trace is for a GPU, though it is on the CPU.
    """
    rows = of("fake", operator) if on_gpu else (*of("fake", operator), *of("fake on a CPU", operator))
    result = corrected(rows, operator, args, kwargs)
    if result is NotImplemented:
        result = operator(*args, **kwargs)
    return fakes.as_on_gpu(operator, args, kwargs, result) if on_gpu else result
