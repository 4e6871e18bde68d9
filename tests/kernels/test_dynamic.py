"""One compilation serves calls of many sizes: its kernels take them as arguments, and results are eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import aotdist
from aotdist.codegen.triton import with_kernels
from aotdist.kernels import launching, sized, splitting
from aotdist.program import Graph
from benchmarks.kernels.graphs import graphs_of
from benchmarks.models import Block, LlamaShape
from tests.kernels.reference import Emissions, outcome, strides
from tests.kernels.test_models import family
from tests.kernels.test_programs import Program, program_of, tensors

Shapes = tuple[tuple[int, ...], ...]


def numbers(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


def assert_all_served(
    program: Callable[..., Any], calls: Sequence[Sequence[Any]], **tolerance: float
) -> None:
    """Every call is eager's, and one artifact serves them."""
    compiled: Any = aotdist.compile(program, backend="triton", settings={"dynamic": True})
    for args in calls:
        assert_call_is_eager_s(program, compiled, args, **tolerance)
    assert len(compiled.explain().artifacts) == 1


def assert_call_is_eager_s(
    program: Callable[..., Any], compiled: Any, args: Sequence[Any], **tolerance: float
) -> None:
    torch.manual_seed(0)
    expected = outcome(program, args)
    torch.manual_seed(0)
    found = outcome(compiled, args)
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)
    assert [strides(out) for out in found[0]] == [strides(out) for out in expected[0]]


def assert_all_in_kernels(emissions: Emissions) -> None:
    """Nothing is left to the library, and all kernels take sizes."""
    assert [dict(fused.reasons) for fused in emissions.made if fused.reasons] == []
    kernels = [kernel for fused in emissions.made for kernel in fused.kernels]
    assert kernels and all(kernel.printed.sizes for kernel in kernels)


ROWS = ((5, 6), (7, 16), (64, 33), (4, 200))
PROGRAMS: dict[str, Callable[..., Any]] = {
    "elements": lambda x: F.gelu(x * 2 + 1),
    "broadcast": lambda x: x * x[0] + x[:, :1],
    "softmax": lambda x: x.softmax(-1),
    "log softmax": lambda x: x.log_softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "RMS norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "sums": lambda x: (x.sum(), x.sum(0), x.mean(-1), x.amax()),
    "a variance": lambda x: x.var(0, correction=0),
    "merged and split again": lambda x: (x.reshape(-1) * 2).view(x.shape[1], x.shape[0]).sin(),
    "transposed": lambda x: (x.t().contiguous(), x.t() * 3),
    "slices": lambda x: (x[1:-1] * 2, x[:, ::2] + 1, x[-1].exp()),
    "joined": lambda x: torch.cat([x, x[1:] * 2, x[:1]]),
    "flipped and repeated": lambda x: x.flip(0).repeat(2, 3) * 2,
    "cut in two": lambda x: x.split([2, x.shape[1] - 2], 1)[1].exp(),
    "sizes as numbers": lambda x: x / x.shape[0] + torch.arange(x.shape[1], device=x.device) * x.shape[1],
    "made of sizes": lambda x: x + x.new_full((x.shape[0], 1), x.shape[1]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_compilation_serves_all_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    assert_all_served(PROGRAMS[name], [(numbers(*sizes),) for sizes in ROWS])
    assert_all_in_kernels(emissions)


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_small_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fit into a block in some calls and not in others, and sums in two stages."""
    monkeypatch.setattr(splitting, "MIN_ELEMENTS", 8)
    monkeypatch.setattr(launching, "MAX_PERSISTENT", 8)
    monkeypatch.setattr(launching, "MAX_PERSISTENT_COLUMN", 8)
    monkeypatch.setattr(launching, "_LOOPED_BLOCK", 4)
    assert_all_served(PROGRAMS[name], [(numbers(*sizes),) for sizes in ((5, 6), (7, 16), (16, 9))])


@pytest.mark.parametrize("name", ["elements", "softmax", "transposed", "sums"])
def test_places_beyond_32_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotdist.kernels.printing.LARGE", 100)
    assert_all_served(PROGRAMS[name], [(numbers(*sizes),) for sizes in ROWS])


def test_a_row_that_no_block_holds_is_looped_over(monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    calls = [(numbers(*sizes),) for sizes in ((2, 100), (3, launching.MAX_PERSISTENT + 1), (2, 8192))]
    assert_all_served(lambda x: x.softmax(-1), calls)
    softmax = emissions.made[0].kernels[0]
    assert [form.name for form in softmax.forms] == [softmax.printed.name, f"{softmax.printed.name}_looped"]


def test_losses_and_embeddings() -> None:
    def program(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.embedding(ids, table).view(-1, table.shape[1]), ids.view(-1))

    calls = [(numbers(12, 12), torch.randint(0, 12, sizes)) for sizes in ((2, 3), (4, 16), (3, 7))]
    assert_all_served(program, calls)


@pytest.mark.parametrize("name", ["softmax", "layer norm", "sums", "joined"])
def test_narrow_floating_point(name: str) -> None:
    program, settings = PROGRAMS[name], {"dynamic": True, "emulate_casts": True}
    compiled = aotdist.compile(program, backend="triton", settings=settings)
    for sizes in ROWS:
        x = torch.randn(*sizes, dtype=torch.bfloat16, requires_grad=True)
        assert_call_is_eager_s(program, compiled, (x,), rtol=2e-2, atol=2e-2)


def test_what_is_not_contiguous() -> None:
    shapes = ((3, 5), (16, 7), (7, 33))
    for change in (torch.t, lambda x: x[:, 1:], lambda x: x[1:, ::2], lambda x: x[1:, :-1].t()):
        calls = [(change(numbers(rows, columns)),) for rows, columns in shapes]
        assert_all_served(lambda x: (x.softmax(-1), x.reshape(-1) * 2), calls)


def test_what_is_broadcast_by_a_size_that_is_computed() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        last = x.chunk(2, -1)[-1]
        return x + last if last.shape[0] == 1 else x * 0.5

    compiled: Any = aotdist.compile(program, backend="triton", settings={"dynamic": True})
    for size in (2, 3, 5):  # 2 and 3 are of one trace, in which the second part is a single element
        assert_call_is_eager_s(program, compiled, (numbers(size),))


def test_rows_that_are_none() -> None:
    calls = [(numbers(rows, 4),) for rows in (5, 8, 3)]
    compiled: Any = aotdist.compile(_after_three, backend="triton", settings={"dynamic": True})
    for args in calls:
        assert_call_is_eager_s(_after_three, compiled, args)


def _after_three(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[3:] * 2, (x[3:] * 3).sum(0)


def test_inputs_are_written_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> None:
        x.mul_(2).add_(y)

    emissions = Emissions(monkeypatch)
    compiled: Any = aotdist.compile(program, backend="triton", settings={"dynamic": True})
    for rows in (4, 7, 32):
        x, y = torch.randn(rows, 6), torch.randn(6)
        expected = x * 2 + y
        compiled(x, y)
        assert torch.equal(x, expected)
    (kernel,) = emissions.made[0].kernels
    assert kernel.printed.over and len(compiled.explain().artifacts) == 1


def test_a_size_that_no_argument_gives_leaves_a_graph_to_the_library() -> None:
    (_, graph), *_ = graphs_of(lambda x: x.sin() * 2, marked(torch.ones(4, 6), 0))
    ins = tuple(replace(slot, role="primal") if slot.role == "size" else slot for slot in graph.ins)
    fused = with_kernels(Graph(graph.gm, ins, graph.outs), keeps_casts=False, label="untold")
    assert not fused.kernels
    assert set(fused.reasons.values()) == {"s0, which no argument of the graph gives"}


def test_dropout_draws_from_its_stream() -> None:
    settings = {"functional_rng": True, "dynamic": True}
    compiled = aotdist.compile(lambda x: F.dropout(x, 0.5), backend="triton", settings=settings)
    plain = aotdist.compile(lambda x: F.dropout(x, 0.5), backend="fx", settings=settings)
    for sizes in ((3, 5), (16, 33)):
        x = numbers(*sizes)
        outs = []
        for dropped in (compiled, plain):
            torch.manual_seed(0)
            outs.append(dropped(x))
        assert torch.equal(*outs)


def test_calls_of_known_sizes_ask_for_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch is made once for the sizes of a call."""
    made: list[object] = []
    form_of = sized.form_of
    monkeypatch.setattr(sized, "form_of", lambda *args: made.append(args) or form_of(*args))
    compiled = aotdist.compile(lambda x: x * 2, backend="triton", settings={"dynamic": True})
    for sizes in ((3, 5), (4, 6), (3, 5), (4, 6)):
        compiled(torch.ones(sizes))
    assert len(made) == 2


def test_explain_shows_sizes_in_symbols() -> None:
    compiled: Any = aotdist.compile(lambda x: x.softmax(-1), backend="triton", settings={"dynamic": True})
    compiled(torch.ones(4, 6))
    assert "s0 x s1" in str(compiled.explain())


def test_sources_say_what_sizes_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    aotdist.compile(lambda x: x[1:] * 2, backend="triton", settings={"dynamic": True})(torch.ones(4, 6))
    assert "# size0 = s0*s1 - 1*s1" in emissions.sources()


def test_no_node_reads_a_size_off_a_tensor() -> None:
    """One that the backward needs is made again of its arguments, and not saved."""

    def program(x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(x.shape[0]) % x.shape[-1]
        return (x.mean(0, keepdim=True) + x).transpose(0, -1)[rows]

    compiled = aotdist.compile(program, backend="triton", settings={"dynamic": True})
    for sizes in ((3, 3, 6), (4, 2, 7)):
        assert_call_is_eager_s(program, compiled, [numbers(*sizes).detach().requires_grad_()])
    assert "sym_size" not in str(compiled.graphs[0]["joint"].graph)


@settings(max_examples=10)  # each is traced with symbols, some at every size
@given(program_of(), st.lists(st.sampled_from([2, 3, 4, 6, 8]), min_size=1, max_size=3), st.booleans())
def test_random_programs(program: Program, sizes: list[int], transposed: bool) -> None:
    """At sizes that the trace did not see; some have to be traced again."""
    compiled = aotdist.compile(program, backend="triton", settings={"dynamic": True})
    for more in (0, 1, 6):
        args = tensors([size + more for size in sizes], torch.float64, transposed=transposed, grad=True)
        assert_call_is_eager_s(program, compiled, args)


def marked(x: torch.Tensor, *dims: int) -> torch.Tensor:
    for dim in dims:
        aotdist.mark_dynamic(x, dim)
    return x


def assert_trains_at_all_sizes(model: nn.Module, batches: Sequence[Sequence[torch.Tensor]]) -> None:
    """Losses and gradients are eager's, by one artifact."""
    expected = [_step(model, batch) for batch in batches]
    compiled: Any = aotdist.compile(model, backend="triton")
    for batch, (loss, gradients) in zip(batches, expected, strict=True):
        own, grads = _step(compiled, batch)
        torch.testing.assert_close(own, loss)
        torch.testing.assert_close(grads, gradients, rtol=1e-4, atol=1e-6)
    assert len(compiled.explain().artifacts) == 1


def _step(model: nn.Module, batch: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    loss = model(*batch).square().mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_an_mlp_trains_at_all_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    assert_trains_at_all_sizes(model, [(marked(torch.randn(batch, 32), 0),) for batch in (3, 16, 50)])
    library = {str(node.target) for fused in emissions.made for node in fused.reasons}
    assert library <= {"aten.addmm.default", "aten.mm.default"}


class _Decoder(nn.Module):
    """Blocks of a Llama, with angles for as many places as a call has."""

    def __init__(self) -> None:
        super().__init__()
        shape = LlamaShape(dim=32, num_heads=2)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(2))
        self.register_buffer("angles", torch.randn(2, 64, shape.head_dim // 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.angles[:, : x.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return x


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.12", reason="its attention compares sizes with numbers")
def test_a_llama_trains_at_all_batch_and_sequence_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    torch.manual_seed(0)
    sizes = ((2, 8), (3, 16), (5, 33))
    batches = [(marked(torch.randn(batch, sequence, 32), 0, 1),) for batch, sequence in sizes]
    assert_trains_at_all_sizes(_Decoder(), batches)
    assert emissions.num_kernels() > 10


@pytest.mark.slow
def test_a_vit_trains_at_all_batch_sizes() -> None:
    model, batch = family("vit")
    images = [(marked(torch.randn(count, *batch["pixel_values"].shape[1:]), 0),) for count in (2, 3, 5)]
    assert_trains_at_all_sizes(_Logits(model), images)


class _Logits(nn.Module):
    """What a model of transformers returns as a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images).logits
