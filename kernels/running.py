"""What starts a kernel: Triton's launcher, or the compiled kernel itself, which is some 5 us quicker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from aotdist.kernels import triton_seam

ALIGNMENT = 16
"""Bytes. Kernels read up to as many at once, from tensors that begin at a multiple."""


class Runner(Protocol):
    """Starts a kernel."""

    def __call__(
        self, num_blocks: int, inputs: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        """Start it.

        Args:
            num_blocks: how many blocks run.
            inputs: what it reads, of any alignment; some it may write.
            written: what else it writes, fresh from PyTorch's allocator.
        """
        ...


class Jitted:
    """A kernel that Triton compiles when it is first started, or interprets.

    Triton compiles a kernel for what it is given: dtypes, which never change here, and whether tensors begin
    at multiples of 16 bytes. Where all do, what was compiled for such is started without asking Triton again.

    Args:
        function: the kernel, of `triton.jit`.
        blocks: `XBLOCK`, `RBLOCK`.
        options: of Triton's.
        device: where it runs.
    """

    def __init__(
        self, function: Any, blocks: Mapping[str, int], options: Mapping[str, Any], device: torch.device
    ) -> None:
        self.function = function
        self._arguments = {**blocks, **options}
        self._constants = tuple(blocks.values())
        self._device = device
        self._direct: Direct | None = None

    def __call__(
        self, num_blocks: int, inputs: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        """See `Runner`."""
        is_aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in inputs)
        if is_aligned and self._direct is not None:
            self._direct(num_blocks, (*inputs, *written))
            return
        with on_device(self._device):
            made = self.function[(num_blocks,)](*inputs, *written, **self._arguments)
        if is_aligned and made is not None:  # an interpreted kernel is none
            self._direct = Direct(made, self._constants, self._device)


class Loaded:
    """A kernel that was compiled for tensors which begin at multiples of 16 bytes.

    Args:
        kernel: as Triton loads it.
        constants: its blocks.
        device: where it runs.
        overwritten: positions of the inputs that it writes.
    """

    def __init__(
        self, kernel: Any, constants: tuple[int, ...], device: torch.device, overwritten: frozenset[int]
    ) -> None:
        self._direct = Direct(kernel, constants, device)
        self._overwritten = overwritten

    def __call__(
        self, num_blocks: int, inputs: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> None:
        """See `Runner`."""
        given = [*map(aligned, inputs)]
        self._direct(num_blocks, (*given, *written))
        for position in self._overwritten:
            if given[position] is not inputs[position]:
                inputs[position].copy_(given[position])


class Direct:
    """Starts a compiled kernel, without looking at what it is given.

    Args:
        kernel: compiled.
        constants: its blocks, which come last among its arguments.
        device: where it runs.
    """

    def __init__(self, kernel: Any, constants: tuple[int, ...], device: torch.device) -> None:
        self._kernel = kernel
        self._constants = constants
        self._device = device
        self._process = process = triton_seam.Process.here()
        self._index = device.index if device.type == "cuda" else process.current_device()

    def __call__(self, num_blocks: int, tensors: Sequence[torch.Tensor]) -> None:
        """Start it on the current stream of its device."""
        if self._process.current_device() == self._index:
            self._start(num_blocks, tensors)
        else:
            with on_device(self._device):
                self._start(num_blocks, tensors)

    def _start(self, num_blocks: int, tensors: Sequence[torch.Tensor]) -> None:
        kernel, process = self._kernel, self._process
        if process.is_watched():
            kernel[(num_blocks, 1, 1)](*tensors, *self._constants)
            return
        run, stream = kernel.run, process.current_stream(self._index)  # `run` puts the code on the GPU
        function, packed = kernel.function, kernel.packed_metadata
        run(num_blocks, 1, 1, stream, function, packed, None, None, None, *tensors, *self._constants)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """What is started inside runs there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy of the same strides, that begins at a multiple of 16 bytes."""
    if tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)
