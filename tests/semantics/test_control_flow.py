"""`torch.cond` and the other operators that are handed functions; a Python `if`, or loop, is the oracle."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.export import aot_export_module
from aotdist.functorch import aot_function, default_partition, min_cut_rematerialization_partition, nop
from tests.semantics.meshes import sharded
from tests.semantics.observation import Around, Scene, assert_same, look, play


def chosen(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
    """`torch.cond` as Python has it."""
    return (true_fn if pred else false_fn)(*operands)


Cond = Callable[..., Any]


class Gated(nn.Module):
    """A branch that closes over parameters, and one that does not."""

    def __init__(self, cond: Cond) -> None:
        super().__init__()
        self.cond = cond
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        y = self.cond(x.sum() > 0, lambda h: F.gelu(self.linear(h)), lambda h: self.linear(h * 2), (h,))
        return y + x


def closing_over(x: torch.Tensor, cond: Cond) -> Any:
    y = x.sin()
    return cond(y.sum() > 0, lambda: y * x, lambda: (x * x).cos())


def nested(x: torch.Tensor, cond: Cond) -> Any:
    def outer(x: torch.Tensor) -> Any:
        y = x.exp()
        return cond(y.mean() > 1.3, lambda y: y * x, lambda y: y.sin(), (y,))

    return cond(x.sum() > 0, outer, lambda x: x.relu() + 1, (x,))


def dropping(x: torch.Tensor, cond: Cond) -> Any:
    """Random numbers are drawn before and behind."""
    x = F.dropout(x, 0.5)
    y = cond(x.sum() > 0, lambda x: x.sin() * x, lambda x: x * 2, (x,))
    return y * torch.rand_like(y)


def several_results(x: torch.Tensor, cond: Cond) -> Any:
    y = cond(
        x.sum() > 0,
        lambda pair: {"a": pair[0] * pair[1], "b": [pair[0].detach().exp(), 7]},
        lambda pair: {"a": pair[1].sin() + pair[0], "b": [pair[1].detach().cos(), 7]},
        ([x, x.cos()],),
    )
    return y["a"], y["b"]


def written_around(x: torch.Tensor, cond: Cond) -> Any:
    y = x * 2
    y.mul_(x)
    z = cond(y.sum() > 0, lambda y: y.sin(), lambda y: y.exp(), (y,))
    return z.add_(y)


def written_inside(x: torch.Tensor, cond: Cond) -> Any:
    """What a branch makes, it may write; how often, only eager tells of its result."""
    return cond(x.sum() > 0, lambda x: (x * 2).add_(1).mul_(x), lambda x: x.clone().sin_(), (x,)) * 2


def transposed(x: torch.Tensor, cond: Cond) -> Any:
    y = cond(x.sum() > 0, lambda x: (x * 2).t(), lambda x: (x.sin() + 1).t(), (x,))
    return y.contiguous() * 3


def of_a_gradient(x: torch.Tensor, cond: Cond) -> Any:
    """A branch that differentiates inside."""

    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: x.sin().sum())(x) * x

    return cond(x.sum() > 0, inner, lambda x: x * 3, (x,))


def the_same_twice(x: torch.Tensor, cond: Cond) -> Any:
    return cond(x.sum() > 0, lambda a, b: a * b, lambda a, b: a + b.sin(), (x, x))


def checkpointed(x: torch.Tensor, cond: Cond) -> Any:
    def region(x: torch.Tensor) -> torch.Tensor:
        return cond(x.sum() > 0, lambda x: x.sin().exp(), lambda x: x.cos(), (x,)) * 2

    return checkpoint(region, x.sin(), use_reentrant=False)


def checkpointed_draws(x: torch.Tensor, cond: Cond) -> Any:
    def region(x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.4)
        return cond(x.sum() > 0, lambda x: x.sin(), lambda x: x * 2, (x,)).exp()

    return checkpoint(region, x.sin(), use_reentrant=False)


PROGRAMS = [
    checkpointed_draws,
    closing_over,
    nested,
    dropping,
    several_results,
    written_around,
    written_inside,
    transposed,
    of_a_gradient,
    the_same_twice,
    checkpointed,
]


def signed(sign: int) -> torch.Tensor:
    return (torch.rand(3, 4) * sign).requires_grad_()


def same_as_an_if(
    build: Callable[[Cond], Any],
    make: Callable[[int], torch.Tensor] = signed,
    *,
    around: Around = torch.enable_grad,
    backend: str = "fx",
    **settings: Any,
) -> aotdist.compiled.Compiled:
    """Both branches, in one artifact, as eager takes them by `if`."""
    sights = []
    target: Any = None
    for cond in (chosen, torch.cond):
        torch.manual_seed(0)
        target = build(cond)
        if cond is torch.cond:
            target = aotdist.compile(target, backend=backend, settings=settings)
        sight = []
        for sign in (1, -1, 1):
            torch.manual_seed(sign)
            scene = Scene(target, (make(sign),))
            sight += play(scene, target, around=around)
            sight.append({"random numbers": torch.get_rng_state().tolist()})
        sights.append(sight)
    assert_same(*sights)
    compiled = aotdist.api.compiled_call(target)
    assert len(compiled.artifacts) == 1
    return compiled


@pytest.mark.parametrize("partition", ["default", "min_cut"])
@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_cond(program: Callable[..., Any], around: Around, partition: str) -> None:
    same_as_an_if(lambda cond: lambda x: program(x, cond), around=around, partition=partition)


def test_a_branch_closes_over_parameters() -> None:
    compiled = same_as_an_if(Gated)
    (artifact,) = compiled.artifacts
    emitted = artifact.compilation.region.halves.forward.source
    assert (
        "def branch_if_true_0(" in emitted
        and "(branch_if_true_0 if gt_scalar else branch_if_false_0)(" in emitted
    )


@pytest.mark.parametrize("make", ["two", "shards", "a sparse gradient"])
def test_cond_of_wrappers_is_refused(make: str, mesh: DeviceMesh) -> None:
    table = nn.Embedding(3, 4, sparse=True)

    def of_rows(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: table(x.long()), lambda x: table(x.long() + 1), (x,))

    def of_wrappers(x: Any) -> torch.Tensor:
        inside = x.a if isinstance(x, TwoTensor) else x.to_local()
        return torch.cond(inside.sum() > 0, torch.sin, torch.cos, (x,))

    plain = torch.ones(2)
    x = {"two": TwoTensor(plain, plain.clone()), "shards": sharded(mesh, plain)}.get(make, plain)
    with pytest.raises(UnsupportedProgram, match="`cond.true_fn` works on wrappers"):
        aotdist.compile(of_rows if x is plain else of_wrappers, backend="fx")(x)


@pytest.mark.parametrize("partition_fn", [default_partition, min_cut_rematerialization_partition])
def test_drop_ins_take_branches(partition_fn: Any) -> None:
    x, w = signed(1).T.contiguous().detach().requires_grad_(), torch.rand(3, 3, requires_grad=True)
    grads = []
    for cond in (chosen, torch.cond):
        program = functools.partial(of_two, cond=cond)
        fn = aot_function(program, nop, partition_fn=partition_fn) if cond is torch.cond else program
        grads.append(torch.autograd.grad(fn(x, w).sum(), (x, w)))
    assert all(map(torch.equal, *grads))


def of_two(x: torch.Tensor, w: torch.Tensor, cond: Cond) -> torch.Tensor:
    return cond(x.sum() > 0, lambda x: (x @ w).sin(), lambda x: (x * 2) @ w.t(), (x,))


def test_an_export_keeps_branches() -> None:
    graph, _ = aot_export_module(Gated(torch.cond), (signed(1),), trace_joint=False)
    assert "torch.ops.higher_order.cond(" in graph.code


def test_inductor_takes_branches() -> None:
    model = Gated(torch.cond)
    compiled = aotdist.compile(Gated(torch.cond), backend="inductor")
    compiled.load_state_dict(model.state_dict())
    for sign in (1, -1):
        x = signed(sign)
        grads = []
        for module, cond in ((model, chosen), (compiled, torch.cond)):
            module.cond = cond
            module.zero_grad()
            out = module(x)
            out.square().sum().backward()
            grads.append([out, x.grad, *(p.grad for p in module.parameters())])
            x.grad = None
        torch.testing.assert_close(*grads)


def test_an_operand_that_one_branch_leaves_alone_gets_zeros() -> None:
    """Eager gives it no gradient, or one; which gradients there are cannot depend on data."""
    w = torch.ones(4, requires_grad=True)
    compiled = aotdist.compile(
        lambda x: torch.cond(x.sum() > 0, lambda x: x * w, lambda x: x * 2, (x,)), backend="fx"
    )
    compiled(-torch.ones(4)).sum().backward()
    assert torch.equal(w.grad, torch.zeros(4))


def test_gradients_of_gradients_are_refused() -> None:
    x = signed(1)
    y = aotdist.compile(lambda x: branch(lambda x: x**3)(x) + x**3, backend="fx")(x)
    with pytest.raises(UnsupportedProgram, match="gradients of a `cond` are to be differentiated in turn"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_python_value_is_an_if() -> None:
    compiled = aotdist.compile(lambda x: torch.cond(len(x) > 2, torch.sin, torch.cos, (x,)), backend="fx")
    x = torch.rand(3)
    assert torch.equal(compiled(x), x.sin()) and torch.equal(compiled(x[:2]), x[:2].cos())


def branch(true_fn: Callable[..., Any], false_fn: Callable[..., Any] = torch.sin) -> Callable[..., Any]:
    return lambda x: torch.cond(x.sum() > 0, true_fn, false_fn, (x,))


overwritten = branch(lambda x: x.mul_(2))
held, seen = torch.zeros(3, 4), torch.zeros(())
group = "none"

REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a write to an operand": (
        lambda x: branch(lambda x: x.mul_(2))(x * 1),
        r"`cond.true_fn` writes `operands\[0\]`",
    ),
    "a write with history": (branch(lambda x: held.add_(x)), "`cond.true_fn` writes `held`"),
    "a write of a buffer": (branch(lambda x: x * seen.add_(1)), "`cond.true_fn` writes `seen`"),
    "communication": (
        branch(lambda x: torch.ops._c10d_functional.all_reduce(x.detach(), "sum", group) * x),
        "`cond.true_fn` communicates",
    ),
    "random numbers": (branch(lambda x: F.dropout(x, 0.5)), "a branch of `cond`. draws random numbers"),
    "other sizes": (branch(lambda x: x.sum()), "result 0 of the branches of `cond` is"),
    "other strides": (branch(lambda x: x.t().contiguous().t()), "result 0 of the branches of `cond` is"),
    "another structure": (branch(lambda x: (x, x)), "the branches of `cond` return"),
    "other constants": (branch(lambda x: (x, 1), lambda x: (x, 2)), r"constants \(None, 1\) and \(None, 2\)"),
    "data inside": (branch(lambda x: x * x.sum().item()), "reads a tensor's data"),
    "a branch in vmap": (
        lambda x: torch.vmap(lambda row: torch.cond(row.sum() > 0, torch.sin, torch.cos, (row,)))(x),
        "`cond` runs inside of a `torch.func` transform",
    ),
    "a loop": (
        lambda x: while_loop(lambda x: x.sum() < 9, lambda x: (x + 1,), (x.detach(),))[0],
        "calls the higher-order operator `while_loop`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    program, says = REFUSED[name]
    x = signed(1)
    state, before = torch.get_rng_state(), x.detach().clone()
    with pytest.raises(UnsupportedProgram, match=says) as caught:
        aotdist.compile(program, backend="fx")(x)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(x.detach(), before)
    assert caught.value.fix and (caught.value.where or "").startswith(__file__)


def scanned(fn: Callable[..., Any], init: Any, xs: Any, **options: Any) -> Any:
    """`scan` as Python has it."""
    kept = []
    rows = xs.unbind(0)
    for row in reversed(rows) if options.get("reverse") else rows:
        init, out = fn(init, row)
        kept.append(out)
    return init, torch.stack(kept[::-1] if options.get("reverse") else kept)


decay = torch.linspace(0.5, 0.9, 4)

LOOPS: dict[str, Callable[..., Any]] = {
    "scan": lambda x, own: (scan if own else scanned)(
        lambda c, r: ((d := c * r.cos()), d.exp()), x[0].sin(), x
    ),
    "scan backwards": lambda x, own: (scan if own else scanned)(
        lambda c, r: ((d := c + r.sin()), d.exp()), x[0].sin(), x, reverse=True
    ),
    "scan that closes over": lambda x, own: (scan if own else scanned)(
        lambda c, r: ((d := c * decay + r), d * 2), x[0].sin(), x
    ),
    "map": lambda x, own: map_rows(torch.sin, x) if own else torch.stack([r.sin() for r in x.unbind(0)]),
    "map with more": lambda x, own: (
        map_rows(lambda r, y: r * y, x, x[0])
        if own
        else torch.stack([r * y for r in x.unbind(0)] if (y := x[0]) is not None else [])
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_known_length(name: str) -> None:
    sights = []
    for own in (False, True):
        target: Any = functools.partial(LOOPS[name], own=own)
        if own:
            target = aotdist.compile(target, backend="fx")
        torch.manual_seed(0)
        sights.append(play(Scene(target, (signed(1),)), target, calls=2))
    assert_same(*sights)


def test_associative_scan() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return associative_scan(torch.add, x, 0, combine_mode="generic")

    sights = []
    for target in (program, aotdist.compile(program, backend="fx")):
        torch.manual_seed(0)
        sights.append(play(Scene(target, (signed(1),)), target))
    assert_same(*sights)


CAUSAL = create_block_mask(lambda b, h, i, j: i >= j, 1, 2, 16, 16, device="cpu")
bias = torch.linspace(-1, 1, 256).view(16, 16)

ATTENTIONS: dict[str, Callable[..., Any]] = {
    "plain": flex_attention,
    "scores": lambda q, k, v: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[i, j]),
    "mask": lambda q, k, v: flex_attention(q, k, v, block_mask=CAUSAL),
    "mask made inside": lambda q, k, v: flex_attention(
        q, k, v, block_mask=create_block_mask(lambda b, h, i, j: i >= j, 1, 2, 16, 16, device="cpu")
    ),
    "logsumexp": lambda q, k, v: flex_attention(q, k, v, return_lse=True),
}


@pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile", "ignore:return_lse is deprecated"
)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_flex_attention(name: str) -> None:
    """Without gradients: eager has no backward for it on the CPU, and says so compiled too."""
    torch.manual_seed(0)
    given = [torch.randn(1, 2, 16, 8) for _ in range(3)]
    compiled = aotdist.compile(ATTENTIONS[name], backend="fx")
    expected = ATTENTIONS[name](*given)
    assert_same([look_at(expected)], [look_at(compiled(*given))])
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        compiled(*(tensor.requires_grad_() for tensor in given))


def look_at(outs: Any) -> dict[str, Any]:
    return {f"out {k}": look(out) for k, out in enumerate(outs if isinstance(outs, tuple) else [outs])}


@torch.compiler.nested_compile_region
def region(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


PLAIN: dict[str, Callable[..., Any]] = {
    "nested_compile_region": lambda x: region(x) + region(x * 2),
    "wrap": lambda x: torch.ops.higher_order.wrap(lambda a, b: a * b, x, x + 1),
    "out_dtype": lambda x: torch.ops.higher_order.out_dtype(
        torch.ops.aten.mul.Tensor, torch.int32, (x.detach() * 9).char(), (x.detach() * 5).char()
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_operators_that_only_call(name: str) -> None:
    sights = []
    for target in (PLAIN[name], aotdist.compile(PLAIN[name], backend="fx")):
        torch.manual_seed(0)
        sights.append(play(Scene(target, (signed(1),)), target))
    assert_same(*sights)


def test_a_custom_operator_that_writes() -> None:
    @torch.library.custom_op("aotdist_tests::add_into", mutates_args={"out"})
    def add_into(x: torch.Tensor, out: torch.Tensor) -> None:
        out.add_(x)

    @add_into.register_fake
    def _(x: torch.Tensor, out: torch.Tensor) -> None: ...

    def program(x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(x)
        add_into(x.detach(), made)
        add_into(made, buffer)
        return x * made

    sights = []
    for target in (program, aotdist.compile(program, backend="fx")):
        torch.manual_seed(0)
        seen = play(Scene(target, (signed(1), torch.ones(3, 4))), target, calls=2)
        # How often the operator writes inside, which its version counter shows in eager, nobody knows.
        sights.append([sight for sight in seen if "args[0] version" not in sight])
    assert_same(*sights)


def test_others_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedProgram, match="calls the higher-order operator `strict_mode`"):
        aotdist.compile(lambda x: torch.ops.higher_order.strict_mode(lambda x: (x * 2,), (x,))[0])(
            torch.ones(2)
        )
