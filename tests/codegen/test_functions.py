"""Operators run by PyTorch's own functions, where these ask the dispatcher for the very same operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import aotdist
from aotdist.torch_seam.functions import function_of

TENSORS = [torch.arange(1.0, 5.0).reshape(2, 2) / k for k in (8, 9, 10)]
X, Y, BIAS = TENSORS
ATEN = torch.ops.aten
F32 = {"dtype": torch.float32, "device": torch.device("cpu"), "pin_memory": False}
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (ATEN.stack.default, (TENSORS, 1), {}),
    (ATEN.cat.default, (TENSORS, -1), {}),
    (ATEN.hstack.default, (TENSORS,), {}),
    (ATEN.unbind.int, (X, 1), {}),
    (ATEN.chunk.default, (X, 2, 1), {}),
    (ATEN.split.Tensor, (X, 1), {}),
    (ATEN.split_with_sizes.default, (X, [1, 1], 1), {}),
    (ATEN.block_diag.default, (TENSORS,), {}),
    (ATEN._foreach_add.List, (TENSORS, TENSORS), {"alpha": 2}),
    (ATEN._foreach_norm.Scalar, (TENSORS, 2), {}),
    (ATEN._foreach_copy_.default, ([tensor.clone() for tensor in TENSORS], TENSORS), {}),
    (ATEN.add.Tensor, (X, Y), {"alpha": 3}),
    (ATEN.add.Tensor, (X, 2.5), {}),
    (ATEN.pow.Tensor_Scalar, (X, 2), {}),
    (ATEN.masked_fill.Scalar, (X, X > 0.2, float("nan")), {}),
    (ATEN.sum.dim_IntList, (X, [0], True), {}),
    (ATEN.sum.default, (X,), {}),
    (ATEN.max.dim, (X, 0), {}),
    (ATEN.addmm.default, (BIAS, X, Y), {"beta": 2}),
    (ATEN.view.default, (X, [4]), {}),
    (ATEN.view.dtype, (X, torch.int32), {}),
    (ATEN.expand.default, (X, [3, 2, 2]), {}),
    (ATEN.reshape.default, (X.t(), [4]), {}),
    (ATEN.gelu.default, (X,), {"approximate": "tanh"}),
    (ATEN.clone.default, (X,), {"memory_format": torch.contiguous_format}),
    (ATEN.full.default, ([2], 1.5), F32),
]
LEFT_TO_THE_DISPATCHER = [
    (ATEN.mul.Scalar, (X, 2.0), {}),  # the function makes a tensor of the number
    (ATEN._to_copy.default, (X,), {"dtype": torch.float64}),
    (ATEN.threshold_backward.default, (X, Y, 0), {}),
    (ATEN.add.Tensor, (X, None), {}),
]


class Operators(TorchDispatchMode):
    """Notes what the dispatcher is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note, and call."""
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Notes what PyTorch's functions are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note, and call."""
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("op", "args", "kwargs"), CALLS, ids=lambda value: str(value)[:40])
def test_the_function_asks_for_the_operator(op: Any, args: Any, kwargs: Any) -> None:
    function = function_of(op, args, kwargs)
    assert function is not None
    with Operators() as expected:
        result = op(*args, **kwargs)
    with Operators() as asked:
        again = function(*args, **kwargs)
    assert asked.seen == expected.seen
    if result is not None:  # what an operator wrote in place it does not return, and its function does
        torch.testing.assert_close(tree_leaves(again), tree_leaves(result), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("op", "args", "kwargs"), LEFT_TO_THE_DISPATCHER, ids=lambda value: str(value)[:40])
def test_what_is_another_operator_is_left_to_the_dispatcher(op: Any, args: Any, kwargs: Any) -> None:
    assert function_of(op, args, kwargs) is None


def mixed(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.stack(tensors).relu().sum(0)


def test_a_mode_hears_of_no_function_of_a_compiled_call() -> None:
    inputs = [tensor.clone().requires_grad_() for tensor in TENSORS]
    compiled = aotdist.compile(mixed, backend="fx")
    compiled(*inputs).sum().backward()
    with Functions() as mode:
        result = compiled(*inputs)
        torch.autograd.grad(result, inputs, torch.ones(2, 2))
    assert not {"stack", "relu", "sum", "unbind"} & {*mode.seen}
    assert torch.equal(result, mixed(*inputs))


class Heard(TwoTensor):
    """Notes that its `__torch_function__` is called."""

    seen: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note, and call."""
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_gradient_of_another_class_hears_of_no_function_either() -> None:
    x, weight = (tensor.clone().requires_grad_() for tensor in (X, Y))
    result = aotdist.compile(lambda x, weight: torch.mm(x, weight), backend="fx")(x, weight)
    grad, Heard.seen = Heard(torch.ones(2, 2), torch.full((2, 2), 2.0)), []
    found = torch.autograd.grad(result, [x, weight], grad)
    assert all(isinstance(each, Heard) for each in found)
    assert not [name for name in Heard.seen if name.startswith(("mm", "t", "matmul"))]
