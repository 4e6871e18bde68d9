"""Programs that PyTorch 2.13's own pipeline gets wrong without a word; here they are eager's.

Each test is named after what goes wrong there. Its program is small, so that it can be tried with
`torch.compile(backend="aot_eager")`.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from tests.semantics.functions import Dirty
from tests.semantics.makers import leaf, non_leaf, plain, two, two_non_leaf
from tests.semantics.meshes import sharded
from tests.semantics.observation import Scene, assert_both_give_the_same, same_as_eager


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "one by one"])
def test_foreach_writes_survive_the_backward(foreach: bool) -> None:
    """What is saved for backward and what is written are not the same buffer."""

    def program(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = (x.exp() * x.sin()).sum()
        with torch.no_grad():
            if foreach:
                torch._foreach_add_([a, b], [x.exp(), x.sin()])
            else:
                a.add_(x.exp())
                b.add_(x.sin())
        return y

    same_as_eager(lambda: Scene(program, (leaf(), plain(), plain())), calls=2)


def test_unused_outputs_give_none_and_not_zeros() -> None:
    def use(call: Any) -> list[Any]:
        a, b = leaf(), leaf()
        first, _ = call(a, b)
        first.sum().backward()
        return [a.grad, b.grad]

    assert_both_give_the_same(lambda a, b: (a * 2, b.sqrt()), use)


def test_frozen_branches_give_none_and_no_nan() -> None:
    """Zero times the infinite slope of a square root at zero is no number."""

    def use(call: Any) -> list[Any]:
        a, b = torch.zeros(3, requires_grad=True), leaf(3)
        first, second = call(a, b)
        (first.sum() + second.detach().sum()).backward()
        return [a.grad, b.grad]

    assert_both_give_the_same(lambda a, b: (a * 2, a.sqrt() * b), use)


def test_adamw_does_not_move_an_unused_head() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.trunk(x).tanh()
            return self.one(hidden), self.other(hidden)

    torch.manual_seed(0)
    eager = Heads()
    models = eager, aotdist.compile(copy.deepcopy(eager), backend="fx")
    batches = [plain() for _ in range(3)]
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for position, batch in enumerate(batches):
            optimizer.zero_grad()
            model(batch)[position % 2].square().sum().backward()
            optimizer.step()
    for ours, theirs in zip(*(list(model.parameters()) for model in models), strict=True):
        assert torch.equal(ours, theirs)


class Sparing(torch.autograd.Function):
    """Asks for None in the place of zeros, and counts on it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        first, second = grads
        return torch.full((3, 4), 10.0) if second is None else first + second


def test_set_materialize_grads_is_heeded() -> None:
    same_as_eager(lambda: Scene(lambda x: Sparing.apply(x)[0].sin(), (leaf(),)))


@pytest.mark.parametrize(
    "program", [Dirty.apply, lambda x: (Dirty.apply(x), x.sin())[1]], ids=["alone", "read"]
)
@pytest.mark.parametrize("make", [non_leaf, two_non_leaf], ids=["plain", "two"])
def test_mark_dirty_keeps_its_backward(make: Any, program: Any) -> None:
    same_as_eager(lambda: Scene(program, (make(),)))


SLICES: dict[str, Callable[..., Any]] = {
    "of the written": lambda a, b: (a.mul_(2), a[1:, 1])[1],
    "of the other": lambda a, b: (a.mul_(2), b[1:, 1])[1],
    "of both": lambda a, b: (a.mul_(2), a.t()[1], b.t()[1])[1:],
    "made before": lambda a, b: (b[1:], a.mul_(2))[0],
    "twice written": lambda a, b: (a.mul_(2), b.add_(1), b[:, ::2], a[:, ::2])[2:],
}


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("make", [plain, non_leaf, two], ids=["plain", "non-leaf", "two"])
def test_a_slice_of_an_aliased_written_view_is_the_right_slice(make: Any, name: str) -> None:
    def build() -> Scene:
        x = make(4, 4)
        return Scene(SLICES[name], (x[1:], x[:3]), held={"x": x})

    same_as_eager(build)


@pytest.mark.parametrize("name", ["an input", "an intermediate"])
def test_a_view_made_under_no_grad_has_no_gradient(name: str) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x if name == "an input" else x * 2
        with torch.no_grad():
            return y.t(), y.sin()

    same_as_eager(lambda: Scene(lambda x: (*program(x), x * 2), (leaf(),)))
    same_as_eager(lambda: Scene(lambda x: (*program(x), x * 2), (leaf() * 1.5,)))


def test_a_write_under_enable_grad_inside_no_grad_keeps_its_gradient() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * 2
        with torch.enable_grad():
            y.mul_(w)
        return y

    same_as_eager(lambda: Scene(program, (plain(), leaf())), around=torch.no_grad)

    def written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x.mul_(w)
        return x * 3

    same_as_eager(lambda: Scene(written, (plain(), leaf())), around=torch.no_grad)


def _layouts(x: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {
        "apart": (x[:2], x[2:]),
        "aliased": (x[:2], x[1:3]),
        "aliased otherwise": (x[1:3], x[:2]),
        "the same": (same := x[:2], same),
    }


LAYOUTS = tuple(_layouts(torch.zeros(4, 4)))


@pytest.mark.parametrize("make", [plain, two, non_leaf], ids=["plain", "two", "non-leaf"])
@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_another_alias_layout_is_another_artifact(first: str, second: str, make: Any) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return b * 2

    def build() -> list[Scene]:
        memories = [make(4, 4), make(4, 4), make(4, 4)]
        return [
            Scene(program, _layouts(x)[name], held={"x": x})
            for x, name in zip(memories, (first, second, first), strict=True)
        ]

    same_as_eager(build, compilations=None)


def test_a_parameter_tied_since_is_another_artifact() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.one.weight.mul_(2)
            return self.other(x)

    torch.manual_seed(0)
    eager = Pair()
    ours = aotdist.compile(copy.deepcopy(eager), backend="fx")
    x = plain()
    for _ in range(2):
        outs = [model(x) for model in (eager, ours)]
        assert torch.equal(*outs)
        for model, out in zip((eager, ours), outs, strict=True):
            out.sum().backward()
            model.other.weight = model.one.weight
    for (name, theirs), own in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(theirs, own), name
        assert theirs.grad is None if own.grad is None else torch.equal(theirs.grad, own.grad), name


def test_two_subclasses_that_share_an_inner_tensor_see_each_others_writes() -> None:
    def build() -> Scene:
        shared = plain()
        one, other = TwoTensor(shared, plain()), TwoTensor(plain(), shared)
        return Scene(lambda a, b: (a.add_(1), b * 2, b.mul_(3), a * 2)[1::2], (one, other))

    same_as_eager(build)


@pytest.mark.parametrize("written", ["the subclass", "the plain one", "both"])
def test_a_subclass_that_shares_its_inner_tensor_with_a_plain_input_sees_its_writes(written: str) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        if written != "the plain one":
            a.add_(1)
        if written != "the subclass":
            b.mul_(3)
        return [a * 2, b * 2]

    def build() -> Scene:
        shared = plain()
        return Scene(program, (TwoTensor(shared, plain()), shared))

    same_as_eager(build)


@pytest.mark.parametrize("written", ["a", "b", "ab"])
def test_a_dtensor_that_shares_its_inner_tensor_with_a_plain_input(mesh: DeviceMesh, written: str) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        for name, tensor in {"a": a, "b": b}.items():
            if name in written:
                tensor.mul_(3)
        return [a * 2, b * 2]

    def build() -> Scene:
        local = plain()
        return Scene(program, (sharded(mesh, local), local))

    same_as_eager(build)


def test_hooks_added_after_compilation_are_called() -> None:
    def run(compile_it: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        if compile_it:
            aotdist.compile(model, backend="fx")
        x = plain()
        found = [model(x)]
        model[0].register_forward_hook(lambda module, args, out: out * 3)
        found.append(model(x))
        model[0].weight.register_hook(lambda grad: grad * 5)
        model[1].register_full_backward_hook(lambda module, into, outof: (into[0] * 7,))
        found.append(model(x))
        found[-1].sum().backward()
        return [*found, *(p.grad for p in model.parameters())]

    for eager, ours in zip(run(False), run(True), strict=True):
        assert torch.equal(eager, ours)
