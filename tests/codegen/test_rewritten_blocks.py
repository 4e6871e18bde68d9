"""Equal blocks are rewritten once: the graph is, node for node, that of a rewrite of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.node import map_arg
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist import pipeline
from aotdist.codegen.contract import Backend
from aotdist.codegen.rewritten_blocks import prepared_by_blocks
from aotdist.partition.traits import view_base
from aotdist.program import Graph

PLACES = ("phase", "source", "module", "seq_nr", "function", "unit", "serial", "policy", "grad")


class Attention(nn.Module):
    """Attention that is written out: Inductor's rewrites find it in the joint graph."""

    def __init__(self, dropped: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(dropped)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(2, 5, 2, 8).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        weights = self.drop((q @ k.transpose(-2, -1) / math.sqrt(8)).softmax(-1))
        x = x + self.out((weights @ v).transpose(1, 2).reshape(2, 5, 16))
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Counting(nn.Module):
    """Writes its buffers, and adds nothing that a rewrite leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(5), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x).to(torch.float64).to(torch.float32) + torch.zeros(2, 5, 16)
        return self.linear(x).relu().clone().sin().cos().tanh().sigmoid().exp().log1p()


def called(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)  # type: ignore[no-any-return]


def again(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module, by: Callable[[nn.Module, Tensor], Tensor] = called) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(16, 16), nn.ModuleList(blocks), nn.Linear(16, 4)
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.by(block, x)
        return self.head(x).square().mean()


def in_bfloat16(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def program(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    return program


def whole_step(model: nn.Module) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Mixed(nn.Module):
    """Blocks of two kinds take turns, in blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(Attention(), Counting(), Attention(), Counting())

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


class Outputs(Model):
    """Gives what its blocks give, copied, so that each output has memory of its own."""

    def forward(self, x: Tensor) -> Any:
        values = [self.embed(x)]
        for block in self.blocks:
            values.append(block(values[-1]).clone() + 0)
        return values, values[-1].view(-1)


class Scaled(nn.Module):
    """Is given a mask, and holds a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x.sin() + mask) * torch.tensor(0.5) + torch.tensor(0.0)


class GivenMask(Model):
    """Its mask holds zeros, as that of a batch without padding: a rewrite drops the sum in each block."""

    def forward(self, x: Tensor) -> Tensor:
        mask, x = (1 - torch.ones(5, 1)) * -1e9, self.embed(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x).square().mean()


class Branching(nn.Module):
    """Chooses by data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return torch.cond(y.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos(), (y,))  # type: ignore[no-any-return]


class Measured(nn.Module):
    """Reads a number off a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y / (1 + y.detach().norm().item())


class Copying(nn.Module):
    """Gives copies of what it is given, in memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return self.inner(x), mask.clone(), mask.clone().view(-1)


class Copies(Model):
    """Gives what its blocks copy of a constant."""

    def forward(self, x: Tensor) -> Any:
        mask, x, copies = torch.zeros(2, 5), self.embed(x), list[Tensor]()
        for block in self.blocks:
            x, *made = block(x, mask)
            copies += made
        return self.head(x).square().mean(), copies, mask


PROGRAMS: dict[str, Callable[[], Callable[..., Any]]] = {
    "attention": lambda: Model(*(Attention() for _ in range(4))),
    "dropout": lambda: Model(*(Attention(0.2) for _ in range(4))),
    "inference": lambda: torch.no_grad()(Model(*(Attention() for _ in range(4)))),
    "checkpoints": lambda: Model(*(Attention(0.2) for _ in range(4)), by=again),
    "buffers": lambda: Model(*(Counting() for _ in range(5))),
    "autocast": lambda: in_bfloat16(Model(*(Attention() for _ in range(4)))),
    "a whole step": lambda: whole_step(Model(*(Attention() for _ in range(4)))),
    "an odd one": lambda: Model(Attention(), Attention(), Counting(), Attention(0.5), Attention()),
    "blocks in blocks": lambda: Model(Mixed(), Mixed(), Mixed()),
    "constants": lambda: GivenMask(*(Scaled() for _ in range(4))),
    "branches": lambda: Model(*(Branching() for _ in range(4))),
    "outputs": lambda: Outputs(*(Attention() for _ in range(8))),
}


class Rewritten(Exception):
    """Nothing is compiled."""


def described(graph: Graph) -> list[Any]:
    """The nodes of a graph, by position, with what is known of each."""
    at: dict[torch.fx.Node, str] = {}
    found = list[Any]()
    for node in graph.gm.graph.nodes:
        if node.op == "get_attr" and not node.users:  # a rewrite leaves what it needs no longer
            continue
        at[node] = f"#{len(at)}"
        arguments = map_arg((node.args, node.kwargs), at.__getitem__)
        vals = node.meta.get("val")
        vals = vals if isinstance(vals, (list, tuple)) else [vals]
        sizes = [(v.shape, v.stride(), v.dtype) if isinstance(v, Tensor) else v for v in vals]
        known = {key: node.meta[key] for key in PLACES if key in node.meta and node.op != "get_attr"}
        target = None if node.op == "get_attr" else node.target
        found.append((node.op, target, str(arguments), str(sizes), str(sorted(known.items()))))
    return found


def compared(program: Callable[..., Any], inputs: Any, patch: pytest.MonkeyPatch, **settings: Any) -> int:
    """How many nodes the rewrites of a program's parts were given less than that of the whole."""
    given = list[int]()

    class Counted:
        def __init__(self, backend: Backend) -> None:
            self.name, self._backend = backend.name, backend

        def prepare_joint(self, graph: Graph) -> Graph:
            given.append(len(graph.gm.graph.nodes))
            return self._backend.prepare_joint(graph)

    def both(backend: Backend, joint: Graph) -> Graph:
        whole = described(backend.prepare_joint(joint))
        parts: Any = Counted(backend)
        assert described(prepared_by_blocks(parts, joint)) == whole
        given.insert(0, len(joint.gm.graph.nodes))
        raise Rewritten

    with patch.context() as here, pytest.raises(Rewritten):
        here.setattr(pipeline, "prepared_by_blocks", both)
        compiled = aotdist.compile(program, backend="inductor", settings=aotdist.Settings(**settings))
        compiled(*inputs)
        compiled(*inputs)  # the first call of a step makes its optimizer's state, in eager
    assert len(given) > 1
    return given[0] - sum(given[1:])


def test_copies_of_a_constant_lie_in_memory_of_their_own(monkeypatch: pytest.MonkeyPatch):
    owners: list[torch.fx.Node] = []

    def noted(backend: Backend, joint: Graph) -> Graph:
        results = prepared_by_blocks(backend, joint).named_results().items()
        owners.extend(view_base(node) for slot, node in results if node is not None and slot.role == "output")
        raise Rewritten

    monkeypatch.setattr(pipeline, "prepared_by_blocks", noted)
    with pytest.raises(Rewritten):
        aotdist.compile(Copies(*(Copying() for _ in range(6))), backend="inductor")(torch.randn(2, 5, 16))
    assert len(owners) == len(set(owners)) >= 1 + 2 * 6 + 1


class Flexible(nn.Module):
    """Takes batches of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        weights = (x @ x.transpose(-2, -1) / x.shape[1]).softmax(-1) + torch.zeros(x.shape[1], x.shape[1])
        return x + self.down(F.gelu(self.up(self.norm(weights @ x))))


def test_sizes_may_be_symbols(monkeypatch: pytest.MonkeyPatch):
    model = Model(*(Flexible() for _ in range(4)))
    assert compared(model, [torch.randn(2, 5, 16)], monkeypatch, dynamic=True) > 0


def test_blocks_that_read_numbers_off_tensors_are_rewritten_each(monkeypatch: pytest.MonkeyPatch):
    compared(Model(*(Measured() for _ in range(4))), [torch.randn(2, 5, 16)], monkeypatch)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_graph_is_that_of_a_rewrite_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    assert compared(PROGRAMS[name](), [torch.randn(2, 5, 16)], monkeypatch) > 0
