"""What a backward changes in Python: hooks that log and count, autograd functions, checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.errors import UnsupportedProgram

KINDS = pytest.mark.parametrize("kind", ["plain", "two"])


class Noting(nn.Module):
    """What the tests change: each replaces `step`, which is given the module and its input."""

    def __init__(self, step: Callable[[Any, torch.Tensor], Any], kind: str) -> None:
        super().__init__()
        weight = torch.linspace(-1, 1, 3)
        self.weight = nn.Parameter(TwoTensor(weight, weight.clone()) if kind == "two" else weight)
        self.log: list[Any] = []
        self.count, self.scale, self.is_used, self.kept = 0, 1.0, False, torch.zeros(3)
        self.gradient: torch.Tensor | None = None
        self.options: dict[str, Any] = {"calls": 0, "heard": []}
        self.step = step

    def forward(self, x: torch.Tensor) -> Any:
        return self.step(self, x)

    def noted(self) -> tuple[Any, ...]:
        return self.log, self.count, self.scale, self.is_used, self.options, repr((self.kept, self.gradient))


def logs(module: Noting, x: torch.Tensor) -> torch.Tensor:
    y, z = x * module.weight, (x + module.weight).sin()
    y.register_hook(lambda _: module.log.append("y"))
    z.register_hook(lambda _: module.log.append("z"))
    return (y * z).sum()


def counts(module: Noting, x: torch.Tensor) -> torch.Tensor:
    def hook(grad: torch.Tensor) -> None:
        module.count += 2
        module.options["calls"] += 1

    y = x * module.weight
    y.register_hook(hook)
    return y.sum()


def counts_in_both(module: Noting, x: torch.Tensor) -> torch.Tensor:
    module.count += 1
    return counts(module, x) * module.count


def computes_with_count(module: Noting, x: torch.Tensor) -> torch.Tensor:
    def hook(grad: torch.Tensor) -> torch.Tensor:
        module.count += 1
        return grad * module.count

    y = x * module.weight
    y.register_hook(hook)
    return y.sum()


def anneals(module: Noting, x: torch.Tensor) -> torch.Tensor:
    def hook(grad: torch.Tensor) -> None:
        module.scale *= 0.5
        module.is_used = True
        module.options["last"] = ["a", {"b": 2}]
        module.options.pop("first", None)

    module.options.setdefault("first", 1)
    y = x * module.weight
    y.register_hook(hook)
    return y.sum() * module.scale


def doubles(module: Noting, x: torch.Tensor) -> torch.Tensor:
    def hook(grad: torch.Tensor) -> None:
        module.count = 2 * module.count + 1

    y = x * module.weight
    y.register_hook(hook)
    return y.sum()


def takes_out(module: Noting, x: torch.Tensor) -> torch.Tensor:
    module.options.setdefault("first", 1)
    y = x * module.weight
    y.register_hook(lambda _: module.options.pop("first", None) and None)
    return y.sum()


def takes_out_what_is_there(module: Noting, x: torch.Tensor) -> torch.Tensor:
    def hook(grad: torch.Tensor) -> None:
        del module.options["first"]

    module.options.setdefault("first", 1)
    y = x * module.weight
    y.register_hook(hook)
    return y.sum()


def counts_and_logs_in_one_place(module: Noting, x: torch.Tensor) -> torch.Tensor:
    def hook(grad: torch.Tensor) -> None:
        module.options["calls"] += 1
        module.options["heard"].append("heard")

    y = x * module.weight
    y.register_hook(hook)
    return y.sum()


def marks(module: Noting, x: torch.Tensor) -> torch.Tensor:
    def hook(grad: torch.Tensor) -> None:
        module.is_used, module.gradient = True, grad

    y = x * module.weight
    y.register_hook(hook)
    return y.sum()


def marks_every_other(module: Noting, x: torch.Tensor) -> torch.Tensor:
    def hook(grad: torch.Tensor) -> None:
        module.gradient = grad if module.gradient is None else None

    y = x * module.weight
    y.register_hook(hook)
    return y.sum()


def finds_what_the_forward_left(module: Noting, x: torch.Tensor) -> torch.Tensor:
    y = x * module.weight
    module.kept, module.count = (2 * x).detach(), 7
    y.register_hook(lambda grad: grad * module.count + module.kept)
    return y.sum()


class Told(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: list[str]) -> torch.Tensor:
        ctx.log = log
        log.append("forward")
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.log.append("backward")
        return grad * 2, None


def asks_a_function(module: Noting, x: torch.Tensor) -> torch.Tensor:
    return Told.apply(x * module.weight, module.log).sum()


def recomputes(module: Noting, x: torch.Tensor) -> torch.Tensor:
    def block(y: torch.Tensor) -> torch.Tensor:
        module.count += 1
        module.log.append("block")
        return (y * module.weight).sin()

    return checkpoint(block, x, use_reentrant=False).sum()


def recomputes_by_a_backward_inside(module: Noting, x: torch.Tensor) -> torch.Tensor:
    def block(y: torch.Tensor) -> torch.Tensor:
        module.count += 1
        return y.sin()

    return checkpoint(block, x * module.weight, use_reentrant=True).sum()


STEPS = [
    logs,
    counts,
    counts_in_both,
    computes_with_count,
    anneals,
    takes_out,
    takes_out_what_is_there,
    doubles,
    marks,
    counts_and_logs_in_one_place,
    marks_every_other,
    finds_what_the_forward_left,
    asks_a_function,
    recomputes,
    recomputes_by_a_backward_inside,
]


def inputs(kind: str) -> torch.Tensor:
    x = torch.linspace(0.5, 2, 3)
    return TwoTensor(x, x.clone()) if kind == "two" else x


def trained(module: nn.Module, kind: str, *, backwards: int = 1, interleaved: bool = False) -> list[Any]:
    seen: list[Any] = []
    for _ in range(4):
        losses = [module(inputs(kind)) for _ in range(2 if interleaved else 1)]
        for loss in losses:
            for k in range(backwards):
                loss.backward(retain_graph=k + 1 < backwards)
            seen += [loss.detach(), module.weight.grad.clone(), repr(module.noted())]
    return seen


def eager_and_ours(step: Callable[..., Any], kind: str = "plain") -> list[Noting]:
    return [Noting(step, kind), aotdist.compile(Noting(step, kind), backend="fx")]


def found_by(step: Callable[..., Any], kind: str, **how: Any) -> list[list[Any]]:
    found = []
    for module in eager_and_ours(step, kind):
        found.append([repr(each) for each in trained(module, kind, **how)])
    return found


@KINDS
@pytest.mark.parametrize("step", STEPS)
def test_step_by_step(step: Callable[..., Any], kind: str) -> None:
    eager, ours = found_by(step, kind)
    assert [text.replace("grad_fn", "") for text in ours] == eager


REPEATABLE = [
    *(logs, counts, counts_in_both, counts_and_logs_in_one_place),
    *(doubles, marks, finds_what_the_forward_left),
]


@pytest.mark.parametrize("step", REPEATABLE)
def test_twice_through_one_graph(step: Callable[..., Any]) -> None:
    eager, ours = found_by(step, "plain", backwards=2)
    assert ours == eager


@pytest.mark.parametrize("step", [*REPEATABLE, recomputes])
def test_two_forwards_then_two_backwards(step: Callable[..., Any]) -> None:
    eager, ours = found_by(step, "plain", interleaved=True)
    assert ours == eager


ONCE = [
    *(anneals, computes_with_count, takes_out, takes_out_what_is_there),
    *(marks_every_other, asks_a_function),
]


@pytest.mark.parametrize("step", ONCE)
def test_what_a_hook_may_read_and_changes_is_what_the_forward_left(step: Callable[..., Any]) -> None:
    module = aotdist.compile(Noting(step, "plain"), backend="fx")
    loss = module(inputs("plain"))
    loss.backward(retain_graph=True)
    before = module.weight.grad.clone()
    with pytest.raises(UnsupportedProgram, match="where its forward left"):
        loss.backward()
    assert torch.equal(module.weight.grad, before)


@pytest.mark.parametrize(
    "step", [counts, counts_in_both, doubles, counts_and_logs_in_one_place, recomputes_by_a_backward_inside]
)
def test_what_counts_is_compiled_once(step: Callable[..., Any]) -> None:
    module = aotdist.compile(Noting(step, "plain"), backend="fx")
    for _ in range(4):
        module(inputs("plain")).backward()
    assert len(module.graphs) == 1


def test_a_log_is_compiled_once() -> None:
    """Nothing else is done with it, so what it holds does not matter."""

    def step(module: Noting, x: torch.Tensor) -> torch.Tensor:
        y = x * module.weight
        module.log.extend(["forward", y.detach()])
        y.register_hook(lambda _: module.log.append("backward"))
        return y.sum()

    eager, ours = eager_and_ours(step)
    for module in (eager, ours):
        for _ in range(4):
            module(inputs("plain")).backward()
    assert repr(eager.log) == repr(ours.log)
    assert len(ours.graphs) == 1


def test_a_log_that_is_looked_at_matters() -> None:
    def step(module: Noting, x: torch.Tensor) -> torch.Tensor:
        module.log.append("forward")
        return (x * module.weight).sum() * len(module.log)

    module = aotdist.compile(Noting(step, "plain"), backend="fx")
    found = [module(inputs("plain")).item() for _ in range(3)]
    assert found == pytest.approx([k * found[0] for k in (1, 2, 3)])


def branches(module: Noting, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y, z = x * module.weight, x + module.weight
    y.register_hook(lambda _: module.log.append("y"))
    z.register_hook(lambda _: module.log.append("z"))
    return y.sin().sum(), z.cos().sum()


def test_only_what_gradients_pass() -> None:
    found = []
    for module in eager_and_ours(branches):
        for order in ([0, 1], [1, 0]):
            losses = module(inputs("plain"))
            for k in order:
                losses[k].backward()
                module.log.append("|")
        first, second = module(inputs("plain"))
        (first + second).backward()
        found.append((module.log, module.weight.grad.tolist()))
    assert found[0] == found[1]


def keeps_sizes(module: Noting, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y, size = x * module.weight, x.shape[0]

    def hook(grad: torch.Tensor) -> None:
        module.options["size"] = [size, 2 * grad.shape[0], grad.sum().item() / size]

    y.register_hook(hook)
    return y.sum(), y.sin().sum()


@pytest.mark.parametrize("results", [[0], [1], [0, 1]])
def test_sizes_that_are_kept_are_numbers_in_the_backward_of_some_results(results: list[int]) -> None:
    kept = []
    for module in (
        Noting(keeps_sizes, "plain"),
        aotdist.compile(Noting(keeps_sizes, "plain"), backend="fx", dynamic=True),
    ):
        found = []
        for length in (4, 5):
            losses = module(torch.ones(length, 3))
            torch.stack([losses[k] for k in results]).sum().backward()
            found.append([(type(each), each) for each in module.options["size"]])
        kept.append(found)
    assert kept[0] == kept[1]


def test_between_hooks_of_leaves_and_of_results() -> None:
    found = []
    for module in eager_and_ours(logs):
        module.weight.register_hook(lambda _, log=module.log: log.append("weight"))
        module.weight.register_post_accumulate_grad_hook(lambda _, log=module.log: log.append("accumulated"))
        for _ in range(2):
            loss = module(inputs("plain"))
            loss.register_hook(lambda _, log=module.log: log.append("loss"))
            loss.backward()
        found.append(module.log)
    assert found[0] == found[1]


def test_gradients_with_a_history() -> None:
    found = []
    for module in eager_and_ours(logs):
        (grad,) = torch.autograd.grad(module(inputs("plain")), module.weight, create_graph=True)
        found.append((list(module.log), grad.tolist()))
    assert found[0] == found[1]


def test_they_are_printed() -> None:
    module = aotdist.compile(Noting(counts_in_both, "plain"), backend="fx")
    for _ in range(2):
        module(inputs("plain")).backward()
    assert re.search(r"CHANGES\.replay\(\[\], symbols\)  # changes .*count", module.source)
