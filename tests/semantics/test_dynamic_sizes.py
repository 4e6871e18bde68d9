"""Symbolic sizes: one artifact serves calls of many sizes, and each is what eager would have done."""

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, event, given, settings
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.api import compiled_call
from aotdist.errors import BadSettings, InternalError, UnsupportedProgram
from aotdist.runtime.guards import prove_guards
from aotdist.sizes import Measure, Sizes
from tests.semantics.meshes import mesh as mesh
from tests.semantics.meshes import sharded
from tests.semantics.observation import Scene, same_as_eager
from tests.semantics.programs import Program, programs
from tests.semantics.searching import SWEEP
from tests.semantics.vocabulary import INPUTS, WRAPPERS

ROWS = (3, 5, 9, 4)


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(*size, requires_grad=True)


def of_sizes(
    fn: Callable[..., Any], make: Callable[[int], tuple[Any, ...]], rows: Sequence[int] = ROWS
) -> Callable[[], list[Scene]]:
    return lambda: [Scene(fn, make(n)) for n in rows]


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = {
    "matmul": (lambda x, w: (x @ w).sin(), lambda n: (leaf(n, 4), leaf(4, 6))),
    "sizes in arithmetic": (lambda x: (x / x.numel(), x * x.shape[0] ** 2), lambda n: (leaf(n, 4),)),
    "sizes that are returned": (lambda x: (x * 2, x.shape[0], x.numel() // 2), lambda n: (leaf(n, 4),)),
    "made of a size": (lambda x: x.new_zeros(x.shape[0] // 2 + 1) + 1, lambda n: (leaf(n, 4),)),
    "made of a shape": (lambda x: x.new(x.shape).zero_() + x, lambda n: (leaf(n, 4),)),
    "interpolation": (
        lambda x, y: (
            F.interpolate(x, size=y.shape[2:]),
            F.interpolate(x, y.shape[-2:], mode="bilinear", align_corners=True),
            F.interpolate(y.flatten(2), scale_factor=1.5, mode="linear"),
            F.interpolate(y[..., None], scale_factor=(2.0, 2.0, 3.0), recompute_scale_factor=True),
        ),
        lambda n: (leaf(2, 2, 4, 3), leaf(2, 2, n + 1, 2 * n)),
    ),
    "views of an input": (lambda x: (x.t(), x[1:], x.view(-1), x[..., ::2]), lambda n: (leaf(n, 4) * 1.5,)),
    "views of an intermediate": (lambda x: (x * 2).t().reshape(-1)[1:], lambda n: (leaf(n, 4),)),
    "several views": (lambda x: (x * 1).chunk(2, -1), lambda n: (leaf(n, 4),)),
    "a write": (lambda x: x.mul_(2), lambda n: (torch.randn(n, 4),)),
    "a write with history": (lambda x, y: x.mul_(y), lambda n: (leaf(n, 4) * 1.5, leaf(n, 4))),
    "a write through a view": (lambda x: (x.t()[0].add_(1), x[1:]), lambda n: (torch.randn(n, 4),)),
    "a write of sizes": (lambda x: x.t_() * 2, lambda n: (torch.randn(n, 4),)),
    "a dimension less": (
        lambda x: ((x * 2).squeeze_(1), x.sin().squeeze_(0)),
        lambda n: (torch.randn(n, 1, 4),),
    ),
    "a 16-bit write": (lambda x: x.sin_().clamp_(min=0), lambda n: (torch.randn(n, 4).bfloat16(),)),
    "a 16-bit result in what is given": (
        lambda x: torch.sin(x, out=x),
        lambda n: (torch.randn(n, 4).bfloat16(),),
    ),
    "concatenation": (lambda x, y: torch.cat([x, y]), lambda n: (leaf(n, 4), leaf(2 * n, 4))),
    "transposed input": (lambda x: x.sum(0) + x.sum(), lambda n: (torch.randn(4, n).t(),)),
    "expanded input": (lambda x: x * 2, lambda n: (torch.randn(1, 4).expand(n, 4),)),
    "slices": (
        lambda x, y: (
            x.reshape(-1, 4).sin(),
            x + y,
            x.contiguous(),
            torch.empty_like(x).stride(),
            x.stride(0),
        ),
        lambda n: (leaf(3, n + 1, 4)[:, 1:], leaf(3, n + 2, 4)[:, :-2]),
    ),
    "transposed slices": (
        lambda x, y: (x @ y, x.cumsum(0), x.transpose(-1, -2)),
        lambda n: (leaf(2, n + 1, 6)[:, 1:, 2:].transpose(1, 2), leaf(n + 1, 8)[:-1, 4:]),
    ),
    "every other": (
        lambda x, y: ((x * y).softmax(-1), x.reshape(-1), y.clone()),
        lambda n: (leaf(2 * n, 4)[1::2], leaf(n, 8)[..., ::2]),
    ),
    "parts": (
        lambda x, y, z, u: (x * y, z.sin() + u, x.flatten()),
        lambda n: (*leaf(2, n, 8).chunk(2, -1), *leaf(3, n).t().contiguous().unbind(1)[:2]),
    ),
    "a row, a diagonal and windows": (
        lambda x, y, z: (x.sin(), y * 2, z.sum(1)),
        lambda n: (leaf(n, 3, 4)[:, 1], leaf(n, n).diagonal(), torch.randn(20 * n).unfold(0, n, 2)),
    ),
    "memory with gaps": (
        lambda x, y: (x.t().contiguous() * 2, y.sum(1)),
        lambda n: (
            torch.randn(40 * n).as_strided((n, 3), (3 * n + 2, 2)),
            leaf(2, 1, n + 1)[..., 1:].expand(2, n, n),
        ),
    ),
    "a write to a slice": (
        lambda x, y: (x.mul_(2), y.mul_(x)),
        lambda n: (torch.randn(2, n + 1)[:, :-1], (leaf(2, n + 1) * 1.5)[:, 1:]),
    ),
    "what a language model is given": (
        lambda i, j, w: F.cross_entropy((F.embedding(i, w) @ w.t()).flatten(0, 1), j.flatten()),
        lambda n: (lambda ids: (ids[:, :-1], ids[:, 1:], leaf(9, 8)))(torch.randint(0, 9, (2, n + 1))),
    ),
    "wrappers of slices": (
        lambda x: ((x * 2).sin(), x.t()),
        lambda n: (TwoTensor(torch.randn(3, n + 1)[:, 1:], torch.randn(3, n + 1)[:, 1:]),),
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda n: (leaf(2, 2, n, 8), leaf(2, 2, n, 8), leaf(2, 2, n, 8)),
    ),
    "dropout": (lambda x: F.dropout(x, 0.5), lambda n: (leaf(n, 4),)),
    "embedding": (lambda i, w: F.embedding(i, w), lambda n: (torch.randint(0, 9, (n, 6)), leaf(9, 8))),
    "loss": (lambda x, y: F.cross_entropy(x, y), lambda n: (leaf(n, 9), torch.randint(0, 9, (n,)))),
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1), lambda n: (leaf(n, 3, 8, 8), leaf(4, 3, 3, 3))),
    "padding": (lambda x: (F.pad(x, (0, 1), value=-1.0), F.pad(x, (1, 0, -1, 2))), lambda n: (leaf(n, 4),)),
    "what is cut by padding": (
        lambda x: F.pad((x * 2).mT, (0, -(x.shape[1] // 3))).mT.view(2, -1),
        lambda n: (leaf(2, n, 4),),
    ),
    "a loss of what comes next": (
        lambda x, i: F.cross_entropy(x, F.pad(i, (0, 1), value=-100)[1:]),
        lambda n: (leaf(n, 9), torch.randint(0, 9, (n,))),
    ),
    "patches": (lambda x: F.unfold(x, 2), lambda n: (leaf(2, 3, n, 4),)),
    "Fourier transforms": (
        lambda x: (torch.fft.fft(x).abs(), torch.fft.rfft2(x).real),
        lambda n: (leaf(n, 4),),
    ),
    "complex numbers": (
        lambda x, y: (torch.complex(x, y).abs(), torch.polar(x.exp(), y).real),
        lambda n: (leaf(n, 4), leaf(n, 4)),
    ),
    "TwoTensor": (
        lambda x, y: ((x * y).sin(), x.t(), y + 1),
        lambda n: (TwoTensor(torch.randn(n, 4), torch.randn(n, 4)).requires_grad_(), leaf(n, 4)),
    ),
    "nested wrappers": (
        lambda x: (x * 2).t(),
        lambda n: (TwoTensor(TwoTensor(torch.ones(n, 4), torch.ones(n, 4)), torch.randn(n, 4)),),
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_one_artifact_serves_all_sizes(program: str) -> None:
    fn, make = PROGRAMS[program]
    same_as_eager(of_sizes(fn, make), dynamic=True, validate_guards=True)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_dtensors(mesh: DeviceMesh, placement: Placement) -> None:
    def make(n: int) -> tuple[torch.Tensor, ...]:
        return (sharded(mesh, torch.randn(n, 4), placement).requires_grad_(),)

    same_as_eager(of_sizes(lambda x: (x.sin() * 2, x.t()), make), dynamic=True)


def test_a_module() -> None:
    def build() -> list[Scene]:
        model = nn.Sequential(nn.Embedding(20, 16), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
        return [Scene(model, (torch.randint(0, 20, shape),)) for shape in ((2, 5), (3, 7), (2, 9))]

    settles_sizes = torch.__version__ < "2.12"  # its attention compares them with numbers
    same_as_eager(build, compilations=None if settles_sizes else 1, dynamic=True)


def test_linear_algebra() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.linalg.solve_triangular(x, y, upper=False, unitriangular=True),
            torch.linalg.solve_triangular(x.tril() + x.mT, y.mT, upper=True, left=False),
            torch.linalg.cholesky(x @ x.mT + 3 * torch.eye(x.shape[-1])),
            torch.linalg.qr(x)[1],
        )

    settles_sizes = torch.__version__ < "2.12"  # its fakes make numbers of them in C++
    build = of_sizes(fn, lambda n: (leaf(n, 4, 4), leaf(n, 4, 3)))
    same_as_eager(build, compilations=None if settles_sizes else 1, dynamic=True)


def test_gradients_of_some_results() -> None:
    """A backward without some tangents is compiled once, and makes zeros of the sizes of each call."""
    compiled = aotdist.compile(
        lambda x, w: ((x @ w).softmax(-1), x.sin().sum(0)), backend="fx", settings={"dynamic": True}
    )
    for n in ROWS:
        x, w = leaf(n, 4), leaf(4, 6)
        for end in (0, 1):
            found = torch.autograd.grad(compiled(x, w)[end].square().sum(), (x, w), allow_unused=True)
            y = ((x @ w).softmax(-1), x.sin().sum(0))[end]
            expected = torch.autograd.grad(y.square().sum(), (x, w), allow_unused=True)
            for a, b in zip(found, expected, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)
    assert len(compiled.artifacts) == 1


def test_gradients_of_gradients() -> None:
    compiled = aotdist.compile(lambda x, w: (x @ w).sin(), backend="fx", settings={"dynamic": True})
    for n in ROWS:
        x, w = leaf(n, 4), leaf(4, 6)
        found, expected = (
            torch.autograd.grad(torch.autograd.grad(y.sum(), x, create_graph=True)[0].square().sum(), w)[0]
            for y in (compiled(x, w), (x @ w).sin())
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("partition", ["min_cut", pytest.param("default", marks=pytest.mark.sweep)])
def test_inductor(partition: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.gelu(x @ w), (8,)).t()[1:] + x.sum()

    settings = {"dynamic": True, "partition": partition}
    for make in (
        lambda n: leaf(n, 4),
        lambda n: leaf(n + 1, 8)[1:, ::2],
        lambda n: leaf(4, n + 1)[:, 1:].t(),
    ):
        compiled = aotdist.compile(program, backend="inductor", settings=settings)
        for n in ROWS:
            x, w = make(n), leaf(4, 8)
            found, expected = (
                torch.autograd.grad(fn(x, w).square().sum(), (x, w)) for fn in (compiled, program)
            )
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert len(compiled.artifacts) == 1


def test_what_the_program_decides_by_sizes_is_guarded() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x * 3

    compiled = same_as_eager(of_sizes(fn, lambda n: (leaf(n, 4),)), dynamic=True, compilations=2)
    assert any("s0 > 4" in a.source or "5 <= s0" in a.source for a in compiled.artifacts)


@pytest.mark.parametrize("rows", [0, 1])
def test_sizes_of_zero_and_one_are_their_own(rows: int) -> None:
    same_as_eager(
        of_sizes(lambda x: x + torch.ones(1, 4), lambda n: (leaf(n, 4),), (rows, 3, 5)),
        dynamic=True,
        compilations=2,
    )


def test_inputs_that_share_memory_have_static_sizes() -> None:
    def make(n: int) -> tuple[torch.Tensor, ...]:
        x = torch.randn(n, 4)
        return x, x[1:], torch.randn(n, 4)

    same_as_eager(
        of_sizes(lambda x, y, z: (y.add_(1), x * z.sum())[1], make, (3, 5, 3)), dynamic=True, compilations=2
    )


def test_marked_dimensions() -> None:
    x = torch.randn(8, 4)
    aotdist.mark_dynamic(x, -2)
    compiled = aotdist.compile(lambda x: x * 2, backend="fx")
    for size, count in (((8, 4), 1), ((9, 4), 1), ((2, 4), 1), ((9, 3), 2)):
        argument = x if size == (8, 4) else torch.randn(size)
        assert torch.equal(compiled(argument), argument * 2)
        assert len(compiled.artifacts) == count


def test_a_mark_frees_strides_too() -> None:
    """Those that follow from a marked size of what the tensor is a slice of."""
    compiled = aotdist.compile(lambda x: x.sin(), backend="fx")
    for n in ROWS:
        x = torch.randn(2, n + 1, 4)[:, 1:]
        aotdist.mark_dynamic(x, 1)
        assert torch.equal(compiled(x), x.sin())
    assert len(compiled.artifacts) == 1


def test_a_training_step_of_slices() -> None:
    weights = []
    for step_of in (aotdist.train_step, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def loss_fn(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())

        step = step_of and step_of(model, loss_fn, optimizer, backend="fx", settings={"dynamic": True})
        for n in ROWS:
            ids = torch.randint(0, 9, (2, n + 1))
            if step is not None:
                step(ids[:, :-1], ids[:, 1:])
                continue
            optimizer.zero_grad()
            loss_fn(model, ids[:, :-1], ids[:, 1:]).backward()
            optimizer.step()
        assert step is None or len(step.explain().artifacts) == 1
        weights.append([*model.parameters()])
    assert all(map(torch.equal, *weights))


def test_gradients_of_gradients_of_what_is_marked() -> None:
    """Their program is compiled for the sizes of a call, though it is given the tensor with the mark."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x @ x.new_ones(4, 2)).tanh().square().sum()

    compiled = aotdist.compile(program, backend="fx")
    for rows in (3, 5):
        second = []
        x = torch.randn(rows, 4, requires_grad=True)
        aotdist.mark_dynamic(x, 0)
        for fn in (program, compiled):
            (grad,) = torch.autograd.grad(fn(x), x, create_graph=True)
            second += torch.autograd.grad(grad.square().sum(), x)
        assert torch.equal(*second)
    assert len(compiled.artifacts) == 1


def test_pytorchs_marks_are_seen() -> None:
    x = torch.randn(8, 4)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = aotdist.compile(lambda x: x * 2, backend="fx")
    compiled(x), compiled(torch.randn(5, 4))
    assert len(compiled.artifacts) == 1


def test_a_mark_that_does_not_hold_is_an_error() -> None:
    x = torch.randn(8, 4)
    aotdist.mark_dynamic(x, 0)
    with pytest.raises(UnsupportedProgram, match=r"args\[0\].size\(0\)` was marked .* only works for 8"):
        aotdist.compile(lambda x: x.view(2, 4, 4), backend="fx")(x)
    with pytest.raises(BadSettings, match="has no dimension 2"):
        aotdist.mark_dynamic(x, 2)


def test_an_operator_without_a_rule_for_symbols_makes_sizes_static() -> None:
    compiled = aotdist.compile(lambda x: torch.geqrf(x)[0], backend="fx", settings={"dynamic": True})
    with pytest.warns(UserWarning, match="is compiled for the sizes at hand"):
        compiled(torch.randn(4, 4))
    for n in ROWS:
        x = torch.randn(n, 4)
        assert torch.equal(compiled(x), torch.geqrf(x)[0])


def test_guards_that_let_too_much_pass_are_found() -> None:
    pytest.importorskip("z3")
    symbols = (("s0", Measure(0, "", "size", 0)), ("s1", Measure(0, "", "size", 1)))  # type: ignore[arg-type]
    prove_guards(Sizes(symbols, (), ("2 <= s0", "s1 == 2*s0"), ("s1 % 2 == 0", "s1 // 2 > 1")))
    with pytest.raises(InternalError, match="that break `s0 > 4`"):
        prove_guards(Sizes(symbols, (), ("2 <= s0", "s1 == 2*s0"), ("s1 % 2 == 0", "s0 > 4")))


def test_names_of_the_users_may_look_like_symbols() -> None:
    def fn(s0: torch.Tensor, math: torch.Tensor) -> torch.Tensor:
        return s0 * math.shape[0]

    compiled = aotdist.compile(fn, backend="fx", settings={"dynamic": True})
    for n in ROWS:
        x = torch.randn(n, 2)
        assert torch.equal(compiled(s0=x, math=x), x * n)
    assert len(compiled_call(compiled).artifacts) == 1


SIZED = (*(text for text in INPUTS.values() if "arange" not in text), *WRAPPERS)


def resized(program: Program) -> Program:
    """The same program, given tensors of five rows where it had three."""
    return replace(program, inputs=tuple(re.sub(r"\b3\b", "5", text) for text in program.inputs))


@settings(
    max_examples=100 if SWEEP else 6 * settings().max_examples,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(programs(inputs=SIZED))
def test_generated_programs(program: Program) -> None:
    other = resized(program)
    assume(program.runs_in_eager())
    sizes = [program, other, program] if other.runs_in_eager() else [program]
    fn = program.load()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "aotdist: .* is compiled for the sizes at hand")
        try:
            compiled = same_as_eager(
                lambda: [scene for one in sizes for scene in one.scenes(fn)[:1]],
                seed=1,
                compilations=None,
                dynamic=True,
            )
        except UnsupportedProgram as refusal:
            event(f"refused: {refusal.what}")
        else:
            event(f"{len(compiled.artifacts)} artifacts for {len(sizes)} sizes")


class Pair(NamedTuple):
    shape: torch.Size
    rows: int


class Sized(nn.Module):
    """It returns, and keeps, what it knows of sizes."""

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.shape, self.both = x.shape, [x.shape, x.shape[0]]
        pair = Pair(x.shape[:1], x.shape[0] + 1)
        return x * 2, x.shape, pair, {"a": [x.view(-1).shape]}, x.stride(), slice(0, x.shape[0])


@pytest.mark.parametrize("dynamic", [True, False])
def test_sizes_that_are_returned_are_numbers(dynamic: bool) -> None:
    eager, compiled = Sized(), aotdist.compile(Sized(), backend="fx", settings={"dynamic": dynamic})
    for rows in (5, 7, 9):
        seen = [(model(torch.ones(rows, 4))[1:], model.shape, model.both) for model in (eager, compiled)]
        assert seen[0] == seen[1]
        # Of what class each is shows in its text; a symbol in it hides behind that of its number.
        assert repr(seen[0]) == repr(seen[1])
        (shape, pair, nested, strides, part), kept, both = seen[1]
        numbers = [*shape, *pair.shape, pair.rows, *nested["a"][0], *strides, part.stop, *kept, *both[0]]
        assert {type(number) for number in numbers} == {int}
