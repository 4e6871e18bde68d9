"""How long things live: activations until the backward has used them, artifacts as long as their owner."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.api import compiled_call


def compiled(fn):
    return aotdist.compile(fn, backend="fx")


def storages_of(node) -> list[weakref.ref]:
    return [weakref.ref(tensor) for tensor in node.saved_tensors]


def alive(references: list[weakref.ref]) -> int:
    return sum(reference() is not None for reference in references)


def test_the_backward_frees_what_was_saved():
    y = compiled(lambda x: x.exp().sin().exp().sum())(torch.ones(9, requires_grad=True))
    saved = storages_of(y.grad_fn)
    assert len(saved) >= 2 and alive(saved) == len(saved)
    y.backward()
    assert alive(saved) == 0


def test_a_retained_graph_keeps_what_was_saved():
    y = compiled(lambda x: x.exp().sin().sum())(torch.ones(9, requires_grad=True))
    saved = storages_of(y.grad_fn)
    y.backward(retain_graph=True)
    assert alive(saved) == len(saved)
    y.backward()
    assert alive(saved) == 0


class Spy(torch.autograd.Function):
    """Counts, in the middle of a backward, which of some tensors are alive."""

    watched: list[weakref.ref] = []
    counts: list[int] = []


def backward_op() -> None:
    Spy.counts.append(alive(Spy.watched))


@torch.library.custom_op("aotdist_tests::probe", mutates_args=())
def probe(x: torch.Tensor) -> torch.Tensor:
    backward_op()
    return x.clone()


@probe.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Probed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return probe(grad)


def test_the_backward_frees_as_it_goes():
    """By the time the last formula of the backward runs, what the earlier ones used is gone."""

    def program(x):
        return Probed.apply(x).exp().sin().exp().sum()

    y = compiled(program)(torch.ones(9, requires_grad=True))
    Spy.watched, Spy.counts = storages_of(y.grad_fn), []
    assert len(Spy.watched) >= 2
    y.backward()
    assert Spy.counts == [0]


def test_an_unused_result_keeps_nothing_alive():
    x = torch.ones(9, requires_grad=True)
    y = compiled(lambda x: x.exp().sum())(x)
    saved = storages_of(y.grad_fn)
    del y
    assert alive(saved) == 0


def test_results_hold_no_more_than_themselves():
    program = compiled(lambda x: x.exp().sum())
    with torch.no_grad():
        y = program(torch.ones(1000))
    assert y.untyped_storage().nbytes() == 4


def test_arguments_are_let_go_after_an_inference_call():
    program = compiled(lambda x: x * 2)
    program(torch.ones(3))
    x = torch.ones(3)
    reference = weakref.ref(x)
    program(x)
    del x
    assert reference() is None


def test_arguments_of_the_first_call_are_let_go():
    """The artifact knows what the arguments were like; it does not keep them."""
    program = compiled(lambda x: x * 2)
    x = torch.ones(3)
    reference = weakref.ref(x)
    program(x)
    del x
    gc.collect()
    assert reference() is None


def with_a_gradient() -> torch.Tensor:
    x = torch.ones(3, requires_grad=True)
    x.grad = torch.ones(3)
    return x


@pytest.mark.parametrize("make", [with_a_gradient, lambda: torch.ones(4)[1:]], ids=["gradient", "view"])
def test_arguments_that_something_hangs_on_are_let_go(make):
    """A gradient, or a base, that the program may ask for."""
    program = compiled(lambda x: x.detach() * 2)
    x = make()
    reference = weakref.ref(x)
    program(x)
    del x
    gc.collect()
    assert reference() is None


def test_arguments_of_the_first_training_call_are_let_go():
    program = compiled(lambda x: x * x)
    x = torch.ones(3, requires_grad=True)
    reference = weakref.ref(x)
    program(x).sum().backward()
    del x
    gc.collect()
    assert reference() is None


def test_arguments_are_let_go_where_the_backward_may_be_traced_again():
    """For gradients of other kinds autograd's graph of the trace is kept; it holds stand-ins."""
    program = compiled(lambda x: x * x)
    x = TwoTensor(torch.ones(3), torch.ones(3)).requires_grad_()
    references = [weakref.ref(tensor) for tensor in (x, x.a, x.b)]
    program(x).backward(torch.ones(3))
    del x
    gc.collect()
    assert alive(references) == 0


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_arguments_are_let_go_where_gradients_may_be_differentiated_by_autograd():
    program = compiled(lambda x: Twice.apply(x).sin())
    x = torch.ones(3, requires_grad=True)
    reference = weakref.ref(x)
    (grad,) = torch.autograd.grad(program(x).sum(), x, create_graph=True)
    grad.sum().backward()
    del x, grad
    gc.collect()
    assert reference() is None


def test_a_module_dies_with_its_last_reference():
    model = compiled(nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_reset_lets_artifacts_go():
    program = compiled(lambda x: x * 2)
    program(torch.ones(3))
    artifact = weakref.ref(compiled_call(program).artifacts[0].compilation.traced.graph.gm)
    aotdist.reset(program)
    gc.collect()
    assert artifact() is None
