"""What a function merely closes over: gradients reach it, later changes are seen, nothing is baked in."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import aotdist
from aotdist.capture.code import is_users_code

compiled = functools.partial(aotdist.compile, backend="fx")

WEIGHT = torch.ones(3, requires_grad=True)
SCALE = 2.0


def num_artifacts(target: object) -> int:
    return len(aotdist.api.compiled_call(target).artifacts)


def test_gradients_reach_a_cell() -> None:
    weight = torch.randn(3, requires_grad=True)
    fn = compiled(lambda x: (x * weight).sum())
    fn(torch.ones(3)).backward()
    assert torch.equal(weight.grad, torch.ones(3))


def test_gradients_reach_a_global() -> None:
    WEIGHT.grad = None
    fn = compiled(lambda x: (x * WEIGHT).sum())
    fn(torch.full((3,), 4.0)).backward()
    assert torch.equal(WEIGHT.grad, torch.full((3,), 4.0))


def test_a_write_between_calls_is_seen() -> None:
    offset = torch.zeros(2)
    fn = compiled(lambda x: x + offset)
    assert torch.equal(fn(torch.ones(2)), torch.ones(2))
    offset.fill_(5)
    assert torch.equal(fn(torch.ones(2)), torch.full((2,), 6.0))
    assert num_artifacts(fn) == 1


def test_rebinding_is_seen() -> None:
    offset = torch.zeros(2)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + offset

    call = compiled(fn)
    call(torch.ones(2))
    offset = torch.full((2,), 7.0)
    assert torch.equal(call(torch.ones(2)), torch.full((2,), 8.0))
    assert num_artifacts(call) == 1


def test_a_changed_global_constant_compiles_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = compiled(lambda x: x * SCALE)
    assert torch.equal(fn(torch.ones(2)), torch.full((2,), 2.0))
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert torch.equal(fn(torch.ones(2)), torch.full((2,), 3.0))
    assert num_artifacts(fn) == 2


def test_an_int_is_not_a_bool_is_not_a_float() -> None:
    fn = compiled(lambda x, n: x * n)
    x = torch.ones(2, dtype=torch.int64)
    assert [fn(x, n).dtype for n in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
    assert num_artifacts(fn) == 3


def test_partial_methods_and_containers() -> None:
    holder = SimpleNamespace()

    class Scaler:
        def __init__(self) -> None:
            self.weight = torch.full((2,), 3.0, requires_grad=True)
            self.parts = {"bias": torch.ones(2)}

        def apply(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            return x * self.weight * factor + self.parts["bias"]

    scaler = Scaler()
    holder.call = functools.partial(scaler.apply, factor=torch.full((2,), 2.0))
    fn = compiled(holder.call)
    assert torch.equal(fn(torch.ones(2)), torch.full((2,), 7.0))
    scaler.parts["bias"] = torch.zeros(2)
    out = fn(torch.ones(2))
    assert torch.equal(out, torch.full((2,), 6.0))
    out.sum().backward()
    assert torch.equal(scaler.weight.grad, torch.full((2,), 2.0))


def test_a_module_that_is_closed_over_gets_gradients_and_keeps_its_parameters() -> None:
    model = nn.Linear(3, 1)
    weight = model.weight
    fn = compiled(lambda x: model(x).sum())
    fn(torch.ones(2, 3)).backward()
    assert model.weight is weight
    assert torch.equal(weight.grad, torch.full((1, 3), 2.0))


def test_a_replaced_module_compiles_again() -> None:
    models = {"m": nn.Linear(2, 2, bias=False)}
    fn = compiled(lambda x: models["m"](x))
    fn(torch.ones(1, 2))
    models["m"] = nn.Linear(2, 2, bias=False)
    assert torch.equal(fn(torch.ones(1, 2)), models["m"](torch.ones(1, 2)))


def test_a_nonlocal_tensor_is_reassigned_at_every_call() -> None:
    count = torch.zeros(())

    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count = count + 1
        return x * count

    call = compiled(step)
    assert [call(torch.ones(())).item() for _ in range(3)] == [1.0, 2.0, 3.0]
    assert count.item() == 3
    assert num_artifacts(call) == 1


def test_constants_made_inside_are_fine() -> None:
    fn = compiled(lambda x: x + torch.tensor([1.0, 2.0]) + torch.arange(2))
    assert torch.equal(fn(torch.zeros(2)), torch.tensor([1.0, 3.0]))


def test_a_cached_function_keeps_nothing_of_a_trace() -> None:
    @functools.lru_cache
    def lower(n: int) -> torch.Tensor:
        return torch.tril(torch.ones(n, n))

    compiled = aotdist.compile(lambda x: lower(3) @ x, backend="fx")
    for columns in (2, 5):
        x = torch.randn(3, columns)
        assert torch.equal(compiled(x), lower(3) @ x)


def test_an_object_may_answer_for_every_attribute() -> None:
    """einx's backends have a function for each name, which raises when it is called (x_transformers)."""

    class Backend:
        def __getattr__(self, name: str) -> Callable[[], object]:
            def refuse() -> object:
                raise RuntimeError(f"{name} is not supported")

            return refuse

    backend = Backend()
    call = compiled(lambda x: x * (2 if backend else 1))
    assert torch.equal(call(torch.ones(2)), torch.full((2,), 2.0))


ANNOTATED = Callable[[torch.Tensor], torch.Tensor]


def test_an_alias_of_types_may_answer_for_its_class() -> None:
    """`__dict__` of `Callable[..., int]` is that of the class; torchtitan's logger has a `TypeVar` of it."""
    call = compiled(lambda x: x * getattr(ANNOTATED, "scale", 3))
    assert torch.equal(call(torch.ones(2)), torch.full((2,), 3.0))
    assert num_artifacts(call) == 1


def test_of_a_logger_only_its_level_counts() -> None:
    """`handlers` and `manager` are names that the program reads, and lead to all loggers of the process."""
    logger, sums = logging.getLogger("tests.closures"), list[torch.Tensor]()
    holder = SimpleNamespace(handlers=2.0, manager=1.0)

    @compiled
    def scaled(x: torch.Tensor) -> torch.Tensor:
        if logger.isEnabledFor(logging.DEBUG):
            sums.append(x.sum())
        return x * holder.handlers * holder.manager

    scaled(torch.ones(2))
    assert "loggerDict" not in scaled.source
    logger.setLevel(logging.DEBUG)
    scaled(torch.ones(2))
    assert [one.item() for one in sums] == [2.0]


def applied(net: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: net(x)


def test_modules_that_closures_call_by_one_name() -> None:
    first, second = (nn.Sequential(nn.Linear(2, 2), nn.Dropout(1.0)) for _ in range(2))
    calls = [applied(first), applied(second)]
    both = compiled(lambda x: torch.stack([call(x) for call in calls]))
    for model in (first, second, first):
        model.train(not model.training)
        assert torch.equal(both(torch.ones(2)), torch.stack([first(torch.ones(2)), second(torch.ones(2))]))
    first[0].weight = nn.Parameter(torch.ones(2, 2))
    assert torch.equal(both(torch.ones(2))[1], second(torch.ones(2)))
    first.eval()
    assert torch.equal(both(torch.ones(2))[0], first(torch.ones(2)))


def test_tensors_that_functions_read_by_one_name() -> None:
    """The bands of NeRF's positional encoding; and a list that is called as arguments are."""
    args = [torch.tensor(2.0), torch.tensor(3.0)]
    bands = [lambda x, band=band: torch.sin(x * band) for band in 2.0 ** torch.arange(3)]
    call = compiled(lambda x: torch.stack([band(x) for band in bands]) * args[0])
    expected = torch.sin(torch.ones(()) * 2.0 ** torch.arange(3)) * 2
    assert torch.equal(call(torch.ones(())), expected)


@pytest.mark.parametrize("folder", ["lib/python3/dist-packages", ".local/lib/python3.12/site-packages"])
def test_packages_of_other_environments_are_not_the_users(folder: str) -> None:
    code = compile("def scale(x): return x * FACTOR", f"/elsewhere/{folder}/layers.py", "exec")
    assert not is_users_code(code)
    assert is_users_code(code.replace(co_filename="/elsewhere/layers.py"))
