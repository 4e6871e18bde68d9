"""Launches of kernels with symbolic sizes.

A launch is made for the sizes of a call, and kept for the next call with these. A kernel that Triton compiled
serves more sizes than those: they are arguments, specialized only on whether 16 divides them; a block is as
long as the next power of two of what is reduced, if one block holds that, and else the kernel loops; and
places take 64 bits only where 32 are too few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from aotdist.kernels import triton_seam
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.launching import Launch, Result, blocks_of, config_of, is_persistent, num_blocks_of
from aotdist.kernels.polynomial import Values, Whole, names_in, number_at
from aotdist.kernels.printing import IS_LARGE, Printed, is_large, name_of_size
from aotdist.kernels.running import Jitted

MAX_KEPT = 256
"""Launches, of one kernel, which are some numbers each."""


@dataclass(frozen=True, slots=True)
class SizedResult:
    """A tensor that a kernel writes, before its sizes are known.

    Args:
        sizes: its sizes.
        strides: its strides.
        dtype: of its elements.
        into: see `Result`.
    """

    sizes: tuple[Whole, ...]
    strides: tuple[Whole, ...]
    dtype: torch.dtype
    into: int | None

    def at(self, values: Values | None) -> Result:
        """The same in a call, see `number_at`."""
        sizes, strides = (
            tuple(number_at(number, values) for number in numbers) for numbers in (self.sizes, self.strides)
        )
        return Result(sizes, strides, self.dtype, self.into)


@dataclass(frozen=True, slots=True)
class Form:
    """The version of a kernel that a call needs.

    Args:
        printed: its source.
        sizes: arguments that differ from call to call.
        constants: the last arguments: blocks, and whether places take 64 bits.
        num_blocks: how many run.
        options: of Triton's.
    """

    printed: Printed
    sizes: Mapping[str, int]
    constants: Mapping[str, int]
    num_blocks: int
    options: Mapping[str, Any]


def form_of(emitted: EmittedKernel, values: Values | None) -> Form:
    """The form of a kernel for a call.

    Args:
        emitted: the kernel.
        values: of symbols, see `number_at`.
    """
    kernel, config = emitted.kernel, emitted.config
    if values is not None:
        gpu, is_interpreted = emitted.gpu, triton_seam.is_interpreting()
        config = config_of(
            kernel, is_interpreted=is_interpreted, contracts=config.contracts, gpu=gpu, values=values
        )
    printed = emitted.printed
    if emitted.looped is not None and not is_persistent(kernel, values):
        printed = emitted.looped
    sizes = {name_of_size(at): number_at(size, values) for at, size in enumerate(printed.sizes)}
    width = {IS_LARGE: is_large(kernel.ends(), values)} if IS_LARGE in printed.blocks else {}
    constants = blocks_of(kernel, config) | width
    return Form(printed, sizes, constants, num_blocks_of(kernel, config, values), config.options)


def names_needed(emitted: EmittedKernel, results: Sequence[SizedResult]) -> list[str]:
    """The symbols that a kernel's launch depends on; none if it is the same in every call.

    Args:
        emitted: the kernel.
        results: what it writes.
    """
    kernel = emitted.kernel
    numbers: list[Whole] = [*kernel.ends(), *(var.size for var in (*kernel.x, *kernel.r))]
    numbers += [size for printed in emitted.forms for size in printed.sizes]
    numbers += [number for result in results for number in (*result.sizes, *result.strides)]
    return sorted(names_in(numbers))


class SizedLaunch:
    """Runs a kernel on tensors and values of symbols, and returns what it wrote.

    Args:
        emitted: the kernel.
        functions: of `triton.jit`, by name.
        names: of the symbols, in the order of their values.
        results: what it writes, in terms of them.
        device: where.
    """

    def __init__(
        self,
        emitted: EmittedKernel,
        functions: Mapping[str, Any],
        names: Sequence[str],
        results: Sequence[SizedResult],
        device: torch.device,
    ) -> None:
        self.__name__ = emitted.printed.name
        self.names = tuple(names)
        self._num_tensors = len(emitted.printed.inputs)
        self._runner: Jitted | None = None

        def launch_at(*numbers: int) -> Launch:
            values = dict(zip(names, numbers, strict=True))
            form = form_of(emitted, values)
            arguments = {**form.sizes, **form.constants}
            function = functions[form.printed.name]
            self._runner = Jitted(function, form.num_blocks, arguments, form.options, device)
            written = [result.at(values) for result in results]
            return Launch(self.__name__, self._runner, written, device)

        self._at = lru_cache(MAX_KEPT)(launch_at)

    @property
    def registers(self) -> int | None:
        """Of a thread, for the sizes of the last new call; None before it is known."""
        return self._runner.registers if self._runner else None

    def __call__(self, *args: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Launch it on its inputs, followed by the values of its symbols."""
        return self._at(*args[self._num_tensors :])(*args[: self._num_tensors])
