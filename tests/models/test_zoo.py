"""Architectures of transformers train, and generate, as in eager; what is refused is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks.timing import Pace

if TYPE_CHECKING:
    from benchmarks.architectures.vocabulary import Found, Half, Way

pytestmark = pytest.mark.slow  # to import transformers takes five seconds by itself


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Generator[None]:
    log = logging.getLogger("torch.__trace")  # PyTorch would print every graph for it
    before = log.level
    log.setLevel(logging.CRITICAL)
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    log.setLevel(before)


def found(model: str, way: Way) -> Found:
    """What `make zoo` finds; importing transformers takes seconds, so this is where that happens."""
    from benchmarks.architectures.trial import Job, fill

    return fill(Job(model, way, num_steps=3, pace=Pace(rounds=0, warmup=0)))


def is_as_eager(half: Half | None) -> bool:
    """Whether a half came to its end with the bits of eager, or of what was compiled in eager."""
    return half is not None and not half.failure and (not half.differs or half.is_programs)


def test_llama_trains_behind_dynamo() -> None:
    from benchmarks.architectures import trial

    eager, ours = (
        [training.train(number) for number in range(3)]
        for training in (trial.Training("LlamaForCausalLM", call) for call in (as_it_is, behind_dynamo))
    )
    assert trial.difference(eager, ours) == (0.0, "")
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def as_it_is(model: Any) -> Any:
    """The model."""
    return model


def behind_dynamo(model: Any) -> Any:
    """The model through `torch.compile(backend="aotdist")`."""
    counters.clear()
    return torch.compile(model, backend="aotdist", options={"backend": "fx"})


@pytest.mark.parametrize("model", ["PatchTSTForPrediction", "MixtralForCausalLM"])
def test_trains_compiled(model: str) -> None:
    training = found(model, "aotdist.compile").training
    assert is_as_eager(training) and training.num_graphs == 1


def test_a_refusal_names_the_line_and_what_to_do() -> None:
    training = found("DetrForObjectDetection", "aotdist.compile").training
    assert training.is_ours
    assert "at transformers/models/detr/modeling_detr.py" in training.failure
    assert "fix: keep it a tensor" in training.failure and 'backend="aotdist"' in training.failure


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["aotdist.compile", "backend aotdist"])
@pytest.mark.parametrize("number", range(40))
def test_each_of_the_zoo(number: int, way: Way) -> None:
    from benchmarks.architectures.making import ARCHITECTURES

    row = found(list(ARCHITECTURES)[number], way)
    assert row.training.is_ours or is_as_eager(row.came_through()), row
    if row.generation is not None:
        assert row.generation.is_ours or is_as_eager(row.came_through_generation()), row


TRAINED_BY_DEFAULT = [
    "BertForMaskedLM",
    "DebertaV2ForMaskedLM",
    "GPT2LMHeadModel",
    *(
        pytest.param(model, marks=pytest.mark.sweep)
        for model in (
            "T5ForConditionalGeneration",
            "BartForConditionalGeneration",
            "ViTForImageClassification",
        )
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", TRAINED_BY_DEFAULT)
def test_the_default_backend_trains_with_dropout(model: str) -> None:
    from benchmarks.architectures.rounding import apart_with_dropout

    assert apart_with_dropout(model, "auto", num_steps=3, num_layers=1) < 1e-4


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["auto", "inductor"])
@pytest.mark.parametrize("number", range(40))
def test_kernels_of_each_of_the_zoo(number: int, way: Way) -> None:
    from benchmarks.architectures.making import ARCHITECTURES
    from benchmarks.architectures.rounding import fill

    rounded = fill(list(ARCHITECTURES)[number], way)
    assert rounded.is_ours or rounded.is_right(), rounded
