"""The graph of one call of a module, with its signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from aotdist.aliasing.memory import share_memory
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.export.assembly import Assembly
from aotdist.export.call import Call, Input, state_of
from aotdist.export.refusals import refuse_call
from aotdist.export.signature import GraphSignature, signature_of
from aotdist.export.trace import ExportTrace, trace_for_export
from aotdist.facts import DataWritten
from aotdist.settings import Settings
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.trees import pytree


def aot_export_module(
    mod: nn.Module,
    args: Sequence[Any],
    *,
    decompositions: Mapping[OpOverload, Callable[..., Any]] | None = None,
    trace_joint: bool,
    output_loss_index: int | None = None,
    pre_dispatch: bool = False,
    dynamic_shapes: bool | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[GraphModule, GraphSignature]:
    """The graph of one call of a module, and what it takes and returns.

    Parameters that are tied are inputs of their own, each with its part of the gradient.

    Parameters and arguments may be fake tensors, all of one `FakeTensorMode`: the trace runs in it, and
    symbols among their sizes are those of the graph. So it does in a mode that is on around this call.

    Args:
        mod: a plain module.
        args: positional arguments of the call.
        decompositions: operators to break up.
        trace_joint: append the gradients of the loss with respect to all inputs that require grad. Without,
            the program runs under `no_grad`.
        output_loss_index: which result is the loss: one number; no other result may require grad.
        pre_dispatch: not available.
        dynamic_shapes: give sizes of the arguments symbols: the graph reads them off its inputs. What the
            trace found out about them (that two are equal, that one is more than four) is not tested there.
        kwargs: keyword arguments of the call.

    Raises:
        BadSettings: an option that is not available is set, or this is no call of a module.
        UnsupportedProgram: the program cannot be expressed that way; the error says what is in the way.
    """
    refuse_call(mod, args, kwargs)
    if pre_dispatch:
        raise BadSettings(
            "`pre_dispatch` cannot be honoured", fix="leave it out: graphs are recorded below autograd"
        )
    if trace_joint and output_loss_index is None:
        raise BadSettings("`trace_joint` needs to know the loss", fix="set `output_loss_index`")
    loss = output_loss_index if trace_joint else None
    call = Call(mod, tuple(args), dict(kwargs or {}), state_of(mod))
    with torch.set_grad_enabled(trace_joint and torch.is_grad_enabled()):
        fresh = () if loss is None else (loss,)
        settings = Settings(dynamic=bool(dynamic_shapes))
        traced = trace_for_export(call, decompositions or {}, loss=loss, fresh=fresh, settings=settings)
    refuse_writes(traced, joint=trace_joint)
    assembly = Assembly(traced, prefix="arg{}_1", loss=loss)
    mutated = assembly.new_values()
    values = assembly.values()
    grads = assembly.gradients() if trace_joint else {}
    if trace_joint:
        for leaf in traced.inputs:
            if leaf.requires_grad() and leaf not in grads:
                raise _without_gradient(leaf)
    gm = assembly.module([*mutated.values(), *values, *grads.values()])
    state = (leaf.value for leaf, _ in call.state)
    in_spec = pytree.tree_structure(((*state, *call.args), dict(call.kwargs)))
    return gm, signature_of(gm, traced, in_spec, list(mutated), list(grads), loss)


def refuse_writes(traced: ExportTrace, *, joint: bool) -> None:
    """Refuse writes that have no new value to return, or that another input would show too.

    Raises:
        UnsupportedProgram: naming what is written.
    """
    facts, primals = traced.trace.facts, traced.primals()
    for slot in (traced.trace.program.ins[idx] for idx in facts.backward.writes):
        raise UnsupportedProgram(
            f"`{slot}` is written by the backward",
            stage="export",
            fix="write it in the forward, or export without `trace_joint`",
        )
    for idx, leaf in primals:
        if not isinstance(facts.inputs[idx], DataWritten):
            continue
        if joint and leaf.requires_grad():
            raise UnsupportedProgram(
                f"`{leaf.path}` is written and requires grad",
                stage="export",
                fix="write a clone, or export without `trace_joint`",
            )
        for other, sharing in primals:
            if other != idx and share_memory(leaf.value, sharing.value):
                raise UnsupportedProgram(
                    f"`{leaf.path}` is written and shares memory with `{sharing.path}`",
                    stage="export",
                    fix="clone one of them",
                )


def _without_gradient(leaf: Input) -> UnsupportedProgram:
    return UnsupportedProgram(
        f"`{leaf.path}` requires grad, and the loss does not depend on it",
        stage="export",
        fix="call `requires_grad_(False)` on it",
    )
