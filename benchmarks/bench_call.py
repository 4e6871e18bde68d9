"""Wrapper cost: microseconds of a call that computes next to nothing, over 100 inputs of 8 floats.

`torch.stack(inputs).sum()` reads 3 kB; what is left is what a compiler's wrapper does
for each input at each call, on one thread. Gradients come from `torch.autograd.grad`: storing them on
leaves costs every contender the same (100 x 1 us, 100 x 15 us for DTensors) and would only blur the
difference. The scalar is returned plain: of a function that returns a DTensor, torch 2.13's own pipeline
compiled the first copy in a process and failed on every later one ("Node tangents_2 was invalid, but is
output", also reported as pytorch/torchtitan issue 3013).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, assert_never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import aotdist
from benchmarks import workers
from benchmarks.effort import Case, Effort
from benchmarks.timing import Contender, Pace, Series, as_series, take_turns
from benchmarks.verdicts import Target

NUM_INPUTS = 100
NUM_ELEMENTS = 8

Inputs = Literal["plain", "replicated", "sharded", "two", "nested"]
Callee = Literal["function", "module"]
Mode = Literal["forward, no grad", "forward, recorded", "forward+backward"]

INPUTS: dict[Inputs, str] = {
    "plain": "tensors",
    "replicated": "DTensors, replicated",
    "sharded": "DTensors, sharded",
    "two": "TwoTensors",
    "nested": "TwoTensors of TwoTensors",
}
"""As the tables name them."""

CALLEES: tuple[Callee, ...] = ("function", "module")
MODES: tuple[Mode, ...] = ("forward, no grad", "forward, recorded", "forward+backward")


@dataclass(frozen=True, slots=True)
class Job:
    """What is called, and what with.

    Args:
        inputs: plain tensors, DTensors on a fake group of two ranks, or PyTorch's `TwoTensor`, which computes
            everything on two tensors.
        callee: a function of 100 arguments, or a module of 100 parameters and none.
        pace: rounds of blocks of calls.
    """

    inputs: Inputs
    callee: Callee
    pace: Pace


def case_name(inputs: Inputs, callee: Callee) -> str:
    """As the tables name it: `module, 100 DTensors, sharded`."""
    return f"{callee}, {NUM_INPUTS} {INPUTS[inputs]}"


LIMITS: dict[tuple[Inputs, Mode], float] = {
    ("plain", "forward, no grad"): 0.4,
    ("plain", "forward, recorded"): 0.4,
    ("plain", "forward+backward"): 0.65,
    ("replicated", "forward, no grad"): 0.2,
    ("replicated", "forward+backward"): 0.6,
    ("sharded", "forward, no grad"): 0.2,
    ("sharded", "forward+backward"): 0.6,
    ("two", "forward, no grad"): 0.5,
    ("two", "forward+backward"): 0.75,
    ("nested", "forward, no grad"): 0.5,
    ("nested", "forward+backward"): 0.7,
}

TARGETS = tuple(
    Target(
        case_name(inputs, callee), mode, "aotdist fx", ("torch.compile aot_eager",), limit, prediction=limit
    )
    for (inputs, mode), limit in LIMITS.items()
    for callee in CALLEES
)


@dataclass(frozen=True, slots=True)
class Callable100:
    """A contender before it is known how it is called: `call()` returns the scalar."""

    call: Callable[[], Tensor]
    inputs: Sequence[Tensor]


def cases(effort: Effort) -> list[Case]:
    """Microseconds a call, by mode and contender; a case for each kind of inputs and callee."""
    pace = Pace(rounds=10, calls=20, warmup=3) if effort.quick else Pace(rounds=60, calls=50, warmup=5)
    kinds: tuple[Inputs, ...] = ("plain", "replicated") if effort.quick else tuple(INPUTS)
    callees: tuple[Callee, ...] = CALLEES[:1] if effort.quick else CALLEES
    jobs = [Job(inputs, callee, pace) for inputs in kinds for callee in callees]
    return [Case(case_name(job.inputs, job.callee), partial(_measure, job, effort)) for job in jobs]


def _measure(job: Job, effort: Effort) -> list[Series]:
    case = case_name(job.inputs, job.callee)
    environment = effort.environment | {"OMP_NUM_THREADS": "1"}
    answer = workers.call(case, time_calls, job, environment=environment)
    return [
        series
        for mode, seconds in answer.items()
        for series in as_series(seconds, case=case, quantity=mode, unit="us")
    ]


def time_calls(job: Job) -> dict[Mode, dict[str, list[float]]]:
    """Seconds a call, by mode and contender."""
    if job.inputs in ("replicated", "sharded"):
        dist.init_process_group("fake", rank=0, world_size=2)
    callables = {name: make(job) for name, make in _makers(job).items()}
    check_agreement(callables)
    return {mode: _time_mode(mode, callables, job.pace) for mode in MODES}


def check_agreement(callables: dict[str, Callable100]) -> None:
    """Make sure that all contenders compute the same thing before their times are compared.

    Raises:
        RuntimeError: a contender's sum or gradients differ from eager's.
    """
    for name, each in callables.items():
        for mine, expected in zip(_outcome(each), _outcome(callables["eager"]), strict=True):
            if not torch.allclose(mine, expected):
                raise RuntimeError(f"{name} found {mine}, eager {expected}")


def _outcome(each: Callable100) -> list[Tensor]:
    total = each.call()
    grads = torch.autograd.grad(total, each.inputs)
    return [plain for tensor in (total, *grads) for plain in _plain(tensor)]


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """What a wrapper holds, or what a tensor is."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for held in (getattr(tensor, name) for name in names):
            yield from _plain(held) if isinstance(held, Tensor) else ()
    else:
        yield tensor


def _time_mode(mode: Mode, callables: dict[str, Callable100], pace: Pace) -> dict[str, list[float]]:
    contenders = [Contender(name, _runner(mode, each)) for name, each in callables.items()]
    with torch.set_grad_enabled(mode != "forward, no grad"):
        return take_turns(contenders, pace)


def _runner(mode: Mode, each: Callable100) -> Callable[[], object]:
    match mode:
        case "forward, no grad" | "forward, recorded":
            return each.call
        case "forward+backward":
            return lambda: torch.autograd.grad(each.call(), each.inputs)
    assert_never(mode)


def _makers(job: Job) -> dict[str, Callable[[Job], Callable100]]:
    """The contenders; a hand-written autograd node knows plain tensors only."""
    by_hand = {"autograd.Function": _by_hand} if job.inputs == "plain" else {}
    return {
        "eager": partial(_wrapped, lambda target: target),
        **by_hand,
        "torch.compile aot_eager": partial(_wrapped, partial(torch.compile, backend="aot_eager")),
        "torch.compile": partial(_wrapped, torch.compile),
        "aotdist fx": partial(_wrapped, partial(aotdist.compile, backend="fx")),
    }


def _wrapped(wrap: Callable[[Any], Callable[..., Tensor]], job: Job) -> Callable100:
    inputs = _make_inputs(job.inputs)
    if job.callee == "function":
        return Callable100(partial(wrap(_fresh(stack_and_sum)), *inputs), inputs)
    module = ManyParameters(inputs)
    return Callable100(wrap(module), list(module.parameters()))


def _by_hand(job: Job) -> Callable100:
    def wrap(target: Callable[..., Tensor]) -> Callable[..., Any]:
        if not isinstance(target, nn.Module):
            return StackAndSum.apply
        module = target

        def call() -> Tensor:
            return StackAndSum.apply(*module.parameters())

        return call

    return _wrapped(wrap, job)


def _fresh(fn: types.FunctionType) -> types.FunctionType:
    """A copy with a code object of its own: Dynamo keeps what it compiled per code object."""
    return types.FunctionType(fn.__code__.replace(co_name=f"{fn.__name__}_copy"), fn.__globals__)


def stack_and_sum(*tensors: Tensor) -> Tensor:
    """The work. Shapes: any number of (8,) -> ()."""
    total = torch.stack(tensors).sum()
    return total.full_tensor() if isinstance(total, DTensor) else total


class ManyParameters(nn.Module):
    """The same work over the module's own parameters."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        for position, tensor in enumerate(tensors):
            self.register_parameter(f"weight{position}", nn.Parameter(tensor.detach()))

    def forward(self) -> Tensor:
        """Shapes: () from 100 parameters of (8,)."""
        return stack_and_sum(*self.parameters())


class StackAndSum(torch.autograd.Function):
    """The least that a Python autograd node over all inputs can cost."""

    @staticmethod
    def forward(ctx: FunctionCtx, *tensors: Tensor) -> Tensor:
        """Stack and sum."""
        return stack_and_sum(*tensors)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, ...]:
        """The same gradient for every element."""
        (grad,) = grads
        return grad.expand(NUM_INPUTS, NUM_ELEMENTS).unbind()


def _make_inputs(kind: Inputs) -> list[Tensor]:
    torch.manual_seed(0)
    plain = [torch.randn(NUM_ELEMENTS) for _ in range(NUM_INPUTS)]
    match kind:
        case "plain":
            return [tensor.requires_grad_() for tensor in plain]
        case "two":
            return [TwoTensor(tensor, tensor.neg()).requires_grad_() for tensor in plain]
        case "nested":
            halves = [
                (TwoTensor(tensor, tensor.neg()), TwoTensor(tensor.sin(), tensor.cos())) for tensor in plain
            ]
            return [TwoTensor(*pair).requires_grad_() for pair in halves]
        case "replicated" | "sharded":
            pass
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placement = Shard(0) if kind == "sharded" else Replicate()
    return [distribute_tensor(tensor, mesh, [placement]).requires_grad_() for tensor in plain]
