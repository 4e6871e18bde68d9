"""Process groups, the store of `init_process_group`, and fake worlds without other ranks."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist

# Public classes that their public module re-exports in a way which type checkers call private.
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore

from aotdist.torch_seam.dtensor import forget_shardings
from aotdist.torch_seam.patches import all_replaced_here, replaced_here


def runs_on_gloo(group_name: Any, device: torch.device) -> bool:
    """Whether collectives of tensors on `device` in this process group are gloo's."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(group_name)._get_backend(device).name() == "gloo"


def extent_of_group(name: str) -> tuple[int, int]:
    """How many ranks the process group of this name has, and which of them this one is."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    group = _resolve_process_group(cast("Any", name))
    return group.size(), group.rank()


class ObjectsExchangedError(RuntimeError):
    """A traced program sends Python objects to its peers."""


def no_objects_exchanged() -> AbstractContextManager[None]:
    """Collectives of Python objects (`all_gather_object`) raise `ObjectsExchangedError` in this thread."""
    from torch.distributed import distributed_c10d

    def refuse(*_: Any) -> Any:
        raise ObjectsExchangedError

    return replaced_here(distributed_c10d, "_object_to_tensor", refuse)


def default_store() -> Store | None:
    """The store of `init_process_group`; None where ranks met without one (MPI)."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


AllToAll: TypeAlias = Callable[[torch.Tensor, torch.Tensor, Sequence[Any], Sequence[Any], str], None]
"""Takes output, input, output splits, input splits, and the name of the group."""


def all_to_all_of_symbols(instead: AllToAll) -> AbstractContextManager[None]:
    """`dist.all_to_all_single` of symbolic splits calls `instead`: PyTorch's function needs numbers."""

    def exchange(
        original: Callable[..., Any],
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 (PyTorch's name)
        output_split_sizes: Sequence[Any] | None = None,
        input_split_sizes: Sequence[Any] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        splits = output_split_sizes, input_split_sizes
        is_symbolic = any(isinstance(rows, torch.SymInt) for given in splits for rows in given or ())
        if not is_symbolic or output_split_sizes is None or input_split_sizes is None:
            return original(output, input, *splits, group, async_op)
        group = dist.group.WORLD if group is None else group
        instead(output, input, output_split_sizes, input_split_sizes, group.group_name)
        return finished_work() if async_op else None

    name = "all_to_all_single"
    return all_replaced_here((dist, name, exchange), (dist.distributed_c10d, name, exchange))


def group_name_of(group: Any) -> str:
    """The name of a process group that is given as an operator gets it, as an object of TorchScript's."""
    return dist.ProcessGroup.unbox(group).group_name


def group_size_of(group: Any) -> int:
    """The number of ranks of a process group that is given as an object of TorchScript's."""
    return dist.ProcessGroup.unbox(group).size()


def name_of_reduction(reduction: Any) -> str:
    """What functional collectives call a reduction (`sum`) that is given as an object of TorchScript's."""
    return dist.ReduceOp.RedOpType(reduction.op()).name.lower()


def finished_work() -> Any:
    """The work object of a collective that is done."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


def held_process_groups() -> list[tuple[str, tuple[int, ...], str]]:
    """Name, global ranks and backend of each process group of this rank, in the order of creation."""
    from torch.distributed import distributed_c10d

    world = distributed_c10d._world  # looked up now: tests that run ranks as threads replace it
    return [
        (world.pg_names[group], tuple(sorted(world.pg_group_ranks[group])), backend)
        for group, (backend, _) in world.pg_map.items()
    ]


def fake_world(rank: int, world_size: int) -> AbstractContextManager[None]:
    """A process group without other ranks, whose collectives do nothing; none at all for a world of one."""
    return nullcontext() if world_size == 1 else _fake_world(rank, world_size)


@contextmanager
def _fake_world(rank: int, world_size: int) -> Generator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    forget_shardings()
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_shardings()


def world_group_name() -> str | None:
    """The name of the group of all ranks; None where there is none."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    return None if world is None else world.group_name
