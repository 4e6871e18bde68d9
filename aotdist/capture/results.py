"""Classes and attributes of a program's tensors; tensors inside of wrappers stay."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import inner_tensors, is_real, is_wrapper
from aotdist.torch_seam.classes import attributes_from_users
from aotdist.torch_seam.functional import FunctionalTensor, given_attributes


def refuse_attributes(outs: Sequence[Any], inputs: Sequence[torch.Tensor]) -> None:
    """Refuse attributes that the program gives to a tensor which it computes and returns, or assigns.

    Args:
        outs: what the program returns and assigns.
        inputs: its inputs, whose attributes are watched (`Assignments`).

    Raises:
        UnsupportedProgram: such a tensor has an attribute, or is a parameter.
    """
    seen = set(map(id, inputs))
    for out in outs:
        if id(out) in seen or not isinstance(out, torch.Tensor) or is_real(out) or is_wrapper(out):
            continue
        cls, attributes = appearance(out)
        names = [name for name in attributes if "dynamo" not in name]  # marks that transformers' caches set
        if names or (cls is not torch.Tensor and not out.requires_grad):  # new leaves are refused later
            has = f"has the attribute `{names[0]}`" if names else f"is a {cls.__name__}"
            raise UnsupportedProgram(
                f"a tensor that the program computes and returns {has}, which calls would not repeat",
                stage="capture",
                fix="return what the attribute holds, or set it outside of what is compiled",
            )


def appearance(tensor: torch.Tensor) -> tuple[type[torch.Tensor], dict[str, Any]]:
    """The class that a plain tensor has to the program, and its attributes."""
    if isinstance(tensor, FunctionalTensor):
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return torch.nn.Parameter if is_parameter else torch.Tensor, given_attributes(tensor)
    return type(tensor), attributes_from_users(tensor)


def hand_over_attributes(stand_ins: Iterable[torch.Tensor], examples: Iterable[torch.Tensor]) -> None:
    """Set the attributes of tensors to those of their stand-ins."""
    for stand_in, example in zip(stand_ins, examples, strict=True):
        if isinstance(stand_in, FunctionalTensor):
            given, held = given_attributes(stand_in), vars(example)
            for name in held.keys() - given.keys():
                del held[name]
            held.update(given)


def inside_wrappers(inputs: Sequence[torch.Tensor]) -> dict[tuple[int, str], torch.Tensor]:
    """The tensors inside of wrapper inputs, by position of the input and path (`.scale`)."""
    return {(idx, path): inner for idx, tensor in enumerate(inputs) for path, inner in inner_tensors(tensor)}


def refuse_replaced(inputs: Sequence[torch.Tensor], inside: Mapping[tuple[int, str], torch.Tensor]) -> None:
    """Refuse a program that assigns a tensor inside of a wrapper among its inputs (`weight.scale = new`).

    Args:
        inputs: the inputs of the program.
        inside: the tensors inside of them before it ran.

    Raises:
        UnsupportedProgram: one of these was replaced.
    """
    for (idx, path), before in inside.items():
        if operator.attrgetter(path[1:])(inputs[idx]) is not before:
            raise UnsupportedProgram(
                f"the tensor `{path[1:]}` inside of a {type(inputs[idx]).__name__} is replaced by another",
                stage="capture",
                fix=f"write it in place (`x{path}.copy_(new)`), or replace it outside of what is compiled",
            )
