"""Inputs that share memory, one of them written."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import plain_tensors
from tests.semantics.meshes import sharded
from tests.semantics.observation import (
    Scene,
    assert_both_give_the_same,
    play,
    same_as_eager,
    same_as_eager_or_refused,
    skip_unless_eager_runs,
)


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(*(size or (4, 4)), requires_grad=True)


def plain(*size: int) -> torch.Tensor:
    return torch.randn(*(size or (4, 4)))


def two(*size: int) -> torch.Tensor:
    return TwoTensor(plain(*size), plain(*size))


def parts(x: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {
        "base and view": (x, x[1]),
        "view and base": (x[1], x),
        "two views": (x[:3], x[1:]),
        "blocks that overlap": (x[:, :3], x[:, 2:]),
        "blocks that do not": (x[:, :2], x[:, 2:]),
        "its transpose": (x, x.t()),
        "detached": (x, x.detach()),
        "behind autograd's back": (x, x.data),
        "other strides": (x, x[::2, ::2]),
    }


WRITES: dict[str, Callable[..., Any]] = {
    "the first": lambda a, b: (a.add_(1), b * 2)[1],
    "the second": lambda a, b: (b.mul_(2), a * 3)[1],
    "both": lambda a, b: (a.add_(1), b.mul_(2), a.sin() + 0)[2],
    "without history": lambda a, b: (_no_grad_write(b), (a * a).sum() + b.sum())[1],
    "through a view": lambda a, b: (b.view_as(b).zero_(), a.exp())[1],
    "and returns them": lambda a, b: (b.copy_(b * 2), a, b, a[0], b[0])[1:],
    "hidden": lambda a, b: (b.data.mul_(2), a * 1)[1],
}


def _no_grad_write(x: torch.Tensor) -> None:
    with torch.no_grad():
        x.fill_(0.5)


def compare(make: Callable[[], torch.Tensor], which: str, write: str) -> None:
    def build() -> Scene:
        x = make()
        return Scene(WRITES[write], parts(x)[which], held={"x": x})

    skip_unless_eager_runs(build, backward=write != "hidden")
    try:
        same_as_eager(build, backward=write != "hidden")
    except AssertionError as error:
        # Of a fake `copy`, PyTorch makes the first with the offset of what is written and, from its cache,
        # others with none; TwoTensor's two halves then differ, and it checks.
        if "a.storage_offset() == b.storage_offset()" in str(error):
            pytest.skip("TwoTensor does not take fakes of different offsets")
        raise


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("which", parts(torch.zeros(4, 4)))
@pytest.mark.parametrize("make", [plain, two, lambda: leaf() * 1.5], ids=["plain", "two", "non-leaf"])
def test_one_is_written(make: Callable[[], torch.Tensor], which: str, write: str) -> None:
    compare(make, which, write)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("which", parts(torch.zeros(4, 4)))
@pytest.mark.parametrize("requires_grad", [False, True])
def test_one_dtensor_is_written(mesh: DeviceMesh, requires_grad: bool, which: str, write: str) -> None:
    compare(lambda: sharded(mesh, plain()).requires_grad_(requires_grad) * 1.5, which, write)


def test_a_leaf_and_views_of_it() -> None:
    @torch.no_grad()
    def step(param, row, rest):
        row.add_(1)
        rest.mul_(2)
        return param.sum()

    same_as_eager(lambda: (lambda p: Scene(step, (p, p[0], p[1:])))(leaf()))


def test_wrappers_that_share_one_inner_tensor() -> None:
    def build() -> Scene:
        shared = plain()
        one, other = TwoTensor(shared, plain()), TwoTensor(plain(), shared)
        return Scene(lambda a, b, c: (a.add_(1), b * 2, c * 3)[1:], (one, other, shared))

    same_as_eager(build)


def test_a_view_whose_base_is_no_argument() -> None:
    def build() -> Scene:
        base = leaf() * 2
        return Scene(lambda a, b: (a.mul_(b.sum()), b * 2)[1], (base[:3], base[1:]), held={"base": base})

    same_as_eager(build)


def test_closed_over_and_argument() -> None:
    def build() -> Scene:
        x = plain()
        return Scene(lambda row: (row.add_(1), x * 2)[1], (x[1],), held={"x": x})

    same_as_eager(build)


def test_what_is_closed_over_is_an_argument_once() -> None:
    def build() -> list[Scene]:
        total = plain()
        program = lambda x: (total.add_(x), x * 2)[1]  # noqa: E731
        return [Scene(program, (x,), held={"total": total}) for x in (total, plain(), total, plain())]

    same_as_eager(build, compilations=2)


@pytest.mark.parametrize("given", [False, True])
def test_what_is_a_gradient_is_an_argument_or_closed_over_once(given: bool) -> None:
    def build() -> list[Scene]:
        weight = leaf()
        weight.grad = own = plain()
        if given:
            program = lambda w, g: w.grad * 2 + g  # noqa: E731
            return [Scene(program, (weight, g)) for g in (own, plain(), own)]
        other = leaf()
        other.grad = plain()
        return [Scene(lambda w: w.grad * 2 + own, (w,)) for w in (weight, other, weight)]

    same_as_eager(build, backward=False, compilations=2)


@pytest.mark.parametrize("weight_first", [False, True])
def test_what_is_closed_over_is_a_weight_of_a_module_once(weight_first: bool) -> None:
    """The module is given another one, and then its own again."""
    results: list[list[torch.Tensor]] = []
    for compiles in (False, True):
        torch.manual_seed(0)
        linear = torch.nn.Linear(3, 3)
        weight = linear.weight
        if weight_first:
            program = lambda x, w=weight, m=linear: w.sum() + m(x)  # noqa: E731
        else:
            program = lambda x, m=linear, w=weight: m(x) + w.sum()  # noqa: E731
        call = aotdist.compile(program, backend="fx") if compiles else program
        seen = []
        for replaced in (weight, torch.nn.Parameter(torch.ones(3, 3)), weight):
            linear.weight = replaced
            seen.append(call(torch.ones(3)))
        results.append(seen)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def layouts(x: torch.Tensor) -> list[Sequence[torch.Tensor]]:
    return [(x[:2], x[2:]), (x[:2], x[1:3]), (x[1:3], x[:2]), (x[2:], x[:2]), (x[:2], x[:2])]


def test_each_layout_of_memory_is_a_signature_of_its_own() -> None:
    """Apart, overlapping, overlapping otherwise, apart again, the same: each call sees its own."""
    compiled = aotdist.compile(lambda a, b: (a.add_(1), b * 2)[1], backend="fx")
    for _ in range(2):
        for position in range(5):
            x, y = torch.arange(16.0).view(4, 4), torch.arange(16.0).view(4, 4)
            a, b = layouts(x)[position]
            ours = compiled(*layouts(y)[position])
            a.add_(1)
            assert torch.equal(ours, b * 2) and torch.equal(x, y)
    assert len(compiled.artifacts) == 4


def test_the_place_in_memory_is_none() -> None:
    compiled = aotdist.compile(lambda a, b: (a.add_(1), b * 2)[1], backend="fx")
    memory = torch.zeros(100)
    for start in (0, 8, 31):
        x = memory[start : start + 10]
        assert compiled(x[:6], x[4:]).tolist() == [2.0, 2.0, 0.0, 0.0, 0.0, 0.0]
        memory.zero_()
    assert len(compiled.artifacts) == 1


def test_what_the_first_trace_assigned_is_assigned_once() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.traces, self.seen = 0, []

        def forward(self, a, b):
            self.traces += 1
            self.seen.append(self.traces)
            return (a.add_(1), b * 2)[1]

    counter = aotdist.compile(Counter(), backend="fx")
    x = torch.zeros(4)
    counter(x[:3], x[1:])
    assert counter.traces == 1 and counter.seen == [1]


def test_a_write_to_memory_that_is_shared_as_another_dtype_is_refused() -> None:
    memory = torch.arange(16.0)
    with pytest.raises(UnsupportedProgram, match="shares memory with .*, as another dtype"):
        aotdist.compile(lambda a, b: (a.add_(1), b * 2)[1], backend="fx")(
            memory, memory[2:].view(torch.int32)
        )
    assert memory[1] == 1


def test_a_write_brings_history_to_plain_inputs() -> None:
    def build() -> Scene:
        x = plain(3, 4)
        return Scene(lambda a, b, c: (a.mul_(c), b * 2)[1], (x, x.t(), leaf(3, 4)))

    same_as_eager(build)


class Held(torch.nn.Module):
    """Finds tensors in places of every kind."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.items = [first, second]
        self.register_buffer("buffer", first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = (self.first, self.second, *self.items, self.buffer)
        return x + sum(tensor * 3**position for position, tensor in enumerate(found))


def test_what_was_one_tensor_in_two_places_at_capture() -> None:
    """An attribute, an item of a list, a buffer or an argument holds another later."""

    def played(make: Callable[..., torch.Tensor], *, compiles: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        shared = make()
        held = Held(shared, shared)
        call = aotdist.compile(held.forward, backend="fx") if compiles else held.forward
        seen = [call(held.first)]
        for change in (
            lambda: setattr(held, "second", make()),
            lambda: held.items.__setitem__(0, make()),
            lambda: setattr(held, "buffer", make()),
            lambda: setattr(held, "first", make()),
            lambda: None,
        ):
            change()
            seen.append(call(held.items[1]))
        return [plain for tensor in seen for plain in plain_tensors(tensor)]

    for make in (plain, two):
        results = [played(make, compiles=compiles) for compiles in (False, True)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_states_that_begin_as_one_tensor() -> None:
    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = torch.nn.LSTMCell(3, 3)
            self.hidden = self.memory = torch.zeros(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            states = self.cell(x, (self.hidden, self.memory))
            self.hidden, self.memory = (state.detach() for state in states)
            return self.hidden * 2

    results: list[list[torch.Tensor]] = []
    for compiles in (False, True):
        torch.manual_seed(0)
        module = Recurrent()
        call = aotdist.compile(module, backend="fx") if compiles else module
        results.append([call(torch.randn(2, 3)) for _ in range(4)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_parameter_tied_since_the_first_call() -> None:
    def build() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model.register_buffer("seen", torch.zeros(3, 3))
        return model

    def program(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model[0].weight.mul_(2)
        return model[1](model[0](x))

    results: list[list[torch.Tensor]] = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model, x = build(), torch.randn(2, 3)
        run = lambda x, model=model: program(model, x)  # noqa: E731
        call = aotdist.compile(run, backend="fx") if compiles else run
        seen = [call(x)]
        model[1].weight = model[0].weight
        seen.append(call(x))
        model[1].weight = torch.nn.Parameter(torch.ones(3, 3))
        seen.append(call(x))
        model[1].weight.data = model[0].weight.data[:]
        seen.append(call(x))
        results.append(seen)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_lay_apart_comes_to_lie_in_memory_that_others_share() -> None:
    """Beside two that always share memory; and two pairs, of one tensor since."""

    def program(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> list[torch.Tensor]:
        a.mul_(2)
        c.add_(1)
        return [b * 1, d * 1]

    def build(make: Callable[..., torch.Tensor]) -> list[Scene]:
        x, y, z = (make(4, 4) for _ in range(3))
        layouts = [
            (x[:2], x[1:3], y[:2], z[1:3]),
            (x[:2], x[1:3], x[2:], z[1:3]),
            (x[:2], x[1:3], y[:2], x[2:]),
            (x[:2], x[1:3], y[:2], y[1:3]),
            (x[:2], x[1:3], x[2:], x[:3]),
        ]
        return [Scene(program, layouts[which]) for which in (0, 1, 0, 2, 0, 3, 4, 3)]

    for make in (plain, two):
        same_as_eager(lambda make=make: build(make), compilations=5)


def test_wrappers_share_one_inner_tensor_behind_the_beginning_of_its_storage() -> None:
    """Their class compares where the two begin, and of the one that is not shared that is not changed."""

    def build() -> list[Scene]:
        x, y, z = (torch.randn(6, 4) for _ in range(3))
        return [
            Scene(lambda a, b: (a.mul_(2), b * 1)[1], tuple(TwoTensor(*pair) for pair in pairs))
            for pairs in (
                ((x[1:5], y[1:5]), (x[2:], z[2:])),
                ((x[:4], y[:4]), (x[1:5], z[1:5])),
                ((x[1:5], y[1:5]), (x[2:], z[2:])),
            )
        ]

    same_as_eager(build, compilations=2)


def test_each_layout_of_the_memory_of_wrappers_is_a_signature_of_its_own() -> None:
    compiled = aotdist.compile(lambda a, b: (a.add_(1), b * 2)[1], backend="fx")

    def layouts_of_wrappers(x: torch.Tensor, y: torch.Tensor) -> list[Sequence[torch.Tensor]]:
        return [
            (TwoTensor(x[0], y[0]), TwoTensor(x[1], y[1])),
            (TwoTensor(x[0], y[0]), TwoTensor(x[0], torch.ones(4))),
            (TwoTensor(x[0], y[0]), TwoTensor(y[0], x[0])),
            (TwoTensor(x[0], y[0]), y[0]),
        ]

    for _ in range(2):
        for position in range(4):
            x, y, u, v = (torch.arange(16.0).view(4, 4) for _ in range(4))
            a, b = layouts_of_wrappers(x, y)[position]
            ours = compiled(*layouts_of_wrappers(u, v)[position])
            a.add_(1)
            assert torch.equal(plain_tensors(ours)[0], plain_tensors(b * 2)[0])
            assert torch.equal(x, u) and torch.equal(y, v)
    assert len(compiled.artifacts) == 4


def another_on_its_storage(x: torch.Tensor) -> torch.Tensor:
    """A tensor with a history of its own in the memory of `x`."""
    other = leaf(*x.shape) * 2.0
    other.data = x.data
    return other


UNKNOWN: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "detached": lambda x: (x, x.detach(), x),
    "detached first": lambda x: (x.detach(), x, x),
    "data": lambda x: (x, x.data, x),
    "a view beside it": lambda x: (x, x[0], x.detach()),
    "views whose base is no argument": lambda x: (x[:2], x[1:], x.detach()),
    "views of a part": lambda x: (x[2:], x[2:][1:], x[2:].detach()),
    "views of what was detached": lambda x: (lambda d: (x, d[:2], d[1:]))(x.detach()),
    "blocks": lambda x: (x[:, :3], x.data[:, 2:], x),
    "a transpose": lambda x: (x.t(), x.detach(), x),
}
NOT_OF_WRAPPERS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "set": lambda x: (x, torch.empty(0).set_(x.detach()), x),
    "two histories": lambda x: (x, another_on_its_storage(x), x),
    "two histories and views": lambda x: (lambda other: (x, other, other[1:]))(another_on_its_storage(x)),
}
CONNECTED = {
    "a view beside it": {0, 1},
    "views whose base is no argument": {0, 1},
    "views of a part": {0, 1},
    "views of what was detached": {1, 2},
    "blocks": {0, 2},
    "a transpose": {0, 2},
    "two histories and views": {1, 2},
}
"""Positions of the inputs that are views of one tensor to autograd; it does not know of the other one."""
HISTORY_WRITES: dict[str, Callable[..., Any]] = {
    "the first": lambda a, b, c, w: (a.mul_(w.sum()), b * 2, c * 3)[1:],
    "the second": lambda a, b, c, w: (b.mul_(w.sum()), a * 2, c * 3)[1:],
    "the third": lambda a, b, c, w: (c.mul_(w.sum()), a * 2, b * 3)[1:],
    "two": lambda a, b, c, w: (a.mul_(w.sum()), b.mul_(w.mean()), a * b.sum() + c.sum())[2:],
    "without history after": lambda a, b, c, w: (a.mul_(w.sum()), _no_grad_write(b), a.exp(), c.exp())[2:],
    "hidden after": lambda a, b, c, w: (a.mul_(w.sum()), b.data.mul_(2), a + 0, b + 0, c + 0)[2:],
    "hidden before": lambda a, b, c, w: (b.data.mul_(2), a.mul_(w.sum()), a + 0, b + 0, c + 0)[2:],
    "and returns them": lambda a, b, c, w: (b.mul_(w.mean()), a, b, a[0], b[0].detach(), c[0])[1:],
    "what was saved": lambda a, b, c, w: (b.exp() * w.sum(), a.data.mul_(2), c.exp())[::2],
}
WRITTEN = {
    "the second": {1},
    "the third": {2},
    "two": {0, 1},
    "and returns them": {1},
    "what was saved": set[int](),
}
"""Positions of the inputs that are written with history, where it is not the first."""


@pytest.mark.parametrize("write", HISTORY_WRITES)
@pytest.mark.parametrize("which", [*UNKNOWN, *NOT_OF_WRAPPERS])
@pytest.mark.parametrize(
    "make",
    [plain, leaf, lambda: leaf() * 1.5, two, lambda: two().requires_grad_() * 1.5],
    ids=["plain", "leaf", "non-leaf", "two", "two non-leaf"],
)
def test_memory_of_which_autograd_does_not_know(
    make: Callable[[], torch.Tensor], which: str, write: str
) -> None:
    if which in NOT_OF_WRAPPERS and isinstance(make(), TwoTensor):
        pytest.skip("a wrapper has no storage to share")
    compare_with_history(lambda: (UNKNOWN | NOT_OF_WRAPPERS)[which](make()), write, CONNECTED.get(which))


@pytest.mark.parametrize("write", HISTORY_WRITES)
@pytest.mark.parametrize("which", UNKNOWN)
def test_memory_of_dtensors_of_which_autograd_does_not_know(mesh: DeviceMesh, which: str, write: str) -> None:
    inputs = UNKNOWN[which]
    connected = CONNECTED.get(which)
    compare_with_history(lambda: inputs(sharded(mesh, plain()).requires_grad_() * 1.5), write, connected)


def compare_with_history(
    make: Callable[[], tuple[torch.Tensor, ...]], write: str, connected: set[int] | None = None
) -> None:
    """As in eager; refused where one of the connected inputs is written with history, beside another."""

    def build() -> Scene:
        return Scene(HISTORY_WRITES[write], (*make(), leaf()))

    skip_unless_eager_runs(build)
    if connected is None or connected.isdisjoint(WRITTEN.get(write, {0})):
        same_as_eager(build)
        return
    with pytest.raises(UnsupportedProgram, match="which autograd does not connect with it"):
        same_as_eager(build)


@pytest.mark.parametrize("write", ["the first", "the second", "the third", "and returns them"])
def test_wrappers_that_share_one_inner_tensor_written_with_history(write: str) -> None:
    def make() -> tuple[torch.Tensor, ...]:
        shared = plain()
        one = TwoTensor(shared, plain()).requires_grad_() * 1.5
        return TwoTensor(one.a, plain()), TwoTensor(plain(), one.a), one.a[1:]

    compare_with_history(make, write)


@pytest.mark.parametrize("write", ["the first", "the second", "the third", "and returns them"])
def test_a_wrapper_its_view_and_its_inner_tensor(write: str) -> None:
    def make() -> tuple[torch.Tensor, ...]:
        shared = plain()
        wrapper = TwoTensor(shared, plain())
        return wrapper, wrapper[1:], shared

    compare_with_history(make, write, {0, 1})


def test_a_hidden_write_beyond_one_that_is_not() -> None:
    def build() -> Scene:
        x = plain()
        return Scene(lambda a, b: (a.add_(1), b.data.mul_(2), a * 1)[2], (x[:3], x[1:]), held={"x": x})

    same_as_eager(build)


def test_history_that_comes_by_way_of_shared_memory() -> None:
    """`c` gets history only since `x` and `row` are of one memory, which the first trace does not know."""

    def program(x, row, c, part, w):
        x.mul_(w)
        c.copy_(row)
        return part * 1

    def build() -> Scene:
        x, c = plain(), plain(4)
        return Scene(program, (x, x[0], c, c[:2], leaf()))

    same_as_eager(build)


def test_as_strided_of_shared_memory_counts_from_its_storage() -> None:
    def build() -> Scene:
        x = plain(16)
        return Scene(
            lambda a, b: (b.add_(1), a.as_strided((2,), (1,), 5).mul_(3), a * 1)[2],
            (x[4:12], x[6:]),
            held={"x": x},
        )

    same_as_eager(build)


def test_what_shows_elements_twice_is_not_copied_into() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.data.add_(1)
        return x * 2

    def build() -> Scene:
        x = torch.randn(1, 4).expand(3, 4)
        return Scene(program, (x, x[0]))

    same_as_eager(build)


def quietly(op: Callable[..., Any], *args: Any) -> Any:
    with torch.no_grad():
        return op(*args)


OTHER_HISTORY: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "the view read before": lambda b, v: (v * 1, b.mul_(2))[0],
    "the view read after, detached": lambda b, v: (b.mul_(2), v.detach() * 1)[1],
    "the view written": lambda b, v: (quietly(v.mul_, 2), b * 1)[1],
    "the base written": lambda b, v: (quietly(b.mul_, 2), b * 1, v.detach() * 2)[1:],
    "the base written with what is made of the view": lambda b, v: (b.mul_(v.detach().sum()), b * 1)[1],
    "the base written with history of the view": lambda b, v: (w := v * 2, b.mul_(w.sum()), b * 1)[2],
}


VIEWS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "under no_grad": lambda: (base := torch.randn(4, 3).requires_grad_() * 1.5, quietly(lambda: base[1:])),
    "a leaf of its own": lambda: (base := torch.randn(4, 3), base[1:].requires_grad_()),
    "of what is detached": lambda: (base := torch.randn(4, 3).requires_grad_() * 1.5, base.detach()[1:]),
}


@pytest.mark.parametrize("program", OTHER_HISTORY)
@pytest.mark.parametrize("make", VIEWS)
def test_a_view_that_requires_grad_where_its_base_does_not(make: str, program: str) -> None:
    """The one that is refused has no backward in eager: a leaf comes to have a history there."""

    def use(call: Any) -> list[torch.Tensor | None]:
        base, view = VIEWS[make]()
        has_grad = view.is_leaf and view.requires_grad
        results = call(base, view)
        outs = results if isinstance(results, tuple) else (results,)
        ends = [out.sum() for out in outs if out.requires_grad]
        if ends:
            torch.autograd.backward(ends)
        flags = torch.tensor([out.requires_grad for out in (*outs, base)])
        return [*outs, base.detach(), flags, view.grad if has_grad else None]

    if make == "a leaf of its own" and program == "the base written with history of the view":
        with pytest.raises(UnsupportedProgram, match="but not its `requires_grad`"):
            aotdist.compile(OTHER_HISTORY[program], backend="fx")(*VIEWS[make]())
    else:
        assert_both_give_the_same(OTHER_HISTORY[program], use)


APART: dict[str, Callable[..., Any]] = {
    "both": lambda w, x, y: (x.mul_(w), y.add_(w), None)[2],
    "both, the second first": lambda w, x, y: (y.mul_(2), x.add_(y.sum() * w), y)[2],
    "one by turns": lambda w, x, y: (x.mul_(2), y.mul_(w), x.add_(1), x, y)[3:],
    "the first, then the second is read": lambda w, x, y: (x.add_(w), y.sum())[1],
    "both, then one is read": lambda w, x, y: (x.add_(w), y.add_(1), y.sum())[2],
}


def _scene_apart(
    program: str,
    make: Callable[[], torch.Tensor],
    weight: Callable[[], torch.Tensor] = lambda: leaf(2, 4),
) -> Scene:
    origin = make()
    base = origin * 1.5
    return Scene(APART[program], (weight(), base[:2], base[2:]), held={"origin": origin, "base": base})


@pytest.mark.parametrize("program", APART)
@pytest.mark.parametrize(
    "make", [plain, leaf, lambda: two().requires_grad_()], ids=["plain", "non-leaf", "two non-leaf"]
)
def test_views_of_one_tensor_that_share_no_memory(make: Callable[[], torch.Tensor], program: str) -> None:
    """A write of one is history of the other: autograd has it that both are the tensor that they show."""
    eager = _scene_apart(program, make)
    try:
        play(eager, eager.fn)
    except RuntimeError as refusal:
        with pytest.raises(type(refusal), match=re.escape(str(refusal))):
            aotdist.compile(eager.fn, backend="fx")(*_scene_apart(program, make).args)
    else:
        same_as_eager(lambda: _scene_apart(program, make))


@pytest.mark.parametrize("program", APART)
def test_dtensors_that_are_views_of_one(mesh: DeviceMesh, program: str) -> None:
    def shards(*size: int) -> torch.Tensor:
        return sharded(mesh, plain(*size)).requires_grad_()

    same_as_eager(lambda: replace(_scene_apart(program, shards, lambda: shards(2, 4)), lenient=True))


@pytest.mark.parametrize("program", APART)
@pytest.mark.parametrize("make", [leaf, lambda: two().requires_grad_()], ids=["non-leaf", "two non-leaf"])
def test_the_base_of_views_that_share_no_memory(make: Callable[[], torch.Tensor], program: str) -> None:
    def use(call: Any) -> list[torch.Tensor | None]:
        scene = _scene_apart(program, make)
        call(*scene.args)
        scene.held["base"].sum().backward()
        return [scene.held["origin"].grad, scene.args[0].grad]

    assert_both_give_the_same(APART[program], use)


def test_views_of_two_tensors_that_become_views_of_one() -> None:
    """Which views autograd connects is part of the signature, in both directions."""

    def build() -> list[Scene]:
        base, other, third = leaf() * 1.5, leaf() * 1.5, leaf() * 1.5
        pairs = [(base[:2], other[2:]), (third[:2], third[2:]), (base[2:], other[:2])]
        return [Scene(APART["both"], (leaf(2, 4), *pair)) for pair in pairs]

    assert len(same_as_eager(build, compilations=2).artifacts) == 2


@pytest.mark.parametrize("part", [lambda x: x[1:3], lambda x: x.t()[1], lambda x: x.view(2, 8)])
def test_a_written_view_of_a_wrapper(part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def use(call: Any) -> list[torch.Tensor | None]:
        origin = two().requires_grad_()
        base = origin * 1.5
        view = part(base)
        call(view)
        base.mul(3).sum().backward()
        return [base.detach(), origin.grad]

    assert_both_give_the_same(lambda x: x.mul_(2), use)


def test_a_written_wrapper_that_becomes_a_view() -> None:
    def build() -> list[Scene]:
        origin = two().requires_grad_()
        return [
            Scene(lambda x: x.mul_(2), (view,), held={"origin": origin})
            for view in (origin[:2] * 1.5, (origin * 1.5)[:2])
        ]

    same_as_eager(build, compilations=2)


def _complex(*size: int) -> torch.Tensor:
    return torch.randn(*(size or (4, 4)), dtype=torch.complex64, requires_grad=True)


OF_ANOTHER_KIND: dict[str, tuple[Callable[..., torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "real parts": (_complex, lambda z: z.real),
    "imaginary parts": (_complex, lambda z: z.imag),
    "both parts": (_complex, torch.view_as_real),
    "both parts of a row": (_complex, lambda z: torch.view_as_real(z)[1:2]),
    "real parts of a slice, transposed": (_complex, lambda z: z[1:, ::2].t().real),
    "parts of a column, with a dimension": (_complex, lambda z: torch.view_as_real(z)[:, 2].unsqueeze(1)),
    "a conjugate": (_complex, lambda z: z.conj()),
    "a conjugate of a part": (_complex, lambda z: z.conj()[1:, 2]),
    "the adjoint": (_complex, lambda z: z.mH),
    "negated": (_complex, lambda z: z.conj().imag),
    "complex": (leaf, lambda x: torch.view_as_complex(x.view(4, 2, 2))),
    "a complex row": (leaf, lambda x: torch.view_as_complex(x.view(4, 2, 2))[1]),
    "a complex conjugate": (leaf, lambda x: torch.view_as_complex(x.view(4, 2, 2)).mT.conj()),
}


@pytest.mark.parametrize("kind", OF_ANOTHER_KIND)
def test_a_written_view_of_another_kind_of_tensor_beside_others_is_refused(kind: str) -> None:
    make, view = OF_ANOTHER_KIND[kind]
    base = make() * 1.5
    before = base.detach().clone()
    with pytest.raises(UnsupportedProgram, match="or conjugated; it, or another view|as another dtype"):
        aotdist.compile(lambda x, *_: (x.mul_(2), x * 3)[1:], backend="fx")(view(base), base[1:])
    assert torch.equal(base.detach(), before)


@pytest.mark.parametrize("kind", OF_ANOTHER_KIND)
def test_a_written_view_of_another_kind_of_tensor(kind: str) -> None:
    make, view = OF_ANOTHER_KIND[kind]

    def use(call: Callable[..., Any]) -> list[torch.Tensor]:
        leaf = make()
        base = leaf * 1.5
        x = view(base)
        (call(x).abs().sum() + x.abs().sum() + base.abs().sum()).backward()
        return [base.detach(), leaf.grad]  # type: ignore[list-item]

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x.mul_(2), x * 3)[1]

    found: list[list[torch.Tensor]] = []
    for call in (program, aotdist.compile(program, backend="fx")):
        torch.manual_seed(0)
        found.append(use(call))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", OF_ANOTHER_KIND)
def test_a_view_of_another_kind_is_written_without_history(kind: str) -> None:
    make, view = OF_ANOTHER_KIND[kind]

    def build() -> Scene:
        base = make().detach()
        return Scene(lambda x: (x.mul_(2), x * 3)[1], (view(base),), held={"base": base})

    same_as_eager(build)


def _written(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x.mul_(by.flatten()[: x.numel()].view(x.shape))


RESHAPED_IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "the view, then written": lambda x, y, w: (y.t_(), _written(y, w), y * 2)[2],
    "the view, then the base written": lambda x, y, w: (y.t_(), _written(x, w), y * x)[2],
    "the base, then the view written": lambda x, y, w: (x.t_(), _written(y, w), y * x)[2],
    "the view, between writes": lambda x, y, w: (_written(y, w), y.t_(), _written(y, w), y * x)[3],
    "the base, between writes": lambda x, y, w: (_written(y, w), x.t_(), _written(y, w), y * x)[3],
    "the view, then a part of it written": lambda x, y, w: (y.t_(), _written(y[0], w), y * x)[2],
    "the base, beside a part of the view": lambda x, y, w: (z := y[0], x.t_(), _written(z, w), y * x)[3],
    "both, and a part of the view": lambda x, y, w: (y.t_(), z := y[0], x.t_(), _written(z, w), y * x)[4],
    "the view, three times": lambda x, y, w: (y.t_(), y.t_(), _written(y, w), y.t_(), y[0] * 2)[4],
    "the view, and returned": lambda x, y, w: (y.t_(), _written(y, w), y)[2],
    "the view, and a view of it returned": lambda x, y, w: (y.t_(), _written(y, w), y[0])[2],
    "another dimension for the view": lambda x, y, w: (y.unsqueeze_(0), _written(y, w), y * 2)[2],
    "more dimensions": lambda x, y, w: (y.unsqueeze_(0).transpose_(0, 2), _written(y, w), y * 2)[2],
}

ONE_OF_THE_OTHER: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "base and view": lambda x: (x, x.view(2, 2)),
    "base and transposed": lambda x: (x, x.t()),
    "base and part": lambda x: (x, x.view(1, 2, 2)[0]),
    "two views": lambda x: (x.view(2, 2), x.t()),
    "views by strides": lambda x: (x.as_strided((2, 2), (2, 1)), x.as_strided((2, 2), (1, 2))),
}


@pytest.mark.parametrize("has_history", [True, False])
@pytest.mark.parametrize("which", ONE_OF_THE_OTHER)
@pytest.mark.parametrize("program", RESHAPED_IN_PLACE)
def test_one_is_reshaped_in_place_and_written_with_history(
    program: str, which: str, has_history: bool
) -> None:
    def build() -> Scene:
        x = torch.randn(2, 2, requires_grad=has_history) * 1.5
        arguments = (*ONE_OF_THE_OTHER[which](x), leaf())
        return Scene(RESHAPED_IN_PLACE[program], arguments, held={"x": x})

    skip_unless_eager_runs(build)
    refused = [
        "that no operator of the program made",
        "was reshaped in place after it was made",
    ]
    same_as_eager_or_refused(build, refused)


@pytest.mark.parametrize("which", ONE_OF_THE_OTHER)
def test_one_is_reshaped_under_no_grad_and_written_with_history(which: str) -> None:
    def transposed_without_grad(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y.t_()
        return _written(y, w) * 2

    x = torch.randn(2, 2, requires_grad=True) * 1.5
    with pytest.raises(UnsupportedProgram, match="changed in place under `no_grad`|is a view of another"):
        aotdist.compile(transposed_without_grad, backend="fx")(*ONE_OF_THE_OTHER[which](x), leaf())


SCALED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "product of sums": lambda v, w: (v.mul_(2), w.add_(1), v.sum() * w.sum())[2],
    "one written": lambda v, w: (v.sin_(), w.sum() + v.mean())[1],
    "both returned": lambda v, w: (v.mul_(2), w.add_(1), v.sum() + w.sum())[2],
    "nothing returned": lambda v, w: (v.mul_(2), w.add_(1), None)[2],
}
OF_MEMORY: dict[str, Callable[[torch.Tensor], Any]] = {
    "halves": lambda b: (b[:4], b[4:]),
    "columns": lambda b: (b.view(4, 2)[:, 0], b.view(4, 2)[:, 1]),
    "overlapping": lambda b: (b[:6], b[2:]),
    "base and view": lambda b: (b, b[4:]),
    "empty": lambda b: (b[:0], b[4:]),
}


@pytest.mark.parametrize("memory", OF_MEMORY)
@pytest.mark.parametrize("program", SCALED)
def test_gradients_that_arrive_expanded(program: str, memory: str) -> None:
    """Sums' gradients are one element for many, of what is returned and of the memory that is shared."""
    for whole in (True, False):
        found = []
        for fn in (SCALED[program], aotdist.compile(SCALED[program], backend="fx")):
            base = torch.linspace(-1, 1, 8, requires_grad=True)
            shared = base * 1
            given = OF_MEMORY[memory](shared)
            out = fn(*given)
            total = given[0].sum() if out is None else out
            (total + shared.sum() if whole else total).backward()
            found.append((base.grad, shared.detach()))
        assert all(map(torch.equal, *found))
