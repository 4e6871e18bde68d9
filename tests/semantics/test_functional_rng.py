"""`functional_rng`: random operators take a seed and an offset, and a number may be drawn twice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.api import compiled_call
from aotdist.compiled import Compiled
from aotdist.convention.rng import SLOTS
from aotdist.errors import UnsupportedProgram
from aotdist.partition.traits import is_random
from tests.runtime.reference import reference


def compiled(fn: Any, **settings: Any) -> Any:
    return aotdist.compile(fn, backend="fx", settings={"functional_rng": True, **settings})


def graphs(call: Any) -> dict[str, Any]:
    found: Compiled = compiled_call(call)
    (artifact,) = found.artifacts
    return artifact.compilation.graphs()


PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout, twice": lambda x: F.dropout(F.dropout(x, 0.2).sin(), 0.2),
    "dropout in place": lambda x: F.dropout(x * 2, 0.5, inplace=True),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "rand_like of what is transposed": lambda x: torch.rand_like(x.t()) * x.t(),
    "normal": lambda x: torch.normal(x.detach(), 1.0) * x,
    "multinomial": lambda x: x.gather(-1, torch.multinomial(x.detach().softmax(-1), 2)),
    "checkpointed": lambda x: checkpoint(lambda x: F.dropout(x.sin(), 0.5).cos(), x, use_reentrant=False),
}


@pytest.mark.parametrize("partition", ["default", "min_cut"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_seed_and_offset_come_last_and_decide(name: str, partition: str) -> None:
    """The backward of the same seed uses the same numbers, kept or drawn again."""
    program = compiled(PROGRAMS[name], partition=partition)
    x = torch.linspace(-1, 1, 30).view(6, 5).requires_grad_()
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        out = program(x)
        (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
        runs.append((out, grad, torch.get_rng_state()))
    assert all(map(torch.equal, *runs))
    assert not torch.equal(program(x), runs[0][0])
    for half, graph in graphs(program).items():
        assert graph.ins[-2:] == SLOTS, half
        assert not any(map(is_random, graph.gm.graph.nodes))


def gradient_of_dropout(program: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    out = program(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad == 0, out == 0)
    return grad


def test_a_mask_is_drawn_again_rather_than_kept() -> None:
    x = torch.rand(64, 64, requires_grad=True) + 0.5
    kept, again = (compiled(PROGRAMS["dropout"], partition=p) for p in ("default", "min_cut"))
    assert torch.equal(gradient_of_dropout(kept, x), gradient_of_dropout(again, x))
    saved = [compiled_call(p).artifacts[0].compilation.region.joint.split.saved_bytes for p in (kept, again)]
    assert saved[0] >= x.numel() and saved[1] == 0


def test_wrappers() -> None:
    program = compiled(lambda x: F.dropout(x * 2, 0.5))
    x = TwoTensor(torch.ones(64), torch.ones(64)).requires_grad_()
    out = program(x)
    out.sum().backward()
    for part, grad in ((out.a, x.grad.a), (out.b, x.grad.b)):
        assert torch.equal(part, grad * 1.0) and 0 < (part == 0).sum() < 64
    assert not torch.equal(out.a, out.b)


def test_inference_and_modules() -> None:
    model = compiled(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True))
    x = torch.randn(2, 5, 4)
    with torch.no_grad():
        torch.manual_seed(1)
        first = model(x)
        torch.manual_seed(1)
        assert torch.equal(model(x), first)
    assert graphs(model)["inference"].ins[-2:] == SLOTS


@pytest.mark.parametrize("is_training", [False, True])
def test_attention_that_drops_nothing_draws_nothing(is_training: bool) -> None:
    """Its fused operators say that they are random all the same."""
    x = torch.randn(2, 3, 8, 4, requires_grad=is_training)
    call = compiled(lambda x: F.scaled_dot_product_attention(x, x, x))
    assert torch.equal(call(x), F.scaled_dot_product_attention(x, x, x))
    assert not any(slot.role == "rng" for graph in graphs(call).values() for slot in graph.ins)


def test_what_does_not_draw_takes_no_seed() -> None:
    program = compiled(lambda x: x.sin())
    state = torch.get_rng_state()
    program(torch.ones(3, requires_grad=True)).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(slot.role != "rng" for graph in graphs(program).values() for slot in graph.ins)


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad])
def test_the_printed_call_is_the_composed_one(around: Callable[[], Any]) -> None:
    program = compiled(PROGRAMS["dropout, twice"])
    x = torch.ones(8, 8, requires_grad=True)
    with around():
        torch.manual_seed(2)
        out = program(x)
        torch.manual_seed(2)
        (again,) = reference(compiled_call(program).artifacts[0])([x])[:1]
    assert torch.equal(out, again)
    if out.requires_grad:
        assert torch.equal(*(torch.autograd.grad(o.sum(), x)[0] for o in (out, again)))


def test_inductor_draws_the_same_numbers() -> None:
    x = torch.ones(100, requires_grad=True)
    outs = []
    for backend in ("fx", "inductor"):
        program = aotdist.compile(
            lambda x: F.dropout(x, 0.5) * torch.rand_like(x),
            backend=backend,
            settings={"functional_rng": True},
        )
        torch.manual_seed(5)
        out = program(x)
        outs.append((out, *torch.autograd.grad(out.sum(), x)))
    torch.testing.assert_close(*outs)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "poisson": (lambda x: torch.poisson(x.detach().abs()), "poisson.* is not known as a function"),
    "a generator": (
        lambda x: x * torch.rand(5, generator=generator),
        "rand.generator.* draws from a generator of its own",
    ),
    "a branch": (
        lambda x: torch.cond(x.sum() > 0, F.dropout, torch.sin, (x,)),
        "a function that is handed to an operator .* draws random numbers",
    ),
}
generator = torch.Generator()


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    program, says = REFUSED[name]
    state = torch.get_rng_state()
    with pytest.raises(UnsupportedProgram, match=says) as caught:
        compiled(program)(torch.ones(5, requires_grad=True))
    assert (caught.value.where or "").startswith(__file__)
    assert torch.equal(torch.get_rng_state(), state)


def test_gradients_of_gradients_see_the_same_numbers() -> None:
    x = torch.ones(50, requires_grad=True)
    out = compiled(lambda x: F.dropout(x.sin(), 0.5))(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    kept = (out != 0) * 2
    torch.testing.assert_close(grad, kept * x.cos())
    torch.testing.assert_close(second, -kept * x.sin())
