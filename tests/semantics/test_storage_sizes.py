"""Storages that are freed and had back: what FSDP does to the parameters that it gathers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import aotdist
from aotdist.api import compiled_call
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.trees import pytree

FULL = 48
"""Bytes of a (3, 4) tensor."""


def resize(x: torch.Tensor, num_bytes: int) -> None:
    x.untyped_storage().resize_(num_bytes)


@torch.no_grad()
def gather(x: torch.Tensor, shard: torch.Tensor) -> None:
    resize(x, FULL)
    x.copy_(shard.view(3, 4))


def forward_of_fsdp(x, shard, w):
    gather(x, shard)
    y = x * w
    resize(x, 0)
    return y


def forward_and_backward_of_fsdp(x, shard, w):
    gather(x, shard)
    v = w * 1
    y = x * v

    def again(_):
        with torch.autograd._unsafe_preserve_version_counter(x):
            gather(x, shard)

    if w.requires_grad:
        y.register_hook(again)
        v.register_hook(lambda _: resize(x, 0))
    resize(x, 0)
    return y


def with_a_typed_storage(x, shard, w):
    storage = x._typed_storage()
    if storage._size() == 0:
        storage._resize_(12)
    with torch.no_grad():
        x.copy_(shard.view(3, 4))
    y = x * w
    storage._resize_(0)
    return y


def filled_and_kept(x, shard, w):
    gather(x, shard)
    return x * w


def freed_only(x, shard, w):
    y = shard.view(3, 4) * w
    resize(x, 0)
    return y


def freed_and_filled(x, shard, w):
    resize(x, 0)
    gather(x, shard)
    return x * w


def through_a_view(x, shard, w):
    gather(x, shard)
    rows = x[1:]
    y = rows * w[1:]
    rows.untyped_storage().resize_(0)
    return y


def larger_than_needed(x, shard, w):
    gather(x, shard)
    resize(x, 2 * FULL)
    return x * w


def an_intermediate(x, shard, w):
    y = shard.view(3, 4) * 2
    z = y * w
    resize(y, 0)
    return z


def by_its_size(x, shard, w):
    if x.untyped_storage().size() == 0:
        gather(x, shard)
    return x * w


def freed_in_backward(x, shard, w):
    gather(x, shard)
    v = w * 1
    if w.requires_grad:
        v.register_hook(lambda _: resize(x, 0))
    return x * v


DIFFERENTIABLE = (
    forward_and_backward_of_fsdp,
    filled_and_kept,
    freed_only,
    freed_and_filled,
    larger_than_needed,
    by_its_size,
    freed_in_backward,
)
"""In the others, eager's backward would read what is freed, and the process die."""

PROGRAMS: list[Callable[..., Any]] = [
    forward_of_fsdp,
    forward_and_backward_of_fsdp,
    with_a_typed_storage,
    filled_and_kept,
    freed_only,
    freed_and_filled,
    through_a_view,
    larger_than_needed,
    an_intermediate,
    by_its_size,
    freed_in_backward,
]


def played(call: Callable[..., Any], *, freed: bool, requires_grad: bool) -> list[Any]:
    """What is seen of `x` and of the results; its data is not looked at where its storage is empty."""
    torch.manual_seed(0)
    x, shard, w = torch.randn(3, 4), torch.randn(12), torch.randn(3, 4, requires_grad=requires_grad)
    if freed:
        resize(x, 0)
    storage, seen = x.untyped_storage(), list[Any]()

    def look() -> None:
        size = x.untyped_storage().nbytes()
        same = x.untyped_storage()._cdata == storage._cdata
        seen.append((size, same, x._version, x.tolist() if size >= FULL else None))

    y = call(x, shard, w)
    look()
    seen.append(y.tolist())
    if y.requires_grad:
        y.sum().backward()
        look()
        seen.append(w.grad.tolist())
    return seen


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("freed", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_in_eager(program: Callable[..., Any], freed: bool, requires_grad: bool) -> None:
    if requires_grad and program not in DIFFERENTIABLE:
        pytest.skip("in eager the process dies")
    options = {"freed": freed, "requires_grad": requires_grad}
    compiled = aotdist.compile(program, backend="fx")
    assert played(compiled, **options) == played(program, **options)


@pytest.mark.parametrize("freed", [False, True])
@pytest.mark.parametrize("program", [forward_of_fsdp, filled_and_kept, freed_only, through_a_view])
def test_behind_dynamo(program: Callable[..., Any], freed: bool) -> None:
    """Dynamo makes an operator of a resize."""
    torch._dynamo.reset()
    requires_grad = program in DIFFERENTIABLE
    compiled = torch.compile(program, backend="aotdist", options={"backend": "fx"}, fullgraph=True)
    seen = [played(call, freed=freed, requires_grad=requires_grad) for call in (program, compiled, compiled)]
    assert seen[0] == seen[1] == seen[2]


def refilled(y: torch.Tensor, num_bytes: int = FULL) -> torch.Tensor:
    resize(y, 0)
    resize(y, num_bytes)
    with torch.no_grad():
        return y.fill_(3)


INTERMEDIATES: dict[str, Callable[[torch.Tensor], Any]] = {
    "returned": lambda x: refilled(x * 2),
    "returned with a view of before": lambda x: (y := x * 2, y[1:], refilled(y))[:2],
    "returned with a view of after": lambda x: (y := refilled(x * 2), y[1:]),
    "a view of it returned": lambda x: refilled(x * 2)[1:],
    "by a view": lambda x: (y := x * 2, refilled(y[1:]).add_(1), y.fill_(2))[0],
    "transposed in place": lambda x: refilled(x * 2).t_(),
    "longer": lambda x: refilled(x * 2, 2 * FULL),
    "twice": lambda x: refilled(refilled(x * 2) + 1) * 2,
    "computed with": lambda x: refilled(x * 2) * x,
    "free in the end": lambda x: (y := refilled(x * 2), y * x, resize(y, 0))[::2],
}


def sizes_and_data(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    num_bytes = value.untyped_storage().nbytes()
    return num_bytes, value.size(), value.stride(), num_bytes and value.tolist()


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("program", INTERMEDIATES)
def test_an_intermediate_has_its_storage_back(program: str, requires_grad: bool) -> None:
    fn = INTERMEDIATES[program]
    x = torch.randn(3, 4, requires_grad=requires_grad)
    results = [pytree.tree_map(sizes_and_data, call(x)) for call in (fn, aotdist.compile(fn, backend="fx"))]
    assert results[0] == results[1]


def test_a_storage_of_another_size_takes_another_artifact() -> None:
    compiled = aotdist.compile(by_its_size, backend="fx")
    for freed in (True, False, True, False):
        options = {"freed": freed, "requires_grad": False}
        assert played(compiled, **options) == played(by_its_size, **options)
    assert len(compiled_call(compiled).artifacts) == 2


def test_no_memory_is_kept_for_what_is_freed() -> None:
    """What was gathered is not handed out of the region where nobody can see it."""
    compiled = aotdist.compile(forward_of_fsdp, backend="fx")
    played(compiled, freed=True, requires_grad=False)
    (artifact,) = compiled_call(compiled).artifacts
    (graph,) = artifact.compilation.graphs().values()
    assert [str(slot) for slot in graph.outs] == ["out[0]"]


def test_of_an_input_that_shares_memory_it_is_refused_by_name() -> None:
    def program(x, row):
        row.add_(1)
        resize(x, 0)
        return row * 2

    x = torch.ones(3, 4)
    with pytest.raises(UnsupportedProgram, match=r"`args\[0\]` .* shares memory with another"):
        aotdist.compile(program, backend="fx")(x, x[0])
    assert x.untyped_storage().nbytes() == FULL and x.sum() == 12
