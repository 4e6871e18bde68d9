"""Tensors of the user's classes in a trace: conversions between classes, and `__torch_function__`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from aotdist.capture.guise import Guises
from aotdist.joint.recorder import Recorder
from aotdist.subclasses.protocol import is_wrapper
from aotdist.torch_seam.classes import dispatches, hearing_of_classes, hears_of_functions
from aotdist.torch_seam.functional import FakeTensor, FunctionalTensor
from aotdist.torch_seam.modes import class_functions_off, class_functions_on, torch_functions_off
from aotdist.torch_seam.trees import pytree


class Classes:
    """Lets the user's code of one trace see its classes.

    Args:
        recorder: records the trace.
        stand_in: the stand-in of a tensor that the program closes over.
    """

    def __init__(self, recorder: Recorder, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._recorder = recorder
        self._stand_in: Callable[[torch.Tensor], torch.Tensor] | None = stand_in

    def forget_inputs(self) -> None:
        """Drop the caller's tensors and attributes: no new input is met from now on."""
        self._stand_in = None
        self.guises.forget_attributes()

    @property
    def guises(self) -> Guises:
        """The classes and attributes that the trace's tensors show."""
        return self._recorder.guises

    @contextmanager
    def shown(self, *, asked: bool = True) -> Generator[None]:
        """For while the user's code runs: a forward, or hooks and autograd functions in a backward.

        Args:
            asked: whether `__torch_function__` of classes is called.
        """
        with self.guises.worn(), hearing_of_classes(self._remake):
            with class_functions_on() if asked else class_functions_off():
                yield

    def are_asked_in_backward(self, outs: Sequence[Any]) -> bool:
        """Whether `__torch_function__` is called in the backward of a program that returns `outs`.

        That depends on the caller. `backward` of a tensor of such a class is a torch function, and the
        default `__torch_function__` runs it with those of classes switched off.
        """
        shown = (self.guises.class_of(out) for out in outs)
        return not any(hears_of_functions(cls) for cls in shown if cls is not None)

    def _remake(
        self, tensor: torch.Tensor, cls: type[torch.Tensor], op: Callable[..., torch.Tensor]
    ) -> torch.Tensor | None:
        """`tensor` as a tensor of another class, if it is the trace's, or has or gets a stand-in there."""
        if cls is FunctionalTensor:  # of a plain tensor, where nothing is shown as another class
            cls = torch.Tensor
        if not self.guises.are_worn or dispatches(cls):
            return None
        if is_wrapper(tensor) or isinstance(tensor, FakeTensor):
            return None
        with torch_functions_off():
            if self._recorder.is_foreign(tensor):
                if self._stand_in is None:
                    return None
                tensor = self._stand_in(tensor)
            made = op(tensor)
            return made if cls is torch.Tensor else self.guises.give(made, cls, {})


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
