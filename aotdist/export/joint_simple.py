"""Export of a function of flat tuples, without a signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.export.assembly import Assembly
from aotdist.export.refusals import unsupported
from aotdist.export.trace import Call, ExportTrace, trace_for_export
from aotdist.facts import (
    DataWritten,
    IsInput,
    OutputFact,
    ViewOfInput,
    ViewOfIntermediate,
    ViewOfOutput,
)
from aotdist.program import OutIdx
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.proxies import call_with_primals_and_tangents
from aotdist.torch_seam.trees import TreeSpec, pytree, tree_children


def aot_export_joint_simple(
    func: Callable[..., Any],
    args: Sequence[Any],
    *,
    trace_joint: bool,
    num_params_buffers: int = 0,
    decompositions: Mapping[OpOverload, Callable[..., Any]] | None = None,
) -> GraphModule:
    """The graph of a function that takes and returns flat tuples; it is called like the function.

    With `trace_joint`, if a result requires grad, it is a joint graph: `(primals, tangents)` to `(results,
    gradients)`, with one tangent for each result that requires grad, and one gradient, or None, for each
    primal.

    Arguments may be fake tensors, all of one `FakeTensorMode`: the trace runs in it.

    Args:
        func: may not write inputs, or return an input or a view of one.
        args: tensors and constants.
        trace_joint: trace the backward, too. Otherwise the function runs under `no_grad`.
        num_params_buffers: ignored.
        decompositions: operators to break up.

    Raises:
        BadSettings: `func` is no function.
        UnsupportedProgram: the function breaks one of these rules.
    """
    if not callable(func):
        raise BadSettings(f"cannot export a {type(func).__name__}", stage="export", fix="pass a function")
    if not _is_flat(pytree.tree_structure(args)):
        raise _not_simple("the arguments are not one flat tuple of tensors and constants")
    call, table = Call(func, tuple(args), {}, ()), decompositions or {}
    with torch.set_grad_enabled(trace_joint and torch.is_grad_enabled()):
        traced = trace_for_export(call, table)
        _refuse_what_is_not_simple(traced)
        repeated = [k for k, fact in enumerate(traced.outputs()) if isinstance(fact, ViewOfOutput)]
        if traced.trace.has_backward() and repeated:
            # A tensor that is returned twice has two tangents: trace again, with clones.
            traced = trace_for_export(call, table, fresh=repeated)
    joint = traced.trace.has_backward()
    assembly = Assembly(traced, prefix="primals_{}" if joint else "arg{}_1")
    values = assembly.values()
    if not joint:
        return assembly.module(values)
    grads = assembly.gradients()
    gm = assembly.module([*values, *(grads.get(leaf) for leaf in traced.inputs)])
    call_with_primals_and_tangents(gm, len(traced.inputs), len(values))
    return gm


def _is_flat(structure: TreeSpec) -> bool:
    return not structure.is_leaf() and all(child.is_leaf() for child in tree_children(structure))


def _not_simple(fault: str) -> UnsupportedProgram:
    what = f"`aot_export_joint_simple` cannot keep the function's convention: {fault}"
    return unsupported(what, "clone or flatten it, or use `aot_export_module`")


def _refuse_what_is_not_simple(traced: ExportTrace) -> None:
    facts, slots = traced.trace.facts, traced.trace.program.ins
    for idx, fact in facts.inputs.enumerate():
        if isinstance(fact, DataWritten):
            raise _not_simple(f"`{slots[idx]}` is written")
    for idx in facts.backward.writes:
        raise _not_simple(f"`{slots[idx]}` is written by the backward")
    for place, _ in traced.returned().assigned():
        raise _not_simple(f"`{place.path}` is assigned a tensor")
    if not _is_flat(traced.returned().spec):
        raise _not_simple("the result is not one flat tuple of tensors and constants")
    for position, fact in enumerate(traced.outputs()):
        _refuse_result(traced, OutIdx(position), fact)


def _refuse_result(traced: ExportTrace, position: OutIdx, fact: OutputFact) -> None:
    requires_grad = traced.requires_grad[position]
    match fact:
        case IsInput(input=idx) | ViewOfInput(base=idx):
            raise _not_simple(f"`out[{position}]` is `{traced.trace.program.ins[idx]}`, or a view of it")
        case ViewOfIntermediate() if requires_grad:
            raise _not_simple(f"`out[{position}]` is a view")
        case ViewOfOutput(base=base, steps=steps) if requires_grad and steps:
            raise _not_simple(f"`out[{position}]` is a view of `out[{base}]`")
        case _:
            pass
