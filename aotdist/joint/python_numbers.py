"""What a program does in Python with numbers that depend on data, where Python or PyTorch needs a value.

- `x[count.item()]` would index with a number: it becomes `select`, which takes a symbol.
- `max` and `min` would compare: they become PyTorch's functions for symbolic numbers.
- `torch._check` becomes a check that every call makes, with the program's own message.
- `dist.all_to_all_single` becomes the functional collective, whose splits may be symbols.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from aotdist.joint import collectives
from aotdist.joint.unbacked import Unbacked
from aotdist.torch_seam.checks import hearing_of_checks_of_numbers
from aotdist.torch_seam.groups import all_to_all_of_symbols
from aotdist.torch_seam.patches import Patch
from aotdist.torch_seam.symbols import depends_on_data

_GET_ITEM: Any = torch.Tensor.__getitem__
_SET_ITEM: Any = torch.Tensor.__setitem__


def _is_unbacked(number: Any) -> bool:
    return isinstance(number, torch.SymInt) and depends_on_data(number)


def _item(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """`tensor[index]`, an unbacked integer in it by `select`."""
    parts = index if isinstance(index, tuple) else (index,)
    others = (bool, torch.Tensor, list, tuple)
    if not any(map(_is_unbacked, parts)) or any(isinstance(part, others) for part in parts):
        return _GET_ITEM(tensor, index)
    dim, skipped = 0, tensor.dim() - sum(part is not None and part is not ... for part in parts)
    for part in parts:  # as eager does it: one dimension after the other
        if part is ...:
            dim += skipped
        elif part is None or isinstance(part, slice):
            tensor = _GET_ITEM(tensor, (*[slice(None)] * dim, part))
            dim += 1
        else:
            tensor = tensor.select(dim, part)
    return tensor


def _set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """`tensor[index] = value`."""
    if any(map(_is_unbacked, index if isinstance(index, tuple) else (index,))):
        tensor, index = _item(tensor, index), ...
    _SET_ITEM(tensor, index, value)


INSTEAD: Mapping[Any, Callable[..., Any]] = {_GET_ITEM: _item, _SET_ITEM: _set_item}
"""What runs instead of methods of tensors."""


def _extreme(function: Callable[..., Any], of_two: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def extreme(*args: Any, **kwargs: Any) -> Any:
        if _EXTREMES.value is None or kwargs or len(args) < 2 or not any(map(_is_unbacked, args)):
            return function(*args, **kwargs)
        return functools.reduce(of_two, args)

    return extreme


_PYTHONS = {"max": builtins.max, "min": builtins.min}
_RECORDED = {"max": _extreme(max, torch.sym_max), "min": _extreme(min, torch.sym_min)}


def _record_extremes(is_wanted: bool) -> None:
    for name, function in (_RECORDED if is_wanted else _PYTHONS).items():
        setattr(builtins, name, function)


_EXTREMES = Patch[bool]("extremes_to_be_recorded", _record_extremes)


@contextmanager
def followed(unbacked: Unbacked) -> Generator[None]:
    """Record what the program does inside with numbers that depend on data."""
    with (
        _EXTREMES.applied(True),
        hearing_of_checks_of_numbers(unbacked.require),
        all_to_all_of_symbols(collectives.all_to_all_single),
    ):
        yield
