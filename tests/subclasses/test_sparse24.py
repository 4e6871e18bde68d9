"""A Sparse24Tensor computes what the masked dense matrix does, eagerly and captured, bit for bit."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint
from torch.sparse import SparseSemiStructuredTensorCUTLASS
from torch.sparse import _semi_structured_conversions as torch_conversions
from torch.utils._python_dispatch import TorchDispatchMode

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.subclasses import sparse24_operators
from aotdist.subclasses.protocol import plain_tensors, rebuild, recipe_of
from aotdist.subclasses.sparse24 import Sparse24Tensor
from aotdist.subclasses.sparse24_operators import choose_kernel
from aotdist.subclasses.sparse24_packing import MaskKind, magnitude_mask
from aotdist.subclasses.sparse24_selection import Gradient, sparsify
from tests.semantics.observation import Scene, same_as_eager

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),  # one process is meant
]

MASKS: tuple[MaskKind, ...] = ("row", "transposable")
GRADIENTS: tuple[Gradient, ...] = ("straight-through", "masked")


def same(a: Sparse24Tensor, b: Sparse24Tensor) -> bool:
    ours, theirs = a.parts(), b.parts()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(params=MASKS)
def mask(request: pytest.FixtureRequest) -> MaskKind:
    return request.param


def test_it_is_taken_apart_and_put_together(mask: MaskKind) -> None:
    sparse = sparsify(torch.randn(16, 24), mask)
    assert len(plain_tensors(sparse)) == (4 if mask == "transposable" else 2)
    for tensor in (sparse, sparse.t()):
        again = rebuild(recipe_of(tensor), plain_tensors(tensor))
        assert isinstance(again, Sparse24Tensor)
        assert same(again, tensor)
        assert (again.shape, again.stride()) == (tensor.shape, tensor.stride())


def test_transposing_changes_no_value(mask: MaskKind) -> None:
    sparse = sparsify(torch.randn(16, 24), mask)
    assert torch.equal(sparse.t().to_dense(), sparse.to_dense().t())
    assert torch.equal(sparse.transpose(1, 0).mask(), sparse.mask().t())
    assert same(sparse.t().t(), sparse)
    assert same(sparse.transpose(-1, 1), sparse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_masked_matrix(mask: MaskKind, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(16, 24, dtype=dtype), torch.randn(16, dtype=dtype)
    x, y = torch.randn(5, 24, dtype=dtype), torch.randn(24, 7, dtype=dtype)
    sparse = sparsify(weight, mask)
    dense = weight * magnitude_mask(weight, mask)
    assert torch.equal(F.linear(x, sparse), F.linear(x, dense))
    assert torch.equal(F.linear(x, sparse, bias), F.linear(x, dense, bias))
    assert torch.equal(sparse @ y, dense @ y)
    torch.testing.assert_close(x.new_ones(3, 16) @ sparse, x.new_ones(3, 16) @ dense)
    with_bias = F.linear(sparse, x, x.new_ones(5)), F.linear(dense, x, x.new_ones(5))
    torch.testing.assert_close(*with_bias, rtol=0, atol=8 * torch.finfo(dtype).eps)  # added after rounding
    torch.testing.assert_close(sparse @ sparse.t(), dense @ dense.t())
    torch.testing.assert_close(
        torch.addmm(bias, x, sparse.t(), alpha=2), torch.addmm(bias, x, dense.t(), alpha=2)
    )


def test_casts_and_copies(mask: MaskKind) -> None:
    weight = torch.randn(16, 24)
    sparse = sparsify(weight, mask)
    low = sparse.to(torch.bfloat16)
    assert isinstance(low, Sparse24Tensor)
    assert torch.equal(low.to_dense(), sparse.to_dense().bfloat16())
    assert same(copy.deepcopy(sparse), sparse)
    target = sparsify(torch.randn(16, 24), mask)
    assert same(target.copy_(sparse), sparse)


def test_cuts_are_views(mask: MaskKind) -> None:
    """What is cut is what would be cut of the dense matrix; what is written to it is written to the whole."""
    sparse = sparsify(torch.randn(16, 32), mask)
    dense = sparse.to_dense()
    for dim in (0, 1, -1):
        for ours, theirs in zip(sparse.chunk(2, dim), dense.chunk(2, dim), strict=True):
            assert torch.equal(ours.to_dense(), theirs)
    assert torch.equal(sparse[8:].t().to_dense(), dense[8:].t())
    assert torch.equal(sparse.t()[16:24].to_dense(), dense.t()[16:24])
    other = sparsify(torch.randn(8, 32), mask)
    sparse.narrow(0, 8, 8).copy_(other)
    assert torch.equal(sparse.to_dense(), torch.cat([dense[:8], other.to_dense()]))
    assert torch.equal(dense[8:].copy_(other), other.to_dense())


def test_zeros_are_packed_alike(mask: MaskKind) -> None:
    sparse = sparsify(torch.randn(16, 32), mask)
    for tensor, size in ((sparse, (8, 24)), (sparse.t(), (24, 8))):
        zeros = tensor.new_zeros(size)
        assert isinstance(zeros, Sparse24Tensor)
        assert torch.equal(zeros.to_dense(), torch.zeros(size))
        assert zeros.parts().keys() == tensor.parts().keys()


def test_cuts_through_groups_are_refused(mask: MaskKind) -> None:
    sparse = sparsify(torch.randn(16, 32), mask)
    with pytest.raises(UnsupportedProgram, match="through groups of four"):
        sparse.narrow(1, 4, 8)
    if mask == "transposable":
        with pytest.raises(UnsupportedProgram, match="through groups of four"):
            sparse.narrow(0, 4, 8)
    with pytest.raises(UnsupportedProgram, match="steps of 2"):
        sparse[::2]
    with pytest.raises(UnsupportedProgram, match="cannot be viewed"):
        sparse.view(8, 64)
    with pytest.raises(UnsupportedProgram, match="no rows"):
        sparse.view(-1)[:8]


def test_it_is_stored_in_nine_sixteenths() -> None:
    weight = torch.randn(32, 64, dtype=torch.bfloat16)
    once, twice = sum(p.nbytes for p in sparsify(weight).parts().values()), sparsify(weight, "transposable")
    assert once * 16 == weight.nbytes * 9
    assert sum(part.nbytes for part in twice.parts().values()) == 2 * once


def step(mask: MaskKind, gradient: Gradient, decay: float):
    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.linear(x, sparsify(weight, mask, gradient=gradient, decay=decay), bias)

    return linear


def leaves(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in ((5, 24), (16, 24), (16,))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("decay", [0.0, 0.125])
def test_compiled_is_eager(mask: MaskKind, gradient: Gradient, decay: float, dtype: torch.dtype) -> None:
    program = step(mask, gradient, decay)
    compiled = aotdist.compile(program, backend="fx")
    ours, theirs = leaves(dtype), leaves(dtype)
    for _ in range(2):
        results = compiled(*ours), program(*theirs)
        for result in results:
            result.square().sum().backward()
        assert torch.equal(*results)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_gradients_are_what_they_are_said_to_be(mask: MaskKind, gradient: Gradient) -> None:
    x, weight, bias = leaves(torch.float64)
    step(mask, gradient, 0.5)(x, weight, bias).square().sum().backward()
    kept = magnitude_mask(weight.detach(), mask)
    pruned = (weight.detach() * kept).requires_grad_()
    rows = x.detach().clone().requires_grad_()
    F.linear(rows, pruned, bias.detach()).square().sum().backward()
    expected = pruned.grad * kept if gradient == "masked" else pruned.grad
    torch.testing.assert_close(weight.grad, expected + 0.5 * weight.detach() * ~kept)
    torch.testing.assert_close(x.grad, rows.grad)


def test_a_held_choice_is_kept_to() -> None:
    weight = torch.randn(16, 24)
    meta = sparsify(weight).meta
    changed = weight.flip(1).contiguous()
    assert torch.equal(sparsify(changed, meta=meta).mask(), magnitude_mask(weight))


def test_both_products_are_sparse_with_a_transposable_mask(mask: MaskKind) -> None:
    compiled = aotdist.compile(step(mask, "straight-through", 0.0), backend="fx")
    compiled(*leaves(torch.float32)).sum().backward()
    (graphs,) = compiled.graphs
    sparse = {
        name: sum(node.target is torch.ops.aotdist.linear_24.default for node in gm.graph.nodes)
        for name, gm in graphs.items()
    }
    assert sparse["forward"] == 1
    assert sparse["backward"] == (1 if mask == "transposable" else 0)


def test_as_an_input_and_an_output_of_a_program(mask: MaskKind) -> None:
    @functools.partial(aotdist.compile, backend="fx")
    def program(sparse: Sparse24Tensor, dense: torch.Tensor):
        return sparse.t(), sparse @ dense, sparsify(dense)

    sparse, dense = sparsify(torch.randn(16, 24), mask), torch.randn(24, 8)
    transposed, product, made = program(sparse, dense)
    assert same(transposed, sparse.t())
    assert torch.equal(product, sparse @ dense)
    assert same(made, sparsify(dense))


UNPACKED: dict[str, Callable[[Sparse24Tensor], torch.Tensor]] = {
    "values": lambda sparse: sparse.to_dense(),
    "mask": lambda sparse: sparse.mask(),
    "transposed values": lambda sparse: sparse.t().to_dense(),
    "values, written": lambda sparse: sparse.to_dense().mul_(2),
    "mask, written": lambda sparse: sparse.mask().zero_(),
    "a part, written": lambda sparse: sparse.to_dense()[8:].mul_(2),
}


@pytest.mark.parametrize("which", UNPACKED)
def test_what_is_unpacked_is_no_view(mask: MaskKind, which: str) -> None:
    same_as_eager(lambda: Scene(UNPACKED[which], (sparsify(torch.randn(16, 24), mask),)))


@pytest.mark.parametrize("cut", [lambda made: made[:8], lambda made: made.t(), lambda made: made.t()[8:]])
def test_gradients_of_views_of_a_result(mask: MaskKind, cut: Callable[[Sparse24Tensor], Any]) -> None:
    """They are dense, where the view is packed."""
    same_as_eager(
        lambda: Scene(lambda dense: cut(sparsify(dense, mask)), (torch.randn(16, 24, requires_grad=True),))
    )


def test_gradients_of_gradients() -> None:
    x, weight, bias = leaves(torch.float64)
    program = step("row", "masked", 0.0)
    (grad,) = torch.autograd.grad(program(x, weight, bias).square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    kept = magnitude_mask(weight.detach())
    reference = weight.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(
        F.linear(x, reference * kept, bias).square().sum(), x, create_graph=True
    )
    expected.square().sum().backward()
    torch.testing.assert_close(weight.grad, reference.grad)


def test_to_and_from_pytorch(mask: MaskKind) -> None:
    sparse = sparsify(torch.randn(64, 128, dtype=torch.bfloat16), mask)
    theirs = sparse.to_semi_structured("cutlass")
    assert isinstance(theirs, SparseSemiStructuredTensorCUTLASS)
    assert torch.equal(theirs.to_dense(), sparse.to_dense())
    assert torch.equal(theirs.values(), sparse.packed)
    assert same(Sparse24Tensor.from_semi_structured(theirs), sparse)
    if mask == "transposable":
        assert torch.equal(theirs.t().to_dense(), sparse.to_dense().t())


def test_32_bit_floats_from_pytorch_and_not_to_cutlass() -> None:
    """To the hardware these are 1:2: one of every two is kept."""
    kept = torch.arange(64) % 2 == torch.randint(2, (32, 1))
    values, words = torch_conversions.sparse_semi_structured_from_dense_cutlass(torch.randn(32, 64) * kept)
    parts = (values, words, None, None)
    theirs = SparseSemiStructuredTensorCUTLASS((32, 64), *parts, compressed_swizzled_bitmask=None)
    ours = Sparse24Tensor.from_semi_structured(theirs)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    with pytest.raises(UnsupportedProgram, match="no layout of CUTLASS's"):
        ours.to_semi_structured("cutlass")


def test_cusparselt_needs_a_gpu() -> None:
    sparse = sparsify(torch.randn(32, 64, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="Only CUDA tensors"):
        sparse.to_semi_structured("cusparselt")


KERNELS = {
    "no GPU": (None, torch.bfloat16, (64, 64), 8, "dense"),
    "Ampere": ((8, 0), torch.bfloat16, (64, 64), 8, "cutlass"),
    "Ada, fp16": ((8, 9), torch.float16, (32, 128), 16, "cutlass"),
    "Ampere, odd tiles": ((8, 0), torch.bfloat16, (16, 64), 8, "cusparselt"),
    "Hopper": ((9, 0), torch.bfloat16, (64, 64), 8, "cusparselt"),
    "Hopper, fp32": ((9, 0), torch.float32, (64, 64), 8, "dense"),
    "Hopper, few columns": ((9, 0), torch.bfloat16, (64, 8), 8, "dense"),
    "Hopper, odd batch": ((9, 0), torch.bfloat16, (64, 64), 5, "dense"),
    "Turing": ((7, 5), torch.float16, (64, 64), 8, "dense"),
}


@pytest.mark.parametrize("capability, dtype, size, width, kernel", KERNELS.values(), ids=KERNELS.keys())
def test_which_kernel_is_chosen(monkeypatch, capability, dtype, size, width, kernel) -> None:
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    assert choose_kernel(capability, dtype, size, width) == kernel
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    assert choose_kernel(capability, dtype, size, width) == ("dense" if kernel == "cusparselt" else kernel)


class Kernels(TorchDispatchMode):
    """The hardware's operators, which have no CPU kernels, computed from what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kernel = getattr(self, func._schema.name.removeprefix("aten::"), None)
        if kernel is None:
            return func(*args, **(kwargs or {}))
        self.ran.append(kernel.__name__)
        return kernel(*args, **(kwargs or {}))

    def _sparse_semi_structured_mm(self, packed, words, dense):
        return torch_conversions.sparse_semi_structured_to_dense_cutlass(packed, words) @ dense

    def _cslt_compress(self, dense):
        assert torch.equal(dense, sparsify(dense.contiguous()).to_dense())
        return dense.clone()

    def _cslt_sparse_mm(
        self, compressed, dense, bias=None, alpha=None, out_dtype=None, transpose_result=False
    ):
        assert alpha is None and out_dtype is None
        product = compressed @ dense if bias is None else compressed @ dense + bias[:, None]
        return product.t().contiguous() if transpose_result else product


@pytest.mark.parametrize("kernel", ["cutlass", "cusparselt"])
@pytest.mark.parametrize("bias", [None, torch.arange(64, dtype=torch.bfloat16)])
def test_kernels_are_handed_what_they_take(monkeypatch, kernel: str, bias: torch.Tensor | None) -> None:
    monkeypatch.setattr(sparse24_operators, "choose_kernel", lambda *described: kernel)
    """Small integers: sums are exact, in whatever order they are added."""
    sparse = sparsify(torch.randint(-1, 2, (64, 128), dtype=torch.bfloat16))
    x = torch.randint(-1, 2, (8, 128), dtype=torch.bfloat16)
    dense = sparse.to_dense()
    with Kernels() as kernels:
        linear = sparse24_operators._run_linear(x, sparse.packed, sparse.meta, bias)
        product = sparse24_operators._run_mm(sparse.packed, sparse.meta, x.t())
    assert (
        kernels.ran
        == {
            "cutlass": ["_sparse_semi_structured_mm"] * 2,
            "cusparselt": ["_cslt_compress", "_cslt_sparse_mm"] * 2,
        }[kernel]
    )
    assert torch.equal(linear, F.linear(x, dense, bias))
    assert torch.equal(product, dense @ x.t())
    assert linear.is_contiguous()


def test_operators_describe_their_results() -> None:
    """What a graph is told of sizes, dtypes and strides is what comes."""
    dense = torch.randn(16, 24)
    sparse = sparsify(dense, "transposable")
    packed, meta = sparse.packed, sparse.meta
    ops = torch.ops.aotdist
    for operator, arguments in (
        (ops.choose_24, (dense, False)),
        (ops.choose_24, (dense, True)),
        (ops.transpose_24, (meta,)),
        (ops.mask_24, (meta,)),
        (ops.compress_24, (dense, meta)),
        (ops.compress_24, (dense.t(), sparse.meta_t)),
        (ops.unpack_24, (packed, meta)),
        (ops.mm_24, (packed, meta, torch.randn(24, 8))),
        (ops.linear_24, (torch.randn(5, 24), packed, meta, torch.randn(16))),
        (ops.linear_24, (torch.randn(24, 5).t(), packed, meta, None)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_what_it_cannot_do_is_refused() -> None:
    sparse = sparsify(torch.randn(16, 24))
    with pytest.raises(UnsupportedProgram, match="aten.sin") as raised:
        sparse.sin()
    assert "to_dense" in str(raised.value)
    with pytest.raises(UnsupportedProgram, match="packed alike"):
        sparse.copy_(torch.randn(16, 24))
    with pytest.raises(UnsupportedProgram, match="packed alike"):
        sparse.copy_(sparsify(torch.randn(16, 24), "transposable"))


def frozen(mask: MaskKind) -> nn.Linear:
    layer = nn.Linear(24, 16)
    layer.weight = nn.Parameter(sparsify(layer.weight.detach(), mask), requires_grad=False)
    return layer


def test_saving_and_loading(mask: MaskKind) -> None:
    layer, other = frozen(mask), frozen(mask)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert same(other.weight, layer.weight)


def test_distributed_checkpoint(mask: MaskKind, tmp_path: Path) -> None:
    layer, other = frozen(mask), frozen(mask)
    checkpoint.save(layer.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert same(other.weight, layer.weight)
