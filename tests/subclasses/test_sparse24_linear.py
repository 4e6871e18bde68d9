"""Layers made 2:4 train as they do eagerly, bit for bit, and are made dense again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint

import aotdist
from aotdist.errors import BadSettings
from aotdist.subclasses.sparse24 import Sparse24Tensor
from aotdist.subclasses.sparse24_linear import Sparse24Linear
from aotdist.subclasses.sparse24_packing import magnitude_mask

TRAINED: dict[str, dict[str, Any]] = {
    "chosen in each forward": {},
    "transposable": {"mask": "transposable"},
    "masked gradient": {"gradient": "masked"},
    "decay": {"decay": 0.01},
    "held": {"select": "held"},
    "held, transposable, masked": {"select": "held", "mask": "transposable", "gradient": "masked"},
    "inputs": {"operand": "input"},
    "inputs, masked": {"operand": "input", "gradient": "masked"},
    "packed": {"select": "packed"},
    "packed, transposable": {"select": "packed", "mask": "transposable"},
}


class Net(nn.Module):
    """A squared ReLU, a layer that does not fit, a bias that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16)
        self.odd = nn.Linear(12, 5)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.down(F.relu(self.up(x)).square())
        return self.head(x).logsumexp(-1).mean() + self.odd(x[..., :12]).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def tokens(step: int = 0) -> torch.Tensor:
    return torch.randint(0, 11, (2, 3), generator=torch.Generator().manual_seed(step))


def same_state(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    plain = [
        (x.parts(), y.parts()) if isinstance(x, Sparse24Tensor) else ({"": x}, {"": y})
        for x, y in zip(ours.values(), theirs.values(), strict=True)
    ]
    return list(ours) == list(theirs) and all(torch.equal(x[k], y[k]) for x, y in plain for k in x)


@pytest.mark.parametrize("options", TRAINED.values(), ids=TRAINED.keys())
def test_training_compiled_is_training_eagerly(options: dict[str, Any]) -> None:
    """Five steps; what is held is chosen anew twice, without compiling again."""
    eager, compiled = net(), net()
    handles = [aotdist.sparsify_24(model, **options) for model in (eager, compiled)]
    aotdist.compile(compiled, backend="fx")
    optimizers = [torch.optim.AdamW(model.parameters(), 0.05) for model in (eager, compiled)]
    for step in range(5):
        losses = [model(tokens(step)) for model in (compiled, eager)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
        for optimizer, handle in zip(optimizers, handles, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            if options.get("select") == "held" and step % 2:
                handle.choose()
    assert same_state(compiled, eager)
    assert len(aotdist.explain(compiled).artifacts) == 1


@pytest.mark.parametrize("mask", ["row", "transposable"])
def test_one_artifact_for_any_batch(mask: Any) -> None:
    """With symbolic sizes, of rows that the 2:4 weight multiplies."""
    eager, compiled = nn.Linear(16, 8), nn.Linear(16, 8)
    compiled.load_state_dict(eager.state_dict())
    for layer in (eager, compiled):
        aotdist.sparsify_24(layer, mask=mask)
    aotdist.compile(compiled, backend="fx", settings={"dynamic": True})
    for rows in (5, 9, 3):
        x = torch.randn(rows, 16)
        results = compiled(x), eager(x)
        for result in results:
            result.square().sum().backward()
        assert torch.equal(*results)
        assert torch.equal(compiled.weight.grad, eager.weight.grad)
    assert len(aotdist.explain(compiled).artifacts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"mask": "transposable"}, {"operand": "input"}])
def test_with_inductor(options: dict[str, Any]) -> None:
    """The operators stay whole there too, beside what Inductor fuses."""
    eager, compiled = net(), net()
    for model in (eager, compiled):
        aotdist.sparsify_24(model, **options)
    aotdist.compile(compiled, backend="inductor")
    losses = [model(tokens()) for model in (compiled, eager)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_two_forwards_before_two_backwards() -> None:
    """A choice made in between belongs to the later forward alone."""
    grads = []
    for compiling, choosing in ((False, True), (True, True), (False, False)):
        model = net()
        handle = aotdist.sparsify_24(model, select="held", gradient="masked")
        if compiling:
            aotdist.compile(model, backend="fx")
        first = model(tokens(0))
        if choosing:
            with torch.no_grad():
                model.up.weight.copy_(model.up.weight.flip(1))
            handle.choose()
        second = model(tokens(1))
        first.backward(retain_graph=True)
        first.backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
        second.backward()
        grads[-1] += [parameter.grad for parameter in model.parameters()]
    eager, compiled, unchosen = grads
    assert all(map(torch.equal, eager, compiled))
    num_parameters = len(eager) // 2
    assert all(map(torch.equal, eager[:num_parameters], unchosen[:num_parameters]))
    assert not all(map(torch.equal, eager, unchosen))


def test_under_autocast() -> None:
    eager, compiled = net(), net()
    for model in (eager, compiled):
        aotdist.sparsify_24(model)
    aotdist.compile(compiled, backend="fx")
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(tokens()) for model in (compiled, eager)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    assert torch.equal(compiled.up.weight.grad, eager.up.weight.grad)


@pytest.mark.parametrize("select", ["forward", "held", "packed"])
@pytest.mark.parametrize("mask", ["row", "transposable"])
def test_a_layer_computes_with_its_masked_weight(select: Any, mask: Any) -> None:
    layer, dense = nn.Linear(24, 16), nn.Linear(24, 16)
    dense.load_state_dict(layer.state_dict())
    kept = magnitude_mask(layer.weight.detach(), mask)
    aotdist.sparsify_24(layer, select=select, mask=mask)
    with torch.no_grad():
        dense.weight.mul_(kept)
    for size in ((24,), (5, 24), (2, 3, 24), (0, 24)):
        x = torch.randn(size)
        assert torch.equal(layer(x), dense(x.view(-1, 24)).view(*size[:-1], 16))
    x = torch.randn(3, 24, 2).transpose(1, 2)
    assert torch.equal(layer(x), dense(x.contiguous()))


def test_choosing_anew() -> None:
    held, each = nn.Linear(24, 16), nn.Linear(24, 16)
    each.load_state_dict(held.state_dict())
    handle = aotdist.sparsify_24(held, select="held")
    aotdist.sparsify_24(each)
    x = torch.randn(3, 24)
    with torch.no_grad():
        for layer in (held, each):
            layer.weight.copy_(layer.weight.flip(1))
    assert not torch.equal(held(x), each(x))
    handle.choose()
    assert torch.equal(held(x), each(x))


def test_dropped_weights_learn_unless_masked() -> None:
    grads = {}
    for gradient in ("straight-through", "masked"):
        model = net()
        aotdist.sparsify_24(model, gradient=gradient)
        model(tokens()).backward()
        dropped = ~magnitude_mask(model.up.weight.detach())
        grads[gradient] = model.up.weight.grad[dropped].abs().sum().item()
    assert grads["straight-through"] > 0
    assert grads["masked"] == 0


def test_sparse_inputs_are_kept_packed_for_backward() -> None:
    """A dense activation of 16 bits would be twice the kept half, and no metadata."""
    saved = []
    for options in (None, {"operand": "input"}):
        layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        if options:
            aotdist.sparsify_24(layer, **options)
        compiled = aotdist.compile(lambda x, layer=layer: layer(F.relu(x).square()), backend="fx")
        compiled(torch.randn(128, 64, dtype=torch.bfloat16)).sum().backward()
        saved.append(compiled.explain().artifacts[0].saved_bytes)
    dense, packed = saved
    assert packed * 16 == dense * 9


def test_undo_restores_the_very_parameters() -> None:
    for options in TRAINED.values():
        model = net()
        before, keys = dict(model.named_parameters()), list(model.state_dict())
        handle = aotdist.sparsify_24(model, **options)
        model(tokens())
        handle.undo()
        assert type(model.up) is nn.Linear
        assert vars(model.up).keys() == vars(nn.Linear(1, 1)).keys()
        assert list(model.state_dict()) == keys
        assert all(before[name] is parameter for name, parameter in model.named_parameters())
        assert torch.equal(model(tokens()), net()(tokens()))


def test_undo_comes_once_and_changes_nothing_else() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    handle = aotdist.sparsify_24(model)
    model[1].__class__ = type("Wrapped", (Sparse24Linear,), {})
    with pytest.raises(BadSettings, match="`1` is a Wrapped"):
        handle.undo()
    assert type(model[0]) is Sparse24Linear
    model[1].__class__ = Sparse24Linear
    handle.undo()
    with pytest.raises(BadSettings, match="only once"):
        handle.undo()


def test_what_was_compiled_before_is_compiled_again() -> None:
    model = aotdist.compile(net(), backend="fx")
    dense = model(tokens())
    handle = aotdist.sparsify_24(model)
    assert not torch.equal(model(tokens()), dense)
    handle.undo()
    assert torch.equal(model(tokens()), dense)
    assert len(aotdist.explain(model).artifacts) == 2


def test_the_report_names_what_was_converted_and_why_not() -> None:
    model = net()
    model.norm = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    handle = aotdist.sparsify_24(model, lambda name, layer: name != "down")
    assert handle.converted == ("up",)
    assert {name: reason.split()[0] for name, reason in handle.skipped.items()} == {
        "down": "was",
        "odd": "has",
        "head": "shares",
        "norm": "is",
    }
    assert (handle.packed_bytes, handle.dense_bytes) == (17 * 32 * 16 * 4 // 32, 32 * 16 * 4)
    assert "53.1%" in str(handle)
    assert "left out by the filter" in str(handle)
    assert "2:4 weight, row mask" in repr(model.up)


@pytest.mark.parametrize("dtype, share", [(torch.bfloat16, 9 / 16), (torch.float32, 17 / 32)])
def test_bytes_are_those_stored(dtype: torch.dtype, share: float) -> None:
    layer = nn.Linear(64, 32, bias=False, dtype=dtype)
    dense = layer.weight.nbytes
    handle = aotdist.sparsify_24(layer, select="packed")
    assert isinstance(layer.weight, Sparse24Tensor)
    assert layer.weight.stored_bytes == handle.packed_bytes == share * dense == share * handle.dense_bytes


def test_explain_shows_what_is_sparse() -> None:
    model = net()
    handle = aotdist.sparsify_24(model, mask="transposable")
    aotdist.compile(model, backend="fx")(tokens())
    report = aotdist.explain(model)
    assert report.artifacts[0].converted == {
        "2:4 weight, transposable mask, chosen in each forward, straight-through gradient": handle.converted
    }
    assert "2:4 weight, transposable mask" in str(report)


@pytest.mark.parametrize("options", [{}, {"select": "held"}, {"select": "packed"}])
def test_checkpoints_resume(options: dict[str, Any], tmp_path: Path) -> None:
    model, other = net(), Net()
    for each in (model, other):
        aotdist.sparsify_24(each, **options)
    if options.get("select") == "held":
        with torch.no_grad():
            model.up.weight.copy_(model.up.weight.flip(1))  # so that the choice is not today's
    with pytest.warns(UserWarning, match="single process"):
        checkpoint.save(model.state_dict(), checkpoint_id=tmp_path)
        state = other.state_dict()
        checkpoint.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state)
    assert same_state(other, model)
    assert torch.equal(other(tokens()), model(tokens()))
    assert other.up.weight.dtype == torch.float32
    assert isinstance(other.up.weight, Sparse24Tensor) == (options.get("select") == "packed")


def test_copies_are_sparse_too() -> None:
    for options in TRAINED.values():
        model = net()
        aotdist.sparsify_24(model, **options)
        assert torch.equal(copy.deepcopy(model)(tokens()), model(tokens()))


CONTRADICTIONS = {
    "operand": {"operand": "bias"},
    "mask": {"mask": "column"},
    "select": {"select": "now"},
    "gradient": {"gradient": "dense"},
    "decay": {"decay": -1.0},
    "decay of masked": {"decay": 0.1, "gradient": "masked"},
    "decay of inputs": {"decay": 0.1, "operand": "input"},
    "transposable inputs": {"operand": "input", "mask": "transposable"},
    "held inputs": {"operand": "input", "select": "held"},
}


@pytest.mark.parametrize("options", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_contradictions_are_refused(options: dict[str, Any]) -> None:
    model = net()
    with pytest.raises(BadSettings) as raised:
        aotdist.sparsify_24(model, **options)
    assert raised.value.fix
    assert type(model.up) is nn.Linear


def test_nothing_to_convert_is_refused() -> None:
    with pytest.raises(BadSettings, match="no nn.Linear"):
        aotdist.sparsify_24(nn.ReLU())
    with pytest.raises(BadSettings, match="rows of 10"):
        aotdist.sparsify_24(nn.Linear(10, 8))
    with pytest.raises(BadSettings, match="columns of 10"):
        aotdist.sparsify_24(nn.Linear(8, 10), mask="transposable")
    with pytest.raises(BadSettings, match="complex64"):
        aotdist.sparsify_24(nn.Linear(8, 8, dtype=torch.complex64))
    layer = nn.Linear(8, 8)
    handle = aotdist.sparsify_24(layer)
    with pytest.raises(BadSettings, match="already"):
        aotdist.sparsify_24(layer)
    with pytest.raises(BadSettings, match="no choice is held"):
        handle.choose()
