"""Ctrl-C at any bytecode of a compilation leaves thread, process and model as they were before it."""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch._guards import _TLS
from torch._inductor import config as inductor_config
from torch._inductor import virtualized
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.aliasing.view_mode import ViewMode
from aotdist.capture.ambient import ambient
from aotdist.export import aot_export_module
from aotdist.torch_seam.dynamo import dynamo_locks
from aotdist.torch_seam.patches import PATCHES, _held_by, values_here
from aotdist.torch_seam.undo import LOCKS, is_owned

SWEEP = (pytest.mark.sweep, pytest.mark.timeout(7200))
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
        "patches": (
            values_here(),
            [
                name
                for patch in PATCHES.values()
                for owner, name, instead in (patch.places if "places" in vars(patch) else ())
                if _held_by(owner, name) is instead
            ],
        ),
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


class Interrupter:
    """Interrupts a run at many bytecodes, each time in a process that is forked there.

    Args:
        points: before which bytecodes.
        folder: where children write what is wrong.
        begins_later: what it runs says when to begin.

    Attributes:
        failures: what is.
    """

    def __init__(self, points: range, folder: Path, *, begins_later: bool = False) -> None:
        self._points, self._file, self._begins_later = points, folder / "wrong", begins_later
        self._count, self._at, self._is_child = 0, "", False
        self.failures: list[str] = []

    def run(self, run: Callable[[], Any], found_wrong: Callable[[int], str]) -> None:
        """Run something; `found_wrong` says, in children, what is wrong when it was interrupted.

        If it calls `begin`, it is interrupted after that alone, and may raise an interrupt itself.
        """
        if not self._begins_later:
            sys.settrace(self._trace)
        try:
            run()
        except KeyboardInterrupt:
            assert self._is_child or self._begins_later
            if self._is_child:
                self._exit(found_wrong)
        finally:
            sys.settrace(None)
            if self._is_child:
                self._exit(lambda _: "the interrupt was swallowed")
        assert self._count > self._points[1], "it has fewer bytecodes than that"

    def begin(self) -> None:
        """Interrupt from now on, also what the frames do that run now."""
        sys.settrace(self._trace)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            frame.f_trace, frame.f_trace_opcodes, frame.f_trace_lines = self._trace, True, False
            frame = frame.f_back

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self._count += 1
            if self._count in self._points:
                self._fork(frame)
        return self._trace

    def _fork(self, frame: FrameType) -> None:
        state = random.getstate()
        if os.fork() == 0:
            sys.settrace(None)
            random.setstate(state)  # Python seeds it anew in children
            self._is_child = True
            raise KeyboardInterrupt
        if os.waitstatus_to_exitcode(os.wait()[1]) != 0:
            at = "".join(traceback.format_stack(frame)[-4:])
            self.failures.append(f"bytecode {self._count}: {self._file.read_text()}\n{at}")

    def _exit(self, found_wrong: Callable[[int], str]) -> None:
        wrong = "the child died"
        try:
            wrong = found_wrong(self._count)
        except BaseException:
            wrong = traceback.format_exc()
        finally:
            self._file.write_text(wrong)
            os._exit(bool(wrong))


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


def inductor(model: nn.Module) -> Callable[[], Any]:
    aotdist.compile(model, backend="inductor")

    def run() -> Any:
        with inductor_config.patch(fx_graph_cache=False):
            return model(X)

    return run


RUNS = {"call": call, "step": step, "dynamic": dynamic, "inductor": inductor}


@pytest.mark.parametrize(
    ("name", "points", "thorough"),
    [
        ("call", range(700, 10**9, 300_007), 1),
        ("step", range(700, 10**9, 500_009), 1),
        *(pytest.param(name, range(1, 10**9, 50), 40, marks=SWEEP) for name in ("call", "step")),
        *(pytest.param(name, range(1, 10**9, 10_007), 40, marks=SWEEP) for name in ("dynamic", "inductor")),
    ],
)
def test_an_interrupt_leaves_nothing(name: str, points: range, thorough: int, tmp_path: Path) -> None:
    """Every so many bytecodes, and of so many interrupted runs one is followed by others."""
    for warm in (Net, Net):
        RUNS[name](made(warm))()
    model = made()
    run = RUNS[name](model)
    torch.manual_seed(1)
    before = state_of(model)
    interrupter = Interrupter(points, tmp_path)

    def found_wrong(count: int) -> str:
        if wrong := what_differs(model, before):
            return wrong
        return what_fails(model) if points.index(count) % thorough == 0 and name == "call" else ""

    interrupter.run(run, found_wrong)
    assert not interrupter.failures, "\n".join(interrupter.failures)


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


@pytest.mark.parametrize(
    "points", [range(70_000, 10**9, 70_001), pytest.param(range(1, 10**9, 997), marks=SWEEP)]
)
def test_an_interrupted_export_leaves_nothing(points: range, tmp_path: Path) -> None:
    def run(model: nn.Module) -> None:
        aot_export_module(model, (X,), trace_joint=True, output_loss_index=0)

    for warm in (Exported, Exported):
        run(made(warm))
    model = made(Exported)
    before = state_of(model)
    interrupter = Interrupter(points, tmp_path)
    interrupter.run(lambda: run(model), lambda _: what_differs(model, before))
    assert not interrupter.failures, "\n".join(interrupter.failures)


@pytest.mark.parametrize("points", [range(700, 10**9, 4_007), pytest.param(range(1, 10**9, 97), marks=SWEEP)])
def test_an_interrupt_of_what_restores_leaves_nothing(
    points: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a trace, and once more while contexts are left and state is put back."""
    for warm in (Net, Net):
        call(made(warm))()
    model = made()
    run = call(model)
    torch.manual_seed(1)
    before = state_of(model)
    interrupter = Interrupter(points, tmp_path, begins_later=True)
    dispatch, operators = ViewMode._dispatch, itertools.count()

    def interrupted(*args: Any) -> Any:
        if next(operators) == 40:
            interrupter.begin()
            raise KeyboardInterrupt
        return dispatch(*args)

    monkeypatch.setattr(ViewMode, "_dispatch", interrupted)
    interrupter.run(run, lambda _: what_differs(model, before))
    assert not interrupter.failures, "\n".join(interrupter.failures)
    assert not what_differs(model, before)
