"""Tensor classes of the user's in a trace: what stand-ins show, conversions, and `__torch_function__`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from aotdist.capture.constants import is_constant
from aotdist.capture.results import appearance
from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import FIX_OF_OWN_CLASS, is_of_own_class, is_wrapper
from aotdist.torch_seam.classes import dispatches, intercept_classes
from aotdist.torch_seam.functional import FakeTensor, FunctionalTensor, let_be_of
from aotdist.torch_seam.modes import class_functions_on, torch_functions_off
from aotdist.torch_seam.tensors import as_parameter
from aotdist.torch_seam.trees import pytree
from aotdist.trace.failures import refusal


@contextmanager
def users_code(swap: Callable[[torch.Tensor], torch.Tensor]) -> Generator[None]:
    """Around the user's code: a forward, or hooks and autograd functions in a backward.

    Args:
        swap: gives the stand-in of a real tensor; returns any other tensor unchanged.
    """
    with intercept_classes(functools.partial(_converted, swap)), class_functions_on():
        yield


def _converted(
    swap: Callable[[torch.Tensor], torch.Tensor],
    tensor: torch.Tensor | None,
    cls: type[torch.Tensor],
    op: Callable[..., torch.Tensor],
) -> torch.Tensor | None:
    """`tensor` as a plain tensor or a parameter; None if PyTorch is to make one: a wrapper makes itself.

    Raises:
        UnsupportedProgram: it is to be of a class of the user's.
    """
    if cls is FunctionalTensor:  # the class of a stand-in, which the program may ask for
        cls = torch.Tensor
    if dispatches(cls) or isinstance(tensor, FakeTensor) or is_wrapper(tensor):
        return None
    if cls not in (torch.Tensor, torch.nn.Parameter):
        raise refusal(f"the program makes a tensor of the class {cls.__name__}", FIX_OF_OWN_CLASS)
    if tensor is None:
        return None
    with torch_functions_off():
        made = op(swap(tensor))
        return as_parameter(made) if cls is torch.nn.Parameter else made


def show_as_example(tensor: torch.Tensor, example: torch.Tensor, path: str) -> None:
    """Let a stand-in show the attributes of its example, and the methods of a class that the example has.

    Raises:
        UnsupportedProgram: that class has `__slots__`.
    """
    is_plain = isinstance(tensor, FunctionalTensor)
    if is_plain and is_of_own_class(example):
        cls = type(example)
        try:
            let_be_of(tensor, cls)
        except TypeError as error:
            raise UnsupportedProgram(
                f"`{path}` is a {cls.__name__}, a class that no other tensor can be given ({error})",
                stage="capture",
                fix=f"give {cls.__name__} no `__slots__`, or pass `x.as_subclass(torch.Tensor)`",
            ) from None
    for name, value in appearance(example)[1].items():
        if is_plain or is_constant(value):
            vars(tensor).setdefault(name, value)


def ask_classes(
    func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The result of a torch function by the first `__torch_function__` that has one, as in eager.

    Args:
        func: the function.
        types: classes of arguments with a `__torch_function__`, in the order in which they are asked.
        args: positional arguments.
        kwargs: keyword arguments.

    Raises:
        TypeError: none of them has.
    """
    instances = {type(leaf): leaf for leaf in pytree.tree_leaves((args, kwargs))}
    for cls in types:
        # PyTorch looks it up on the argument: an implementation that is no class method gets it as `self`.
        answer = instances.get(cls, cls).__torch_function__(func, types, args, kwargs)
        if answer is not NotImplemented:
            return answer
    name = getattr(func, "__qualname__", getattr(func, "__name__", func))
    raise TypeError(f"`{name}`: {', '.join(cls.__name__ for cls in types)} returned NotImplemented")
