"""Attributes of tensors, and tensors inside of wrappers: they are handed back as the program left them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import inner_tensors
from aotdist.torch_seam.classes import attributes_from_users
from aotdist.torch_seam.functional import FunctionalTensor, given_attributes


def appearance(tensor: torch.Tensor) -> tuple[type[torch.Tensor], dict[str, Any]]:
    """The class of a plain tensor, to the program, and its attributes."""
    if isinstance(tensor, FunctionalTensor):
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return torch.nn.Parameter if is_parameter else torch.Tensor, given_attributes(tensor)
    return type(tensor), attributes_from_users(tensor)


def hand_over_attributes(stand_ins: Iterable[torch.Tensor], examples: Iterable[torch.Tensor]) -> None:
    """Give tensors the attributes of their stand-ins."""
    for stand_in, example in zip(stand_ins, examples, strict=True):
        if isinstance(stand_in, FunctionalTensor):
            given, held = given_attributes(stand_in), vars(example)
            for name in held.keys() - given.keys():
                del held[name]
            held.update(given)


def inside_wrappers(inputs: Sequence[torch.Tensor]) -> dict[tuple[int, str], torch.Tensor]:
    """What is inside the wrappers among a program's inputs, by position of the input and path (`.scale`)."""
    return {(idx, path): inner for idx, tensor in enumerate(inputs) for path, inner in inner_tensors(tensor)}


def replaced_inside(
    inputs: Sequence[torch.Tensor], inside: Mapping[tuple[int, str], torch.Tensor]
) -> dict[tuple[int, str], torch.Tensor]:
    """The tensors inside of wrappers that the program has put in the place of others (`weight.scale = new`).

    The replaced ones are put back: they may have been written, and outside they are in place until the
    program is over.

    Args:
        inputs: those of the program.
        inside: what was inside of them before it ran.

    Raises:
        UnsupportedProgram: something that is no tensor replaces one.
    """
    found: dict[tuple[int, str], torch.Tensor] = {}
    for (idx, path), before in inside.items():
        if any(idx == other and path.startswith(f"{outer}.") for other, outer in found):
            continue  # the wrapper that it was in has been replaced
        now = operator.attrgetter(path[1:])(inputs[idx])
        if now is before:
            continue
        if not isinstance(now, torch.Tensor):
            raise UnsupportedProgram(
                f"the tensor `{path[1:]}` of a {type(inputs[idx]).__name__} is replaced by a "
                f"{type(now).__name__}",
                stage="capture",
                fix="replace it by a tensor, or outside of the compiled function",
            )
        found[idx, path] = now
    for idx, path in found:
        around, _, name = path[1:].rpartition(".")
        setattr(operator.attrgetter(around)(inputs[idx]) if around else inputs[idx], name, inside[idx, path])
    return found
