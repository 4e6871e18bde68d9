"""What models are given: random tokens, images, sounds, and labels for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from benchmarks.zoo.families import Size

CLASSES = 8
SIDE = 32
"""Of an image."""
PATCH = 8
"""Of an image, where models have patches of one size."""
NUM_PATCHES = (SIDE // PATCH) ** 2
PLACEHOLDER = 3
"""A token that stands for a patch of an image."""


def _integers(generator: Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=generator)


def _normal(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _images(size: Size, generator: Generator) -> Tensor:
    return _normal(generator, size.batch, 3, SIDE, SIDE)


def tokens(size: Size, generator: Generator) -> dict[str, Any]:
    """Tokens, and tokens to predict."""
    shape = size.batch, size.sequence
    return {name: _integers(generator, size.vocab, *shape) for name in ("input_ids", "labels")}


def padded(size: Size, generator: Generator) -> dict[str, Any]:
    """Tokens of which a sample lacks the last four, with a mask that says so."""
    mask = torch.ones(size.batch, size.sequence, dtype=torch.int64)
    mask[0, -4:] = 0
    return tokens(size, generator) | {"attention_mask": mask}


def classified(size: Size, generator: Generator) -> dict[str, Any]:
    """Images, and a class for each."""
    return {
        "pixel_values": _images(size, generator),
        "labels": _integers(generator, CLASSES, size.batch),
    }


def segmented(size: Size, generator: Generator) -> dict[str, Any]:
    """Images, and a class for each pixel."""
    return {
        "pixel_values": _images(size, generator),
        "labels": _integers(generator, CLASSES, size.batch, SIDE, SIDE),
    }


def boxed(size: Size, generator: Generator) -> dict[str, Any]:
    """Images, with two objects on each: a class and a box."""
    labels = [
        {
            "class_labels": _integers(generator, CLASSES, 2),
            "boxes": 0.2 + 0.2 * torch.rand(2, 4, generator=generator),
        }
        for _ in range(size.batch)
    ]
    return {"pixel_values": _images(size, generator), "labels": labels}


def waves(size: Size, generator: Generator) -> dict[str, Any]:
    """Sounds of 400 samples, and six letters that are spoken."""
    return {
        "input_values": _normal(generator, size.batch, 400),
        "labels": 1 + _integers(generator, CLASSES, size.batch, 6),
    }


def spectra(size: Size, generator: Generator) -> dict[str, Any]:
    """Sounds by frequency, and a class for each."""
    return {
        "input_values": _normal(generator, size.batch, SIDE, PATCH),
        "labels": _integers(generator, CLASSES, size.batch),
    }


def spoken(size: Size, generator: Generator) -> dict[str, Any]:
    """Sounds by frequency, and tokens that are spoken."""
    return {
        "input_features": _normal(generator, size.batch, PATCH, 2 * SIDE),
        "labels": _integers(generator, size.vocab, size.batch, size.sequence),
    }


def paired(size: Size, generator: Generator) -> dict[str, Any]:
    """Images with the texts that belong to them; the loss is asked for by a flag."""
    return {
        "input_ids": _integers(generator, size.vocab, size.batch, size.sequence),
        "pixel_values": _images(size, generator),
        "return_loss": True,
    }


def _with_places(size: Size, generator: Generator, num_places: int) -> dict[str, Any]:
    """Tokens, with room for an image in front."""
    shape = size.batch, size.sequence + num_places
    drawn = [PLACEHOLDER + 1 + _integers(generator, size.vocab - PLACEHOLDER - 1, *shape) for _ in range(2)]
    drawn[0][:, 1 : 1 + num_places] = PLACEHOLDER
    return {"input_ids": drawn[0], "labels": drawn[1]}


def seen(size: Size, generator: Generator) -> dict[str, Any]:
    """Texts with an image each."""
    return {**_with_places(size, generator, NUM_PATCHES), "pixel_values": _images(size, generator)}


def seen_in_pieces(size: Size, generator: Generator) -> dict[str, Any]:
    """Texts with an image each, whose patches lie in a row: how many, a tensor tells; four make a place."""
    patches = _normal(generator, size.batch * NUM_PATCHES, 3 * 2 * PATCH * PATCH)
    grid = torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]] * size.batch)
    batch = _with_places(size, generator, NUM_PATCHES // 4)
    kinds = (batch["input_ids"] == PLACEHOLDER).int()
    return {**batch, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": kinds}


def series(size: Size, generator: Generator) -> dict[str, Any]:
    """Two numbers over time, and how they go on."""
    return {
        "past_values": _normal(generator, size.batch, SIDE, 2),
        "future_values": _normal(generator, size.batch, PATCH, 2),
    }
