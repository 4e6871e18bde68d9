"""FSDP2: a module given to `fully_shard`, its hooks replaced by collectives that land in the graph.

What FSDP2 does in eager, unit by unit (a *unit* is the parameters of one `fully_shard` call that no inner
call took; hooks of the module do all of it)::

    pre-forward    move the root's inputs to the device; cast inputs to param_dtype
                   all-gather the unit into a flat buffer; register whole parameters on the module
    post-forward   register the shards again and free the buffer, if reshard_after_forward
                   cast outputs to output_dtype; hook the outputs
    pre-backward   (a hook of the outputs' gradients) all-gather again
    post-backward  (the backward of a node put before the inputs) free; then either reduce-scatter the
                   unit's gradients, all-reduce them among replicas, and set or add to `.grad` of the shards;
                   or, with set_requires_gradient_sync(False), keep them whole on FSDP2's record

What a trace records instead: the two forward hooks are replaced by `fsdp_hooks.UnitHooks`, which casts and
registers as eager does but gathers through `fsdp_unshard.Unshard`, an autograd function of one parameter.
There is no backward hook: reducing *is* the backward of gathering::

    shard ─[to param_dtype]─[pad]─ all_gather_into_tensor ─ wait_tensor ─[chunk, cat]─[narrow]─► whole
                                                                                                   │ module
    .grad ◄─[narrow]─[to]─[div]─[all_reduce ─ wait]─ wait_tensor ─ reduce_scatter_tensor ─[pad]─[to]─ its grad

Every node of a chain carries the unit's name (`node.meta["unit"]`); a chain that gathers also carries what
`reshard_after_forward` means to a partitioner: `must_recompute` (gather again in backward) when True,
`must_save` when False. Graph passes merge the chains of a unit and move them to where they overlap with
computation, as FSDP2's flat buffers, streams and prefetching do. So the methods that only tune these are
accepted and have no effect: `set_modules_to_*_prefetch`, `set_is_last_backward`,
`set_reshard_after_backward`, `set_unshard_in_backward`, `set_reduce_scatter_max_input_buffers`.

Values are equal bit for bit to eager's (`fsdp_unshard` says why), except that

- with more than two ranks, a collective may sum in an order that depends on the place in its buffer (gloo
  does): equal up to rounding until a pass merges a unit's reductions into the buffer that FSDP2 would make;
- a divide factor other than the number of shards is applied before the collective, where NCCL applies it
  inside;
- with tensor parallelism and no synchronisation, a gradient that is a partial sum over the tensor-parallel
  ranks is summed at every step; eager sums it at the last;
- gradients of two calls that one backward reaches are added after each is reduced, or cast; eager adds them
  before.

Accumulation without synchronisation keeps whole gradients where eager keeps them, so eager and compiled steps
mix in any order. `prepare` allocates the accumulators; `lifted` makes them inputs of the program; the step
that reduces adds them, also for a parameter that it does not use, and `after_backward` drops them. With
`set_requires_all_reduce(False)` a unit's shards are summed in FSDP2's own buffer, of which each parameter has
a part. The step that sums over replicas adds the buffer and fills it with -0.0, which adds nothing; the
buffer stays allocated, so that the part of a parameter without a gradient waits for its next one. Whether
gradients are reduced is read when forward is called, and in a step with several backwards at each of them:
gradients that the first ones leave whole are kept in the trace, and the last one reduces them.

`fsdp_refusals` refuses the rest, by name and before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from aotdist.subclasses.fsdp_hooks import Capture
from aotdist.subclasses.fsdp_refusals import (
    holds_partial,
    refuse,
    refuse_accumulation_inside_eager_root,
    refuse_switches,
)
from aotdist.subclasses.fsdp_units import PARTIAL, groups, outermost, param_path, unit_name, units
from aotdist.subclasses.fsdp_unshard import make_whole, new_accumulator, share_out_partial
from aotdist.subclasses.protocol import ModuleRule
from aotdist.torch_seam.autograd import call_after_backward, in_backward
from aotdist.torch_seam.dtensor import local_part, local_tensor
from aotdist.torch_seam.fsdp import fsdp_state
from aotdist.torch_seam.tensors import hooks_of_gradient, set_hooks_of_gradient


class _FsdpRule(ModuleRule):
    name = "FSDP2"

    def __init__(self) -> None:
        self._new: WeakSet[Any] = WeakSet()
        """Records whose accumulator `prepare` made, and whose backward has not run yet."""
        self._left: WeakKeyDictionary[Any, Callable[[], torch.Tensor | None]] = WeakKeyDictionary()
        """Accumulators that a backward did not write; the backward of another forward may still do so."""
        self._without_hooks: list[tuple[nn.Parameter, Any]] = []
        """Shards and their gradient hooks, which are put back when the backward is over, or has failed."""

    def claims(self, root: nn.Module) -> bool:
        return any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in root.modules())

    def check(self, root: nn.Module) -> None:
        refuse(root)

    def flags(self, root: nn.Module) -> Hashable:
        return tuple(_group_flags(group) for _, group in groups(root))

    def prepare(self, root: nn.Module) -> None:
        if not in_backward():
            self._put_hooks_back()
        for prefix, module in outermost(root):
            state = fsdp_state(module)
            state._lazy_init()
            refuse_accumulation_inside_eager_root(module, prefix.rstrip(".") or "(root)")
            _wait_for_optimizer(state)
        for prefix, group in groups(root):
            refuse_switches(group, unit_name(group, prefix))
            _reshard(group)
            _adopt_eager_gradients(group)
            if torch.is_grad_enabled():
                if not share_out_partial(group):
                    raise holds_partial(unit_name(group, prefix))
                if not group.reduce_grads:
                    self._allocate(group)
        for _, group in groups(root):
            _prepare_gathers(group)

    def capturing(self, root: nn.Module) -> AbstractContextManager[None]:
        return Capture().hooked(units(root))

    def lifted(self, root: nn.Module) -> Iterable[tuple[str, object, str]]:
        if not torch.is_grad_enabled():
            return
        for prefix, group in groups(root):
            for record in _accumulating(group):
                yield f"{param_path(record, prefix)}.accumulated_grad", record, "unsharded_accumulated_grad"
            for record in group.fsdp_params:
                if group.reduce_grads and getattr(record, PARTIAL, None) is not None:
                    yield f"{param_path(record, prefix)}.partial_grad", record, PARTIAL

    def after_backward(self, root: nn.Module) -> None:
        if in_backward():
            self._remove_hooks(root)
        for _, group in groups(root):
            self._take_back(group)
        accumulating = [(group, record) for _, group in groups(root) for record in _accumulating(group)]
        written = {record for _, record in accumulating if _was_written(record.unsharded_accumulated_grad)}
        for group, record in accumulating:
            # A backward writes at least one: if no version shows it, versions say nothing, and all count.
            untouched = written and record in self._new and record not in written
            if untouched:
                self._left[record] = ref(record.unsharded_accumulated_grad)
            if group.reduce_grads or untouched:
                record.unsharded_accumulated_grad = None
            self._new.discard(record)

    def _remove_hooks(self, root: nn.Module) -> None:
        """Remove hooks of shards' gradients until these are added to `.grad`: FSDP2 does not call them."""
        params = [record.sharded_param for _, group in groups(root) for record in group.fsdp_params]
        hooked = [(param, hooks_of_gradient(param)) for param in params if hooks_of_gradient(param)]
        if hooked:
            self._without_hooks += hooked
            for param, _ in hooked:
                set_hooks_of_gradient(param, None)
            call_after_backward(self._put_hooks_back)

    def _put_hooks_back(self) -> None:
        for param, hooks in self._without_hooks:
            set_hooks_of_gradient(param, hooks)
        self._without_hooks.clear()

    def _take_back(self, group: Any) -> None:
        for record in group.fsdp_params:
            left = self._left.get(record, _nothing)()
            if left is not None and not _accumulates(record) and _was_written(left):
                record.unsharded_accumulated_grad = left
                del self._left[record]

    def _allocate(self, group: Any) -> None:
        for record in group.fsdp_params:
            if record.sharded_param.requires_grad and record.unsharded_accumulated_grad is None:
                left = self._left.pop(record, _nothing)()
                make_whole(record)
                record.unsharded_accumulated_grad = new_accumulator(record) if left is None else left
                self._new.add(record)


def _nothing() -> None:
    """Stands for a weak reference to an accumulator that was freed."""


def _group_flags(group: Any) -> Hashable:
    return (
        group.reduce_grads,
        group.all_reduce_grads,
        torch.is_grad_enabled() and group._partial_reduce_output is None,
        group._reshard_after_forward,
        group.gradient_divide_factor,
        group.force_sum_reduction_for_comms,
        group._reduce_scatter_process_group.group_name,
        tuple(_accumulates(record) for record in group.fsdp_params) if torch.is_grad_enabled() else (),
    )


def _accumulating(group: Any) -> list[Any]:
    return [record for record in group.fsdp_params if _accumulates(record)]


def _accumulates(record: Any) -> bool:
    return record.unsharded_accumulated_grad is not None


def _was_written(accumulated: torch.Tensor) -> bool:
    # A write to a DTensor counts on the DTensor, one to the tensor inside it only there.
    return accumulated._version + local_part(accumulated)._version > 0


def _prepare_gathers(group: Any) -> None:
    """Call `prepare_gather` of tensors with an extension, which a compiled program does not call."""
    for record in group.fsdp_params:
        prepare = getattr(local_tensor(record.sharded_param), "prepare_gather", None)
        if prepare is not None:
            prepare()


def _reshard(group: Any) -> None:
    """Free parameters that an eager run, or the user's `unshard()`, left gathered."""
    group.wait_for_unshard()
    group._to_sharded()


def _adopt_eager_gradients(group: Any) -> None:
    """Move gradients to the record that eager, where it casts none, accumulates on the whole parameter."""
    for record in group.fsdp_params:
        whole = getattr(record, "_unsharded_param", None)
        if whole is not None and whole.grad is not None:
            record.unsharded_accumulated_grad, whole.grad = whole.grad, None


def _wait_for_optimizer(state: Any) -> None:
    """Honour `set_post_optim_event`: the optimizer may run on a stream of its own."""
    context = state._state_ctx
    if context.post_optim_event is not None:
        state._device_handle.current_stream().wait_event(context.post_optim_event)
        context.post_optim_event = None


MODULE_RULE = _FsdpRule()
