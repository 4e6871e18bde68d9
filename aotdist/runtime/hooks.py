"""Hooks on results: called with a gradient, or not at all.

Autograd calls the hooks of all results of a node when it runs the node, with None for those that no gradient
came back to. In eager most tensors have a node of their own, and so their hooks are not called then.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotdist.convention.layer import Call
from aotdist.program import NodeOutIdx, PrimalIdx
from aotdist.torch_seam import set_hooks

Hook = Callable[[Any], Any]


class _Hooks(OrderedDict[int, Hook]):
    """What `register_hook` puts hooks into."""

    def __setitem__(self, key: int, hook: Hook) -> None:
        @functools.wraps(hook, updated=())
        def with_gradient(grad: Any) -> Any:
            return None if grad is None else hook(grad)

        super().__setitem__(key, with_gradient)


def shield(*results: torch.Tensor) -> None:
    """Keep hooks, which the caller may register later, from being called for other results. 1.5 us each."""
    for result in results:
        set_hooks(result, _Hooks())


def shielding(call: Call, shielded: Sequence[NodeOutIdx]) -> Call:
    """`call`, with these of its results shielded."""

    def shielded_call(primals: Sequence[Any]) -> list[Any]:
        values = call(primals)
        shield(*(values[idx] for idx in shielded))
        return values

    return shielded_call


def detaching(call: Call, detached: Sequence[PrimalIdx]) -> Call:
    """`call`, given these of its inputs without their history."""
    return lambda primals: call([p.detach() if k in detached else p for k, p in enumerate(primals)])
