"""A cache of the metadata of operators' results, for one trace.

Each layer of a model calls the same operators on tensors with the same metadata and on the same constants,
which decide the metadata of the results. From the second such call on, the fake results are made from the
cache, and no fake kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch.fx.immutable_collections import immutable_list

from aotdist.torch_seam.functional import (
    FakeMetadata,
    FakeTensor,
    FakeTensorMode,
    comparable,
    may_be_made_anew,
)
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.tensors import storage_id
from aotdist.torch_seam.trees import pytree

_CONSTANTS = frozenset(
    {int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_LISTS = frozenset({list, tuple, torch.Size, immutable_list})


class _NotDescribed(Exception):
    """An argument or a result that the cache cannot describe."""


_Result: TypeAlias = tuple[FakeMetadata, bool]
"""One tensor among an operator's results: its metadata, and whether it shares the first argument's memory."""


class KnownResults:
    """The metadata of operators' results in one trace.

    Args:
        mode: the mode of the trace's fakes.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._numbers: dict[FakeMetadata, int] = {}
        self._fakes: dict[int, tuple[Any, int | None]] = {}
        """By identity of a fake: the fake, held so that the identity stays its own, and the number of its
        metadata, if that describes it. Nothing writes a value of a functional graph, so this stays true."""
        self._entries: dict[Hashable, tuple[type, tuple[_Result | None, ...]]] = {}
        """For each key the type of the result, and the tensors in it."""

    def key(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable | None:
        """What decides the metadata of a call's result; None if something else may."""
        if torch.is_inference_mode_enabled() or not may_be_made_anew(self._mode):
            return None
        try:
            return func, torch.get_default_dtype(), self._described(args), self._described([*kwargs.items()])
        except _NotDescribed:
            return None

    def _described(self, values: Sequence[Any]) -> tuple[Hashable, ...]:
        described: list[Hashable] = []
        for value in values:
            kind = type(value)
            if kind in _CONSTANTS:
                described += (kind, value)  # 1 equals 1.0, which gives another dtype
            elif kind is torch.SymInt:
                described.append(comparable(value))
            else:
                described.append(self._described(value) if kind in _LISTS else self._number(value))
        return tuple(described)

    def _number(self, value: Any) -> int:
        known = self._fakes.get(id(value))
        if known is None:
            metadata = FakeMetadata.of(value) if isinstance(value, FakeTensor) else None
            number = None if metadata is None else self._numbers.setdefault(metadata, len(self._numbers))
            known = self._fakes[id(value)] = value, number
        if known[1] is None:
            raise _NotDescribed
        return known[1]

    def knows(self, key: Hashable | None) -> bool:
        """Whether the result of such a call is in the cache."""
        return key in self._entries

    def result(
        self,
        key: Hashable | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        compute: Callable[[], Any],
    ) -> Any:
        """The result of a call: made from the cache if it is there, else what `compute` gives."""
        known = self._entries.get(key)
        if known is None:
            result = compute()
            if key is not None:
                with suppress(_NotDescribed):
                    self._entries[key] = self._entry_of(args, kwargs, result)
            return result
        kind, results = known
        made = [None if one is None else self._fake_from(one, args) for one in results]
        return kind(made) if issubclass(kind, (tuple, list)) else made[0]

    def _fake_from(self, result: _Result, args: tuple[Any, ...]) -> FakeTensor:
        metadata, is_view = result
        fake = metadata.made(self._mode, args[0] if is_view else None)
        self._fakes[id(fake)] = fake, self._numbers.setdefault(metadata, len(self._numbers))
        return fake

    def _entry_of(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> tuple[type, tuple[_Result | None, ...]]:
        """The entry for a result.

        Raises:
            _NotDescribed: what is made from such an entry would differ.
        """
        fakes = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        if not fakes:
            raise _NotDescribed  # the default device decides
        owners = {storage_id(fake): fake for fake in reversed(fakes)}
        results = result if isinstance(result, (tuple, list)) else (result,)
        return type(result), tuple(
            [None if one is None else self._tensor_entry(one, args, owners) for one in results]
        )

    def _tensor_entry(self, one: Any, args: tuple[Any, ...], owners: dict[int, FakeTensor]) -> _Result:
        """The entry for one tensor, which lies in memory of its own or in that of the first argument."""
        metadata = FakeMetadata.of(one) if isinstance(one, FakeTensor) else None
        if metadata is None:
            raise _NotDescribed
        owner = owners.get(storage_id(one))
        is_elsewhere = owner is not None and owner is not args[0]
        if is_elsewhere or one is owner or FakeMetadata.of(metadata.made(self._mode, owner)) != metadata:
            raise _NotDescribed
        owners.setdefault(storage_id(one), one)
        return metadata, owner is not None
