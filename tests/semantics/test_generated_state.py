"""Random programs with state in Python: what they compute, leave, and find at the next call is eager's.

Forwards count, set flags, keep lists and tensors; hooks, which keep gradients, and checkpoints do so in
backwards, which run once, twice or not at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.searching import search, timeout

pytestmark = timeout

IN_BOTH = (
    "m.n += 1",
    "m.n -= 2",
    "m.n = (m.n * 3 + 1) % 7",
    "m.n = 5",
    "m.flag = not m.flag",
    "m.alpha = m.alpha * 0.5 + 0.1",
    "m.config['k'] += 1",
    "m.config.setdefault('new', m.n)",
    "m.config.pop('new', None)",
    "m.items.append(m.n)",
    "m.items.append('here')",
    "m.items.clear()",
    "m.name = 'set'",
    "m.pair = (m.n, m.flag)",
    "m.option = m.n",
    "m.child.n -= 1",
)
IN_FORWARD = (
    *IN_BOTH,
    "m.alpha = m.n / 10",
    "m.name = f'v{m.n}'",
    "m.option = None if m.n % 2 else 3",
    "m.last = y.detach()",
    "m.last = y.detach() if m.last is None else None",
    "m.items.append(y.detach())",
    "m.config['t'] = y.detach()",
    "m.total = m.total + 1",
)
IN_HOOK = (
    *IN_BOTH,
    "m.items.append(grad)",
    "m.items.append((grad.sum(), m.n))",
    "m.last = grad",
    "m.last = grad if m.last is None else None",
    "m.config['t'] = [grad * 2, 'k']",
    "m.option = grad.norm() if m.n % 2 else 3",
)
VALUES = (
    "y * m.n",
    "y + m.alpha",
    "y if m.flag else -y",
    "y * (m.n % 3)",
    "y + m.config['k']",
    "y + len(m.items)",
    "y + m.total",
    "y * m.linear.weight.sum() if m.n > 2 else y",
    "y + (0 if m.option is None else m.option)",
    "y + m.pair[0]",
    "y * m.child.n",
    "y / (1 + abs(m.n))",
    "y + torch.arange(4) * m.n",
    "y + sum(item for item in m.items if isinstance(item, int))",
)
GRADIENTS = ("None", "grad * 2", "grad * m.n", "grad * m.alpha", "-grad if m.flag else grad")

HOOK = """
def hook_{k}(grad):
    {change}
    return {value}
y.register_hook(hook_{k})"""
BLOCK = """
def block_{k}(y):
    {change}
    return (y * {factor}).sin()
y = checkpoint(block_{k}, y, use_reentrant=False)"""
BRANCH = """
if m.n % {k} == 0:
    {change}"""

forwards, backwards = st.sampled_from(IN_FORWARD), st.sampled_from(IN_BOTH)
hooks = st.sampled_from(IN_HOOK)
small = st.integers(2, 4)
STATEMENTS = (
    forwards,
    st.sampled_from(VALUES).map("y = {}".format),
    st.builds(lambda k, change: BRANCH.format(k=k, change=change), small, forwards),
)
IN_BACKWARDS = (
    st.builds(
        lambda k, change, value: HOOK.format(k=k, change=change, value=value),
        st.integers(0, 99),
        hooks,
        st.sampled_from(GRADIENTS),
    ),
    st.builds(
        lambda k, change, factor: BLOCK.format(k=k, change=change, factor=factor),
        st.integers(0, 99),
        backwards,
        st.sampled_from(("2", "m.n", "m.alpha")),
    ),
)
HOW_OFTEN = st.lists(st.sampled_from((1, 1, 1, 0, 2)), min_size=5, max_size=5)


class Stateful(nn.Module):
    def __init__(self, step: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.child = nn.Linear(4, 4), nn.Module()
        self.register_buffer("total", torch.zeros(4))
        self.n, self.flag, self.alpha, self.name = 0, False, 0.5, ""
        self.config: dict[str, Any] = {"k": 1}
        self.items: list[Any] = []
        self.last, self.option, self.pair = None, None, (0, False)
        self.child.n = 1
        self.step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(self, x)

    def left(self) -> str:
        names = ("n", "flag", "alpha", "name", "config", "items", "last", "option", "pair", "total")
        grads = [None if p.grad is None else p.grad.tolist() for p in self.parameters()]
        return repr(([_data(getattr(self, name)) for name in names], self.child.n, grads))


def _data(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.requires_grad
    if isinstance(value, dict):
        return {key: _data(value[key]) for key in sorted(value)}
    return [_data(item) for item in value] if isinstance(value, list) else value


def step_of(statements: list[str]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    lines = ["y = m.linear(x)", *(line for text in statements for line in text.splitlines()), "return y"]
    names: dict[str, Any] = {"torch": torch, "checkpoint": checkpoint}
    exec("\n    ".join(["def step(m, x):", *lines]), names)
    return names["step"]


def run(statements: list[str], how_often: list[int]) -> None:
    torch.manual_seed(0)
    eager = Stateful(step_of(statements))
    ours = copy.deepcopy(eager)
    aotdist.compile(ours, backend="fx", settings={"max_artifacts": 100})
    for call, times in enumerate(how_often):
        x = torch.randn(3, 4)
        if call == 3:
            eager.n = ours.n = 11
            eager.flag = ours.flag = True
        expected, found = eager(x), ours(x)
        assert torch.equal(expected, found)
        for k in range(times):
            expected.sum().backward(retain_graph=k + 1 < times)
            try:
                found.sum().backward(retain_graph=k + 1 < times)
            except UnsupportedProgram as error:
                assert k and "where its forward left" in str(error), error
                return
        assert eager.left() == ours.left(), (call, eager.left()[:200], ours.left()[:200])


few = settings(search, max_examples=settings().max_examples)


@few
@given(st.lists(st.one_of(*STATEMENTS), min_size=2, max_size=6), HOW_OFTEN)
def test_in_forwards(statements: list[str], how_often: list[int]) -> None:
    run(statements, how_often)


TAKES_OUT_AND_APPENDS = [
    HOOK.format(k=1, change="m.items.append('here')", value="None"),
    "y = y * m.linear.weight.sum()",
    HOOK.format(k=2, change="m.items.clear()", value="None"),
]


KEEPS_A_RESULTS_GRADIENT_AND_APPENDS = [
    HOOK.format(k=1, change="m.items.append('here')", value="None"),
    HOOK.format(k=2, change="m.last = grad", value="grad * 2"),
]


TURNS_AND_APPENDS = [
    HOOK.format(k=1, change="m.flag = not m.flag", value="grad * m.alpha"),
    HOOK.format(k=2, change="m.items.append(m.n)", value="grad * 2"),
]


@few
@example(TAKES_OUT_AND_APPENDS, [0, 1, 2, 1, 1])
@example(TURNS_AND_APPENDS, [1, 1, 1, 0, 1])
@example(KEEPS_A_RESULTS_GRADIENT_AND_APPENDS, [1, 1, 2, 1, 1])
@given(st.lists(st.one_of(*STATEMENTS, *IN_BACKWARDS), min_size=2, max_size=6), HOW_OFTEN)
def test_in_forwards_and_backwards(statements: list[str], how_often: list[int]) -> None:
    run(statements, how_often)
