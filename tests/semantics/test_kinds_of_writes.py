"""Every kind of write to an input, of plain tensors and of wrappers, in training and in inference."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.functions import Dirty
from tests.semantics.makers import leaf, non_leaf, plain, two, two_non_leaf
from tests.semantics.meshes import replicated, sharded
from tests.semantics.observation import Scene, play, same_as_eager

Program = Callable[[torch.Tensor], Any]


def without_grad(program: Program) -> Program:
    def quiet(x: torch.Tensor) -> Any:
        with torch.no_grad():
            return program(x)

    return quiet


def in_inference_mode(program: Program) -> Program:
    def written(x: torch.Tensor) -> Any:
        with torch.inference_mode():
            program(x)
        return x * 2

    return written


def adamw(x: torch.Tensor) -> None:
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.1, "eps": 1e-8}
    state = [x * 0], [x * 0], []
    torch._fused_adamw_([x], [x * 0.5], *state, [torch.tensor(1.0)], amsgrad=False, maximize=False, **options)


def sgd(x: torch.Tensor) -> None:
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    torch._fused_sgd_([x], [x * 0.5], [x * 0], **options, **flags)


def adagrad(x: torch.Tensor) -> None:
    options = {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
    torch._fused_adagrad_([x], [x * 0.5], [x * x], [torch.tensor(1.0)], **options)


def exchange_rows(x: torch.Tensor) -> torch.Tensor:
    first = x[0].clone()
    x[0].copy_(x[1])
    x[1].copy_(first)
    return x


INDEX = torch.tensor([0, 2])

WRITES: dict[str, Program] = {
    "data": lambda x: x.mul_(2),
    "twice": lambda x: x.mul_(2).add_(1),
    "twice, by another name": lambda x: (x.mul_(2), x.view_as(x).add_(1), x)[2],
    "read, written, read": lambda x: (x * 2, x.mul_(3), x + 1),
    "written and returned": lambda x: (x.mul_(3), x[0], x),
    "through a view": lambda x: (x.t()[0].mul_(2), x * 1)[1],
    "through a view of a view": lambda x: (x[1:].t()[1:].t()[0].mul_(2), x * 1)[1],
    "a view of before": lambda x: (v := x[0], x.mul_(3), v)[::2],
    "a slice": lambda x: (x[:, 1:3].zero_(), x)[1],
    "a slice assigned": lambda x: (x.__setitem__((slice(1, None), slice(None, None, 2)), 2.5), x * 2)[1],
    "a slice by its own": lambda x: (x.__setitem__(0, x[1] * 1), x * 2)[1],
    "a diagonal": lambda x: (x.diagonal().fill_(3.0), x * 1)[1],
    "as_strided": lambda x: (x.as_strided((2,), (1,), x.storage_offset() + 1).mul_(2), x * 1)[1],
    "unfold": lambda x: x.unfold(1, 2, 2).mul_(3),
    "select": lambda x: (x.select(1, 2).mul_(3), x.movedim(0, 1).mul_(3)),
    "copy_": lambda x: (x.copy_(x * 2), x.sin())[1],
    "copy_ of a slice": lambda x: (x[0].copy_(x[1]), x.sin())[1],
    "copy_ of another dtype": lambda x: x.copy_((x * 2).double()),
    "copy_ that broadcasts": lambda x: x.copy_(x[0].clone()),
    "exchange": exchange_rows,
    "out=": without_grad(lambda x: torch.sin(x * 2, out=x)),
    "out= a slice": without_grad(lambda x: torch.add(x[0] * 1, 1, out=x[0])),
    "out= a product": without_grad(lambda x: torch.mm(x[:, :3] * 1, x * 1, out=x)),
    "out= something new": without_grad(lambda x: torch.sin(x, out=torch.empty_like(x))),
    "index_put_": lambda x: x.index_put_((INDEX,), x[0] * 2),
    "index_put_ that adds": lambda x: x.index_put_((INDEX, INDEX), torch.ones(2), accumulate=True),
    "index_put_ without history": without_grad(lambda x: x.index_put_((INDEX,), x[0] * 2)),
    "index_fill_": lambda x: x.index_fill_(0, INDEX, 3.0),
    "scatter_add_": lambda x: x.scatter_add_(1, torch.tensor([[0], [1], [2]]), x[:, :1] * 2),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 0.5),
    "masked_scatter_": lambda x: x.masked_scatter_(x > 0, x * 2),
    "foreach": without_grad(lambda x: (torch._foreach_add_([x], 1.0), x * 2)[1]),
    "foreach with history": lambda x: (torch._foreach_mul_([x], [x.sin()]), x * 2)[1],
    "foreach of views": without_grad(lambda x: (torch._foreach_mul_([x[0], x[1:]], [2.0, 3.0]), x)[1]),
    "foreach copies": without_grad(lambda x: torch._foreach_copy_([x], [x * 3])),
    "foreach of three": without_grad(lambda x: torch._foreach_addcmul_([x], [x * 1], [x * 2], 0.5)),
    "fused AdamW": without_grad(lambda x: (adamw(x), x * 2)[1]),
    "fused SGD": without_grad(lambda x: (sgd(x), x * 2)[1]),
    "fused Adagrad": without_grad(lambda x: (adagrad(x), x * 2)[1]),
    "random numbers": without_grad(lambda x: (x.uniform_(), x.exponential_(), x.bernoulli_(0.5))[0]),
    "random numbers in a part": without_grad(lambda x: (x[1:].normal_(), x * 1)[1]),
    "dropout": lambda x: F.dropout(x, 0.5, inplace=True),
    "under no_grad": lambda x: (without_grad(lambda x: x.mul_(2))(x), x * 2)[1],
    "detached": lambda x: (x.detach().mul_(2), x * 3)[1],
    "detached, and returned so": lambda x: (x.detach().mul_(2), x.detach()),
    "a part detached": lambda x: (x.detach().unbind(0)[1].mul_(2), x * 1)[1],
    "in inference mode": in_inference_mode(lambda x: x.mul_(2)),
    "in inference mode, a view": in_inference_mode(lambda x: x[0].mul_(2)),
    "hidden": lambda x: (x.data.mul_(2), x * 3)[1],
    "hidden, a view": lambda x: (x.data[0].mul_(2), x)[1],
    "hidden after history": lambda x: (x.mul_(3), x.data.mul_(2), x * 1)[::2],
    "no history, then some": lambda x: (without_grad(lambda x: x.mul_(2))(x), x.mul_(3)),
    "history, then none": lambda x: (x.mul_(3), without_grad(lambda x: x.mul_(2))(x)),
    "all parts": without_grad(lambda x: ([v.mul_(k + 2) for k, v in enumerate(x.split(1))], x * 1)[1]),
    "mark_dirty": lambda x: (Dirty.apply(x), x)[1],
    "mark_dirty of a view": lambda x: (Dirty.apply(x[0]), x * 1)[1],
    "a product": lambda x: x.addmm_(x[:, :3] * 1, x * 1),
    "a triangle": lambda x: (x.fill_diagonal_(2.0), x.tril_())[0],
    "a sum": lambda x: x.cumsum_(0),
}

MODES = (nullcontext, torch.no_grad, torch.inference_mode)
LAID_OUT_OTHERWISE = "lays the result out otherwise"
"""Eager gives a DTensor other placements there and leaves its memory as it is; refused by name."""


def compare(name: str, make: Callable[[], torch.Tensor]) -> None:
    tried = 0
    for around in MODES:
        scenes = lambda: [Scene(WRITES[name], (make(),)) for _ in range(2)]  # noqa: E731
        try:
            for scene in scenes():
                play(scene, scene.fn, around=around)
        except Exception:  # wrappers refuse in many words
            continue
        tried += 1
        try:
            same_as_eager(scenes, around=around)
        except UnsupportedProgram as refusal:
            assert LAID_OUT_OTHERWISE in refusal.what
    if not tried:
        pytest.skip("eager refuses it")


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize(
    "make",
    [plain, leaf, non_leaf, lambda: plain(5, 4)[1:4], lambda: non_leaf(4, 3).t(), two, two_non_leaf],
    ids=["plain", "leaf", "non-leaf", "view", "view of a non-leaf", "two", "two, non-leaf"],
)
def test_as_in_eager(make: Callable[[], torch.Tensor], name: str) -> None:
    compare(name, make)


@pytest.mark.parametrize("name", [name for name in WRITES if name != "fused AdamW"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_of_dtensors(mesh: DeviceMesh, requires_grad: bool, name: str) -> None:
    """Fused AdamW of a DTensor: DTensor's own fake propagation lacks it, in PyTorch's pipeline too."""
    compare(name, lambda: sharded(mesh, plain()).requires_grad_(requires_grad) * 1.5)


def test_other_placements_are_refused_by_name(mesh: DeviceMesh) -> None:
    def program(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.index_add_(0, index, x[:2] * 2)

    x, index = sharded(mesh, plain()), replicated(mesh, INDEX)
    try:
        program(sharded(mesh, plain()), index)
    except NotImplementedError as error:  # torch 2.11, where no write of a DTensor lays it out otherwise
        pytest.skip(f"eager refuses it: {error}")
    with pytest.raises(UnsupportedProgram, match=r"`args\[0\]`.*lays the result out otherwise"):
        aotdist.compile(program, backend="fx")(x, index)


def test_offsets_into_the_storage_after_a_write() -> None:
    """Of what is all of its memory; a trace does not know the offset of another input after a write."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x.tril_(), x.fill_diagonal_(2.0))[0]

    same_as_eager(lambda: Scene(program, (torch.randn(3, 4),)))
    with pytest.raises(UnsupportedProgram, match="a part of a storage that was written before"):
        aotdist.compile(program, backend="fx")(torch.randn(5, 4)[1:4])


@pytest.mark.parametrize("make", [plain, two])
def test_a_list_with_wrappers_is_counted_as_in_eager(make: Callable[[], torch.Tensor]) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> None:
        torch._foreach_copy_([x, x[:2]], [y, y[1:]])

    same_as_eager(lambda: Scene(program, (plain(), make())))


def test_a_list_with_wrappers_is_written_without_history() -> None:
    """With one, views from before would keep the gradients that they had."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = x.t()
        torch._foreach_mul_([x, x[0], before], 2.0)
        return before, x.t()

    for make in (two_non_leaf, lambda *size: two_non_leaf(*size).t()):
        same_as_eager(lambda make=make: Scene(torch.no_grad()(program), (make(4, 4),)))
        with pytest.raises(UnsupportedProgram, match="writes a list with wrappers while autograd records"):
            aotdist.compile(program, backend="fx")(make(4, 4))
