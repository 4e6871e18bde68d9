"""Steps of PyTorch's optimizers as functions of tensors, for all parameters of a Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from benchmarks.models import Llama, LlamaShape

State = Mapping[str, list[Tensor]]
"""Parameters, their gradients, and what the optimizer keeps: a list each, in one order."""


def state_of(shape: LlamaShape, dtype: torch.dtype = torch.float32) -> State:
    """Parameters of a Llama, with gradients, moments and numbers of steps."""
    torch.manual_seed(0)
    parameters = [parameter.detach().to(dtype) for parameter in Llama(shape).parameters()]
    return {
        "parameters": parameters,
        "gradients": [torch.randn_like(parameter) for parameter in parameters],
        "means": [torch.randn_like(parameter) for parameter in parameters],
        "squares": [torch.rand_like(parameter) for parameter in parameters],
        "steps": [torch.tensor(float(at)) for at in range(len(parameters))],
    }


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
    torch._foreach_mul_(state["gradients"], (1.0 / (norm + 1e-6)).clamp(max=1.0))
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
