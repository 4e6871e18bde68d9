"""Tensors inside of wrappers that the program replaces: `weight.scale = new_scale`."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import inner_tensors


class WrapperAttributes:
    """What is inside the wrappers among the inputs of a program, before it runs.

    Args:
        inputs: what it is given.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._inputs = inputs
        self._before = {
            (idx, path): inner for idx, tensor in enumerate(inputs) for path, inner in inner_tensors(tensor)
        }

    def replaced(self) -> dict[tuple[int, str], torch.Tensor]:
        """The tensors that have replaced others, by position of the input and path (`.scale`).

        The replaced ones are put back: they may have been written, and outside they are in place until the
        program is over.

        Raises:
            UnsupportedProgram: something that is no tensor replaces one.
        """
        found: dict[tuple[int, str], torch.Tensor] = {}
        for (idx, path), before in self._before.items():
            if any(idx == other and path.startswith(f"{outer}.") for other, outer in found):
                continue  # the wrapper that it was in has been replaced
            now = operator.attrgetter(path[1:])(self._inputs[idx])
            if now is before:
                continue
            if not isinstance(now, torch.Tensor):
                raise UnsupportedProgram(
                    f"the tensor `{path[1:]}` of a {type(self._inputs[idx]).__name__} is replaced by a "
                    f"{type(now).__name__}",
                    stage="capture",
                    fix="replace it by a tensor, or outside of the compiled function",
                )
            found[idx, path] = now
        for idx, path in found:
            around, _, name = path[1:].rpartition(".")
            owner = operator.attrgetter(around)(self._inputs[idx]) if around else self._inputs[idx]
            setattr(owner, name, self._before[idx, path])
        return found
