"""`docs/add_a_subclass.md`: its blocks run, one after the other, and do what the page says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import aotdist
from aotdist.runtime import derive
from aotdist.subclasses import protocol
from tests.house.tree import ROOT
from tests.pages import python_blocks

PAGE = ROOT / "docs" / "add_a_subclass.md"


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(protocol, "_registered", [])
    yield python_blocks(PAGE.read_text())
    protocol.wrapper_rule.cache_clear()


def run(blocks: list[str]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_the_page(blocks: list[str]) -> None:
    run(blocks)


def test_a_class_takes_forty_lines(blocks: list[str]) -> None:
    assert len(blocks[0].splitlines()) <= 40


@pytest.mark.parametrize("has_rule", [True, False])
def test_a_rule_saves_a_backward(blocks: list[str], monkeypatch: pytest.MonkeyPatch, has_rule: bool) -> None:
    made: list[Any] = []
    kinds = derive._of_kinds
    monkeypatch.setattr(derive, "_of_kinds", lambda *args: made.append(args) or kinds(*args))
    rule = "register_wrapper_rule(NotedRule())"
    assert rule in blocks[2]
    run([blocks[0], blocks[1], blocks[2] if has_rule else blocks[2].replace(rule, "")])
    assert bool(made) is not has_rule


def test_a_class_that_overrides_nothing_is_given_on_by_results_and_refused() -> None:
    class Named(torch.Tensor):
        pass

    x = torch.randn(3).as_subclass(Named)
    with pytest.raises(aotdist.UnsupportedProgram, match=r"`args\[0\]` is a Named"):
        aotdist.compile(lambda x: (x * 2).sin(), backend="fx")(x)
