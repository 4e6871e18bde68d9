"""Going on from checkpoints on several ranks: on the same ones, on others, and after a kill -9."""

import pytest

from aotdist.launch.metrics import EndRecord
from tests.launch.harness import REPOSITORY, exactly, held_out_losses, losses, run_torchrun
from tests.launch.jobs_on_ranks import MESHES, RESHARDED, SAVE, SAVED, each

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(300)]

KILLED = str(REPOSITORY / "tests" / "launch" / "killed_rank.py")


@pytest.mark.parametrize("name", each(SAVED, "-resumed"))
def test_the_same_ranks_repeat_every_loss_bit_for_bit(runs, name):
    whole, resumed = runs[name], runs[f"{name}-resumed"]
    assert exactly(losses(resumed)) == exactly(losses(whole))
    assert exactly(held_out_losses(resumed)) == exactly(held_out_losses(whole))


@pytest.mark.parametrize("name", each(RESHARDED))
def test_other_ranks_go_on_with_the_same_model_and_moments(runs, name):
    whole, resumed = runs[RESHARDED[name][0]], runs[name]
    assert exactly(losses(resumed)[:3]) == exactly(losses(whole)[:3])  # recorded before
    assert losses(resumed)[3:] == pytest.approx(losses(whole)[3:], rel=1e-4)
    assert held_out_losses(resumed) == pytest.approx(held_out_losses(whole), rel=1e-4)


def killed(job, when, *options, rank=1):
    words = [KILLED, when, str(rank), *job.arguments("killed", *MESHES["fsdp"][1], *SAVE, *options)]
    finished = run_torchrun(*words, num_ranks=2, max_restarts=1)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "-9" in finished.stderr  # what torchrun says of the rank
    return finished


def test_a_rank_killed_in_the_midst_of_a_step_costs_the_steps_since_the_last_checkpoint(runs, job):
    finished = killed(job, "step", "--checkpoint.no-asynchronous")
    assert "RankLost: rank 1 " in finished.stderr  # said by the other one
    assert "going on  from step 3" in finished.stdout
    assert runs["saved"] and job.numbers("killed") == runs.job.numbers("saved")
    assert [r.status for r in job.records("killed") if isinstance(r, EndRecord)] == ["finished"]


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["write", "finish", "rename"])
def test_a_rank_killed_in_the_midst_of_a_save_leaves_the_last_good_one(runs, job, when, rank):
    finished = killed(job, when, rank=rank if when == "write" else 0)
    assert "going on  from the beginning" in finished.stdout
    assert runs["saved"] and job.numbers("killed") == runs.job.numbers("saved")
    assert not list((job.folder / "killed" / "checkpoints").glob("partial-*"))


@pytest.mark.sweep
def test_a_rank_killed_in_the_midst_of_compiling_begins_again(runs, job):
    killed(job, "compile", "--compile.backend=fx")
    assert runs["saved"] and job.numbers("killed") == runs.job.numbers("saved")
