"""What is frozen computes what eager computes, and constants are computed once."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.freezing import folding
from aotdist.torch_seam.groups import fake_world
from aotdist.torch_seam.trees import pytree
from tests.freezing.models import graph_of, resnet, targets

fx = functools.partial(aotdist.freeze, backend="fx")


def assert_same(found, wanted) -> None:
    found, spec = pytree.tree_flatten(found)
    wanted, wanted_spec = pytree.tree_flatten(wanted)
    assert spec == wanted_spec
    for a, b in zip(found, wanted, strict=True):
        if isinstance(b, torch.Tensor):
            assert torch.equal(a, b) and a.stride() == b.stride() and not a.requires_grad
        else:
            assert a == b


class Casts(nn.Module):
    """Weights are cast, transposed, normalised and quantised by the program itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8))
        self.register_buffer("table", torch.arange(16.0))

    def forward(self, x):
        weight = self.weight / self.weight.norm(dim=1, keepdim=True)
        scale = weight.abs().amax() / 448
        quantised = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        angles = torch.outer(self.table, torch.arange(4.0)).cos().repeat(1, 2)
        return (x @ quantised.to(torch.bfloat16).t().to(x.dtype)) * scale + (x * angles[: len(x)]).sum()


def test_constants_are_computed_once():
    module, x = Casts().eval(), torch.randn(5, 8)
    frozen = fx(module)
    assert_same(frozen(x), module(x).detach())
    assert set(targets(frozen)) == {
        f"aten.{name}" for name in ("mm.default", "mul.Tensor", "add.Tensor", "sum.default")
    }
    assert not frozen(x).requires_grad


def test_a_resnet_is_eagers_bit_for_bit():
    module, x = resnet()
    frozen = fx(module)
    assert_same(frozen(x), pytree.tree_map(torch.Tensor.detach, module(x)))
    assert targets(frozen)["aten._native_batch_norm_legit_no_training.default"] == 6


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        max_position_embeddings=64,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def test_a_llama_is_eagers_bit_for_bit(llama):
    frozen = fx(llama)
    for size in ((2, 16), (3, 24)):
        ids = torch.randint(97, size)
        with torch.no_grad():
            assert_same(frozen(input_ids=ids), llama(input_ids=ids))
    found = targets(frozen)
    # Rotary tables are constants, and so are transposed weights.
    assert not {"aten.cos.default", "aten.sin.default", "aten.t.default"} & set(found)
    # What constants hold is the parameters, and tables that are as long as the sequence.
    assert frozen.constant_bytes < 1.1 * sum(parameter.nbytes for parameter in llama.parameters())


def test_casts_of_autocast_are_constants(llama):
    ids, frozen = torch.randint(97, (2, 16)), fx(llama)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(frozen(ids), llama(ids))
    dtypes = [node.meta["val"].dtype for node in graph_of(frozen).graph.find_nodes(op="placeholder")]
    assert dtypes.count(torch.bfloat16) >= 15  # of each linear layer


def test_quantised_weights_of_a_converted_model_are_constants(llama):
    model, ids = copy.deepcopy(llama), torch.randint(97, (16, 16))
    aotdist.to_float8(model)
    frozen = fx(model)
    with torch.no_grad():
        assert_same(frozen(ids), model(ids))
    num_activations = 8  # query, key and value read the same, and so do the gate and what it gates
    assert targets(frozen)["aten.abs.default"] == num_activations


def test_symbolic_sizes_share_a_program_and_its_guards():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x):
            return self.linear(x).sin() if x.shape[0] > 4 else self.linear(x).cos()

    module = Branches().eval()
    frozen = fx(module, settings={"dynamic": True})
    for rows in (6, 9, 3, 4, 12):
        x = torch.randn(rows, 3)
        assert_same(frozen(x), module(x).detach())
    assert len(frozen.artifacts) == 2


class Everything(nn.Module):
    """Arguments and results of every kind."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("buffer", torch.ones(3))

    def forward(self, inputs, factor, *, mask=None):
        x = inputs["x"] * self.weight
        y = x.sin()
        constant = (self.weight * 2).exp()
        return {
            "views": (y, y.view(3, 1), inputs["x"].unsqueeze(0)),
            "same": inputs["x"],
            "number": factor * 2,
            "mask": mask,
            "constant": constant,
            "view of it": constant[1:],
            "buffer": self.buffer,
            "weights": [self.weight[:2]],
        }


def test_results_of_every_kind():
    module, x = Everything().eval(), torch.randn(3)
    frozen = fx(module)
    found = frozen({"x": x}, 3, mask=None)
    assert_same(found, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, module({"x": x}, 3)))
    y, view, of_input = found["views"]
    assert view._base is y or view.data_ptr() == y.data_ptr()
    assert of_input.data_ptr() == x.data_ptr() and found["same"] is x
    assert found["buffer"].data_ptr() == module.buffer.data_ptr()
    assert found["view of it"].data_ptr() == found["constant"].data_ptr() + 4


def test_results_that_are_constants_are_new_at_each_call():
    """Whoever gets one may write it."""
    module, x = Everything().eval(), torch.randn(3)
    frozen = fx(module)
    first = frozen({"x": x}, 3)["constant"]
    kept = first.clone()
    first.zero_()
    assert torch.equal(frozen({"x": x}, 3)["constant"], kept)


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, cache, x):
        cache[:, 1].copy_(self.linear(x))
        return cache, (cache * x[:, None]).sum()


def test_arguments_are_written():
    module = Writes().eval()
    frozen = fx(module)
    for mode in (torch.no_grad, torch.no_grad, torch.inference_mode):
        with mode():
            caches, x = [torch.zeros(3, 2) for _ in range(2)], torch.randn(3)
            wanted, found = module(caches[0], x), frozen(caches[1], x)
        assert torch.equal(caches[0], caches[1]) and found[0] is caches[1]
        assert torch.equal(found[1], wanted[1])


def test_random_numbers_are_drawn_at_each_call():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand(3)

    frozen, x = fx(Noisy().eval()), torch.zeros(3)
    torch.manual_seed(1)
    found = [frozen(x), frozen(x)]
    torch.manual_seed(1)
    assert torch.equal(found[0], torch.rand(3)) and torch.equal(found[1], torch.rand(3))


def test_tied_weights_are_one_constant():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    module[1].weight = module[0].weight
    frozen, x = fx(module), torch.randn(2, 4)
    assert_same(frozen(x), module(x).detach())
    assert frozen.constant_bytes == (16 + 4 + 4) * 4


def test_branches_in_the_graph():
    class Cond(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x):
            weight = self.weight.exp()
            return torch.cond(x.sum() > 0, lambda v: v * weight, lambda v: v - weight, (x,))

    module = Cond().eval()
    frozen = fx(module)
    for x in (torch.ones(3), -torch.ones(3)):
        with torch.no_grad():
            assert_same(frozen(x), module(x))


def test_a_constant_that_takes_more_memory_than_its_state_is_left(monkeypatch: pytest.MonkeyPatch):
    """Weights that are kept in eight bits stay there: what they stand for is computed at each call."""

    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.randint(-9, 9, (64, 64), dtype=torch.int8))

        def forward(self, x):
            return x @ self.weight.to(x.dtype).t()

    module, x = Quantised().eval(), torch.randn(2, 64)
    small = fx(module)
    assert_same(small(x), module(x))
    assert set(targets(small)) == {"aten.mm.default"}
    monkeypatch.setattr(folding, "FREE_BYTES", 0)
    large = fx(module)
    assert_same(large(x), module(x))
    assert large.constant_bytes == 64 * 64
    assert targets(large) == {"aten._to_copy.default": 1, "aten.t.default": 1, "aten.mm.default": 1}


def test_kinds_of_calls_share_constants():
    module = Casts().eval()
    frozen = fx(module)
    frozen(torch.randn(5, 8))
    held = frozen.constant_bytes
    frozen(torch.randn(7, 8))
    with torch.inference_mode():
        frozen(torch.randn(7, 8))
    assert len(frozen.artifacts) == 3
    assert frozen.constant_bytes == held


def test_arguments_compile_at_once(monkeypatch: pytest.MonkeyPatch):
    module, x = Casts().eval(), torch.randn(5, 8)
    frozen = fx(module, (x,))
    assert len(frozen.artifacts) == 1
    assert_same(frozen(x), module(x).detach())
    assert len(frozen.artifacts) == 1


def test_it_says_where_its_operators_come_from():
    frozen = fx(Casts().eval(), (torch.randn(5, 8),))
    (product,) = graph_of(frozen).graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert "x @ quantised" in product.meta["source"]
    assert "Casts" in str(frozen.explain())


@pytest.mark.slow
def test_inductor():
    module, x = resnet()
    frozen = aotdist.freeze(module, (x,), backend="inductor")
    found, wanted = frozen(x), module(x)
    for name in ("logits", "features"):
        torch.testing.assert_close(found[name], wanted[name].detach(), rtol=1e-4, atol=1e-5)
        assert found[name].stride() == wanted[name].stride()


# --- fake tensors ---------------------------------------------------------------------------------


def test_fake_tensors_are_frozen_in_their_mode():
    """What a program would hold, and compute, before there is memory for it."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode() as mode:
        module, x = resnet()
    frozen = fx(module, fold_batch_norms=True, channels_last=True)
    found = frozen(x)
    assert isinstance(found["logits"], FakeTensor) and found["logits"].fake_mode is mode
    assert found["features"].shape == (2, 16, 4, 4) and found["features"].is_contiguous()
    real, y = resnet()
    frozen_real = fx(real, (y,), fold_batch_norms=True, channels_last=True)
    assert targets(frozen) == targets(frozen_real)


def test_real_state_meets_fake_arguments():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    class Literals(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x) * torch.tensor([1.0, 2.0, 3.0]).exp()

    module = Literals().eval()
    frozen = fx(module)
    found = frozen(FakeTensorMode().from_tensor(torch.ones(2, 3)))
    assert isinstance(found, FakeTensor) and found.shape == (2, 3)
    assert_same(fx(module)(torch.ones(2, 3)), module(torch.ones(2, 3)).detach())


# --- what is refused ------------------------------------------------------------------------------


def test_training_mode_is_refused_by_part():
    module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Dropout())).eval()
    module[1][0].train()
    with pytest.raises(UnsupportedProgram, match=r"`1\.0` \(Dropout\) is in training mode.*\n.*\n.*eval"):
        fx(module)
    with pytest.raises(UnsupportedProgram, match="this Linear is in training mode"):
        fx(nn.Linear(3, 3))


def test_a_module_that_is_trained_again_serves_no_new_kind_of_call():
    module = Casts().eval()
    frozen = fx(module, (torch.randn(5, 8),))
    module.train()
    assert frozen(torch.randn(5, 8)).shape == (5, 16)
    with pytest.raises(UnsupportedProgram, match="this Casts is in training mode"):
        frozen(torch.randn(6, 8))


def test_arguments_that_require_grad_are_refused_in_grad_mode():
    frozen, x = fx(Everything().eval()), torch.randn(3, requires_grad=True)
    with pytest.raises(UnsupportedProgram, match=r"`args\[0\]\['x'\]` requires grad"):
        frozen({"x": x}, 3)
    with torch.no_grad():
        assert not frozen({"x": x}, 3)["constant"].requires_grad


class WritesState(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.zeros(()))
        self.write = write

    def forward(self, x):
        self.write(self)
        return x * self.steps


def _assign(module):
    module.steps = module.steps + 1


WRITES = {
    "in place": lambda module: module.steps.add_(1),
    "assigned": _assign,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_writes_to_buffers_are_refused_by_name(write):
    module = WritesState(write).eval()
    frozen = fx(module)
    with pytest.raises(UnsupportedProgram, match="`steps` is written by a call, and frozen state stays"):
        frozen(torch.ones(3))
    assert module.steps == 0


def test_batch_norms_without_statistics_are_no_matter():
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)).eval()
    x = torch.randn(2, 3, 5, 5)
    assert_same(fx(module, fold_batch_norms=True)(x), module(x).detach())


def test_state_that_was_written_since_is_refused_by_name():
    module, x = Casts().eval(), torch.randn(5, 8)
    frozen = fx(module, (x,))
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(UnsupportedProgram, match="`weight` was written after its module was frozen"):
        frozen(x)
    assert_same(fx(module)(x), module(x).detach())


def test_state_that_was_replaced_since_is_refused_by_name():
    module, x = Casts().eval(), torch.randn(5, 8)
    frozen = fx(module, (x,))
    module.load_state_dict(Casts().state_dict(), assign=True)
    with pytest.raises(UnsupportedProgram, match="`weight` was replaced after its module was frozen"):
        frozen(x)


def test_state_that_is_new_is_refused_by_name():
    module, x = Casts().eval(), torch.randn(5, 8)
    frozen = fx(module)
    module.register_buffer("more", torch.ones(3))
    with pytest.raises(UnsupportedProgram, match="`more` was not there when its module was frozen"):
        frozen(x)


def test_it_warns_of_a_new_program_at_each_call():
    frozen = fx(Casts().eval(), settings={"max_artifacts": 2})
    frozen(torch.randn(2, 8)), frozen(torch.randn(3, 8))
    with pytest.warns(UserWarning, match="`Casts` was compiled 3 times; what keeps changing"):
        frozen(torch.randn(4, 8))


def test_a_view_of_a_written_argument_is_refused():
    class Views(nn.Module):
        def forward(self, x):
            return x.add_(1)[1:]

    with pytest.raises(UnsupportedProgram, match=r"`out\[0\]` is a view of `args\[0\]`, which is written"):
        fx(Views().eval())(torch.ones(3))


def test_only_modules_are_frozen():
    with pytest.raises(BadSettings, match="cannot freeze a function"):
        fx(lambda x: x)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [({"args": torch.ones(1, 2)}, "`args` is a Tensor"), ({"kwargs": [1]}, "`kwargs` is a list")],
)
def test_arguments_that_are_not_in_a_tuple_are_refused(given, said):
    with pytest.raises(BadSettings, match=said):
        fx(nn.Linear(2, 2).eval(), **given)


def test_tensors_from_outside_are_refused():
    outside = torch.ones(3)

    class Outside(nn.Module):
        def forward(self, x):
            return x * outside

    with pytest.raises(UnsupportedProgram, match="`outside` is reached from outside"):
        fx(Outside().eval())(torch.ones(3))


def test_wrapper_parameters_are_refused_by_name():
    module = nn.Linear(3, 3).eval()
    module.weight = nn.Parameter(TwoTensor(torch.ones(3, 3), torch.ones(3, 3)))
    with pytest.raises(UnsupportedProgram, match="`weight` is a TwoTensor"):
        fx(module)(torch.ones(2, 3))


def _sharded(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


@pytest.mark.parametrize("spread", [DistributedDataParallel, _sharded], ids=["ddp", "fsdp"])
def test_modules_of_several_ranks_are_refused(spread):
    with fake_world(0, 2):
        module = spread(nn.Linear(3, 3)).eval()
        with pytest.raises(UnsupportedProgram, match="communicates in hooks: what it has is"):
            fx(module)


def test_disabled_it_is_the_module():
    module, x = Casts().eval(), torch.randn(5, 8)
    frozen = fx(module)
    with aotdist.disable():
        assert_same(frozen(x), module(x).detach())
    assert not frozen.artifacts


def test_a_copy_has_constants_of_its_own():
    module, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval(), torch.randn(2, 3)
    frozen = fx(module)
    wanted = frozen(x)
    copied = copy.deepcopy({"model": module, "frozen": frozen})
    assert_same(copied["frozen"](x), wanted)
    with torch.no_grad():
        module[0].weight.zero_()
    assert_same(copied["frozen"](x), wanted)
    with torch.no_grad():
        copied["model"][0].weight.zero_()
    with pytest.raises(UnsupportedProgram, match=r"`0.weight` was written"):
        copied["frozen"](x)
    with pytest.raises(UnsupportedProgram, match=r"`0.weight` was written"):
        copy.deepcopy(frozen)


def test_what_was_discarded_is_not_copied():
    frozen = fx(nn.Linear(3, 4).eval(), (torch.randn(2, 3),), discard_parameters=True)
    with pytest.raises(UnsupportedProgram, match="cannot be copied"):
        copy.deepcopy(frozen)
