"""One artifact serves all ranks: what differs stands in it by rank."""

from pathlib import Path

import pytest
import torch.distributed as dist

import aotdist
from aotdist.artifacts.archive import Variant, merged
from tests.artifacts import cases_ranks
from tests.artifacts.programs import PROGRAMS_OF_TWO_RANKS, mlp, sharded, sharded_evenly, sharded_vocabulary
from tests.ranks.harness import World


@pytest.mark.ranks
@pytest.mark.parametrize("name", PROGRAMS_OF_TWO_RANKS)
def test_an_artifact_of_two_ranks_is_what_eager_is(world2: World, name: str, tmp_path: Path) -> None:
    aotdist.build(PROGRAMS_OF_TWO_RANKS[name], tmp_path / "it.aot", world_size=2)
    world2.run(cases_ranks.same_as_eager, name, str(tmp_path / "it.aot"))


@pytest.mark.ranks
def test_a_rank_whose_call_does_not_fit_fails_on_all(world2: World, tmp_path: Path) -> None:
    aotdist.build(sharded_evenly, tmp_path / "it.aot", world_size=2)
    world2.run(cases_ranks.one_rank_brings_another_batch, str(tmp_path / "it.aot"))


@pytest.mark.ranks
def test_another_number_of_ranks_is_refused(world2: World, tmp_path: Path) -> None:
    aotdist.build(sharded_evenly, tmp_path / "it.aot", world_size=4)
    world2.run(cases_ranks.refused_for_four_ranks, str(tmp_path / "it.aot"))


def test_ranks_that_do_the_same_share_a_record(tmp_path: Path) -> None:
    assert aotdist.build(sharded_evenly, tmp_path / "it.aot", world_size=4).variants == ((0, 1, 2, 3),)


def test_numbers_of_a_rank_are_a_table(tmp_path: Path) -> None:
    assert aotdist.build(sharded_vocabulary, tmp_path / "it.aot", world_size=2).variants == ((0, 1),)


def test_ranks_that_pad_have_records_of_their_own(tmp_path: Path) -> None:
    assert aotdist.build(sharded, tmp_path / "it.aot", world_size=2).variants == ((0,), (1,))


def test_no_process_group_is_left_behind(tmp_path: Path) -> None:
    aotdist.build(sharded_evenly, tmp_path / "it.aot", world_size=2)
    assert not dist.is_initialized()


def test_a_process_group_that_is_there_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with pytest.raises(aotdist.BadSettings, match="in a process group already"):
            aotdist.build(mlp, tmp_path / "it.aot")
    finally:
        dist.destroy_process_group()


def test_a_world_has_ranks(tmp_path: Path) -> None:
    with pytest.raises(aotdist.BadSettings, match="no 0 ranks"):
        aotdist.build(mlp, tmp_path / "it.aot", world_size=0)


@pytest.mark.parametrize(
    "records",
    [
        [{"a": [1, 2]}] * 3,
        [{"a": [1, 2]}, {"a": [1, 3]}, {"a": [1, None]}],
        [{"a": 1}, {"b": 1}, {"a": True}],
        [{"a": []}, {"a": [[]]}, {"a": []}],
        [{"is": "x"}, {"is": "y"}],
        [1, 1.0, True],
    ],
)
def test_each_rank_gets_its_record_back(records: list[object]) -> None:
    variants = merged(records)
    for rank, record in enumerate(records):
        (variant,) = (variant for variant in variants if rank in variant.ranks)
        assert repr(variant.of(rank)) == repr(record)


def test_equal_records_are_one() -> None:
    assert merged([{"a": 1}, {"a": 1}]) == (Variant({"a": 1}, [0, 1], []),)


def test_what_differs_is_a_table() -> None:
    (variant,) = merged([{"a": [1, 2]}, {"a": [1, 3]}])
    assert variant == Variant({"a": [1, 2]}, [0, 1], [(1, (2, 3))])
