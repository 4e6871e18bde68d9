"""Numbers, flags and texts that a program finds and changes: each call is eager's, by few artifacts."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.api import compiled_call
from aotdist.errors import UnsupportedProgram

STEPS = 0


class Counting(nn.Module):
    """What the tests change: each replaces `step`, which is given the module and its input."""

    def __init__(self, step: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.steps, self.alpha, self.initialised, self.text = 0, 0.5, False, ""
        self.options = {"steps": 0, "kind": "a"}
        self.step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(self, x)


def counts(module: Counting, x: torch.Tensor) -> torch.Tensor:
    module.steps += 1
    return module.linear(x)


def counts_down(module: Counting, x: torch.Tensor) -> torch.Tensor:
    module.steps -= 3
    return module.linear(x) * module.steps + torch.arange(4) * abs(module.steps)


def multiplies(module: Counting, x: torch.Tensor) -> torch.Tensor:
    return counts(module, x) * module.steps


def corrects_bias(module: Counting, x: torch.Tensor) -> torch.Tensor:
    y = counts(module, x)
    with torch.no_grad():
        module.mean.lerp_(y.mean(0), 1 / module.steps)
    return y + module.mean / (1 - 0.9**module.steps)


def anneals(module: Counting, x: torch.Tensor) -> torch.Tensor:
    y = counts(module, x)
    module.alpha = min(1.0, module.steps / 1000)
    return y * module.alpha


def warms_up(module: Counting, x: torch.Tensor) -> torch.Tensor:
    y = counts(module, x)
    module.alpha = min(0.9, 1 - math.exp(-module.steps / 3))
    return y * module.alpha * math.sqrt(1 - 0.9**module.steps)


def decays(module: Counting, x: torch.Tensor) -> torch.Tensor:
    module.alpha *= 0.99
    return module.linear(x) * module.alpha


def counts_in_a_dictionary(module: Counting, x: torch.Tensor) -> torch.Tensor:
    module.options["steps"] += 1
    return module.linear(x) * module.options["steps"]


def counts_in_a_global(module: Counting, x: torch.Tensor) -> torch.Tensor:
    global STEPS
    STEPS += 1
    return module.linear(x) * STEPS


def every_third(module: Counting, x: torch.Tensor) -> torch.Tensor:
    y = counts(module, x)
    if module.steps % 3 == 0:
        module.mean.mul_(0.9).add_(y.detach().mean(0))
    return y


def goes_round(module: Counting, x: torch.Tensor) -> torch.Tensor:
    module.steps = (module.steps + 1) % 3
    return module.linear(x) + x[:, module.steps : module.steps + 1]


def initialises_once(module: Counting, x: torch.Tensor) -> torch.Tensor:
    if not module.initialised:
        with torch.no_grad():
            module.linear.bias.copy_(-x.mean(0))
        module.initialised = True
    return module.linear(x)


def toggles(module: Counting, x: torch.Tensor) -> torch.Tensor:
    module.initialised = not module.initialised
    return module.linear(x) if module.initialised else -module.linear(x)


def tells(module: Counting, x: torch.Tensor) -> torch.Tensor:
    y = counts(module, x)
    module.text = f"step {module.steps}"
    return y


def remembers(module: Counting, x: torch.Tensor) -> torch.Tensor:
    if module.steps != len(x):
        module.steps = len(x)
        module.positions = torch.arange(len(x))[:, None]
    return module.linear(x) + module.positions


def deletes(module: Counting, x: torch.Tensor) -> torch.Tensor:
    if hasattr(module, "first"):
        del module.first
        return module.linear(x)
    module.first = [1, {"rows": len(x)}]
    return -module.linear(x)


PROGRAMS: dict[Callable[[Any, torch.Tensor], torch.Tensor], int] = {
    counts: 1,
    counts_down: 1,
    multiplies: 1,
    corrects_bias: 1,
    anneals: 1,
    warms_up: 1,
    decays: 6,
    counts_in_a_dictionary: 1,
    counts_in_a_global: 1,
    every_third: 2,
    goes_round: 1,
    initialises_once: 2,
    toggles: 2,
    tells: 6,
    remembers: 2,
    deletes: 2,
}
"""With the most artifacts for six calls, by `fx`: more where a count is spelled, chooses, or is a float."""

BY_INDUCTOR = {corrects_bias: 2, goes_round: 2}
"""The same where it is another: Inductor decides by sizes."""


def state(module: Counting) -> dict[str, Any]:
    names = "steps", "alpha", "initialised", "text", "options", "first"
    return {"STEPS": STEPS} | {name: getattr(module, name) for name in names if hasattr(module, name)}


def run(module: Counting, call: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(call)
    loss = module(torch.randn(3, 4, generator=generator)).square().sum()
    loss.backward()
    grads = [param.grad.clone() for param in module.parameters()]
    return [loss, *grads, *(buffer.clone() for buffer in module.buffers())], state(module)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("backend", ["fx", "inductor"])
def test_every_call_is_that_of_eager(program: Any, backend: str) -> None:
    global STEPS
    expected: list[Any] = []
    artifacts: list[Any] = []
    for compiles in (False, True):
        STEPS = 0
        torch.manual_seed(0)
        module = Counting(program)
        if compiles:
            aotdist.compile(module, backend=backend)
            artifacts = compiled_call(module).artifacts
        for call in range(6):
            tensors, said = run(module, call)
            if not compiles:
                expected.append((tensors, copy.deepcopy(said)))
                continue
            assert said == expected[call][1]
            assert list(map(type, said.values())) == list(map(type, expected[call][1].values()))
            for ours, theirs in zip(tensors, expected[call][0], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0 if backend == "fx" else 1e-5, atol=1e-6)
    numbers = PROGRAMS if backend == "fx" else PROGRAMS | BY_INDUCTOR
    assert len(artifacts) <= numbers[program]


def test_a_closure_that_counts() -> None:
    def counting() -> Callable[[torch.Tensor], torch.Tensor]:
        calls = 0

        def program(x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return x * calls

        return program

    compiled = aotdist.compile(counting(), backend="fx")
    for call in range(1, 5):
        assert compiled(torch.ones(2)).tolist() == [call, call]
    assert len(compiled_call(compiled).artifacts) == 1


def test_what_a_user_sets_between_calls_counts() -> None:
    module = aotdist.compile(Counting(multiplies), backend="fx")
    x = torch.ones(1, 4)
    for steps in (0, 7, -2, 7.5, True):
        module.steps = steps
        expected = module.linear(x) * (steps + 1)
        assert torch.equal(module(x), expected)
        assert module.steps == steps + 1 and type(module.steps) is type(steps + 1)


def test_a_checkpoint_counts_again_in_the_backward() -> None:
    """It runs the forward again."""

    def program(module: Counting, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(counts, module, x, use_reentrant=False)

    module = aotdist.compile(Counting(program), backend="fx")
    for _ in range(3):
        module(torch.ones(2, 4)).sum().backward()
    assert module.steps == 6
    assert len(compiled_call(module).artifacts) == 1


def test_what_sets_itself_up_is_compiled_once() -> None:
    """A flag that chooses nothing, hooks that are there from the first call on."""

    def program(module: Counting, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(module, "ready"):
            module.ready = True
            module.text = "set up"
        return module.linear(x)

    module = aotdist.compile(Counting(program), backend="fx")
    for _ in range(3):
        module(torch.ones(2, 4))
        assert module.ready is True and module.text == "set up"
    assert len(compiled_call(module).artifacts) == 1


@pytest.mark.parametrize("counts_too", [False, True])
def test_a_number_that_is_set_up_is_compiled_once(counts_too: bool) -> None:
    """Beside a flag, and beside a number that is counted in."""

    def program(module: Counting, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] < 5:
            module.shift = 0
        module.text = "set up"
        if counts_too:
            module.steps += 1
        return module.linear(x) * (module.shift + 1)

    modules = [Counting(program), aotdist.compile(Counting(program), backend="fx")]
    for module in modules:
        module.shift = 2
    modules[1].load_state_dict(modules[0].state_dict())
    for _ in range(3):
        assert torch.equal(*(module(torch.ones(2, 4)) for module in modules))
        assert [modules[1].steps, modules[1].shift] == [modules[0].steps, 0]
    assert len(compiled_call(modules[1]).artifacts) == 1


@pytest.mark.parametrize(
    "value",
    [
        lambda steps: steps,
        lambda steps: (steps + 1, [steps]),
        lambda steps: torch.Size([steps + 1]),
        lambda steps: slice(steps, 9),
    ],
)
def test_what_is_set_up_is_the_number_that_is_counted_in(value: Callable[[int], Any]) -> None:
    """It is that of the first call, and once more of the call that finds it gone."""

    def program(module: Counting, x: torch.Tensor) -> torch.Tensor:
        module.options.setdefault("first", value(module.steps))
        module.steps += 1
        return module.linear(x)

    modules = [Counting(program), aotdist.compile(Counting(program), backend="fx")]
    for call in range(5):
        for module in modules:
            if call == 3:
                del module.options["first"]
            module(torch.ones(2, 4))
        assert repr(modules[1].options) == repr(modules[0].options)  # a symbol would equal its number
        assert modules[1].steps == modules[0].steps


class Seen:
    """What a program makes when it is called first."""

    def __init__(self, steps: int) -> None:
        self.rows, self.made_at = 0, steps


@pytest.mark.parametrize("counts_too", [False, True])
@pytest.mark.parametrize("computes", [False, True])
def test_an_object_that_is_made_once_and_counts(computes: bool, counts_too: bool) -> None:
    """The call that makes it is of another program than those that find it; so is one that finds it gone."""

    def program(module: Counting, x: torch.Tensor) -> torch.Tensor:
        if module.seen is None:
            module.seen = Seen(module.steps)
        module.seen.rows += x.shape[0]
        module.steps += counts_too
        return module.linear(x) * (module.seen.rows if computes else 2)

    modules = [Counting(program), aotdist.compile(Counting(program), backend="fx")]
    modules[1].load_state_dict(modules[0].state_dict())
    for module in modules:
        module.seen = None
    for call in range(6):
        for module in modules:
            module.seen = None if call == 4 else module.seen
        assert torch.equal(*(module(torch.ones(2, 4)) for module in modules))
        seen, ours = (repr(vars(module.seen)) for module in modules)
        assert seen == ours and modules[0].steps == modules[1].steps


@pytest.mark.parametrize("made_first", [False, True])
@pytest.mark.parametrize("value", [1, "name"])
def test_a_deque_that_is_a_window_over_calls(value: Any, made_first: bool) -> None:
    def program(module: Counting, x: torch.Tensor) -> torch.Tensor:
        module.options.setdefault("window", deque(maxlen=3)).append(value)
        module.steps += 1
        return module.linear(x) * len(module.options["window"])

    modules = [Counting(program), aotdist.compile(Counting(program), backend="fx")]
    modules[1].load_state_dict(modules[0].state_dict())
    for module in modules if made_first else []:
        module.options["window"] = deque(maxlen=3)
    for _ in range(6):
        assert torch.equal(*(module(torch.ones(2, 4)) for module in modules))
        assert state(modules[1]) == state(modules[0])


def test_tensors_in_a_deque_are_those_that_a_call_finds() -> None:
    def program(module: Counting, x: torch.Tensor) -> torch.Tensor:
        return module.linear(x) * sum(module.window)

    module = Counting(program)
    module.window = deque([torch.ones(4)], maxlen=3)
    eager, compiled = module.forward, aotdist.compile(module.forward, backend="fx")
    for call in range(6):
        assert torch.equal(eager(torch.ones(2, 4)), compiled(torch.ones(2, 4)))
        module.window[-1].mul_(2)
        if call != 1:
            module.window.append(torch.full((4,), float(call)))


@pytest.mark.parametrize("make", [lambda k: {"k": k}, lambda k: [k], Seen, lambda k: lambda: k])
def test_an_object_that_was_in_two_places_at_capture(make: Callable[[int], Any]) -> None:
    """There may be another in either of them later."""

    def number_in(held: Any) -> int:
        if isinstance(held, Seen):
            return held.made_at
        return held() if callable(held) else next(iter(held.values() if isinstance(held, dict) else held))

    def program(module: Counting, x: torch.Tensor) -> torch.Tensor:
        return x * (number_in(module.first) + 10 * number_in(module.second))

    module = Counting(program)
    module.first = module.second = make(1)
    compiled = aotdist.compile(module.forward, backend="fx")
    for name, number in (("second", 1), ("second", 5), ("first", 7), ("second", 7)):
        setattr(module, name, module.first if number == 1 else make(number))
        assert torch.equal(compiled(torch.ones(2)), module.forward(torch.ones(2)))


@pytest.mark.parametrize("kind", [set, deque])
def test_a_tensor_that_is_put_into_what_has_no_places_is_refused(kind: type) -> None:
    def program(module: Counting, x: torch.Tensor) -> torch.Tensor:
        put = module.held.add if kind is set else module.held.append
        put(x.mean())
        return module.linear(x)

    module = aotdist.compile(Counting(program), backend="fx")
    module.held = kind([1])
    with pytest.raises(UnsupportedProgram, match=r"`held` is a (set|deque), and is given a tensor"):
        module(torch.ones(2, 4))
    assert module.held == kind([1])


def test_a_program_may_refuse_to_be_called_twice() -> None:
    def program(module: Counting, x: torch.Tensor) -> torch.Tensor:
        if module.initialised:
            raise RuntimeError("called twice")
        module.initialised = True
        return module.linear(x)

    module = aotdist.compile(Counting(program), backend="fx")
    module(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="called twice"):
        module(torch.ones(2, 4))


def test_what_was_set_up_is_undone_where_compiling_fails() -> None:
    def program(module: Counting, x: torch.Tensor) -> torch.Tensor:
        module.text = "set up"
        return module.linear(x)

    def refuses(graph: Any, fakes: Any) -> Any:
        raise ValueError("no rule for it")

    module = aotdist.compile(Counting(program), backend=refuses)
    with pytest.raises(ValueError, match="no rule for it"):
        module(torch.ones(2, 4))
    assert module.text == ""


def test_nothing_is_counted_where_capture_fails() -> None:
    def program(module: Counting, x: torch.Tensor) -> torch.Tensor:
        y = tells(module, x)
        module.options["steps"] = 3
        return y * float(x.sum())

    module = aotdist.compile(Counting(program), backend="fx")
    before = copy.deepcopy(state(module))
    with pytest.raises(UnsupportedProgram, match="read off a tensor"):
        module(torch.ones(2, 4))
    assert state(module) == before
