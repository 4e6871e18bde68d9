"""Partitions of joint graphs: functions from one `GraphModule` to two, in PyTorch's convention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.functorch.convention import flat_results
from aotdist.partition.builder import GraphBuilder
from aotdist.partition.policy import Policy, partition
from aotdist.program import Graph, Slot

PartitionFn = Callable[..., tuple[GraphModule, GraphModule]]
"""`(joint_module, (primals, tangents), *, num_fwd_outputs, static_lifetime_input_indices)` -> both halves."""


def default_partition(
    joint_module: GraphModule,
    _joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    static_lifetime_input_nodes: Collection[Node] | None = None,
) -> tuple[GraphModule, GraphModule]:
    """Keep eager's schedule and save what eager saves.

    Args:
        joint_module: a joint graph, ours or PyTorch's.
        num_fwd_outputs: how many of its results are the forward's.
        static_lifetime_input_indices: ignored.
        static_lifetime_input_nodes: ignored.
    """
    return _partition_module(joint_module, num_fwd_outputs, "default")


def min_cut_rematerialization_partition(
    joint_module: GraphModule,
    _joint_inputs: Any,
    compiler: str = "inductor",
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> tuple[GraphModule, GraphModule]:
    """Save the fewest bytes, and recompute cheap operations in the backward.

    Args:
        joint_module: a joint graph, ours or PyTorch's.
        compiler: whose operations are cheap; only `inductor` is known.
        num_fwd_outputs: how many of its results are the forward's.
        static_lifetime_input_indices: ignored.

    Raises:
        BadSettings: `compiler` is another one.
    """
    if compiler != "inductor":
        raise BadSettings(
            f"min_cut_rematerialization_partition(compiler={compiler!r}) is not known", fix='pass "inductor"'
        )
    return _partition_module(joint_module, num_fwd_outputs, "min_cut")


def _partition_module(gm: GraphModule, num_values: int, policy: Policy) -> tuple[GraphModule, GraphModule]:
    """Cut a joint graph in PyTorch's convention; both halves keep that convention."""
    joint, constants = _as_joint(gm, num_values)
    split = partition(joint, policy)
    builder = GraphBuilder(split.forward.gm)
    for node in split.forward.placeholders():
        builder.placeholder(node)
    builder.copy_all(n for n in split.forward.gm.graph.nodes if n.op not in ("placeholder", "output"))
    arguments, results = split.forward.named_placeholders(), split.forward.named_results()
    primals = split.saved_primals
    saved = [arguments[primals[slot]] if slot in primals else results[slot] for slot in split.saved]
    sizes = [slot for slot in split.backward.ins if slot.role == "size"]
    saved += [arguments[slot] for slot in sizes]
    nodes = [*list(split.forward.results())[:num_values], *saved]
    new = [constants.get(k) if node is None else builder.env[node] for k, node in enumerate(nodes)]
    taken = split.backward.named_placeholders()
    for slot in reversed(sizes):  # PyTorch's backwards take sizes first
        next(iter(split.backward.gm.graph.nodes)).prepend(taken[slot])
    return builder.finish(new, (), ()).gm, split.backward.gm


def _as_joint(gm: GraphModule, num_values: int) -> tuple[Graph, dict[int, Any]]:
    """Convert a joint graph of PyTorch's convention to ours; also returns results that are constants."""
    builder = GraphBuilder(gm)
    overwritten = _overwritten(gm)
    ins: list[Slot] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            ins.append(Slot(_argument_role(node), node.name))
            builder.placeholder(node).meta["overwritten"] = node in overwritten
        elif node.op != "output":
            builder.copy(node)
        if node.op != "output":
            builder.env[node].meta.setdefault("phase", "backward" if _is_tagged_late(node) else "forward")
    flat = flat_results(gm)
    results = [builder.env[value] if isinstance(value, Node) else None for value in flat]
    outs = [Slot("output" if k < num_values else "grad", f"out[{k}]") for k in range(len(flat))]
    constants = {k: value for k, value in enumerate(flat[:num_values]) if not isinstance(value, Node)}
    return builder.finish(results, ins, outs), constants


def _overwritten(gm: GraphModule) -> set[Node]:
    """The arguments that the forward overwrites, so that the backward cannot read their old values.

    The forward either returns the new value, which PyTorch's description of the result says, or calls
    `copy_`.

    Raises:
        UnsupportedProgram: the backward writes one of them too, and would be given its old value.
    """
    found = {node for node in gm.graph.find_nodes(op="placeholder") if node.meta.get("overwritten")}
    described = {node.meta.get("desc"): node for node in gm.graph.find_nodes(op="placeholder")}
    for desc in gm.graph.output_node().meta.get("desc") or ():
        written = getattr(desc, "mutated_input", None)
        found |= {described[written]} if written is not None and written in described else set()
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    found |= {copy.args[0] for copy in copies if not _is_tagged_late(copy)}
    for copy in copies:
        if copy.args[0] in found and _is_tagged_late(copy):
            raise UnsupportedProgram(
                f"the joint graph writes `{copy.args[0]}` in the forward and in the backward",
                stage="partition",
                fix="trace it with `aotdist.aot_function`, whose graphs return new values",
            )
    return found


def _is_tagged_late(node: Node) -> bool:
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def _argument_role(node: Node) -> Literal["primal", "size", "tangent"]:
    if "tangents" in str(node.target):
        return "tangent"
    if isinstance(node.meta.get("val"), torch.SymInt):
        return "size"
    if "seed" in str(node.target):
        raise UnsupportedProgram(
            f"the joint graph takes `{node.name}`, the state of a random generator",
            stage="partition",
            fix="trace it without functionalized random operators",
        )
    return "primal"
