"""What a program leaves behind that no call repeats: hooks of inputs, modes, gaps, what is to come."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.capture.ambient import ambient
from aotdist.errors import UnsupportedProgram
from tests.semantics.makers import leaf
from tests.semantics.observation import Scene, same_as_eager


def test_a_hook_that_stays_on_an_input_is_refused() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda grad: grad * 2)
        return x * 1

    x = leaf(3)
    with pytest.raises(UnsupportedProgram, match=r"`args\[0\]` gets a hook for its gradient inside"):
        aotdist.compile(program, backend="fx")(x)
    assert not x._backward_hooks


# --- assertions ----------------------------------------------------------------------------------


def asserting(x: torch.Tensor) -> torch.Tensor:
    torch._assert_async(torch.isfinite(x).all())
    return x * 2


def asserting_with_text(x: torch.Tensor) -> torch.Tensor:
    torch._assert_async(torch.isfinite(x).all(), "not finite")
    return x * 2


@pytest.mark.parametrize("program", [asserting, asserting_with_text])
def test_assertions_raise_what_eager_raises(
    program: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    same_as_eager(lambda: Scene(program, (leaf(3),)), calls=2)
    texts = []
    for call in (program, aotdist.compile(program, backend="fx")):
        with pytest.raises(RuntimeError) as caught:
            call(torch.tensor([1.0, float("nan")]))
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


# --- modes ---------------------------------------------------------------------------------------

SWITCHES: dict[str, Callable[[], Any]] = {
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "set_default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "use_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "kernels": lambda: torch.backends.cuda.enable_math_sdp(False),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_mode_that_is_left_switched_is_refused_and_put_back(name: str) -> None:
    before = ambient()
    program = aotdist.compile(lambda x: (SWITCHES[name](), x * 2)[1], backend="fx")
    for _ in range(2):
        with pytest.raises(UnsupportedProgram, match=rf"switches a mode \((.*{name}|which {name})"):
            program(leaf(3))
        assert ambient() == before
        assert torch.get_deterministic_debug_mode() == 0


def test_modes_that_are_switched_back_are_eagers() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        y = x.sin()
        torch.set_grad_enabled(True)
        return y * x

    same_as_eager(lambda: Scene(program, (leaf(3),)), calls=2)


# --- what is gone --------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(2)
        self.register_buffer("shift", torch.ones(2))
        self.steps = {"last": torch.ones(2)}
        self.more = [torch.ones(2), torch.zeros(2)]


def held_by(model: Scaled) -> list[torch.Tensor]:
    return [model.scale, model.shift, *model.steps.values(), *model.more]


GONE: dict[str, Callable[[Scaled], None]] = {
    "scale": lambda m: delattr(m, "scale"),
    "shift": lambda m: delattr(m, "shift"),
    "steps.last": lambda m: m.steps.clear(),
}


@pytest.mark.parametrize("name", GONE)
def test_a_tensor_that_is_taken_away_is_refused_and_put_back(name: str) -> None:
    model = Scaled()
    before = held_by(model)

    class Using(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = self.inner
            y = x * inner.scale + inner.shift + inner.steps["last"] + inner.more[0]
            GONE[name](inner)
            return y

    with pytest.raises(UnsupportedProgram, match=f"is taken out of `inner.{name}`"):
        aotdist.compile(Using(), backend="fx")(leaf(2))
    assert list(map(id, held_by(model))) == list(map(id, before))


def test_what_is_made_and_taken_away_in_one_call_is_eagers() -> None:
    class Passing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.hidden = x.sin()
            y = self.hidden * 2
            del self.hidden
            return y

    same_as_eager(lambda: Scene(Passing(), (leaf(3),)), calls=2)


# --- addresses -----------------------------------------------------------------------------------

LAYER = nn.Linear(2, 2)
ADDRESSES: dict[str, Callable[[torch.Tensor], Any]] = {
    "an input's": lambda x: x * (x.data_ptr() % 2),
    "a result's": lambda x: ((y := x * 2), y.data_ptr())[0],
    "copied": lambda x: copy.deepcopy(LAYER)(x),
}


@pytest.mark.parametrize("name", ADDRESSES)
def test_a_program_that_asks_for_an_address_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedProgram, match="a tensor's address is needed"):
        aotdist.compile(ADDRESSES[name], backend="fx")(leaf(1, 2))


# --- results that are not done yet ---------------------------------------------------------------


def generated(x: torch.Tensor) -> Iterator[torch.Tensor]:
    for factor in range(2):
        yield x * factor


def closed(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    y = x.sin()
    return lambda: y + 0


LATER: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a generator": (generated, "a generator"),
    "a map": (lambda x: {"parts": map(torch.sin, [x, x])}, "a map"),
    "pairs": (lambda x: [zip([x * 2], [x], strict=True)], "a zip"),
    "a view of a dictionary": (lambda x: {"y": x * 2}.values(), "a dict_values"),
    "a closure": (closed, "a function"),
    "a partial": (lambda x: functools.partial(torch.add, x * 2), "a partial"),
}


@pytest.mark.parametrize("name", LATER)
def test_results_that_compute_when_the_call_is_over_are_refused(name: str) -> None:
    program, what = LATER[name]
    with pytest.raises(UnsupportedProgram, match=f"returns {what}"):
        aotdist.compile(program, backend="fx")(leaf(3))


def test_functions_without_tensors_may_be_returned() -> None:
    call = aotdist.compile(lambda x: (x * 2, torch.sin, functools.partial(torch.add, 1)), backend="fx")
    y, sin, _ = call(torch.ones(2))
    assert y.equal(torch.full((2,), 2.0))
    assert sin is torch.sin
