"""Models of Hugging Face's transformers train compiled as they train eagerly, bit for bit, however spread."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.zoo.vocabulary import FAMILIES, LAYOUTS, PRECISIONS
from tests.ranks.harness import World

pytestmark = pytest.mark.ranks

CASES = "tests.models.cases"
CHOSEN = {
    ("Llama", "FSDP2", "fp32"),
    ("Mixtral", "FSDP2", "fp32"),
    ("ViT", "FSDP2", "fp32"),
    ("Llama", "TP", "fp32"),
    ("Llama", "2-D", "fp32"),
    ("Llama", "FSDP2", "fp8"),
    ("GPT2", "TP", "2:4"),
}
CELLS = [
    pytest.param(*cell, marks=() if cell in CHOSEN else pytest.mark.sweep)
    for cell in itertools.product(FAMILIES, LAYOUTS, PRECISIONS)
]


@pytest.mark.parametrize(("family", "layout", "precision"), CELLS)
def test_trains_as_eager_does(
    family: str, layout: str, precision: str, world2: World, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue("world4") if layout == "2-D" else world2
    world.run(f"{CASES}:same_bits_case", family, layout, precision)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_splits_what_is_computed(world2: World, family: str) -> None:
    world2.run(f"{CASES}:as_a_whole_case", family, "TP")


@pytest.mark.sweep
def test_a_cache_is_returned_as_an_object(world2: World) -> None:
    world2.run(f"{CASES}:cache_case", "Qwen3")


def test_a_padded_batch(world2: World) -> None:
    world2.run(f"{CASES}:padding_case", "Llama")


def test_batches_of_any_length(world2: World) -> None:
    world2.run(f"{CASES}:lengths_case", "Llama")
