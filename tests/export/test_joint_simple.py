"""`aot_export_joint_simple` against eager and against PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._functorch import aot_autograd as theirs

from aotdist.errors import UnsupportedProgram
from aotdist.export import aot_export_joint_simple


def _leaf():
    return torch.randn(3, requires_grad=True)


def _data():
    return torch.randn(3)


def _twice(x):
    y = x.sin()
    return y, y


FUNCTIONS = {
    "one result": (lambda x: (x.sin(),), lambda: (_leaf(),)),
    "two results": (lambda x, y: (x.sin() * y, x + y), lambda: (_leaf(), _data())),
    "two gradients": (lambda x, y: [x * y, x / y], lambda: (_leaf(), _leaf())),
    "a result without gradient": (lambda x: (x.detach().cos(), x.sin()), lambda: (_leaf(),)),
    "a repeated result": (_twice, lambda: (_leaf(),)),
    "constants": (lambda x, k, n: (x * k, None, 3, n), lambda: (_leaf(), 2, None)),
    "an input is not used": (lambda x, y: (x.exp(),), lambda: (_leaf(), _leaf())),
    "no input requires grad": (lambda x, y: (x * y,), lambda: (_data(), _data())),
    "a write to a temporary": (lambda x: (x.clone().mul_(3).sin(),), lambda: (_leaf(),)),
    "without gradients inside": (torch.no_grad()(lambda x: (x * 2,)), lambda: (_leaf(),)),
}
each_function = pytest.mark.parametrize(("fn", "make"), FUNCTIONS.values(), ids=list(FUNCTIONS))
each_kind = pytest.mark.parametrize("joint", [False, True])


def _args(make) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return make()


def _plain(values) -> list[Any]:
    return [value.detach() if isinstance(value, torch.Tensor) else value for value in values]


def _ins(gm: torch.fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.find_nodes(op="placeholder")]


def _is_joint(gm: torch.fx.GraphModule) -> bool:
    return any(name.startswith("tangents") for name in _ins(gm))


def _run(gm: torch.fx.GraphModule, make) -> tuple[list[Any], list[Any]]:
    """Values and gradients."""
    args = _plain(_args(make))
    if not _is_joint(gm):
        return list(gm(*args)), []
    count = sum(name.startswith("tangents") for name in _ins(gm))
    values, grads = gm(args, [torch.full((3,), 1.0 + k) for k in range(count)])
    return list(values), list(grads)


def _assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b


@each_function
@each_kind
def test_the_graph_is_theirs(fn, make, joint: bool):
    gm, expected = (
        export(fn, _args(make), trace_joint=joint)
        for export in (aot_export_joint_simple, theirs.aot_export_joint_simple)
    )
    assert _ins(gm) == _ins(expected)
    for found, wanted in zip(_run(gm, make), _run(expected, make), strict=True):
        _assert_equal(found, wanted)


@each_function
def test_values_and_gradients_are_eagers(fn, make):
    gm = aot_export_joint_simple(fn, _args(make), trace_joint=True)
    values, grads = _run(gm, make)
    args = _args(make)
    outs = fn(*args)
    _assert_equal(values, _plain(outs))
    differentiable = [out for out in outs if isinstance(out, torch.Tensor) and out.requires_grad]
    for k, out in enumerate(differentiable):
        out.backward(torch.full((3,), 1.0 + k), retain_graph=True)
    for arg, grad in zip(args, grads, strict=bool(grads)):
        expected = arg.grad if isinstance(arg, torch.Tensor) else None
        assert (grad is None) == (expected is None)
        assert grad is None or torch.allclose(grad, expected)


ALIASING = {
    "an input": lambda x: (x,),
    "a view of an input": lambda x: (x.view(3, 1),),
    "a write": lambda x: (x.detach().add_(1),),
    "a single tensor": lambda x: x.sin(),
    "a nested result": lambda x: ([x.sin()],),
}
VIEWS = {
    "a view of an intermediate": lambda x: (x.sin().view(3, 1),),
    "a view of another result": lambda x: (lambda y: (y, y.view(3, 1)))(x.sin()),
    "two views of an intermediate": lambda x: (lambda y: (y.view(1, 3), y.view(3, 1)))(x.sin()),
}


@each_kind
@pytest.mark.parametrize("fn", ALIASING.values(), ids=list(ALIASING))
def test_other_conventions_are_refused_as_by_theirs(fn, joint: bool):
    for export, kind in (
        (aot_export_joint_simple, UnsupportedProgram),
        (theirs.aot_export_joint_simple, RuntimeError),
    ):
        with pytest.raises(kind):
            export(fn, (torch.ones(3),), trace_joint=joint)


@pytest.mark.parametrize("fn", VIEWS.values(), ids=list(VIEWS))
def test_views_are_refused_where_they_are_differentiated(fn):
    for export, kind in (
        (aot_export_joint_simple, UnsupportedProgram),
        (theirs.aot_export_joint_simple, RuntimeError),
    ):
        with pytest.raises(kind):
            export(fn, (_leaf(),), trace_joint=True)
        values = export(fn, (_leaf(),), trace_joint=False)(torch.zeros(3))
        assert [value.shape for value in values] == [value.shape for value in fn(torch.zeros(3))]


NAMED = {
    "a write": (lambda x, y: (y.add_(1) * x,), r"`args\[1\]` is written"),
    "an input": (lambda x, y: (x * y, y), r"`out\[1\]` is `args\[1\]`"),
    "a view": (lambda x, y: ((x * y).t(),), r"`out\[0\]` is a view"),
    "a view of a result": (
        lambda x, y: (lambda z: (z, z.view(-1)))(x * y),
        r"`out\[1\]` is a view of `out\[0\]`",
    ),
    "a structure": (lambda x, y: {"a": (x * y, y * 2)}, "the result is not one flat tuple"),
}


@pytest.mark.parametrize(("fn", "fault"), NAMED.values(), ids=list(NAMED))
def test_what_is_refused_is_named(fn, fault: str):
    x, y = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
    with pytest.raises(UnsupportedProgram, match=fault):
        aot_export_joint_simple(fn, (x, y), trace_joint=True)


@pytest.mark.parametrize("args", [([torch.ones(3)],), torch.ones(3), {"x": [torch.ones(3)]}])
def test_arguments_are_flat(args):
    with pytest.raises(UnsupportedProgram, match="the arguments are not one flat tuple"):
        aot_export_joint_simple(lambda x: (x + 1,), args, trace_joint=False)


def test_state_that_the_function_reaches_is_refused():
    linear = torch.nn.Linear(3, 3)
    with pytest.raises(UnsupportedProgram, match=r"weight` is reached from outside"):
        aot_export_joint_simple(lambda x: (linear(x),), (torch.ones(2, 3),), trace_joint=True)


def test_decompositions_are_applied():
    table = {torch.ops.aten.silu.default: lambda x: x * x.sigmoid()}
    gm = aot_export_joint_simple(
        lambda x: (torch.nn.functional.silu(x),), (torch.ones(3),), trace_joint=False, decompositions=table
    )
    assert [str(node.target) for node in gm.graph.nodes if node.op == "call_function"] == [
        "aten.sigmoid.default",
        "aten.mul.Tensor",
    ]


@pytest.mark.parametrize("export", [aot_export_joint_simple, theirs.aot_export_joint_simple])
def test_a_joint_graph_returns_tuples(export) -> None:
    gm = export(lambda x, y: [x * y, x + y], (_leaf(), _leaf()), trace_joint=True)
    values, grads = result = gm((torch.ones(3), torch.ones(3)), (torch.ones(3), torch.ones(3)))
    assert (type(result), type(values), type(grads)) == (tuple, tuple, tuple)
