"""What a compiled step does around the optimizer: results, gradients, state, other calls, refusals."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import aotdist
from tests.step import optimizers
from tests.step.comparison import Net, Pair, Plain, batch, held, loss_of, same, train, trained


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def compiled_step(**options: Any) -> tuple[Pair, aotdist.TrainStep]:
    pair = Pair.of(adamw)
    return pair, aotdist.train_step(pair.models[1], loss_of, pair.optimizers[1], backend="fx", **options)


def test_runs_without_autograd() -> None:
    pair, step = compiled_step()
    for at in range(2):
        step(batch(at))
    with torch.autograd.graph.saved_tensors_hooks(pytest.fail, pytest.fail):
        loss = step(batch(2))
    assert loss.grad_fn is None
    assert all(param.grad is None for param in pair.models[1].parameters())
    assert [set(graphs) for graphs in step.graphs] == [{"inference"}]


def test_report_names_some_of_what_is_written() -> None:
    _, step = compiled_step()
    for at in range(2):
        step(batch(at))
    assert "writes: state[up.weight].step, state[up.weight].exp_avg, " in str(step.explain())
    assert re.search(r" and \d+ more\n", str(step.explain()))


@pytest.mark.parametrize("largest", [0.01, 1e6], ids=["clipped", "whole"])
def test_norm_is_clipped(largest: float) -> None:
    train(Pair.of(adamw), clip=largest)


def _of_both(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Muon for matrices but the last, AdamW for the rest: neither has its parameters in the model's order."""
    muon = [param for param in reversed(params) if param.dim() == 2 and param is not params[-2]]
    others = [param for param in reversed(params) if all(param is not one for one in muon)]
    return [torch.optim.Muon(muon, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


class Deep(nn.Module):
    """Enough parameters for the order in which squares are added up to show, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(9)))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale


@pytest.mark.parametrize("accumulate", [1, 2])
def test_several_optimizers_and_the_norm_of_all_gradients(accumulate: int) -> None:
    torch.manual_seed(0)
    eager = Deep()
    model = copy.deepcopy(eager)
    trained_of = [list(one.layers.parameters()) for one in (eager, model)]
    optimizers_of = [_of_both(params) for params in trained_of]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(both[1], 0.5) for both in optimizers_of]
    step = aotdist.train_step(
        model, loss_of, optimizers_of[1], clip=0.01, accumulate=accumulate, backend="fx"
    )
    norms = []
    for at in range(4 * accumulate):
        (loss_of(eager, batch(at)) / accumulate).backward()
        step(batch(at))
        if at % accumulate == accumulate - 1:
            norms.append(nn.utils.clip_grad_norm_(eager.parameters(), 0.01))
            for optimizer in optimizers_of[0]:
                optimizer.step()
                optimizer.zero_grad()
            for schedule in schedules:
                schedule.step()
            assert step.grad_norm is not None and not step.grad_norm.requires_grad
            assert same(step.grad_norm, norms[-1])
        for mine, other in zip(optimizers_of[1], optimizers_of[0], strict=True):
            compared = list(zip(held(model, mine), held(eager, other), strict=True))
            assert compared
            for (name, a), (_, b) in compared:
                assert same(a, b), (at, name)
    assert 0.01 < min(norms)
    assert len(step.graphs) == accumulate  # one that only adds, and one that updates


def test_what_clips_says_the_norm() -> None:
    pair, step = compiled_step()
    assert step.grad_norm is None
    for at in range(2):
        step(batch(at))
        assert step.grad_norm is None
    seen: list[list[int]] = []

    def clip(params: Sequence[torch.Tensor]) -> torch.Tensor:
        seen.append([param.numel() for param in params])
        return nn.utils.clip_grad_norm_(params, 0.1, norm_type=1.0)

    model = pair.models[1]
    optimizer = torch.optim.SGD([*reversed(trained(model))], lr=0.1)
    step = aotdist.train_step(model, loss_of, optimizer, clip=clip, backend="fx")
    for at in range(2):
        step(batch(at))
        assert step.grad_norm is not None and step.grad_norm > 0.1
    assert seen and all(sizes == [param.numel() for param in model.parameters()] for sizes in seen)


def _decay(params: Sequence[torch.Tensor]) -> None:
    """With history: gradients are written in grad mode, by what the parameters are."""
    for param in params:
        if param.grad is not None:
            param.grad.add_(param, alpha=0.1)


CLIPS: dict[str, Callable[[Sequence[torch.Tensor]], Any]] = {
    "values": lambda params: nn.utils.clip_grad_value_(params, 1e-3),
    "decay": _decay,
}


@pytest.mark.parametrize("name", CLIPS)
def test_clipping_by_a_function(name: str) -> None:
    pair, step = compiled_step(clip=CLIPS[name])
    eager, optimizer = pair.models[0], pair.optimizers[0]
    for at in range(4):
        torch.manual_seed(at)
        loss_of(eager, batch(at)).backward()
        CLIPS[name](trained(eager))
        optimizer.step()
        optimizer.zero_grad()
        torch.manual_seed(at)
        step(batch(at))
        pair.assert_same(at)


def test_clipping_by_a_number_of_python() -> None:
    """`.item()` is followed; what Python makes a `float` of is not, and is refused by name."""

    def scale(params: Sequence[torch.Tensor], read: Callable[[torch.Tensor], float]) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        norm = read(nn.utils.get_total_norm(grads))
        for grad in grads:
            grad.mul_(min(1.0, 0.1 / (norm + 1e-6)))

    pair, step = compiled_step(clip=lambda params: scale(params, torch.Tensor.item))
    eager, optimizer = pair.models[0], pair.optimizers[0]
    for at in range(4):
        torch.manual_seed(at)
        loss_of(eager, batch(at)).backward()
        scale(trained(eager), torch.Tensor.item)
        optimizer.step()
        optimizer.zero_grad()
        torch.manual_seed(at)
        step(batch(at))
        pair.assert_same(at)
    _, step = compiled_step(clip=lambda params: scale(params, float))
    step(batch(0))
    with refused(match=r"`float\(tensor\)` needs the value(.|\n)*keep the number itself"):
        step(batch(1))


def test_accumulation() -> None:
    pair, step = compiled_step(accumulate=3, clip=0.1)
    eager, optimizer = pair.models[0], pair.optimizers[0]
    for at in range(9):
        torch.manual_seed(at)
        expected = loss_of(eager, batch(at))
        (expected / 3).backward()
        if at % 3 == 2:
            nn.utils.clip_grad_norm_(trained(eager), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        torch.manual_seed(at)
        assert same(step(batch(at)), expected.detach())
        pair.assert_same(at)
    assert len(step.graphs) == 3  # no gradients yet, gradients to add to, and the update


class Either(nn.Module):
    """One of two weights, by the batch; gradients of -0.0."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(3) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return (self.weights[which] * x).sum()


def test_accumulated_gradients_are_those_that_there_are() -> None:
    """A weight that a call does not reach has none, and is not decayed; -0.0 keeps its sign."""
    eager, model = Either(), Either()
    pair = eager, model
    first, second = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in pair)
    step = aotdist.train_step(model, Either.__call__, second, accumulate=2, backend="fx")
    calls = [(0, 1), (1, 1), (0, 0), (0, 1), (1, 1), (0, 0), (1, 0)]
    for at, which in enumerate(itertools.chain(*calls)):
        x = torch.tensor([1.0, -0.0, 0.0])
        (eager(x, which) / 2).backward()
        if at % 2:
            first.step()
            first.zero_grad()
        step(x, which)
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert same(mine.detach(), other.detach()), at
            assert (mine.grad is None) == (other.grad is None), at
            if mine.grad is not None and other.grad is not None:
                assert torch.equal(mine.grad, other.grad), at
                assert torch.equal(mine.grad.signbit(), other.grad.signbit()), at


def test_gradients_that_are_there_are_added_to() -> None:
    pair, step = compiled_step()
    eager, optimizer = pair.models[0], pair.optimizers[0]
    for at in range(4):
        for model in pair.models:
            trained(model)[0].grad = torch.full_like(trained(model)[0], 0.5)
        torch.manual_seed(at)
        loss_of(eager, batch(at)).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.manual_seed(at)
        step(batch(at))
        pair.assert_same(at)


def test_results_are_those_of_the_loss_function_detached() -> None:
    pair, _ = compiled_step()

    def with_more(model: nn.Module, x: torch.Tensor, *, name: str) -> dict[str, Any]:
        out = model(x)
        return {"loss": out.square().mean(), "outs": [out], "name": name}

    step = aotdist.train_step(pair.models[1], with_more, pair.optimizers[1], backend="fx")
    for at in range(3):
        result = step(batch(at), name="here")
        assert set(result) == {"loss", "outs", "name"} and result["name"] == "here"
        assert not result["loss"].requires_grad and not result["outs"][0].requires_grad
        assert torch.equal(result["outs"][0].square().mean(), result["loss"])


def test_other_batches_are_compiled_for() -> None:
    _, step = compiled_step()
    for size in (4, 4, 3, 4, 3):
        step(batch(0)[:size])
    assert len(step.graphs) == 2


def test_eval_mode_and_back() -> None:
    pair = Pair.of(adamw)
    train(pair, num_steps=3)
    for model in pair.models:
        model.eval()
    train(pair, num_steps=3)


def test_state_that_is_loaded_between_steps() -> None:
    pair, step = compiled_step()
    model, optimizer = pair.models[1], pair.optimizers[1]
    for at in range(3):
        step(batch(at))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    runs: list[list[torch.Tensor]] = []
    for _ in range(2):
        torch.manual_seed(7)
        runs.append([step(batch(at)) for at in range(3, 6)])
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    assert all(map(same, *runs))
    assert len(step.graphs) == 1


def test_training_goes_on_as_a_plain_loop() -> None:
    """State is where eager looks for it, after every step."""
    pair = Pair.of(adamw)
    train(pair, num_steps=3)
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        torch.manual_seed(11)
        loss_of(model, batch(9)).backward()
        optimizer.step()
        optimizer.zero_grad()
    pair.assert_same(9)


def test_parameter_that_gets_its_first_gradient_late() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.is_whole = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)) if self.is_whole else self.first(x)

    pair = Pair.of(adamw, Late)
    train(pair, num_steps=3)
    for model in pair.models:
        model.is_whole = True  # type: ignore[assignment]
    train(pair, num_steps=4)


class Experts(nn.Module):
    """Keeps how evenly its gate chooses, for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).softmax(-1)
        self.balance = chosen.mean(0).square().sum()
        return self.expert(x) * chosen


class Hooked(Plain):
    """A hook stores what the first layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, torch.Tensor] = {}
        self.first.register_forward_hook(lambda module, args, out: self.features.update(first=out))


class Pruned(Plain):
    """A weight is computed before each forward, and put where the parameter was."""

    def __init__(self) -> None:
        super().__init__()
        prune.random_unstructured(self.first, "weight", 0.5)


class Remembering(Plain):
    """Begins where the last batch ended, without a gradient to there."""

    memory: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.memory is not None:
            x = x + self.memory.detach()
        self.memory = super().forward(x)
        return self.memory


KEEPING: dict[str, tuple[type[nn.Module], Callable[[Any], Any]]] = {
    "auxiliary loss": (Experts, lambda model: model.balance),
    "hook": (Hooked, lambda model: model.features["first"].square().mean()),
    "pruned": (Pruned, lambda model: model.first.weight.square().mean()),
    "memory": (Remembering, lambda model: model.memory.square().mean()),
}


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "unread"])
@pytest.mark.parametrize("name", KEEPING)
def test_computed_tensors_that_the_model_keeps(name: str, is_read: bool) -> None:
    """The next step finds one of a backward that has been, and puts another there."""
    kind, more = KEEPING[name]

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, x)
        return loss + more(model) if is_read else loss

    pair = Pair.of(adamw, kind)
    step = train(pair, loss_fn=loss_fn)
    assert same(*(more(model).detach() for model in pair.models))
    assert all(set(graphs) == {"inference"} for graphs in step.graphs)


def test_failing_step_changes_nothing() -> None:
    pair = Pair.of(adamw)
    model, optimizer = pair.models[1], pair.optimizers[1]

    def loss_fn(model: nn.Module, x: torch.Tensor, fails: bool) -> torch.Tensor:
        loss = loss_of(model, x)
        if fails and loss.item() > 0:
            loss = loss * 2
        return loss

    step = aotdist.train_step(model, loss_fn, optimizer, backend="fx")
    for at in range(2):
        step(batch(at), False)
    before = copy.deepcopy(list(held(model, optimizer)))
    random_state, groups = torch.get_rng_state(), [dict(group) for group in optimizer.param_groups]
    with pytest.raises(aotdist.UnsupportedProgram, match="read off a tensor"):
        step(batch(2), True)
    assert all(same(a, b) for (_, a), (_, b) in zip(before, held(model, optimizer), strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(a[key] is b[key] for a, b in zip(groups, optimizer.param_groups, strict=True) for key in a)
    step(batch(2), False)


def test_a_step_that_raises_midway_leaves_buffers_as_they_were() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = adamw(list(model.parameters()))

    def loss_fn(model: nn.Module, x: torch.Tensor, fails: bool) -> torch.Tensor:
        loss = model(x).square().sum()
        if fails:
            raise KeyError("of the user's")
        return loss

    step = aotdist.train_step(model, loss_fn, optimizer, backend="fx")
    for _ in range(2):
        step(torch.randn(6, 4), False)
    before = copy.deepcopy(list(held(model, optimizer)))
    with pytest.raises(KeyError):
        step(torch.randn(6, 4), True)
    assert all(same(a, b) for (_, a), (_, b) in zip(before, held(model, optimizer), strict=True))


def refused(**options: Any) -> pytest.RaisesExc[Any]:
    return pytest.raises(aotdist.UnsupportedProgram, **options)


def test_closures_are_refused() -> None:
    model = Net()
    with pytest.raises(aotdist.BadSettings, match="LBFGS needs a closure"):
        aotdist.train_step(model, loss_of, torch.optim.LBFGS(trained(model)))


def test_parameters_of_others_are_refused() -> None:
    with pytest.raises(aotdist.BadSettings, match="not the model's"):
        aotdist.train_step(Net(), loss_of, adamw(trained(Net())))


@pytest.mark.parametrize("backend", ["fx", "eager"])
def test_parameters_that_are_replaced_before_the_first_step_are_said_once(backend: str) -> None:
    model = Net()
    optimizer = adamw(trained(model))
    step = aotdist.train_step(model, loss_of, optimizer, accumulate=2, backend=backend)
    model.down = nn.Linear(8, 6)  # as `fully_shard` does, with each
    before = model.down.weight.clone()
    said = r"2 of the optimizer's \d parameters are not the Net's any more"
    with pytest.warns(UserWarning, match=said) as caught:
        step(batch(0))
    assert Path(caught[0].filename).name == Path(__file__).name
    for at in range(4):
        step(batch(at))
    assert torch.equal(model.down.weight, before)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model", loss_of, "model is <function loss_of"),
        ("model", None, "model is None"),
        ("loss_fn", None, "loss_fn is None"),
        ("optimizer", None, "optimizer is None"),
        ("optimizer", [], r"optimizer is \[\]"),
        ("optimizer", [adamw(trained(Net())), 3], "optimizer is a list"),
        ("optimizer", [adamw(trained(Net()))] * 2, "optimizer is a list"),
        ("optimizer", torch.optim.SGD, "optimizer is <class 'torch.optim.sgd.SGD'>"),
        ("optimizer", torch.optim.lr_scheduler.StepLR(adamw(trained(Net())), 1), "optimizer is .*StepLR"),
        ("clip", -1.0, "clip is -1.0"),
        ("clip", 0, "clip is 0"),
        ("clip", float("nan"), "clip is nan"),
        ("clip", True, "clip is True"),
        ("clip", "1.0", "clip is '1.0'"),
        ("clip", [1.0], r"clip is \[1.0\]"),
        ("scaler", True, "scaler is True"),
        ("accumulate", 0, "accumulate is 0"),
        ("accumulate", "2", "accumulate is '2'"),
        ("accumulate", None, "accumulate is None"),
        ("accumulate", 1.5, "accumulate is 1.5"),
        ("accumulate", True, "accumulate is True"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(name: str, value: Any, said: str) -> None:
    model = Net()
    given = {"model": model, "loss_fn": loss_of, "optimizer": adamw(trained(model)), name: value}
    with pytest.raises(aotdist.BadSettings, match=rf"^{said}(.|\n)*fix: (pass|give) "):
        aotdist.train_step(**given)


def test_hooks_are_refused() -> None:
    pair, step = compiled_step()
    step(batch(0))
    handle = pair.optimizers[1].register_step_pre_hook(lambda *_: None)
    with refused(match="AdamW has hooks of its step"):
        step(batch(1))
    handle.remove()
    handle = trained(pair.models[1])[1].register_hook(lambda grad: grad)
    with refused(match="has hooks of its gradient"):
        step(batch(1))
    handle.remove()
    step(batch(1))


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (optimizers.CountingOutside, "changes its attribute `num_steps`"),
        (optimizers.Choosing, "chooses by a number that it computes in the same call"),
    ],
    ids=["attributes", "choices"],
)
def test_what_a_trace_would_miss_is_refused(kind: type[torch.optim.Optimizer], match: str) -> None:
    model = Net()
    step = aotdist.train_step(model, loss_of, kind(trained(model)), backend="fx")
    step(batch(0))
    with refused(match=match):
        step(batch(1))


class Counter:
    """Counts in an attribute, and clips by the count."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, params: Sequence[torch.Tensor]) -> None:
        self.num += 1
        nn.utils.clip_grad_norm_(params, 1.0 / self.num)


def _count_keys(counter: dict[str, int]) -> int:
    counter["num"] += 1
    return counter["num"]


def _count_items(counter: list[int]) -> int:
    counter.append(1)
    return len(counter)


def _count_in_last(counter: list[dict[int, int]]) -> int:
    counter[-1][0] += 1
    return counter[-1][0]


def _count_in_object(counter: Counter) -> int:
    counter.num += 1
    return counter.num


COUNTERS: dict[str, tuple[Any, Callable[[Any], int], str]] = {
    "dict": ({"num": 0}, _count_keys, "counter.num"),
    "list": ([0], _count_items, "counter"),
    "nested": ([{0: 0}], _count_in_last, "counter[0][0]"),
    "object": (Counter(), _count_in_object, "counter.num"),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_counts_in_what_hangs_on_attributes_are_refused(name: str) -> None:
    counter, count, path = COUNTERS[name]
    model, counter = Net(), copy.deepcopy(counter)
    optimizer = optimizers.CountingAside(trained(model), counter, count)
    step = aotdist.train_step(model, loss_of, optimizer, backend="fx")
    step(batch(0))
    before = copy.deepcopy(vars(counter) if isinstance(counter, Counter) else counter)
    with refused(match=re.escape(f"CountingAside changes its attribute `{path}`")):
        step(batch(1))
    assert before == (vars(counter) if isinstance(counter, Counter) else counter)


def test_counts_in_an_object_that_clips() -> None:
    clips = Counter(), Counter()
    pair, step = compiled_step(clip=clips[1])
    for at in range(4):
        torch.manual_seed(at)
        loss_of(pair.models[0], batch(at)).backward()
        clips[0](trained(pair.models[0]))
        pair.optimizers[0].step()
        pair.optimizers[0].zero_grad()
        torch.manual_seed(at)
        step(batch(at))
        pair.assert_same(at)
    assert clips[0].num == clips[1].num == 4


class Smoothed:
    """Clips to a mean of the norms so far, which it keeps as a tensor."""

    def __init__(self) -> None:
        self.norm = torch.tensor(1.0)

    def __call__(self, params: Sequence[torch.Tensor]) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        self.norm = 0.5 * self.norm + 0.5 * nn.utils.get_total_norm(grads)
        nn.utils.clip_grads_with_norm_(params, 0.1, self.norm)


def test_tensors_in_an_object_that_clips() -> None:
    clips = Smoothed(), Smoothed()
    pair, step = compiled_step(clip=clips[1])
    eager, optimizer = pair.models[0], pair.optimizers[0]
    for at in range(4):
        torch.manual_seed(at)
        loss_of(eager, batch(at)).backward()
        clips[0](trained(eager))
        optimizer.step()
        optimizer.zero_grad()
        torch.manual_seed(at)
        step(batch(at))
        pair.assert_same(at)
        assert same(clips[0].norm, clips[1].norm)


class Window:
    """Clips to the mean of the last three norms."""

    def __init__(self) -> None:
        self.norms: list[torch.Tensor] = []

    def __call__(self, params: Sequence[torch.Tensor]) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        self.norms.append(nn.utils.get_total_norm(grads))
        if len(self.norms) > 3:
            self.norms.pop(0)
        nn.utils.clip_grads_with_norm_(params, 0.1, torch.stack(self.norms).mean())


def test_accumulation_does_not_ask_what_clips() -> None:
    """Norms that are kept make other programs of updates, and of nothing else."""
    clips = Window(), Window()
    pair, step = compiled_step(clip=clips[1], accumulate=2)
    eager, optimizer = pair.models[0], pair.optimizers[0]
    for at in range(12):
        torch.manual_seed(at)
        (loss_of(eager, batch(at)) / 2).backward()
        if at % 2:
            clips[0](trained(eager))
            optimizer.step()
            optimizer.zero_grad()
        torch.manual_seed(at)
        step(batch(at))
        pair.assert_same(at)
        assert same(clips[0].norms, clips[1].norms)
    assert len(step.graphs) == 1 + 3  # one that adds; updates for no norms, one, two and three that are kept


def test_parameters_without_an_optimizer_keep_their_gradients() -> None:
    train(Pair.of(lambda params: torch.optim.AdamW(params[:2], lr=0.01)))


def _with_others(*, compiles: bool) -> list[torch.Tensor]:
    """Losses, gradients and parameters of a training with a criterion that has weights of its own."""
    torch.manual_seed(0)
    model, criterion, bias = Plain(), nn.Linear(6, 2), torch.ones(2, requires_grad=True)
    scale = torch.tensor(0.5, requires_grad=True)

    def loss_fn(model: nn.Module, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        out = criterion(model(x)) + bias
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (out.square().mean() + slope.square().sum()) * scale

    step = aotdist.train_step(model, loss_fn, adamw(trained(model)), backend="fx" if compiles else "eager")
    optimizer, seen = torch.optim.SGD(criterion.parameters(), lr=0.1), list[torch.Tensor]()
    for at in range(5):
        x = batch(at).requires_grad_()
        seen.append(step(x, scale=scale))
        leaves = [bias, x, scale, *criterion.parameters()]
        seen += [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
        seen += [param.detach().clone() for param in model.parameters()]
        if at % 2:
            optimizer.step()
            optimizer.zero_grad()
    return seen


def test_gradients_of_others_are_those_of_a_plain_loop() -> None:
    """A criterion's weights and a batch get theirs, and keep them: `zero_grad` is not for them."""
    found, expected = _with_others(compiles=True), _with_others(compiles=False)
    assert len(found) == len(expected) and all(map(same, found, expected))


def test_gradients_that_would_go_on_from_the_batch_are_refused() -> None:
    _, step = compiled_step()
    step(batch(0))
    before = batch(1).requires_grad_() * 2
    with refused(match=r"`args\[0\]` gets a gradient, and was computed before the step"):
        step(before)
    step(before.detach())


def test_autocast_inside_of_the_loss_function() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    train(Pair.of(adamw), loss_fn=loss_fn)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64], ids=str)
def test_parameters_of_other_dtypes(kind: torch.dtype) -> None:
    train(Pair.of(adamw, lambda: Net().to(kind)), data=lambda at: batch(at).to(kind))


@pytest.mark.parametrize("backend", ["fx", lambda gm, _: gm.forward], ids=["fx", "callable"])
def test_sizes_that_differ_from_call_to_call(backend: Any) -> None:
    pair = Pair.of(adamw)
    step = aotdist.train_step(
        pair.models[1], loss_of, pair.optimizers[1], backend=backend, settings={"dynamic": True}
    )
    for size in (4, 4, 3, 6, 5):
        step(batch(0).repeat(2, 1)[:size])
    assert len(step.graphs) == 1


def test_model_that_is_compiled_itself() -> None:
    pair = Pair.of(adamw)
    aotdist.compile(pair.models[1], backend="fx")
    train(pair)


def test_frozen_parameters_of_the_optimizer() -> None:
    pair = Pair.of(lambda params: torch.optim.AdamW(params, lr=0.01))
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        optimizer.add_param_group({"params": [model.frozen]})
    train(pair, num_steps=3)
    for model in pair.models:
        model.up.bias.requires_grad_(False)
    train(pair, num_steps=3)


def test_parameter_that_is_replaced() -> None:
    """The optimizer keeps the old one, which gets no gradient any more."""
    pair, step = compiled_step()
    eager, optimizer = pair.models[0], pair.optimizers[0]
    for at in range(6):
        if at == 3:
            for model in pair.models:
                model.down.bias = nn.Parameter(torch.zeros(6))  # type: ignore[assignment]
        torch.manual_seed(at)
        loss_of(eager, batch(at)).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.manual_seed(at)
        step(batch(at))
        pair.assert_same(at)


def test_result_without_a_loss_is_refused() -> None:
    model = Net()
    step = aotdist.train_step(model, lambda model, x: {"out": model(x)}, adamw(trained(model)), backend="fx")
    with refused(match="without a loss"):
        step(batch(0))


def test_disabled_it_is_the_plain_loop() -> None:
    pair = Pair.of(adamw)
    steps = [
        aotdist.train_step(model, loss_of, optimizer, backend="fx")
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True)
    ]
    for at in range(6):
        torch.manual_seed(at)
        with aotdist.disable():
            expected = steps[0](batch(at))
        torch.manual_seed(at)
        if at in (0, 3, 4):
            with aotdist.disable():
                loss = steps[1](batch(at))
        else:
            loss = steps[1](batch(at))
        assert same(loss, expected), at
        pair.assert_same(at)
    assert len(steps[1].graphs) == 1


def test_is_explained_and_reset_as_what_else_is_compiled() -> None:
    _, step = compiled_step()
    for at in range(2):
        step(batch(at))
    assert str(aotdist.explain(step)) == str(step.explain())
    aotdist.reset(step)
    assert step.graphs == []
