"""Starts kernels: by Triton's launcher, or directly by the compiled kernel, which saves some 5 us."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from aotdist.kernels import triton_seam
from aotdist.torch_seam.ambient import warnings_no_errors

ALIGNMENT = 16
"""Bytes. Kernels read up to as many at once, from tensors that begin at a multiple."""


class Runner(Protocol):
    """Starts a kernel."""

    @property
    def num_blocks(self) -> int:
        """How many blocks run; none for results without elements."""
        ...

    @property
    def registers(self) -> int | None:
        """Of a thread, 32 bits each; None before it is known."""
        ...

    def __call__(self, inputs: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        """Start it.

        Args:
            inputs: what it reads, of any alignment; some it may write.
            written: what else it writes, fresh from PyTorch's allocator.
        """
        ...


def nothing_compiled() -> None:
    """In the place of `code` for a kernel that nobody compiles in the background."""


class Jitted:
    """A kernel that Triton compiles when it is first started, or interprets.

    Triton specializes a kernel on dtypes, which never change here, and on whether tensors begin at multiples
    of 16 bytes. If all do, the kernel compiled for that is started without asking Triton again.

    Args:
        function: the kernel, of `triton.jit`.
        num_blocks: how many blocks run.
        blocks: `XBLOCK`, `RBLOCK`.
        options: of Triton's.
        device: where it runs.
        code: waits for the kernel that is compiled in the background, see `aotdist.kernels.background`.
    """

    def __init__(
        self,
        function: Any,
        num_blocks: int,
        blocks: Mapping[str, int],
        options: Mapping[str, Any],
        device: torch.device,
        code: Callable[[], Any | None] = nothing_compiled,
    ) -> None:
        self.function = function
        self._code = code
        self.num_blocks = num_blocks
        self._arguments = {**blocks, **options}
        self._constants = tuple(blocks.values())
        self._device = device
        self._direct: Direct | None = None

    @property
    def registers(self) -> int | None:
        """See `Runner`."""
        return self._direct.registers if self._direct else None

    def __call__(self, inputs: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        """See `Runner`."""
        is_aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in inputs)
        if is_aligned and self._direct is None:
            self._keep(self._code())
        if is_aligned and self._direct is not None:
            self._direct((*inputs, *written))
            return
        with on_device(self._device), warnings_no_errors():  # Triton's, while it compiles
            made = self.function[(self.num_blocks,)](*inputs, *written, **self._arguments)
        if is_aligned:
            self._keep(made)

    def _keep(self, made: Any | None) -> None:
        """Start the compiled kernel directly from now on; None if kernels are interpreted."""
        if made is not None:
            self._direct = Direct(made, self.num_blocks, self._constants, self._device)


class Loaded:
    """A kernel that was compiled for tensors aligned to 16 bytes.

    Args:
        kernel: as Triton loads it.
        num_blocks: how many blocks run.
        constants: its blocks.
        device: where it runs.
        overwritten: positions of the inputs that it writes.
    """

    def __init__(
        self,
        kernel: Any,
        num_blocks: int,
        constants: tuple[int, ...],
        device: torch.device,
        overwritten: frozenset[int],
    ) -> None:
        self.num_blocks = num_blocks
        self._direct = Direct(kernel, num_blocks, constants, device)
        self._overwritten = overwritten

    @property
    def registers(self) -> int | None:
        """See `Runner`."""
        return self._direct.registers

    def __call__(self, inputs: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        """See `Runner`."""
        at_multiples = [*map(aligned, inputs)]
        self._direct((*at_multiples, *written))
        for position in self._overwritten:
            if at_multiples[position] is not inputs[position]:
                inputs[position].copy_(at_multiples[position])


class Direct:
    """Starts a compiled kernel, without looking at its arguments.

    Args:
        kernel: compiled.
        num_blocks: how many blocks run.
        constants: its blocks, which come last among its arguments.
        device: where it runs.
    """

    def __init__(
        self, kernel: Any, num_blocks: int, constants: tuple[int, ...], device: torch.device
    ) -> None:
        self._kernel = kernel
        self._num_blocks = num_blocks
        self._constants = constants
        self._device = device
        self._process = process = triton_seam.Process.here()
        self._index = device.index if device.type == "cuda" else process.current_device()

    @property
    def registers(self) -> int | None:
        """See `Runner`: Triton reads them off when it puts the code on the GPU."""
        return getattr(self._kernel, "n_regs", None)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Start it on the current stream of its device."""
        if self._process.current_device() == self._index:
            self._start(tensors)
        else:
            with on_device(self._device):
                self._start(tensors)

    def _start(self, tensors: Sequence[torch.Tensor]) -> None:
        kernel, process, num_blocks = self._kernel, self._process, self._num_blocks
        if process.is_watched():
            kernel[(num_blocks, 1, 1)](*tensors, *self._constants)
            return
        run, stream = kernel.run, process.current_stream(self._index)  # `run` puts the code on the GPU
        function, packed = kernel.function, kernel.packed_metadata
        run(num_blocks, 1, 1, stream, function, packed, None, None, None, *tensors, *self._constants)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which kernels start on `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy of it that begins at a multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else copied(tensor)


def copied(tensor: torch.Tensor, strides: Sequence[int] | None = None) -> torch.Tensor:
    """A copy of these strides, or of the same."""
    strides = tensor.stride() if strides is None else strides
    copy = torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)
