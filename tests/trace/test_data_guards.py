"""Choices of a library's modules by data: found out at capture, and asked again by every call."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.export import aot_export_module
from tests.semantics.meshes import mesh, sharded
from tests.semantics.observation import Scene, same_as_eager

__all__ = ["mesh"]

ONES, MIXED = torch.ones(3, 4), torch.tensor([[0.0, 1, 2, 3]] * 3)


def of_pytorch(program: Callable[..., Any]) -> Callable[..., Any]:
    """The same program, as if `torch.nn` had it."""
    code = program.__code__.replace(co_filename=nn.functional.__file__)
    names = {**program.__globals__, "__name__": nn.functional.__name__}
    return types.FunctionType(code, names, program.__name__, None, program.__closure__)


def of_a_package(program: Callable[..., Any]) -> Callable[..., Any]:
    """The same program, as if it had been installed, by the system or into a virtual environment."""
    code = program.__code__.replace(co_filename="/usr/lib/python3/dist-packages/quantizers/codebook.py")
    return types.FunctionType(code, program.__globals__, program.__name__, None, program.__closure__)


def by_many_operators(mask: torch.Tensor) -> torch.Tensor:
    """By more operators than a call is to run before it runs."""
    for _ in range(50):
        mask = mask * 1
    return mask > 0


@of_pytorch
def chosen(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x * 2 if (mask == 1).all() else x + mask


@of_pytorch
def chosen_twice(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask.max() > 2 and not (mask[0] == mask[1]).all():
        return x.sin()
    return x.cos() if (mask == torch.ones(3, 4)).all() else x - mask


@of_pytorch
def chosen_by_what_is_written(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask.add_(1)
    return x * 2 if (mask > 1).all() else x * mask


@of_a_package
def chosen_in_a_package(x: torch.Tensor, is_initialised: torch.Tensor) -> torch.Tensor:
    return x + is_initialised if is_initialised.any() else x.exp()


@of_a_package
def chosen_by_shifted_labels(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As transformers' FSMT: whether labels, shifted to the right behind their last, have padding."""
    labels = labels.masked_fill(labels == -100, 0)
    shifted, last = labels.clone(), labels.ne(0).sum(dim=1).long() - 1
    shifted[:, 0] = labels.gather(1, last.unsqueeze(-1)).squeeze()
    shifted[:, 1:] = labels[:, :-1]
    return x + shifted if shifted.eq(0).any() else x.exp() * shifted


PROGRAMS = (chosen, chosen_twice, chosen_by_what_is_written, chosen_in_a_package, chosen_by_shifted_labels)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("mask", [ONES, MIXED])
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_eager_chooses(program: Callable[..., Any], mask: torch.Tensor, dynamic: bool) -> None:
    def build() -> Scene:
        return Scene(program, (torch.randn(3, 4, requires_grad=True), mask.clone()))

    same_as_eager(build, calls=3, compilations=None, dynamic=dynamic)


@pytest.mark.parametrize("mask", [ONES, MIXED])
def test_wrappers(mask: torch.Tensor, mesh: DeviceMesh) -> None:
    @of_pytorch
    def chosen_of_local(x: Any, mask: Any) -> Any:
        return x * 2 if (mask.to_local() == 1).all() else x + 1

    @of_pytorch
    def chosen_inside(x: Any) -> Any:
        return x * 2 if (x.b > 0).all() else x

    same_as_eager(lambda: Scene(chosen_of_local, (sharded(mesh, torch.randn(3, 4)), sharded(mesh, mask))))
    same_as_eager(lambda: Scene(chosen_inside, (TwoTensor(mask, mask.clone()),)))


@pytest.mark.parametrize("mask", [ONES, MIXED])
def test_inputs_that_share_memory(mask: torch.Tensor) -> None:
    @of_pytorch
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return y + 1 if (y == 2).all() else y - 1

    def build() -> Scene:
        x = mask.clone()
        return Scene(program, (x, x.t()))

    same_as_eager(build, calls=3, compilations=None)


def test_another_answer_is_another_program() -> None:
    compiled, x = aotdist.compile(chosen, backend="fx"), torch.randn(3, 4)
    for mask, artifacts in ((ONES, 1), (MIXED, 2), (ONES, 2), (MIXED + 1, 2)):
        assert torch.equal(compiled(x, mask), chosen(x, mask))
        assert len(compiled.artifacts) == artifacts


@pytest.mark.parametrize("training", [False, True])
def test_masks_of_transformers(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    for mask in (nn.Transformer.generate_square_subsequent_mask(4), torch.zeros(4, 4)):

        def build(mask: torch.Tensor = mask) -> Scene:
            return Scene(nn.TransformerEncoder(layer, 1).train(training), (torch.randn(2, 4, 8), mask))

        for dynamic in (False, True):
            same_as_eager(build, calls=2, dynamic=dynamic)


def test_choices_by_data_and_sizes_are_made_with_those_of_the_call() -> None:
    @of_pytorch
    def program(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        is_all = mask.sum() == mask.numel()
        return x * 2 if is_all and (mask == torch.ones(mask.shape[0], 4)).all() else x + mask

    compiled = aotdist.compile(program, backend="fx", settings={"dynamic": True})
    for rows, hole, artifacts in ((3, 0, 1), (5, 0, 1), (5, 1, 2), (4, 1, 2), (7, 0, 2), (9, 1, 2)):
        x, mask = torch.randn(rows, 4), torch.ones(rows, 4)
        mask[0, 0] -= hole
        assert torch.equal(compiled(x, mask), program(x, mask))
        assert len(compiled.artifacts) == artifacts


def test_a_choice_by_sizes_that_takes_too_long_makes_them_static() -> None:
    @of_pytorch
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if by_many_operators(torch.arange(x.shape[0])).all() else x.sin()

    compiled = aotdist.compile(program, backend="fx", settings={"dynamic": True})
    with pytest.warns(UserWarning, match=r"too many operators.*, at .*functional.py.*`aotdist.disable\(\)`"):
        compiled(torch.ones(3))
    for rows in (3, 5):
        assert torch.equal(compiled(torch.ones(rows)), program(torch.ones(rows)))


@pytest.mark.parametrize(
    "options",
    [{}, {"avg_fn": get_ema_avg_fn()}, {"multi_avg_fn": get_ema_multi_avg_fn()}, {"use_buffers": True}],
    ids=["mean", "one by one", "all at once", "buffers too"],
)
def test_averages_of_models(options: dict[str, Any]) -> None:
    """At the first call the parameters are copied, later on averaged."""
    averages = []
    for wrap in (lambda fn: fn, partial(aotdist.compile, backend="fx")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        average = AveragedModel(model, **options)
        update = wrap(partial(average.update_parameters, model))
        for _ in range(4):
            model(torch.randn(3, 4)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad)
            update()
        averages.append([*average.parameters(), *average.buffers()])
    assert all(map(torch.equal, *averages))
    assert len(update.artifacts) == 2


@pytest.mark.parametrize("module", [nn.GaussianNLLLoss(), nn.GaussianNLLLoss(full=True, reduction="none")])
def test_variances_are_checked_when_the_program_has_run(module: nn.Module) -> None:
    same_as_eager(lambda: Scene(module, tuple(torch.rand(3, 4, requires_grad=True) for _ in range(3))))
    with pytest.raises(ValueError, match="var has negative entry/entries"):
        aotdist.compile(module, backend="fx")(ONES, ONES, -ONES)


@pytest.mark.parametrize(
    "program",
    [
        lambda x, mask: x * 2 if mask.all() else x,  # the user's own choice
        of_pytorch(lambda x, mask: x * 2 if x.sum() > 0 else x),  # what gradients are taken of
        of_pytorch(lambda x, mask: x * 2 if torch.rand(()) > 0.5 else x),
        of_pytorch(lambda x, mask: x * 2 if by_many_operators(mask).all() else x),
        of_pytorch(lambda x, mask: x * int(mask.sum())),
    ],
)
def test_what_is_refused(program: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedProgram, match="read off a tensor|reads a tensor's data"):
        aotdist.compile(program, backend="fx")(torch.randn(3, 4, requires_grad=True), ONES)


def test_what_no_call_would_ask_again_is_refused() -> None:
    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return chosen(x, mask)

    with pytest.raises(UnsupportedProgram, match="reads a tensor's data"):
        aot_export_module(Chosen(), (torch.randn(3, 4), ONES), trace_joint=False)
