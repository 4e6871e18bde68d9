"""The table of corrections: what it says is called in place of what PyTorch does, and each row is needed."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.trees import pytree
from aotdist.trace.operators import corrections
from tests.trace.test_batch_statistics import by_cudnn, two_steps
from tests.trace.test_batch_statistics import kernels as kernels  # stand in for those of a GPU

aten = torch.ops.aten


@dataclass(frozen=True)
class Example:
    """A program that goes wrong without a row.

    Args:
        program: what is compiled.
        inputs: makes its arguments.
        settings: how it is compiled.
        training: whether its backward is compared, too.
        raises: whether eager raises an error.
    """

    program: Callable[..., Any]
    inputs: Callable[[], Sequence[Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    training: bool = False
    raises: bool = False

    def outcome(self, *, compiled: bool) -> list[Any]:
        """Results, what the arguments hold then, and gradients; or what is raised."""
        try:
            return self._outcome(compiled=compiled)
        except Exception as error:
            if not self.raises:
                raise
            return [(type(error), str(error).partition("\n")[0], torch.empty(0))]

    def _outcome(self, *, compiled: bool) -> list[Any]:
        torch.manual_seed(0)
        inputs = self.inputs()
        program = copy.deepcopy(self.program)
        call = aotdist.compile(program, backend="fx", settings=self.settings) if compiled else program
        torch.manual_seed(1)
        with torch.set_grad_enabled(self.training):
            results = [leaf for leaf in pytree.tree_leaves(call(*inputs)) if isinstance(leaf, Tensor)]
        leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        if self.training:
            sum(result.abs().sum() for result in results if result.requires_grad).backward()
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        everything = (*results, *leaves, *grads)
        return [(x.shape, x.layout is torch.strided and x.stride(), x.detach()) for x in everything]

    def is_as_in_eager(self) -> bool:
        """Whether the compiled program's outcome is eager's, bit for bit."""
        eager, ours = self.outcome(compiled=False), self.outcome(compiled=True)
        assert self.raises == (eager[0][0] is RuntimeError)
        return len(eager) == len(ours) and all(
            a[:2] == b[:2] and torch.equal(dense(a[2]), dense(b[2])) for a, b in zip(eager, ours, strict=True)
        )


def dense(tensor: Tensor) -> Tensor:
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def leaf(*size: int) -> Tensor:
    return torch.randn(size, requires_grad=True)


def caught(x: Tensor) -> Tensor:
    try:
        return x.mT.view(-1) * 2
    except RuntimeError:
        return x * 3


def stepped(weight: Tensor, grad: Tensor) -> None:
    torch._fused_sgd_(
        [weight], [grad], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=False,
    )  # fmt: skip


DYNAMIC = {"dynamic": True}
LENGTHS = (12, 3), (4, 2)
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
EXAMPLES: dict[str, Example] = {
    "formulas by data": Example(
        lambda x, y, w: F.cross_entropy(x, y, w, label_smoothing=0.1),
        lambda: [
            leaf(400, 9),
            torch.randint(0, 9, (400,)).masked_fill(torch.rand(400) > 0.6, -100),
            torch.rand(9),
        ],
        training=True,
    ),
    "losses of two dtypes": Example(
        lambda x, y, w: F.binary_cross_entropy_with_logits(x.bfloat16(), y, w),
        lambda: [leaf(50, 9), torch.rand(50, 9), torch.rand(9)],
        training=True,
    ),
    "tensors of numbers in tensors": Example(
        lambda x: torch.tensor([x[0].max(), x[1].min()]) + x, lambda: [torch.randn(2, 2)]
    ),
    "singular values alone": Example(torch.linalg.svdvals, lambda: [torch.randn(40, 30)]),
    "decompositions without vectors": Example(torch.linalg.svdvals, lambda: [torch.randn(40, 30)]),
    "checks of data": Example(
        lambda x, w: torch.istft(x, 16, window=w),
        lambda: [torch.randn(2, 9, 17, dtype=torch.complex64), torch.hann_window(16)],
    ),
    "answers to checks": Example(
        lambda x, w: torch.istft(x, 16, window=w),
        lambda: [torch.randn(2, 9, 17, dtype=torch.complex64), torch.hann_window(16)],
    ),
    "mean of a CTC loss": Example(
        lambda x, y: F.ctc_loss(x.log_softmax(-1), y, *LENGTHS),
        lambda: [torch.randn(12, 2, 6), torch.randint(1, 6, (2, 5))],
    ),
    "results of unknown sizes": Example(
        lambda a, b: torch.linalg.lstsq(a, b, driver="gelsd").rank,
        lambda: [torch.randn(5, 3), torch.randn(5, 2)],
    ),
    "interpolation": Example(
        lambda x, y: F.interpolate(x, size=y.shape[-2:], mode="bilinear"),
        lambda: [torch.randn(1, 2, 4, 5), torch.randn(1, 2, 7, 9)],
        DYNAMIC,
    ),
    "interpolated sizes": Example(
        lambda x, y: F.interpolate(x, size=y.shape[-2:], mode="bicubic"),
        lambda: [torch.randn(1, 2, 4, 5), torch.randn(1, 2, 7, 9)],
        DYNAMIC,
    ),
    "averages over all pixels": Example(
        lambda x, y, z: (
            F.adaptive_avg_pool2d(x * 2, 1).mul_(3),
            F.adaptive_avg_pool2d(x[:, :, :1], (None, 1)),
            F.adaptive_avg_pool1d(y.mT, 1),
            F.adaptive_avg_pool3d(z, 1),
            F.adaptive_avg_pool3d(x, 1),
        ),
        lambda: [
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_(),
            leaf(2, 5, 3),
            torch.randn(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d).requires_grad_(),
        ],
        training=True,
    ),
    "products of 16 bits in place": Example(
        lambda x, y: torch._foreach_mul_([x, y], 1 / 3),
        lambda: [torch.randn(5, 7).bfloat16(), torch.randn(9).half()],
    ),
    "packed sequences": Example(
        lambda x: rnn.pad_packed_sequence(rnn.pack_padded_sequence(x, [3, 2]))[0] * 2,
        lambda: [torch.randn(3, 2, 4)],
    ),
    "padded encoders": Example(
        lambda x, mask: encoder(x, src_key_padding_mask=mask),
        lambda: [torch.randn(2, 4, 8), torch.tensor([[False] * 4, [True, True, False, False]])],
    ),
    "fused steps": Example(stepped, lambda: [torch.randn(3), torch.randn(3)]),
    "masks in the order of memory": Example(
        lambda x: torch.empty(5, 6).t().bernoulli_(0.5) * x, lambda: [torch.randn(6, 5)]
    ),
    "lists that share memory": Example(
        lambda x: torch._foreach_mul_([x, x[1:]], 2.0), lambda: [torch.randn(3)]
    ),
    "polygamma": Example(lambda x: x.polygamma_(1), lambda: [torch.rand(3) + 1]),
    "numbers in a batch": Example(
        torch.func.vmap(lambda e: 1 - (e * 2.5 + 1).pow(2) / 3), lambda: [torch.randn(3)]
    ),
    "writes with symbols": Example(lambda x: x.clamp_(0, 1), lambda: [torch.randn(3, 4)], DYNAMIC),
    "parts of conjugates": Example(
        lambda z: z.conj()[1:2].real.mul_(2), lambda: [torch.randn(3, dtype=torch.complex64)]
    ),
    "assertions without a message": Example(
        lambda x: (torch._assert_async(x.sum() > 0), x * 2)[1], lambda: [-torch.ones(3)], raises=True
    ),
    "grouped products": Example(
        lambda a, b: torch._grouped_mm(a, b, offs=torch.tensor([3, 8], dtype=torch.int32)),
        lambda: [torch.randn(8, 16), torch.randn(2, 16, 8)],
    ),
    "backward of bags": Example(
        lambda w, p: F.embedding_bag(
            torch.tensor([1, 2, 4, 4]),
            w,
            torch.tensor([0, 2]),
            mode="sum",
            sparse=True,
            per_sample_weights=p,
        ),
        lambda: [leaf(6, 3), leaf(4)],
        training=True,
    ),
    "settled sizes": Example(lambda x: F.pad(x, (1, 0, -1, 2)), lambda: [leaf(3, 5)], DYNAMIC, training=True),
    "refused views": Example(caught, lambda: [torch.randn(3, 4)]),
    "offsets of scattered parts": Example(
        lambda x: (x.copy_(torch.ones(2)), x.copy_(torch.zeros(2)), x + x[1:].storage_offset())[2],
        lambda: [torch.randn(6, 2)[2:4]],
    ),
    "margin losses of one sample": Example(
        lambda x, label, labels: (
            torch.ones((loss := F.multi_margin_loss(x, label, reduction="none")).shape) * loss,
            torch.ones((loss := F.multilabel_margin_loss(x, labels, reduction="none")).shape) * loss,
        ),
        lambda: [leaf(4), torch.tensor(1), torch.tensor([0, 1, -1, 2])],
        training=True,
    ),
    "sparse matrices": Example(
        lambda values, x: torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 1]], values, (3, 3)) @ x,
        lambda: [torch.randn(3, requires_grad=True), torch.randn(3, 2)],
        training=True,
    ),
    "layouts of backwards": Example(
        lambda x: F.huber_loss(*(F.group_norm(part.mT, 2).mT for part in (x, x * x))),
        lambda: [torch.randn(2, 5, 8, requires_grad=True)],
        training=True,
    ),
    "layouts of batch norms": Example(
        lambda x: F.batch_norm(x * 2, None, None, training=True).movedim(1, -1).reshape(-1, 3) * 2,
        lambda: [torch.randn(2, 4, 3).mT],
    ),
}
"""A program for each row."""
APART = ("batch norms of GPUs", "refused operators", "squeezed symbols")
"""Rows that have a test of their own, below."""


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Takes a row out of the table."""

    def take_out(name: str) -> None:
        rows = tuple(row for row in corrections.CORRECTIONS if row.name != name)
        monkeypatch.setattr(corrections, "CORRECTIONS", rows)
        corrections.of.cache_clear()

    yield take_out
    corrections.of.cache_clear()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse invariant checks are")
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_row_is_needed(name: str, without: Callable[[str], None]) -> None:
    example = EXAMPLES[name]
    assert example.is_as_in_eager()
    without(name)
    is_right = False
    with contextlib.suppress(Exception):
        # The second compilation finds what PyTorch's cache of fakes has of the first.
        is_right = example.is_as_in_eager() and example.is_as_in_eager()
    assert not is_right, f"torch {torch.__version__} no longer needs `{name}`"


def test_what_batch_norms_of_gpus_write_is_seen(without: Callable[[str], None]) -> None:
    for is_there in (True, False):
        if not is_there:
            without("batch norms of GPUs")
        model: Any = aotdist.compile(by_cudnn, backend="fx", settings={"verify": False})
        two_steps(model)
        assert ("writes: args[3], args[4]" in str(model.explain())) is is_there


def test_a_sparse_tensor_is_refused(without: Callable[[str], None]) -> None:
    """Without the row, the number of its elements is that of the fake."""
    x = torch.eye(3)
    with pytest.raises(UnsupportedProgram, match="makes a sparse tensor"):
        aotdist.compile(lambda x: x.to_sparse()._nnz() * x, backend="fx")(x)
    without("refused operators")
    assert not torch.equal(aotdist.compile(lambda x: x.to_sparse()._nnz() * x, backend="fx")(x), x * 3)


SQUEEZED = """
import torch, aotdist
from aotdist.trace.operators import corrections
corrections.CORRECTIONS = tuple(row for row in corrections.CORRECTIONS if row.name != {name!r})
squeezed = aotdist.compile(lambda x: (x * 1).squeeze_(0), backend="fx", settings={{"dynamic": True}})
assert squeezed(torch.ones(3, 4)).shape == (3, 4)
"""


@pytest.mark.sweep
def test_a_dimension_of_symbolic_size_is_squeezed() -> None:
    """Without the row `squeezed symbols` the process dies."""
    codes = [
        subprocess.run([sys.executable, "-c", SQUEEZED.format(name=name)], capture_output=True).returncode
        for name in ("none of them", "squeezed symbols")
    ]
    assert codes[0] == 0 and codes[1] != 0


def test_gradients_of_losses_of_two_dtypes_are_differentiated() -> None:
    def penalised(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.binary_cross_entropy_with_logits((x * 2).bfloat16(), y)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + grad.square().sum()

    x, y = leaf(50, 9), torch.rand(50, 9)
    ours, theirs = (
        torch.autograd.grad(fn(x, y), x)[0] for fn in (aotdist.compile(penalised, backend="fx"), penalised)
    )
    assert theirs.abs().min() > 0 and torch.equal(ours, theirs)


def test_the_table_is_complete() -> None:
    """Each row has a program here, and nothing is corrected twice at one level."""
    rows = corrections.CORRECTIONS
    assert {row.name for row in rows} == {*EXAMPLES, *APART}
    assert len({row.name for row in rows}) == len(rows)
    listed = [(row.level, corrected) for row in rows for corrected in row.instead]
    assert len(set(listed)) == len(listed)


def test_what_the_table_says_is_called_and_else_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def tripled(_sin: Any, x: Tensor) -> Tensor:
        return x * 3 if x.dim() == 1 else NotImplemented

    for level, function in (
        ("function", torch.sin),
        ("operator", aten.sin.default),
        ("node", aten.sin.default),
    ):
        row = corrections.Correction("tripled", level, {function: tripled}, "")
        monkeypatch.setattr(corrections, "CORRECTIONS", (row,))
        corrections.of.cache_clear()
        compiled = aotdist.compile(lambda x: (torch.sin(x), torch.sin(x[None])), backend="fx")
        x = torch.ones(3)
        first, second = compiled(x)
        assert torch.equal(first, x * 3) and torch.equal(second, x.sin()[None]), level
    corrections.of.cache_clear()
