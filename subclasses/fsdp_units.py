"""The FSDP2 states and parameter groups inside a module, and their names.

A *state* belongs to the module (or the list of modules) that `fully_shard` was called on. It has one
parameter *group* for each mesh that its parameters are sharded over: a *unit*, communicated as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from aotdist.subclasses.fsdp_unshard import ShardedParam
from aotdist.torch_seam.fsdp import fsdp_groups, fsdp_state


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
