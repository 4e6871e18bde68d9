"""Modules are compiled in place, and everything about them stays as it was."""

from __future__ import annotations

import copy
import functools
import pickle
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import aotdist

compiled = functools.partial(aotdist.compile, backend="fx")


def num_artifacts(module: nn.Module) -> int:
    return len(aotdist.api.compiled_call(module).artifacts)


def twins(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """An eager module, and a compiled one with the same values."""
    return module, compiled(copy.deepcopy(module))


def assert_same_state(eager: nn.Module, ours: nn.Module) -> None:
    for name, value in eager.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name]), name
    for (name, a), (_, b) in zip(eager.named_parameters(), ours.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name


def test_it_is_returned_as_it_came_in() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    keys, parameters = list(model.state_dict()), list(model.parameters())
    result = compiled(model)
    result(torch.ones(1, 2)).sum().backward()
    assert result is model and type(result) is nn.Sequential
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


class Front(nn.Module):
    """Hands on the attributes that it is assigned to the module in it, as what Lightning's Fabric returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __setattr__(self, name: str, value: object) -> None:
        if "module" in self.__dict__.get("_modules", {}) and hasattr(self.module, name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def test_a_module_that_hands_on_its_attributes_keeps_its_call() -> None:
    eager, ours = twins(Front(nn.Linear(3, 3)))
    x = torch.randn(2, 3)
    assert torch.equal(ours(x), eager(x)) and num_artifacts(ours) == 1


def test_copies_and_pickles_are_uncompiled() -> None:
    model = compiled(nn.Linear(2, 2))
    model(torch.ones(1, 2))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(torch.ones(1, 2)), model(torch.ones(1, 2)))
        assert twin.explain() != model.explain()


def test_batch_norm_in_train_and_eval() -> None:
    eager, ours = twins(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for training in (True, True, False, True):
        eager.train(training)
        ours.train(training)
        x = torch.randn(8, 4)
        a, b = eager(x), ours(x)
        assert torch.equal(a, b)
        a.square().sum().backward()
        b.square().sum().backward()
        assert_same_state(eager, ours)
    assert num_artifacts(ours) == 2


def test_dropout_draws_eagers_numbers() -> None:
    eager, ours = twins(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    x = torch.randn(4, 8)
    for seed in range(3):
        torch.manual_seed(seed)
        a = eager(x)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(a, ours(x))
        assert torch.equal(after, torch.get_rng_state())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n = self.n + 1
        self.total.add_(x.detach())
        return x * self.n


def test_buffers_are_reassigned_and_written_at_every_call() -> None:
    eager, ours = twins(Counting())
    for _ in range(3):
        x = torch.randn(2)
        assert torch.equal(eager(x), ours(x))
        assert_same_state(eager, ours)
    assert num_artifacts(ours) == 1
    assert "n" in dict(ours.named_buffers())


class Cache(nn.Module):
    """A key cache that is written in place at a moving position, and an attribute that did not exist."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(4, 2))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.keys.index_copy_(0, position, x)
        self.last = x * 2
        return self.keys.sum(0)


def test_a_cache_is_written_and_an_attribute_appears() -> None:
    eager, ours = twins(Cache())
    for position in range(3):
        x, where = torch.randn(1, 2), torch.tensor([position])
        assert torch.equal(eager(x, where), ours(x, where))
        assert torch.equal(eager.last, ours.last)
        assert_same_state(eager, ours)
    assert num_artifacts(ours) == 1


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embedding(tokens)), tokens)


def test_tied_weights_are_one_input() -> None:
    eager, ours = twins(Tied())
    tokens = torch.arange(5)
    eager(tokens).backward()
    ours(tokens).backward()
    assert_same_state(eager, ours)
    assert ours.head.weight is ours.embedding.weight
    (slots,) = [a.fit.slots for a in aotdist.api.compiled_call(ours).artifacts]
    assert [slot.path for slot in slots] == ["args[0]", "embedding.weight"]


def test_untying_afterwards_compiles_again() -> None:
    eager, ours = twins(Tied())
    tokens = torch.arange(5)
    ours(tokens)
    for model in (eager, ours):
        model.head.weight = nn.Parameter(torch.ones(7, 4))
    assert torch.equal(eager(tokens), ours(tokens))
    assert num_artifacts(ours) == 2


def test_a_replaced_parameter_is_read() -> None:
    model = compiled(nn.Linear(2, 2, bias=False))
    model(torch.ones(1, 2))
    model.weight = nn.Parameter(torch.full((2, 2), 3.0))
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight.grad, torch.ones(2, 2))
    model.load_state_dict({"weight": torch.zeros(2, 2)}, assign=True)
    assert torch.equal(model(torch.ones(1, 2)), torch.zeros(1, 2))


def test_a_swapped_submodule_a_hook_and_a_constant_are_noticed() -> None:
    eager, ours = twins(nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(0.1)))
    x = torch.randn(3, 2)
    ours(x)
    for model in (eager, ours):
        model[1].negative_slope = 0.7
    assert torch.equal(eager(x), ours(x))
    for model in (eager, ours):
        model[1] = nn.Sigmoid()
    assert torch.equal(eager(x), ours(x))
    handles = [m[0].register_forward_hook(lambda m, a, out: out * 2) for m in (eager, ours)]
    assert torch.equal(eager(x), ours(x))
    for handle in handles:
        handle.remove()
    assert torch.equal(eager(x), ours(x))


def test_frozen_parameters_get_no_gradient() -> None:
    eager, ours = twins(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    for model in (eager, ours):
        model[0].requires_grad_(False)
        model(torch.ones(1, 2)).sum().backward()
    assert_same_state(eager, ours)
    for model in (eager, ours):
        model[0].requires_grad_(True)
        model(torch.ones(1, 2)).sum().backward()
    assert_same_state(eager, ours)


def test_a_compiled_module_inside_a_compiled_function_is_part_of_its_graph() -> None:
    inner = compiled(nn.Linear(2, 2))
    outer = compiled(lambda x: inner(x).relu())
    x = torch.randn(3, 2)
    with aotdist.disable():
        expected = inner(x).relu()
    assert torch.equal(outer(x), expected)
    assert num_artifacts(inner) == 0


def test_disable_and_reset() -> None:
    model = compiled(nn.Linear(2, 2))
    with aotdist.disable():
        model(torch.ones(1, 2))
    aotdist.disable(model.forward)(torch.ones(1, 2))
    assert num_artifacts(model) == 0
    model(torch.ones(1, 2))
    aotdist.reset(model)
    assert num_artifacts(model) == 0
    assert model.source == ""


def test_activation_checkpointing_inside() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)

    eager, ours = twins(Checkpointed())
    x = torch.randn(3, 4)
    a, b = eager(x), ours(x)
    assert torch.equal(a, b)
    a.sum().backward()
    b.sum().backward()
    assert_same_state(eager, ours)


def test_a_built_in_function_that_an_attribute_holds_is_watched():
    class Applied(nn.Module):
        def __init__(self):
            super().__init__()
            self.function = torch.tanh

        def forward(self, x):
            return self.function(x)

    x = torch.randn(3)
    module = aotdist.compile(Applied(), backend="fx")
    for function in (torch.tanh, torch.sin, torch.Tensor.cos, torch.tanh):
        module.function = function
        assert torch.equal(module(x), function(x))
    assert len(module.graphs) == 3


def test_what_is_computed_once_for_several_calls() -> None:
    """A parametrized weight is computed where it is first read; a spectral norm then writes its buffers."""
    norms = (parametrizations.spectral_norm, parametrizations.weight_norm)
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(norm(nn.Linear(4, 4)) for norm in norms))
        model = aotdist.compile(model, backend="fx") if compiles else model
        seen: list[torch.Tensor] = []
        for around in (nullcontext, parametrize.cached, parametrize.cached, nullcontext):
            with around():
                outs = [model(torch.randn(3, 4)) for _ in range(2)]
                assert (model[0].weight is model[0].weight) == (around is parametrize.cached)
            outs[1].square().sum().backward()
            grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            seen += [tensor.detach().clone() for tensor in (*outs, *grads, *model.buffers())]
        found.append(seen)
    assert all(map(torch.equal, *found)) and len(found[0]) == len(found[1])


def test_what_is_kept_by_modules() -> None:
    """As preconditioners keep their factors: a number or a tensor per layer, in a dictionary."""

    class Scaled(nn.Sequential):
        def forward(self, x):
            for layer in self:
                x = layer(x) * self.scales[layer]
                self.calls[layer] += 1
            return x

    ours = Scaled(nn.Linear(2, 2), nn.Linear(2, 2))
    ours.calls = dict.fromkeys(ours, 0)
    eager, x = copy.copy(ours), torch.randn(3, 2)
    ours.calls = dict(eager.calls)
    aotdist.compile(ours, backend="fx")
    for step in range(1, 4):
        ours.scales = eager.scales = {ours[0]: torch.full((2,), step), ours[1]: 1 / step}
        assert torch.equal(ours(x), eager(x))
        assert ours.calls == eager.calls == dict.fromkeys(ours, step)
