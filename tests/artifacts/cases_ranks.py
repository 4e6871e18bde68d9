"""What the ranks of `test_ranks.py` run."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import aotdist
from tests.artifacts.comparison import assert_same_as_eager, forbid_tracing
from tests.artifacts.interpreting import interpret
from tests.artifacts.programs import PROGRAMS_OF_TWO_RANKS, sharded_evenly


def same_as_eager(name: str, path: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        forbid_tracing(monkeypatch)
        assert_same_as_eager(PROGRAMS_OF_TWO_RANKS[name], Path(path))


def close_to_eager_with_kernels(name: str, path: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        forbid_tracing(monkeypatch)
        interpret(monkeypatch)
        assert_same_as_eager(PROGRAMS_OF_TWO_RANKS[name], Path(path), exactly=False)


def one_rank_brings_another_batch(path: str) -> None:
    model, (batch,) = sharded_evenly()
    aotdist.load(path, model)
    if dist.get_rank() == 1:
        with pytest.raises(aotdist.SignatureMismatch, match=r"`args\[0\]`: built for (.|\n)*called with"):
            model(torch.cat([batch, batch]))
    else:
        with pytest.raises(aotdist.RankLost, match="SignatureMismatch"):
            model(batch)


def refused_for_four_ranks(path: str) -> None:
    with pytest.raises(aotdist.BadArtifact, match="built for 4 ranks, and here are 2"):
        aotdist.load(path, sharded_evenly()[0])
