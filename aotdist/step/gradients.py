"""Where `param.grad` is while a step is traced: in the trace, and not on the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from aotdist.errors import UnsupportedProgram
from aotdist.joint.inputs import gets_gradients

_GRAD: Any = torch.Tensor.grad


class GivesGradients(Exception):
    """A step gives gradients to more than it was known to.

    Args:
        leaves: the tensors, by name.
    """

    def __init__(self, leaves: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.leaves = leaves


def arguments_with_gradients(
    loss: torch.Tensor, params: Sequence[torch.Tensor], arguments: Sequence[Any]
) -> list[int]:
    """The positions of arguments that a backward gives gradients to; all else that it does so is known.

    Args:
        loss: where the backward begins.
        params: what it is known to give gradients to.
        arguments: of the step.

    Raises:
        GivesGradients: there are others, a criterion's weights say.
        UnsupportedProgram: one was computed before the step, and its gradient would go on from there.
    """
    known, others = set(map(id, params)), dict[str, torch.Tensor]()
    positions = {id(argument): at for at, argument in reversed(list(enumerate(arguments)))}
    found: list[int] = []
    for one in gets_gradients(loss):
        if not one.example.is_leaf:
            raise UnsupportedProgram(
                f"`{one.slot}` gets a gradient, and was computed before the step",
                stage="joint",
                fix="detach it, or compute it in the model or in `loss_fn`",
            )
        if id(one.example) in known:
            continue
        if id(one.tensor) in positions:
            found.append(positions[id(one.tensor)])
        else:
            others[str(one.slot)] = one.example
    if others:
        raise GivesGradients(others)
    return found


class Gradients(TorchFunctionMode):
    """Answers for the `grad` of parameters.

    Args:
        params: the parameters.
        stand_ins: what the traced modules hold in their places.
        before: the gradients that there are, in the trace.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        stand_ins: Sequence[torch.Tensor],
        before: Sequence[torch.Tensor | None],
    ) -> None:
        super().__init__()
        both = zip(params, stand_ins, range(len(params)), strict=True)
        self._index = {id(tensor): at for param, stand_in, at in both for tensor in (param, stand_in)}
        self._params = params
        self._keep = stand_ins  # as long as their identities are known
        self.now = list(before)
        self.reached = list[int]()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        at = self._index.get(id(args[0])) if args else None
        if at is not None:
            if func == _GRAD.__get__:
                return self.now[at]
            if func == _GRAD.__set__:
                self.now[at] = args[1]
                return None
            if func == _GRAD.__delete__:
                self.now[at] = None
                return None
        return func(*args, **(kwargs or {}))

    def backward(self, loss: torch.Tensor, more: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """What `loss.backward()` does to the gradients; those of `more`.

        Args:
            loss: where it begins.
            more: tensors that get gradients, and are no parameters.

        Raises:
            UnsupportedProgram: one is sparse.
        """
        wanted = [(at, param) for at, param in enumerate(self._params) if param.requires_grad]
        ends = [*(param for _, param in wanted), *more]
        found: Any = torch.autograd.grad(loss, ends, allow_unused=True)
        with torch.no_grad():
            for (at, param), grad in zip(wanted, found, strict=False):
                if grad is not None:
                    _refuse_sparse(grad)
                    self.reached.append(at)
                    known = self.now[at]
                    self.now[at] = _laid_out_like(grad, param) if known is None else known.add_(grad)
            return [_laid_out_like(*both) for both in zip(found[len(wanted) :], more, strict=True)]


def _refuse_sparse(grad: torch.Tensor) -> None:
    """Raise for a gradient of which a trace knows no element."""
    if grad.layout is not torch.strided:
        raise UnsupportedProgram(
            f"a parameter of size {list(grad.shape)} gets a sparse gradient",
            stage="joint",
            fix="let it be dense (`nn.Embedding(..., sparse=False)`), or use `aotdist.compile`",
        )


def _laid_out_like(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """`grad` with the strides of `param`, if that has no gaps, as autograd accumulates it.

    What reads gradients in the order of memory (a norm) adds up in another order otherwise. It is detached,
    too: a view that a backward took under `no_grad` could not be written with history (`grad.add_(param)`).
    """
    wanted = torch.empty_like(param).stride()
    if all(size == 1 or a == b for size, a, b in zip(grad.shape, grad.stride(), wanted, strict=True)):
        return grad.detach()
    return torch.empty_like(param).copy_(grad)
