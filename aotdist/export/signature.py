"""Names of what an exported graph takes and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch.fx import GraphModule, Node

from aotdist.export.call import Input
from aotdist.export.trace import ExportTrace
from aotdist.torch_seam.trees import TreeSpec


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


def signature_of(
    gm: GraphModule,
    traced: ExportTrace,
    in_spec: TreeSpec,
    mutated: Sequence[Input],
    graded: Sequence[Input],
    loss: int | None,
) -> GraphSignature:
    """Names of what a graph takes and returns.

    Args:
        gm: the graph.
        traced: what it is of.
        in_spec: structure of state and arguments.
        mutated: inputs whose new values are the first results.
        graded: inputs whose gradients are the last results.
        loss: which result of the program is the loss, if any.
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
