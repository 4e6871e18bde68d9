"""The job on several ranks: how it ends when it does not finish."""

import re
import signal
import time

import pytest

from tests.launch.harness import REPOSITORY, run_torchrun, start_torchrun, step_records, wait_for_steps

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(300)]

BROKEN = str(REPOSITORY / "tests" / "launch" / "broken_rank.py")


def run_broken(job, how, *options, rank=1):
    words = [BROKEN, how, str(rank), *job.arguments("broken", *options, steps=10_000)]
    return run_torchrun(*words, num_ranks=2)


@pytest.mark.sweep
def test_an_unknown_option_is_reported_by_one_rank(job):
    finished = run_torchrun("-m", "aotdist.launch.train", "--model.dmi=3", num_ranks=2)
    assert finished.returncode == 1  # torchrun's own code; it names the rank's
    assert finished.stderr.count("Unrecognized options: --model.dmi") == 1
    assert "exitcode  : 2" in finished.stderr


@pytest.mark.sweep
def test_options_that_contradict_the_ranks_are_reported_once(job):
    words = ["-m", "aotdist.launch.train", *job.arguments("mesh", "--parallel.tp=3")]
    finished = run_torchrun(*words, num_ranks=2)
    assert finished.stderr.count("BadSettings: a mesh of") == 1
    assert "exitcode  : 2" in finished.stderr


def test_a_rank_that_raises_ends_all_and_its_error_is_shown(job):
    finished = run_broken(job, "raises")
    assert finished.returncode == 1
    assert "[rank 1] ValueError: this rank is broken" in finished.stderr
    assert len(step_records(job.records("broken"))) == 2
    assert (job.folder / "broken" / "loss.png").exists()


@pytest.mark.sweep
def test_an_error_of_one_rank_alone_is_shown_though_rank_0_has_none(job):
    finished = run_broken(job, "refuses")
    assert finished.returncode == 1
    assert "[rank 1] UnsupportedProgram: only this rank refuses" in finished.stderr


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_is_named_by_the_others(job, rank):
    finished = run_broken(job, "dies", rank=rank)
    assert finished.returncode == 1
    # It was in a collective, or was about to be in one.
    assert re.search(f"RankLost: rank {rank} (was lost|died)", finished.stderr)


@pytest.mark.sweep
def test_a_rank_that_hangs_is_named_after_the_timeout(job):
    finished = run_broken(job, "stops", "--parallel.timeout-s=5")
    assert finished.returncode == 1
    assert "RankLost: rank 1 did not take part" in finished.stderr


@pytest.mark.sweep
def test_ctrl_c_ends_all_ranks_in_good_order(job):
    words = ["-m", "aotdist.launch.train", *job.arguments("stopped", steps=100_000)]
    process = start_torchrun(*words, num_ranks=2)
    wait_for_steps(job, "stopped", 3)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert time.monotonic() - started < 40
    assert process.returncode != 0
    assert "stopped after" in stdout
    assert job.records("stopped")[-1].status == "stopped"
    assert (job.folder / "stopped" / "loss.png").exists()
    assert "aotdist/launch" not in stderr  # no traceback of ours beside that of torchrun itself
