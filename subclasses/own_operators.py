"""Operators of wrappers' that stay whole in a graph, and choose their kernel when they run.

So a graph that was traced without a GPU is the one that a GPU runs, and eager and compiled choose alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from aotdist.torch_seam.functional import views_unnoticed
from aotdist.torch_seam.operators import OpOverload


def define(schema: str, run: Callable[..., Any], like: Callable[..., Any]) -> OpOverload[..., Any]:
    """The operator that is made of a function, and of one that describes its result without data.

    Functions end in views of what they have made (`flatten`); an operator's result is no view.
    """

    @functools.wraps(run)
    def run_unnoticed(*args: Any) -> torch.Tensor:
        with views_unnoticed():
            return run(*args)

    name, _, signature = schema.partition("(")
    torch.library.define(f"aotdist::{name}", f"({signature}")
    torch.library.impl(f"aotdist::{name}", "default", run_unnoticed)
    torch.library.register_fake(f"aotdist::{name}", like)
    return getattr(torch.ops.aotdist, name).default


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a GPU; None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
