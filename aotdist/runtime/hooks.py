"""Hooks on results and on inputs are called as in eager: with a gradient, or not at all.

Autograd calls the hooks of all results of a node when it runs the node, with None for those that no gradient
came back to, and those of all inputs with whatever the node returns. In eager most tensors have a node of
their own, and so their hooks are not called then.

Hooks of leaves are called in the order in which their gradients arrive in eager. The node has all of them at
once, and autograd would take leaves as they lie in its heap; so each that has hooks gets a node in between,
and of these the one that was made last goes first.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch

from aotdist.convention.layer import Call
from aotdist.program import NodeOutIdx, PrimalIdx
from aotdist.torch_seam import (
    call_after_backward,
    hooks_after_accumulation,
    hooks_of_gradient,
    node_base,
    set_hooks,
)

Hook = Callable[[Any], Any]


class _Hooks(OrderedDict[int, Hook]):
    """What `register_hook` puts hooks into."""

    def __setitem__(self, key: int, hook: Hook) -> None:
        super().__setitem__(key, _with_gradient(hook))


def _with_gradient(hook: Hook) -> Hook:
    @functools.wraps(hook, updated=())
    def with_gradient(grad: Any) -> Any:
        return None if grad is None else hook(grad)

    return with_gradient


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


class _Turn(node_base()):
    """Passes a tensor on, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.tensor = tensor
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:
            _silence(ctx.tensor)
        return grad


def _silence(tensor: torch.Tensor) -> None:
    """No hooks of a tensor, until the backward ends, unless a gradient comes from elsewhere."""
    grad = tensor.grad if tensor.is_leaf else None
    version = None if grad is None else grad._version

    def after_accumulation(hook: Hook) -> Hook:
        @functools.wraps(hook, updated=())
        def if_accumulated(leaf: torch.Tensor) -> Any:
            unchanged = leaf.grad is grad and (grad is None or grad._version == version)
            return None if unchanged else hook(leaf)

        return if_accumulated

    _wrap(hooks_of_gradient(tensor), _with_gradient)
    _wrap(hooks_after_accumulation(tensor), after_accumulation)


def _wrap(hooks: MutableMapping[int, Hook] | None, wrapped: Callable[[Hook], Hook]) -> None:
    """Let other hooks stand in their places until the backward ends."""
    if not hooks:
        return
    before = dict(hooks)
    hooks.update({key: wrapped(hook) for key, hook in before.items()})
    call_after_backward(lambda: hooks.update({k: hook for k, hook in before.items() if k in hooks}))


def heard_in_turn(order: Sequence[int], *given: Any) -> Sequence[Any]:
    """`given`, so that hooks of those at the positions `order` are called in that order; 0.1 us each."""
    hooked = [k for k in order if hooks_of_gradient(given[k]) or hooks_after_accumulation(given[k])]
    if not hooked:
        return given
    taken = list(given)
    for k in reversed(hooked):
        taken[k] = _Turn.apply(given[k])
    return taken


def taking_turns(call: Call, order: Sequence[PrimalIdx]) -> Call:
    """`call`, given its inputs by `heard_in_turn`."""
    return lambda primals: call(heard_in_turn(order, *primals))


def detaching(call: Call, detached: Sequence[PrimalIdx]) -> Call:
    """`call`, given these of its inputs without their history."""
    return lambda primals: call([p.detach() if k in detached else p for k, p in enumerate(primals)])
