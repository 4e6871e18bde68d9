"""Steps of PyTorch's optimizers, as functions of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from benchmarks.models import Llama, LlamaShape

State = Mapping[str, list[Tensor]]
"""Parameters, their gradients, and what the optimizer keeps: a list each, in one order."""


def state_of(parameters: Iterable[Tensor]) -> State:
    """Parameters with gradients, moments and numbers of steps; on the CPU."""
    own = [torch.empty_like(parameter, device="cpu") for parameter in parameters]
    rows = {
        name: [torch.empty_like(parameter) for parameter in own] for name in ("gradients", "means", "squares")
    }
    return {"parameters": own, **rows, "steps": [torch.zeros(()) for _ in own]}


def random_state(shape: LlamaShape, dtype: torch.dtype = torch.float32) -> State:
    """Such of a small Llama, as they might be after some steps."""
    torch.manual_seed(0)
    state = state_of(parameter.detach().to(dtype) for parameter in Llama(shape).parameters())
    for name in ("parameters", "gradients", "means", "squares"):
        for tensor in state[name]:
            tensor.uniform_(0 if name == "squares" else -1, 1)
    for at, steps in enumerate(state["steps"]):
        steps.fill_(at)
    return state


def adamw(state: State, *, foreach: bool = True) -> None:
    """A step of AdamW."""
    with torch.no_grad():
        torch_adamw(
            state["parameters"], state["gradients"], state["means"], state["squares"], [], state["steps"],
            foreach=foreach, capturable=True, amsgrad=False, beta1=0.9, beta2=0.999, lr=1e-2,
            weight_decay=0.01, eps=1e-8, maximize=False,
        )  # fmt: skip


def adamw_one_by_one(state: State) -> None:
    """A step of AdamW, parameter by parameter."""
    adamw(state, foreach=False)


def clipped_adamw(state: State) -> Tensor:
    """A step of AdamW with gradients whose norm is 1 at most; returns what it was."""
    norm = get_total_norm(state["gradients"], foreach=True)
    scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
    for gradient in state["gradients"]:
        gradient.mul_(scale)
    adamw(state)
    return norm


def sgd(state: State, *, foreach: bool = True) -> None:
    """A step of SGD with momentum."""
    with torch.no_grad():
        torch_sgd(
            state["parameters"], state["gradients"], list(state["means"]), foreach=foreach, lr=0.1,
            weight_decay=0.01, momentum=0.9, dampening=0.0, nesterov=True, maximize=False,
        )  # fmt: skip


def sgd_one_by_one(state: State) -> None:
    """A step of SGD with momentum, parameter by parameter."""
    sgd(state, foreach=False)


STEPS: Mapping[str, Callable[[State], object]] = {
    step.__name__: step for step in (adamw, adamw_one_by_one, clipped_adamw, sgd, sgd_one_by_one)
}
