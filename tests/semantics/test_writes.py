"""What the program writes: arguments, through views, with and without history, under every mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.autograd import leaves_behind
from aotdist.torch_seam.functional import FakeTensorMode
from tests.semantics.functions import Transposed
from tests.semantics.makers import leaf, two, two_non_leaf
from tests.semantics.observation import Scene, assert_both_give_the_same, bits, same_as_eager


def plain(*size: int) -> torch.Tensor:
    return torch.randn(*(size or (3, 4)))


def non_leaf() -> torch.Tensor:
    return torch.randn(3, 4, requires_grad=True) * 1.5


def no_grad_write(x):
    with torch.no_grad():
        x.add_(1)
    return x * 2


def write_then_read(x):
    before = x * 2
    x.mul_(3)
    return before, x * 2


def write_through_two_views(x):
    x[0].add_(1)
    x.t()[1].mul_(2)
    return x.sum()


def write_what_is_returned(x):
    y = x * 2
    y[0] = 1.5
    y.t().add_(1)
    return y


def write_part_with_history(x):
    y = torch.zeros(3, 4)
    y[1:] = x[1:] * 2
    return y


WRITES = {
    "in place": lambda x: x.mul_(2),
    "in place, nothing returned": lambda x: (x.mul_(2), None)[1],
    "twice": lambda x: x.mul_(2).add_(1),
    "and a view of it": lambda x: (x.mul_(2), x.t()),
    "through a view": lambda x: x.t()[0].mul_(2),
    "through two views": write_through_two_views,
    "then read": write_then_read,
    "under no_grad": no_grad_write,
    "through detach": lambda x: (x.detach().mul_(2), x.sum())[1],
    "through data": lambda x: (x.data.mul_(2), x.sum())[1],
    "with zeros": lambda x: x.zero_(),
    "with a number at an index": lambda x: x.__setitem__((0, slice(1, 3)), 2.0),
    "with a mask": lambda x: x.masked_fill_(x > 0, 0.5),
    "with a boolean index": lambda x: x.__setitem__(x > 0, 0.5),
    "with out=": lambda x: torch.sin(torch.ones(3, 4), out=x) if not x.requires_grad else x,
    "an intermediate": write_what_is_returned,
    "a part of a new tensor": write_part_with_history,
    "itself into itself": lambda x: x.copy_(x * 2),
    "with random numbers": lambda x: (x.detach().uniform_(), x.detach().normal_())[0],
}


@pytest.mark.parametrize("make", [plain, non_leaf], ids=["plain", "non_leaf"])
@pytest.mark.parametrize("name", WRITES)
def test_each_kind_of_write(name, make):
    same_as_eager(lambda: [Scene(WRITES[name], (make(),)) for _ in range(2)])


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WRITES)
def test_each_kind_of_write_without_gradients(name, around):
    same_as_eager(lambda: Scene(WRITES[name], (plain(),)), calls=2, around=around)


OUTS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], torch.Tensor]] = {
    "a rank": (lambda x, out: torch.linalg.matrix_rank(x, out=out), torch.zeros((), dtype=torch.long)),
    "singular values": (lambda x, out: torch.linalg.svdvals(x, out=out), torch.zeros(4)),
    "a condition number": (lambda x, out: torch.linalg.cond(x, -2, out=out), torch.zeros(())),
    "by an overload for tensors": (
        lambda x, out: torch.linalg.pinv(x, rtol=x[0, 0].abs(), out=out),
        torch.zeros(4, 4),
    ),
    "by an operator without a rule": (
        lambda x, out: torch.geqrf(x, out=(out, torch.empty(4))),
        torch.zeros(4, 4),
    ),
    "a list": (
        lambda x, out: torch.split_with_sizes_copy(x, [4], 1, out=[out]),
        torch.zeros(4, 4),
    ),
}


@pytest.mark.parametrize("name", OUTS)
def test_results_that_are_written_to_an_argument(name: str) -> None:
    program, out = OUTS[name]
    same_as_eager(lambda: Scene(program, (plain(4, 4), out.clone())))


def test_ranks_are_counted_as_eager_counts_them() -> None:
    same_as_eager(lambda: Scene(lambda x: torch.linalg.matrix_rank(x @ x.mT), (plain(3, 4, 4),)))


def test_what_is_written_over_lies_in_a_storage_as_eager_has_it():
    """A copy of a part begins its storage, whatever it is a copy of."""

    def program(x):
        x.copy_(x)
        y = x.clone()
        x.add_(1)
        return y.copy_(x)

    same_as_eager(lambda: Scene(program, (plain(6, 4)[1:5],)))


def test_a_leaf_under_no_grad():
    def step(w, x):
        loss = (w * x).sum()
        with torch.no_grad():
            w.sub_(0.1)
        return loss

    # The product needs `w` as it was: eager's backward refuses, after the fact.
    same_as_eager(lambda: Scene(step, (torch.randn(4, requires_grad=True), torch.randn(4))), backward=False)


def test_a_write_with_anothers_history():
    """A tensor that did not require grad gets history from what it is multiplied by."""
    same_as_eager(lambda: Scene(lambda x, w: x.mul_(w), (plain(), torch.randn(4, requires_grad=True))))


def test_an_integer_counter():
    def build():
        return Scene(lambda n, x: (n.add_(1), x * n)[1], (torch.zeros((), dtype=torch.int64), plain()))

    same_as_eager(build, calls=3)


def test_an_argument_given_twice_is_written_once():
    def build():
        x = plain()
        return Scene(lambda a, b: (a.add_(1), b * 2)[1], (x, x))

    same_as_eager(build, calls=2)


def test_arguments_that_were_the_same_and_are_not_any_more():
    compiled = aotdist.compile(lambda a, b: (a.add_(1), b * 2)[1], backend="fx")
    x, y = torch.zeros(2), torch.zeros(2)
    assert torch.equal(compiled(x, x), torch.tensor([2.0, 2.0]))
    assert torch.equal(compiled(x, y), torch.zeros(2))
    assert torch.equal(compiled(x, x), torch.tensor([6.0, 6.0])) and len(compiled.artifacts) == 2


def test_arguments_that_begin_to_overlap_are_noticed():
    compiled = aotdist.compile(lambda a, b: (a.add_(1), b * 2)[1], backend="fx")
    x = torch.zeros(4)
    compiled(x[:2], x[2:])
    assert torch.equal(compiled(x[:2], x[1:3]), torch.tensor([4.0, 0.0]))
    assert torch.equal(x, torch.tensor([2.0, 2.0, 0.0, 0.0]))
    compiled(x[:2], x[2:])
    assert len(compiled.artifacts) == 2


def test_halves_of_one_tensor_do_not_overlap():
    def build():
        x = plain(4)
        return Scene(lambda a, b: (a.add_(b), b * 2)[1], (x[:2], x[2:]), held={"x": x})

    same_as_eager(build, calls=2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 3).t(),
        lambda: torch.randn(3, 8)[:, ::2],
        lambda: torch.empty(3, 4, dtype=torch.float64).fill_(0.5),
        lambda: torch.randn(3, 4).to(torch.bfloat16),
    ],
    ids=["transposed", "with gaps", "float64", "bfloat16"],
)
def test_what_follows_a_write_sees_the_layout_that_was_there(make):
    """A functional operator may lay its result out anew; sums and strides would show it."""

    def program(x):
        x.masked_fill_(x > 0, 1.25)
        x.add_(0.1)
        return x * x, x.mean(), x.sum(0)

    same_as_eager(lambda: Scene(program, (make(),)), calls=2)


@pytest.mark.parametrize("made", [lambda x: x * 2, lambda x: x.clone()])
@pytest.mark.parametrize("write", [torch.relu_, torch.sin_, lambda x: x.add_(1)])
def test_a_row_keeps_the_strides_that_tell_nothing(made, write):
    """Those of a dimension of one element; a functional operator drops them."""
    same_as_eager(lambda: Scene(lambda x: write(made(x[:1])), (torch.randn(4, 3).t(),)))


def test_a_write_through_a_view_leaves_the_layout_of_its_base():
    def program(x):
        y = x * 2
        part = y.t()
        part.masked_fill_(part > 0, -1)
        return y.view(-1)

    same_as_eager(lambda: Scene(program, (plain(),)))


def imaginary_parts(x):
    x.unsqueeze(0).imag[0] = 0.5
    x.imag[0].mul_(2)
    return x * 2


READ_AS = pytest.mark.parametrize(
    "bits", [torch.clone, torch.conj, torch._neg_view, lambda x: torch._neg_view(x.conj())]
)


@pytest.mark.parametrize("disabled", [frozenset(), frozenset({"cleanup"})])
@READ_AS
def test_what_is_to_be_read_as_conjugate_or_negated_stays_so(bits, disabled):
    def scene():
        return Scene(imaginary_parts, (bits(torch.randn(3, 4, dtype=torch.complex64)),))

    same_as_eager(scene, disabled_passes=disabled)


@pytest.mark.parametrize("columns", [slice(None), slice(None, None, 2)], ids=["dense", "with gaps"])
@pytest.mark.parametrize("part", ["real", "imag"])
@READ_AS
def test_what_is_read_as_conjugate_or_negated_is_written_by_parts_of_views(bits, part, columns):
    def program(x):
        getattr(x, part).fill_(2.0)
        getattr(x.conj(), part)[0] = -3.0
        getattr(x[1:], part)[..., 1] = 4.0
        getattr(x.t()[1], part).fill_(5.0)
        getattr(x.diagonal(), part).fill_(-6.0)
        return x * 1

    same_as_eager(lambda: Scene(program, (bits(torch.randn(3, 6, dtype=torch.complex64))[:, columns],)))


def into_a_slice(x):
    x[1:] = x[1:] + 1
    return x[1:] * 2


def into_a_row_of_another_view(x):
    x.t()[0].mul_(3)
    return x.t() * 2


@pytest.mark.parametrize("make", [lambda: torch.randn(4, 3).t(), lambda: torch.randn(3, 4)])
@pytest.mark.parametrize("program", [into_a_slice, into_a_row_of_another_view])
def test_two_inner_tensors_start_where_they_did_after_a_write(program, make):
    """PyTorch remembers a fake copy without where it starts, and wrappers compare that."""
    FakeTensorMode.cache_clear()

    def scene():
        two = TwoTensor(make(), make())
        return Scene(program, (two[1:],), held={"two": two})

    same_as_eager(scene, calls=2)


def test_other_tensors_keep_their_version():
    """A saved tensor that nobody writes may not look written."""
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    compiled = aotdist.compile(lambda x, w: (x.add_(1), w * 2)[1], backend="fx")
    y = w * w
    compiled(x, w)
    assert w._version == 0 and x._version == 1
    y.sum().backward()


BEFORE_A_WRITE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a view": lambda x, w: (v := x.t(), x.add_(1), v)[2],
    "a view of a view": lambda x, w: (v := x.t()[1:], x.mul_(w), v, v * 2)[2:],
    "a view of a view of before": lambda x, w: (v := x.t(), x.mul_(w), v[0])[2],
    "without history": lambda x, w: (v := x.t(), without_grad(x), v, v.sin() * w.t())[2:],
    "detached": lambda x, w: (v := x.detach(), x.mul_(w), v[0], x[0])[2:],
    "and one of after": lambda x, w: (v := x[0], x.mul_(w), v, x[0], x * 2)[2:],
}


def without_grad(x: torch.Tensor) -> None:
    with torch.no_grad():
        x.mul_(2)


@pytest.mark.parametrize("program", BEFORE_A_WRITE)
@pytest.mark.parametrize("make", ["view of a non-leaf", "non-leaf", "plain", "part"])
def test_views_of_before_a_write(make: str, program: str) -> None:
    """Autograd makes their history again from the base that it knows: no gradient passes the input itself."""
    makers: dict[str, Callable[[], torch.Tensor]] = {
        "view of a non-leaf": lambda: (torch.randn(3, 4, requires_grad=True) * 1.5).view(4, 3),
        "non-leaf": lambda: torch.randn(4, 3, requires_grad=True) * 1.5,
        "plain": lambda: torch.randn(4, 3),
        "part": lambda: torch.randn(6, 3)[1:5],
    }

    def use(call: Any) -> list[torch.Tensor | None]:
        x, w = makers[make](), torch.randn(4, 3, requires_grad=True)
        ends = leaves_behind([x])
        results = call(x, w)
        outs = results if isinstance(results, tuple) else (results,)
        total = sum((out * (k + 2)).sum() for k, out in enumerate(outs)) + w.sum()
        return [*outs, *torch.autograd.grad(total, [*ends, w], allow_unused=True)]

    found: list[list[torch.Tensor | None]] = []
    for call in (BEFORE_A_WRITE[program], aotdist.compile(BEFORE_A_WRITE[program], backend="fx")):
        torch.manual_seed(0)
        found.append(use(call))
    torch.testing.assert_close(*found)  # zeros may have another sign


def view_of_before_without_grad(x):
    view = x.t()
    x.detach().mul_(2)
    with torch.no_grad():
        return view.t()


@pytest.mark.parametrize(
    "make", [lambda: torch.randn(3, 4), lambda: TwoTensor(torch.randn(3), torch.randn(3))[None]]
)
def test_a_view_under_no_grad_of_one_of_before_a_write(make):
    """It is one of what was there by then: made before the write, autograd would forbid it."""
    same_as_eager(lambda: Scene(view_of_before_without_grad, (make().detach().requires_grad_(),)))


def test_a_write_by_an_imaginary_number():
    """Its backward conjugates the number, by the operator that makes views of tensors."""

    def build():
        x = torch.randn(3, 4, dtype=torch.complex64, requires_grad=True) * 1.5
        return Scene(lambda x: x.mul_(1j), (x,))

    same_as_eager(build)


def test_in_inference_mode_a_view_of_another_dtype_is_no_view_to_autograd():
    """So a write through it is not counted, and a view that was written keeps its history."""

    def use(call):
        x = (torch.randn(4, 3, requires_grad=True) * 1.5).t()
        history, version = x.grad_fn, x._version
        with torch.inference_mode():
            call(x)
        return x.grad_fn is history, x._version - version

    def program(x):
        x.view(torch.int32).add_(1)

    assert use(aotdist.compile(program, backend="fx")) == use(program)


def several_of_before(x):
    view = x.t()
    x.add_(1)
    return view.split(1)[0]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_several_views_of_one_of_before_a_write(requires_grad):
    def build():
        return Scene(several_of_before, (torch.randn(3, 4, requires_grad=requires_grad) * 1.5,))

    same_as_eager(build)


def test_several_views_of_one_of_before_a_write_whose_base_is_elsewhere():
    def use(call):
        leaf = torch.randn(3, 4, requires_grad=True)
        return [
            *(ends := call((leaf * 1.5).view(4, 3))),
            torch.autograd.grad(sum(end.sum() for end in ends), leaf)[0],
        ]

    assert_both_give_the_same(several_of_before, use)


def through_a_row(x):
    x[1].add_(1)


def through_out(x):
    torch.add(torch.ones(4), 1, out=x[1])


def through_one_of_several(x):
    row = x.unbind(0)[1]
    torch.add(row > 0, 1, out=row)


@pytest.mark.parametrize("program", [through_a_row, through_out, through_one_of_several])
def test_writes_of_what_is_expanded_are_refused(program):
    x = torch.randn(1, 4).expand(3, 4)
    before = x.clone()
    with pytest.raises(UnsupportedProgram, match="writes through an expanded tensor"):
        aotdist.compile(program, backend="fx")(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "seen",
    [lambda x: [x.a], lambda x: [x.a.t(), x.a[0]], lambda x: [x.a, x * 2]],
    ids=["it", "views", "both"],
)
def test_what_lies_inside_of_an_input_is_written_with_history(seen: Callable[..., Any]) -> None:
    def build() -> Scene:
        return Scene(lambda x, w: (x.a.mul_(w), seen(x))[1], (two(), leaf()))

    same_as_eager(build)


@pytest.mark.parametrize("times", [1, 2])
def test_writes_inside_of_what_gets_no_gradient_are_counted_on_what_the_user_holds(times: int) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> None:
        inner = x.a
        y.add_(1)
        with torch.no_grad():
            for _ in range(times):
                inner.add_(1)

    same_as_eager(lambda: Scene(program, (two().requires_grad_(), non_leaf())))


FORBIDDEN = {
    "one of several": lambda x: x.unbind(0)[1],
    "a chunk": lambda x: x.chunk(2)[0],
    "by an autograd function": Transposed.apply,
    "a view of one of several": lambda x: x.unbind(0)[1][:2],
}


@pytest.mark.parametrize("make", [non_leaf, two_non_leaf], ids=["non_leaf", "two"])
@pytest.mark.parametrize("view", FORBIDDEN)
def test_a_view_that_autograd_forbids_to_write(view, make):
    """It says so before anything is written, when the program is compiled and later."""

    def fails(call):
        x = make()
        before = x.detach().clone()
        with pytest.raises(RuntimeError) as raised:
            call(FORBIDDEN[view](x))
        assert bits(x) == bits(before)
        _, says, why = str(raised.value).partition("is a view and is being modified inplace")
        return says, why  # a wrapper's view is made again in the trace, by another operator

    compiled = aotdist.compile(lambda x: x.mul_(2), backend="fx")
    said = fails(lambda x: x.mul_(2))
    assert [fails(compiled) for _ in range(2)] == [said, said]


def test_a_view_that_autograd_forbids_to_write_beside_another_of_its_base():
    """The trace sees the base of both, and how the views were made is part of the signature."""

    def write(x, y):
        x.mul_(2)
        y.mul_(3)

    compiled = aotdist.compile(write, backend="fx")
    base = non_leaf()
    compiled(base[:1], base[1:])
    for call in (write, compiled):
        base = non_leaf()
        before = base.detach().clone()
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            call(*base.split([1, 2]))
        assert torch.equal(base.detach(), before)
