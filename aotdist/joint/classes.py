"""Tensors of the user's classes in a trace: the program makes some of others, and asks them what to do."""

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
        """Let go of what is the caller's: from now on, no input is met for the first time."""
        self._stand_in = None
        self.guises.forget_attributes()

    @property
    def guises(self) -> Guises:
        """What the trace's tensors show."""
        return self._recorder.guises

    @contextmanager
    def shown(self, *, asked: bool = True) -> Generator[None]:
        """The user's code runs: a forward, or what of it takes part in a backward.

        Args:
            asked: whether classes hear of torch functions.
        """
        with self.guises.worn(), hearing_of_classes(self._remake):
            with class_functions_on() if asked else class_functions_off():
                yield

    def are_asked_in_backward(self, outs: Sequence[Any]) -> bool:
        """Whether classes hear of torch functions in the backward of a program that returns `outs`.

        That is for its caller to say. One who starts at a tensor of such a class calls a torch function,
        which the usual `__torch_function__` runs without asking again.
        """
        shown = (self.guises.class_of(out) for out in outs)
        return not any(hears_of_functions(cls) for cls in shown if cls is not None)

    def _remake(
        self, tensor: torch.Tensor, cls: type[torch.Tensor], op: Callable[..., torch.Tensor]
    ) -> torch.Tensor | None:
        """`tensor` as a tensor of another class, if it is one of the trace's, or is to become one."""
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
    """What the first of the classes that has an answer gives for a torch function, as eager asks them.

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
        # PyTorch asks the argument, so that one which is no class method is told which it is.
        answer = instances.get(cls, cls).__torch_function__(func, types, args, kwargs)
        if answer is not NotImplemented:
            return answer
    name = getattr(func, "__qualname__", getattr(func, "__name__", func))
    raise TypeError(f"`{name}`: {', '.join(cls.__name__ for cls in types)} returned NotImplemented")
