"""`torch.utils.swap_tensors`: two tensors become each other."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import swap_tensors

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.makers import leaf, non_leaf, plain, two, two_non_leaf
from tests.semantics.meshes import sharded
from tests.semantics.observation import Scene, play, same_as_eager, same_as_eager_or_refused


def quietly(program: Callable[..., Any], *args: Any) -> Any:
    with torch.no_grad():
        return program(*args)


def swap(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    swap_tensors(x, y)
    return x


def like(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the kind of `x`, of another size."""
    made = torch.full((2, 3), 2.5) + 1
    return TwoTensor(made, made + 1) if isinstance(x, TwoTensor) else made


TWO: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "and nothing else": lambda x, y: swap_tensors(x, y),
    "under no_grad": lambda x, y: quietly(swap_tensors, x, y),
    "one is used": lambda x, y: swap(x, y) * 2,
    "both are used": lambda x, y: (swap(x, y) * 2, y.sin(), x + 1),
    "one is returned": lambda x, y: swap(x, y),
    "both are returned": lambda x, y: (swap(x, y), y, x * 2),
    "a view of one": lambda x, y: (swap(x, y)[0], y.t()),
    "and back": lambda x, y: (swap(x, y), swap(x, y) * 2)[1],
    "one is written before": lambda x, y: (quietly(x.mul_, 2), swap(x, y) * 2)[1],
    "one is written after": lambda x, y: (swap(x, y), quietly(x.mul_, 2), x * y.sum())[2],
    "one is written with history": lambda x, y: (swap(x, y), x.mul_(2), x * 3)[1:],
    "one is written before, with history": lambda x, y: (x.add_(1), swap(x, y), x * y.sum())[2],
    "through detached": lambda x, y: (d := x.detach(), swap(x, y), d.mul_(2), x * y.sum())[3],
    "a view is written": lambda x, y: (swap(x, y), quietly(lambda: x[0].mul_(2)), y * 2)[2],
    "reshaped before": lambda x, y: (x.t_(), swap(x, y), y * 2)[2],
    "reshaped after": lambda x, y: (swap(x, y), quietly(x.unsqueeze_, 0), x * 2, y + 1)[2:],
    "resized after": lambda x, y: (swap(x, y), quietly(x.resize_, 2), x * 2, y + 1)[2:],
    "data = after": lambda x, y: (swap(x, y), setattr(x, "data", like(x)), x * 2, y + 1)[2:],
    "switched on": lambda x, y: (swap(x, y), x.requires_grad_(), x * y.sum())[2],
    "detached": lambda x, y: (swap(x, y), x.detach_(), x * 2, y * 3)[2:],
    "with a tensor made inside": lambda x, y: (swap(x, like(x)), x * 2, y + 1)[1:],
    "with one that is returned": lambda x, y: (t := like(x) * 2, swap(x, t), t, t + 1)[1:],
    "with one of history": lambda x, y: (swap(x, y * 2), x * 3)[1],
    "with one made of it": lambda x, y: (t := x * 2, swap(x, t), t, x * 3)[1:],
    "with a part of a tensor made inside": lambda x, y: (swap(x, like(x)[0]), x * 2)[1],
    "with a part of another": lambda x, y: (swap(x, y[0]), x * 2)[1],
    "with a part of another, written": lambda x, y: (
        v := y[0], swap(x, v), quietly(x.mul_, 2), y * 2, v * 3,
    )[3:],
    "tensors made inside": lambda x, y: (a := x + 1, b := y * 2, swap(a, b), a * 3, b)[2:],
    "tensors made inside, nobody sees": lambda x, y: (a := x + 1, b := y * 2, swap(a, b), a * 3)[3],
    "three in a round": lambda x, y: (t := like(x), swap(x, y), swap(y, t), x * 2, y * 3, t)[3:],
    "three, and written": lambda x, y: (
        t := like(x), swap(t, x), quietly(t.mul_, 2), swap(t, y), quietly(y.add_, 1), x, t,
    )[5:],
    "with itself": lambda x, y: (swap(x, x), x * 2)[1],
    "after its use": lambda x, y: (z := (x * 2).sum(), swap(x, y), z, y + 1)[2:],
    "after its use in a product": lambda x, y: (z := (x * y).sum(), swap(x, y), z)[2],
}  # fmt: skip

PAIRS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "plain": lambda: (plain(), plain()),
    "of other sizes": lambda: (plain(), plain(4, 2)),
    "transposed": lambda: (plain(), plain(3, 4).t()),
    "part": lambda: (plain(5, 4)[1:4], plain()),
    "leaves": lambda: (leaf(), leaf(4, 2)),
    "leaf, plain": lambda: (leaf(), plain(4, 2)),
    "plain, leaf": lambda: (plain(), leaf()),
    "parameter, plain": lambda: (torch.nn.Parameter(plain()), plain(4, 2)),
    "non-leaf, plain": lambda: (non_leaf(), plain(4, 2)),
    "non-leaves": lambda: (non_leaf(), non_leaf(4, 2)),
    "two": lambda: (two(), two(4, 2)),
    "two leaves": lambda: (two().requires_grad_(), two(4, 2).requires_grad_()),
    "two, non-leaf": lambda: (two_non_leaf(), two()),
    "two, plain": lambda: (two(), plain()),
}  # fmt: skip

REFUSALS = (
    "requires grad by itself",
    "in another size than its gradient",
)


def compare(build: Callable[[], Scene], *, compilations: int | None = 1, **play_options: Any) -> None:
    try:
        eager = build()
        play(eager, eager.fn, **play_options)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError, ValueError) as error:
        if any(word in str(error) for word in ("use_count", "poisoned", "gradient edge", "different slots")):
            ours = build()
            with pytest.raises(RuntimeError, match="use_count|poisoned|gradient edge|different slots"):
                play(ours, aotdist.compile(ours.fn, backend="fx"), **play_options)
        pytest.skip(f"eager refuses it: {str(error)[:60]}")
    same_as_eager_or_refused(build, REFUSALS, compilations=compilations, **play_options)


@pytest.mark.parametrize("program", TWO)
@pytest.mark.parametrize("make", PAIRS)
def test_as_in_eager(make: str, program: str) -> None:
    def build() -> Scene:
        x, y = PAIRS[make]()
        return Scene(TWO[program], (x, y), held={"base": () if x._base is None else x._base})

    compare(build)


@pytest.mark.parametrize("program", TWO)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_of_dtensors(mesh: DeviceMesh, requires_grad: bool, program: str) -> None:
    def build() -> Scene:
        x, y = (sharded(mesh, torch.randn(4, size)).requires_grad_(requires_grad) for size in (4, 2))
        return Scene(TWO[program], (x, y))

    compare(build)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("program", TWO)
def test_without_grad(around: Callable[[], Any], program: str) -> None:
    def build() -> Scene:
        with around():
            return Scene(TWO[program], (plain(), plain(4, 2)))

    compare(build, around=around)


@pytest.mark.parametrize("make", PAIRS)
def test_at_every_call(make: str) -> None:
    """Each call has its own artifact, where the tensors differ: they are others at every second call."""

    def build() -> Scene:
        return Scene(lambda x, y: (swap(x, y) * 2, y + 1), PAIRS[make]())

    compare(build, calls=3, compilations=None)


def test_with_a_closed_over_tensor() -> None:
    def build() -> Scene:
        table = torch.arange(6.0)
        return Scene(lambda x: (swap(x, table), x * 2, table + 1), (plain(),), held={"table": table})

    same_as_eager(build)


def test_of_parameters() -> None:
    class Exchanges(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            swap_tensors(self.first.weight, self.second.weight)
            return self.second(self.first(x))

    same_as_eager(lambda: Scene(Exchanges(), (plain(),)))


def test_inputs_that_share_memory() -> None:
    def program(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        swap_tensors(x, z)
        z.mul_(2)
        return x + y.sum()

    def build() -> Scene:
        memory = torch.arange(12.0)
        return Scene(program, (memory.detach()[:6], memory.detach()[3:9], plain(6)), held={"memory": memory})

    same_as_eager(build)


def test_what_the_backward_needs_is_saved_before() -> None:
    def program(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        swap_tensors(x, y)
        return (x * w).sin() + y.sum()

    same_as_eager(lambda: Scene(program, (plain(), plain(3, 4), leaf())))
    same_as_eager(lambda: Scene(program, (leaf(), leaf(), leaf())))


@pytest.mark.parametrize("hold", [lambda x: x[0], lambda x: x.sin() if x.requires_grad else x[0]])
@pytest.mark.parametrize("make", [plain, leaf, non_leaf])
def test_what_something_else_holds_is_refused_as_in_eager(
    make: Callable[[], torch.Tensor], hold: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    for call in (swap, aotdist.compile(swap, backend="fx")):
        x = make()
        before, held = x.detach().clone(), hold(x)
        with pytest.raises(RuntimeError, match="use_count|gradient edge"):
            call(x, plain(2))
        assert torch.equal(x, before), held


def test_a_gradient_on_its_way_is_refused_as_in_eager() -> None:
    for call in (swap, aotdist.compile(swap, backend="fx")):
        x = leaf()
        result = (x * 2).sum()
        call(x, plain(2))
        with pytest.raises(RuntimeError, match="poisoned by swap_tensors"):
            result.backward()


def test_what_has_weak_references_is_refused_as_in_eager() -> None:
    for call in (swap, aotdist.compile(swap, backend="fx")):
        x = plain()
        reference = weakref.ref(x)
        with pytest.raises(RuntimeError, match="weakref"):
            call(x, plain(2))
        assert reference() is x


def test_a_swap_of_real_tensors_is_undone_by_a_refusal() -> None:
    table = torch.arange(6.0)

    def program(x: torch.Tensor) -> torch.Tensor:
        swap_tensors(x, table)
        return x * 2 if x.sum() > 0 else x

    x = plain()
    with pytest.raises(UnsupportedProgram, match="read off a tensor"):
        aotdist.compile(program, backend="fx")(x)
    assert table.tolist() == list(range(6)) and x.size() == (3, 4)
    assert type(table) is type(x) is torch.Tensor


def test_what_stays_refused() -> None:
    def looks(x: torch.Tensor, y: torch.Tensor) -> None:
        storage = x.untyped_storage()
        swap_tensors(x, y)
        storage.resize_(0)

    def in_a_branch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x, y: swap(x, y) * 2, lambda x, y: x + y, (x, y))

    refusals = {looks: "after its storage was asked for", in_a_branch: "writes the metadata"}
    for program, reason in refusals.items():
        with pytest.raises(UnsupportedProgram, match=reason):
            aotdist.compile(program, backend="fx")(plain(), plain())
