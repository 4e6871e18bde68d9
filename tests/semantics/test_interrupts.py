"""Ctrl-C in the middle of a trace leaves thread, process and model as they were before it."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._guards import _TLS
from torch._inductor import virtualized
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.aliasing.view_mode import ViewMode
from aotdist.capture.ambient import ambient
from aotdist.export import aot_export_module
from aotdist.torch_seam.dynamo import dynamo_locks
from aotdist.torch_seam.patches import LOCKS, PATCHES, _held_by, is_owned

X = torch.tensor([[0.5, -1.0], [2.0, 0.25]])


class Net(nn.Module):
    """Modes, a checkpoint, a transform, random numbers; it changes attributes, a list and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(2, 2), nn.Dropout(0.5)
        self.register_buffer("total", torch.zeros(2))
        self.last, self.seen, self.kept = torch.zeros(()), [torch.zeros(())], {"count": 0}

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean = x.mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
        y = checkpoint(self.inner, y.float(), use_reentrant=False)
        self.total.add_(y.detach().sum(0))
        self.last = self.seen[0] = mean
        self.kept["count"] += 1
        return self.drop(torch.func.vmap(torch.sin)(y))


def made(cls: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return cls()


def other() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU())


def trained(model: nn.Module) -> list[torch.Tensor]:
    """All that a step with a model shows."""
    torch.manual_seed(1)
    model.zero_grad()
    out = model(X)
    out.sum().backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    held = [model.last, *model.seen, torch.tensor(model.kept["count"])] if isinstance(model, Net) else []
    return [out.detach(), *grads, *model.buffers(), *held, torch.rand(1)]


def are_equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def nesting_of_autocast() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def state_of(model: nn.Module) -> dict[str, Any]:
    """Thread, process, and what hangs on a model."""
    c = torch._C
    kinds = c._TorchDispatchModeKey.__members__.values()
    return {
        "ambient": ambient(),
        "grad modes": (c._is_fwd_grad_enabled(), c._is_multithreading_enabled(), c._is_view_replay_enabled()),
        "autocast": nesting_of_autocast(),
        "dispatch modes": [id(c._get_dispatch_stack_at(at)) for at in range(c._len_torch_dispatch_stack())],
        "modes of PyTorch's": [c._get_dispatch_mode(kind) for kind in kinds],
        "function modes": [id(c._get_function_stack_at(at)) for at in range(c._len_torch_function_stack())],
        "functions": c._get_torch_function_state(),
        "dispatch keys": (
            str(c._dispatch_tls_local_include_set()),
            str(c._dispatch_tls_local_exclude_set()),
        ),
        "transforms": c._functorch.get_dynamic_layer_stack_depth(),
        "dual level": torch.autograd.forward_ad._current_level,
        "saved tensors": (
            c._autograd._saved_tensors_hooks_is_enabled(),
            c._autograd._top_saved_tensors_default_hooks(False),  # noqa: FBT003
        ),
        "Dynamo": c._dynamo.eval_frame.get_eval_frame_callback(),
        "contexts": {name: value for name, value in vars(_TLS).items() if value is not None},
        "compiling": torch.compiler.is_compiling(),
        "Inductor": {name: id(value) for name, value in vars(virtualized.threadlocal).items()},
        "patches": [
            name
            for patch in PATCHES.values()
            for owner, name, instead in (patch.places if "places" in vars(patch) else ())
            if _held_by(owner, name) is instead
        ],
        "locks": [is_owned(lock) for lock in (*LOCKS, *dynamo_locks())],
        "random": (random.getstate(), torch.get_rng_state().numpy().tobytes()),
        "anomaly": torch.is_anomaly_enabled(),
        "collector": gc.isenabled(),
        "warnings": (list(map(str, warnings.filters)), warnings.showwarning),
        "output": (print, sys.stdout, sys.stderr),
        "tensors": [(id(t), t.detach().numpy().tobytes()) for t in model.state_dict(keep_vars=True).values()],
        "attributes": {
            name: str(value) if isinstance(value, list | dict) else id(value)
            for name, value in vars(model).items()
            if name not in ("source", "graphs", "explain")
        },
    }


def what_differs(model: nn.Module, before: dict[str, Any]) -> str:
    """In words; nothing if all is as it was before."""
    now = state_of(model)
    return "; ".join(f"{n}: {before[n]!s:.900} is now {now[n]!s:.900}" for n in before if before[n] != now[n])


def what_fails(model: nn.Module) -> str:
    """In words; nothing if the model, and another, are as eager when they are compiled now."""
    for cls, compiled in ((Net, model), (other, aotdist.compile(made(other), backend="fx"))):
        if not are_equal(trained(compiled), trained(made(cls))):
            return f"another result of {cls.__name__}"
    return ""


def interrupted_at(number: int, run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run something, and interrupt it at an operator of its trace; whether it has as many."""
    dispatch, operators = ViewMode._dispatch, itertools.count()

    def interrupted(*args: Any) -> Any:
        if next(operators) == number:
            raise KeyboardInterrupt
        return dispatch(*args)

    with monkeypatch.context() as patched:
        patched.setattr(ViewMode, "_dispatch", interrupted)
        try:
            run()
        except KeyboardInterrupt:
            return True
    return False


def call(model: nn.Module) -> Callable[[], Any]:
    aotdist.compile(model, backend="fx")
    return lambda: model(X)


def step(model: nn.Module) -> Callable[[], Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    run = aotdist.train_step(model, lambda model, x: model(x).sum(), optimizer, backend="fx")
    run(X)  # as it is written: the optimizer makes its state
    return lambda: run(X)


def dynamic(model: nn.Module) -> Callable[[], Any]:
    aotdist.compile(model, backend="fx", dynamic=True)
    return lambda: model(X)


class Exported(nn.Module):
    """Returns its loss, and writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        y = checkpoint(self.linear, x, use_reentrant=False).tanh()
        self.total.add_(y.detach().sum(0))
        return (y.sum(),)


def export(model: nn.Module) -> Callable[[], Any]:
    return lambda: aot_export_module(model, (X,), trace_joint=True, output_loss_index=0)


RUNS = {"call": call, "step": step, "dynamic": dynamic, "export": export}


@pytest.mark.parametrize("name", RUNS)
def test_an_interrupt_leaves_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one operator after the other, of the same model."""
    cls = Exported if name == "export" else Net
    RUNS[name](made(cls))()
    model = made(cls)
    run = RUNS[name](model)
    torch.manual_seed(1)
    before = state_of(model)
    for number in itertools.count(0, 7):
        if not interrupted_at(number, run, monkeypatch):
            break
        assert not (wrong := what_differs(model, before)), f"operator {number}: {wrong}"
    assert number > 20, "it has fewer operators than that"


def test_what_was_interrupted_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    assert interrupted_at(20, call(model), monkeypatch)
    assert not what_fails(model)
