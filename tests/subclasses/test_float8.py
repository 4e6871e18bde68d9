"""Linear layers that multiply in 8 bits: compiled they are what they are eagerly, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.fx
from torch import nn
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.errors import BadSettings, UnsupportedProgram
from tests.subclasses.float8_models import CONVERTED, OWN, RECIPES, Net, batch, different, make, pair
from tests.subclasses.fsdp_models import same_bits

INPUT, WEIGHT, GRAD = 0, 1, 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_the_same_bit_for_bit(recipe: str, dtype: torch.dtype) -> None:
    eager, compiled = pair(recipe, dtype)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (eager, compiled)]
    for step in range(4):
        inputs = batch(step, dtype), batch(step, dtype)
        outs = [model(x) for model, x in zip((eager, compiled), inputs, strict=True)]
        for out in outs:
            out.float().square().mean().backward()
        assert same_bits(*outs) and same_bits(inputs[0].grad, inputs[1].grad)
        assert not (names := different(eager, compiled)), (step, names)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(compiled.graphs) == 1


@pytest.mark.parametrize("order", ["ffbb", "ffllfb", "frrbfb", "nfnb", "effbb"])
@pytest.mark.parametrize("recipe", OWN)
def test_calls_and_backwards_in_any_order(recipe: str, order: str) -> None:
    """f: forward, b: backward of the oldest, l: of the latest, r: and keep it, n: no grad, e: evaluation."""
    eager, compiled = pair(recipe)
    losses: list[list[torch.Tensor]] = []
    for step, what in enumerate(order):
        if what == "f":
            losses.append([model(batch(step)).square().mean() for model in (eager, compiled)])
            assert same_bits(*losses[-1])
        elif what in "ne":
            with torch.no_grad():
                outs = [model.train(what == "n")(batch(step)) for model in (eager, compiled)]
            assert same_bits(*outs)
            [model.train() for model in (eager, compiled)]
        else:
            of_both = losses[0] if what == "r" else losses.pop(-1 if what == "l" else 0)
            for loss in of_both:
                loss.backward(retain_graph=what == "r")
        assert not (names := different(eager, compiled)), (step, what, names)


@pytest.mark.parametrize("recipe", RECIPES)
def test_casts_are_nodes_of_the_graph(recipe: str) -> None:
    _, compiled = pair(recipe)
    compiled(batch(0)).sum().backward()
    for graph in compiled.graphs[0].values():
        dtypes = {str(node.kwargs.get("dtype")) for node in graph.graph.nodes}
        assert dtypes & {"torch.float8_e4m3fn", "torch.float8_e5m2"}
    assert f"float8 ({recipe}): {', '.join(CONVERTED)}" in str(compiled.explain())


PRODUCTS = {
    "delayed": {
        "forward": [("aotdist.mm_scaled.default", True)],
        "backward": [("aotdist.mm_scaled.default", False)] * 2,
    },
    "blockwise": {
        "forward": [("aotdist.mm_blocks.default", False)],
        "backward": [("aotdist.mm_blocks.default", False)] * 2,
    },
}
"""What multiplies, and whether it may add with fewer bits than fp32."""


@pytest.mark.parametrize("recipe", OWN)
def test_only_a_forward_accumulates_fast(recipe: str) -> None:
    layer = aotdist.compile(linear(recipe)[0], backend="fx")
    layer(torch.randn(5, 32, requires_grad=True)).sum().backward()
    (graphs,) = layer.graphs
    assert {kind: products(graphs[kind]) for kind in ("forward", "backward")} == PRODUCTS[recipe]


def products(graph: torch.fx.GraphModule) -> list[tuple[str, bool]]:
    """Operators that multiply matrices, and whether each accumulates fast."""
    return [
        (str(node.target), node.args[-1] is True)
        for node in graph.graph.nodes
        if str(node.target).partition(".")[2].startswith("mm")
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_under_autocast(recipe: str) -> None:
    eager, compiled = pair(recipe)
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            outs = [model(batch(step)) for model in (eager, compiled)]
        assert outs[0].dtype == torch.bfloat16 and same_bits(*outs)
        for out in outs:
            out.float().mean().backward()
        assert eager.up.weight.grad.dtype == torch.float32
        assert not different(eager, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", OWN)
def test_with_inductor(recipe: str) -> None:
    """Its products are the same kernels; what it fuses around them differs in rounding."""
    eager, compiled = make(recipe), aotdist.compile(make(recipe), backend="inductor")
    for step in range(2):
        outs = [model(batch(step)) for model in (eager, compiled)]
        for out in outs:
            out.square().mean().backward()
        torch.testing.assert_close(*outs, rtol=1e-3, atol=1e-4)
    for (name, p), (_, q) in zip(eager.named_parameters(), compiled.named_parameters(), strict=True):
        if p.grad is not None:
            assert (p.grad - q.grad).norm() <= 1e-3 * p.grad.norm(), name


@pytest.mark.parametrize("shape", [(32,), (1, 32), (0, 32), (2, 0, 32)])
@pytest.mark.parametrize("recipe", OWN)
def test_shapes_of_inputs(recipe: str, shape: tuple[int, ...]) -> None:
    eager, compiled = pair(recipe)
    inputs = [torch.ones(shape, requires_grad=True) for _ in range(2)]
    outs = [model(x) for model, x in zip((eager, compiled), inputs, strict=True)]
    assert outs[0].shape == (*shape[:-1], 10) and same_bits(*outs)
    for out in outs:
        out.sum().backward()
    assert same_bits(inputs[0].grad, inputs[1].grad) and not different(eager, compiled)


@pytest.mark.parametrize("recipe", OWN)
def test_gradients_of_gradients_are_refused(recipe: str) -> None:
    refused = "once_differentiable|cannot run its backward again"
    for model in pair(recipe):
        x = batch(0)
        loss = model(x).square().sum()
        with pytest.raises((RuntimeError, UnsupportedProgram), match=refused):
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            grad.square().sum().backward()


def linear(recipe: str, sizes: tuple[int, int] = (32, 48)) -> tuple[nn.Linear, nn.Linear]:
    """A converted layer, and the same one as it was."""
    plain = nn.Linear(*sizes)
    converted = copy.deepcopy(plain)
    aotdist.to_float8(converted, recipe)
    return converted, plain


def test_delayed_is_exact_where_nothing_is_rounded() -> None:
    """Small whole numbers are numbers of both formats if scales are 1."""
    converted, plain = linear("delayed")
    converted.amax_history.copy_(torch.tensor([448.0, 448.0, 57344.0])[:, None].expand(3, 17))
    with torch.no_grad():
        for layer in (converted, plain):
            layer.weight.copy_(torch.arange(48 * 32).reshape(48, 32) % 31 - 15)
    inputs = [(torch.arange(5 * 32.0).reshape(5, 32) % 29 - 14).requires_grad_() for _ in range(2)]
    cotangent = torch.arange(5 * 48.0).reshape(5, 48) % 13 - 6
    outs = [layer(x) for layer, x in zip((converted, plain), inputs, strict=True)]
    for out in outs:
        out.backward(cotangent)
    assert torch.equal(*outs) and torch.equal(inputs[0].grad, inputs[1].grad)
    assert torch.equal(converted.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("recipe", RECIPES)
def test_close_to_full_precision(recipe: str) -> None:
    """Three bits of mantissa: a relative error of 2**-4 at most an operand, and 2**-3 for e5m2."""
    converted, plain = linear(recipe, (256, 192))
    for _ in range(2):  # delayed scaling has seen nothing the first time
        x = torch.randn(200, 256)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for layer, leaf in zip((converted, plain), inputs, strict=True):
            layer.zero_grad()
            layer(leaf).square().mean().backward()
    for got, want in ((inputs[0].grad, inputs[1].grad), (converted.weight.grad, plain.weight.grad)):
        assert 1e-4 < (got - want).norm() / want.norm() < 0.08


@pytest.mark.parametrize("recipe", OWN)
def test_results_lie_as_those_of_a_linear_layer(recipe: str) -> None:
    """Blocks that 128 does not fill leave no gaps."""
    layers = linear(recipe, (48, 144))
    for layer in layers:
        layer.bias = None
        layer(torch.randn(5, 48)).view(-1).sum().backward()
    assert layers[0].weight.grad.stride() == layers[1].weight.grad.stride()
    assert layers[0].weight.grad.untyped_storage().nbytes() == layers[0].weight.nbytes


def test_blocks_keep_outliers_to_themselves() -> None:
    """1e6 beside numbers near 1: with one scale for all, those would be rounded to zero."""
    converted, plain = linear("blockwise", (256, 128))
    x = torch.randn(4, 256)
    x[0, 0] = 1e6
    got, want = converted(x), plain(x)
    assert ((got - want)[1:].norm() / want[1:].norm()) < 0.06


def test_amax_history() -> None:
    converted, _ = linear("delayed")
    history = converted.amax_history
    assert history.shape == (3, 17)
    assert (history[WEIGHT] == converted.weight.abs().max()).all() and not history[[INPUT, GRAD]].any()
    for step in range(1, 4):
        x = torch.full((16, 32), -float(step))
        converted(x).backward(torch.full((16, 48), 0.5 * step))
        assert history[INPUT, :step].tolist() == [float(s) for s in range(step, 0, -1)]
        assert history[GRAD, :step].tolist() == [0.5 * s for s in range(step, 0, -1)]
    before = history.clone()
    converted.eval()(x)
    assert torch.equal(history, before)


def test_an_overflow_does_not_spoil_later_scales() -> None:
    converted, _ = linear("delayed")
    for worst in (float("inf"), float("nan")):
        converted(torch.full((16, 32), worst))
        assert converted.amax_history[INPUT, 0] == 0
    assert converted(torch.ones(16, 32)).isfinite().all()


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("recipe", OWN)
def test_activation_checkpointing_casts_as_before(recipe: str) -> None:
    plain, compiled = pair(recipe)
    eager = make(recipe)
    for model in (eager, compiled):
        model.__class__ = Checkpointed
    for step in range(3):
        for model in (plain, eager, compiled):
            model(batch(step)).square().mean().backward()
        assert not (names := different(plain, eager)), (step, names)
        assert not (names := different(plain, compiled)), (step, names)


def test_converted_after_it_was_compiled() -> None:
    torch.manual_seed(0)
    model = aotdist.compile(Net(), backend="fx")
    plain = model(batch(0))
    handle = aotdist.to_float8(model, "delayed")
    assert same_bits(model(batch(0)), make("delayed")(batch(0)))
    handle.undo()
    assert same_bits(model(batch(0)), plain)
    assert len(model.graphs) == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_undo_gives_the_very_layers_back(recipe: str) -> None:
    torch.manual_seed(0)
    model = Net()
    seen: list[str] = []
    model.up.register_forward_hook(lambda *_: seen.append("up"))
    before = {name: vars(module).copy() for name, module in model.named_modules()}
    params, modules, state = dict(model.named_parameters()), list(model.modules()), list(model.state_dict())
    handle = aotdist.to_float8(model, recipe)
    assert handle.converted == CONVERTED
    assert dict(handle.skipped) == {"head": "is 10 x 32, which 16 does not divide"}
    assert "skipped head: is 10 x 32" in str(handle) and recipe in str(handle)
    assert list(model.modules()) == modules and type(model.up) is not nn.Linear
    model(batch(0)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    handle.undo()
    assert seen == ["up"]
    assert all(param is params[name] for name, param in model.named_parameters())
    assert list(model.state_dict()) == state and type(model.up) is nn.Linear
    assert {name: vars(module).keys() for name, module in model.named_modules()} == {
        name: attributes.keys() for name, attributes in before.items()
    }
    assert torch.equal(model.mix(batch(0)), nn.functional.linear(batch(0), model.mix.weight, model.mix.bias))
    with pytest.raises(BadSettings, match="`up` is a Linear now"):
        handle.undo()


def test_filter_and_a_layer_alone() -> None:
    model = Net()
    handle = aotdist.to_float8(model, "blockwise", filter=lambda path, layer: path.startswith("mix"))
    assert handle.converted == ("mix", "mix_again")
    assert handle.skipped["up"] == "was left out by the filter"
    assert aotdist.to_float8(nn.Linear(16, 16), "delayed").converted == ("(root)",)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Linear(24, 16), "`.root.` is 16 x 24, which 16 does not divide"),
        (nn.Linear(16, 40), "`.root.` is 40 x 16, which 16 does not divide"),
        (nn.Linear(16, 16).double(), "has weights of torch.float64"),
        (nn.Sequential(Scaled(16, 16)), "`0` is a Scaled, whose forward may be another"),
        (make("blockwise").mix, "is float8 .blockwise. already"),
        (nn.Linear(16, 16, device="meta"), "`.root.` is on the meta device"),
        (nn.LayerNorm(16), "pass a module with `nn.Linear` layers"),
    ],
)
def test_what_cannot_be_converted(module: nn.Module, reason: str) -> None:
    with pytest.raises(BadSettings, match=reason):
        aotdist.to_float8(module, "delayed")


def test_an_unknown_recipe() -> None:
    with pytest.raises(BadSettings, match="'mxfp8' is no FP8 recipe.*\n.*choose one of tensorwise"):
        aotdist.to_float8(Net(), "mxfp8")


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    import aotdist.subclasses.float8 as adapter

    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(adapter.importlib, "import_module", missing)
    model = Net()
    with pytest.raises(BadSettings, match="cannot be imported.*torchao.*\n.*aotdist.fp8."):
        aotdist.to_float8(model, "rowwise")
    assert type(model.up) is nn.Linear


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # as `no_dist` asks
@pytest.mark.parametrize("recipe", RECIPES)
def test_state_dict_is_in_high_precision(recipe: str, tmp_path: Path) -> None:
    trained = make(recipe)
    trained(batch(0)).square().mean().backward()
    torch.optim.SGD(trained.parameters(), 0.1).step()
    state = trained.state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32}
    histories = {f"{path}.amax_history" for path in CONVERTED} if recipe == "delayed" else set()
    assert state.keys() - Net().state_dict().keys() == histories
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    resumed = make(recipe)
    wanted = resumed.state_dict()
    dcp.load(wanted, checkpoint_id=tmp_path, no_dist=True)
    resumed.load_state_dict(wanted)
    trained.zero_grad()
    for model in (trained, resumed):
        model(batch(1)).square().mean().backward()
    assert not different(trained, resumed)


def test_loads_what_was_saved_before_it_was_converted() -> None:
    plain = Net()
    converted = make("delayed")
    converted.load_state_dict(plain.state_dict())
    assert torch.equal(converted.up.weight, plain.up.weight)
