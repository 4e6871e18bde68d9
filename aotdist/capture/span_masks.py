"""SpecAugment of transformers: spans of time or features to hide, which NumPy draws on the host.

The speech models (wav2vec2, HuBERT, WavLM, Whisper and others) have the same function for it, each in its own
file. Of its result the shape is known, and nothing else may be asked in a trace; so it is an operator that
calls that function whenever the program runs, and leaves the generator of NumPy where eager leaves it.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from aotdist.torch_seam.operators import own_operator
from aotdist.torch_seam.patches import Place

_NAME = "_compute_mask_indices"
_PARAMETERS = ("shape", "mask_prob", "mask_length", "attention_mask", "min_masks")


def _draw(
    file: str, shape: Sequence[int], prob: float, length: int, mask: Tensor | None, least: int
) -> Tensor:
    """Shapes: (batch, time) of the shape, (batch, time) of the mask -> (batch, time), on a CPU."""
    return torch.from_numpy(
        getattr(importlib.import_module(file), _NAME)(tuple(shape), prob, length, mask, least)
    )


def _like(_file: str, shape: Sequence[int], *_others: Any) -> Tensor:
    return torch.empty(tuple(shape), dtype=torch.bool, device="cpu")


_SPAN_MASK = own_operator(
    "span_mask(str file, SymInt[] shape, float prob, int length, Tensor? mask, int least) -> Tensor",
    _draw,
    _like,
    tags=[torch.Tag.nondeterministic_seeded],
)


def span_masks(files: Iterable[types.ModuleType]) -> Iterator[Place]:
    """Where these files have that function, and what a trace calls instead."""
    for file in files:
        function = vars(file).get(_NAME)
        if inspect.isfunction(function) and tuple(inspect.signature(function).parameters) == _PARAMETERS:
            yield file, _NAME, _drawn_by(function.__module__)


def _drawn_by(file: str) -> Callable[..., Tensor]:
    def drawn(
        _original: Any,
        shape: Sequence[int],
        mask_prob: float,
        mask_length: int,
        attention_mask: Tensor | None = None,
        min_masks: int = 0,
    ) -> Tensor:
        return _SPAN_MASK(file, shape, mask_prob, mask_length, attention_mask, min_masks)

    return drawn
