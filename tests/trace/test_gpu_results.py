"""What operators give on a GPU, asked on the CPU: dtypes, sizes and strides are those of fakes of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.torch_seam.trees import pytree
from aotdist.trace.operators.corrections import fake_result
from aotdist.trace.operators.fakes import as_on_gpu

ATEN = torch.ops.aten
BF16, CUBES = torch.bfloat16, torch.channels_last_3d


def described(result: Any) -> list[Any]:
    leaves = pytree.tree_leaves(result)
    return [(x.dtype, x.shape, x.stride()) if isinstance(x, torch.Tensor) else x for x in leaves]


ASKED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "statistics in float32": (ATEN.native_layer_norm, (((4, 8), BF16), [8], None, None, 1e-5)),
    "no buffer": (ATEN.log_sigmoid_forward, (((5,), torch.float32),)),
    "another layout": (ATEN._fft_r2c, (((5, 6, 7), torch.float32), [2, 0, 1], 0, True)),
    "the same": (ATEN.mm, (((4, 8), BF16), ((8, 3), BF16))),
}


@pytest.mark.parametrize("name", ASKED)
def test_results_are_those_of_a_gpu(name: str) -> None:
    packet, given = ASKED[name]
    func, results = packet.default, list[Any]()
    with FakeTensorMode():
        for device in ("cpu", "cuda"):
            args = [
                torch.empty(arg[0], dtype=arg[1], device=device) if isinstance(arg, tuple) else arg
                for arg in given
            ]
            results.append((tuple(args), func(*args)))
        (args, here), (_, there) = results
        found = as_on_gpu(func, args, {}, here)
    assert described(found) == described(there)
    assert (described(here) != described(there)) == (name != "the same")
    assert {x.device.type for x in pytree.tree_leaves(found)} == {"cpu"}


def test_convolutions_have_channels_last_as_cudnn_has_them() -> None:
    with FakeTensorMode():
        weight, bias = torch.empty(8, 4, 3, 3, 3), torch.empty(8)
        for dtype, last in ((torch.float32, True), (torch.float64, False)):
            given = torch.empty(1, 4, 6, 6, 6, dtype=dtype).to(memory_format=CUBES)
            options = [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1
            args = given, weight.to(dtype), bias.to(dtype), *options
            result = fake_result(ATEN.convolution.default, args, {}, on_gpu=True)
            args = result, given, weight.to(dtype), [8], *options, [True, False, True]
            grads = fake_result(ATEN.convolution_backward.default, args, {}, on_gpu=True)
            for tensor in (result, grads[0]):
                assert tensor.is_contiguous(memory_format=CUBES if last else torch.contiguous_format)
            assert grads[1] is None and grads[2].shape == (8,)


def test_batch_norms_keep_the_layout_of_what_they_get() -> None:
    """Those of a CPU do not, see `aotdist.trace.operators.fakes`."""
    with FakeTensorMode():
        given = torch.empty(3, 4, 5, 6).permute(1, 0, 3, 2)
        args = given, None, None, torch.empty(3), torch.empty(3), True, 0.1, 1e-5
        results = [
            fake_result(ATEN.native_batch_norm.default, args, {}, on_gpu=on_gpu)[0]
            for on_gpu in (False, True)
        ]
    assert results[0].stride() != results[1].stride() == given.stride()
