"""Tensors that user code in a backward keeps: gradients that hooks append, norms, what a function saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.trees import pytree
from tests.semantics.meshes import sharded

Step = Callable[..., Any]
KINDS = pytest.mark.parametrize("kind", ["plain", "two"])


class Keeping(nn.Module):
    """What the tests keep: each gives a `step`, which is given the module and its input."""

    def __init__(self, step: Step, kind: str = "plain") -> None:
        super().__init__()
        weight = torch.linspace(-1, 1, 3)
        self.weight = nn.Parameter(TwoTensor(weight, weight.clone()) if kind == "two" else weight)
        self.log: list[Any] = []
        self.last: Any = None
        self.by_name: dict[str, Any] = {}
        self.step = step

    def forward(self, x: torch.Tensor) -> Any:
        return self.step(self, x)

    def kept(self) -> tuple[Any, ...]:
        return self.log, self.last, self.by_name


def appends(module: Keeping, x: torch.Tensor) -> torch.Tensor:
    y = x * module.weight
    y.register_hook(module.log.append)
    return y.sin().sum()


def in_containers(module: Keeping, x: torch.Tensor) -> torch.Tensor:
    y = x * module.weight

    def hook(grad: torch.Tensor) -> None:
        module.last = grad.sum()
        module.by_name["y"] = (grad, "y")
        module.log.append({"grad": grad, "parts": [grad * 2, 3]})

    y.register_hook(hook)
    return y.cos().sum()


def changes_the_gradient(module: Keeping, x: torch.Tensor) -> torch.Tensor:
    y = x * module.weight

    def hook(grad: torch.Tensor) -> torch.Tensor:
        module.log.append(grad.clone())
        return grad * 2

    y.register_hook(hook)
    return (y * y).sum()


def one_after_the_other(module: Keeping, x: torch.Tensor) -> torch.Tensor:
    y = x * module.weight
    z = y.exp()

    def hook(grad: torch.Tensor) -> None:
        module.last = grad

    for named in (("y", y), ("z", z)):
        named[1].register_hook(hook)
        named[1].register_hook(lambda grad, name=named[0]: module.log.append((name, grad)))
    return (y * z).sum()


def writes_what_it_kept(module: Keeping, x: torch.Tensor) -> torch.Tensor:
    y = x * module.weight

    def hook(grad: torch.Tensor) -> None:
        own = grad.clone()
        module.log.append(own)
        own.mul_(3)

    y.register_hook(hook)
    return y.sin().sum()


class Logging(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: list[Any]) -> torch.Tensor:
        ctx.log = log
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.log.append(grad)
        return grad * 2, None


def asks_a_function(module: Keeping, x: torch.Tensor) -> torch.Tensor:
    return Logging.apply((x * module.weight).sin(), module.log).sum()


def inside_a_checkpoint(module: Keeping, x: torch.Tensor) -> torch.Tensor:
    def block(y: torch.Tensor) -> torch.Tensor:
        z = (y * module.weight).sin()
        if z.requires_grad:
            z.register_hook(lambda grad: module.by_name.update(z=grad))
        return z.exp()

    return checkpoint(block, x, use_reentrant=False).sum()


STEPS = [
    appends,
    in_containers,
    changes_the_gradient,
    one_after_the_other,
    writes_what_it_kept,
    asks_a_function,
    inside_a_checkpoint,
]


def inputs(kind: str = "plain") -> torch.Tensor:
    x = torch.linspace(0.5, 2, 3)
    return TwoTensor(x, x.clone()) if kind == "two" else x


def state(module: Keeping) -> list[Any]:
    """What is kept, tensors with all that can be asked of them."""
    leaves, spec = pytree.tree_flatten(module.kept())
    told = [
        (type(leaf), leaf.detach(), leaf.stride(), leaf.requires_grad, leaf.is_leaf)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]
    same = [[k for k, other in enumerate(leaves) if other is leaf] for leaf in leaves]
    return [repr(told), spec, same, repr(module.weight.grad)]


def pair(step: Step, kind: str = "plain") -> list[Keeping]:
    return [Keeping(step, kind), aotdist.compile(Keeping(step, kind), backend="fx")]


@KINDS
@pytest.mark.parametrize("step", STEPS)
def test_step_by_step(step: Step, kind: str) -> None:
    eager, ours = pair(step, kind)
    for _ in range(3):
        for module in (eager, ours):
            module(inputs(kind)).backward()
        assert state(ours) == state(eager)


@KINDS
@pytest.mark.parametrize("step", [appends, in_containers, changes_the_gradient, asks_a_function])
def test_twice_through_one_graph(step: Step, kind: str) -> None:
    eager, ours = pair(step, kind)
    for module in (eager, ours):
        loss = module(inputs(kind))
        loss.backward(retain_graph=True)
        (loss * 2).backward()
    assert state(ours) == state(eager)


@pytest.mark.parametrize("step", STEPS)
def test_two_forwards_then_two_backwards(step: Step) -> None:
    eager, ours = pair(step)
    for module in (eager, ours):
        for loss in [module(inputs()), module(inputs() * 2)]:
            loss.backward()
    assert state(ours) == state(eager)


def branches(module: Keeping, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y, z = x * module.weight, x + module.weight

    def hook(grad: torch.Tensor) -> None:
        module.last = grad.exp()

    for one in (y, z):
        one.register_hook(hook)
        one.register_hook(module.log.append)
    return y.sin().sum(), z.cos().sum(), (y * z).sum()


@KINDS
def test_only_what_gradients_pass(kind: str) -> None:
    eager, ours = pair(branches, kind)
    for chosen in ([0], [1], [2], [0, 1], [2, 0], [0, 1, 2]):
        for module in (eager, ours):
            losses = module(inputs(kind))
            sum(losses[k] for k in chosen).backward()
        assert state(ours) == state(eager), chosen


@pytest.mark.parametrize("step", STEPS)
def test_of_dtensors(step: Step, mesh: DeviceMesh) -> None:
    eager, ours = Keeping(step), Keeping(step)
    for module in (eager, ours):
        module.weight = nn.Parameter(sharded(mesh, module.weight.detach()))
    aotdist.compile(ours, backend="fx")
    for _ in range(2):
        for module in (eager, ours):
            module(sharded(mesh, inputs())).backward()
        assert state(ours) == state(eager)


LATEST: torch.Tensor | None = None


class OfItsClass(torch.autograd.Function):
    last: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        OfItsClass.last = grads[0]
        return grads[0] * 2


def test_in_a_global_and_in_a_class() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        def hook(grad: torch.Tensor) -> None:
            global LATEST  # noqa: PLW0603
            LATEST = grad

        y = OfItsClass.apply(x.sin())
        y.register_hook(hook)
        return y.exp().sum()

    found = []
    for fn in (program, aotdist.compile(program, backend="fx")):
        for scale in (1, 2):
            fn((inputs() * scale).requires_grad_()).backward()
            found.append((LATEST, OfItsClass.last))
    assert repr(found[:2]) == repr(found[2:])


class Saving(nn.Module):
    """Its hook is a method, and makes an attribute; another is a module's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(3, 3), nn.ReLU()
        self.saves = True
        self.act.register_full_backward_hook(self.save_of_module)

    def save(self, grad: torch.Tensor) -> None:
        if self.saves:
            self.grad = grad

    def save_of_module(self, module: nn.Module, grads: Any, outputs: Any) -> None:
        self.outputs = outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        hidden.register_hook(self.save)
        return self.act(hidden)


def test_by_methods_and_hooks_of_modules() -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = aotdist.compile(Saving(), backend="fx") if compiled else Saving()
        for call in range(4):
            module.saves = call != 2
            module(inputs() * (call + 1)).sum().backward()
            found.append((repr(module.grad), repr(module.outputs)))
    assert found[:4] == found[4:]


def test_losses_one_by_one() -> None:
    eager, ours = pair(branches)
    for module in (eager, ours):
        for loss in module(inputs()):
            loss.backward(retain_graph=True)
    assert state(ours) == state(eager)


@KINDS
@pytest.mark.parametrize("step", [appends, in_containers, changes_the_gradient, asks_a_function])
def test_gradients_with_a_history(step: Step, kind: str) -> None:
    """A penalty on what a hook kept: gradients of intermediates, differentiated in turn."""
    found = []
    for module in pair(step, kind):
        loss = module(inputs(kind))
        (grad,) = torch.autograd.grad(loss, module.weight, create_graph=True)
        kept = [leaf for leaf in pytree.tree_leaves(module.kept()) if isinstance(leaf, torch.Tensor)]
        assert kept
        sum(leaf.sin().sum() for leaf in [grad, *kept]).backward()
        found.append((repr(module.weight.grad), [leaf.requires_grad for leaf in kept]))
    assert found[0] == found[1]


def test_gradients_of_other_kinds() -> None:
    def step(module: Keeping, x: torch.Tensor) -> torch.Tensor:
        y = x * module.weight
        y.register_hook(module.log.append)
        return y.sin()

    eager, ours = pair(step, "two")
    for module in (eager, ours):
        module(inputs("two")).backward(torch.ones(3))
    assert state(ours) == state(eager)


def test_hooks_of_results_and_leaves_beside_them() -> None:
    eager, ours = pair(appends)
    for module in (eager, ours):
        module.weight.register_hook(module.log.append)
        loss = module(inputs())
        loss.register_hook(module.log.append)
        loss.backward()
    assert state(ours) == state(eager)


def test_sizes_that_differ() -> None:
    eager = Keeping(in_containers)
    ours = aotdist.compile(Keeping(in_containers), backend="fx", settings=aotdist.Settings(dynamic=True))
    for rows in (2, 5, 7):
        for module in (eager, ours):
            module(torch.linspace(0, 1, 3 * rows).reshape(rows, 3)).backward()
        assert state(ours) == state(eager)


def test_it_is_compiled_once() -> None:
    module = aotdist.compile(Keeping(appends), backend="fx")
    for _ in range(3):
        module(inputs()).backward()
    assert len(module.graphs) == 1
    assert "CHANGES.replay([results[" in module.source


def test_inductor() -> None:
    eager, ours = Keeping(in_containers), aotdist.compile(Keeping(in_containers), backend="inductor")
    for _ in range(2):
        for module in (eager, ours):
            module(inputs()).backward()
    kept, expected = (pytree.tree_leaves(module.kept()) for module in (ours, eager))
    tensors = [position for position, leaf in enumerate(expected) if isinstance(leaf, torch.Tensor)]
    for position in tensors:
        torch.testing.assert_close(kept[position], expected[position])


def test_a_kept_tensor_holds_its_own_memory() -> None:
    """What the user does to it afterwards changes no gradient, and later backwards do not change it."""
    eager, ours = pair(appends)
    for module in (eager, ours):
        loss = module(inputs())
        loss.backward(retain_graph=True)
        module.log[0].zero_()
        loss.backward()
    assert state(ours) == state(eager)


class Holder:
    def __init__(self, grad: torch.Tensor) -> None:
        self.grad = grad


def keeps_its_forward(module: Keeping, x: torch.Tensor) -> torch.Tensor:
    y = (x * module.weight).sin()
    y.register_hook(lambda _: module.log.append(y))
    return y.sum()


def keeps_in_an_object(module: Keeping, x: torch.Tensor) -> torch.Tensor:
    y = x * module.weight
    y.register_hook(lambda grad: module.log.append(Holder(grad)))
    return y.sum()


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (keeps_its_forward, "keeps a tensor in the backward that the backward does not"),
        (keeps_in_an_object, "in an object that is no container"),
    ],
)
def test_what_is_refused_leaves_nothing(step: Step, what: str) -> None:
    module = Keeping(step)
    with pytest.raises(UnsupportedProgram, match=what):
        aotdist.compile(module, backend="fx")(inputs())
    assert module.log == []


def test_some_of_many_results() -> None:
    """Which tensors are kept is not known for every choice of more than four results."""

    def step(module: Keeping, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * module.weight
        y.register_hook(module.log.append)
        return tuple((y * k).sum() for k in range(1, 6))

    eager, ours = pair(step)
    for module in (eager, ours):
        sum(module(inputs())).backward()
    assert state(ours) == state(eager)
    losses = ours(inputs())
    with pytest.raises(UnsupportedProgram, match="of the 5 results only some get a gradient"):
        losses[0].backward()
    assert len(ours.log) == 1


def removes_the_oldest(log: list[Any], grad: torch.Tensor) -> None:
    log.append(grad)
    if len(log) > 2:
        log.pop(0)


def starts_anew(log: list[Any], grad: torch.Tensor) -> None:
    log.clear()
    log.append(grad)


def only_the_first(log: list[Any], grad: torch.Tensor) -> None:
    if not log:
        log.append(grad)


def only_a_few(log: list[Any], grad: torch.Tensor) -> None:
    if len(log) < 3:
        log.append(len(grad))


def keeps_the_last_beside_it(log: list[Any], grad: torch.Tensor) -> None:
    log[:] = [*log[-1:], grad]


def turns_around(log: list[Any], grad: torch.Tensor) -> None:
    log.append(len(log))
    log.reverse()


def in_front(log: list[Any], grad: torch.Tensor) -> None:
    log.insert(0, "heard")


@pytest.mark.parametrize(
    "change",
    [
        removes_the_oldest,
        starts_anew,
        only_the_first,
        only_a_few,
        keeps_the_last_beside_it,
        turns_around,
        in_front,
    ],
)
@pytest.mark.parametrize("how_often", [(1, 1, 1, 1), (2, 3, 1, 2)], ids=repr)
def test_a_list_that_does_not_only_grow(
    change: Callable[[list[Any], torch.Tensor], None], how_often: tuple[int, ...]
) -> None:
    """What a hook does may depend on what it finds: eager's, or refused where it finds something else."""

    def step(module: Keeping, x: torch.Tensor) -> torch.Tensor:
        y = x * module.weight
        y.register_hook(lambda grad: change(module.log, grad))
        return y.sin().sum()

    _run_until_refused(*pair(step), how_often)


def _run_until_refused(eager: Keeping, ours: Keeping, how_often: tuple[int, ...]) -> None:
    """Each forward, and as many backwards; only one that is not the first of its forward may be refused."""
    for times in how_often:
        expected, loss = eager(inputs()), ours(inputs())
        for k in range(times):
            expected.backward(retain_graph=k + 1 < times)
            try:
                loss.backward(retain_graph=k + 1 < times)
            except UnsupportedProgram as error:
                assert k and "where its forward left" in str(error)
                return
            assert state(ours) == state(eager)


def test_what_is_beside_others_in_a_list_is_refused() -> None:
    def step(module: Keeping, x: torch.Tensor) -> torch.Tensor:
        y = x * module.weight
        y.register_hook(lambda grad: module.log.insert(0, grad))
        return y.sum()

    module = aotdist.compile(Keeping(step), backend="fx")
    module(inputs()).backward()
    with pytest.raises(UnsupportedProgram, match=r"in `log`, beside others that it finds(.|\n)*append"):
        module(inputs())
    assert len(module.log) == 1


def test_a_list_that_is_replaced_between_calls() -> None:
    eager, ours = pair(appends)
    for call in range(4):
        old = [module.log for module in (eager, ours)]
        for module in (eager, ours):
            if call % 2:
                module.log = []
            module(inputs()).backward()
        assert state(ours) == state(eager)
        assert len(old[0]) == len(old[1])
