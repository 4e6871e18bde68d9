"""Functions of PyTorch that check data in C++: the check is made when the program has run.

In a trace, a function asks whether a condition holds (`equal`), and gets the answer with which it goes on;
the condition becomes a check (`aotdist.capture.checks`). In a backward it is a node that raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from aotdist.torch_seam.autograd import running_node
from aotdist.torch_seam.checks import check_all
from aotdist.torch_seam.functional import DataDependentOutputException

_Expected = tuple[bool, str]
"""The answer with which a function goes on, and what it says otherwise."""
_ASKED: ContextVar[Iterator[_Expected] | None] = ContextVar("asked_by_a_function_of_pytorch", default=None)
_EQUAL = torch.ops.aten.equal.default
_ALLCLOSE = torch.ops.aten.allclose.default
_PHASE = (
    "svd_backward: The singular vectors in the complex case are specified up to multiplication by e^{i phi}. "
    "The specified loss function depends on this phase term, making it ill-defined."
)


def _checked(
    function: Callable[..., Any], expected: Callable[..., Iterable[_Expected]], *args: Any, **kwargs: Any
) -> Any:
    """Call `function`, and give it the answers that it expects to its questions, which come in that order."""
    token = _ASKED.set(iter(expected(*args, **kwargs)))
    try:
        return function(*args, **kwargs)
    finally:
        _ASKED.reset(token)


def answer(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], bool] | None:
    """What answers an operator that reads data for a check; None for all others."""
    if func is _EQUAL and (asked := _ASKED.get()) is not None:
        return functools.partial(_answer, asked, *args)
    if func is _ALLCLOSE and args[0].is_cpu and "SvdBackward" in running_node()[1]:
        return functools.partial(_check_in_backward, *args, **kwargs)
    return None


def _answer(asked: Iterator[_Expected], condition: Tensor, true: Tensor) -> bool:
    holds, message = next(asked)
    token = _ASKED.set(None)
    try:
        if _EQUAL(condition, true) is holds:  # it is known at capture
            return holds
    except DataDependentOutputException:
        pass
    finally:
        _ASKED.reset(token)
    check_all(condition if holds else condition.logical_not(), lambda: message)
    return holds


def _check_in_backward(*args: Any, **kwargs: Any) -> bool:
    torch.ops.aten._assert_async.msg(torch.isclose(*args, **kwargs).all(), _PHASE)
    return True


def _of_istft(*_args: Any, **_kwargs: Any) -> list[_Expected]:
    return [(False, "istft: window overlap add min: 1 (somewhere the windows add up to zero)")]


def _of_cov(
    _input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Iterator[_Expected]:
    if fweights is not None:
        yield True, "cov(): fweights cannot be negative"
    if aweights is not None:
        yield True, "cov(): aweights cannot be negative"
    if fweights is not None or aweights is not None:
        yield True, "cov(): weights sum to zero, can't be normalized"
    yield (
        False,
        f"cov(): degrees of freedom is <= 0 (eager warns, and divides by zero); correction is {correction}",
    )


_EXPECTED = (("istft", _of_istft), ("cov", _of_cov))
INSTEAD: Mapping[Any, Callable[..., Any]] = {
    getattr(owner, name): functools.partial(_checked, getattr(owner, name), expected)
    for owner in (torch, torch.Tensor)
    for name, expected in _EXPECTED
}
"""What is called in a trace for PyTorch's functions."""
