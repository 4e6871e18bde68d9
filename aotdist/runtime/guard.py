"""What is asked of the tensors of a call: metadata, places in storages, and memory that they share."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from aotdist.convention.memory import share_memory
from aotdist.sizes import is_symbolic
from aotdist.subclasses.protocol import Constant, Recipe
from aotdist.torch_seam.symbols import SYMBOLIC
from aotdist.torch_seam.tensors import TensorGuards, storage_id


def tensor_check(examples: Sequence[torch.Tensor], recipes: Sequence[Recipe]) -> TensorGuards:
    """A check of many tensors at once, in C++ (5.5 us for 100).

    `check(*tensors)` is true when each has the type, dtype, device, dispatch keys, sizes, strides and
    `requires_grad` of its example, and all are different objects. Symbolic sizes and strides are left open.
    """
    if not is_symbolic(tuple(recipes)):
        return TensorGuards(*examples, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    sizes: Any
    strides: Any
    sizes, strides = ([_known(numbers) for numbers in of] for of in zip(*map(_numbers, recipes), strict=True))
    return TensorGuards(*examples, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def _numbers(recipe: Recipe) -> tuple[Sequence[Any], Sequence[Any]]:
    assert not isinstance(recipe, Constant), "a tensor's recipe"
    return recipe.size, recipe.stride


def _known(numbers: Sequence[Any]) -> list[int | None]:
    return [None if isinstance(number, SYMBOLIC) else number for number in numbers]


def place_in_storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins in its storage (in elements), and how large the storage is (in bytes)."""
    return int(tensor.storage_offset()), tensor.untyped_storage().nbytes()


def no_overlap(written: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether no tensor of `written` shares memory with another of `written` or one of `others`.

    Tensors on different storages never do (0.1 us each); each is compared with those on its own.
    """
    everything = [*written, *others]
    storages = [storage_id(tensor) for tensor in everything]
    count = Counter(storages)
    if len(count) == len(storages):
        return True
    together: dict[int, list[int]] = {}
    for position, storage in enumerate(storages):
        if count[storage] > 1:
            together.setdefault(storage, []).append(position)
    return not any(
        share_memory(everything[a], everything[b])
        for positions in together.values()
        for a, b in itertools.combinations(positions, 2)
        if a < len(written)
    )


def are_outside(others: Sequence[torch.Tensor], members: Sequence[torch.Tensor]) -> bool:
    """Whether none of `others` shares memory with the tensors that lie in a span.

    The span itself is on a storage of its own, which `no_overlap` takes for other memory.
    """
    storage = storage_id(members[0])
    near = [other for other in others if storage_id(other) == storage]
    return not any(share_memory(member, other) for member in members for other in near)
