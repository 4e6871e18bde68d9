"""Gradients that pass a tensor in the caller's hands: they can be watched there, and changed, as in eager."""

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.runtime import derive
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam.autograd import chosen_in_backward, history_of
from tests.semantics.makers import leaf, non_leaf, two_non_leaf
from tests.semantics.meshes import sharded
from tests.semantics.observation import (
    Scene,
    Sight,
    assert_same,
    bits,
    look,
    same_as_eager,
    tangent_for,
    tensors_in,
)
from tests.semantics.programs import Program, programs
from tests.semantics.searching import SWEEP
from tests.semantics.vocabulary import INPUTS, WRAPPERS

Values = dict[str, torch.Tensor]


def chain(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    first = x.sin() * w
    second = (first * x).exp() + first
    return [(first * second * x).sum(), second, first]


def uses_several_times(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    h = x * w
    return [h, (h.sin() * h + h.exp() * w).cumsum(0) + h]


def two_branches(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    shared = x.exp()
    left, right = shared * w, shared + w
    return [left, right, left.sin() * shared, right.cos() * shared]


def a_view(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    h = (x * w).t()
    return [h, h.sin() * 2 + h[:1]]


def a_view_and_its_base(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    h = x * w
    part = h[1:]
    return [part, h, part.sin() * h[:-1]]


def a_view_of_an_input(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    part = x[1:]
    return [part, (part * w[1:]).exp()]


def an_old_value(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    h = x * w
    y = h.cumsum(0)
    h.mul_(2)
    return [h, y, h * y]


def halves(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    a, b = (x * w).chunk(2, 1)
    return [a, b, a * b + a]


def a_written_sum_of_a_view(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    turned = (x * w).exp().t()
    total = turned.sum(0)
    total.t().add_(1)
    return [turned, total]


CHAINS: dict[str, Callable[..., list[torch.Tensor]]] = {
    fn.__name__: fn
    for fn in (
        chain,
        uses_several_times,
        two_branches,
        a_view,
        a_view_and_its_base,
        a_view_of_an_input,
        an_old_value,
        halves,
        a_written_sum_of_a_view,
    )
}

KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(3, 4),
    "TwoTensor": lambda: TwoTensor(torch.randn(3, 4), torch.randn(3, 4)),
    "TwoTensor of TwoTensors": lambda: TwoTensor(
        TwoTensor(torch.randn(3, 4), torch.randn(3, 4)), torch.randn(3, 4)
    ),
}


def seen(tensor: torch.Tensor | None) -> Sight | None:
    if tensor is None:
        return None
    return {name: value for name, value in look(tensor).items() if name != "is_view"}


def held(call: Callable[..., Any], arguments: Values) -> Values:
    """Everything differentiable that the caller holds after a call, but for arguments with a new history."""
    before = list(map(history_of, arguments.values()))
    results = dict(tensors_in("out", call(*arguments.values())))
    pairs = zip(arguments.items(), before, strict=True)
    same = {name: tensor for (name, tensor), history in pairs if history_of(tensor) is history}
    anew = [tensor for name, tensor in arguments.items() if name not in same]
    others = {*map(id, anew), *(id(tensor._base) for tensor in anew if tensor._base is not None)}
    found = {name: t for name, t in {**same, **results}.items() if t.requires_grad}
    return {name: t for name, t in found.items() if others.isdisjoint((id(t), id(t._base)))}


def every_derivative(tensors: Values) -> list[Sight]:
    """The gradient of each tensor with respect to each other."""
    sights: list[Sight] = []
    for end, tensor in tensors.items():
        if not tensor.is_leaf:
            for other, source in tensors.items():
                tangent = tangent_for(tensor, 1)
                (grad,) = torch.autograd.grad(tensor, source, tangent, allow_unused=True, retain_graph=True)
                sights.append({f"d {end} / d {other}": seen(grad)})
    return sights


def with_hooks(tensors: Values) -> list[Sight]:
    """What hooks see, and what is left on `.grad`, when hooks change what passes."""
    met: list[tuple[str, bytes]] = []

    def hook(name: str) -> Callable[[torch.Tensor | None], torch.Tensor | None]:
        def scale(grad: torch.Tensor | None) -> torch.Tensor | None:
            if grad is None:  # another result of the same operation is differentiated: eager calls it too
                return None
            met.append((name, bits(grad)))
            return grad * 1.5

        return scale

    for name, tensor in tensors.items():
        if not tensor.is_leaf:
            tensor.register_hook(hook(name))
            tensor.retain_grad()
    sights: list[Sight] = []
    for end, tensor in tensors.items():
        if tensor.is_leaf:
            continue
        met.clear()
        torch.autograd.backward(tensor, tangent_for(tensor, 3), retain_graph=True)
        sights.append({f"hooks from {end}": sorted(met)})
        sights.append({f"{name}.grad from {end}": seen(t.grad) for name, t in tensors.items()})
        for t in tensors.values():
            t.grad = None
    return sights


def all_at_once(tensors: Values) -> list[Sight]:
    """What is left on `.grad` when all results are differentiated together, and everything is watched."""
    ends = [t for name, t in tensors.items() if name.startswith("out") and not t.is_leaf]
    for tensor in tensors.values():
        tensor.retain_grad()
    torch.autograd.backward(ends, [tangent_for(t, k) for k, t in enumerate(ends)])
    return [{f"{name}.grad": seen(t.grad) for name, t in tensors.items()}]


def assert_both_are_close(fn: Any, use: Callable[[Any], Sequence[torch.Tensor]]) -> None:
    """Assert that `use` returns the same of the eager and of the compiled function, but for rounding."""
    found: list[list[torch.Tensor]] = []
    for call in (fn, aotdist.compile(fn, backend="fx")):
        torch.manual_seed(0)
        found.append([plain for tensor in use(call) for plain in plain_tensors(tensor)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


WAYS = {"grad": every_derivative, "hooks": with_hooks, "together": all_at_once}


def compare(program: Callable[..., Any], arguments: Callable[[], Values], use: Any, **options: Any) -> Any:
    played = []
    target = aotdist.compile(program, backend="fx", settings=options)
    for call in (program, target):
        torch.manual_seed(0)
        made = arguments()
        torch.manual_seed(1)
        played.append(use(held(call, made)))
    assert_same(*played)
    return target


def leaf_and_not(make: Callable[[], torch.Tensor]) -> Callable[[], Values]:
    def build() -> Values:
        x, w = make().requires_grad_(), make().requires_grad_()
        return {"leaf": x, "x": x * 1.5, "w": w}

    return build


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CHAINS)
def test_as_in_eager(name: str, way: str, kind: str) -> None:
    fn = CHAINS[name]
    compare(lambda leaf, x, w: fn(x, w), leaf_and_not(KINDS[kind]), WAYS[way])


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="placements of a sum depend on which of its summands are there"
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["chain", "uses_several_times", "two_branches", "an_old_value"])
def test_dtensors(name: str, way: str, mesh: DeviceMesh) -> None:
    fn = CHAINS[name]
    build = leaf_and_not(lambda: sharded(mesh, torch.randn(3, 4)))
    compare(lambda leaf, x, w: fn(x, w), build, WAYS[way])


@pytest.mark.parametrize("name", CHAINS)
def test_with_the_fewest_bytes_saved(name: str) -> None:
    fn = CHAINS[name]
    compare(lambda leaf, x, w: fn(x, w), leaf_and_not(KINDS["plain"]), with_hooks, partition="min_cut")


def second(tensors: Values) -> list[torch.Tensor]:
    """Derivatives of results with respect to each other, and derivatives of these."""
    ends = [tensors[name] for name in tensors if name.startswith("out")]
    found: list[torch.Tensor] = []
    for source in [*ends[:-1], tensors["x"]]:
        grads = torch.autograd.grad(ends[-1].sum(), source, create_graph=True, allow_unused=True)
        found += [g for g in grads if g is not None]
    more = [g.square().sum() for g in found if g.requires_grad]
    return [*found, *torch.autograd.grad(sum(more), [tensors["leaf"], tensors["w"]])]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CHAINS)
def test_gradients_of_gradients(name: str) -> None:
    def program(leaf: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return CHAINS[name](x, w)

    played = []
    for call in (program, aotdist.compile(program, backend="fx")):
        torch.manual_seed(0)
        played.append(second(held(call, leaf_and_not(KINDS["plain"])())))
    torch.testing.assert_close(*played)


def test_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the backward runs whole, and no part of it is compiled."""
    monkeypatch.setattr(derive, "_in_parts", pytest.fail)
    program = aotdist.compile(lambda x: [(h := x.sin()), (h * x).sum()], backend="fx")
    x = torch.randn(3, requires_grad=True)
    hidden, loss = program(x)
    loss.backward(retain_graph=True)
    (hidden.sum() + loss).backward()
    (artifact,) = program.artifacts
    gates = [name for name in artifact.source.split() if name.startswith("gate_1")]
    assert gates


def test_a_hook_on_a_result_that_is_gone() -> None:
    def use(call: Callable[..., Any]) -> Any:
        x = torch.arange(3.0, requires_grad=True)
        hidden, loss = call(x)
        hidden.register_hook(lambda grad: grad * 3)
        del hidden
        loss.backward()
        return x.grad

    def program(x: torch.Tensor) -> Any:
        h = x.sin()
        return h, (h * x).sum()

    assert torch.equal(use(program), use(aotdist.compile(program, backend="fx")))


def test_results_that_are_dropped_are_freed() -> None:
    program = aotdist.compile(lambda x: [(h := x * 2), (h + 1).sum()], backend="fx")
    x = torch.randn(3, requires_grad=True)
    hidden, loss = program(x)
    gone = weakref.ref(hidden)
    del hidden
    gc.collect()
    assert gone() is None and loss.requires_grad


def test_hooks_that_come_and_go_between_backwards() -> None:
    def use(call: Callable[..., Any]) -> Any:
        x = torch.arange(3.0, requires_grad=True)
        hidden, loss = call(x)
        loss.backward(retain_graph=True)
        handle = hidden.register_hook(lambda grad: handle.remove() or grad * 3)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (grad,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        (hidden.sum() + loss).backward()
        return x.grad + grad

    def program(x: torch.Tensor) -> Any:
        h = x.sin()
        return h, (h * x).sum()

    assert torch.equal(use(program), use(aotdist.compile(program, backend="fx")))


def test_chosen_by_their_edges_and_from_another_thread() -> None:
    """The gradient of a result with respect to another, which is named by its node, in whatever thread."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x.sin()
        return h, (h * x).sum()

    def use(call: Callable[..., Any]) -> list[torch.Tensor]:
        x, found = torch.arange(3.0, requires_grad=True), []
        hidden, loss = call(x)
        edge = torch.autograd.graph.get_gradient_edge(hidden)

        def ask() -> None:
            found.extend(torch.autograd.grad(loss, (edge, x), retain_graph=True))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        ask()
        return found

    assert all(map(torch.equal, use(program), use(aotdist.compile(program, backend="fx"))))


def test_chosen_tensors_are_known_in_threads_of_the_engine() -> None:
    """On a GPU, nodes run in threads that have none of the frames which started the backward."""
    found: list[list[Any] | None] = []

    def look(grad: torch.Tensor) -> None:
        thread = threading.Thread(target=lambda: found.append(chosen_in_backward()))
        thread.start()
        thread.join()

    x = torch.arange(3.0, requires_grad=True)
    middle = x.sin()
    end = middle.exp()
    end.register_hook(look)
    torch.autograd.grad(end.sum(), (x, middle), retain_graph=True)
    end.sum().backward()
    assert found == [[middle.grad_fn], []] and chosen_in_backward() is None


def test_hooks_on_what_gets_no_gradient_are_not_called() -> None:
    def use(call: Callable[..., Any]) -> list[str]:
        called: list[str] = []
        leaves = [torch.randn(3, requires_grad=True) for _ in range(2)]
        used, unused = leaves[0] * 2, leaves[1] * 2
        unused.register_hook(lambda grad: called.append("input"))
        first, second = call(used, unused)
        second.register_hook(lambda grad: called.append("result"))
        first.sum().backward()
        assert leaves[1].grad is None
        return called

    def program(x: torch.Tensor, unused: torch.Tensor) -> Any:
        return x.sin(), x.exp()

    assert use(program) == use(aotdist.compile(program, backend="fx")) == []


@pytest.mark.parametrize("make", [lambda x: x * 2, lambda x: x.t()])
def test_a_list_of_which_only_some_are_differentiated(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The one node of a list sends None to an item whose result nobody uses."""

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        y = make(x)
        return [y, torch._foreach_mul([y, x], 2.0)[1]]

    same_as_eager(lambda: Scene(program, (leaf(),)))


def test_a_model_that_returns_its_hidden_states() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> Any:
            states = [x]
            for block in self.blocks:
                states.append(states[-1] + block(states[-1]).tanh())
            return states[-1].square().mean(), states[1:]

    grads = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = Blocks()
        if compiles:
            aotdist.compile(model, backend="fx")
        loss, states = model(torch.randn(5, 4))
        for state in states:
            state.retain_grad()
        states[1].register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        (loss + states[2].sum()).backward()
        grads.append([*(p.grad for p in model.parameters()), *(state.grad for state in states)])
    assert all(map(torch.equal, *grads))


search = settings(
    max_examples=60 if SWEEP else 3 * settings().max_examples,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def compare_random(program: Program) -> None:
    for use in (every_derivative, with_hooks):
        try:
            torch.manual_seed(0)
            use(held(program.load(), program.arguments()))
        except RuntimeError:
            assume(False)
        try:
            compare(program.load(), program.arguments, use)
        except UnsupportedProgram:
            assume(False)


@search
@given(programs(inputs=tuple(INPUTS.values())))
def test_random_programs(program: Program) -> None:
    compare_random(program)


@search
@given(programs(inputs=WRAPPERS))
def test_random_programs_of_wrappers(program: Program) -> None:
    # Eager counts no write of the wrapper then, so views from before keep a history that is out of date.
    assume(not any("_foreach_" in statement for statement in program.statements))
    compare_random(program)


def multiplied(x, w):
    x.mul_(w)
    return [x.exp()]


def in_two_writes(x, w):
    y = x.exp()
    x.mul_(w)
    x.add_(w.sin())
    return [y, x * w]


def from_another(x, w):
    x.copy_(w)
    return [x.sin()]


def through_a_view(x, w):
    x.t().mul_(w.t())
    x[1:].add_(w[1:])
    return [x.sin()]


VIEWS_TO_WRITE: dict[str, Callable[[], torch.Tensor]] = {
    "with history": lambda: (torch.randn(4, 3, requires_grad=True) * 1.5).t(),
    "of a leaf's": lambda: (torch.randn(4, 3, requires_grad=True).t() * 1.5)[:],
    "a part": lambda: (torch.randn(3, 4, 4, requires_grad=True) * 1.5).permute(1, 0, 2)[..., 0].t(),
    "without history": lambda: torch.randn(4, 3).t(),
    "TwoTensor": lambda: two_non_leaf(4, 3).t(),
}


@pytest.mark.parametrize("make", VIEWS_TO_WRITE.values(), ids=VIEWS_TO_WRITE)
@pytest.mark.parametrize("program", [multiplied, in_two_writes, from_another, through_a_view])
def test_gradients_that_pass_what_is_written_into_a_view(
    program: Callable[..., Any], make: Callable[[], torch.Tensor]
) -> None:
    """Their strides, and so the last bits of sums, are those of the operators that send them."""

    def use(call: Callable[..., Any]) -> list[torch.Tensor]:
        tensors = held(call, {"x": make(), "w": torch.randn(3, 4, requires_grad=True)})
        ends = [(end, tangent_for(end, 1)) for end in tensors.values() if not end.is_leaf]
        pairs = [
            torch.autograd.grad(end, source, tangent, allow_unused=True, retain_graph=True)
            for end, tangent in ends
            for source in tensors.values()
        ]
        return [torch.zeros(()) if grad is None else grad for (grad,) in pairs]

    assert_both_are_close(program, use)


def transposed(x):
    y = x * x
    return y.t(), y * y


def split_in_two(x):
    y = x * x
    first, second = y.split([1, 2])
    return first, y * y * y, second


def a_part_among_others(x):
    y = x * x
    before, part, after = y.sin(), y[1:], y * y
    return part, before, after


def repeated_and_used(x):
    y = x * x
    view = y.expand(5, *y.shape)
    return view, x * view, view.exp() + view


def a_part_that_is_used(x):
    y = x * x
    part = y[1:]
    return part, x[0] * part, y * x


def parts_that_are_used(x):
    y = x * x
    first, second = y.split([1, 2])
    return first, second, y * first, second * first


def of_an_input(x):
    view = x.expand(5, *x.shape)
    return view, view.sin(), x.cos()


@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("make", [leaf, non_leaf, two_non_leaf])
@pytest.mark.parametrize(
    "program",
    [
        transposed,
        split_in_two,
        a_part_among_others,
        repeated_and_used,
        a_part_that_is_used,
        parts_that_are_used,
        of_an_input,
    ],
)
def test_gradients_of_views_and_of_their_base(program, make, is_watched):
    """Eager adds them to those of the base's other uses as they come: sums of three tell in the last bits."""

    def use(call):
        x = make(3, 64)
        ends = call(x)
        if is_watched:
            ends[1].retain_grad()
        start = x if x.is_leaf else x.grad_fn.next_functions[0][0].variable
        torch.autograd.backward(ends, [tangent_for(end, k) for k, end in enumerate(ends)])
        return [start.grad]

    assert_both_are_close(program, use)


def test_gradients_of_a_view_at_every_backward() -> None:
    def use(call: Callable[..., Any]) -> list[torch.Tensor]:
        x, grads = leaf(3, 64), []
        view, *others = call(x)
        for k, ends in enumerate([(view, *others), others, (view,), (view, others[0])]):
            x.grad = None
            torch.autograd.backward(ends, [tangent_for(end, k) for end in ends], retain_graph=True)
            grads.append(x.grad)
        x.grad = None
        view.register_hook(lambda grad: grad * 2)
        sum(end.sin().sum() for end in (view, *others)).backward()
        return [*grads, x.grad]

    assert_both_are_close(repeated_and_used, use)


def test_the_gradient_of_a_view_among_those_of_other_kinds() -> None:
    def program(x: torch.Tensor) -> Any:
        view = (x * x).expand(5, *x.shape)
        return view, x * view, x.sin()

    def use(call: Callable[..., Any]) -> list[torch.Tensor]:
        x = two_non_leaf(3, 4)
        x.retain_grad()
        view, result, _ = ends = call(x)
        torch.autograd.backward(ends, [tangent_for(view, 0), tangent_for(result, 1), torch.ones(3, 4)])
        return [x.grad]

    assert_both_are_close(program, use)


def written_without_history(x):
    with torch.no_grad():
        x.add_(1)
    return [x * x, x.t()]


@pytest.mark.parametrize("makes_view", [False, True], ids=["itself", "a view"])
def test_the_gradient_of_a_result_at_an_input_that_was_written_without_history(makes_view: bool) -> None:
    """Autograd makes the history of a view anew after the write; the result comes from the new one."""
    found = []
    for call in (written_without_history, aotdist.compile(written_without_history, backend="fx")):
        leaf = torch.arange(6.0).reshape(2, 3).requires_grad_()
        x = (leaf * 1.5).t() if makes_view else leaf * 1.5
        product, view = call(x)
        found.append(torch.autograd.grad([product.sum(), view.sum()], [x, leaf], allow_unused=True))
        assert x._version == 1
    for compiled, eager in zip(found[1], found[0], strict=True):
        assert (compiled is None) == (eager is None)
        assert compiled is None or (torch.equal(compiled, eager) and compiled.stride() == eager.stride())
