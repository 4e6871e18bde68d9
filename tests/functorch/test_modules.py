"""`aot_module` and `aot_module_simplified` against eager and against PyTorch's own."""

from __future__ import annotations

import copy

import functorch.compile as theirs
import pytest
import torch
from torch import nn

import aotdist.functorch as ours
from aotdist.errors import BadSettings, UnsupportedProgram
from tests.functorch.programs import MODULES, Compilers, Normed, data, leaf

each_module = pytest.mark.parametrize(("make", "argument"), MODULES.values(), ids=list(MODULES))


def _observed(module: nn.Module, call, x: torch.Tensor):
    """Results, state and gradients after two steps."""
    seen = []
    for _ in range(2):
        (out,) = call(x)
        out.square().sum().backward()
        seen.append(out.detach())
    grads = {name: param.grad for name, param in module.named_parameters()}
    return seen, dict(module.state_dict()), {**grads, "x": x.grad}


def _assert_equal(found, expected, *, none_may_be_zero: bool = False) -> None:
    for a, b in zip(found[0], expected[0], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert a.keys() == b.keys()
        for name, value in b.items():
            if a[name] is None or value is None:
                grads = [grad for grad in (a[name], value) if grad is not None]
                assert not grads or (none_may_be_zero and not any(grad.any() for grad in grads)), name
            else:
                assert torch.equal(a[name], value), name


def _both(make, argument):
    torch.manual_seed(1)
    module, x = make(), argument()
    other = x.detach().clone().requires_grad_(x.requires_grad)
    return (module, x), (copy.deepcopy(module), other)


@each_module
def test_a_module_does_what_eager_does(make, argument):
    (module, x), (eager, y) = _both(make, argument)
    compilers = Compilers()
    compiled = ours.aot_module(module, **compilers.all())
    _assert_equal(_observed(module, compiled, x), _observed(eager, eager, y))
    assert compilers.counts() == {"forward": 1, "backward": 1}


@each_module
def test_a_simplified_module_does_what_eager_does(make, argument):
    (module, x), (eager, y) = _both(make, argument)
    compilers = Compilers()
    compiled = ours.aot_module_simplified(module, (x,), **compilers.all())
    assert compilers.counts() == {"forward": 1}
    _assert_equal(_observed(module, compiled, x), _observed(eager, eager, y))
    assert compilers.counts() == {"forward": 1, "backward": 1}


@pytest.mark.parametrize(
    ("name", "simplified"),
    # Their `aot_module` refuses tied parameters.
    [(name, simplified) for name in MODULES for simplified in (False, True) if simplified or name != "tied"],
)
def test_both_do_what_theirs_do(name: str, simplified: bool):
    make, argument = MODULES[name]
    pairs = _both(make, argument)
    seen, counts, arguments = [], [], []
    for library, (module, x) in zip((ours, theirs), pairs, strict=True):
        compilers = Compilers()
        if simplified:
            call = library.aot_module_simplified(module, (x,), **compilers.all())
        else:
            call = library.aot_module(module, **compilers.all())
        seen.append(_observed(module, call, x))
        counts.append(compilers.counts())
        arguments.append(len(compilers.graphs["forward"][0].graph.find_nodes(op="placeholder")))
    _assert_equal(*seen, none_may_be_zero=True)
    assert counts[0] == counts[1]
    # A tied parameter is one argument here.
    assert arguments[0] == arguments[1] - (name == "tied")


def test_parameters_and_buffers_come_first():
    module, calls = Normed(), []

    def partition(joint, inputs, **options):
        calls.append((inputs[0], options["static_lifetime_input_indices"]))
        return ours.default_partition(joint, inputs, **options)

    ours.aot_module(module, ours.nop, partition_fn=partition)(data(4, 3))
    ((primals, static),) = calls
    named = [*module.parameters(), *module.buffers(), data(4, 3)]
    assert [tuple(primal.shape) for primal in primals] == [tuple(tensor.shape) for tensor in named]
    assert static == list(range(len(named) - 1))


def test_the_module_keeps_the_original_as_a_child():
    module = nn.Linear(3, 3)
    compiled = ours.aot_module(module, ours.nop)
    other = theirs.aot_module(module, theirs.nop)
    assert isinstance(compiled, nn.Module) and compiled.orig_module is module
    assert list(compiled.state_dict()) == list(other.state_dict())
    assert torch.equal(compiled(torch.ones(2, 3)), module(torch.ones(2, 3)))


def test_arguments_of_aot_function_go_through():
    compilers = Compilers()
    compiled = ours.aot_module(nn.Linear(3, 3), compilers.named("forward"), compilers.named("backward"))
    compiled(data(2, 3)).sum().backward()
    assert compilers.counts() == {"forward": 1, "backward": 1}
    with pytest.raises(BadSettings, match="`disable_functionalization`"):
        ours.aot_module(nn.Linear(3, 3), ours.nop, disable_functionalization=True)


def test_keyword_arguments_of_a_module():
    class Scaled(nn.Module):
        def forward(self, x, *, scale):
            return x * scale

    assert torch.equal(ours.aot_module(Scaled(), ours.nop)(torch.ones(2), scale=3.0), torch.full((2,), 3.0))


def test_a_simplified_call_returns_a_list_and_knows_the_module():
    module = Normed()
    compiled = ours.aot_module_simplified(module, (data(4, 3),), ours.nop)
    assert isinstance(compiled(data(4, 3)), list)
    assert dict(compiled.named_parameters()).keys() == dict(module.named_parameters()).keys()
    assert dict(compiled.named_buffers()).keys() == dict(module.named_buffers()).keys()
    compiled(data(4, 3))[0].sum().backward()
    compiled.zero_grad()
    assert all(param.grad is None for param in module.parameters())


def test_a_simplified_module_under_no_grad_has_no_backward():
    compilers = Compilers()
    with torch.no_grad():
        compiled = ours.aot_module_simplified(Normed().eval(), (data(4, 3),), **compilers.all())
        compiled(data(4, 3))
    assert compilers.counts() == {"inference": 1}


class Counting(nn.Module):
    """It assigns a buffer, where others write theirs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.inner = nn.Module()
        self.inner.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.inner.calls = self.inner.calls + 1
        return (x * self.inner.calls * self.weight,)


@pytest.mark.parametrize(
    "compiled",
    [
        lambda mod: ours.aot_module(mod, ours.nop),
        lambda mod: ours.aot_module_simplified(mod, (torch.ones(1),), ours.nop),
    ],
    ids=["aot_module", "aot_module_simplified"],
)
def test_what_is_assigned_to_a_buffer_stays(compiled):
    eager, mod = Counting(), Counting()
    call = compiled(mod)
    for _ in range(3):
        assert torch.equal(call(torch.ones(1))[0], eager(torch.ones(1))[0])
        assert torch.equal(mod.inner.calls, eager.inner.calls)


def test_parameters_may_be_replaced_and_tied():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = (nn.Parameter(torch.full((2,), value)) for value in (2.0, 3.0))

        def forward(self, x):
            return x * self.one.exp() * self.other

    eager, mod = Pair(), Pair()
    for call, model in ((eager, eager), (ours.aot_module(mod, ours.nop), mod)):
        for other in (model.other, nn.Parameter(torch.ones(2)), model.one, nn.Parameter(torch.zeros(2))):
            model.other = other
            call(torch.ones(2)).sum().backward()
    for expected, found in zip(eager.parameters(), mod.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad)


def test_a_simplified_module_returns_something_flat():
    for library, kind in ((ours, UnsupportedProgram), (theirs, RuntimeError)):
        with pytest.raises(kind):
            library.aot_module_simplified(nn.Linear(3, 3), (data(2, 3),), library.nop)


def test_passes_on_a_graph_module_run_first():
    def to_cos(gm, args):
        assert len(args) == 1
        for node in gm.graph.find_nodes(op="call_method", target="sin"):
            node.target = "cos"
        gm.recompile()
        return gm

    class Sines(nn.Module):
        def forward(self, x):
            return (x.sin(),)

    x = data(3)
    gm = torch.fx.symbolic_trace(Sines())
    compiled = ours.aot_module_simplified(gm, (x,), ours.nop, pre_grad_passes=to_cos, ignore_shape_env=True)
    assert torch.equal(compiled(x)[0], x.cos())


def test_a_region_name_is_the_name_of_what_is_compiled():
    with pytest.raises(UnsupportedProgram):
        ours.aot_module_simplified(nn.Linear(2, 2), (data(2, 2),), ours.nop, compile_region_name="block")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("compiler_config_extra", object()),
        ("disable_functionalization", True),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(option: str, value):
    with pytest.raises(BadSettings, match=f"`{option}` cannot be honoured"):
        ours.aot_module_simplified(Normed(), (data(4, 3),), ours.nop, **{option: value})


def test_it_serves_as_a_backend_of_dynamo_that_leaves_sizes_open():
    """Dynamo passes these as numbers beside the tensors that have them."""
    module, compilers = nn.Linear(3, 3), Compilers()

    def fn(x, scale):
        return module(x).sin() * scale, x.new_ones(x.size(0) + 1)

    def backend(gm, examples):
        return ours.aot_module_simplified(gm, examples, **compilers.all())

    torch.compiler.reset()
    compiled = torch.compile(fn, backend=backend, dynamic=True)
    for rows, scale in ((2, 3), (5, 3), (5, 4)):
        x = leaf(rows, 3)
        (out, ones), (expected, other) = compiled(x, scale), fn(x, scale)
        assert torch.equal(out, expected) and torch.equal(ones, other)
        grads = [torch.autograd.grad(loss.sum(), (x, *module.parameters())) for loss in (out, expected)]
        assert all(map(torch.equal, *grads))
    assert compilers.counts() == {"forward": 2, "backward": 2}, "one for each scale, which is no size"
    weight, bias, given, *sizes = compilers.examples["forward"][0]
    assert [*weight.shape, *bias.shape] == [3, 3, 3]
    assert isinstance(given.size(0), torch.SymInt) and str(given.size(0)) in map(str, sizes)
    torch.compiler.reset()


def test_it_serves_as_a_backend_of_dynamo():
    compilers, module = Compilers(), nn.Linear(3, 3)

    def backend(gm, examples):
        return ours.aot_module_simplified(gm, examples, **compilers.all())

    torch.compiler.reset()
    compiled = torch.compile(lambda x: module(x).sin(), backend=backend)
    x = leaf(2, 3)
    out = compiled(x)
    out.sum().backward()
    expected = torch.autograd.grad(module(x).sin().sum(), x)[0]
    assert torch.equal(out, module(x).sin()) and torch.equal(x.grad, expected)
    assert compilers.counts() == {"forward": 1, "backward": 1}
    torch.compiler.reset()
