"""A call that an artifact was not built for is refused, with what differs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from tests.artifacts.programs import Counting, Made, counting

Change = Callable[[Counting], Any]


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    aotdist.build(counting, tmp_path / "it.aot")
    return tmp_path / "it.aot"


@pytest.mark.parametrize(
    ("change", "args", "reason"),
    [
        (
            None,
            (torch.randn(5, 4), 0.5),
            r"`args\[0\]`: built for Tensor float32\[3, 4\] .* called with .*\[5, 4\]",
        ),
        (None, (torch.randn(3, 4).double(), 0.5), r"called with Tensor float64\[3, 4\]"),
        (None, (torch.randn(4, 3).t(), 0.5), r"called with .* of strides \[1, 3\]"),
        (None, (torch.randn(3, 4, requires_grad=True), 0.5), "called with .*, requires_grad"),
        (None, (torch.randn(3, 4), 0.25), r"`args\[1\]`: built for 0.5, called with 0.25"),
        (None, (torch.randn(3, 4),), "structure of the arguments"),
        (lambda m: m.eval(), None, "`training`: built for True, called with False"),
        (
            lambda m: m.linear.weight.requires_grad_(False),
            None,
            "`linear.weight`: built for .*, requires_grad",
        ),
        (lambda m: setattr(m, "calls", m.calls.double()), None, "`calls`: built for .*float32.*float64"),
        (lambda m: setattr(m, "linear", nn.Linear(4, 4, bias=False)), None, "`linear.bias`: built for"),
        (lambda m: setattr(m, "mode", "fast"), None, "`mode`: built for none, called with 'fast'"),
        (lambda m: m.register_forward_hook(print), None, "hooks and submodules"),
    ],
)
def test_it_is_refused(
    artifact: Path, change: Change | None, args: tuple[Any, ...] | None, reason: str
) -> None:
    model, built_for = counting()
    if change is not None:
        change(model)
    aotdist.load(artifact, model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(aotdist.SignatureMismatch, match=reason):
        model(*(built_for if args is None else args))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_modes_are_part_of_it(artifact: Path) -> None:
    model, args = counting()
    aotdist.load(artifact, model)
    with torch.no_grad(), pytest.raises(aotdist.SignatureMismatch, match="grad: built for True"):
        model(*args)
    with torch.autocast("cpu"), pytest.raises(aotdist.SignatureMismatch, match="autocast: built for"):
        model(*args)
    assert model(*args)["scale"] == 0.5


def test_a_call_that_stops_fitting_is_refused(artifact: Path) -> None:
    model, args = counting()
    aotdist.load(artifact, model)
    model(*args)
    with pytest.raises(aotdist.SignatureMismatch, match=r"`args\[1\]`: built for 0.5, called with 2.0"):
        model(args[0], 2.0)


class Doubling(Counting):
    def forward(self, x: torch.Tensor, scale: float) -> dict[str, Any]:
        return super().forward(x, 2 * scale)


def test_other_code_is_refused(artifact: Path) -> None:
    torch.manual_seed(0)
    aotdist.load(artifact, model := Doubling())
    with pytest.raises(aotdist.SignatureMismatch, match="`Doubling.forward`: built for none"):
        model(torch.randn(3, 4), 0.5)


def test_the_same_tensor_twice_is_another_call(tmp_path: Path) -> None:
    def make() -> Made:
        return torch.add, (torch.ones(2), torch.zeros(2))

    aotdist.build(make, tmp_path / "it.aot")
    add, x = aotdist.load(tmp_path / "it.aot", torch.add), torch.ones(2)
    assert add(x, torch.ones(2)).tolist() == [2, 2]
    with pytest.raises(aotdist.SignatureMismatch, match="same tensors"):
        add(x, x)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: (lambda x: Holder(x * 2), (torch.ones(2),)), "objects in it that no pytree knows"),
        (lambda: (returns_an_object, (torch.ones(2),)), "holds a .*Unknown"),
    ],
)
def test_what_a_file_cannot_hold_is_refused(make: Callable[[], Made], reason: str, tmp_path: Path) -> None:
    with pytest.raises(aotdist.UnsupportedProgram, match=reason):
        aotdist.build(make, tmp_path / "it.aot")
    assert not list(tmp_path.iterdir())


class Holder:
    def __init__(self, held: torch.Tensor) -> None:
        self.held = held


class Unknown:
    pass


UNKNOWN = Unknown()


def returns_an_object(x: torch.Tensor) -> tuple[torch.Tensor, Unknown]:
    return x * 2, UNKNOWN


@pytest.mark.parametrize(
    "settings", [aotdist.Settings(dynamic=True), {"dynamic": True}], ids=["it", "fields"]
)
def test_symbolic_sizes_are_refused(settings: Any, tmp_path: Path) -> None:
    with pytest.raises(aotdist.UnsupportedProgram, match="symbolic sizes"):
        aotdist.build(lambda: (torch.sin, (torch.randn(3, 4),)), tmp_path / "it.aot", settings=settings)


def test_an_unknown_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(aotdist.BadSettings, match=r"no target 'sm_1'(.|\n)*cpu, sm_80"):
        aotdist.build(counting, tmp_path / "it.aot", target="sm_1")


@pytest.mark.parametrize("made", [None, (counting,), (3, ()), (len, [])])
def test_what_is_no_call_is_refused(made: Any, tmp_path: Path) -> None:
    with pytest.raises(aotdist.BadSettings, match="`make` returned"):
        aotdist.build(
            lambda: (each for each in made) if hasattr(made, "__next__") else made, tmp_path / "it.aot"
        )


def test_what_cannot_be_called_is_refused(artifact: Path) -> None:
    with pytest.raises(aotdist.BadSettings, match="cannot run a int"):
        aotdist.load(artifact, 3)  # type: ignore[call-overload]


class Applied(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("built", "called"),
    [
        (torch.tanh, torch.sin),
        (torch.Tensor.sin, torch.Tensor.cos),
        (nn.functional.relu, nn.functional.silu),
        (nn.ReLU(), nn.SiLU()),
        (lambda x: x + 1, lambda x: x + 2),
        (partial(torch.add, other=1), partial(torch.add, other=2)),
    ],
)
def test_another_function_is_another_program(built: Any, called: Any, tmp_path: Path) -> None:
    aotdist.build(lambda: (Applied(built), (torch.randn(3),)), tmp_path / "it.aot")
    aotdist.load(tmp_path / "it.aot", model := Applied(called))
    with pytest.raises(aotdist.SignatureMismatch, match="built for .*, called with"):
        model(torch.randn(3))
    aotdist.load(tmp_path / "it.aot", model := Applied(built))
    assert torch.equal(model(x := torch.randn(3)), built(x))
