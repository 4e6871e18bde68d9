"""Where a process stands, and the mesh that it becomes part of."""

import dataclasses

import pytest
import torch

from aotdist import BadSettings
from aotdist.launch import parallel, shutdown, train
from aotdist.launch.config import JobOptions, ModelOptions, ParallelOptions
from aotdist.launch.model import build_decoder
from aotdist.launch.parallel import Layout, Place, distribute, join, sync_gradients


def test_torchruns_variables_say_where_a_process_stands():
    environ = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
    assert Place.from_environment(environ) == Place(rank=5, local_rank=1, world_size=8, launched=True)


def test_without_them_a_process_is_alone():
    assert Place.from_environment({}) == Place(rank=0, local_rank=0, world_size=1, launched=False)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='x' is no number"),
        ({"RANK": "0", "WORLD_SIZE": "", "LOCAL_RANK": "0"}, "WORLD_SIZE='' is no number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' is no number"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5 is none of WORLD_SIZE=2 ranks"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR does not say where they meet"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT does not say where they meet"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "b"}, "MASTER_PORT='b' is no n"),
    ],
)
def test_variables_that_do_not_fit_are_named(environ, named, monkeypatch, capsys):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(shutdown, "FIRST_WORD_S", 0)
    assert train.main(["--parallel.device=cpu"]) == 2
    message = capsys.readouterr().err
    assert named in message and "torchrun" in message and "Traceback" not in message


@pytest.mark.parametrize(
    ("options", "world_size", "sizes"),
    [
        (ParallelOptions(), 1, (1, 1, 1)),
        (ParallelOptions(), 8, (1, 8, 1)),
        (ParallelOptions(tp=2), 8, (1, 4, 2)),
        (ParallelOptions(tp=8), 8, (1, 1, 8)),
        (ParallelOptions(dp_replicate=2), 8, (2, 4, 1)),
        (ParallelOptions(dp_replicate=2, tp=2), 8, (2, 2, 2)),
        (ParallelOptions(dp_replicate=2, dp_shard=1), 2, (2, 1, 1)),
    ],
)
def test_the_free_axis_takes_the_ranks_that_are_left(options, world_size, sizes):
    assert dataclasses.astuple(Layout.of(options, world_size)) == sizes


@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        (ParallelOptions(tp=2), 1),
        (ParallelOptions(tp=3), 4),
        (ParallelOptions(dp_shard=2), 4),
        (ParallelOptions(dp_replicate=4), 2),
    ],
)
def test_a_mesh_that_does_not_fit_is_an_error(options, world_size):
    with pytest.raises(BadSettings, match=f"does not fit {world_size} rank"):
        Layout.of(options, world_size)


def test_layouts_read_well():
    assert str(Layout(1, 1, 1)) == "1 rank"
    assert str(Layout(2, 4, 2)) == "2 HSDP replicas x 4 FSDP shards x 2 TP"


def test_one_process_needs_no_group():
    world = join(ParallelOptions(device="cpu"), Place())
    assert (world.dp_mesh, world.tp_mesh) == (None, None)
    assert not torch.distributed.is_initialized()
    assert world.mean(torch.tensor([1.5, 2.0])).tolist() == [1.5, 2.0]


def test_a_rank_without_a_gpu_is_told_how_to_get_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BadSettings, match="--nproc-per-node gpu"):
        join(ParallelOptions(device="cuda"), Place(rank=1, local_rank=1))


@pytest.mark.parametrize(
    ("precision", "dtype"), [("auto", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_a_model_without_fsdp_gets_its_precision_from_autocast(precision, dtype):
    world = join(ParallelOptions(device="cpu", precision=precision), Place())
    with world.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == dtype


def test_tp_asks_for_sizes_that_split(monkeypatch):
    options = JobOptions(model=ModelOptions(dim=32, num_layers=1, num_heads=4, num_kv_heads=2))
    world = join(ParallelOptions(device="cpu"), Place())
    four = dataclasses.replace(world, layout=Layout(1, 1, 4), tp_mesh=object())
    monkeypatch.setattr(parallel, "_split_matrices", lambda model, mesh: pytest.fail("was split"))
    with pytest.raises(BadSettings, match="--model.num-kv-heads 2 does not split over 4 TP ranks"):
        distribute(build_decoder(options.model, seq_len=8, seed=0), four, options)


def test_a_plain_model_has_no_gradient_sync_to_switch():
    sync_gradients(torch.nn.Linear(1, 1), enabled=False)
