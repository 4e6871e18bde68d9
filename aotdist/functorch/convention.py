"""PyTorch's convention for graphs: order and names of arguments, results and nodes; tags; dynamic sizes.

Sizes of example arguments that are symbols are dynamic. Dynamo passes such sizes as numbers, too, beside the
tensors that have them: each of these is read off its tensor, and one that no tensor has is a constant of the
call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from aotdist.partition.builder import GraphBuilder
from aotdist.program import BACKWARD_ROLES, LATE_ROLES, Graph, Slot
from aotdist.torch_seam.proxies import call_with_primals_and_tangents
from aotdist.torch_seam.symbols import expression, open_sizes


@dataclass(frozen=True, slots=True)
class Order:
    """The order of arguments and results in PyTorch's graphs.

    Args:
        primals: arguments of a forward: plain tensors, then symbolic sizes.
        tangents: further arguments of a joint graph: tangents, then the values, when the backward begins, of
            inputs that it writes.
        values: results of a forward: new values of inputs, in their order, then the program's results.
        grads: results of a backward: a gradient or None for each primal, then its other results.
    """

    primals: tuple[Slot, ...]
    tangents: tuple[Slot, ...]
    values: tuple[Slot, ...]
    grads: tuple[Slot, ...]

    @classmethod
    def of(cls, joint: Graph) -> Order:
        """The order for a joint or an inference graph."""
        primals = tuple(slot for slot in joint.ins if slot.role in ("primal", "size"))
        outs = set(joint.outs)
        writes = [slot for slot in (Slot("write", p.path, p.inner) for p in primals) if slot in outs]
        grads = dict.fromkeys(Slot("grad", primal.path, primal.inner) for primal in primals)
        # The gradient of a plain primal may be a wrapper around several plain tensors.
        more = (s for s in joint.outs if s.role in BACKWARD_ROLES and s not in grads)
        return cls(
            primals,
            tuple(slot for slot in joint.ins if slot.role in LATE_ROLES),
            (*writes, *(slot for slot in joint.outs if slot.role == "output")),
            (*grads, *more),
        )


_TAGS = {"must_save": CheckpointPolicy.MUST_SAVE, "must_recompute": CheckpointPolicy.MUST_RECOMPUTE}


def joint_module(joint: Graph, order: Order) -> GraphModule:
    """The joint graph with PyTorch's names, order and tags; it is called `(primals, tangents)`."""
    builder = GraphBuilder(joint.gm)
    arguments = joint.named_placeholders()
    tangents = {arguments[slot] for slot in order.tangents}
    for prefix, slots in (("primals", order.primals), ("tangents", order.tangents)):
        for k, slot in enumerate(slots, start=1):
            builder.placeholder(arguments[slot], f"{prefix}_{k}")
    _copy_operations(builder, joint.gm)
    for old, new in builder.env.items():
        late = old.meta.get("phase") == "backward" or old in tangents
        new.meta["partitioner_tag"] = "is_backward" if late else "is_forward"
        if old.meta.get("policy") in _TAGS:
            new.meta |= {"recompute": _TAGS[old.meta["policy"]], "ac_graph_id": 0}
    results = joint.named_results()
    nodes = [results.get(slot) for slot in (*order.values, *order.grads)]
    gm = builder.finish([None if n is None else builder.env[n] for n in nodes], (), ()).gm
    call_with_primals_and_tangents(gm, len(order.primals), len(order.values))
    return gm


def named_as_theirs(gm: GraphModule) -> GraphModule:
    """A copy whose nodes have PyTorch's names."""
    builder = GraphBuilder(gm)
    for node in gm.graph.find_nodes(op="placeholder"):
        builder.placeholder(node)
    _copy_operations(builder, gm)
    return builder.finish([None if n is None else builder.env[n] for n in flat_results(gm)], (), ()).gm


def _copy_operations(builder: GraphBuilder, gm: GraphModule) -> None:
    """Copy all nodes but arguments and results; they get PyTorch's names."""
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            builder.copy_as_theirs(node)


def flat_results(gm: GraphModule) -> list[Any]:
    """The results of a module as a list of nodes and constants."""
    (values,) = gm.graph.output_node().args
    return list(values) if isinstance(values, (tuple, list)) else [values]


@dataclass(frozen=True, slots=True)
class OpenSizes:
    """Which sizes of some arguments are dynamic.

    Args:
        dims: dynamic dimensions of tensors, by the position of the tensor.
        places: for each argument that is such a size: the position and the dimension of a tensor that has it.
    """

    dims: Mapping[int, frozenset[int]]
    places: Mapping[int, tuple[int, int]]

    @classmethod
    def of(cls, mod: nn.Module, args: Sequence[Any]) -> OpenSizes:
        """Read them off example arguments, or off the placeholders if `mod` is a graph of Dynamo's."""
        shown = _examples(mod, args)
        found: dict[str, tuple[int, int]] = {}
        dims: dict[int, set[int]] = {}
        for position, example in enumerate(shown):
            for dim, size in open_sizes(example) if isinstance(example, torch.Tensor) else ():
                found.setdefault(expression(size), (position, dim))
                dims.setdefault(position, set()).add(dim)
        numbers = ((k, value) for k, value in enumerate(shown) if isinstance(value, torch.SymInt))
        places = {k: found[name] for k, value in numbers if (name := expression(value)) in found}
        return cls({position: frozenset(some) for position, some in dims.items()}, places)

    def left_out(self, args: Sequence[Any]) -> list[Any]:
        """The arguments without those that are sizes of others."""
        return [value for position, value in enumerate(args) if position not in self.places]

    def put_in(self, args: Sequence[Any]) -> list[Any]:
        """The inverse of `left_out`."""
        remaining = iter(args)
        count = len(args) + len(self.places)
        values: list[Any] = [0 if position in self.places else next(remaining) for position in range(count)]
        for position, (owner, dim) in self.places.items():
            values[position] = values[owner].size(dim)
        return values

    def by_identity(self, args: Sequence[Any]) -> dict[int, frozenset[int]]:
        """Dynamic dimensions by the `id` of the tensor; `args` are those that `left_out` returns."""
        positions = (k for k in range(len(args) + len(self.places)) if k not in self.places)
        at = zip(positions, args, strict=True)
        return {id(value): self.dims[position] for position, value in at if position in self.dims}


def _examples(mod: nn.Module, args: Sequence[Any]) -> list[Any]:
    """The arguments, or for a graph of Dynamo's its example values, whose sizes may be symbols."""
    if not isinstance(mod, GraphModule):
        return list(args)
    nodes = mod.graph.find_nodes(op="placeholder")
    if len(nodes) != len(args):
        return list(args)
    return [node.meta.get("example_value", value) for node, value in zip(nodes, args, strict=True)]
