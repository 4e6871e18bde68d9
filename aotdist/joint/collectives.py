"""Collectives that write where they read, as functional ones: `dist.all_reduce(x)` inside of a program.

They are waited for where they are called: when a collective starts, and when it is waited for, is a pass's
business. As in eager, autograd and version counters know nothing of the write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aotdist.errors import UnsupportedProgram
from aotdist.joint.failures import refusal
from aotdist.torch_seam.groups import finished_work, group_name_of, name_of_reduction
from aotdist.torch_seam.operators import OpOverload, is_operator

_NAMESPACE = "c10d"
_ALL_REDUCE, _BROADCAST = "c10d::allreduce_", "c10d::broadcast_"
_functional = torch.ops._c10d_functional


def instead(func: Any, args: tuple[Any, ...]) -> Callable[[], Any] | None:
    """What does what a writing collective does; None for any other operator.

    Raises:
        UnsupportedProgram: nothing does.
    """
    if not is_operator(func) or func.namespace != _NAMESPACE:
        return None
    name = func.name()
    if name not in (_ALL_REDUCE, _BROADCAST):
        raise _refused(func)
    tensors, group, how, *_ = args
    return lambda: _written(tensors, lambda tensor: _result(name, tensor, group_name_of(group), how))


def _result(name: str, tensor: torch.Tensor, group: str, how: Any) -> torch.Tensor:
    if name == _BROADCAST:
        return _functional.broadcast(tensor, how, group)
    return _functional.all_reduce(tensor, name_of_reduction(how), group)


def _written(tensors: list[torch.Tensor], result: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    for tensor in tensors:
        tensor.copy_(_functional.wait_tensor(result(tensor)))
    return tensors, finished_work()


def _refused(func: OpOverload) -> UnsupportedProgram:
    return refusal(
        f"the program calls `{func.name()}`, a collective that writes its results into tensors",
        fix="call its functional twin (`torch.distributed._functional_collectives`), or redistribute a "
        "DTensor; `distribute_tensor` takes `src_data_rank=None`. Of those that write, `all_reduce` and "
        "`broadcast` are captured",
    )
