"""Writes to an input's sizes, strides, history and `requires_grad`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.makers import two_non_leaf
from tests.semantics.meshes import sharded
from tests.semantics.observation import (
    Scene,
    same_as_eager,
    same_as_eager_or_refused,
    skip_unless_eager_runs,
)


def leaf() -> torch.Tensor:
    return torch.randn(3, 1, 4, requires_grad=True)


MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(3, 1, 4),
    "non-leaf": lambda: leaf() * 1.5,
    "view": lambda: torch.randn(5, 1, 4)[1:4],
    "view of a non-leaf": lambda: (leaf() * 1.5).transpose(0, 2),
    "two": lambda: TwoTensor(torch.randn(3, 1, 4), torch.randn(3, 1, 4)),
    "two, non-leaf": lambda: TwoTensor(torch.randn(3, 1, 4), torch.randn(3, 1, 4)).requires_grad_() * 1.5,
}

PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "transpose_": lambda x: x.transpose_(0, 2) * 2,
    "transpose_ and nothing else": lambda x: (x.transpose_(0, 1), None)[1],
    "swapaxes_": lambda x: x.swapaxes_(0, 2).sum(0),
    "squeeze_": lambda x: x.squeeze_() * 2,
    "squeeze_, t_": lambda x: x.squeeze_().t_() * 2,
    "squeeze_ of one dim": lambda x: x.squeeze_(1) * 2,
    "squeeze_ that does nothing": lambda x: x.squeeze_(0) * 2,
    "unsqueeze_": lambda x: x.unsqueeze_(0) * 2,
    "unsqueeze_ from the end": lambda x: x.unsqueeze_(-1) * 2,
    "there and back": lambda x: x.transpose_(0, 2).transpose_(0, 2) * 2,
    "returned": lambda x: x.transpose_(0, 2),
    "returned with a view": lambda x: (x.transpose_(0, 2), x[0]),
    "data before": lambda x: x.mul_(3).transpose_(0, 2) * 2,
    "data after": lambda x: x.transpose_(0, 2).mul_(3) * 2,
    "data between": lambda x: x.squeeze_().mul_(3).t_().add_(1) * 2,
    "data laid out anew": lambda x: x.transpose_(0, 2).masked_fill_(x > 0, -1) * 2,
    "data laid out anew, twice": lambda x: x.squeeze_().t_().cumsum_(0).tril_() * 2,
    "data laid out anew, and a view": lambda x: (x.transpose_(0, 2).cumsum_(0), x[:1] * 2, x * 2)[1:],
    "of a result, under no_grad, and a view of it": lambda x: _one_dimension_more(x * 2).view(-1),
    "data without history": lambda x: _doubled(x.transpose_(0, 2)) * 2,
    "under no_grad": lambda x: _without_grad(x) * 2,
    "a view of it": lambda x: (x[0].transpose_(0, 1), x * 2)[1],
    "a view of it, under no_grad": lambda x: _without_grad(x[:]),
    "a view of what is made of it, under no_grad": lambda x: _without_grad((x * 2)[:]),
    "detach_": lambda x: (x * 2, x.detach_())[0],
    "detach_ then used": lambda x: (x * 2, x.detach_(), x * 3)[::2],
}
REFUSED = {
    "under no_grad": ["changed in place under `no_grad`"],
    "data laid out anew, and a view": ["follows from a tensor"],
}
"""What each of these programs may be refused for."""
RESHAPED = [
    "whose base was reshaped in place after it was made",
    "follows from a tensor that the program made",
]


def _doubled(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.mul_(2)


def _without_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.transpose_(0, 2)


def _one_dimension_more(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.unsqueeze_(0)


def compare(make: Callable[[], torch.Tensor], program: str) -> None:
    def build() -> Scene:
        x = make()
        return Scene(PROGRAMS[program], (x,), held={"base": () if x._base is None else x._base})

    skip_unless_eager_runs(build)
    same_as_eager_or_refused(build, REFUSED.get(program, ()))


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("make", MAKERS)
def test_as_in_eager(make: str, program: str) -> None:
    compare(MAKERS[make], program)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_of_dtensors(mesh: DeviceMesh, requires_grad: bool, program: str) -> None:
    compare(lambda: sharded(mesh, torch.randn(3, 1, 4)).requires_grad_(requires_grad) * 1.5, program)


def test_requires_grad_is_switched_on() -> None:
    def program(x, y):
        before = x * 2
        x.requires_grad_()
        return before + x * y

    same_as_eager(lambda: Scene(program, (torch.randn(3), torch.randn(3, requires_grad=True))))


@pytest.mark.parametrize("reshape", [lambda x: x.t_(), lambda x: x.unsqueeze_(0), lambda x: x.resize_(2, 2)])
def test_a_tensor_that_is_reshaped_and_begins_to_require_grad_is_refused(
    reshape: Callable[[torch.Tensor], Any],
) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        reshape(x)
        x.requires_grad_()
        return x * x

    with pytest.raises(UnsupportedProgram, match="and begins to require grad"):
        aotdist.compile(program, backend="fx")(torch.randn(2, 3))


def test_requires_grad_is_switched_off() -> None:
    def program(x, y):
        before = x * 2
        x.requires_grad_(False)
        return before, x * y

    same_as_eager(lambda: Scene(program, (torch.randn(3, requires_grad=True), torch.randn(3))))


def test_what_cannot_be_repeated_is_refused_by_name() -> None:
    memory = torch.ones(12)
    x = memory[:6]
    with pytest.raises(UnsupportedProgram, match="resized in place, and it grows into memory around it"):
        aotdist.compile(lambda x: x.resize_(15), backend="fx")(x)
    assert x.size() == (6,) and memory.sum() == 12


def test_what_the_backward_needs_was_saved_after_the_write() -> None:
    """The region saves the input, whose sizes are written after it; autograd is not to mind."""

    def build() -> Scene:
        x = torch.randn(4, 3, requires_grad=True) * 1.5
        return Scene(lambda x: (x.t_(), x.sin())[1], (x.t(),))

    same_as_eager(build)


def test_what_the_backward_needs_has_the_sizes_of_before() -> None:
    """The region saves a square input as it is; when the backward comes, that lies the other way round."""

    def build() -> Scene:
        arguments = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
        return Scene(lambda x, w: (x.t_(), x * w)[1], arguments)

    same_as_eager(build)


def test_detach_comes_in_its_turn() -> None:
    def program(x):
        x.detach_()
        x.transpose_(0, 2)
        return x * 2

    same_as_eager(lambda: Scene(program, (leaf(),)))


def _with_other_data(x: torch.Tensor, use: Callable[[torch.Tensor], Any], *, stays: bool = False) -> Any:
    own = x.data
    x.data = torch.arange(1.0, 5.0)
    used = use(x)
    if not stays:
        x.data = own
    return used


LEAVES_OF_OTHER_SIZES: dict[str, Callable[[torch.Tensor], Any]] = {
    "transposed, then used": lambda x: (_transposed_without_grad(x), x * x)[1],
    "transposed, then used and returned": lambda x: (_transposed_without_grad(x), x * x, x)[1:],
    "used, then transposed": lambda x: (x * 3, _transposed_without_grad(x))[0],
    "transposed, written": lambda x: (_transposed_without_grad(x), x.data.mul_(2), x * x)[2],
    "one dimension more": lambda x: (_one_dimension_more(x), x * x)[1],
    "two dimensions more": lambda x: (_one_dimension_more(x), _one_dimension_more(x), x * x)[2],
    "other data, and used again": lambda x: (_with_other_data(x, lambda own: own.sum()) * x).sum(),
    "other data, which stays": lambda x: _with_other_data(x, torch.sin, stays=True),
}


@pytest.mark.parametrize("program", LEAVES_OF_OTHER_SIZES)
def test_a_leaf_that_is_used_in_another_size(program: str) -> None:
    def build() -> Scene:
        return Scene(LEAVES_OF_OTHER_SIZES[program], (torch.randn(2, 3, requires_grad=True),))

    skip_unless_eager_runs(build)
    same_as_eager_or_refused(build, ("under `no_grad`", "in another size than its gradient is to have"))


def _transposed_without_grad(x: torch.Tensor) -> None:
    with torch.no_grad():
        x.t_()


def _without_history(x: torch.Tensor) -> None:
    x.mul_(2).detach_()


def _elsewhere(x: torch.Tensor) -> None:
    x.mul_(2).data = torch.ones(3, 3).t()


AFTER_A_VIEW: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "t_": lambda x, _: x.t_(),
    "t_, written": lambda x, _: x.t_().mul_(2.5),
    "t_, the view written": lambda x, view: (x.t_(), view.mul_(2.5)),
    "written, t_": lambda x, _: x.mul_(2.5).t_(),
    "t_ twice, written in between": lambda x, view: (x.t_(), view.mul_(3), x.t_(), x.sin_()),
    "unsqueeze_ and squeeze_": lambda x, _: x.unsqueeze_(0).mul_(2.5).squeeze_(),
    "t_ under no_grad": lambda x, _: _transposed_without_grad(x),
    "t_ under no_grad, written": lambda x, _: (_transposed_without_grad(x), x.mul_(2.5)),
}
VIEWS_OF_BEFORE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row": lambda x: x[1],
    "flat": lambda x: x.view(-1),
    "view of a view": lambda x: x[1:].t()[0],
}


@pytest.mark.parametrize("size", [(3, 3), (3, 4)])
@pytest.mark.parametrize("of_input", [True, False])
@pytest.mark.parametrize("made", VIEWS_OF_BEFORE)
@pytest.mark.parametrize("change", AFTER_A_VIEW)
def test_views_of_before_show_the_elements_that_they_showed(
    change: str, made: str, of_input: bool, size: tuple[int, ...]
) -> None:
    """Or they are refused: autograd makes the history of a view again, by operators that fit no more."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        base = x if of_input else x * x
        view = VIEWS_OF_BEFORE[made](base)
        AFTER_A_VIEW[change](base, view)
        return view, view * 2, base * 2, base

    def build() -> Scene:
        x = torch.randn(size, requires_grad=True)
        return Scene(program, (x * 1.5,), held={"behind": x})

    skip_unless_eager_runs(build)
    same_as_eager_or_refused(build, [*RESHAPED, "changed in place under `no_grad`"])


RESHAPED_VIEWS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "t_": lambda view, _: view.t_(),
    "t_, written": lambda view, w: view.t_().mul_(w),
    "t_, its base written": lambda view, _: (view.t_(), view._base.mul_(2.5)),
    "t_, and that of its base": lambda view, _: (view._base.t_(), view.t_(), view.mul_(2.5)),
    "t_ twice": lambda view, w: view.t_().t_().mul_(w),
    "t_ under no_grad": lambda view, _: _transposed_without_grad(view),
    "t_ under no_grad, written": lambda view, w: (_transposed_without_grad(view), view.mul_(w)),
    "unsqueeze_": lambda view, _: view.unsqueeze_(0).mul_(2.5),
}


@pytest.mark.parametrize("of_no_grad", [False, True])
@pytest.mark.parametrize("change", RESHAPED_VIEWS)
def test_views_that_are_reshaped_show_the_elements_that_they_showed(change: str, of_no_grad: bool) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        base = x * x
        with torch.set_grad_enabled(not of_no_grad):
            view = base[:]
        row = view[1]
        RESHAPED_VIEWS[change](view, w)
        return view, view * w, row * 2, base

    def build() -> Scene:
        return Scene(program, (torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)))

    skip_unless_eager_runs(build)
    same_as_eager_or_refused(build, RESHAPED)


@pytest.mark.parametrize("made", [lambda x: x, lambda x: x * 1.5, lambda x: (x * 1.5)[:]])
def test_an_input_with_history_that_is_transposed_under_no_grad_is_refused(made: Callable[..., Any]) -> None:
    """Autograd records nothing, so its gradient has the sizes of before, or does not fit."""
    x = made(torch.ones(3, 3, requires_grad=True))
    with pytest.raises(UnsupportedProgram, match=r"under `no_grad`.*`args\[0\]` by `aten.t_.default`"):
        aotdist.compile(_transposed_without_grad, backend="fx")(x)


def test_a_tensor_is_written_with_history_and_detached() -> None:
    def program(x: torch.Tensor) -> None:
        x.mul_(x)
        x.detach_()

    same_as_eager(lambda: Scene(program, (leaf() * 1.5,)))


@pytest.mark.parametrize(
    "detach", [torch.Tensor.detach_, lambda x: x.requires_grad_(False)], ids=["detach_", "requires_grad_"]
)
def test_a_leaf_that_is_one_no_more_is_not_written_with_history(detach: Callable[[Any], Any]) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> None:
        detach(x)
        x.mul_(y)

    x, y = leaf(), leaf()
    with pytest.raises(UnsupportedProgram, match="a leaf that gives up its gradient in place"):
        aotdist.compile(program, backend="fx")(x, y)
    assert x.requires_grad and x.is_leaf


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_without_history, "whose base was detached"), (_elsewhere, "was given another storage")],
)
@pytest.mark.parametrize("used", [True, False])
def test_views_whose_history_nobody_can_make_again_are_refused(
    used: bool, change: Callable[[torch.Tensor], Any], reason: str
) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * x
        row = y[1]
        change(y)
        return row * 2 if used else row

    with pytest.raises(UnsupportedProgram, match=reason):
        aotdist.compile(program, backend="fx")(torch.ones(3, 3, requires_grad=True))


def test_a_view_of_what_lies_elsewhere_now_is_not_written_with_history() -> None:
    """Autograd would cut the gradient of the base by where the view was in what the base was."""

    def program(x: torch.Tensor, y: torch.Tensor) -> None:
        row = x[0]
        x.data = y
        row.zero_()

    with pytest.raises(UnsupportedProgram, match="was given another storage"):
        aotdist.compile(program, backend="fx")(
            torch.ones(3, 3, requires_grad=True) * 1.5, torch.ones(3, 3).t()
        )


@pytest.mark.parametrize("made", [lambda x: x, lambda x: x * 2, lambda x: x[:, 0]])
def test_as_strided_in_place_is_refused(made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(3, 4, requires_grad=True) * 1.5
    with pytest.raises(UnsupportedProgram, match=r"`as_strided_` lets .*\n.*\n.*`x = x.as_strided"):
        aotdist.compile(lambda x: made(x).as_strided_((2, 2), (2, 1)), backend="fx")(x)
    assert x.shape == (3, 4)


def test_a_view_of_what_is_detached_and_reshaped_and_gets_a_history_is_refused() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = (x * x).detach()
        row = y[1]
        y.t_()
        y.mul_(x)
        return row

    with pytest.raises(UnsupportedProgram, match="whose base was reshaped in place"):
        aotdist.compile(program, backend="fx")(torch.ones(3, 3, requires_grad=True))


def test_what_is_detached_and_reshaped_beside_a_view_of_it_is_refused() -> None:
    """The view's `_base` is the reshaped tensor, of which it cannot be made any more."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.detach()
        turned = y.t()
        y.t_()
        return y, turned

    with pytest.raises(UnsupportedProgram, match="whose base was reshaped in place"):
        aotdist.compile(program, backend="fx")(torch.ones(3, 4, requires_grad=True))


def test_a_wrapper_that_is_a_view_is_reshaped_in_place_twice() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x.unsqueeze_(0)
        return x * 2

    found = []
    for call in (program, aotdist.compile(program, backend="fx")):
        base = two_non_leaf(2, 2)
        view = base.view(-1)
        loss = call(view).sum() + call(view).sum() * 3 + view.sum()
        assert view.size() == (1, 1, 4) and view._base is base
        found.append(torch.autograd.grad(loss, base)[0])
    eager, ours = found
    assert torch.equal(eager.a, ours.a) and torch.equal(eager.b, ours.b)


def test_a_wrapper_that_is_a_view_and_was_reshaped_in_place_is_refused() -> None:
    """Autograd makes it again as the view that it was before, of other dimensions."""
    view = two_non_leaf(2, 2).view(-1)
    view.unsqueeze_(0)
    compiled = aotdist.compile(lambda x: x.add_(1) * 2, backend="fx")
    with pytest.raises(UnsupportedProgram, match=r"`args\[0\]` is a view of a TwoTensor .* in place before"):
        compiled(view)
    assert compiled(view.view(-1)).size() == (4,)


def test_a_wrapper_that_is_a_view_and_is_reshaped_and_written_is_refused() -> None:
    with pytest.raises(UnsupportedProgram, match="that no operator of the program made"):
        aotdist.compile(lambda x: x.unsqueeze_(0).add_(1) * 2, backend="fx")(two_non_leaf(2, 2).view(-1))


def test_tensors_that_become_each_other_are_refused_and_stay_what_they_are() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch.utils.swap_tensors(x, y)
        return x * 2

    x, y = torch.ones(2), torch.zeros(3)
    x.name_of = "x"  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedProgram, match="swapped with another") as caught:
        aotdist.compile(program, backend="fx")(x, y)
    assert "swap_tensors(x, y)" in str(caught.value)
    assert (x.shape, y.shape, vars(x), vars(y)) == ((2,), (3,), {"name_of": "x"}, {})


def test_a_result_of_a_tensor_that_got_other_memory_is_refused_with_the_line() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = x * 2
        row = made[0]
        made.data = torch.ones(2, 2)
        return row, made

    with pytest.raises(UnsupportedProgram, match=r"gave other memory in place\n .*made\.data = torch\.ones"):
        aotdist.compile(program, backend="fx")(torch.ones(2, 2))
