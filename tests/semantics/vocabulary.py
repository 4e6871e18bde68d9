"""What random programs are made of: inputs, and statements with `{a}` and `{b}` for tensors."""

import torch
import torch.nn.functional
import torch.utils.checkpoint
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.semantics.functions import FUNCTIONS
from tests.semantics.wrapped import WRAPPED
from tests.subclasses import dtensors

INPUTS = {
    "leaf": "torch.randn(3, 4, requires_grad=True)",
    "plain": "torch.randn(3, 4)",
    "non_leaf": "torch.randn(3, 4, requires_grad=True) * 1.5",
    "non_leaf_view": "(torch.randn(4, 3, requires_grad=True) * 1.5).t()",
    "transposed": "torch.randn(4, 3).t()",
    "transposed_leaf": "torch.empty_strided((3, 4), (1, 3)).normal_().requires_grad_()",
    "expanded": "torch.randn(1, 4).expand(3, 4)",
    "part": "torch.randn(6, 4)[1:4]",
    "strided": "torch.randn(3, 8)[:, ::2]",
    "scalar": "torch.randn((), requires_grad=True)",
    "empty": "torch.randn(0, 4, requires_grad=True)",
    "integers": "torch.arange(12).view(3, 4)",
    "booleans": "torch.randn(3, 4) > 0",
    "double": "torch.randn(3, 4, dtype=torch.float64, requires_grad=True)",
    "half": "torch.randn(3, 4, dtype=torch.bfloat16)",
}

SQUARES = (
    "torch.randn(4, 4, requires_grad=True)",
    "torch.randn(4, 4)",
    "torch.randn(4, 4, requires_grad=True) * 1.5",
    "(torch.randn(4, 4, requires_grad=True) * 1.5).t()",
    "torch.randn(4, 4).t()",
    "torch.randn(1, 4).expand(4, 4)",
    "torch.randn(6, 4)[1:5]",
    "torch.randn(4, 8)[:, ::2]",
    "torch.randn(4, requires_grad=True)",
    "torch.arange(16).view(4, 4)",
)
"""What has the same size when it is transposed, so that nothing fails that is done to the wrong elements."""

WRAPPERS = (
    "TwoTensor(torch.randn(3, 4), torch.randn(3, 4)).requires_grad_()",
    "TwoTensor(torch.randn(3, 4), torch.randn(3, 4))",
    "TwoTensor(torch.randn(3, 4), torch.randn(3, 4)).requires_grad_() * 1.5",
    "TwoTensor(torch.randn(4, 3).t(), torch.randn(4, 3).t())",
    "TwoTensor(TwoTensor(torch.randn(3, 4), torch.randn(3, 4)), torch.randn(3, 4)).requires_grad_()",
    "torch.randn(3, 4, requires_grad=True)",
    "torch.randn(3, 4)",
)
"""Two tensors in one, also nested, and plain ones beside them."""
SQUARE_WRAPPERS = (
    "TwoTensor(torch.randn(4, 4), torch.randn(4, 4)).requires_grad_()",
    "TwoTensor(torch.randn(4, 4), torch.randn(4, 4))",
    "TwoTensor(torch.randn(4, 4), torch.randn(4, 4)).requires_grad_() * 1.5",
    "(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)).requires_grad_() * 1.5).t()",
    "TwoTensor(torch.randn(4, 4).t(), torch.randn(4, 4).t())",
    "TwoTensor(torch.randn(4, 4), TwoTensor(torch.randn(4, 4), torch.randn(4, 4))).requires_grad_()",
    "torch.randn(4, 4, requires_grad=True) * 1.5",
    "torch.randn(4, 4)",
)

EIGHT_BITS = (
    "in_8_bits(torch.randn(16, 16))",
    "in_8_bits(torch.randn(16, 16).t())",
    "torch.randn(16, 16, requires_grad=True)",
    "torch.randn(16, 16)",
    "torch.randn(16, 16, dtype=torch.bfloat16, requires_grad=True)",
    "over_mesh(torch.randn(16, 16)).requires_grad_()",
    "in_8_bits(over_mesh(torch.randn(16, 16)))",
    "TwoTensor(in_8_bits(torch.randn(16, 16)), in_8_bits(torch.randn(16, 16)))",
)
"""Float8Tensors, alone and inside of other wrappers, and what they are made of."""

PRODUCTS_OF_8_BITS = (
    "{a} @ {b}",
    "{a} @ {b}",
    "F.linear({a}, {b})",
    "product_8({a}, {b})",
    "product_8({a}, {b})",
    "in_8_bits({a})",
    "in_8_bits({a}.detach())",
    "{a}.dequantise()",
    "{a}.float8",
    "{a}.scale * 2",
    "{a} * {b}",
    "{a}.relu()",
)

SPARSE = (
    "sparsify(torch.randn(16, 16)).detach().requires_grad_()",
    "sparsify(torch.randn(16, 16))",
    "sparsify(torch.randn(16, 16), 'transposable').detach().requires_grad_()",
    "sparsify(torch.randn(16, 16, requires_grad=True) * 2)",
    "torch.randn(16, 16, requires_grad=True)",
    "torch.randn(16, 16)",
    "over_mesh(torch.randn(16, 16)).requires_grad_()",
)
"""2:4 sparse matrices, and what they are made of."""

PRODUCTS_OF_SPARSE = (
    "{a} @ {b}",
    "F.linear({a}, {b})",
    "F.linear({a}, {b}, {a}.detach()[0])",
    "sparsify({a})",
    "sparsify({a}, 'transposable')",
    "sparsify({a}, gradient='masked', decay=0.1)",
    "{a}.to_dense()",
    "{a}.mask()",
    "{a}.to(torch.float64)",
    "{a} * {b}",
    "{a}.relu()",
)

NARROW_VIEWS = ("{a}.t()", "{a}.transpose(0, 1)", "{a}.detach()", "{a}.clone()", "{a}[:8]", "{a}.data")
"""What classes that know few operators know too."""

NARROW_WRITES = (
    "{a}.copy_({b})",
    "{a}.mul_({b})",
    "{a}.add_(1)",
    "{a}.relu_()",
    "{a}[0] = 2.5",
    "{a}.detach().mul_(2)",
    "{a}.t()[0].mul_(3)",
    "{a}.scale = {a}.scale * 2",
    "{a}.scale.mul_(2)",
)

NESTED = (
    "TwoTensor(TwoTensor(torch.randn(3, 4), torch.randn(3, 4)), torch.randn(3, 4)).requires_grad_()",
    "over_mesh(TwoTensor(torch.randn(3, 4), torch.randn(3, 4))).detach().requires_grad_()",
    "over_mesh(TwoTensor(torch.randn(3, 4), torch.randn(3, 4)))",
    "over_mesh(torch.randn(3, 4), Replicate()).detach().requires_grad_()",
    "over_mesh(torch.randn(3, 4)).detach().requires_grad_() * 1.5",
    "over_mesh(torch.randn(4, 3).t())",
    "TwoTensor(torch.randn(3, 4), torch.randn(3, 4)).requires_grad_()",
    "torch.randn(3, 4)",
)
"""Wrappers in wrappers, and DTensors on a mesh of one."""
SQUARE_NESTED = (
    "TwoTensor(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)), torch.randn(4, 4)).requires_grad_()",
    "over_mesh(TwoTensor(torch.randn(4, 4), torch.randn(4, 4))).detach().requires_grad_()",
    "over_mesh(torch.randn(4, 4), Shard(1)).detach().requires_grad_()",
    "over_mesh(torch.randn(4, 4), Replicate()).detach().requires_grad_() * 1.5",
    "over_mesh(torch.randn(4, 4)).detach().requires_grad_() * 1.5",
    "(over_mesh(torch.randn(4, 4)).detach().requires_grad_() * 1.5).t()",
    "over_mesh(torch.randn(4, 4).t())",
    "TwoTensor(torch.randn(4, 4), torch.randn(4, 4)).requires_grad_() * 1.5",
    "torch.randn(4, 4)",
)

PLACEMENTS = (
    "whole({a})",
    "{a}.to_local()",
    "{a}.full_tensor()",
    "over_mesh({a})",
    "over_mesh({a}, Shard(1))",
    "{a}.a",
    "{a}.b.t()",
)

COMPLEX = (
    "torch.randn(3, 4, dtype=torch.complex64)",
    "torch.randn(3, 4, dtype=torch.complex64, requires_grad=True) * 1.5",
    "torch.randn(3, 4, dtype=torch.complex64).conj()",
    "torch.randn(3, 4, requires_grad=True)",
    "torch.randn(3, 4)",
)
SQUARE_COMPLEX = (
    "torch.randn(4, 4, dtype=torch.complex64)",
    "torch.randn(4, 4, dtype=torch.complex64, requires_grad=True) * 1.5",
    "(torch.randn(4, 4, dtype=torch.complex64, requires_grad=True) * 1.5).t()",
    "torch.randn(4, 4, dtype=torch.complex64).mH",
    "torch.randn(4, 4, requires_grad=True)",
    "torch.randn(4, 4)",
)

PARTS = (
    "{a}.t()",
    "{a}[1:]",
    "{a}[..., ::2]",
    "{a}[0]",
    "{a}.reshape(-1)",
    "{a}.detach()",
    "{a}.view(-1)[2:9]",
    "{a}.data",
    "{a}.detach()[1:]",
)
"""Arguments that share memory with another argument."""

COMMON_ARITHMETIC = (
    "{a} * {b}",
    "{a} + {b}",
    "{a} - 1.5",
    "{a}.sin()",
    "{a}.relu()",
    "{a}.sum(0)",
    "{a}.mean()",
    "{a}.clone()",
    "{a}.contiguous()",
    "{a}.softmax(-1)",
    "{a}.cumsum(0)",
    "{a} > 0",
    "{a}.double()",
    "{a}.transpose(0, 1) @ {b}",
    "torch.cat([{a}, {b}])",
    "torch.where({a} > 0, {a}, {b})",
    "torch.zeros_like({a})",
    "F.layer_norm({a}, {a}.shape[-1:])",
    "checkpoint(lambda x: x.sin() * x, {a}, use_reentrant=False)",
    "torch._foreach_mul([{a}, {b}], 2.0)[1]",
)
"""What DTensors know too, as `COMMON_VIEWS` and `COMMON_WRITES`."""
ARITHMETIC = (
    *COMMON_ARITHMETIC,
    "{a}.to(torch.float32)",
    "torch.rand_like({a}) * {a}",
    "F.dropout({a}, 0.5)",
    "torch.tensor([1.0, 2.0, 3.0, 4.0]) * {a}",
    "torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 3)",
    "checkpoint(lambda x: F.dropout(x.sin(), 0.5) * x, {a}, use_reentrant=False)",
    "{a}.amax(-1)",
    "torch.sin({a}, out=torch.empty_like({a}))",
)

FUNCTION_CALLS = (
    "Scaled.apply({a})",
    "WithConstant.apply({a})[0]",
    "WithConstant.apply({a})[1]",
    "Transposed.apply({a})",
    "Alias.apply({a})",
    "Identity.apply({a})",
    "Detached.apply({a})",
    "Several.apply({a})[0]",
    "Several.apply({a})[2]",
)
"""Autograd functions of a user's; see `functions.py`."""

COMMON_VIEWS = (
    "{a}.t()",
    "{a}.view(-1)",
    "{a}.reshape(-1)",
    "{a}[0]",
    "{a}[1:]",
    "{a}[:, None]",
    "{a}.unsqueeze(0)",
    "{a}.squeeze()",
    "{a}.split(2)[0]",
    "{a}.chunk(2, -1)[1]",
    "{a}.detach()",
    "{a}.view_as({a})",
    "{a}.data",
)
VIEWS = (
    *COMMON_VIEWS,
    "{a}.view(2, 6)",
    "{a}[..., ::2]",
    "{a}.expand(2, 3, 4)",
    "{a}.unbind(0)[1]",
    "{a}.diagonal()",
    "{a}.narrow(0, 1, 1)",
    "{a}.view(torch.int32)",
    "{a}.T",
)

SEVERAL_VIEWS = (
    "{a}.split(1)",
    "{a}.split([1, 2], 1)",
    "{a}.unbind(0)",
    "{a}.chunk(2, -1)",
    "{a}.tensor_split(2)",
)
"""Views of which autograd knows that they came together: two of them are given names."""

COMPLEX_VIEWS = (
    "torch.view_as_real({a})",
    "torch.view_as_complex({a}.view(3, 2, 2))",
    "torch.view_as_complex({a})",
    "{a}.conj()",
    "{a}.real",
    "{a}.imag",
    "torch.complex({a}, {b})",
    "{a}.resolve_conj()",
    "{a}.H",
)

EMPTY_SPLIT = "{a}.split(2)[0]" if torch.__version__ < "2.12" else None
"""On fake tensors torch 2.11 fails to split what is empty."""

COPIES_EACH = "torch._foreach_copy_([{a}], [{b}])"
WRITES_BOTH = "torch._foreach_mul_([{a}, {b}], 2.0)"
"""Eager is at odds with itself where both are views of one tensor."""
WRITES_ITEMS = "{a}.index_put_((torch.tensor([0]),), {b}[:1])"
"""Eager refuses to write a tensor with parts of itself, unless the tensor has gaps."""

COMMON_WRITES = (
    "{a}.add_(1)",
    "{a}.mul_({b})",
    "{a}.add_({b}, alpha=2)",
    "{a}.zero_()",
    "{a}.copy_({b})",
    "{a}[0] = 2.5",
    "{a}.relu_()",
    "{a}.sin_()",
    "{a}.fill_(0.5)",
    "{a}.detach().mul_(2)",
    "{a}.clamp_(min=0)",
    "torch._foreach_add_([{a}], 1.0)",
)
WRITES = (
    *COMMON_WRITES,
    "{a}[1:] = {b}[1:]",
    "{a}[{b} > 0] = 0.25",
    "{a}.masked_fill_({b} > 0, -1)",
    "{a}.uniform_()",
    "{a} += {b}",
    "{a}.t()[0].mul_(3)",
    "torch.sin({b}, out={a})",
    "torch.add({b}, 1, out={a})",
    WRITES_BOTH,
    COPIES_EACH,
    WRITES_ITEMS,
)

FUNCTION_WRITES = ("Dirty.apply({a})",)
COMPLEX_WRITES = (
    "{a}.real.mul_(2)",
    "{a}.mul_(1j)",
    "{a}.imag[0] = 0.5",
    "{a}.imag.zero_()",
    "torch.view_as_real({a})[0].zero_()",
)

RESHAPES = ("{a}.t_()", "{a}.unsqueeze_(0)", "{a}.squeeze_()", "{a}.detach_()", "{a}.swapaxes_(0, -1)")
"""Writes of metadata."""

MOVES = (
    "{a}.resize_({a}.shape[:-1])",
    "{a}.resize_(5, 4).fill_(0.5)",
    "{a}.set_({b})",
    "{a}.set_({b}.detach())",
    "{a}.data = {b}",
    "{a}.data = {b}.clone()",
    "torch.sin({b}.detach(), out={a})",
)
"""Writes of metadata after which a tensor lies elsewhere."""

OF_DATA = (
    "{a}[{b} > 0]",
    "torch.masked_select({a}, {a} > 0)",
    "{a}[({b} > 0).nonzero(as_tuple=True)]",
    "{a}[{a} > 0].sum() * {b}",
    "{a} * ({b} > 0).sum().item()",
    "{a} + {b}.detach().sum().item()",
    "{a}[: ({b} > 0).sum().item() % 3]",
    "{a}[({b} > 0).sum().item() % 2]",
    "{a}.split([({b} > 0).sum().item() % 2, {a}.shape[0] - ({b} > 0).sum().item() % 2])[1]",
    "{a}[{b} > 0].view(1, -1)",
)
"""Values, of whose sizes and elements some depend on data."""
WRITES_OF_DATA = (
    "{a}[: ({b} > 0).sum().item() % 3] = 1.5",
    "{a}[({b} > 0).sum().item() % 2].mul_(2)",
    "{a}[{b} > 0] = {a}[{b} > 0] * 2",
    "{a}.mul_({b}.detach().sum().item())",
)

MODES = ("", "", "", "", "with torch.no_grad(): ", "with torch.enable_grad(): ")

SCOPE = {
    "torch": torch,
    "F": torch.nn.functional,
    "checkpoint": torch.utils.checkpoint.checkpoint,
    "TwoTensor": TwoTensor,
    **WRAPPED,
    **{function.__name__: function for function in FUNCTIONS},
    "DTensor": DTensor,
    **{
        name: getattr(dtensors, name)
        for name in ("R", "S0", "S1", "P", "row", "mine", "spread", "leaf", "non_leaf")
    },
}
