"""The graph of one call of a module, with its signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node

from aotdist.aliasing.memory import share_memory
from aotdist.errors import BadSettings
from aotdist.export.assembly import Assembly
from aotdist.export.refusals import refuse_call, unsupported
from aotdist.export.trace import Call, ExportTrace, Input, state_of, trace_for_export
from aotdist.facts import DataWritten
from aotdist.settings import Settings
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.trees import TreeSpec, pytree


@dataclass(frozen=True, slots=True)
class BackwardSignature:
    """What the backward part of a joint graph computes; values of the graph go by the names of their nodes.

    Args:
        gradients_to_parameters: the parameter that each gradient is of.
        gradients_to_user_inputs: the graph input that each gradient is of.
        loss_output: the result that is differentiated.
    """

    gradients_to_parameters: dict[str, str]
    gradients_to_user_inputs: dict[str, str]
    loss_output: str


@dataclass(frozen=True, slots=True)
class GraphSignature:
    """What a graph takes and returns; values of the graph go by the names of their nodes.

    Args:
        parameters: qualified names of the parameters, in the order of the graph's inputs.
        buffers: likewise of the buffers, which come after them.
        user_inputs: the inputs after those, one for each leaf of the arguments.
        user_outputs: the program's results; None for one that is a constant.
        inputs_to_parameters: which input is which parameter.
        inputs_to_buffers: which input is which buffer.
        buffers_to_mutate: results that are new values of buffers.
        parameters_to_mutate: results that are new values of parameters.
        user_inputs_to_mutate: results that are new values of user inputs.
        in_spec: structure of `((*parameters, *buffers, *args), kwargs)`.
        out_spec: structure of what the module returns.
        backward_signature: of a joint graph.
        input_tokens: always empty: no operator with side effects is ordered by tokens.
        output_tokens: likewise.
    """

    parameters: list[str]
    buffers: list[str]
    user_inputs: list[str]
    user_outputs: list[str | None]
    inputs_to_parameters: dict[str, str]
    inputs_to_buffers: dict[str, str]
    buffers_to_mutate: dict[str, str]
    parameters_to_mutate: dict[str, str]
    user_inputs_to_mutate: dict[str, str]
    in_spec: TreeSpec
    out_spec: TreeSpec
    backward_signature: BackwardSignature | None
    input_tokens: list[str]
    output_tokens: list[str]


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

    Parameters and arguments may be fake tensors of one `FakeTensorMode`. The trace runs in that mode, or in
    one that is active around this call, and keeps the symbols among their sizes.

    Args:
        mod: a plain module.
        args: positional arguments of the call.
        decompositions: operators to break up.
        trace_joint: append the gradients of the loss with respect to all inputs that require grad. Without,
            the program runs under `no_grad`.
        output_loss_index: which result is the loss: one number; no other result may require grad.
        pre_dispatch: not available.
        dynamic_shapes: give sizes of the arguments symbols, which the graph reads off its inputs. The graph
            does not test what the trace assumed of them (that two are equal, that one is more than four).
        kwargs: keyword arguments of the call.

    Raises:
        BadSettings: an option that is not available is set, or this is no call of a module.
        UnsupportedProgram: the program cannot be expressed that way; the error says what is in the way.
    """
    refuse_call(mod, args, kwargs)
    if pre_dispatch:
        fix = "leave it out: graphs are recorded below autograd"
        raise BadSettings("`pre_dispatch` cannot be honoured", fix=fix)
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
                what = f"`{leaf.path}` requires grad, and the loss does not depend on it"
                raise unsupported(what, "call `requires_grad_(False)` on it")
    gm = assembly.module([*mutated.values(), *values, *grads.values()])
    state = (leaf.value for leaf, _ in call.state)
    in_spec = pytree.tree_structure(((*state, *call.args), dict(call.kwargs)))
    return gm, _signature_of(gm, traced, in_spec, list(mutated), list(grads), loss)


def refuse_writes(traced: ExportTrace, *, joint: bool) -> None:
    """Refuse writes by the backward, to what requires grad, and to memory that inputs share.

    Raises:
        UnsupportedProgram: naming what is written.
    """
    facts, primals = traced.trace.facts, traced.primals()
    for slot in (traced.trace.program.ins[idx] for idx in facts.backward.writes):
        fix = "write it in the forward, or export without `trace_joint`"
        raise unsupported(f"`{slot}` is written by the backward", fix)
    for idx, leaf in primals:
        if not isinstance(facts.inputs[idx], DataWritten):
            continue
        if joint and leaf.requires_grad():
            fix = "write a clone, or export without `trace_joint`"
            raise unsupported(f"`{leaf.path}` is written and requires grad", fix)
        for other, sharing in primals:
            if other != idx and share_memory(leaf.value, sharing.value):
                what = f"`{leaf.path}` is written and shares memory with `{sharing.path}`"
                raise unsupported(what, "clone one of them")


def _signature_of(
    gm: GraphModule,
    traced: ExportTrace,
    in_spec: TreeSpec,
    mutated: Sequence[Input],
    graded: Sequence[Input],
    loss: int | None,
) -> GraphSignature:
    """Names of what a graph takes and returns.

    Args:
        mutated: inputs whose new values are the first results.
        graded: inputs whose gradients are the last results.
        loss: position of the loss among the program's results, if any.
    """
    ins = {
        leaf: node.name
        for leaf, node in zip(traced.inputs, gm.graph.find_nodes(op="placeholder"), strict=True)
    }
    results = cast("tuple[Any, ...]", gm.graph.output_node().args[0])
    outs = [value.name if isinstance(value, Node) else None for value in results]
    values = outs[len(mutated) : len(mutated) + traced.returned().spec.num_leaves]
    new_values = dict(zip(mutated, outs, strict=False))
    grads = dict(zip(graded, outs[len(mutated) + len(values) :], strict=True))

    def of(kind: str, names: Mapping[Input, Any]) -> dict[str, str]:
        """Graph name to the input's own name, for inputs of one kind."""
        of_kind = {leaf: name for leaf, name in names.items() if leaf.kind == kind}
        return {name: ins[leaf] if kind == "argument" else leaf.path for leaf, name in of_kind.items()}

    backward = None
    if loss is not None:
        params = of("parameter", grads) | of("buffer", grads)
        backward = BackwardSignature(params, of("argument", grads), str(values[loss]))
    return GraphSignature(
        parameters=[leaf.path for leaf in ins if leaf.kind == "parameter"],
        buffers=[leaf.path for leaf in ins if leaf.kind == "buffer"],
        user_inputs=list(of("argument", ins)),
        user_outputs=values,
        inputs_to_parameters=of("parameter", ins),
        inputs_to_buffers=of("buffer", ins),
        buffers_to_mutate=of("buffer", new_values),
        parameters_to_mutate=of("parameter", new_values),
        user_inputs_to_mutate=of("argument", new_values),
        in_spec=in_spec,
        out_spec=traced.returned().spec,
        backward_signature=backward,
        input_tokens=[],
        output_tokens=[],
    )
