"""Classes and attributes of the tensors that a program returns; tensors inside of wrappers stay."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.capture.constants import is_leaf
from aotdist.capture.environment import Reached
from aotdist.capture.leaked_tensors import hides_traced, refusal
from aotdist.capture.source import Source
from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import inner_tensors, is_real, is_wrapper
from aotdist.torch_seam.classes import attributes_from_users
from aotdist.torch_seam.functional import FunctionalTensor, given_attributes
from aotdist.torch_seam.trees import pytree


@dataclass(frozen=True, slots=True)
class Shown:
    """The class and the attributes of one output.

    Args:
        out: its position among the outputs.
        cls: its class: `torch.Tensor`, or `nn.Parameter`.
        attributes: of each its name, the structure of its value, and which output is its first leaf.
    """

    out: int
    cls: type[torch.Tensor]
    attributes: tuple[tuple[str, pytree.TreeSpec, int], ...]


def with_attributes(
    outs: Sequence[Any], inputs: Sequence[torch.Tensor], reached: Reached, existing: Collection[int]
) -> tuple[list[Any], list[Shown]]:
    """`outs`, followed by the values of attributes of tensors among them; and these attributes.

    In these values, objects that the program has found somewhere are represented by their place. Attributes
    of inputs are left out: `Assignments` has them.

    Args:
        outs: the leaves of what the program returns.
        inputs: the tensors among its inputs.
        reached: what it can reach.
        existing: identities of objects from before the call.

    Raises:
        UnsupportedProgram: an attribute hides tensors that the program computes.
    """
    places = _places(reached)
    flat, shown, seen = list(outs), list[Shown](), set(map(id, inputs))
    for position, out in enumerate(flat):  # attributes are appended to it in the loop
        if id(out) in seen or not isinstance(out, torch.Tensor) or is_real(out) or is_wrapper(out):
            continue
        seen.add(id(out))
        cls, attributes = appearance(out)
        found: list[tuple[str, pytree.TreeSpec, int]] = []
        for name, value in attributes.items():
            leaves, spec = pytree.tree_flatten(value, is_leaf=lambda v: is_leaf(v) or id(v) in places)
            found.append((name, spec, len(flat)))
            flat += [places.get(id(leaf), leaf) for leaf in leaves]
            _refuse_hidden(cls, name, leaves, existing)
        if found or cls is not torch.Tensor:
            shown.append(Shown(position, cls, tuple(found)))
    return flat, shown


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


def show_as(tensor: torch.Tensor, cls: type[torch.Tensor], attributes: Mapping[str, Any]) -> None:
    """Set the class and attributes of a real tensor."""
    if type(tensor) is not cls:
        tensor.__class__ = cls
    vars(tensor).update(attributes)


def _places(reached: Reached) -> Mapping[int, Source]:
    """The places of objects that are no constants, by identity."""
    known = [*reached.assignable.containers, *reached.assignable.owners, *reached.identities]
    return {id(value): source for source, value in known if not isinstance(value, torch.Tensor)}


def _refuse_hidden(
    cls: type[torch.Tensor], name: str, leaves: Sequence[Any], existing: Collection[int]
) -> None:
    for leaf in leaves:
        if hides_traced(leaf, existing):
            raise refusal(
                f"the attribute `{name}` of a {cls.__name__} is a {type(leaf).__name__} that holds tensors "
                "which the program computes",
                "assign the tensors themselves",
            )


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
