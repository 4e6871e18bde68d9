"""The comparison itself: it notices what a user could notice."""

import pytest
import torch

from tests.semantics.observation import Scene, assert_same, differences, look, observe, play, same_as_eager


def argument() -> torch.Tensor:
    return torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)


def sights_of(fn) -> list:
    return play(Scene(fn, (argument(),)), fn)


WRONG = {
    "another bit": (lambda x: x * 2, lambda x: x * (2 + 1e-6)),
    "the sign of zero": (lambda x: x * 0.0, lambda x: x * -0.0),
    "another layout": (lambda x: x * 2, lambda x: (x.t() * 2).t().clone().t().contiguous().t()),
    "a copy for a view": (lambda x: x.t(), lambda x: x.t().clone()),
    "a copy for an input": (lambda x: x, lambda x: x.clone()),
    "a view for an input": (lambda x: x, lambda x: x.view_as(x)),
    "a view of another base": (lambda x: x.t()[0], lambda x: x.detach().t()[0]),
    "no history": (lambda x: x * 2, lambda x: (x * 2).detach()),
    "the same object twice": (lambda x: [x * 2] * 2, lambda x: [x * 2, x * 2]),
    "memory that is shared": (lambda x: [(y := x * 2), y.t()], lambda x: [x * 2, (x * 2).t()]),
    "another gradient": (lambda x: x * 2 + x.detach(), lambda x: x + 2 * x.detach()),
    "another structure": (lambda x: (x * 2,), lambda x: [x * 2]),
    "another constant": (lambda x: (x * 2, 1), lambda x: (x * 2, 2)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_difference_is_noticed(name):
    right, wrong = WRONG[name]
    assert differences(sights_of(right), sights_of(right)) == []
    assert differences(sights_of(right), sights_of(wrong)) != []


def test_a_write_is_noticed():
    def write(x):
        with torch.no_grad():
            x.mul_(2)

    assert differences(sights_of(write), sights_of(lambda x: None)) != []


def test_a_difference_is_told_in_words():
    with pytest.raises(AssertionError, match=r"step 0: out: stride \(1, 2\) in eager, \(2, 1\) compiled"):
        assert_same(sights_of(lambda x: x.t() + 0), sights_of(lambda x: (x.t() + 0).contiguous()))


def test_nan_equals_itself():
    assert look(torch.tensor(float("nan"))) == look(torch.tensor(float("nan")))


def test_bases_are_told_apart():
    x = torch.ones(4)
    views = {"a": x[:2], "b": x[2:], "c": torch.ones(4)[:2]}
    seen = observe(views)
    assert seen["a is a view of"] == seen["b is a view of"] == "the base of a"
    assert seen["c is a view of"] == "the base of c"
    assert seen["b lives in"] == ["a#0"] and seen["c lives in"] == ["c#0"]


def test_the_number_of_compilations_counts():
    compiled = same_as_eager(lambda: Scene(lambda x: x * 2, (argument(),)), calls=3)
    assert len(compiled.artifacts) == 1
    with pytest.raises(AssertionError, match="compiled 1 times"):
        same_as_eager(lambda: Scene(lambda x: x * 2, (argument(),)), compilations=2)


def lenient_sights(fn) -> list:
    leaf = argument()
    return play(scene := Scene(fn, (leaf.clone().t(),), held={"leaf": leaf}, lenient=True), scene.fn)


@pytest.mark.parametrize("factor", [1 + 1e-7, 1 + 1e-4])
def test_where_gradients_meet_outside_the_last_bits_do_not_matter(factor):
    right, wrong = (lenient_sights(lambda x, by=by: _scaled(x, by)) for by in (1, factor))
    assert bool(differences(right, wrong)) is (factor > 1 + 1e-6)


def _scaled(x, factor):
    """Scales the gradient alone."""
    x.mul_(2)
    x.register_hook(lambda grad: grad * factor)


def test_strides_that_say_nothing_do_not_matter():
    def sights(stride, *, lenient):
        scene = Scene(lambda: torch.zeros(4).as_strided((1, 2), (stride, 1)), lenient=lenient)
        return play(scene, scene.fn)

    assert differences(sights(2, lenient=True), sights(1, lenient=True)) == []
    assert differences(sights(2, lenient=False), sights(1, lenient=False)) != []
