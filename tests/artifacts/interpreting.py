"""Lets this process be one with a GPU, as far as artifacts go: it is the CPU, and kernels are interpreted."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from aotdist.artifacts import load as loading
from aotdist.artifacts.live import Live
from aotdist.codegen import ahead
from aotdist.kernels.compilation import Packed
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.launching import blocks_of
from aotdist.kernels.running import Jitted
from aotdist.kernels.spelling import HELPERS
from aotdist.kernels.triton_seam import loaded
from tests.artifacts.attention import kernels_for_attention

_library: torch.library.Library | None = None
"""What lets the CPU run kernels for attention while a test runs."""


def _pack(emitted: EmittedKernel, target: str) -> Packed:
    """A kernel whose code is its source."""
    name, source = emitted.printed.name, f"{HELPERS}\n\n{emitted.printed.source}"
    return Packed(
        source.encode(), json.dumps({"name": name}), {}, blocks_of(emitted.kernel, emitted.config), 0
    )


def _unpack(packed: Packed, num_blocks: int, device: torch.device, overwritten: frozenset[int]) -> Jitted:
    name = json.loads(packed.metadata)["name"]
    return Jitted(loaded(packed.code.decode(), name)[name], num_blocks, packed.blocks, {}, device)


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build for `sm_90`, and load what was built for it."""
    monkeypatch.setattr(ahead, "check_target", lambda target: None)
    monkeypatch.setattr(ahead, "pack", _pack)
    monkeypatch.setattr(ahead, "unpack", _unpack)
    monkeypatch.setattr(loading, "gpu_here", lambda: "sm_90")
    monkeypatch.setattr(Live, "device_here", lambda live, device: torch.device("cpu"))
    monkeypatch.setattr(sys.modules[__name__], "_library", kernels_for_attention())
