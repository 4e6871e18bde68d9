"""Fake tensors of a mode of the user's: the trace runs in it, and nothing real is needed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import aotdist
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.export import aot_export_joint_simple, aot_export_module, load, save
from aotdist.torch_seam.trees import pytree
from tests.export.modules import CASES, Case, Linear, Tied

each_joint_case = pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name) for name, case in CASES.items() if case.loss is not None],
)


def export(module: nn.Module, args, case: Case):
    return aot_export_module(module, args, trace_joint=True, output_loss_index=case.loss, kwargs=case.kwargs)


@pytest.mark.parametrize("around", [False, True], ids=["outside", "inside"])
@each_joint_case
def test_the_graph_is_that_of_real_tensors(case: Case, around: bool):
    expected, signature = export(case.make(), case.args(), case)
    mode = FakeTensorMode()
    with mode:
        module = case.make()
    args = pytree.tree_map_only(torch.Tensor, mode.from_tensor, case.args())
    with mode if around else contextlib.nullcontext():
        gm, found = export(module, args, case)
    assert gm.code == expected.code and found == signature
    values = [node.meta.get("val") for node in gm.graph.nodes]
    assert all(value.fake_mode is mode for value in values if isinstance(value, torch.Tensor))


def test_a_large_model_needs_no_memory(tmp_path: Path):
    """30 GB of parameters are exported and saved; the graph then runs on small ones as on large."""
    with FakeTensorMode():
        module = nn.Sequential(nn.Linear(60_000, 60_000), nn.Tanh(), nn.Linear(60_000, 60_000))
        x = torch.empty(4, 60_000)
    save(aot_export_module(module, (x,), trace_joint=False), tmp_path / "graph.aot")
    gm, signature = load(tmp_path / "graph.aot")
    assert signature.parameters == ["0.weight", "0.bias", "2.weight", "2.bias"]
    (first, *_) = gm.graph.find_nodes(op="placeholder")
    assert first.meta["val"].shape == (60_000, 60_000)
    small = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    with torch.no_grad():
        assert torch.equal(gm(*small.parameters(), torch.ones(4, 6))[0], small(torch.ones(4, 6)))


def test_a_mode_that_is_on_is_used_for_real_tensors():
    mode, module, x = FakeTensorMode(allow_non_fake_inputs=True), Linear(), torch.randn(2, 3)
    with mode:
        gm, _ = aot_export_module(module, (x,), trace_joint=False)
    (first, *_) = gm.graph.find_nodes(op="placeholder")
    assert first.meta["val"].fake_mode is mode


def test_real_and_fake_tensors_meet():
    mode, module = FakeTensorMode(), Linear()
    gm, _ = aot_export_module(module, (mode.from_tensor(torch.randn(2, 3)),), trace_joint=False)
    assert gm.code == aot_export_module(module, (torch.randn(2, 3),), trace_joint=False)[0].code


class Reshapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x, y):
        z = self.linear(x).view(-1)[1:]
        return z.sum(), torch.arange(x.shape[0] * 2) + y.shape[1] // 2, x.shape[0]


def _symbolic(mode: FakeTensorMode, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    kinds = [DimDynamic.DYNAMIC if at == dim else DimDynamic.STATIC for at in range(tensor.dim())]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))


@pytest.mark.parametrize("joint", [False, True], ids=["forward", "joint"])
def test_symbols_of_the_users_mode_are_those_of_the_graph(joint: bool):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        module = Reshapes()
    x, y = _symbolic(mode, torch.randn(4, 3), 0), _symbolic(mode, torch.randn(2, 6), 1)
    gm, _ = aot_export_module(module, (x, y), trace_joint=joint, output_loss_index=0 if joint else None)
    shown = gm.graph.find_nodes(op="placeholder")[2].meta["val"].shape[0]
    assert shown.node.expr == x.shape[0].node.expr
    real = Reshapes()
    for rows, columns in ((4, 6), (7, 9)):
        args = torch.randn(rows, 3), torch.randn(2, columns)
        found = gm(*(parameter.detach() for parameter in real.parameters()), *args)
        wanted = real(*args)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1]) and found[2] == rows


def test_dynamic_shapes_make_symbols_in_the_users_mode():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(4, 3), static_shapes=True)
    gm, _ = aot_export_module(Linear(), (x,), trace_joint=False, dynamic_shapes=True)
    value = gm.graph.find_nodes(op="placeholder")[2].meta["val"]
    assert value.fake_mode is mode and isinstance(value.shape[0], torch.SymInt)


@pytest.mark.parametrize("joint", [False, True], ids=["forward", "joint"])
def test_functions_with_branches(joint: bool):
    def program(x, y):
        return (torch.cond(y.sum() > 0, lambda v: v.sin(), lambda v: v * y, (x,)),)

    args = (torch.randn(3, requires_grad=True), torch.randn(3))
    expected = aot_export_joint_simple(program, args, trace_joint=joint)
    mode = FakeTensorMode()
    fakes = tuple(map(mode.from_tensor, args))
    gm = aot_export_joint_simple(program, fakes, trace_joint=joint)
    assert gm.code == expected.code


def test_tied_fake_weights_are_inputs_of_their_own():
    with FakeTensorMode():
        module, x = Tied(), torch.empty(2, 3)
    _, signature = aot_export_module(module, (x,), trace_joint=True, output_loss_index=0)
    assert "first.weight" in signature.parameters and "second.weight" in signature.parameters


def test_the_module_is_left_as_it_was():
    with FakeTensorMode():
        module, x = Linear(), torch.empty(2, 3)
    before = list(module.parameters())
    aot_export_module(module, (x,), trace_joint=True, output_loss_index=0)
    assert all(a is b and isinstance(a, FakeTensor) for a, b in zip(module.parameters(), before, strict=True))


# --- compiled calls --------------------------------------------------------------------------------


def test_a_compiled_step_runs_on_fake_tensors():
    """What a step would compute, and of what size: without memory, in the mode of its tensors."""
    with FakeTensorMode() as mode:
        module, x = nn.Sequential(nn.Linear(60_000, 60_000), nn.BatchNorm1d(60_000)), torch.empty(4, 60_000)
    aotdist.compile(module, backend="fx")
    out = module(x)
    out.square().mean().backward()
    assert isinstance(out, FakeTensor) and out.fake_mode is mode
    assert module[0].weight.grad.shape == (60_000, 60_000)


def test_symbols_of_tensors_that_a_call_is_not_given_are_not_asked_for():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x, y = _symbolic(mode, torch.randn(4, 3), 0), _symbolic(mode, torch.randn(7, 3), 0)
    compiled = aotdist.compile(lambda x: x.sin().view(-1, 3), backend="fx")
    for given in (x, y):
        assert compiled(given).shape == given.shape
    assert len(compiled.artifacts) == 1


def test_machine_code_for_fake_tensors_is_refused():
    with FakeTensorMode():
        module, x = Linear(), torch.empty(2, 3)
    aotdist.compile(module, backend="inductor")
    with pytest.raises(BadSettings, match=r"`args\[0\]` is a fake tensor, and what `inductor` emits"):
        module(x)


# --- what is refused -------------------------------------------------------------------------------


def test_two_modes_are_refused_by_name():
    one, two = FakeTensorMode(), FakeTensorMode()
    args = (one.from_tensor(torch.ones(4, 3)), two.from_tensor(torch.ones(2, 6)))
    with pytest.raises(UnsupportedProgram, match=r"`args\[1\]` is a fake tensor of another mode than"):
        aot_export_module(Reshapes(), args, trace_joint=False)


def test_symbols_need_a_mode_that_has_some():
    x = FakeTensorMode().from_tensor(torch.ones(4, 3))
    with pytest.raises(BadSettings, match="`dynamic_shapes` asks for symbols.*\n.*\n.*ShapeEnv"):
        aot_export_module(Linear(), (x,), trace_joint=False, dynamic_shapes=True)
