"""The contenders: ways to compile the same program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch

import aotdist

Way = Literal[
    "eager",
    "torch.compile",
    "torch.compile max-autotune",
    "aotdist triton",
    "aotdist triton, CUDA graphs",
    "Liger",
    "fused",
]
"""`Liger` and `fused` are kernels that others wrote by hand for one operator."""

WITH_GRAPHS: frozenset[Way] = frozenset({"torch.compile max-autotune", "aotdist triton, CUDA graphs"})
"""What these have in memory no allocation shows: graphs keep theirs."""

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Compilers:
    """What the words mean on one device.

    Args:
        dry: on a CPU, as quickly as it goes: `torch.compile` only captures there, and nothing records graphs.
        backend: aotdist's.
    """

    dry: bool
    backend: Literal["triton", "fx"] = "triton"

    def compiled(self, target: Compiled, way: Way, *, graphs: bool) -> Compiled:
        """`target`, compiled in one of the ways.

        Args:
            target: a function or a module.
            way: `eager`, one of `torch.compile` or one of `aotdist`.
            graphs: whether max-autotune may use CUDA graphs. Around a single kernel their copies of its
                inputs would be most of what is measured.
        """
        match way:
            case "torch.compile" | "torch.compile max-autotune":
                return cast("Compiled", torch.compile(target, **self._torch_options(way, graphs)))
            case "aotdist triton":
                return cast("Compiled", aotdist.compile(target, backend=self.backend))
            case "aotdist triton, CUDA graphs":
                settings = {"cuda_graphs": not self.dry}
                return cast("Compiled", aotdist.compile(target, backend=self.backend, settings=settings))
            case "eager" | "Liger" | "fused":
                return target

    def _torch_options(self, way: Way, graphs: bool) -> Mapping[str, Any]:
        if self.dry:
            return {"backend": "aot_eager"}
        if way == "torch.compile":
            return {}
        return {"mode": "max-autotune" if graphs else "max-autotune-no-cudagraphs"}
