"""A contender's share of a row: something to run, and what it must agree about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.operators import Operator, Sizes
from benchmarks.timing import nothing


@dataclass(frozen=True, slots=True)
class Workload:
    """One contender, ready to run.

    Args:
        run: what is timed.
        outcome: runs it once and returns what all contenders must agree about; this compiles.
        prepare: brings back what `run` expects, before each run.
        num_bytes: the least that a run moves, where memory is what it waits for.
        resident: bytes of weights and optimizer states, which lie there between runs.
    """

    run: Callable[[], object]
    outcome: Callable[[], Sequence[Tensor]]
    prepare: Callable[[], object] = nothing
    num_bytes: int = 0
    resident: Callable[[], int] = lambda: 0


def of_operator(
    operator: Operator, program: Callable[..., Any], sizes: Sizes, device: torch.device
) -> Workload:
    """A program of one kernel, with inputs of its own.

    Args:
        operator: what it is.
        program: that operator's, compiled in some way.
        sizes: of the inputs.
        device: where they lie.
    """
    torch.manual_seed(0)
    with torch.device(device):
        inputs = operator.inputs(sizes)
    num_bytes = int(operator.moves * inputs[0].nbytes)
    if operator.direction == "forward":
        return _forward(program, inputs, num_bytes, writes=operator.writes)
    leaves = [tensor.requires_grad_() for tensor in inputs if tensor.is_floating_point()]
    return _gradients(program, inputs, leaves, num_bytes, alone=operator.direction == "backward")


def _forward(
    program: Callable[..., Any], inputs: Sequence[Tensor], num_bytes: int, *, writes: bool
) -> Workload:
    def run() -> Any:
        with torch.no_grad():
            return program(*inputs)

    def outcome() -> Sequence[Tensor]:
        found = run()
        if writes:
            return [tensor.clone() for tensor in inputs]
        return found if isinstance(found, tuple) else (found,)

    return Workload(run, outcome, num_bytes=num_bytes)


def _gradients(
    program: Callable[..., Any],
    inputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    num_bytes: int,
    *,
    alone: bool,
) -> Workload:
    """Gradients of a result, each time of a new one: some kernels write over what they are handed."""
    recorded: list[tuple[Tensor, Tensor | None]] = []

    def record() -> None:
        out = program(*inputs)
        recorded[:] = [(out, leaves[0].detach().clone() if out.dim() else None)]

    def differentiate() -> Sequence[Tensor]:
        ((out, tangent),) = recorded
        return torch.autograd.grad(out, leaves, tangent)

    def both() -> Sequence[Tensor]:
        record()
        return differentiate()

    return Workload(differentiate if alone else both, both, record if alone else nothing, num_bytes)


def of_module(
    module: nn.Module,
    inputs: Sequence[Tensor],
    call: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer | None,
) -> Workload:
    """A step of training.

    Args:
        module: whose parameters are trained.
        inputs: of the call.
        call: the module, compiled in some way; returns the loss, or something to be summed.
        optimizer: makes a step, if there is one.
    """

    def gradients() -> Tensor:
        loss = call(*inputs)
        loss = loss if loss.dim() == 0 else loss.float().mean()
        loss.backward()
        return loss.detach()

    def run() -> None:
        gradients()
        if optimizer is not None:
            optimizer.step()
        module.zero_grad()

    def outcome() -> Sequence[Tensor]:
        loss = gradients().clone()
        squares = [p.grad.float().square().sum() for p in module.parameters() if p.grad is not None]
        norm = torch.stack(squares).sum().sqrt()
        module.zero_grad()
        return loss, norm

    def resident() -> int:
        states = optimizer.state.values() if optimizer is not None else ()
        kept = [tensor for state in states for tensor in state.values() if isinstance(tensor, Tensor)]
        return sum(tensor.nbytes for tensor in (*kept, *module.parameters(), *module.buffers()))

    # What `torch.compile`'s CUDA graphs hand out is theirs again when a step begins.
    return Workload(run, outcome, torch.compiler.cudagraph_mark_step_begin, resident=resident)
