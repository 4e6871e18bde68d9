"""Custom operators of wrappers: one node in a graph, whose kernel is chosen when it runs.

So a graph that was traced without a GPU can run on one, and eager and compiled programs choose the same
kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from aotdist.torch_seam.functional import views_unnoticed
from aotdist.torch_seam.operators import OpOverload, own_operator


def define(schema: str, run: Callable[..., Any], like: Callable[..., Any]) -> OpOverload[..., Any]:
    """Define the operator `aotdist::...` of this schema.

    Args:
        schema: name, arguments and results.
        run: computes it. It may return a view (`flatten`), which autograd does not see as one.
        like: computes fake results.
    """

    @functools.wraps(run)
    def run_unnoticed(*args: Any) -> torch.Tensor:
        with views_unnoticed():
            return run(*args)

    return own_operator(schema, run_unnoticed, like)


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a GPU; None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
