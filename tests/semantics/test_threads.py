"""Several threads: one compiles at a time, and no other sees anything of it."""

import copy
import gc
import io
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.distributed_c10d import _object_to_tensor

import aotdist
from aotdist.api import compiled_call
from aotdist.capture.compile_lock import alone, waited_for_lock
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.functional import FunctionalTensorMode
from aotdist.torch_seam.modules import global_module_hooks, own_attributes
from aotdist.torch_seam.patches import LOCKS, PATCHES, _held_by, hand_on, is_owned


def in_threads(run: Callable[[int], None], count: int = 4) -> None:
    """Run it in several threads at once; raises what one of them raises."""
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            run(number)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_each_thread_compiles_a_model_of_its_own():
    def run(number: int) -> None:
        for _ in range(3):
            model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))), torch.ones(2, 4)
            wanted = model(x).sum()
            grads = torch.autograd.grad(wanted, list(model.parameters()))
            got = aotdist.compile(model, backend="fx")(x).sum()
            got.backward()
            assert torch.equal(got, wanted)
            assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))

    in_threads(run)


def test_all_threads_call_one_model():
    """It is compiled once for each kind of call, and others wait for that."""
    model, copied = (nn.Linear(4, 3) for _ in range(2))
    copied.load_state_dict(model.state_dict())
    aotdist.compile(model, backend="fx", dynamic=False)

    def run(number: int) -> None:
        for rows in range(1, 6):
            x = torch.full((rows, 4), float(number))
            assert torch.equal(model(x), copied(x))

    in_threads(run)
    assert len(compiled_call(model).artifacts) == 5


def test_backwards_without_some_tangents_are_compiled_in_turn():
    """What is compiled on demand is compiled while no other thread compiles."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.exp()

    compiled = aotdist.compile(program, backend="fx")
    compiled(torch.ones(3, requires_grad=True))

    def run(number: int) -> None:
        x = torch.arange(3.0).requires_grad_()
        compiled(x)[number % 2].sum().backward()
        assert torch.equal(x.grad, (torch.cos if number % 2 == 0 else torch.exp)(x.detach()))
        create, at = number < 2, torch.arange(3.0).requires_grad_()
        torch.autograd.grad(sum(y.sum() for y in compiled(at)), at, create_graph=create)

    in_threads(run)


class Net(nn.Module):
    """Tied weights, a recurrent layer, a buffer, and what a forward assigns: a tensor and a list's item."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())
        self.recurrent = nn.GRU(4, 4, batch_first=True)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.last, self.count = torch.zeros(()), 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.body(self.embed(ids)))
        out = self.head(hidden) * self.scale
        self.last = out.detach().sum()
        return out


class Halt:
    """Where a thread that captures stops, the first time, until another has looked around.

    Queues hold their items in C: what a program reaches in Python is put back when its capture is over.
    """

    def __init__(self) -> None:
        self.first, self.reached, self.release = (SimpleQueue[None]() for _ in range(3))
        self.first.put(None)

    def __call__(self) -> None:
        if not self.first.empty():
            self.first.get()
            self.reached.put(None)
            self.release.get(timeout=60)


def while_captured(
    program: Callable[..., Any], halt: Halt, look: Callable[[], None], **settings: Any
) -> None:
    """Let a thread call a compiled program, and look around in this one when the capture halts."""
    compiled = aotdist.compile(program, backend="fx", settings=settings)

    def run() -> None:
        compiled(torch.ones(1, 3, dtype=torch.int64)).sum().backward()

    in_threads(lambda number: watch(halt, look) if number else run(), 2)


def watch(halt: Halt, look: Callable[[], None]) -> None:
    """Look around while another thread halts."""
    halt.reached.get(timeout=60)
    try:
        look()
    finally:
        halt.release.put(None)


def of_modules(model: nn.Module) -> dict[str, Any]:
    """What hangs on the modules of a model: attributes, parameters, buffers, hooks."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            found[f"{path}.{name}"] = value
            items = (
                value.items()
                if isinstance(value, dict)
                else enumerate(value)
                if isinstance(value, list)
                else ()
            )
            found |= {f"{path}.{name}[{key}]": item for key, item in items}
    return found


class HaltingGradient(torch.autograd.Function):
    """Halts in the backward."""

    halt: Callable[[], None]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        HaltingGradient.halt()
        return grad


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_no_other_thread_sees_a_capture(phase: str) -> None:
    """Neither stand-ins in modules, nor hooks, nor what the program assigned, nor anything replaced."""
    model, ids, halt = Net(), torch.tensor([[1, 2, 3], [4, 5, 6]]), Halt()
    HaltingGradient.halt = halt
    known = aotdist.compile(lambda ids: model(ids) * 3, backend="fx")
    wanted = known(ids).detach()
    params = list(model.parameters())
    grads = torch.autograd.grad(model(ids).sum(), params)
    before = of_modules(model)
    global_hooks = [len(hooks) for hooks in global_module_hooks()]

    def program(ids: torch.Tensor) -> torch.Tensor:
        out = model(ids)
        model.count = 7
        if phase == "forward":
            halt()
            return out
        return HaltingGradient.apply(out)

    def look() -> None:
        now = of_modules(model)
        assert now.keys() == before.keys()
        assert [name for name in now if now[name] is not before[name]] == []
        assert [len(hooks) for hooks in global_module_hooks()] == global_hooks
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
        assert all(torch.isfinite(p.detach().norm()) for p in model.parameters())
        assert not torch.compiler.is_compiling()
        assert logging.getLogger("torch._subclasses.fake_tensor").isEnabledFor(logging.ERROR)
        assert torch.equal(known(ids).detach(), wanted)  # what is compiled already does not wait
        got = torch.autograd.grad(model(ids).sum(), params)
        assert all(torch.equal(a, b) for a, b in zip(got, grads, strict=True))
        assert "distributed_c10d" in _object_to_tensor.__code__.co_filename

    while_captured(program, halt, look, is_compiling=True)
    assert model.count == 7


def test_no_other_thread_sees_the_capture_of_a_whole_step() -> None:
    model, ids, halt = Net(), torch.tensor([[1, 2, 3], [4, 5, 6]]), Halt()
    eager = copy.deepcopy(model)

    def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        out = model(ids)
        halt()
        return out.square().mean()

    steps = [
        aotdist.train_step(each, loss_of, torch.optim.SGD(each.parameters(), lr=0.1), backend="fx")
        for each in (model, eager)
    ]
    halt.first.get()
    for step in steps:
        step(ids)  # the first one is not compiled
    halt.first.put(None)
    before, params = of_modules(model), list(model.parameters())

    def look() -> None:
        assert [name for name, value in of_modules(model).items() if value is not before[name]] == []
        assert all(type(p) is nn.Parameter and p.grad is None for p in params)

    in_threads(lambda number: watch(halt, look) if number else steps[0](ids), 2)
    with aotdist.disable():
        steps[1](ids)
    assert all(torch.equal(a, b) for a, b in zip(params, eager.parameters(), strict=True))


class Deep(torch.autograd.Function):
    """A backward inside of a backward, and so on; the engine takes a thread of its own for the deepest."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, look: Callable[[], None]) -> torch.Tensor:
        ctx.depth, ctx.look = depth, look
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.depth:
            with torch.enable_grad():
                run_deep(ctx.depth - 1, ctx.look)
        else:
            ctx.look()
        return grad, None, None


def run_deep(depth: int, look: Callable[[], None]) -> None:
    x = torch.ones(1, requires_grad=True)
    Deep.apply(x, depth, look).sum().backward()


def test_a_thread_of_the_engine_sees_what_the_thread_sees_whose_backward_it_runs() -> None:
    model, seen, mode = nn.Linear(2, 2), [], FunctionalTensorMode()
    model.note = "of all"
    before = model.weight

    def look() -> None:
        is_other = threading.current_thread() is not threading.main_thread()
        seen.append((is_other, model.note, model.weight is before))

    with own_attributes([model]):
        model.note, model._parameters["weight"] = "of one", torch.ones(2, 2)
        with mode:
            hand_on(mode)
            run_deep(70, look)
        in_threads(lambda number: run_deep(70, look), 1)
    run_deep(70, look)
    assert seen == [(True, "of one", False), (True, "of all", True), (True, "of one", True)]


def test_a_capture_does_not_see_what_other_threads_assign() -> None:
    """It is neither taken for the program's own, nor undone; nor are numbers that they draw."""
    model, halt = Net(), Halt()

    def program(ids: torch.Tensor) -> torch.Tensor:
        out = model(ids)
        halt()
        return out

    drawn: list[float] = []

    def look() -> None:
        model.note, model.count, model.scale = torch.ones(3), 5, torch.tensor(3.0)
        drawn.extend((random.random(), random.uniform(0, 1), np.random.rand(), random.randint(0, 9)))

    random.seed(0)
    np.random.seed(0)
    while_captured(program, halt, look)
    assert model.count == 5
    assert torch.equal(model.note, torch.ones(3))
    assert model.scale == 3
    state = random.getstate(), np.random.get_state()[2]
    random.seed(0)
    np.random.seed(0)
    again = random.random(), random.uniform(0, 1), np.random.rand(), random.randint(0, 9)
    assert drawn == [*again]
    assert state == (random.getstate(), np.random.get_state()[2])


@pytest.mark.parametrize("draw", [lambda: random.uniform(0, 1), lambda: np.random.rand(), random.random])
def test_what_the_capturing_thread_draws_is_noticed_among_other_threads(draw: Callable[[], float]) -> None:
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        with pytest.raises(UnsupportedProgram, match="the program draws from"):
            aotdist.compile(lambda x: x * draw(), backend="fx")(torch.ones(2))
    finally:
        done.set()
        other.join()


STEPS = {
    "training": 900,
    "training again": 900,
    "accumulating": 900,
    "evaluating": 1500,
    "eager": 600,
    "reading": 2700,
    "state": 2400,
    "compiling": 100,
}
"""What eight threads do at once to one model, and how often in ten thousand steps."""


@pytest.mark.parametrize(
    "share", [0.05, pytest.param(1.0, marks=[pytest.mark.sweep, pytest.mark.timeout(900)])]
)
@pytest.mark.filterwarnings("ignore:aotdist. `.*` was compiled")
def test_everything_at_once(share: float) -> None:
    """Each step's numbers are eager's, bit for bit, whatever the other threads do."""
    model, names = Net(), list(STEPS)
    params, copied = list(model.parameters()), copy.deepcopy(model)
    lengths = range(1, 3) if share < 1 else range(1, 11)
    batches = [torch.randint(11, (rows, length)) for rows in (1, 2) for length in lengths]
    outs = [copied(ids) for ids in batches]
    grads = [torch.autograd.grad(out.square().mean(), list(copied.parameters())) for out in outs]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    norms = [p.detach().norm() for p in params]
    lasts = [model.last, *(out.detach().sum() for out in outs)]
    aotdist.compile(model, backend="fx")
    done = dict.fromkeys(names, 0)

    def check_trained(out: torch.Tensor, at: int) -> None:
        got = torch.autograd.grad(out.square().mean(), params)
        assert torch.equal(out, outs[at])
        assert all(torch.equal(a, b) for a, b in zip(got, grads[at], strict=True))

    def accumulate(at: int) -> None:
        model.zero_grad()
        model(batches[at]).square().mean().backward()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(params, grads[at], strict=True))

    def read(at: int) -> None:
        assert all(
            torch.equal(p.detach().norm(), norm) for p, norm in zip(model.parameters(), norms, strict=True)
        )
        last = model.last
        assert any(torch.equal(last, value) for value in lasts)

    def look_at_state(at: int) -> None:
        now = model.state_dict()
        assert now.keys() == state.keys()
        assert all(torch.equal(now[name], value) for name, value in state.items())

    def evaluate(at: int) -> None:
        with torch.no_grad():
            assert torch.equal(model(batches[at]), outs[at])

    def run_eagerly(at: int) -> None:
        with aotdist.disable():
            check_trained(model(batches[at]), at)

    def compile_anew(at: int) -> None:
        compiled = aotdist.compile(lambda ids: model(ids) * 1, backend="fx")
        check_trained(compiled(batches[at]), at)

    step = {
        "training": lambda at: check_trained(model(batches[at]), at),
        "training again": lambda at: check_trained(model(batches[-at]), -at),
        "accumulating": accumulate,
        "evaluating": evaluate,
        "eager": run_eagerly,
        "reading": read,
        "state": look_at_state,
        "compiling": compile_anew,
    }

    def run(number: int) -> None:
        name = names[number]
        for count in range(max(1, int(STEPS[name] * share))):
            step[name](count % len(batches))
            done[name] += 1

    in_threads(run, len(names))
    assert sum(done.values()) >= sum(STEPS.values()) * share * 0.99
    assert len(compiled_call(model).artifacts) == 2 * min(len(batches), int(900 * share))


@pytest.mark.parametrize("fails", [False, True])
def test_who_waited_is_told(fails):
    told: list[bool] = []

    @alone
    def take() -> None:
        told.append(waited_for_lock())

    @alone
    def take_long() -> None:
        thread.start()
        thread.join(0.1)
        told.append(waited_for_lock())
        take()

    @alone
    def fail() -> None:
        raise ZeroDivisionError

    thread = threading.Thread(target=take)
    take_long()
    thread.join()
    if fails:
        with pytest.raises(ZeroDivisionError):
            fail()
    take()
    assert told == [False, False, True, False]


# --- what other threads do while one captures ----------------------------------------------------


def logged(text: str) -> list[str]:
    logger, found = logging.getLogger("aotdist.of_this_test"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.warning(text)
    logger.removeHandler(handler)
    return found


def warned(text: str) -> list[str]:
    with pytest.warns(UserWarning) as caught:
        warnings.warn(text, stacklevel=1)
    return [str(one.message) for one in caught]


def printed(text: str) -> str:
    print(text, file=(into := io.StringIO()))
    return into.getvalue()


def seeded(draw: Callable[[], Any], *seed: Callable[[int], Any]) -> Any:
    for each in seed:
        each(7)
    return draw()


ELSEWHERE: dict[str, Callable[[], Any]] = {
    "random": lambda: seeded(lambda: (random.random(), random.gauss(0, 1)), random.seed),
    "numpy": lambda: seeded(lambda: (np.random.rand(), np.random.permutation(4).tolist()), np.random.seed),
    "torch": lambda: seeded(lambda: (torch.rand(2).tolist(), torch.initial_seed()), torch.manual_seed),
    "print": lambda: printed("one"),
    "logging": lambda: logged("two"),
    "warnings": lambda: warned("three"),
    "time": lambda: time.time() > 0,
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_other_threads_do_is_theirs_alone(name: str) -> None:
    """A capture neither takes it for the program's doing, nor keeps it from being done."""
    halt, expected, found = Halt(), ELSEWHERE[name](), list[Any]()
    weight = torch.ones(3, requires_grad=True)

    def program(x: torch.Tensor) -> torch.Tensor:
        halt()
        return x * weight

    while_captured(program, halt, lambda: found.append(ELSEWHERE[name]()))
    assert found == [expected]


# --- processes that are forked while one captures ------------------------------------------------


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that a compiled function makes."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> torch.Tensor:
        random.random()
        np.random.rand()
        print("", end="")
        return self.make(torch.full((2,), float(at))) + 0 * torch.rand(2)


def exit_code_of(run: Callable[[], bool]) -> int | None:
    """Of a process that is forked here and runs something; None if it is not over in time."""
    if (child := os.fork()) == 0:
        try:
            os._exit(0 if run() else 1)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(2)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def in_a_child(known: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether a process of its own has nothing of what another thread was at, and can do all that."""
    one, eager = (nn.Linear(2, 2) for _ in range(2))
    eager.load_state_dict(one.state_dict())
    aotdist.compile(one, backend="fx")
    with torch.no_grad():  # once autograd has made threads, PyTorch runs no backward in a child
        got, wanted = one(torch.ones(1, 2)), eager(torch.ones(1, 2))
    replaced = [
        place for patch in PATCHES.values() for place in patch.places if _held_by(*place[:2]) is place[2]
    ]
    return (
        torch.equal(known(torch.ones(2)), torch.ones(2) * 2)
        and torch.equal(got, wanted)
        and gc.isenabled()
        and not replaced
        and all(look() is not None for look in (random.random, np.random.rand, lambda: torch.rand(1)))
    )


def test_processes_that_are_forked_during_a_capture() -> None:
    """In a process of its own: what other tests leave (OpenMP's threads) hangs children of plain PyTorch."""
    process = multiprocessing.get_context("spawn").Process(target=fork_during_a_capture)
    process.start()
    process.join(100)
    code = process.exitcode
    process.kill()
    assert code == 0


def fork_during_a_capture() -> None:
    """Workers of a loader, and plain ones, which call what is compiled and compile more."""
    known, halt = aotdist.compile(lambda x: x * 2, backend="fx"), Halt()
    known(torch.ones(2))
    weight = torch.ones(3, requires_grad=True)

    def program(x: torch.Tensor) -> torch.Tensor:
        halt()
        return x * weight

    def look() -> None:
        fresh = Rows(aotdist.compile(lambda x: x * 2, backend="fx"))
        loader = torch.utils.data.DataLoader(
            fresh, 2, num_workers=2, timeout=60, multiprocessing_context="fork"
        )
        assert torch.cat([*loader])[:, 0].tolist() == [0.0, 2.0, 4.0, 6.0]
        assert exit_code_of(lambda: in_a_child(known)) == 0

    while_captured(program, halt, look)
    assert exit_code_of(lambda: in_a_child(known)) == 0


@pytest.mark.filterwarnings("ignore:aotdist.*reads the time")
def test_a_process_that_the_program_itself_forks_is_as_it_was() -> None:
    """It has the thread that captures, whose locks it keeps."""
    codes = SimpleQueue[int | None]()

    def program(x: torch.Tensor) -> torch.Tensor:
        codes.put(exit_code_of(lambda: any(map(is_owned, LOCKS))))
        return x * 2

    assert torch.equal(aotdist.compile(program, backend="fx")(torch.ones(2)), torch.full((2,), 2.0))
    assert codes.get() == 0
