"""Fake results of operators that were met before in a trace: the layers of a model are alike.

What a result is like depends on what the arguments are like, and on the constants among them. When the same
meet again, as they do in each layer, a result is made from what is known of the first: no fake kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch.fx.immutable_collections import immutable_list

from aotdist.torch_seam.functional import FakeTensor, FakeTensorMode, Likeness, comparable, may_be_made_anew
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.tensors import storage_id
from aotdist.torch_seam.trees import pytree

_CONSTANTS = frozenset(
    {int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_LISTS = frozenset({list, tuple, torch.Size, immutable_list})


class _Unlike(Exception):
    """An argument of which nothing is known."""


_Result: TypeAlias = tuple[Likeness, bool]
"""One tensor among an operator's results: what it is like, and whether it lies in the first argument."""


class KnownResults:
    """What the results of operators were like, in one trace.

    Args:
        mode: the mode of the trace's fakes.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._numbers: dict[Likeness, int] = {}
        self._fakes: dict[int, tuple[Any, int | None]] = {}
        """By identity, which the fake is held for: the number of what it is like, if that is all. Nothing
        writes a value of a functional graph, so that stays."""
        self._known: dict[Hashable, tuple[type, tuple[_Result | None, ...]]] = {}
        """The type of a call's result, and the tensors in it."""

    def key(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable | None:
        """What decides what the result of a call is like; None if something else may."""
        if torch.is_inference_mode_enabled() or not may_be_made_anew(self._mode):
            return None
        try:
            return func, torch.get_default_dtype(), self._described(args), self._described([*kwargs.items()])
        except _Unlike:
            return None

    def _described(self, values: Sequence[Any]) -> tuple[Hashable, ...]:
        found: list[Hashable] = []
        for value in values:
            kind = type(value)
            if kind in _CONSTANTS:
                found += (kind, value)  # 1 equals 1.0, which gives another dtype
            elif kind is torch.SymInt:
                found.append(comparable(value))
            else:
                found.append(self._described(value) if kind in _LISTS else self._number(value))
        return tuple(found)

    def _number(self, value: Any) -> int:
        known = self._fakes.get(id(value))
        if known is None:
            likeness = Likeness.of(value) if isinstance(value, FakeTensor) else None
            number = None if likeness is None else self._numbers.setdefault(likeness, len(self._numbers))
            known = self._fakes[id(value)] = value, number
        if known[1] is None:
            raise _Unlike
        return known[1]

    def knows(self, key: Hashable | None) -> bool:
        """Whether it is known what the result of such a call is like."""
        return key in self._known

    def result(
        self,
        key: Hashable | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        compute: Callable[[], Any],
    ) -> Any:
        """The result of a call: made anew where it is known what it is like, else what `compute` gives."""
        known = self._known.get(key)
        if known is None:
            result = compute()
            if key is not None:
                with suppress(_Unlike):
                    self._known[key] = self._noted(args, kwargs, result)
            return result
        kind, results = known
        made = [None if one is None else self._made(one, args) for one in results]
        return kind(made) if issubclass(kind, (tuple, list)) else made[0]

    def _made(self, result: _Result, args: tuple[Any, ...]) -> FakeTensor:
        likeness, is_view = result
        fake = likeness.made(self._mode, args[0] if is_view else None)
        self._fakes[id(fake)] = fake, self._numbers.setdefault(likeness, len(self._numbers))
        return fake

    def _noted(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> tuple[type, tuple[_Result | None, ...]]:
        """What a result is like.

        Raises:
            _Unlike: what is made from that would be another.
        """
        fakes = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        if not fakes:
            raise _Unlike  # the default device decides
        owners = {storage_id(fake): fake for fake in reversed(fakes)}
        results = result if isinstance(result, (tuple, list)) else (result,)
        return type(result), tuple(
            [None if one is None else self._part(one, args, owners) for one in results]
        )

    def _part(self, one: Any, args: tuple[Any, ...], owners: dict[int, FakeTensor]) -> _Result:
        """One tensor of a result: in memory of its own, or in that of the first argument."""
        likeness = Likeness.of(one) if isinstance(one, FakeTensor) else None
        if likeness is None:
            raise _Unlike
        owner = owners.get(storage_id(one))
        is_elsewhere = owner is not None and owner is not args[0]
        if is_elsewhere or one is owner or Likeness.of(likeness.made(self._mode, owner)) != likeness:
            raise _Unlike
        owners.setdefault(storage_id(one), one)
        return likeness, owner is not None
