"""Where the tensors of a call's arguments are: any pytree of tensors and constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.capture.constants import is_constant, is_leaf, same_constant
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam import pytree, tree_children


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor in the arguments; `path` as the user would write it (`args[0]['x']`, `mask`)."""

    path: str


@dataclass(frozen=True, slots=True)
class ConstantLeaf:
    """A constant in the arguments."""

    path: str
    value: Any


@dataclass(frozen=True, slots=True)
class Arguments:
    """The structure of one call's arguments.

    Args:
        spec: pytree structure of `(args, kwargs)`.
        leaves: what stands at each leaf, in pytree order.
    """

    spec: pytree.TreeSpec
    leaves: tuple[TensorLeaf | ConstantLeaf, ...]

    def tensor_paths(self) -> list[str]:
        """The paths of the tensor leaves."""
        return [leaf.path for leaf in self.leaves if isinstance(leaf, TensorLeaf)]

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` with `tensors` at the tensor leaves."""
        remaining = iter(tensors)
        values = [leaf.value if isinstance(leaf, ConstantLeaf) else next(remaining) for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        return args, kwargs

    def match(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
        """The tensors of another call with this structure and these constants, or None."""
        values, spec = pytree.tree_flatten((args, self._in_order(kwargs)), is_leaf=is_leaf)
        if spec != self.spec:
            return None
        tensors: list[torch.Tensor] = []
        for leaf, value in zip(self.leaves, values, strict=True):
            if isinstance(leaf, TensorLeaf):
                if not isinstance(value, torch.Tensor):
                    return None
                tensors.append(value)
            elif not same_constant(leaf.value, value):
                return None
        return tensors

    def _in_order(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """`kwargs` in the order in which the first call gave them: keyword arguments have names for that."""
        names = tree_children(self.spec)[1].context
        return {name: kwargs[name] for name in names} if set(kwargs) == set(names) else dict(kwargs)


def read_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Arguments, list[torch.Tensor]]:
    """The structure of a call, and its tensors.

    Raises:
        UnsupportedProgram: a leaf is neither a tensor nor a constant.
    """
    pairs, spec = _named_leaves((args, dict(kwargs)))
    leaves: list[TensorLeaf | ConstantLeaf] = []
    tensors: list[torch.Tensor] = []
    for path, value in pairs:
        if isinstance(value, torch.Tensor):
            leaves.append(TensorLeaf(path))
            tensors.append(value)
        elif is_constant(value):
            leaves.append(ConstantLeaf(path, value))
        else:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise UnsupportedProgram(
                f"`{path}` is a {kind}, neither a tensor nor a constant",
                stage="capture",
                fix="pass its tensors, register its class with `torch.utils._pytree.register_pytree_node`, "
                "or close over it",
            )
    return Arguments(spec, tuple(leaves)), tensors


def _named_leaves(given: Any) -> tuple[list[tuple[str, Any]], pytree.TreeSpec]:
    try:
        pairs, spec = pytree.tree_flatten_with_path(given, is_leaf=is_leaf)
    except ValueError:  # a class was registered without names for what is in it
        values, spec = pytree.tree_flatten(given, is_leaf=is_leaf)
        return [(f"leaf {position} of the arguments", value) for position, value in enumerate(values)], spec
    return [(_path(keys), value) for keys, value in pairs], spec


def _path(key_path: Sequence[Any]) -> str:
    group, *rest = key_path
    text = "args" if group.idx == 0 else ""
    for position, key in enumerate(rest):
        # The first key beneath kwargs is the argument's name: the user wrote `mask`, not `kwargs['mask']`.
        text += str(key.key) if group.idx == 1 and position == 0 else pytree.keystr((key,))
    return text
