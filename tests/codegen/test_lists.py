"""Operators on lists run by PyTorch's own functions, which read lists faster than its dispatcher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import aotdist
from aotdist.torch_seam.operators import native_callable

TENSORS = [torch.arange(1.0, 5.0).reshape(2, 2) / k for k in (8, 9, 10)]
ATEN = torch.ops.aten
CALLS = {
    ATEN.stack.default: (TENSORS, 1),
    ATEN.cat.default: (TENSORS, -1),
    ATEN.hstack.default: (TENSORS,),
    ATEN.unbind.int: (TENSORS[0], 1),
    ATEN.chunk.default: (TENSORS[0], 2, 1),
    ATEN.split_with_sizes.default: (TENSORS[0], [1, 1], 1),
    ATEN.block_diag.default: (TENSORS,),
    ATEN._foreach_copy_.default: ([t.clone() for t in TENSORS], TENSORS),
    ATEN._foreach_norm.Scalar: (TENSORS, 2),
    ATEN._foreach_sqrt.default: (TENSORS,),
    ATEN._foreach_max.default: (TENSORS,),
    ATEN._foreach_zero_.default: ([tensor.clone() for tensor in TENSORS],),
}


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


@pytest.mark.parametrize("op", CALLS, ids=str)
def test_the_function_asks_for_the_operator(op: Any) -> None:
    function = native_callable(op)
    assert function is not op._op, "it has a function"
    with Operators() as expected:
        result = op(*CALLS[op])
    with Operators() as asked:
        again = function(*CALLS[op])
    assert asked.seen == expected.seen
    if result is not None:  # what an operator wrote in place it does not return, and its function does
        torch.testing.assert_close(tree_leaves(again), tree_leaves(result), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", [ATEN._foreach_add.List, ATEN.split.Tensor, ATEN.mm.default], ids=str)
def test_what_may_be_another_operator_is_left_to_the_dispatcher(op: Any) -> None:
    assert native_callable(op) is op._op


def test_a_mode_hears_of_no_function_of_a_compiled_call() -> None:
    def fn(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.stack(tensors).sum()

    compiled = aotdist.compile(fn, backend="fx")
    compiled(*TENSORS)
    with Functions() as mode:
        result = compiled(*TENSORS)
    assert "stack" not in mode.seen
    assert torch.equal(result, fn(*TENSORS))
