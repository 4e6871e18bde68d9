"""Numbers that a program reads off tensors and keeps: lists, dictionaries, attributes, hooks, as in eager."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import aotdist
from aotdist.errors import UnsupportedProgram

CALLS = 4


class Meter:
    """An average over calls, as training scripts have it."""

    def __init__(self) -> None:
        self.total, self.count, self.average = 0.0, 0, 0.0

    def update(self, value: float, count: int) -> None:
        self.total += value * count
        self.count += count
        self.average = self.total / self.count


class Keeping(nn.Module):
    """What the tests run: `step` is given the module, which has places to keep numbers in, and its input."""

    def __init__(self, step: Callable[[Keeping, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 3))
        self.log: list[Any] = []
        self.metrics: dict[str, Any] = {}
        self.lists: dict[str, list[Any]] = defaultdict(list)
        self.last: Any = None
        self.average, self.best, self.meter = 0.0, math.inf, Meter()
        self.recent: deque[Any] = deque(maxlen=2)
        self.step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(self, x)

    def kept(self) -> list[Any]:
        grad = None if self.weight.grad is None else self.weight.grad.tolist()
        return [
            self.log,
            self.metrics,
            dict(self.lists),
            self.last,
            self.average,
            self.best,
            vars(self.meter),
            grad,
        ]


def loss_of(m: Keeping, x: torch.Tensor) -> torch.Tensor:
    return (m.weight * x).sin().sum()


def in_a_list(m: Keeping, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(m, x)
    m.log.append(loss.item())
    return loss


def in_a_dictionary(m: Keeping, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(m, x)
    m.metrics["loss"] = loss.item()
    return loss


def in_lists_of_a_dictionary(m: Keeping, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(m, x)
    m.lists["loss"].append(loss.item())
    m.lists["loss"].append(x.max().item())
    return loss


def in_an_attribute(m: Keeping, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(m, x)
    m.last = loss.item()
    return loss


def of_every_type(m: Keeping, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(m, x)
    m.log.extend([loss.half().item(), loss.bfloat16().item(), loss.double().item(), loss.long().item()])
    m.log.extend([(x > 0).any().item(), (x > 0).sum().item(), (x * 9).to(torch.uint8)[0].item()])
    return loss


def as_lists(m: Keeping, x: torch.Tensor) -> torch.Tensor:
    m.log.append(x.tolist())
    m.log.extend((x > 0).view(3, 1).tolist())
    return loss_of(m, x)


def an_average(m: Keeping, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(m, x)
    m.average = 0.9 * m.average + 0.1 * loss.item()
    return loss


def a_meter(m: Keeping, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(m, x)
    m.meter.update(loss.item(), x.shape[0])
    return loss


def the_best(m: Keeping, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(m, x)
    m.best = min(m.best, loss.item())
    return loss


def computed(m: Keeping, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(m, x)
    value, count = loss.item(), (x > 0).sum().item()
    m.log.extend([value / 3 + 1, 1 - value, -value, abs(value) ** 0.5, value**2, value // 0.3, value % 0.7])
    m.log.extend(
        [round(value, 3), round(value), math.exp(value), math.trunc(value), math.isnan(value), value > 0.2]
    )
    m.log.extend(
        [count / 3, count * 2 + 1, count // 2, max([value, 0.1]), max(count, 1), sum([value, count])]
    )
    return loss


def used_too(m: Keeping, x: torch.Tensor) -> torch.Tensor:
    scale = x.norm().item()
    m.log.append(scale)
    return loss_of(m, x) * (scale / 2)


def written_later(m: Keeping, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    m.log.append(y.sum().item())
    y.add_(1)
    m.log.append(y.sum().item())
    return loss_of(m, y)


def by_a_hook(m: Keeping, x: torch.Tensor) -> torch.Tensor:
    y = m.weight * x
    y.register_hook(lambda grad: m.log.append(grad.norm().item() / 2))
    y.register_hook(lambda grad: m.log.append({"grad": [grad.max().item(), grad.tolist()]}))
    y.register_hook(lambda grad: m.metrics.__setitem__("grad", grad.max().item()))
    return y.sin().sum()


def an_attribute_by_a_hook(m: Keeping, x: torch.Tensor) -> torch.Tensor:
    def hook(grad: torch.Tensor) -> None:
        m.last = grad.norm().item()

    y = m.weight * x
    y.register_hook(hook)
    return y.sin().sum()


def averages_by_a_hook(m: Keeping, x: torch.Tensor) -> torch.Tensor:
    def hook(grad: torch.Tensor) -> None:
        m.average = 0.9 * m.average + 0.1 * grad.norm().item()
        m.meter.update(grad.norm().item(), len(grad))
        m.best = min(m.best, grad.max().item())
        m.log.append(grad.min().item())

    y = m.weight * x
    y.register_hook(hook)
    return y.sin().sum()


NOTES: list[Any] = []


class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        NOTES.append(x.max().item())
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        NOTES.append((grad.max().item(), grad.shape[0]))
        return grad * 2


def by_a_function(m: Keeping, x: torch.Tensor) -> torch.Tensor:
    return Noting.apply(m.weight * x).sin().sum()


STEPS = {
    step.__name__: step
    for step in (
        *(in_a_list, in_a_dictionary, in_lists_of_a_dictionary, in_an_attribute, of_every_type, as_lists),
        *(an_average, a_meter, the_best, computed, used_too, written_later),
        *(by_a_hook, an_attribute_by_a_hook, averages_by_a_hook, by_a_function),
    )
}
PROGRAMS = {
    # Places that hold nothing yet, or whose type changes, make the second call another program.
    "in_a_dictionary": 2,
    "in_lists_of_a_dictionary": 2,
    "in_an_attribute": 2,
    "the_best": 2,
    "by_a_hook": 2,
    "an_attribute_by_a_hook": 2,
}


def kept_by(
    step: Callable[[Keeping, torch.Tensor], torch.Tensor], backend: str | None
) -> tuple[list[Any], int]:
    """What calls with backwards keep, and how many programs were made."""
    NOTES.clear()
    module = Keeping(step)
    called = module if backend is None else aotdist.compile(module, backend=backend)
    generator = torch.Generator().manual_seed(0)
    results = []
    for _ in range(CALLS):
        result = called(torch.randn(3, generator=generator))
        result.backward()
        results.append(result.item())
    count = 0 if backend is None else len(aotdist.api.compiled_call(called).artifacts)
    return [*module.kept(), results, NOTES.copy()], count


@pytest.mark.parametrize("name", STEPS)
def test_what_is_kept_is_eagers(name: str) -> None:
    expected, _ = kept_by(STEPS[name], None)
    found, num_programs = kept_by(STEPS[name], "fx")
    assert repr(found) == repr(expected)
    assert num_programs <= PROGRAMS.get(name, 1)


@pytest.mark.parametrize("name", ["in_a_list", "an_average", "by_a_hook"])
def test_inductor_keeps_them_too(name: str) -> None:
    expected, _ = kept_by(STEPS[name], None)
    found, _ = kept_by(STEPS[name], "inductor")
    numbers = [n for n in pytree.tree_leaves(found) if isinstance(n, float)]
    assert numbers == pytest.approx([n for n in pytree.tree_leaves(expected) if isinstance(n, float)])


class Reads(TorchDispatchMode):
    """Counts reads of tensors, each of which waits for a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("step", [in_a_list, computed, written_later])
def test_no_tensor_is_read_more_often_than_in_eager(step: Callable[..., torch.Tensor]) -> None:
    x = torch.ones(3)
    counts = []
    for backend in (None, "fx"):
        module = Keeping(step)
        called = module if backend is None else aotdist.compile(module, backend=backend)
        with torch.no_grad():
            called(x)
            with Reads() as reads:
                called(x)
        counts.append(reads.count)
    assert 0 < counts[1] <= counts[0]


def test_hooks_of_several_modules_share_a_log() -> None:
    def run(*, compiles: bool) -> tuple[list[Any], int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        log: list[Any] = []
        for module in list(model):
            module.register_forward_hook(lambda _, given, out: log.append(out.norm().item()))
            module.register_full_backward_hook(lambda _, into, outof: log.append(outof[0].norm().item()))
        model = aotdist.compile(model, backend="fx") if compiles else model
        for scale in range(1, CALLS):
            model((torch.ones(2, 3) * scale).requires_grad_()).sum().backward()
        return log, len(aotdist.api.compiled_call(model).artifacts) if compiles else 1

    assert run(compiles=True) == run(compiles=False)


def test_a_training_step_keeps_what_its_loss_reads() -> None:
    def run(*, compiles: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        log, metrics, meter = [], {}, Meter()

        def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            log.append(loss.item())
            metrics["loss"] = loss.item()
            meter.update(loss.item(), len(x))
            return loss

        step = aotdist.train_step(model, loss_fn, optimizer, backend="fx" if compiles else "eager")
        for _ in range(CALLS + 1):
            x, y = torch.randn(6, 4), torch.randint(3, (6,))
            step(x, y)
        return log, metrics, vars(meter), len(step._made_so_far()) <= 2

    assert run(compiles=True) == run(compiles=False)


@dataclass
class Record:
    loss: float


REFUSED: dict[str, tuple[Callable[[list[Any], torch.Tensor], Any], str]] = {
    "float": (lambda log, loss: log.append(float(loss)), r"`float\(tensor\)` needs the value"),
    "int": (lambda log, loss: log.append(int(loss)), r"`int\(tensor\)` needs the value"),
    "bool": (lambda log, loss: log.append(bool(loss > 0)), "depends on a number"),
    "a text": (lambda log, loss: log.append(f"{loss.item():.3f}"), "a text .* needs the value"),
    "str": (lambda log, loss: log.append(str(loss.item())), "a text .* needs the value"),
    "a branch": (lambda log, loss: log.append(1) if loss.item() > 0 else None, "depends on a number"),
    "an object": (lambda log, loss: log.append(Record(loss.item())), "numbers that it reads off tensors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_a_value_at_once_is_refused_by_name(name: str) -> None:
    keep, what = REFUSED[name]
    log: list[Any] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        keep(log, x.detach().sum())
        return x * 2

    with warnings.catch_warnings(), pytest.raises(UnsupportedProgram, match=what):
        aotdist.compile(program, backend="fx")(torch.ones(3))
    assert log == []


def test_what_goes_wrong_after_a_number_was_read_is_eagers() -> None:
    def program(x: torch.Tensor, log: list[Any]) -> torch.Tensor:
        log.append(x.sum().item())
        return x @ torch.ones(4)

    with pytest.raises(RuntimeError, match="size") as eagers:
        program(torch.ones(3), [])
    with pytest.raises(RuntimeError, match="size") as ours:
        aotdist.compile(program, backend="fx")(torch.ones(3), [])
    assert type(ours.value) is type(eagers.value)


def test_a_deque_of_them_is_refused() -> None:
    def step(m: Keeping, x: torch.Tensor) -> torch.Tensor:
        m.recent.append(x.sum().item())
        return x * 2

    module = aotdist.compile(Keeping(step), backend="fx")
    with pytest.raises(UnsupportedProgram, match="`recent` is a deque, and is given"):
        module(torch.ones(3))
    assert not module.recent


def test_a_hook_that_computes_with_a_number_of_the_forward_has_that_of_its_own_call() -> None:
    def step(m: Keeping, x: torch.Tensor) -> torch.Tensor:
        y, size = m.weight * x, x.sum().item()
        y.register_hook(lambda grad: m.log.append(grad.norm().item() / size))
        return y.sin().sum()

    eager, ours = Keeping(step), aotdist.compile(Keeping(step), backend="fx")
    for module in (eager, ours):
        for loss in [module(torch.ones(3)), module(2 * torch.ones(3))]:
            loss.backward()
    assert len(eager.log) == 2
    assert ours.log == eager.log
