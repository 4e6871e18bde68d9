"""`aot_export_module` against eager and against PyTorch's own: graphs, their numbers and their signatures."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import aot_autograd as theirs

import aotdist
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.export import BackwardSignature, GraphSignature, aot_export_module
from aotdist.torch_seam.trees import pytree
from tests.export.modules import CASES, Case, Linear, Normed, SameGradientTwice

each_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
JOINT = {name: case for name, case in CASES.items() if case.loss is not None}
each_joint_case = pytest.mark.parametrize("case", JOINT.values(), ids=list(JOINT))
each_case_and_kind = pytest.mark.parametrize(
    ("case", "joint"),
    [
        *(pytest.param(case, False, id=name) for name, case in CASES.items()),
        *(pytest.param(case, True, id=f"{name}, joint") for name, case in JOINT.items()),
    ],
)
each_of_theirs = pytest.mark.parametrize(
    ("case", "joint"),
    [
        *(pytest.param(case, False, id=name) for name, case in CASES.items()),
        *(pytest.param(case, True, id=f"{name}, joint") for name, case in JOINT.items() if case.theirs),
    ],
)


def _made(case: Case) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return case.make(), case.args()


def _exported(export, case: Case, *, joint: bool):
    module, args = _made(case)
    loss = case.loss if joint else None
    return export(module, args, trace_joint=joint, output_loss_index=loss, kwargs=dict(case.kwargs))


def _graph_arguments(case: Case) -> list[Any]:
    module, args = _made(case)
    state = [*dict(module.named_parameters(remove_duplicate=False)).values(), *module.buffers()]
    flat = [*state, *pytree.tree_leaves((args, case.kwargs))]
    return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]


def _results(gm: torch.fx.GraphModule) -> tuple[Any, ...]:
    return gm.graph.output_node().args[0]


def _positions(gm: torch.fx.GraphModule, names: list[str | None]) -> list[Any]:
    """Places among the results, which are what names of results mean."""
    order = [getattr(value, "name", None) for value in _results(gm)]
    return [None if name is None else order.index(name) for name in names]


def _ins(gm: torch.fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.find_nodes(op="placeholder")]


@each_of_theirs
def test_the_graph_takes_and_returns_what_theirs_does(case: Case, joint: bool):
    gm, _ = _exported(aot_export_module, case, joint=joint)
    expected, _ = _exported(theirs.aot_export_module, case, joint=joint)
    assert _ins(gm) == _ins(expected)
    found, wanted = gm(*_graph_arguments(case)), expected(*_graph_arguments(case))
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert type(a) is type(b)
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(b, torch.Tensor) else a == b


@each_of_theirs
def test_the_signature_is_theirs_field_by_field(case: Case, joint: bool):
    gm, found = _exported(aot_export_module, case, joint=joint)
    their_gm, expected = _exported(theirs.aot_export_module, case, joint=joint)
    for name in ("parameters", "buffers", "user_inputs", "inputs_to_parameters", "inputs_to_buffers"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("in_spec", "out_spec", "input_tokens", "output_tokens"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("buffers_to_mutate", "parameters_to_mutate", "user_inputs_to_mutate"):
        mine, other = getattr(found, name), getattr(expected, name)
        assert list(mine.values()) == list(other.values()), name
        assert _positions(gm, list(mine)) == _positions(their_gm, list(other)), name
    _assert_same_values(gm, found.user_outputs, their_gm, expected.user_outputs)
    _assert_same_backward(gm, found, their_gm, expected)


def _assert_same_values(gm, names, their_gm, their_names) -> None:
    """The same results, by their value: a result may stand at several places."""
    assert [name is None for name in names] == [name is None for name in their_names]
    shapes = [None if name is None else _shape(gm, name) for name in names]
    assert shapes == [None if name is None else _shape(their_gm, name) for name in their_names]


def _shape(gm: torch.fx.GraphModule, name: str) -> tuple[int, ...]:
    (node,) = (node for node in gm.graph.nodes if node.name == name)
    return tuple(node.meta["val"].shape)


def _assert_same_backward(gm, found: GraphSignature, their_gm, expected) -> None:
    assert (found.backward_signature is None) == (expected.backward_signature is None)
    if found.backward_signature is None:
        return
    for name in ("gradients_to_parameters", "gradients_to_user_inputs"):
        mine = getattr(found.backward_signature, name)
        other = getattr(expected.backward_signature, name)
        assert list(mine.values()) == list(other.values()), name
        assert _positions(gm, list(mine)) == _positions(their_gm, list(other)), name


@each_joint_case
def test_the_loss_is_named(case: Case):
    """Theirs is the name of another result where buffers are written: it counts from the first new value."""
    gm, signature = _exported(aot_export_module, case, joint=True)
    assert signature.backward_signature.loss_output == signature.user_outputs[case.loss]


@each_case_and_kind
def test_the_graph_is_functional(case: Case, joint: bool):
    gm, _ = _exported(aot_export_module, case, joint=joint)
    arguments = _graph_arguments(case)
    before = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in arguments]
    gm(*arguments)
    for a, b in zip(arguments, before, strict=True):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b)
    targets = [node.target for node in gm.graph.nodes if hasattr(node.target, "_schema")]
    assert not any(target._schema.is_mutable for target in targets)


@each_joint_case
def test_results_writes_and_gradients_are_eagers(case: Case):
    gm, signature = _exported(aot_export_module, case, joint=True)
    results = dict(
        zip(
            [getattr(value, "name", None) for value in _results(gm)], gm(*_graph_arguments(case)), strict=True
        )
    )
    module, args = _made(case)
    outs = pytree.tree_leaves(module(*args, **case.kwargs))
    outs[case.loss].backward()
    for name, out in zip(signature.user_outputs, outs, strict=True):
        assert not isinstance(out, torch.Tensor) or torch.equal(results[name], out)
    buffers = dict(module.named_buffers())
    for name, fqn in signature.buffers_to_mutate.items():
        assert torch.equal(results[name], buffers[fqn])
    totals: dict[int, torch.Tensor] = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    inputs = dict(zip(signature.user_inputs, pytree.tree_leaves((args, case.kwargs)), strict=True))
    backward = signature.backward_signature
    owners = [(name, parameters[fqn]) for name, fqn in backward.gradients_to_parameters.items()]
    owners += [(name, inputs[graph_input]) for name, graph_input in backward.gradients_to_user_inputs.items()]
    for name, owner in owners:
        totals[id(owner)] = totals.get(id(owner), 0) + results[name]
    for _, owner in owners:
        torch.testing.assert_close(totals[id(owner)], owner.grad)


@each_case
def test_the_module_is_left_as_it_was(case: Case):
    module, args = _made(case)
    state = copy.deepcopy(module.state_dict())
    kept = [id(tensor) for tensor in [*module.parameters(), *module.buffers()]]
    aot_export_module(module, args, trace_joint=False, kwargs=case.kwargs)
    assert [id(tensor) for tensor in [*module.parameters(), *module.buffers()]] == kept
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name])


def test_fields_are_theirs():
    for mine, other in (
        (GraphSignature, theirs.GraphSignature),
        (
            BackwardSignature,
            type(_exported(theirs.aot_export_module, CASES["linear"], joint=True)[1].backward_signature),
        ),
    ):
        assert [f.name for f in dataclasses.fields(mine)] == [f.name for f in dataclasses.fields(other)]


def test_a_signature_is_frozen():
    _, signature = _exported(aot_export_module, CASES["linear"], joint=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        signature.parameters = []


def test_names_are_theirs():
    """Of a program whose operations are recorded alike, the whole graph is."""
    for joint in (False, True):
        gm, signature = _exported(aot_export_module, CASES["deep"], joint=joint)
        their_gm, expected = _exported(theirs.aot_export_module, CASES["deep"], joint=joint)
        assert gm.code == their_gm.code
        assert signature.user_outputs == expected.user_outputs
        if joint:
            mine, other = signature.backward_signature, expected.backward_signature
            assert dataclasses.asdict(mine) == dataclasses.asdict(other)


def test_decompositions_are_applied():
    table = {torch.ops.aten.t.default: lambda x: x.permute(1, 0)}
    targets = [
        {
            str(node.target)
            for node in export(
                Linear(), (torch.randn(2, 3),), trace_joint=True, output_loss_index=0, decompositions=table
            )[0].graph.nodes
        }
        for export in (aot_export_module, theirs.aot_export_module)
    ]
    assert "aten.t.default" not in targets[0] and "aten.permute.default" in targets[0]
    assert targets[0] == targets[1]


def test_a_gradient_that_two_inputs_share_has_a_name_for_each():
    gm, signature = aot_export_module(
        SameGradientTwice(), (torch.randn(3),), trace_joint=True, output_loss_index=0
    )
    assert list(signature.backward_signature.gradients_to_parameters.values()) == ["a", "b"]
    *_, a, b = gm(*(torch.randn(3) for _ in range(3)))
    assert torch.equal(a, torch.ones(3)) and torch.equal(b, torch.ones(3))
    assert a.data_ptr() != b.data_ptr()


def test_a_buffer_that_is_assigned_is_a_new_value():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps = self.steps + 1
            return (x * self.steps,)

    module = Counting()
    gm, signature = aot_export_module(module, (torch.ones(2),), trace_joint=False)
    assert list(signature.buffers_to_mutate.values()) == ["steps"]
    steps, out = gm(torch.tensor(4.0), torch.ones(2))
    assert steps == 5 and torch.equal(out, torch.full((2,), 5.0)) and module.steps == 0


def test_a_parameter_that_is_written_without_gradients():
    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x):
            self.weight.clamp_(0, 1)
            return (x * self.weight,)

    found, expected = (
        export(Clamped(), (torch.ones(3),), trace_joint=False)[1]
        for export in (aot_export_module, theirs.aot_export_module)
    )
    assert found.parameters_to_mutate == expected.parameters_to_mutate == {"clamp": "weight"}


def test_a_single_tensor_may_be_returned():
    gm, signature = aot_export_module(nn.Linear(3, 3), (torch.ones(2, 3),), trace_joint=False)
    assert signature.out_spec.is_leaf() and len(gm(torch.eye(3), torch.zeros(3), torch.ones(2, 3))) == 1


def test_grad_mode_is_theirs_to_choose():
    """Without `trace_joint` nothing is differentiated; with it, what grad mode is outside holds."""
    gm, _ = aot_export_module(Linear(), (torch.ones(2, 3),), trace_joint=False)
    assert all(not value.requires_grad for value in gm(torch.ones(4, 3), torch.ones(4), torch.ones(2, 3)))
    with torch.no_grad(), pytest.raises(BadSettings, match="result 0 is no loss"):
        aot_export_module(Linear(), (torch.ones(2, 3),), trace_joint=True, output_loss_index=0)


def test_a_module_that_is_compiled_is_exported_as_it_was_written():
    module, x = Linear(), torch.ones(2, 3)
    expected, _ = aot_export_module(module, (x,), trace_joint=True, output_loss_index=0)
    aotdist.compile(module, backend="fx")
    gm, _ = aot_export_module(module, (x,), trace_joint=True, output_loss_index=0)
    assert gm.code == expected.code


def test_random_operators_stay_in_the_graph():
    module, x = nn.Sequential(nn.Dropout(0.5), nn.ReLU()), torch.ones(4, 4)
    gm, _ = aot_export_module(module, (x,), trace_joint=False)
    torch.manual_seed(5)
    (found,) = gm(x)
    torch.manual_seed(5)
    assert torch.equal(found, module(x))


# --- what is refused ------------------------------------------------------------------------------


class _Returning(nn.Module):
    """Calls a function with a parameter and the arguments."""

    def __init__(self, fn):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("buffer", torch.ones(3))
        self.register_buffer("same_buffer", self.buffer)
        self.fn = fn

    def forward(self, x):
        return self.fn(self, x)


_OUTSIDE = torch.ones(3)


def _assigns(module, x):
    module.last = x * 2
    return ((x * module.weight).sum(),)


REFUSED = {
    "two results require grad": (
        lambda m, x: ((x * m.weight).sum(), x * m.weight),
        "`out\\[1\\]` requires grad",
    ),
    "a parameter is not used": (lambda m, x: ((x * 2).sum() + x.sum(),), "`weight` requires grad"),
    "a parameter is written": (
        lambda m, x: ((m.weight * 1).mul_(2).sum() + m.weight.data.add_(1).sum(),),
        "`weight` is written and requires grad",
    ),
    "a buffer under two names is written": (
        lambda m, x: ((m.buffer.add_(1) * m.weight).sum(),),
        "`buffer` is written and shares memory with `same_buffer`",
    ),
    "a tensor from outside": (
        lambda m, x: ((x * m.weight * _OUTSIDE).sum(),),
        "_OUTSIDE` is reached from outside",
    ),
    "an attribute is assigned": (_assigns, "`last`, which is no buffer"),
    "metadata is written": (
        lambda m, x: (x.unsqueeze_(0), (x * m.weight).sum())[1:],
        r"`args\[0\]` has its size, strides or history",
    ),
}


@pytest.mark.parametrize(("fn", "fault"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_expressed_is_refused_by_name(fn, fault: str):
    x = torch.ones(3, requires_grad=fault.startswith("`weight` requires"))
    with pytest.raises(UnsupportedProgram, match=fault):
        aot_export_module(_Returning(fn), (x,), trace_joint=True, output_loss_index=0)


@pytest.mark.parametrize("fn", [lambda m, x: ((x * m.weight),), lambda m, x: (x.sum(),), lambda m, x: (3,)])
def test_what_is_no_loss_is_refused(fn):
    for export, kind in ((aot_export_module, BadSettings), (theirs.aot_export_module, Exception)):
        with pytest.raises(kind):
            export(_Returning(fn), (torch.ones(3),), trace_joint=True, output_loss_index=0)


@pytest.mark.parametrize("index", [-1, 1])
def test_the_loss_is_one_of_the_results(index: int):
    with pytest.raises(BadSettings, match=f"result {index} is no loss"):
        aot_export_module(Linear(), (torch.ones(2, 3),), trace_joint=True, output_loss_index=index)


@pytest.mark.parametrize(
    ("mod", "args", "kwargs", "named"),
    [
        (lambda x: x, (torch.ones(3),), None, "takes a module, and was given a function"),
        (Linear(), torch.ones(2, 3), None, "`args` is a Tensor"),
        (Linear(), (torch.ones(2, 3),), torch.ones(3), "`kwargs` is a Tensor"),
    ],
)
def test_what_is_no_call_of_a_module_is_refused(mod, args, kwargs, named):
    with pytest.raises(BadSettings, match=named):
        aot_export_module(mod, args, trace_joint=False, kwargs=kwargs)


def test_the_loss_has_to_be_named():
    with pytest.raises(BadSettings, match="output_loss_index"):
        aot_export_module(Linear(), (torch.ones(2, 3),), trace_joint=True)


def test_what_cannot_be_honoured_is_refused_by_name():
    with pytest.raises(BadSettings, match="`pre_dispatch` cannot be honoured"):
        aot_export_module(Normed(), (torch.ones(2, 3),), trace_joint=False, pre_dispatch=True)


@pytest.mark.parametrize("joint", [False, True])
def test_sizes_are_read_off_the_inputs(joint: bool):
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            y = self.linear(x).reshape(-1)
            return (y.sum() / x.shape[0], y.detach()[1:])

    module = Loss()
    gm, signature = aot_export_module(
        module,
        (torch.ones(4, 3),),
        trace_joint=joint,
        output_loss_index=0 if joint else None,
        dynamic_shapes=True,
    )
    assert len(gm.graph.find_nodes(op="placeholder")) == len(signature.parameters) + 1
    for rows in (4, 7):
        x = torch.randn(rows, 3)
        state = [module.linear.weight, module.linear.bias]
        loss, rest, *grads = gm(*state, x)
        expected = module(x)
        assert torch.equal(loss, expected[0]) and torch.equal(rest, expected[1])
        for found, grad in zip(grads, torch.autograd.grad(expected[0], state) if joint else (), strict=False):
            assert torch.equal(found, grad)


def test_wrappers_are_refused_by_name():
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(UnsupportedProgram, match=r"`args\[0\]` is a TwoTensor"):
        aot_export_module(
            _Returning(lambda m, x: (x,)), (TwoTensor(torch.ones(3), torch.ones(3)),), trace_joint=False
        )
