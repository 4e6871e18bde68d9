"""Replacements for FSDP2's hooks while a module is captured.

One `UnitHooks` replaces the two hooks of one FSDP state, under the same keys and so in the same order among
the user's own hooks. It keeps FSDP2's order of events (move and cast the inputs, gather, compute, reshard,
cast the outputs) without streams, prefetching, freeing of storage, and backward hooks, whose work is the
backward of `Unshard`.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.fsdp_units import Reductions, ShardedParam
from aotdist.subclasses.fsdp_unshard import EnterUnit, GatherAgain, LeaveSharded, ReachAll, Unshard
from aotdist.torch_seam.autograd import call_after_backward, in_backward
from aotdist.torch_seam.fsdp import map_tensors, replace_differentiable, to_device
from aotdist.torch_seam.patches import replaced_besides
from aotdist.torch_seam.tensors import as_parameter


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A parameter with its `sharded` tensor and its `whole` one, which replaces it on the module.

    `leaf` is the first whole tensor of this forward, where the gradients of all uses are summed.
    """

    param: ShardedParam
    sharded: Any
    whole: torch.Tensor
    leaf: torch.Tensor


class UnitHooks:
    """The traced hooks of one FSDP state: one module, or several that `fully_shard([...])` groups."""

    def __init__(self, state: Any, params: tuple[ShardedParam, ...], capture: Capture) -> None:
        self.state = state
        self.params = params
        self._capture = capture
        self._gathered: list[_Gathered] = []
        self._running = False
        self._recomputing = False
        self._went_backward = False
        self._to_run: set[nn.Module] = set()

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Move and cast the inputs; gather, unless another module of the group has already done so."""
        self._recomputing = bool(self._gathered) and in_backward()
        if self._recomputing:
            self._register_whole()
            return self._cast_inputs(args), self._cast_inputs(kwargs)
        self._to_run = self._to_run or set(self.state._modules)
        entering, self._running = not self._running, True
        if entering:
            args, kwargs = self._capture.enter(self, args, kwargs)
        args, kwargs = self._cast_inputs(args), self._cast_inputs(kwargs)
        if entering:
            self._unshard()
        if self.params and torch.is_grad_enabled():
            args, kwargs = replace_differentiable((args, kwargs), _entering)
        return args, kwargs

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Reshard after the last module of the group, and cast the output."""
        self._to_run.discard(module)
        if self._recomputing or self._to_run:
            return self._cast_output(output)
        output = self._complete(output)
        output = self._capture.leave(self, output)
        return self._cast_output(output)

    def complete_early(self, output: Any) -> Any:
        """End a forward in which some modules of the group did not run, after the root's forward."""
        if not self._to_run:
            return output
        self._to_run.clear()
        return self._cast_output(self._complete(output))

    def restore(self) -> None:
        """Put the sharded parameters back wherever a whole one is still registered."""
        for gathered in self._gathered:
            for module, name in gathered.param.places():
                if module._parameters.get(name) is gathered.whole:
                    module._parameters[name] = gathered.sharded

    def leaf(self, param: ShardedParam) -> torch.Tensor:
        """Where the gradients of `param` are summed in this forward, even if it was not gathered."""
        for gathered in self._gathered:
            if gathered.param is param and gathered.leaf.requires_grad:
                return gathered.leaf
        return LeaveSharded.apply(_registered(param), param, self._capture)

    def _complete(self, output: Any) -> Any:
        self._reshard()
        if torch.is_grad_enabled():
            map_tensors(self._register_before_backward, output)
        self._running = False
        return output

    def _unshard(self) -> None:
        self.restore()
        earlier = [None] * len(self.params) if self._went_backward else self._gathered
        self._gathered = [
            self._gather(param, before) for param, before in itertools.zip_longest(self.params, earlier)
        ]
        self._went_backward = False
        self._register_whole()

    def _gather(self, param: ShardedParam, before: _Gathered | None) -> _Gathered:
        sharded = _registered(param)
        needs_grad = sharded.requires_grad and torch.is_grad_enabled()
        if before is None or before.leaf.requires_grad != needs_grad:
            whole = as_parameter(Unshard.apply(sharded, param, self._capture))
            return _Gathered(param, sharded, whole, leaf=whole)
        if param.policy == "must_save":
            return before
        whole = as_parameter(GatherAgain.apply(before.leaf, sharded, param))
        return _Gathered(param, sharded, whole, before.leaf)

    def _reshard(self) -> None:
        for gathered in self._gathered:
            if gathered.param.policy == "must_recompute":
                _register(gathered.param, gathered.sharded)

    def _register_whole(self) -> None:
        for gathered in self._gathered:
            _register(gathered.param, gathered.whole)

    def _register_before_backward(self, output: torch.Tensor) -> torch.Tensor:
        # A checkpoint inside the unit recomputes in backward with the tensors that are registered then.
        if output.requires_grad:
            output.register_hook(self._before_backward)
        return output

    def _before_backward(self, _: torch.Tensor) -> None:
        self._went_backward = True
        if self._capture.is_open:
            self._register_whole()
            call_after_backward(self.restore)  # code after a backward inside of the program sees the shards

    def _cast_inputs(self, inputs: Any) -> Any:
        policy = self.state._mp_policy
        return _cast(inputs, policy.param_dtype if policy.cast_forward_inputs else None)

    def _cast_output(self, output: Any) -> Any:
        return _cast(output, self.state._mp_policy.output_dtype)


class Capture(Reductions):
    """The state that all units of a captured module share."""

    def __init__(self) -> None:
        super().__init__()
        self._units: tuple[UnitHooks, ...] = ()
        self._forward_root: UnitHooks | None = None
        self.is_open = False

    def enter(self, unit: UnitHooks, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A unit starts; the first one is the root, whose inputs FSDP2 moves to the device."""
        if self._forward_root is not None:
            return args, kwargs
        self._forward_root = unit
        if unit.state._device.type == "cpu" or not (args or kwargs):
            return args, kwargs
        return to_device(args, kwargs, unit.state._device)

    def leave(self, unit: UnitHooks, output: Any) -> Any:
        """A unit ends; the root ends all others, even if some of their modules did not run."""
        if self._forward_root is not unit:
            return output
        for other in reversed(self._units):
            if other is not unit:
                output = other.complete_early(output)
        self._forward_root = None
        return self._reach_accumulated(output)

    @contextmanager
    def hooked(self, units: Iterable[tuple[Any, tuple[ShardedParam, ...]]]) -> Generator[None]:
        """Replace the hooks of these states inside; afterwards restore them, and the sharded parameters."""
        self._units = tuple(UnitHooks(state, params, self) for state, params in units)
        self.begin(param for unit in self._units for param in unit.params)
        with ExitStack() as stack:
            stack.push(self.switch_back)
            stack.enter_context(_methods_replaced({unit.state: unit for unit in self._units}))
            for unit in self._units:
                stack.enter_context(_hooks_replaced(unit))
                stack.callback(unit.restore)
            self.is_open = True
            try:
                yield
                self.check_end()
            finally:
                self.is_open = False

    def _reach_accumulated(self, output: Any) -> Any:
        """Let backward reduce accumulated gradients also of parameters that this forward did not use."""
        if not torch.is_grad_enabled():
            return output
        owed = [unit.leaf(p) for unit in self._units for p in unit.params if self.is_owed(p)]

        def reach(tensor: torch.Tensor) -> torch.Tensor:
            if not owed or not tensor.requires_grad:
                return tensor
            reaching: torch.Tensor = ReachAll.apply(tensor, *owed)
            owed.clear()
            return reaching

        return map_tensors(reach, output)


@contextmanager
def _hooks_replaced(unit: UnitHooks) -> Generator[None]:
    """Replace FSDP2's hooks by a unit's; no other thread sees the modules' attributes meanwhile."""
    ids = {handle.id for handle in _handles(unit.state)}
    with ExitStack() as stack:
        for module in unit.state._modules:
            for kind, hook in (
                ("_forward_pre_hooks", unit.pre_forward),
                ("_forward_hooks", unit.post_forward),
            ):
                hooks = getattr(module, kind)
                stack.callback(setattr, module, kind, hooks)
                setattr(module, kind, OrderedDict((k, hook if k in ids else h) for k, h in hooks.items()))
        yield


@contextmanager
def _methods_replaced(units: Mapping[Any, UnitHooks]) -> Generator[None]:
    """Replace methods of FSDP2's states: `register_fsdp_forward_method` calls these instead of the hooks.

    `load_state_dict` into shards, which resets FSDP2's records of them, leaves the records as they are.
    """
    params = {param.record: param for unit in units.values() for param in unit.params}
    hung = {record: _registered(param) for record, param in params.items()}

    def pre_forward(run: Callable[..., Any], state: Any, *args: Any) -> Any:
        return units[state].pre_forward(*args) if state in units else run(state, *args)

    def post_forward(run: Callable[..., Any], state: Any, *args: Any) -> Any:
        return units[state].post_forward(*args) if state in units else run(state, *args)

    def reset_sharded_param(run: Callable[..., Any], record: Any) -> None:
        if record not in hung:
            run(record)
        elif _registered(params[record]) is not hung[record]:
            raise UnsupportedProgram(
                f"`{params[record].path}` is replaced by another tensor (`load_state_dict(assign=True)`)",
                stage="joint",
                fix="do so outside of the compiled function",
            )

    with ExitStack() as stack:
        for cls in set(map(type, params)):
            stack.enter_context(replaced_besides(cls, "reset_sharded_param", reset_sharded_param))
        for cls in set(map(type, units)):
            stack.enter_context(replaced_besides(cls, "_pre_forward", pre_forward))
            stack.enter_context(replaced_besides(cls, "_post_forward", post_forward))
        yield


def _handles(state: Any) -> Iterator[Any]:
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        yield from getattr(handle, "handles", (handle,))


def _registered(param: ShardedParam) -> Any:
    module, name = param.places()[0]
    return module._parameters[name]


def _register(param: ShardedParam, tensor: Any) -> None:
    for module, name in param.places():
        module._parameters[name] = tensor


def _entering(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return EnterUnit.apply(*tensors) if tensors else ()


def _cast(container: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return container
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, container)
