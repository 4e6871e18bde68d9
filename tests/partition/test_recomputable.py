"""The tables name operators that exist, and none that draws or mutates."""

import pytest
import torch

from aotdist.partition.recomputable import CREATIONS, MOVES, POINTWISE, RANDOM, REDUCTIONS
from aotdist.torch_seam.operators import OpOverload

TABLES = {"pointwise": POINTWISE, "moves": MOVES, "creations": CREATIONS, "reductions": REDUCTIONS}


def overloads(name: str) -> list[OpOverload]:
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base)
    return [getattr(packet, overload) for overload in packet.overloads()]


@pytest.mark.parametrize("table", TABLES)
def test_every_name_is_an_operator(table: str) -> None:
    for name in TABLES[table]:
        assert overloads(name), name


@pytest.mark.parametrize("table", TABLES)
def test_none_draws_at_random(table: str) -> None:
    for name in TABLES[table]:
        assert not any(torch.Tag.nondeterministic_seeded in op.tags for op in overloads(name)), name


def test_what_is_listed_as_random_draws() -> None:
    for name in RANDOM:
        assert any(torch.Tag.nondeterministic_seeded in op.tags for op in overloads(name)), name


def test_no_name_is_in_two_tables() -> None:
    names = [name for table in TABLES.values() for name in table]
    assert len(names) == len(set(names))
