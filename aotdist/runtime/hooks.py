"""Hooks on results and inputs are called as in eager: with a gradient, or not at all.

When autograd runs a node, it calls the hooks of all its results, with None for results without a gradient,
and those of all its inputs. In eager most tensors have a node of their own, which does not run if there is no
gradient, so their hooks are not called.

So the hooks of each result skip None. An input with hooks gets a node in between, which disables them during
a backward that brings the input no gradient. The order in which hooks of different tensors run is autograd's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.torch_seam.autograd import call_after_backward, node_base
from aotdist.torch_seam.tensors import (
    gradients_heard,
    hooks_after_accumulation,
    hooks_of_gradient,
    set_hooks,
    with_hooks,
)

Hook = Callable[[Any], Any]


class _Hooks(OrderedDict[int, Hook]):
    """The dictionary of a tensor's hooks, into which `register_hook` puts them."""

    def __setitem__(self, key: int, hook: Hook) -> None:
        super().__setitem__(key, _WithGradient(hook))


@dataclass(frozen=True, slots=True)
class _WithGradient:
    """A hook that is called only with a gradient, not with None."""

    hook: Hook

    def __call__(self, grad: Any) -> Any:
        if grad is not None:
            return self.hook(grad)
        self._count_missing_gradient()
        return None

    def _count_missing_gradient(self) -> None:
        """Let a hook of `register_multi_grad_hook` go on without this gradient, if it gets any of the others.

        It waits for all tensors whose nodes will run, and the program's one node leads to all its inputs.
        """
        match gradients_heard(self.hook):
            case None:
                pass
            case 0:
                call_after_backward(lambda: self.hook(None) if gradients_heard(self.hook) else None)
            case _:
                self.hook(None)


class _IfAccumulated:
    """A hook that is called after accumulation, if a gradient was accumulated since this object was made."""

    def __init__(self, hook: Hook, leaf: torch.Tensor) -> None:
        self._hook, self._grad = hook, leaf.grad
        self._version = None if leaf.grad is None else leaf.grad._version

    def __call__(self, leaf: torch.Tensor) -> Any:
        unchanged = leaf.grad is self._grad and (self._grad is None or self._grad._version == self._version)
        return None if unchanged else self._hook(leaf)


def shield(*results: torch.Tensor) -> None:
    """Let hooks that the caller registers on `results` later skip None. 1.5 us each."""
    for result in results:
        set_hooks(result, _Hooks())


class _Silencing(node_base()):
    """The identity; where its backward gets no gradient, it disables the input's hooks."""

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
    """Disable a tensor's hooks until the backward ends, unless a gradient comes from elsewhere."""
    _wrap(hooks_of_gradient(tensor), _WithGradient)
    _wrap(hooks_after_accumulation(tensor), lambda hook: _IfAccumulated(hook, tensor))


def _wrap(hooks: MutableMapping[int, Hook] | None, wrapped: Callable[[Hook], Hook]) -> None:
    """Replace hooks by wrapped ones until the backward ends."""
    before = {k: h for k, h in (hooks or {}).items() if not isinstance(h, (_WithGradient, _IfAccumulated))}
    if hooks is not None and before:
        hooks.update({key: wrapped(hook) for key, hook in before.items()})
        call_after_backward(lambda: hooks.update({k: hook for k, hook in before.items() if k in hooks}))


def with_silenced_hooks(positions: Sequence[int], *inputs: Any) -> Sequence[Any]:
    """`inputs`, with a node in between for those at `positions` that have hooks."""
    hooked = with_hooks(positions, inputs)
    if not hooked:
        return inputs
    return [_Silencing.apply(each) if k in hooked else each for k, each in enumerate(inputs)]
