"""What the user sees when their program fails: their lines, eager's words, and little else."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aotdist
from aotdist.errors import InternalError, UnsupportedProgram

MOST_LINES = 30
"""Eager prints up to 30 for what is below; without being shortened, ours are 70 to 310."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()  # the line of the block


class Branching(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x  # the line that chooses


def looks_up(x: torch.Tensor) -> torch.Tensor:
    return {"a": x}["b"]  # the line that looks up


def raises_again(x: torch.Tensor) -> torch.Tensor:
    try:
        return looks_up(x)
    except KeyError as error:
        raise ValueError("no such tensor") from error  # the line that raises again


def fails_in_a_hook(x: torch.Tensor) -> torch.Tensor:
    def hook(grad: torch.Tensor) -> None:
        raise ValueError("the hook fails")  # the line of the hook

    x = x * 2
    x.register_hook(hook)
    return x * x


def printed(call: Callable[[], Any]) -> tuple[BaseException, str]:
    """What a call raises, and what Python prints of it."""
    with pytest.raises(Exception) as caught:
        call()
    return caught.value, "".join(traceback.format_exception(caught.value))


def frames_of_ours(text: str) -> list[str]:
    return [
        line for line in text.splitlines() if "aotdist/" in line and "tests/" not in line and "File" in line
    ]


FAILING: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "a size": (Block(), (torch.ones(2, 3),), "the line of the block"),
    "a size in a sequence": (nn.Sequential(nn.Linear(4, 5)), (torch.ones(2, 3),), "F.linear(input"),
    "a key": (looks_up, (torch.ones(2),), "the line that looks up"),
    "an error of an error": (raises_again, (torch.ones(2),), "the line that raises again"),
    "classes": (F.cross_entropy, (torch.ones(2, 3), torch.ones(3, dtype=torch.long)), "cross_entropy_loss"),
    "an index": (F.embedding, (torch.ones(2, 3), torch.ones(3, 3)), "torch.embedding"),
    "sums": (lambda a, b: a + b, (torch.ones(2, 3), torch.ones(2, 4)), "lambda a, b"),
    "parts": (lambda a, b: torch.cat([a, b]), (torch.ones(2, 3), torch.ones(2, 4)), "lambda a, b"),
    "a view": (lambda a: a.view(7), (torch.ones(6),), "lambda a"),
    "channels": (F.conv2d, (torch.ones(1, 3, 4, 4), torch.ones(1, 2, 3, 3)), ""),
    "a norm": (lambda a: F.layer_norm(a, (4,)), (torch.ones(2, 3),), "torch.layer_norm"),
}


@pytest.mark.parametrize("name", FAILING)
def test_errors_of_programs_are_eagers_in_type_and_words(name: str) -> None:
    target, args, line = FAILING[name]
    eagers, _ = printed(lambda: target(*args))
    compiled = aotdist.compile(target, backend="fx")
    try:
        ours, text = printed(lambda: compiled(*args))
    finally:
        if isinstance(target, nn.Module):
            target._compiled_call_impl = None
    assert type(ours) is type(eagers)
    assert str(ours) == str(eagers)
    assert line in text
    assert len(text.splitlines()) <= MOST_LINES
    assert len(frames_of_ours(text)) == 1


def test_the_module_is_named() -> None:
    _, text = printed(lambda: aotdist.compile(nn.Sequential(Block()), backend="fx")(torch.ones(2, 3)))
    assert "(in module `0.linear`)" in text


def test_what_cannot_be_compiled_shows_the_line_and_nothing_of_pytorch() -> None:
    error, text = printed(lambda: aotdist.compile(Branching(), backend="fx")(torch.ones(2)))
    assert isinstance(error, UnsupportedProgram)
    assert "the line that chooses" in text
    assert len(text.splitlines()) <= MOST_LINES
    assert len(frames_of_ours(text)) == 1
    assert "torch/_subclasses" not in text


def test_an_error_in_a_hook_shows_the_hook() -> None:
    compiled = aotdist.compile(fails_in_a_hook, backend="fx")
    error, text = printed(lambda: compiled(torch.ones(2, requires_grad=True)))
    assert isinstance(error, ValueError)
    assert "the line of the hook" in text
    assert len(text.splitlines()) <= MOST_LINES


def test_a_training_step_has_one_frame_of_ours() -> None:
    model = Block()
    optimizer = torch.optim.SGD(model.parameters())
    step = aotdist.train_step(model, lambda model, x: model(x).sum(), optimizer, backend="fx")
    step(torch.ones(2, 4))
    error, text = printed(lambda: step(torch.ones(2, 3)))
    assert str(error).startswith("mat1 and mat2")
    assert "the line of the block" in text
    assert len(text.splitlines()) <= MOST_LINES
    assert len(frames_of_ours(text)) == 1


def test_all_frames_are_shown_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTDIST_TRACEBACK", "full")
    _, text = printed(lambda: aotdist.compile(Branching(), backend="fx")(torch.ones(2)))
    assert len(frames_of_ours(text)) > 10
    assert "torch/_subclasses" in text


def test_bugs_of_ours_keep_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise InternalError("a promise is broken")

    monkeypatch.setattr("aotdist.pipeline.trace_call", fail)
    _, text = printed(lambda: aotdist.compile(looks_up, backend="fx")(torch.ones(2)))
    assert len(frames_of_ours(text)) > 5
