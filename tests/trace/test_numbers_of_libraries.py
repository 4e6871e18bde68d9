"""Whole numbers and sizes that libraries read off inputs: known at capture, and compared by every call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch

import aotdist
from aotdist.api import compiled_call
from aotdist.errors import UnsupportedProgram
from tests.semantics.observation import Scene, same_as_eager
from tests.trace.test_data_guards import by_many_operators, of_a_package

Batch: TypeAlias = dict[str, torch.Tensor]
Grids: TypeAlias = list[tuple[int, int, int]]
NUMBERS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@of_a_package
def by_lists(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.sin() if count % 2 else x[:count] for row in numbers.tolist() for count in row])


@of_a_package
def by_an_integer(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    for _ in range(int(numbers.max())):
        x = x.sin()
    return x * 2 if numbers[0, 1].item() > 2 else x


@of_a_package
def by_how_many(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    chosen = x[numbers > 2]
    return x * chosen.mean() if chosen.shape[0] > 3 else x + chosen.sum()


@of_a_package
def by_what_is_unique(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    values, counts = numbers.flatten().unique(return_counts=True)
    return x.repeat(len(values), 1) if len(values) > 2 else x * values.numel() + counts.sum()


@of_a_package
def by_what_it_made(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """As transformers' windows of attention."""
    padded = torch.nn.functional.pad(torch.arange(numbers.tolist()[0][1]), (0, 2), value=-100)
    kept = padded[padded != -100]
    return x[: len(kept)] if len(kept) > 1 else x


@of_a_package
def by_what_is_written(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    numbers.add_(1)
    return x * numbers.tolist()[0][0]


PROGRAMS = (by_lists, by_an_integer, by_how_many, by_what_is_unique, by_what_it_made, by_what_is_written)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("numbers", [NUMBERS, NUMBERS // 2 + 1])
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_eager_computes(program: Callable[..., Any], numbers: torch.Tensor, dynamic: bool) -> None:
    def build() -> Scene:
        return Scene(program, (torch.randn(2, 3, requires_grad=True), numbers.clone()))

    same_as_eager(build, calls=3, compilations=None, dynamic=dynamic)


@pytest.mark.parametrize(
    ("program", "others"),
    [(by_lists, 2), (by_an_integer, 2), (by_how_many, 1), (by_what_it_made, 2)],
)
def test_other_numbers_are_another_program(program: Callable[..., Any], others: int) -> None:
    """`others`: programs after numbers that differ, but of which as many are above 2."""
    compiled, x = aotdist.compile(program, backend="fx"), torch.randn(2, 3)
    permuted = torch.tensor([[1, 2, 4], [3, 5, 7]])
    for numbers, artifacts in ((NUMBERS, 1), (NUMBERS.clone(), 1), (permuted, others), (NUMBERS, others)):
        assert torch.equal(compiled(x, numbers), program(x, numbers))
        assert len(compiled.artifacts) == artifacts


def test_by_the_default_backend() -> None:
    compiled, x = aotdist.compile(by_how_many), torch.randn(2, 3)
    for numbers, artifacts in ((NUMBERS, 1), (NUMBERS // 2 + 1, 2), (NUMBERS, 2)):
        torch.testing.assert_close(compiled(x, numbers), by_how_many(x, numbers))
        assert len(compiled.artifacts) == artifacts


def test_what_keeps_changing_is_named() -> None:
    compiled = aotdist.compile(by_an_integer, backend="fx")
    with pytest.warns(
        UserWarning, match="what keeps changing: numbers or flags that a library reads off inputs"
    ):
        for more in range(9):
            compiled(torch.randn(2, 3), NUMBERS + more)


def test_numbers_whose_values_nothing_needs_stay_symbols() -> None:
    @of_a_package
    def program(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return x[: numbers[0, 0].item()] * numbers[0, 1].item()

    compiled, x = aotdist.compile(program, backend="fx"), torch.randn(5, 3)
    for more in range(3):
        assert torch.equal(compiled(x, NUMBERS + more), program(x, NUMBERS + more))
    assert len(compiled.artifacts) == 1


def test_lists_of_lists_in_the_users_code() -> None:
    def program(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        (_, a, b), (c, *_) = numbers.tolist()
        return x[a] * b + c

    compiled, x = aotdist.compile(program, backend="fx"), torch.randn(5, 3)
    for more in range(2):
        assert torch.equal(compiled(x, NUMBERS + more), program(x, NUMBERS + more))
    assert len(compiled.artifacts) == 1


@pytest.mark.parametrize(
    "program",
    [
        lambda x, numbers: x * 2 if numbers.sum().item() > 3 else x,  # the user's own choice
        lambda x, numbers: x * 2 if x[numbers > 2].shape[0] > 3 else x,
        of_a_package(lambda x, numbers: x * 2 if x[x > 0].shape[0] > 3 else x),  # what gradients are taken of
        of_a_package(lambda x, numbers: x * 2 if (numbers * 0.5).sum().item() > 3 else x),  # no whole number
        of_a_package(lambda x, numbers: x * 2 if by_many_operators(numbers).sum().item() > 3 else x),
    ],
)
def test_what_is_refused(program: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedProgram, match="read off a tensor|reads a tensor's data"):
        aotdist.compile(program, backend="fx")(torch.randn(2, 3, requires_grad=True), NUMBERS)


TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
}
VISION: dict[str, Any] = {"depth": 1, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
IMAGE, START, END = 60, 62, 63
TOKENS: dict[str, Any] = {"image_token_id": IMAGE, "vision_start_token_id": START}
SAME, OTHER = [(1, 4, 4), (1, 4, 4)], [(1, 4, 8), (1, 4, 4)]


def qwen2() -> torch.nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {**VISION, "embed_dim": 32, "mlp_ratio": 2}
    config = Qwen2VLConfig(text_config=TEXT, vision_config=vision, **TOKENS)
    return Qwen2VLForConditionalGeneration(config)


def qwen2_5() -> torch.nn.Module:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {**VISION, "out_hidden_size": 32, "intermediate_size": 48, "window_size": 16}
    config = Qwen2_5_VLConfig(text_config=TEXT, vision_config=vision, **TOKENS)
    return Qwen2_5_VLForConditionalGeneration(config)


def videomae() -> torch.nn.Module:
    from transformers import VideoMAEConfig, VideoMAEForPreTraining

    small = {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "hidden_size": 32}
    decoder = {f"decoder_{name}": value for name, value in small.items()}
    return VideoMAEForPreTraining(
        VideoMAEConfig(image_size=32, patch_size=8, num_frames=4, **small, **decoder)  # type: ignore[arg-type]
    )


def images(grids: Grids) -> Batch:
    """One image a row, with as many tokens as its grid has merged patches, and text."""
    counts = [t * h * w // 4 for t, h, w in grids]
    rows = [
        torch.tensor([START, *[IMAGE] * count, END, *torch.randint(0, 50, (4 + max(counts) - count,))])
        for count in counts
    ]
    ids = torch.stack(rows)
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(4 * sum(counts), 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor(grids),
    }


def video(num_masked: int) -> Batch:
    """Patches of two videos, of each as many masked, at other places each time."""
    masked = torch.stack([torch.randperm(32) < num_masked for _ in range(2)])
    return {"pixel_values": torch.randn(2, 4, 3, 32, 32), "bool_masked_pos": masked}


@pytest.mark.parametrize(
    ("make", "make_batch", "same", "other"),
    [
        pytest.param(qwen2, images, SAME, OTHER, marks=pytest.mark.sweep),
        (qwen2_5, images, SAME, OTHER),
        (videomae, video, 16, 8),
    ],
)
def test_models_of_transformers(
    make: Callable[[], torch.nn.Module], make_batch: Callable[[Any], Batch], same: Any, other: Any
) -> None:
    torch.manual_seed(0)
    eager, batches = make().train(), [make_batch(one) for one in (same, same, same, other)]
    model = aotdist.compile(copy.deepcopy(eager), backend="fx")
    optimizers = [torch.optim.AdamW(one.parameters(), 1e-3) for one in (eager, model)]
    counts = list[int]()
    for batch in batches:
        for one, optimizer in zip((eager, model), optimizers, strict=True):
            torch.manual_seed(1)
            one(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(map(torch.equal, eager.parameters(), model.parameters()))
        counts.append(len(compiled_call(model).artifacts))
    assert counts[1] == counts[2] == counts[3] - 1
