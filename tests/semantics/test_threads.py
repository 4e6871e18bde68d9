"""Several threads: one compiles at a time, and calls of others wait while it captures."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import aotdist
from aotdist.api import compiled_call
from aotdist.capture.alone import Captures, alone


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
    aotdist.compile(model, backend="fx")

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


def test_a_call_waits_while_another_thread_captures():
    reached, release, done = threading.Event(), threading.Event(), threading.Event()
    model = aotdist.compile(nn.Linear(2, 2), backend="fx")
    model(torch.ones(1, 2))

    def slow(x: torch.Tensor) -> torch.Tensor:
        reached.set()
        assert release.wait(60)
        return model(x)

    capture = threading.Thread(target=lambda: aotdist.compile(slow, backend="fx")(torch.ones(1, 2)))
    call = threading.Thread(target=lambda: (model(torch.ones(1, 2)), done.set()))
    capture.start()
    assert reached.wait(60) and Captures.running
    call.start()
    assert not done.wait(0.2)
    release.set()
    assert done.wait(60)
    capture.join()
    call.join()
    assert not Captures.running


@pytest.mark.parametrize("fails", [False, True])
def test_who_waited_is_told(fails):
    told: list[bool] = []

    def take() -> None:
        with alone() as waited:
            told.append(waited)

    thread = threading.Thread(target=take)
    with alone() as first, alone() as again:
        thread.start()
        thread.join(0.1)
        told += [first, again]
    thread.join()
    if fails:
        with pytest.raises(ZeroDivisionError), alone():
            raise ZeroDivisionError
    take()
    assert told == [False, False, True, False]
