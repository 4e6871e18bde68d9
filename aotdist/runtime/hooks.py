"""Hooks on results and on inputs are called as in eager: with a gradient, or not at all.

Autograd calls the hooks of all results of a node when it runs the node, with None for those that no gradient
came back to, and those of all inputs with whatever the node returns. In eager most tensors have a node of
their own, and so their hooks are not called then.

So each result gets hooks that pass None over. An input with hooks gets a node in between, which silences them
for a backward that brings it no gradient. In which order hooks of different tensors are called is autograd's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.torch_seam.autograd import call_after_backward, node_base
from aotdist.torch_seam.hooks import (
    gradients_heard,
    hooks_after_accumulation,
    hooks_of_gradient,
    set_hooks,
    with_hooks,
)

Hook = Callable[[Any], Any]


class _Hooks(OrderedDict[int, Hook]):
    """What `register_hook` puts hooks into."""

    def __setitem__(self, key: int, hook: Hook) -> None:
        super().__setitem__(key, _WithGradient(hook))


@dataclass(frozen=True, slots=True)
class _WithGradient:
    """A hook that is called if there is a gradient."""

    hook: Hook

    def __call__(self, grad: Any) -> Any:
        if grad is not None:
            return self.hook(grad)
        self._tell_that_none_comes()
        return None

    def _tell_that_none_comes(self) -> None:
        """Let a hook that waits for several gradients go on without this one, if it gets any of the others.

        Such a hook asks the engine which nodes will run, and the program's one node leads to all its inputs.
        """
        match gradients_heard(self.hook):
            case None:
                pass
            case 0:
                call_after_backward(lambda: self.hook(None) if gradients_heard(self.hook) else None)
            case _:
                self.hook(None)


class _IfAccumulated:
    """A hook that is called, after accumulation, if something was accumulated since this was made."""

    def __init__(self, hook: Hook, leaf: torch.Tensor) -> None:
        self._hook, self._grad = hook, leaf.grad
        self._version = None if leaf.grad is None else leaf.grad._version

    def __call__(self, leaf: torch.Tensor) -> Any:
        unchanged = leaf.grad is self._grad and (self._grad is None or self._grad._version == self._version)
        return None if unchanged else self._hook(leaf)


def shield(*results: torch.Tensor) -> None:
    """Keep hooks, which the caller may register later, from being called for other results. 1.5 us each."""
    for result in results:
        set_hooks(result, _Hooks())


class _Silencing(node_base()):
    """Passes a tensor on, and its gradient back; without one, the tensor's hooks are not called."""

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
    """Call no hooks of a tensor until the backward ends, unless a gradient comes from elsewhere."""
    _wrap(hooks_of_gradient(tensor), _WithGradient)
    _wrap(hooks_after_accumulation(tensor), lambda hook: _IfAccumulated(hook, tensor))


def _wrap(hooks: MutableMapping[int, Hook] | None, wrapped: Callable[[Hook], Hook]) -> None:
    """Put wrapped hooks in the place of hooks until the backward ends."""
    before = {k: h for k, h in (hooks or {}).items() if not isinstance(h, (_WithGradient, _IfAccumulated))}
    if hooks is not None and before:
        hooks.update({key: wrapped(hook) for key, hook in before.items()})
        call_after_backward(lambda: hooks.update({k: hook for k, hook in before.items() if k in hooks}))


def with_silenced_hooks(positions: Sequence[int], *given: Any) -> Sequence[Any]:
    """`given`, so that hooks of those at `positions` are called with a gradient, or not at all."""
    hooked = with_hooks(positions, given)
    if not hooked:
        return given
    taken = list(given)
    for k in hooked:
        taken[k] = _Silencing.apply(given[k])
    return taken
