"""Results that are made from what an equal call gave: the graph is, node for node, the one without."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from aotdist.trace import functionalise
from aotdist.trace.known_results import KnownResults
from aotdist.trace.operators import corrections
from tests.trace.recorded import recorded


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Routed(nn.Module):
    """Dense experts, the best two of which count."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        mask = torch.zeros(*x.shape[:-1], 3).scatter_(-1, chosen, weights)
        return x + sum(mask[..., k : k + 1] * expert(x).tanh_() for k, expert in enumerate(self.experts))


def _normalised() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(inplace=True))


def _checkpointed(block: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = cast("torch.Tensor", checkpoint(block, x, use_reentrant=False))
        return x

    return run


def _with_autocast(block: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(x).float()

    return run


def _translating(model: nn.Transformer) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: model(x, x.flip(1))


def _recurrent(layers: nn.LSTM) -> Callable[[torch.Tensor], torch.Tensor]:
    """The gradients of two biases are one tensor."""
    return lambda x: layers(x)[0]


def _constants(x: torch.Tensor) -> torch.Tensor:
    """1, 1.0 and True are equal, and so are results of unequal dtypes that come of them."""
    whole = x.detach().long()
    return x.sum() + (whole * 1).sum() + (whole * 1.0).sum() + (whole * True).sum() + whole.div(2).sum()


def _views(x: torch.Tensor) -> torch.Tensor:
    """Views of one kind, of the same and of other memory, written, conjugated, and with an offset."""
    first, second = x.clone(), x.clone()
    for one in (first, second):
        one[:, 1:].mul_(2)
        one.t()[1].add_(one[0, 1])
    turned = torch.view_as_complex(first.view(-1, 4, 2)).conj()
    return (turned * turned).real.sum() + second.as_strided((2, 3), (3, 1), 1).sum() + first.split(2)[1].sum()


def _without_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        other = x.sin().sin()
        other.t().add_(1)
        other = other.t().sin()
    return (x.t() * other).sum()


def _solved(x: torch.Tensor) -> torch.Tensor:
    """Operators that check, and have no result: two of them are alike."""
    for _ in range(2):
        gram = x @ x.mT + 4 * torch.eye(4)
        x = torch.linalg.solve(gram, x) + torch.linalg.cholesky(gram) @ torch.linalg.inv(gram) @ x
    return x


SEQUENCES, IMAGES = (2, 3, 8), (2, 2, 4, 4)
PROGRAMS: dict[str, tuple[Callable[[], Callable[[torch.Tensor], torch.Tensor]], tuple[int, ...]]] = {
    "attention": (lambda: nn.Sequential(*(Attending() for _ in range(3))), SEQUENCES),
    "dropout": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout()) for _ in range(3))),
        SEQUENCES,
    ),
    "experts": (lambda: nn.Sequential(Routed(), Routed()), SEQUENCES),
    "norms with buffers": (lambda: nn.Sequential(_normalised(), _normalised()), IMAGES),
    "turns": (lambda: nn.Sequential(Attending(), Routed(), Attending(), Routed()), SEQUENCES),
    "one block twice": (lambda: nn.Sequential(*[Attending()] * 2), SEQUENCES),
    "checkpoints": (lambda: _checkpointed(nn.Sequential(Attending(), nn.Dropout())), SEQUENCES),
    "autocast": (lambda: _with_autocast(nn.Sequential(Attending(), Attending())), SEQUENCES),
    "encoder and decoder": (
        lambda: _translating(nn.Transformer(8, 2, 1, 2, 16, batch_first=True)),
        SEQUENCES,
    ),
    "recurrent": (lambda: _recurrent(nn.LSTM(8, 8, 2)), SEQUENCES),
    "constants": (lambda: _constants, SEQUENCES),
    "views": (lambda: _views, (4, 8)),
    "without grad": (lambda: _without_grad, (4, 8)),
    "without results": (lambda: _solved, (4, 8)),
}


def _unknown(*_: object) -> None:
    return None


def _never(_: object) -> bool:
    return False


def _forgetful(patch: pytest.MonkeyPatch) -> None:
    """Every result is computed, and functional operators go through PyTorch's mode."""
    patch.setattr(KnownResults, "key", _unknown)
    patch.setattr(functionalise, "is_of_one_tensor", _never)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_graph_is_the_one_of_results_that_are_all_computed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, size = PROGRAMS[name]
    program = make()
    found = recorded(program, size, monkeypatch)
    with monkeypatch.context() as patch:
        _forgetful(patch)
        expected = recorded(program, size, monkeypatch)
    assert [len(graph) for graph in found] == [len(graph) for graph in expected]
    assert len(found) > 0 and len(found[0]) > 10
    for graph, other in zip(found, expected, strict=True):
        for node, computed in zip(graph, other, strict=True):
            assert node == computed


def test_more_layers_take_no_more_fake_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Any] = []
    compute = corrections.fake_result

    def counted(operator: Any, *args: Any, **kwargs: Any) -> Any:
        computed.append(operator)
        return compute(operator, *args, **kwargs)

    monkeypatch.setattr(corrections, "fake_result", counted)
    counts = []
    for depth in (2, 5):
        recorded(nn.Sequential(*(Attending() for _ in range(depth))), SEQUENCES, monkeypatch)
        counts.append(len(computed))
        computed.clear()
    assert counts[0] == counts[1] > 20
