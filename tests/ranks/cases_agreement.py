"""What ranks do in the tests of agreement: each case returns what the rank raised, or what it measured."""

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh

import aotdist
from aotdist.errors import AotdistError
from aotdist.passes.collectives import Collective
from aotdist.runtime.ranks import agree, failing_together
from aotdist.settings import Settings

PATIENT = Settings(rank_timeout_s=30.0)
HASTY = Settings(rank_timeout_s=1.0)

Told = tuple[str, str, float]
"""What a rank raised: class, message, seconds."""


def collective(
    op: str = "all_reduce",
    numel: int = 8,
    *,
    group: str | None = None,
    reduce_op: str | None = "sum",
    dtype: str = "float32",
    source: str | None = "model.py:1   x = f(x)",
) -> Collective:
    name = dist.group.WORLD.group_name if group is None else group
    return Collective(
        op=op, group=name, group_size=None, reduce_op=reduce_op, dtype=dtype, numel=numel,
        num_bytes=4 * numel, unit=None, node=f"{op}_{numel}", source=source,
    )  # fmt: skip


def told(act: Callable[[], object]) -> Told | None:
    """What `act` raised, if anything."""
    start = time.monotonic()
    try:
        act()
    except (AotdistError, ValueError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return None


def tells(
    sequence: Iterable[Collective],
    groups: Iterable[str] = (),
    settings: Settings = PATIENT,
    earlier: Iterable[list[Collective]] = (),
) -> Told | None:
    return told(
        lambda: agree(sequence, label="train_step", settings=settings, groups=groups, earlier=earlier)
    )


SAME = [("all_gather_into_tensor", 64, None), ("all_reduce", 8, "sum"), ("reduce_scatter_tensor", 64, "avg")]
CHANGED = {
    "order": [SAME[1], SAME[0], SAME[2]],
    "shape": [SAME[0], ("all_reduce", 9, "sum"), SAME[2]],
    "extra": [*SAME, ("all_reduce", 1, "max")],
    "missing": SAME[:2],
    "reduction": [*SAME[:2], ("reduce_scatter_tensor", 64, "sum")],
    "nothing": [],
}


def program(steps: Iterable[tuple[str, int, str | None]], file: str) -> list[Collective]:
    return [
        collective(op, numel, reduce_op=reduce_op, source=f"{file}:{line}   {op}(x)")
        for line, (op, numel, reduce_op) in enumerate(steps, start=1)
    ]


def one_rank_differs(change: str, changed_rank: int) -> Told | None:
    changed = dist.get_rank() == changed_rank
    steps = program(CHANGED[change] if changed else SAME, "theirs.py" if changed else "ours.py")
    return tells(steps, [dist.group.WORLD.group_name])


def dtypes_differ() -> Told | None:
    return tells([collective(dtype="bfloat16" if dist.get_rank() else "float32")])


def times_agreement(num_times: int) -> list[float]:
    steps = program(SAME * 100, "ours.py")
    seconds: list[float] = []
    for _ in range(num_times):
        dist.barrier()
        start = time.perf_counter()
        agree(steps, label="train_step", settings=PATIENT)
        seconds.append(time.perf_counter() - start)
    return seconds


def fails_to_compile(failing_ranks: list[int]) -> Told | None:
    def compile_and_agree() -> None:
        with failing_together("train_step"):
            if dist.get_rank() in failing_ranks:
                raise ValueError(f"no rule on rank {dist.get_rank()}\nand a second line")
            agree(program(SAME, "ours.py"), label="train_step", settings=PATIENT)

    return told(compile_and_agree)


def fails_then_tries_again() -> list[str | None]:
    """Rank 1 fails to compile, all ranks catch what they get, and compile something else."""
    heard: list[str | None] = []
    for failing_ranks in ([1], [], [0, 1], []):
        said = fails_to_compile(failing_ranks)
        heard.append(said and said[0])
        dist.barrier()  # a rank that tried again before the others heard of it would be welcome
    return heard


def fails_late() -> Told | None:
    if dist.get_rank() == 1:
        time.sleep(1.0)
    return fails_to_compile([1])


def never_arrives(missing_rank: int) -> Told | None:
    if dist.get_rank() == missing_rank:
        with failing_together("eval_step"):
            time.sleep(3.5)
        return None
    return tells(program(SAME, "ours.py"), settings=HASTY)


def arrives_too_late() -> Told | None:
    if dist.get_rank() == 1:
        time.sleep(1.5)
    return tells(program(SAME, "ours.py"), settings=HASTY)


def dies_compiling(dying_rank: int) -> Told | None:
    with failing_together("train_step"):
        if dist.get_rank() == dying_rank:
            time.sleep(0.5)  # the others wait by then
            os.kill(os.getpid(), signal.SIGKILL)
        return tells(program(SAME, "ours.py"))


def mesh_groups() -> tuple[str, str]:
    """Names of this rank's groups along (dp, tp) of a 2 x 2 mesh: ranks 0, 1 and 2, 3 share `tp`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return mesh.get_group("dp").group_name, mesh.get_group("tp").group_name


def agrees_on_a_mesh() -> list[Told | None]:
    dp, tp = mesh_groups()
    width = 8 + dist.get_rank() % 2  # ranks that share `dp` have the same; those that share `tp` do not
    steps = [
        collective(group=tp),
        collective("all_gather_into_tensor", width, group=dp),
        collective(group=tp),
    ]
    return [tells(steps), tells(steps[1:]), tells([*steps, collective()])]


def differs_on_a_mesh() -> Told | None:
    """Ranks 2 and 3 differ in `tp`; ranks 0 and 1 agree with all that they meet."""
    dp, tp = mesh_groups()
    return tells([collective(group=dp), collective(numel=9 if dist.get_rank() == 3 else 8, group=tp)])


def a_new_call_on_one_rank() -> list[Told | None]:
    """What was agreed on before needs no peers; the next meeting is everyone's again, also to differ."""
    steps, others = program(SAME, "model.py"), program(CHANGED["order"], "model.py")
    alone = [tells(steps, earlier=[steps])] if dist.get_rank() == 1 else [None]
    return [
        tells(steps),
        *alone,
        tells(others, earlier=[steps]),
        tells(program(CHANGED["shape" if dist.get_rank() else "extra"], "model.py"), earlier=[steps, others]),
    ]


def drops_and_compiles_again() -> list[float]:
    """Rank 0 meets another size of its own, and drops what both had agreed on; then both want that."""

    @aotdist.compile(backend="fx", settings=Settings(rank_timeout_s=30.0, max_artifacts=2, dynamic=False))
    def summed(shared: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return all_reduce(shared, "sum", dist.group.WORLD).sum() + own.sum()

    own = [1, 1, 1, 1] if dist.get_rank() else [1, 1, 2, 1]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "aotdist: `summed` was compiled 3 times")
        steps = zip([3, 4, 4, 3], own, strict=True)
        found = [summed(torch.ones(shared), torch.ones(size)).item() for shared, size in steps]
    kept = {artifact.fit.examples[0].shape[0] for artifact in summed.artifacts}
    return [*found, len(kept)]


def a_new_call_of_one_group() -> list[Told | None]:
    """Ranks 0 and 1 change what they do with each other, and nothing else."""
    dp, tp = mesh_groups()
    first = [collective(numel=8, group=tp), collective(numel=64, group=dp)]
    smaller = [collective(numel=5, group=tp), collective(numel=64, group=dp)]
    alone = [tells(smaller, [dp, tp], earlier=[first])] if dist.get_rank() < 2 else [None]
    return [tells(first, [dp, tp]), *alone, tells([*smaller, *first], [dp, tp], earlier=[first, smaller])]


def groups_in_another_order() -> Told | None:
    """Each group's own sequence is the same on all ranks, but rank 1 takes the groups the other way round."""
    _, tp = mesh_groups()
    steps = [collective(numel=3), collective(numel=5, group=tp)]
    return tells(steps if dist.get_rank() != 1 else steps[::-1])


def one_rank_ignores_a_group() -> Told | None:
    _, tp = mesh_groups()
    steps = [collective(), collective(group=tp)]
    return tells(steps[: 1 if dist.get_rank() == 1 else 2])


def two_groups_of_the_same_ranks() -> Told | None:
    """Rank 1 swaps two process groups that have the same members."""
    groups = [dist.new_group([0, 1]).group_name, dist.new_group([0, 1]).group_name]
    order = groups if dist.get_rank() == 0 else groups[::-1]
    return tells([collective(group=name) for name in order])


def without_peers() -> list[Told | None]:
    """In place of this world: a fake one of 64 ranks, and none at all."""
    dist.destroy_process_group()
    silent = [told(lambda: agree([], label="f", settings=HASTY))]
    dist.init_process_group("fake", rank=3, world_size=64)
    silent.append(tells([collective()], settings=HASTY))
    with failing_together("f"):
        silent.append(None)
    return silent


def group_of_one_rank() -> Told | None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return tells([collective(numel=dist.get_rank(), group=alone.group_name)], settings=HASTY)


def joins_again_in_the_same_store() -> list[Told | None]:
    """Process groups destroyed and made again in a store that remembers the first life."""
    store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    heard = [tells([collective()]), tells([collective()])]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world_size)
    heard += [tells([collective()]), tells([collective()]), tells([collective(numel=1 + dist.get_rank())])]
    torch.distributed.barrier()
    return heard


def as_threads(num_ranks: int) -> list[Told | None]:
    """Ranks as threads of this process, as PyTorch's own multi-threaded tests have them; the last differs."""
    from torch.testing._internal.distributed import multi_threaded_pg

    dist.destroy_process_group()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store = dist.HashStore()

    def act(rank: int) -> Told | None:
        dist.init_process_group("threaded", store=store, rank=rank, world_size=num_ranks)
        agreed = tells([collective()])
        return agreed or tells([collective(numel=9 if rank == num_ranks - 1 else 8)])

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(act, range(num_ranks)))
