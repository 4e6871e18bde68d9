"""The FSDP2 states and parameter groups inside a module, their names, and gradients yet to be reduced.

A *state* belongs to the module (or the list of modules) that `fully_shard` was called on. It has one
parameter *group* for each mesh that its parameters are sharded over: a *unit*, communicated as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import Policy
from aotdist.torch_seam.fsdp import fsdp_groups, fsdp_state

PARTIAL = "partial_reduced_grad"
"""The attribute of FSDP2's record of a parameter that holds `ShardedParam.partial`."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of one mesh axis, as a functional collective names them."""

    group: str
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Ranks:
        """The ranks of a process group."""
        return cls(group.group_name, group.size())


@dataclass(frozen=True, slots=True, eq=False)
class ShardedParam:
    """A parameter, as its gather and its reduction need it.

    Args:
        path: where the parameter lives, seen from the compiled module: `blocks.3.attention.wq.weight`.
        unit: the FSDP unit that it is communicated with.
        policy: `must_recompute` when the unit reshards after forward, so that backward gathers again.
        record: FSDP2's own record of the parameter (its `FSDPParam`).
        group: FSDP2's own record of the unit (its `FSDPParamGroup`).
        gather: the ranks among which the parameter is sharded.
        scatter: the same ranks, over the process group that FSDP2 reduces with.
        replicas: the ranks that hold the same shard (HSDP), if any.
        shard_dim: the dimension that is cut.
        num_rows: size of the first dimension of the whole parameter.
        num_padded: of a padded shard.
        num_own: of this rank's shard.
    """

    path: str
    unit: str
    policy: Policy
    record: Any
    group: Any
    gather: Ranks
    scatter: Ranks
    replicas: Ranks | None
    shard_dim: int
    num_rows: int
    num_padded: int
    num_own: int

    @classmethod
    def of(cls, record: Any, group: Any, *, path: str, unit: str) -> ShardedParam:
        """Read the facts off FSDP2's records; `FSDPModule`'s lazy initialisation must have run."""
        mesh = record.mesh_info
        scatter = getattr(mesh, "reduce_scatter_process_group", None) or mesh.shard_process_group
        replicas = getattr(mesh, "replicate_process_group", None)
        return cls(
            path=path,
            unit=unit,
            policy="must_recompute" if group._reshard_after_forward else "must_save",
            record=record,
            group=group,
            gather=Ranks.of(mesh.shard_process_group),
            scatter=Ranks.of(scatter),
            replicas=None if replicas is None else Ranks.of(replicas),
            shard_dim=record.fsdp_placement.dim,
            num_rows=record._orig_size[0],
            num_padded=record.padded_sharded_param_size[0],
            num_own=record.sharded_size[0],
        )

    @property
    def accumulates(self) -> bool:
        """Whether backward only adds to an accumulator (`set_requires_gradient_sync(False)`)."""
        return not self.group.reduce_grads

    @property
    def accumulated(self) -> torch.Tensor | None:
        """The unreduced gradient of earlier backwards, which FSDP2 keeps on its record."""
        return self.record.unsharded_accumulated_grad

    @property
    def stays_partial(self) -> bool:
        """Whether backward ends with the reduce-scatter (`set_requires_all_reduce(False)`)."""
        return self.replicas is not None and not self.group.all_reduce_grads

    @property
    def partial(self) -> torch.Tensor | None:
        """Gradients of earlier backwards, not yet summed over replicas: a part of FSDP2's buffer."""
        return getattr(self.record, PARTIAL, None)

    def places(self) -> list[tuple[Any, str]]:
        """Every module attribute that holds this parameter; several when it is tied."""
        owner = self.record._module_info
        tied = zip(owner.shared_modules, owner.shared_param_names, strict=True)
        return [(owner.module, owner.param_name), *tied]


class Reductions:
    """The gradients of a captured module that later backwards reduce."""

    def __init__(self) -> None:
        self._taken: set[tuple[ShardedParam, str]] = set()
        self._accumulates: dict[ShardedParam, bool] = {}
        self._switches: dict[Any, tuple[bool, bool]] = {}
        self._whole: dict[ShardedParam, torch.Tensor] = {}
        self._partial: dict[ShardedParam, torch.Tensor] = {}

    def begin(self, params: Iterable[ShardedParam]) -> None:
        """Note which parameters accumulate when the program begins."""
        self._accumulates = {param: param.accumulates for param in params}
        for group in {param.group for param in self._accumulates}:
            self._switches[group] = group.reduce_grads, group.all_reduce_grads

    def check_end(self) -> None:
        """Refuse a program that switches synchronisation off, or the all-reduce, for the next call."""
        for param, accumulates in self._accumulates.items():
            if param.accumulates != accumulates or param in self._whole:
                raise _switched(param, "ends without synchronisation")
            if param.group.all_reduce_grads != self._switches[param.group][1] or param in self._partial:
                when = "begins" if param.group.all_reduce_grads and param not in self._partial else "ends"
                raise _switched(param, f"{when} without the all-reduce", "set_requires_all_reduce")

    def switch_back(self, failure: type[BaseException] | None, *_: Any) -> None:
        """Restore whether units reduce, among shards and among replicas, if the capture failed."""
        if failure is not None:
            for group, switches in self._switches.items():
                group.reduce_grads, group.all_reduce_grads = switches

    def accumulates(self, param: ShardedParam) -> bool:
        """Whether the program only adds to accumulators, which exist if it did so at its beginning."""
        if self._accumulates[param] and not param.accumulates:
            raise _switched(param, "begins without synchronisation")
        return self._accumulates[param]

    def keep_whole(self, param: ShardedParam, grad: torch.Tensor) -> None:
        """Keep an unreduced gradient for a later backward of the program."""
        self._whole[param] = grad

    def is_owed(self, param: ShardedParam) -> bool:
        """Whether an unreduced gradient waits for the next backward that reduces."""
        return not param.accumulates and (param.accumulated is not None or param in self._whole)

    def take_accumulated(self, param: ShardedParam) -> torch.Tensor | None:
        """The accumulated gradient of `param`, if any; handed out once."""
        is_first = self._is_first(param, "accumulated")
        return self._whole.pop(param, param.accumulated if is_first else None)

    def add_partial(self, param: ShardedParam, grad: torch.Tensor) -> None:
        """Add a gradient that replicas have yet to sum to FSDP2's buffer; without one, keep it meanwhile."""
        self._taken.discard((param, "partial"))
        if param.partial is not None:
            param.partial.add_(grad)
        else:
            earlier = self._partial.get(param)
            self._partial[param] = grad if earlier is None else earlier + grad

    def take_partial(self, param: ShardedParam) -> torch.Tensor | None:
        """The gradient of `param` that replicas have yet to sum, if any; handed out once."""
        is_first = self._is_first(param, "partial")
        return self._partial.pop(param, param.partial if is_first else None)

    def _is_first(self, param: ShardedParam, what: str) -> bool:
        taken = (param, what) in self._taken
        self._taken.add((param, what))
        return not taken


def _switched(
    param: ShardedParam, when: str, method: str = "set_requires_gradient_sync"
) -> UnsupportedProgram:
    return UnsupportedProgram(
        f"`{method}` is called in a program that {when} of the FSDP unit `{param.unit}`",
        stage="joint",
        fix="let the last backward in the program reduce, or call it before the program runs",
    )


def outermost(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The FSDP modules that no other one contains, with the prefix of the paths inside them."""
    if isinstance(root, FSDPModule):
        yield prefix, root
        return
    for name, child in root.named_children():
        yield from outermost(child, f"{prefix}{name}.")


def states(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every FSDP state in `root` once, with a prefix for the names that FSDP2 gave inside it."""
    seen: set[int] = set()
    for prefix, module in outermost(root):
        for state in _states_within(module):
            if id(state) not in seen:
                seen.add(id(state))
                yield prefix, state


def _states_within(module: Any) -> list[Any]:
    state = fsdp_state(module)
    if state._is_root:  # FSDP2 keeps the list: no walk over the modules at every call
        return state._state_ctx.all_states
    return [fsdp_state(inner) for inner in module.modules() if isinstance(inner, FSDPModule)]


def groups(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every parameter group in `root`, with the prefix of its names."""
    for prefix, state in states(root):
        for group in fsdp_groups(state):
            yield prefix, group


def units(root: nn.Module) -> Iterator[tuple[Any, tuple[ShardedParam, ...]]]:
    """Every state in `root`, with the parameters that its hooks gather."""
    for prefix, state in states(root):
        yield state, tuple(param for group in fsdp_groups(state) for param in _params(group, prefix))


def _params(group: Any, prefix: str) -> Iterator[ShardedParam]:
    unit = unit_name(group, prefix)
    for record in group.fsdp_params:
        yield ShardedParam.of(record, group, path=param_path(record, prefix), unit=unit)


def unit_name(group: Any, prefix: str) -> str:
    """`blocks.3`, or `norm, head` for modules sharded together, or `(root)`."""
    parts = [f"{prefix}{part}".rstrip(".") for part in (group._module_fqn or "").split(", ")]
    name = ", ".join(parts) or "(root)"
    index = getattr(group, "_param_group_index", 0)
    return f"{name} [{index}]" if index else name


def param_path(record: Any, prefix: str) -> str:
    """The parameter's path from the compiled module."""
    return f"{prefix}{record._param_fqn or record._module_info.param_name}"
