"""Features of FSDP2 that cannot be captured, and FSDP1: refused by name, before anything is changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.fsdp_units import groups, outermost
from aotdist.subclasses.fsdp_unshard import arguments_of_extension
from aotdist.subclasses.protocol import is_wrapper
from aotdist.torch_seam.dtensor import local_tensor
from aotdist.torch_seam.fsdp import fsdp_default_comms, fsdp_groups, fsdp_state


def refuse(root: nn.Module) -> None:
    """Refuse options of `fully_shard`, and of methods of `FSDPModule`, that cannot be captured.

    Raises:
        UnsupportedProgram: names the module or parameter and the feature.
    """
    paths = {module: path or "(root)" for path, module in root.named_modules()}
    for module, path in paths.items():
        if isinstance(module, FullyShardedDataParallel):
            raise _refusal(
                path, "is sharded by FSDP1 (`FullyShardedDataParallel`)", "use `fully_shard` (FSDP2)"
            )
        if not isinstance(module, FSDPModule):
            continue
        for group in fsdp_groups(fsdp_state(module)):
            _refuse_group(group, path)
            for record in group.fsdp_params:
                owner = record._module_info
                _refuse_param(record, f"{paths[owner.module]}.{owner.param_name}".removeprefix("(root)."))
            refuse_switches(group, path)
    for _, module in outermost(root):
        if len(fsdp_state(module)._modules) > 1:
            raise _refusal(
                paths[module],
                "is sharded together with others, outside of any FSDP root",
                "shard the root module too",
            )


def _refuse_group(group: Any, path: str) -> None:
    mesh = group.mesh_info
    if not hasattr(mesh, "shard_process_group"):
        raise _refusal(
            path, "is replicated (`replicate`), not sharded", "use `fully_shard`, or DistributedDataParallel"
        )
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        raise _refusal(path, "uses `CPUOffloadPolicy`", "leave out `offload_policy`")


def _refuse_param(record: Any, path: str) -> None:
    local = local_tensor(record.sharded_param)
    if hasattr(local, "fsdp_pre_all_gather"):
        _refuse_extension(record, local, path)
    elif type(local) is not torch.Tensor:
        raise _refusal(path, f"is sharded around a {type(local).__name__}", "shard plain tensors")


def _refuse_extension(record: Any, local: Any, path: str) -> None:
    kind = type(local).__name__
    if not is_wrapper(local):
        raise _refusal(
            path,
            f"is a {kind}, which gathers itself (`fsdp_pre_all_gather`) and cannot be taken apart",
            f"give {kind} `__tensor_flatten__` and `__tensor_unflatten__`",
        )
    if arguments_of_extension(local) not in (1, 5):
        raise _refusal(
            path,
            f"is a {kind}, whose `fsdp_pre_all_gather` takes other arguments than FSDP2 gives",
            "let it take `mesh, outer_size, outer_stride, module, mp_policy`",
        )
    if record.fsdp_placement.dim != 0:
        raise _refusal(
            path,
            f"is a {kind}, which gathers itself (`fsdp_pre_all_gather`), sharded on another dimension than 0",
            "shard it on dimension 0",
        )


def refuse_switches(group: Any, path: str) -> None:
    """Refuse options that a method of `FSDPModule` may set at any time.

    Raises:
        UnsupportedProgram: names the module and the method.
    """
    comms = (type(group._all_gather_comm), type(group._reduce_scatter_comm))
    for condition, what, fix in (
        (
            group._use_post_forward_mesh,
            "reshards to a smaller mesh after forward",
            "set `reshard_after_forward` to a bool",
        ),
        (
            comms != fsdp_default_comms(),
            "has a custom all-gather or reduce-scatter",
            "leave FSDP2's own in place",
        ),
        (group._all_reduce_hook is not None, "has an all-reduce hook", "do not call `set_all_reduce_hook`"),
        (
            getattr(group, "reduce_scatter_unused_params", False),
            "reduces parameters that no gradient reached (`set_reduce_scatter_unused_params`)",
            "switch it off: compiled ranks run one program, so what one rank leaves unused all ranks do",
        ),
    ):
        if condition:
            raise _refusal(path, what, fix)


def holds_partial(path: str) -> UnsupportedProgram:
    """The error for a buffer of FSDP2 that not all parameters of a unit have filled."""
    return _refusal(
        path,
        "holds gradients of some of its parameters, reduced within a shard group only",
        "finish that accumulation uncompiled",
    )


def refuse_accumulation_inside_eager_root(module: Any, path: str) -> None:
    """Refuse to accumulate without synchronisation inside of an uncompiled FSDP root.

    The root's last backward hook would take the accumulators for its own gradients.

    Raises:
        UnsupportedProgram: names the module.
    """
    if fsdp_state(module)._is_root or all(group.reduce_grads for _, group in groups(module)):
        return
    raise _refusal(path, "accumulates gradients inside an uncompiled FSDP model", "compile the whole model")


def _refusal(path: str, what: str, fix: str) -> UnsupportedProgram:
    return UnsupportedProgram(f"`{path}` {what}, which cannot be compiled", stage="capture", fix=fix)
