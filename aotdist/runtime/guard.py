"""Whether an artifact fits a call: the same objects, metadata and modes as at capture."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aotdist.torch_seam import TensorGuards, storage_id


def tensor_check(examples: Sequence[torch.Tensor]) -> TensorGuards:
    """A check of many tensors at once, in C++ (5.5 us for 100).

    `check(*tensors)` is true when each has the type, dtype, device, dispatch keys, sizes, strides and
    `requires_grad` of its example, and all are different objects.
    """
    return TensorGuards(*examples, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def no_overlap(written: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether no tensor of `written` shares memory with another of `written` or one of `others`.

    Tensors on different storages never do (0.1 us each); on the same one, the byte ranges decide,
    so that interleaved slices count as overlapping.
    """
    everything = [*written, *others]
    if len({storage_id(tensor) for tensor in everything}) == len(everything):
        return True
    ranges = [_byte_range(tensor) for tensor in everything]
    return not any(
        a[0] == b[0] and a[1] < b[2] and b[1] < a[2]
        for position, a in enumerate(ranges[: len(written)])
        for b in ranges[position + 1 :]
    )


def _byte_range(tensor: torch.Tensor) -> tuple[int, int, int]:
    storage = storage_id(tensor)
    if tensor.numel() == 0:
        return storage, 0, 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return storage, start, start + span * tensor.element_size()
