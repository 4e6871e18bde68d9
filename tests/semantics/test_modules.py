"""Modules of every kind, and everything that may be done to a module between two calls."""

from __future__ import annotations

import copy
import io
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils import _pytree as pytree

import aotdist
from aotdist.api import compiled_call
from aotdist.errors import UnsupportedProgram
from tests.semantics.observation import Scene, assert_same, play, same_as_eager


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.blocks = nn.ModuleDict({"a": self.linear, "b": nn.Sequential(self.linear, nn.ReLU())})

    def forward(self, x):
        return self.blocks["b"](self.blocks["a"](x)) + self.linear(x)


class WithCounter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(4), persistent=False)

    def forward(self, x):
        self.steps = self.steps + 1
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.1)
        return (x - self.average) * self.weight / self.steps


class KeyValueCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.register_buffer("keys", torch.zeros(8, 4))

    def forward(self, x, start: int):
        keys = self.project(x)
        self.keys[start : start + len(x)] = keys.detach()
        return x @ self.keys[: start + len(x)].t()


class FrozenHalf(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.requires_grad_(False)

    def forward(self, x):
        return self.second(self.first(x).relu())


class LayerScale(nn.Module):
    """Channels-last images, a weight for each channel, and their average, as at the end of ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.scale = nn.Linear(384, 384), nn.Parameter(torch.randn(384, 1, 1))
        self.head = nn.Linear(384, 5)

    def forward(self, x):
        images = self.mix(x).permute(0, 3, 1, 2) * self.scale
        return self.head(F.adaptive_avg_pool2d(images, 1).flatten(1))


def batch(*size: int) -> torch.Tensor:
    return torch.randn(*(size or (6, 4)), requires_grad=True)


def tokens() -> torch.Tensor:
    return torch.tensor([[1, 2, 0], [3, 3, 6]])


MODULES: dict[str, Callable[[], Scene]] = {
    "linear": lambda: Scene(nn.Linear(4, 3), (batch(),)),
    "convolution": lambda: Scene(nn.Conv2d(3, 4, 3, padding=1), (batch(2, 3, 5, 5),)),
    "channels last": lambda: Scene(
        nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        (torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last),),
    ),
    "an average of channels-last images": lambda: Scene(LayerScale(), (batch(2, 2, 2, 384),)),
    "batch norm": lambda: Scene(nn.BatchNorm1d(4), (batch(),)),
    "batch norm of images": lambda: Scene(nn.BatchNorm2d(3), (batch(2, 3, 4, 4),)),
    "batch norm without statistics": lambda: Scene(nn.BatchNorm1d(4, track_running_stats=False), (batch(),)),
    "batch norm in eval": lambda: Scene(nn.BatchNorm1d(4).eval(), (batch(),)),
    "instance norm": lambda: Scene(nn.InstanceNorm1d(3, track_running_stats=True), (batch(2, 3, 5),)),
    "layer norm": lambda: Scene(nn.LayerNorm(4), (batch(),)),
    "group norm": lambda: Scene(nn.GroupNorm(2, 4), (batch(),)),
    "rms norm": lambda: Scene(nn.RMSNorm(4), (batch(),)),
    "dropout": lambda: Scene(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), (batch(),)),
    "embedding": lambda: Scene(nn.Embedding(7, 4, padding_idx=0), (tokens(),)),
    "embedding that renorms": lambda: Scene(nn.Embedding(7, 4, max_norm=0.5), (tokens(),)),
    "embedding bag": lambda: Scene(nn.EmbeddingBag(7, 4), (tokens(),)),
    "tied weights": lambda: Scene(Tied(), (tokens(),)),
    "a module called twice": lambda: Scene(CalledTwice(), (batch(),)),
    "counters": lambda: Scene(WithCounter(), (batch(),)),
    "a frozen half": lambda: Scene(FrozenHalf(), (batch(),)),
    "gated recurrent": lambda: Scene(nn.GRU(4, 3, num_layers=2, batch_first=True), (batch(2, 5, 4),)),
    "attention": lambda: Scene(nn.MultiheadAttention(4, 2, batch_first=True), (batch(2, 5, 4),) * 3),
    "transformer": lambda: Scene(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (batch(2, 5, 4),)),
    "spectral norm": lambda: Scene(parametrizations.spectral_norm(nn.Linear(4, 4)), (batch(),)),
    "weight norm": lambda: Scene(parametrizations.weight_norm(nn.Linear(4, 4)), (batch(),)),
    "orthogonal": lambda: Scene(parametrizations.orthogonal(nn.Linear(4, 4)), (batch(),)),
    "in place": lambda: Scene(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), (batch(),)),
    "no parameters": lambda: Scene(nn.Sequential(nn.ReLU(), nn.Flatten()), (batch(),)),
    "double precision": lambda: Scene(nn.Linear(4, 3).double(), (batch().double(),)),
    "bfloat16": lambda: Scene(nn.Linear(4, 3).bfloat16(), (torch.randn(2, 4).bfloat16(),)),
}


@pytest.mark.parametrize("name", MODULES)
def test_each_kind_of_module(name):
    same_as_eager(MODULES[name], calls=3, compilations=None)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "transformer"])
def test_each_kind_of_module_without_gradients(name):
    """A transformer layer in eval mode takes another way in eager, where nothing is overridden."""
    same_as_eager(MODULES[name], calls=2, compilations=None, around=torch.no_grad)


def test_one_artifact_is_enough():
    for name in ("batch norm", "dropout", "counters", "tied weights", "spectral norm", "a frozen half"):
        same_as_eager(MODULES[name], calls=4, compilations=1)


def test_a_cache_written_at_a_moving_place():
    def build():
        model = KeyValueCache()
        return [Scene(model, (torch.randn(2, 4), start)) for start in (0, 2, 4)]

    same_as_eager(build, compilations=2)


def test_an_average_over_all_batches_is_refused_by_its_line():
    with pytest.raises(UnsupportedProgram) as raised:
        aotdist.compile(nn.BatchNorm1d(4, momentum=None), backend="fx")(batch())
    assert "read off a tensor" in str(raised.value)
    shown = "".join(traceback.format_exception(raised.value))
    assert "batchnorm.py" in shown and "num_batches_tracked" in shown


# --- what is done to a module between two calls ---------------------------------------------------


class Doubling(nn.Module):
    def forward(self, weight):
        return weight * 2


def network() -> nn.Sequential:
    layers = nn.BatchNorm1d(4), nn.LeakyReLU(0.1), nn.Dropout(0.5)
    return nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 4, bias=False))


def step(model: nn.Module) -> None:
    """What an optimizer does: a gradient, an update in place."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(6, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def removed(register: Callable[..., Any], *args: Any) -> None:
    register(*args).remove()


def tie(model: nn.Module) -> None:
    model[4].weight = model[0].weight


def load(model: nn.Module, **options: Any) -> None:
    state = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    model.load_state_dict(state, **options)


def widen(model: nn.Module) -> None:
    model[4] = nn.Linear(4, 9)


def double(x: Any, *rest: Any) -> Any:
    return x * 2


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda m: None,
    "an optimizer step": step,
    "eval": lambda m: m.eval(),
    "eval of one": lambda m: m[3].eval(),
    "eval and back": lambda m: m.eval().train(),
    "a written parameter": lambda m: m[0].weight.data.fill_(0.25),
    "a replaced parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(4, 4))),
    "replaced data": lambda m: setattr(m[0].weight, "data", torch.ones(4, 4)),
    "a parameter removed": lambda m: setattr(m[0], "bias", None),
    "tied weights": tie,
    "load_state_dict": load,
    "load_state_dict by assignment": lambda m: load(m, assign=True),
    "a replaced buffer": lambda m: setattr(m[1], "running_mean", torch.ones(4)),
    "statistics reset": lambda m: m[1].reset_running_stats(),
    "a constant attribute": lambda m: setattr(m[2], "negative_slope", 0.7),
    "a constant attribute of dropout": lambda m: setattr(m[3], "p", 0.1),
    "a swapped submodule": lambda m: m.__setitem__(2, nn.Sigmoid()),
    "a wider submodule": widen,
    "an appended submodule": lambda m: m.append(nn.Tanh()),
    "a deleted submodule": lambda m: m.__delitem__(3),
    "a forward hook": lambda m: m[0].register_forward_hook(lambda module, args, output: output * 2),
    "a forward hook of the root": lambda m: m.register_forward_hook(lambda module, args, output: output * 2),
    "a forward pre-hook": lambda m: m[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "a backward hook": lambda m: m[0].register_full_backward_hook(lambda m, gi, go: tuple(map(double, gi))),
    "a backward pre-hook": lambda m: m[2].register_full_backward_pre_hook(lambda m, go: (go[0] * 2,)),
    "a hook that is removed": lambda m: removed(m[0].register_forward_hook, lambda m, a, o: o * 2),
    "a hook on a parameter": lambda m: m[0].weight.register_hook(double),
    "a parametrization": lambda m: parametrize.register_parametrization(m[0], "weight", Doubling()),
    "a parameter where there was none": lambda m: setattr(m[4], "bias", nn.Parameter(torch.ones(4))),
    "frozen parameters": lambda m: m[0].requires_grad_(False),
    "frozen parameters, thawed": lambda m: m[0].requires_grad_(False).requires_grad_(True),
    "another dtype": lambda m: m.double(),
    "zero_grad": lambda m: m.zero_grad(),
    "its forward replaced": lambda m: setattr(m[2], "forward", torch.sin),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_followed(name):
    """The second call and the third see the change; the first and the last artifact are used again."""
    sights = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = network()
        if compiles:
            aotdist.compile(model, backend="fx")
        sights.append([])
        for change in (lambda m: None, CHANGES[name], lambda m: None):
            change(model)
            dtype = next(model.parameters()).dtype
            torch.manual_seed(1)
            x = torch.ones(6, 4, dtype=dtype).cumsum(0).requires_grad_()
            sights[-1] += play(Scene(model, (x,)), model)
    assert_same(*sights)


def test_functions_that_a_librarys_module_calls_may_be_replaced() -> None:
    scale = 2.0

    def absolute(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a - b).abs().sum(-1) * scale

    loss = nn.TripletMarginWithDistanceLoss(distance_function=absolute)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    x, others = torch.randn(3, 2, 4), torch.randn(2, 3, 2, 4)

    def program(x: torch.Tensor) -> torch.Tensor:
        return loss(layer(x), *others)

    compiled = aotdist.compile(program, backend="fx")
    assert torch.equal(compiled(x), program(x))
    layer.activation = F.gelu
    assert torch.equal(compiled(x), program(x))
    scale = 3.0
    assert torch.equal(compiled(x), program(x))
    loss.distance_function = F.pairwise_distance
    assert torch.equal(compiled(x), program(x))
    assert len(compiled.artifacts) == 4


COMPILE_NOTHING = (
    "nothing",
    "an optimizer step",
    "a written parameter",
    "a replaced parameter",
    "replaced data",
    "load_state_dict",
    "load_state_dict by assignment",
    "a replaced buffer",
    "statistics reset",
    "a hook that is removed",
    "a hook on a parameter",
    "frozen parameters, thawed",
    "eval and back",
    "zero_grad",
)


@pytest.mark.parametrize("name", COMPILE_NOTHING)
def test_a_change_of_values_compiles_nothing(name):
    model = aotdist.compile(network(), backend="fx")
    model(torch.ones(6, 4))
    CHANGES[name](model)
    model(torch.ones(6, 4))
    assert len(compiled_call(model).artifacts) == 1


class Everything(nn.Module):
    """It goes through all of its state, and that of a module that it closes over."""

    def __init__(self, look: Callable[[Everything], Any]) -> None:
        super().__init__()
        self.look = look
        self.held = nn.ParameterDict({"a": nn.Parameter(torch.ones(4))})
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_parameter("unset", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.look(self)


LOOKS: dict[str, Callable[[Everything], Any]] = {
    "values of a dictionary": lambda m: sum(m.held.values()),
    "the length of a dictionary": lambda m: len(m.held),
    "whether a dictionary has it": lambda m: 3 if "b" in m.held else 2,
    "parameters": lambda m: sum(p.sum() for p in m.parameters()),
    "buffers": lambda m: sum(b.sum() for b in m.buffers()),
    "names of buffers": lambda m: len([name for name, _ in m.named_buffers()]),
    "the state": lambda m: sum(t.sum() for t in m.state_dict().values()),
}

REGISTER: dict[str, Callable[[Everything], Any]] = {
    "in a dictionary": lambda m: m.held.update({"b": leaf_of(5.0)}),
    "a parameter of a child": lambda m: m.layer.register_parameter("more", nn.Parameter(torch.ones(4))),
    "the first buffer of a child": lambda m: m.layer.register_buffer("more", torch.ones(4)),
    "a second buffer": lambda m: m.register_buffer("more", torch.ones(4)),
    "no more in the state": lambda m: m._non_persistent_buffers_set.add("scale"),
    "another unset one": lambda m: (m.__delattr__("unset"), m.register_parameter("new", leaf_of(7.0))),
    "taken away": lambda m: m.__delattr__("scale"),
}


def leaf_of(value: float) -> nn.Parameter:
    return nn.Parameter(torch.full((4,), value))


@pytest.mark.parametrize("how", REGISTER)
@pytest.mark.parametrize("look", LOOKS)
def test_what_is_registered_later_is_noticed(look: str, how: str) -> None:
    sights = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = Everything(LOOKS[look])
        call = aotdist.compile(lambda x, model=model: model(x), backend="fx") if compiles else model
        sights.append([])
        for change in (lambda m: None, REGISTER[how], lambda m: None):
            change(model)
            sights[-1] += play(Scene(model, (torch.ones(4, requires_grad=True),)), call)
    assert_same(*sights)


def test_going_back_finds_the_old_artifact():
    model = aotdist.compile(network(), backend="fx")
    for _ in range(3):
        model.train()(torch.ones(6, 4))
        model.eval()(torch.ones(6, 4))
    assert len(compiled_call(model).artifacts) == 2


# --- what stays as it is --------------------------------------------------------------------------


def test_everything_about_a_module_stays():
    model = network()
    parameters, keys, hooks = list(model.parameters()), list(model.state_dict()), dict(model._forward_hooks)
    assert aotdist.compile(model, backend="fx") is model
    model(torch.ones(6, 4)).sum().backward()
    assert type(model) is nn.Sequential and isinstance(model[0], nn.Linear)
    assert list(model.state_dict()) == keys and dict(model._forward_hooks) == hooks
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert repr(model) == repr(network())


def test_a_compiled_module_can_be_copied_saved_and_pickled():
    model = aotdist.compile(network().eval(), backend="fx")
    x = torch.ones(6, 4)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    for twin in copies:
        assert type(twin) is nn.Sequential and torch.equal(twin(x), expected)
        assert twin.source == "" and twin.graphs == []
        again = aotdist.compile(twin, backend="fx")
        assert torch.equal(again(x), expected) and again.source != ""


def test_a_copy_does_not_write_to_the_original():
    model = aotdist.compile(nn.BatchNorm1d(4), backend="fx")
    model(torch.randn(6, 4))
    twin = aotdist.compile(copy.deepcopy(model), backend="fx")
    before = model.running_mean.clone()
    twin(torch.randn(6, 4))
    assert torch.equal(model.running_mean, before) and not torch.equal(twin.running_mean, before)


def test_attributes_of_these_names_are_the_users():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.source = "mine"

        def explain(self):
            return "also mine"

        def forward(self, x):
            return x * 2

    model = aotdist.compile(Named(), backend="fx")
    model(torch.ones(1))
    assert model.source == "mine" and model.explain() == "also mine"
    assert "def call" in compiled_call(model).source


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rest = nn.Linear(4, 4), nn.ModuleList()

    def forward(self, x):
        x = self.first(x)
        for layer in self.rest:
            x = layer(x)
        return x


def test_a_list_that_was_empty_may_grow():
    model = aotdist.compile(Growing(), backend="fx")
    model(torch.ones(2, 4))
    model.rest.append(nn.Linear(4, 3))
    assert model(torch.ones(2, 4)).shape == (2, 3)


def test_a_submodule_may_be_compiled_alone():
    def build():
        model = network()
        return Scene(model, (torch.randn(6, 4),))

    eager, ours = build(), build()
    eager.fn.load_state_dict(eager.fn.state_dict())
    ours.fn.load_state_dict(eager.fn.state_dict())
    for block in ours.fn:
        aotdist.compile(block, backend="fx")
    torch.manual_seed(0)
    first = play(Scene(eager.fn, (torch.ones(6, 4),)), eager.fn)
    torch.manual_seed(0)
    assert_same(first, play(Scene(ours.fn, (torch.ones(6, 4),)), ours.fn))
    assert all(len(compiled_call(block).artifacts) == 1 for block in ours.fn)


def test_a_compiled_submodule_becomes_part_of_what_compiles_it():
    model = network()
    aotdist.compile(model[0], backend="fx")
    aotdist.compile(model, backend="fx")(torch.ones(6, 4))
    assert len(compiled_call(model[0]).artifacts) == 0 and len(compiled_call(model).artifacts) == 1


def test_compiling_again_starts_anew():
    model = aotdist.compile(network(), backend="fx")
    model(torch.ones(6, 4))
    aotdist.compile(model, backend="fx")
    assert len(compiled_call(model).artifacts) == 0
    model(torch.ones(6, 4))
    assert len(compiled_call(model).artifacts) == 1


ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.MultiheadAttention(16, 4, batch_first=True),
    "a layer": lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
    "an encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2),
    "a transformer": lambda: nn.Transformer(16, 4, 2, 2, 32, batch_first=True),
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_attention_in_evaluation(name: str, masked: bool, grad: bool) -> None:
    """By the path that eager takes: one operator for a layer, where no gradient is asked for."""
    x, mask = torch.randn(2, 5, 16), torch.ones(5, 5, dtype=torch.bool).triu(1) if masked else None
    given: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {
        "attention": ((x, x, x), {"attn_mask": mask, "need_weights": False}),
        "a layer": ((x,), {"src_mask": mask}),
        "an encoder": ((x,), {"mask": mask, "is_causal": False}),
        "a transformer": ((x, x), {"src_mask": mask, "src_is_causal": False}),
    }
    model = ATTENTION[name]().eval()
    args, kwargs = given[name]
    with torch.set_grad_enabled(grad):
        expected = model(*args, **kwargs)
        found = aotdist.compile(model, backend="fx")(*args, **kwargs)
    leaves = ([leaf for leaf in pytree.tree_leaves(made) if leaf is not None] for made in (found, expected))
    for ours, theirs in zip(*leaves, strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


PADDING = {
    "at the end": [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]],
    "nowhere": [[0] * 5] * 3,
    "at the beginning": [[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]],
}


def padded_encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, **options).eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@torch.no_grad()
def test_padded_batches_in_evaluation() -> None:
    """Eager packs a batch with its padding at the end, and returns zeros there; here layers get the mask."""
    model = padded_encoder()
    compiled = aotdist.compile(lambda x, mask: model(x, src_key_padding_mask=mask), backend="fx")
    for name, padding in PADDING.items():
        x, mask = torch.randn(3, 5, 16), torch.tensor(padding, dtype=torch.bool)
        expected, found = model(x, src_key_padding_mask=mask), compiled(x, mask)
        torch.testing.assert_close(found[~mask], expected[~mask])
        if name == "at the end":
            assert found[mask].any() and not expected[mask].any()
        elif name == "at the beginning":
            assert torch.equal(found, expected)
    assert len(compiled.artifacts) == 1


@torch.no_grad()
def test_an_encoder_that_packs_without_asking_is_refused() -> None:
    model = padded_encoder(mask_check=False)
    with pytest.raises(UnsupportedProgram, match="makes a nested tensor of a padded batch"):
        aotdist.compile(model, backend="fx")(torch.randn(3, 5, 16), src_key_padding_mask=torch.ones(3, 5) > 1)


@pytest.mark.parametrize("cls", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("inner", [False, True])
def test_recurrent_layers_keep_the_list_of_their_weights(cls: type[nn.RNNBase], inner: bool) -> None:
    """They make it anew when they see other weights than at the last call, as capture hangs there."""
    layer = cls(3, 4, num_layers=2)
    weights, references = layer._flat_weights, layer._flat_weight_refs
    compiled = aotdist.compile(nn.Sequential(layer) if inner else layer, backend="fx")
    for _ in range(2):
        compiled(torch.randn(5, 2, 3))
    assert layer._flat_weights is weights and layer._flat_weight_refs is references
    same_as_eager(
        lambda: Scene(nn.Sequential(cls(3, 4)) if inner else cls(3, 4), (torch.randn(5, 2, 3),)), calls=3
    )


def test_a_recurrent_layer_called_with_other_weights() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(3, 4)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = {name: weight * self.scale for name, weight in self.layer.named_parameters()}
            return torch.func.functional_call(self.layer, weights, (x,))[0] + self.layer(x)[0]

    same_as_eager(lambda: Scene(Scaled(), (torch.randn(5, 2, 3),)), calls=3, compilations=None)
