"""Foreach operators taken apart: one operator for each tensor of their lists.

Optimizers call one operator on lists of all parameters, so that a GPU is not handed a kernel for each. Apart,
the operators of one parameter share a kernel, and `bundling.py` launches those of all parameters as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from aotdist.torch_seam.operators import OpOverload, argument_names

aten = torch.ops.aten

_NAMES = (
    "abs", "add", "addcdiv", "addcmul", "clamp_max", "clamp_min", "copy", "div", "exp", "lerp", "log",
    "maximum", "minimum", "mul", "neg", "pow", "reciprocal", "rsqrt", "sigmoid", "sign", "sqrt", "sub",
    "tanh",
)  # fmt: skip
_OTHERWISE_NAMED = {"norm": "linalg_vector_norm"}
_BY_KEYWORD = {"value": "value", "scalars": "value", "alpha": "alpha", "dtype": "dtype"}
"""Arguments that the operator of one tensor takes by keyword only, and how it calls them."""
_LEFT_ALONE = frozenset({"addcdiv.Tensor", "addcmul.Tensor"})
"""A tensor of one number for each list item, which only the device knows."""


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """What foreach operators are made of."""
    made: dict[OpOverload, Callable[..., Any]] = {}
    for name in (*_NAMES, *_OTHERWISE_NAMED):
        packet = getattr(aten, f"_foreach_{name}")
        one = getattr(aten, _OTHERWISE_NAMED.get(name, name))
        for overload in packet.overloads():
            is_out = overload == "out" or overload.endswith("_out")
            if not is_out and f"{name}.{overload}" not in _LEFT_ALONE:
                op = getattr(packet, overload)
                made[op] = partial(_each, argument_names(op), one)
    return made


def _each(names: Sequence[str], one: Callable[..., Any], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """What `one` makes of each item of the lists among some named arguments."""
    given = dict(zip(names, args, strict=False)) | kwargs
    given.pop("non_blocking", None)
    lists = {name: value for name, value in given.items() if isinstance(value, (list, tuple))}
    results: list[torch.Tensor] = []
    for items in zip(*lists.values(), strict=True):
        own = given | dict(zip(lists, items, strict=True))
        keywords = {_BY_KEYWORD[name]: own.pop(name) for name in list(own) if name in _BY_KEYWORD}
        results.append(one(*own.values(), **keywords))
    return results
