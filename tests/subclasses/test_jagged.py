"""Jagged tensors: rows of different lengths, in one program for all lengths, with eager's bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nested import nested_tensor, nested_tensor_from_jagged
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

import aotdist
from aotdist import UnsupportedProgram

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
"""Eager makes strided ones for attention on a CPU, and so does the operator."""

LENGTHS = (3, 2, 4), (1, 5, 2), (7, 1, 3), (4, 4, 9)


def offsets(lengths: Sequence[int]) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0))


def packed(lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Values and offsets, as plain tensors."""
    return torch.randn(sum(lengths), 8, requires_grad=True), offsets(lengths)


def rows(lengths: Sequence[int], count: int = 1, **known: int) -> tuple[Tensor, ...]:
    """Jagged leaves around the same offsets."""
    at = offsets(lengths)
    made = (nested_tensor_from_jagged(torch.randn(sum(lengths), 8), at, **known) for _ in range(count))
    return tuple(each.detach().requires_grad_() for each in made)


def two(lengths: Sequence[int]) -> tuple[Tensor, ...]:
    return rows(lengths, 2)


def no_leaf(lengths: Sequence[int]) -> tuple[Tensor, ...]:
    return (nested_tensor_from_jagged(*packed(lengths)),)


def extremes(lengths: Sequence[int]) -> tuple[Tensor, ...]:
    return rows(lengths, min_seqlen=min(lengths), max_seqlen=max(lengths))


def listed(lengths: Sequence[int]) -> tuple[Tensor, ...]:
    tensors = [torch.randn(length, 8) for length in lengths]
    return (nested_tensor(tensors, layout=torch.jagged, requires_grad=True),)


def with_holes(lengths: Sequence[int]) -> tuple[Tensor, ...]:
    values, at = packed(lengths)
    filled = torch.tensor(lengths) - torch.tensor([1, 0, 0])
    return (nested_tensor_from_jagged(values.detach(), at, lengths=filled).detach().requires_grad_(),)


def tokens(lengths: Sequence[int]) -> tuple[Tensor, ...]:
    return (nested_tensor_from_jagged(torch.randint(0, 10, (sum(lengths),)), offsets(lengths)),)


def of_other_rows(lengths: Sequence[int]) -> tuple[Tensor, ...]:
    return (*rows(lengths), *rows([length + 1 for length in lengths]))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    out = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), **how)
    return out.transpose(1, 2).flatten(-2)


def in_low_precision(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        return attend(y, y, y)


def pieces(x: Tensor) -> tuple[Tensor, ...]:
    return *(part * 2 for part in x.chunk(2, -1)), x.mean(-1), x.double(), torch.where(x > 0, x, 0.1 * x)


def written(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x.detach().softmax(-1)


Make = Callable[[Sequence[int]], tuple[Tensor, ...]]
LINEAR = functools.partial(nn.Linear, 8, 8)
NORM = functools.partial(nn.LayerNorm, 8)
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Make]] = {
    "made inside": (LINEAR, lambda m, v, at: F.gelu(m(nested_tensor_from_jagged(v, at))).values(), packed),
    "made inside, and returned": (NORM, lambda m, v, at: m(nested_tensor_from_jagged(v, at)), packed),
    "around what is given": (LINEAR, lambda m, v, at: nested_tensor_from_jagged(v, at), packed),
    "of one's rows": (LINEAR, lambda m, x, v: m(nested_tensor_from_jagged(v, x.offsets())) * x,
                      lambda lengths: (*rows(lengths), packed(lengths)[0])),
    "a leaf": (LINEAR, lambda m, x: F.dropout(F.rms_norm(m(x), (8,)), 0.5), rows),
    "a result": (LINEAR, lambda m, x: m(x.sin()), no_leaf),
    "two of the same rows": (LINEAR, lambda m, x, y: (m(x) * y, torch.cat([x, y], -1)), two),
    "of a list": (LINEAR, lambda m, x: m(x), listed),
    "of known lengths": (LINEAR, lambda m, x: x.to_padded_tensor(0.0), extremes),
    "padded": (LINEAR, lambda m, x: x.to_padded_tensor(0.0), rows),
    "softmax of each row": (LINEAR, lambda m, x: m(x).softmax(1), rows),
    "all": (LINEAR, lambda m, x: (m(x).mean(), x.amax(1), x.sum()), rows),
    "views": (LINEAR, lambda m, x: (heads(x), x.detach().transpose(1, 2), heads(m(x.detach()))), rows),
    "pieces": (LINEAR, lambda m, x: pieces(x), rows),
    "with holes": (LINEAR, lambda m, x: x.sin() * 2, with_holes),
    "with what is broadcast": (LINEAR, lambda m, x: x + m.bias.view(1, 1, 8), rows),
    "tokens": (functools.partial(nn.Embedding, 10, 8), lambda m, x: m(x), tokens),
    "written": (LINEAR, lambda m, x: written(x), rows),
    "attention": (LINEAR, lambda m, x: attend(m(x), x, x), rows),
    "attention of other rows": (LINEAR, lambda m, x, y: attend(m(x), y, m(y), scale=0.3), of_other_rows),
    "attention in low precision": (LINEAR, in_low_precision, rows),
}  # fmt: skip


def parts(tensor: Any) -> list[Any]:
    """What a result is, in plain tensors and values; of a jagged one, which of them is its ragged size."""
    if not isinstance(tensor, Tensor) or not tensor.is_nested:
        return [type(tensor), tensor]
    is_size = [isinstance(size, torch.SymInt) for size in tensor.shape]
    flat = [tensor.values(), tensor.offsets(), tensor.lengths()]
    return [type(tensor), is_size, tensor.requires_grad, *flat]


def assert_same(eager: Any, compiled: Any, **tolerance: float) -> None:
    if isinstance(eager, (list, tuple)):
        for one, other in zip(eager, compiled, strict=True):
            assert_same(one, other, **tolerance)
    elif isinstance(eager, Tensor) and eager.is_nested:
        assert_same(parts(eager), parts(compiled), **tolerance)
    elif isinstance(eager, Tensor):
        assert eager.stride() == compiled.stride() and eager.requires_grad == compiled.requires_grad
        torch.testing.assert_close(compiled, eager, **(tolerance or {"rtol": 0, "atol": 0}))
    else:
        assert eager == compiled


def ragged_sizes(tensors: Sequence[Any]) -> list[int]:
    """Which jagged tensors have equal ragged sizes: for each the position of the first such size."""
    found = [size for each in tensors if parts(each)[0] is not Tensor for size in each.shape]
    sizes = [size for size in found if isinstance(size, torch.SymInt)]
    return [next(at for at, other in enumerate(sizes) if bool(other == size)) for size in sizes]


def observed(fn: Callable[..., Any], model: nn.Module, args: tuple[Tensor, ...]) -> list[Any]:
    """Results, gradients and what was given, after a backward of all results."""
    model.zero_grad()
    torch.manual_seed(1)
    result = fn(*args)
    results = list(result) if isinstance(result, tuple) else [result]
    values = [each.values() if each.is_nested else each for each in results if each.requires_grad]
    if values:
        sum((each.float() ** 2).sum() for each in values).backward()  # type: ignore[union-attr]
    grads = [each.grad for each in (*args, *model.parameters()) if each.is_leaf]
    jagged = [each for each in (*args, *grads, *results) if each is not None and each.is_nested]
    return [results, grads, list(args), ragged_sizes(jagged)]


def same_for_all_lengths(
    make_model: Callable[[], nn.Module], fn: Callable[..., Any], make: Make, backend: str, **tolerance: float
) -> int:
    """Compare a program with eager, for all lengths; returns how many programs were compiled."""
    torch.manual_seed(0)
    model = make_model()
    eager, compiled = (
        functools.partial(fn, model),
        aotdist.compile(functools.partial(fn, model), backend=backend),
    )
    for seed, lengths in enumerate(LENGTHS):
        told = []
        for each in (eager, compiled):
            torch.manual_seed(seed)
            told.append(observed(each, model, make(lengths)))
        assert_same(*told, **tolerance)
    return len(compiled.artifacts)


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_program_for_all_lengths_has_the_bits_of_eager(name: str) -> None:
    model, fn, make = PROGRAMS[name]
    # A length that is known is a size like any other, and 1 is a program of its own; offsets that come by
    # themselves say of no plain tensor that its size will change.
    several = make in (packed, listed, extremes) or name == "of one's rows"
    assert same_for_all_lengths(model, fn, make, "fx") == (2 if several else 1)


class Model(nn.Module):
    """Attention over tokens in rows of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 10)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.norm(x)
        return self.head(F.gelu(x + attend(self.q(y), self.k(y), self.v(y))))


def test_inductor_compiles_one_program_for_all_lengths() -> None:
    _, fn, make = PROGRAMS["attention"]
    assert same_for_all_lengths(LINEAR, fn, make, "inductor", rtol=1e-4, atol=1e-5) == 1


def trained(whole: bool | None) -> tuple[list[Tensor], int]:
    """Losses and parameters after ten steps of ten lengths, and how many programs were compiled.

    Args:
        whole: whether the whole step is compiled, or the model; None for neither.
    """
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = aotdist.compile(model, backend="fx") if whole is False else model

    def step(batch: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(forward(batch).values(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run: Any = aotdist.compile(step, backend="fx") if whole else step
    losses: list[Tensor] = []
    for _ in range(10):
        lengths = torch.randint(2, 12, (4,)).tolist()
        batch = nested_tensor_from_jagged(torch.randint(0, 10, (sum(lengths),)), offsets(lengths))
        losses.append(run(batch, torch.randint(0, 10, (sum(lengths),))))
    compiled: Any = run if whole else forward
    count = 0 if whole is None else len(compiled.explain().artifacts)
    return [*losses, *model.parameters()], count


@pytest.mark.parametrize(("whole", "most"), [(True, 3), (False, 1)])  # the first step makes the state
def test_ten_steps_of_ten_lengths_train_as_eager_does(whole: bool, most: int) -> None:
    compiled, count = trained(whole)
    assert_same(trained(None)[0], compiled)
    assert 0 < count <= most


def test_tensors_that_belong_to_other_rows_are_another_call() -> None:
    plus = aotdist.compile(lambda x, y: x + y, backend="fx")
    x, y = two(LENGTHS[0])
    assert plus(x, y).shape[1] == x.shape[1]
    with pytest.raises(RuntimeError, match="cannot call binary pointwise function add"):
        plus(x, *rows(LENGTHS[0]))
    made = aotdist.compile(lambda x, v, at: x + nested_tensor_from_jagged(v, at), backend="fx")
    made(x, x.values(), x.offsets())
    with pytest.raises(RuntimeError, match="cannot call binary pointwise function add"):
        made(x, x.values(), x.offsets().clone())


def test_modes_and_settings() -> None:
    model = LINEAR()
    compiled = aotdist.compile(model, backend="fx")
    (x,), (y,) = rows(LENGTHS[0]), rows(LENGTHS[1])
    with torch.inference_mode():
        assert_same(model.weight.is_inference(), False)
        assert compiled(x).is_inference()
    with torch.no_grad():
        assert_same(F.linear(y, model.weight, model.bias), compiled(y))
    static = aotdist.compile(lambda x: x.sin(), backend="fx", dynamic=False)
    assert_same([x.sin(), y.sin()], [static(x), static(y)])
    assert len(static.artifacts) == 2
    every = aotdist.compile(lambda x: x.sin(), backend="fx", dynamic=True)
    (z,) = rows((2, 5, 6, 3))  # another number of rows
    assert_same([x.sin(), z.sin()], [every(x), every(z)])
    assert len(every.artifacts) == 1


(ROWS,) = rows(LENGTHS[0])


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (lambda: attend(*rows(LENGTHS[0]) * 3, dropout_p=0.5), "drops weights"),
        (lambda: ROWS.shape, "is the size of a ragged dimension"),
        (lambda: print(ROWS.shape), "is the size of a ragged dimension"),
        (lambda: nested_tensor([torch.ones(2), torch.ones(3)]), "is a nested tensor"),
    ],
)
def test_what_is_refused(run: Callable[[], Any], says: str) -> None:
    with pytest.raises(UnsupportedProgram, match=says) as refused:
        aotdist.compile(run, backend="fx")()
    assert "fix:" in str(refused.value)


def in_rows(x: Tensor) -> Tensor:
    """Attention of packed values to those of the same row."""
    size = x.values().size(0)
    row = torch.searchsorted(x.offsets(), torch.arange(size), right=True)
    packed = x.values().unflatten(-1, (2, 4)).transpose(0, 1)[None]
    mask = create_block_mask(lambda b, h, i, j: row[i] == row[j], 1, 1, size, size, device="cpu")
    return flex_attention(packed, packed, packed, block_mask=mask)[0].transpose(0, 1).flatten(-2)  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_of_values_with_a_mask_of_rows() -> None:
    compiled = aotdist.compile(in_rows, backend="fx")
    for lengths in LENGTHS:
        x = nested_tensor_from_jagged(torch.randn(sum(lengths), 8), offsets(lengths))
        assert_same(in_rows(x), compiled(x))
    settles_sizes = torch.__version__ < "2.12"  # its attention compares them with numbers
    assert len(compiled.artifacts) == (len(LENGTHS) if settles_sizes else 1)


def of_variable_length(x: Tensor) -> Tensor:
    packed, at = x.values().unflatten(-1, (2, 4)), x.offsets().int()
    return varlen_attn(packed, packed, packed, at, at, max(LENGTHS[0]), max(LENGTHS[0]))  # type: ignore[return-value]


@pytest.mark.parametrize("run", [lambda x: flex_attention(heads(x), heads(x), heads(x)), of_variable_length])
def test_what_pytorch_has_no_kernel_for_is_refused_as_in_eager(run: Callable[[Tensor], Any]) -> None:
    """Of jagged tensors, `flex_attention`; of values and offsets on a CPU, `varlen_attn`."""
    (x,) = rows(LENGTHS[0])
    with pytest.raises(NotImplementedError) as eager:
        run(x)
    with pytest.raises(NotImplementedError) as ours:
        aotdist.compile(run, backend="fx")(x)
    assert str(ours.value).splitlines()[0] == str(eager.value).splitlines()[0]


def test_gradients_of_gradients_are_refused() -> None:
    (x,) = rows(LENGTHS[0])
    y = aotdist.compile(lambda x: x.sin(), backend="fx")(x)
    with pytest.raises(UnsupportedProgram, match="is a NestedTensor, for which the program has no backward"):
        torch.autograd.grad((y.values() ** 2).sum(), x, create_graph=True)
