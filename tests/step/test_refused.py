"""What a step that is compiled as it was written cannot have in it, and what it says then."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import functional as F
from torch.optim import lr_scheduler, swa_utils

import aotdist
from aotdist.torch_seam.fsdp import fsdp_groups, fsdp_state
from tests.semantics.meshes import mesh as mesh


class Loop:
    """A model, an optimizer and a schedule, and a step that does something else between its parts."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.SGD, rate: Any = 0.1) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
        self.optimizer = optimizer(self.model.parameters(), lr=rate)
        self.schedule = lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def step(
        self,
        between: Callable[[torch.Tensor], Any] = lambda loss: None,
        after: Callable[[], Any] = lambda: None,
        **of_backward: Any,
    ) -> Callable[[], Any]:
        model, optimizer, x, y = self.model, self.optimizer, torch.randn(2, 4), torch.tensor([0, 2])

        @aotdist.compile(backend="fx")
        def step() -> Any:
            loss = F.cross_entropy(model(x), y)
            loss.backward(**of_backward)
            between(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), after()

        return step


def _closure() -> Callable[[], Any]:
    loop = Loop(functools.partial(torch.optim.LBFGS, max_iter=2))

    @aotdist.compile(backend="fx")
    def step() -> Any:
        def closure() -> torch.Tensor:
            loop.optimizer.zero_grad()
            loss = loop.model(torch.ones(2, 4)).square().mean()
            loss.backward()
            return loss

        return loop.optimizer.step(closure).detach()

    return step


def _hook(*_: Any) -> None:
    """Do nothing."""


def _retain(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.retain_grad()


def _hook_of_optimizer() -> Callable[[], Any]:
    loop = Loop()
    loop.optimizer.register_step_post_hook(_hook)
    return loop.step()


def _hook_of_parameter() -> Callable[[], Any]:
    loop = Loop()
    loop.model[0].weight.register_post_accumulate_grad_hook(_hook)
    return loop.step()


def _retained() -> Callable[[], Any]:
    loop = Loop()
    loop.model[0].register_forward_hook(_retain)
    return loop.step()


def _assigns_rate() -> Callable[[], Any]:
    loop = Loop()
    return loop.step(after=lambda: (loop.schedule.step(), loop.optimizer.param_groups[0].update(lr=0.1))[1])


def _epoch() -> Callable[[], Any]:
    loop = Loop()
    return loop.step(after=lambda: (loop.schedule.step(), loop.schedule.last_epoch)[1])


def _rate_by_loss() -> Callable[[], Any]:
    loop = Loop()
    schedule = lr_scheduler.ReduceLROnPlateau(loop.optimizer)
    return loop.step(between=lambda loss: schedule.step(loss.detach()))


def _rate_in_a_tensor() -> Callable[[], Any]:
    loop = Loop(rate=torch.tensor(0.1))
    return loop.step(after=lambda: (loop.schedule.step(), loop.optimizer.param_groups[0]["lr"] * 2)[1])


def _rate_by_hand() -> Callable[[], Any]:
    loop = Loop()

    def after() -> float:
        loop.optimizer.param_groups[0]["lr"] *= 0.5
        loop.schedule.step()
        return loop.schedule.get_last_lr()[0]

    return loop.step(after=after)


FSDP1S = ShardedGradScaler("cpu", init_scale=2.0)
OUTDATED = "the epoch of a schedule is read after its step, or a learning rate that depends on what"

REFUSED: dict[str, tuple[Callable[[], Callable[[], Any]], str]] = {
    "LBFGS": (_closure, "LBFGS runs the model as often as its search asks for"),
    "hook of an optimizer": (_hook_of_optimizer, "SGD has hooks of its step .*post_hook"),
    "hook of a parameter": (_hook_of_parameter, "has hooks of its gradient .*accumulate_grad_hook"),
    "retained gradient": (_retained, "a tensor retains its gradient inside of a compiled step"),
    "create_graph": (lambda: Loop().step(create_graph=True), r"`backward\(create_graph=True\)` is called"),
    "branch on the loss": (
        lambda: Loop().step(between=lambda loss: loss.item() > 100 or None),
        "depends on a number, or a size, that is read off a tensor",
    ),
    "text of the loss": (lambda: Loop().step(between=lambda loss: f"{loss.item():.3f}"), "a text .* needs"),
    "a scaler of FSDP1": (
        lambda: Loop().step(between=lambda loss: FSDP1S.scale(loss)),
        "a ShardedGradScaler, which is FSDP1's",
    ),
    "rate assigned": (_assigns_rate, "a learning rate is assigned after a schedule's step"),
    "epoch": (_epoch, OUTDATED),
    "rate by the loss": (_rate_by_loss, OUTDATED),
    "rate that is a tensor": (_rate_in_a_tensor, OUTDATED),
    "rate by hand, and by a schedule": (_rate_by_hand, OUTDATED),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True", "ignore:Detected call of")
@pytest.mark.parametrize(("make", "says"), REFUSED.values(), ids=REFUSED)
def test_is_refused(make: Callable[[], Callable[[], Any]], says: str) -> None:
    """At the first call, or at the second: the first runs as it was written."""
    step = make()
    with pytest.raises(aotdist.UnsupportedProgram, match=says):
        for _ in range(2):
            step()


def test_what_is_refused_may_run_as_it_was_written() -> None:
    told: list[int] = []

    def tell(*_: Any) -> None:
        told.append(1)

    loop = Loop()
    loop.optimizer.register_step_post_hook(tell)
    x = torch.randn(2, 4)

    @aotdist.compile(backend="fx", settings={"unsupported": "eager"})
    def step() -> None:
        loop.model(x).square().mean().backward()
        loop.optimizer.step()

    step()
    with pytest.warns(UserWarning, match="run as they were written: SGD has hooks of its step"):
        step()
    step()
    assert told == [1, 1, 1]


class NoStream:
    """What a GPU's stream is called for."""

    def wait_stream(self, other: NoStream) -> None:
        """Do nothing."""

    def record_event(self) -> NoStream:
        return self

    def synchronize(self) -> None:
        """Do nothing."""


def test_an_optimizer_on_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's makes no object without a GPU; its parameters' hooks copy gradients to the host."""
    offload: Any = pytest.importorskip("torchao.optim.cpu_offload")
    model = nn.Linear(4, 4)
    if not torch.cuda.is_available():
        with pytest.raises(AssertionError, match="only supports CUDA & XPU"):
            offload.CPUOffloadOptimizer(model.parameters())
    monkeypatch.setattr(offload, "get_available_devices", lambda: ["cpu", "cuda"])
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, NoStream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    with monkeypatch.context() as unpinned:
        empty_like = torch.empty_like
        unpinned.setattr(torch, "empty_like", lambda *args, pin_memory, **how: empty_like(*args, **how))
        optimizer = offload.CPUOffloadOptimizer(model.parameters(), minimal_size=1, lr=0.1)

    @aotdist.compile(backend="fx")
    def step() -> None:
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()

    with pytest.raises(aotdist.UnsupportedProgram, match="`model.weight` has hooks of its gradient"):
        for _ in range(2):
            step()


def test_module_that_calls_backward_is_refused() -> None:
    class Steps(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            loss = super().forward(input).sum()
            loss.backward()
            return loss.detach()

    model = aotdist.compile(Steps(2, 2), backend="fx")
    with pytest.raises(aotdist.UnsupportedProgram, match="compile a function that calls the module"):
        model(torch.ones(1, 2))
    assert model.weight.grad is None
    aotdist.compile(model, backend="fx", settings={"unsupported": "eager"})
    with pytest.warns(UserWarning, match="run as they were written"):
        model(torch.ones(1, 2))
    assert model.weight.grad is not None


def test_without_gradients_it_raises_as_eager() -> None:
    step = Loop().step()
    step()
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        step()


def test_rates_are_put_back_for_the_schedule() -> None:
    loop = Loop()
    step: Any = loop.step(after=lambda: (loop.schedule.step(), None)[1])
    for _ in range(4):
        step()
    assert loop.schedule.last_epoch == 4
    assert loop.optimizer.param_groups[0]["lr"] == loop.schedule.get_last_lr()[0] == 0.1 * 0.5**4
    assert len(step.graphs) == 1


def test_step_that_chooses_by_a_hyperparameter_is_compiled_once_for_all_calls() -> None:
    """What is noted while it is traced is nothing that the program itself changes."""
    loop = Loop()
    ema = swa_utils.AveragedModel(loop.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    step: Any = loop.step(after=lambda: ema.update_parameters(loop.model))
    for decay in (0.0, 0.0, 0.1, 0.2, 0.2, 0.3):
        loop.optimizer.param_groups[0]["weight_decay"] = decay
        step()
    assert len(step.graphs) == 2


def test_fsdp_is_told_inside_not_to_reduce_and_the_last_backward_does_not(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(4, 3), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @aotdist.compile(backend="fx")
    def step(batches: list[torch.Tensor]) -> None:
        for number, batch in enumerate(batches):
            model.set_requires_gradient_sync(number == 0)
            model(batch).square().mean().backward()
        optimizer.step()

    batches = [torch.ones(2, 4), torch.ones(2, 4)]
    step(batches)  # as it is written
    before, grad = model.weight.detach().clone(), model.weight.grad
    (group,) = fsdp_groups(fsdp_state(model))
    for begins, says in ((True, "ends without"), (True, "ends without"), (False, "begins without")):
        model.set_requires_gradient_sync(begins)
        with pytest.raises(
            aotdist.UnsupportedProgram, match=f"called in a program that {says} synchronisation"
        ):
            step(batches)
        assert (group.reduce_grads, group.all_reduce_grads) == (begins, begins)
    assert model.weight.grad is grad and torch.equal(model.weight.detach(), before)


def test_replicas_are_told_inside_to_sum_at_another_backward_than_the_last(mesh: DeviceMesh) -> None:
    """The next call would begin with another switch in eager."""
    replicas = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(nn.Linear(4, 3), mesh=replicas)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @aotdist.compile(backend="fx")
    def step(last: int) -> None:
        for number in range(2):
            model.set_requires_all_reduce(number == last)
            model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()

    step(1)  # as it is written
    for begins, last, says in ((True, 0, "ends without"), (False, 1, "begins without")):
        model.set_requires_all_reduce(begins)
        with pytest.raises(
            aotdist.UnsupportedProgram, match=f"called in a program that {says} the all-reduce"
        ):
            step(last)


def loading(mesh: DeviceMesh, assign: bool) -> tuple[Any, Any, Callable[[torch.Tensor], Any]]:
    """Two sharded models, and a step that trains one and loads it into the other."""
    torch.manual_seed(0)
    model, copied = (fully_shard(nn.Linear(4, 3), mesh=mesh) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[union-attr]

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad()
        copied.load_state_dict(model.state_dict(), assign=assign)  # type: ignore[union-attr]

    return model, copied, step


def test_a_sharded_model_is_loaded_inside(mesh: DeviceMesh) -> None:
    """What FSDP2 notes of the shards stays what it is: it runs as it is written afterwards."""
    found = list[Any]()
    for wrap in (lambda step: step, lambda step: aotdist.compile(step, backend="fx")):
        _, copied, step = loading(mesh, assign=False)
        step = wrap(step)
        for at in range(4):
            step(torch.full((2, 4), float(at)))
        found.append([copied.weight.to_local(), copied(torch.ones(2, 4))])
    assert all(map(torch.equal, *found))
    assert len(step.graphs) == 1


def test_a_sharded_model_is_not_loaded_inside_by_assignment(mesh: DeviceMesh) -> None:
    _, copied, step = loading(mesh, assign=True)
    compiled = aotdist.compile(step, backend="fx")
    compiled(torch.ones(2, 4))  # as it is written
    with pytest.raises(aotdist.UnsupportedProgram, match=r"is replaced by another tensor"):
        compiled(torch.ones(2, 4))
    copied(torch.ones(2, 4))
