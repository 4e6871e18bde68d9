"""`Settings(unsupported="eager")`: calls of a kind that is refused run as they were written."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.capture.captured import UserCall
from aotdist.runtime.artifact import Artifact
from aotdist.settings import Settings

EAGER = Settings(unsupported="eager")
REFUSED = "aotdist: such calls of `.*` run as they were written: what the program does depends on a number"


class Branches(nn.Module):
    """Reads a number in training, which is refused; draws, counts and notes, which has to be undone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drops = nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[int] = []
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.seen.append(len(x))
        self.runs += 1
        x = self.drops(self.inner(x))
        x.mul_(2)
        return x * 2 if self.training and x.sum().item() > 0 else x


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was tried to compile, in order."""
    names: list[str] = []
    compile_call = aotdist.compiling.compile_call

    def noted(call: UserCall, *args: Any, **kwargs: Any) -> Artifact:
        names.append(call.name)
        return compile_call(call, *args, **kwargs)

    monkeypatch.setattr("aotdist.compiling.compile_call", noted)
    return names


def branches() -> Branches:
    torch.manual_seed(0)
    return Branches()


def played(model: Branches, lengths: tuple[int, ...] = (3, 3, 3)) -> list[Any]:
    """Everything that training for some steps leaves behind."""
    torch.manual_seed(1)
    left: list[Any] = []
    for length in lengths:
        x = torch.ones(length, 4, requires_grad=True)
        model(x * 1).square().sum().backward()
        left += [x.grad, *(param.grad.clone() for param in model.parameters()), torch.get_rng_state()]
        left += [model.calls.clone(), model.calls._version, list(model.seen), model.runs]
    return left


def same(one: list[Any], other: list[Any]) -> bool:
    pairs = list(zip(one, other, strict=True))
    assert len(pairs) > 0
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("backend", ["fx", "inductor"])
def test_a_refused_kind_is_eagers_to_the_bit_and_is_not_traced_again(
    backend: str, compilations: list[str]
) -> None:
    expected = played(branches())
    model = aotdist.compile(branches(), backend=backend, settings=EAGER)
    with pytest.warns(UserWarning, match=REFUSED) as said:
        assert same(played(model), expected)
    assert len(said) == 1 and f"at {__file__}" in str(said[0].message)
    assert compilations == ["Branches"]
    report = str(model.explain())
    assert report.startswith("run as they were written: what the program does") and __file__ in report

    model.eval()  # is another kind, and compiled
    x = torch.ones(2, 4)
    assert torch.equal(model(x), model.inner(x) * 2)
    assert torch.equal(model(x), model.inner(x) * 2)
    assert compilations == ["Branches"] * 2 and len(model.explain().artifacts) == 1
    assert "run as they were written" in str(model.explain())


def test_after_eight_kinds_of_arguments_no_other_is_tried(compilations: list[str]) -> None:
    lengths = tuple(range(2, 14))
    expected = played(branches(), lengths)
    model = aotdist.compile(branches(), backend="fx", settings=EAGER)
    with pytest.warns(UserWarning, match=REFUSED) as said:
        assert same(played(model, lengths), expected)
    assert len(said) == 1 and len(compilations) == 8


def test_by_default_the_refusal_names_the_setting() -> None:
    with pytest.raises(aotdist.UnsupportedProgram, match=r'or `Settings\(unsupported="eager"\)` runs such'):
        aotdist.compile(branches(), backend="fx")(torch.ones(2, 4))
    frozen = aotdist.freeze(nn.Sequential(Branches()).eval(), backend="fx", settings=EAGER)
    frozen.discard_parameters()
    with pytest.raises(aotdist.AotdistError) as refusal:  # there is nothing left to run
        frozen(torch.ones(2, 4))
    assert "unsupported=" not in str(refusal.value)


def test_a_refusal_is_forgotten_by_reset() -> None:
    is_refused = True

    @aotdist.compile(backend="fx", settings=EAGER)
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if is_refused and x.sum().item() > 0 else x * 3

    with pytest.warns(UserWarning, match=REFUSED):
        assert program(torch.ones(2)).tolist() == [2, 2]
    is_refused = False
    assert program(torch.ones(2)).tolist() == [3, 3] and not program.artifacts  # it runs as it was written
    aotdist.reset(program)
    assert program(torch.ones(2)).tolist() == [3, 3] and len(program.artifacts) == 1
    assert "as they were written" not in str(program.explain())


def test_arguments_that_nothing_takes_run_as_they_are() -> None:
    numpy = pytest.importorskip("numpy")

    @aotdist.compile(backend="fx", settings=EAGER)
    def program(x: torch.Tensor, array: Any) -> torch.Tensor:
        return x + torch.from_numpy(array)

    with pytest.warns(UserWarning, match="neither a tensor nor a constant"):
        assert program(torch.ones(2), numpy.ones(2, "float32")).tolist() == [2, 2]


def wrong_shapes(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.ones(7)


def wrong_after_what_is_refused(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.ones(7) if x.sum().item() > 0 else x


def test_errors_of_the_program_are_the_programs() -> None:
    with pytest.raises(RuntimeError) as expected:
        wrong_shapes(torch.ones(2, 4))
    with pytest.raises(RuntimeError) as raised:
        aotdist.compile(wrong_shapes, backend="fx", settings=EAGER)(torch.ones(2, 4))
    assert not isinstance(raised.value, aotdist.AotdistError)
    assert str(raised.value) == str(expected.value)
    run = aotdist.compile(wrong_after_what_is_refused, backend="fx", settings=EAGER)
    with pytest.warns(UserWarning, match=REFUSED), pytest.raises(RuntimeError) as raised:
        run(torch.ones(2, 4))
    assert not isinstance(raised.value, aotdist.AotdistError)
    assert str(raised.value) == str(expected.value)


def test_other_errors_are_never_run() -> None:
    settings = Settings(unsupported="eager", disabled_passes=frozenset({"no_such_pass"}))
    with pytest.raises(aotdist.BadSettings, match="no_such_pass"):
        aotdist.compile(branches(), backend="fx", settings=settings).eval()(torch.ones(2, 4))


def test_what_is_refused_in_a_backward_is_an_error() -> None:
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = torch.ones(3, requires_grad=True)
    run = aotdist.compile(Doubles.apply, backend="fx", settings=EAGER)
    (grad,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    assert grad.tolist() == [2, 2, 2] and len(run.artifacts) == 1
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.sum(), x)


def trained(make: Callable[[nn.Module, torch.optim.Optimizer], Callable[[torch.Tensor], Any]]) -> list[Any]:
    model = branches()
    optimizer = torch.optim.AdamW(model.parameters())
    step = make(model, optimizer)
    torch.manual_seed(1)
    return [step(torch.ones(3, 4)) for _ in range(4)] + [p.detach().clone() for p in model.parameters()]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_step_is_done_as_it_was_written(accumulate: int) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> aotdist.TrainStep:
        return aotdist.train_step(model, loss_of, optimizer, accumulate=accumulate, **options)

    expected = trained(lambda *given: step(*given, backend="eager"))
    with pytest.warns(UserWarning, match=REFUSED) as said:
        assert same(trained(lambda *given: step(*given, backend="fx", settings=EAGER)), expected)
    assert len(said) == accumulate  # of what only adds to gradients, and of what updates


def test_a_graph_of_dynamos_runs_as_it_is() -> None:
    def sorts(x: torch.Tensor) -> torch.Tensor:
        return torch.unique(x) * 2

    torch.compiler.reset()
    compiled = torch.compile(sorts, backend="aotdist", options={"backend": "fx", "unsupported": "eager"})
    assert torch.equal(compiled(torch.ones(4)), sorts(torch.ones(4)))


def test_the_environment_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTDIST_UNSUPPORTED", "eager")
    assert Settings.from_environment().unsupported == "eager"
    with pytest.raises(aotdist.BadSettings, match="choose one of raise, eager"):
        Settings.make(unsupported="compile")
    assert EAGER.fingerprint() == Settings().fingerprint()  # what is cached serves both


def test_nothing_is_said_of_what_compiles() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = aotdist.compile(branches().eval(), backend="fx", settings=EAGER)
        model(torch.ones(2, 4))
