"""Storages that a program would look at, free and have back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import aotdist
from aotdist.errors import UnsupportedProgram

FULL = 48
"""Bytes of a (3, 4) tensor."""


LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "its size": lambda x: x * x.untyped_storage().nbytes(),
    "freed": lambda x: x.untyped_storage().resize_(0),
    "of a view": lambda x: x[1:].untyped_storage().resize_(0),
    "typed": lambda x: x._typed_storage()._resize_(0),
    "of an intermediate": lambda x: (x * 2).untyped_storage().resize_(0),
}


@pytest.mark.parametrize("program", LOOKS)
def test_a_storage_is_not_looked_at(program: str) -> None:
    x = torch.ones(3, 4)
    with pytest.raises(UnsupportedProgram, match="looks at the storage"):
        aotdist.compile(LOOKS[program], backend="fx")(x)
    assert x.untyped_storage().nbytes() == FULL and x.sum() == 12


SET: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "all of it": lambda x, y: x.set_(y.untyped_storage()),
    "a part of it": lambda x, y: x.set_(y.untyped_storage(), 2, (2,), (2,)),
    "a part of a tensor's": lambda x, y: x.set_(y, 1, (2, 2), (2, 1)),
}


@pytest.mark.parametrize("program", SET)
def test_a_tensor_is_not_set_to_a_storage(program: str) -> None:
    x, y = torch.ones(3, 4), torch.zeros(3, 4)
    with pytest.raises(UnsupportedProgram, match="looks at the storage|set to a storage"):
        aotdist.compile(SET[program], backend="fx")(x, y)
    assert x.sum() == 12


def test_behind_dynamo_neither() -> None:
    """Dynamo makes an operator of a resize."""

    def freed(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        x.untyped_storage().resize_(0)
        return y

    torch._dynamo.reset()
    compiled = torch.compile(freed, backend="aotdist", options={"backend": "fx"}, fullgraph=True)
    with pytest.raises(Exception, match="looks at the storage"):
        compiled(torch.ones(3, 4))
