"""The job on several ranks: what it computes, and on which mesh."""

import pytest

from tests.launch.harness import exactly, held_out_losses, losses, step_records
from tests.launch.jobs_on_ranks import MESHES, VARIANTS, each

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(300)]


def test_two_ranks_learn(runs):
    first, *_, last = held_out_losses(runs["learns"])
    assert last < 0.6 * first
    files = {path.name for path in (runs.job.folder / "learns").iterdir()}
    assert files == {"config.json", "metrics.jsonl", "loss.png", "run.lock"}


@pytest.mark.sweep
def test_the_same_seed_repeats_every_loss(runs):
    assert exactly(losses(runs["learns"])) == exactly(losses(runs["learns-again"]))


@pytest.mark.parametrize("name", each(MESHES))
def test_every_mesh_computes_what_one_rank_does(runs, name):
    assert losses(runs[name]) == pytest.approx(losses(runs["alone"]), rel=1e-4)


@pytest.mark.parametrize("name", each(["accumulate", "accumulate-sync"]))
def test_accumulated_micro_steps_equal_one_large_step(runs, name):
    large, micro = step_records(runs["fsdp"]), step_records(runs[name])
    assert [r.loss for r in micro] == pytest.approx([r.loss for r in large], rel=1e-5)
    assert [r.grad_norm for r in micro] == pytest.approx([r.grad_norm for r in large], rel=1e-4)


@pytest.mark.parametrize(("rounded", "exact"), each([("bf16", "fsdp"), ("tp-bf16", "tp")]))
def test_mixed_precision_stays_near_fp32(runs, rounded, exact):
    assert losses(runs[rounded]) == pytest.approx(losses(runs[exact]), rel=2e-2)
    assert losses(runs[rounded]) != losses(runs[exact])


@pytest.mark.parametrize("name", each([*MESHES, *VARIANTS], "-fx"))
def test_fx_gives_the_losses_of_eager_bit_for_bit(runs, name):
    eager, compiled = runs[name], runs[f"{name}-fx"]
    assert exactly(losses(compiled)) == exactly(losses(eager))
    assert exactly(held_out_losses(compiled)) == exactly(held_out_losses(eager))
    assert [r.grad_norm for r in step_records(compiled)] == [r.grad_norm for r in step_records(eager)]


def test_min_cut_with_fx_is_bit_equal_too(runs):
    assert exactly(losses(runs["min-cut"])) == exactly(losses(runs["fsdp"]))


@pytest.mark.sweep
def test_inductor_gives_nearly_the_losses_of_eager(runs):
    assert losses(runs["inductor"]) == pytest.approx(losses(runs["fsdp"])[:2], rel=1e-4)


def test_what_was_compiled_is_kept(runs):
    assert runs["fsdp-fx"]
    assert "all_gather" in (runs.job.folder / "fsdp-fx" / "compiled.txt").read_text()
