"""Fakes of operators whose kernels give other strides than PyTorch's fakes claim."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from aotdist.torch_seam.trees import pytree
from aotdist.trace.operators import corrections
from aotdist.trace.operators.fakes import LAID_OUT

aten, IMAGE, BLOCK = torch.ops.aten, (2, 3, 4, 5), (2, 3, 4, 4, 4)
SUM, ROWS = 2, (2, 3, 4, 1)  # a reduction; the statistics of a layer norm
ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    aten.native_layer_norm_backward.default: (IMAGE, IMAGE, [5], ROWS, ROWS, (5,), (5,), [True] * 3),
    aten.mse_loss_backward.default: ((), IMAGE, IMAGE, SUM),
    aten.smooth_l1_loss_backward.default: ((), IMAGE, IMAGE, SUM, 1.0),
    aten.huber_loss_backward.default: ((), IMAGE, IMAGE, SUM, 1.0),
    aten._log_softmax_backward_data.default: (IMAGE, IMAGE, 1, torch.float32),
    aten.log_sigmoid_forward.default: (IMAGE,),
    aten.elu_backward.default: (IMAGE, 1.0, 1, 1, False, IMAGE),
    aten.hardswish_backward.default: (IMAGE, IMAGE),
    aten.hardtanh_backward.default: (IMAGE, IMAGE, -1.0, 1.0),
    aten.logit_backward.default: (IMAGE, IMAGE, 0.1),
    aten.native_dropout_backward.default: (IMAGE, IMAGE, 2.0),
    aten.softplus_backward.default: (IMAGE, IMAGE, 1, 20),
    aten.xlogy.Tensor: (IMAGE, IMAGE),
    aten.channel_shuffle.default: ((2, 4, 3, 5), 2),
    aten.max_unpool2d.default: ((2, 3, 2, 2), torch.arange(24).view(2, 3, 2, 2) % 12, [4, 3]),
    aten.reflection_pad2d_backward.default: ((2, 3, 6, 7), IMAGE, [1, 1, 1, 1]),
    aten.reflection_pad3d.default: (BLOCK, [1] * 6),
    aten.reflection_pad3d_backward.default: ((2, 3, 6, 6, 6), BLOCK, [1] * 6),
    aten.replication_pad2d_backward.default: ((2, 3, 6, 7), IMAGE, [1, 1, 1, 1]),
    aten.replication_pad3d.default: (BLOCK, [1] * 6),
    aten.replication_pad3d_backward.default: ((2, 3, 6, 6, 6), BLOCK, [1] * 6),
}
"""What operators are given: sizes of tensors as tuples, and all else as it is."""


def twisted(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def channels_last(tensor: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats.get(tensor.dim(), torch.contiguous_format))


def shown(result: Any) -> list[list[int]]:
    """Strides of dimensions that have some."""
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    pairs = [zip(tensor.stride(), tensor.shape, strict=True) for tensor in tensors]
    return [[stride for stride, size in pair if size > 1] for pair in pairs]


def test_every_row_has_an_example() -> None:
    assert ARGUMENTS.keys() == LAID_OUT.keys()


@pytest.mark.parametrize("operator", ARGUMENTS, ids=str)
def test_fakes_lie_as_results(operator: Any) -> None:
    args = [torch.randn(one) if isinstance(one, tuple) else one for one in ARGUMENTS[operator]]
    places = [at for at, arg in enumerate(args) if isinstance(arg, Tensor) and arg.dim() > 2]
    for ways in itertools.product((lambda x: x, twisted, channels_last), repeat=len(places[:2])):
        for at, way in zip(places, ways, strict=False):
            args[at] = way(args[at].contiguous())
        with FakeTensorMode() as mode:
            fakes = pytree.tree_map_only(Tensor, mode.from_tensor, args)
            claimed = corrections.fake_result(operator, tuple(fakes), {}, on_gpu=False)
        assert shown(claimed) == shown(operator(*args)), ways
