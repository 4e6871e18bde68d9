"""PyTorch's convention for graphs: names and order of what they take and return, names of nodes, tags, sizes.

Whoever brings a graph may leave sizes open, as symbols in the sizes of its example arguments. Dynamo passes
such sizes as numbers beside the tensors that have them. Here each is read off its tensor, so that it is a
size like any other; a number that is the size of none is a constant of each call.
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
    """The order in which PyTorch's graphs take and return what ours do.

    Args:
        primals: what a forward takes: plain tensors, then sizes if they are symbolic.
        tangents: what a joint graph takes after that: tangents, then what each input that the backward writes
            holds when it begins.
        values: what a forward returns: new values of inputs, in their order, then results.
        grads: what a backward returns: a gradient for each primal, if it has one, then what else there is.
    """

    primals: tuple[Slot, ...]
    tangents: tuple[Slot, ...]
    values: tuple[Slot, ...]
    grads: tuple[Slot, ...]

    @classmethod
    def of(cls, joint: Graph) -> Order:
        """That of a joint or an inference graph."""
        primals = tuple(slot for slot in joint.ins if slot.role in ("primal", "size"))
        outs = set(joint.outs)
        writes = [slot for slot in (Slot("write", p.path, p.inner) for p in primals) if slot in outs]
        grads = dict.fromkeys(Slot("grad", primal.path, primal.inner) for primal in primals)
        # A plain primal may have a wrapper for a gradient, of several plain tensors.
        more = (s for s in joint.outs if s.role in BACKWARD_ROLES and s not in grads)
        return cls(
            primals,
            tuple(slot for slot in joint.ins if slot.role in LATE_ROLES),
            (*writes, *(slot for slot in joint.outs if slot.role == "output")),
            (*grads, *more),
        )


_TAGS = {"must_save": CheckpointPolicy.MUST_SAVE, "must_recompute": CheckpointPolicy.MUST_RECOMPUTE}


def joint_module(joint: Graph, order: Order) -> GraphModule:
    """The joint graph as PyTorch's partitions want it: names, order, tags; called `(primals, tangents)`."""
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
    """A copy whose nodes are called as PyTorch calls them."""
    builder = GraphBuilder(gm)
    for node in gm.graph.find_nodes(op="placeholder"):
        builder.placeholder(node)
    _copy_operations(builder, gm)
    return builder.finish([None if n is None else builder.env[n] for n in flat_results(gm)], (), ()).gm


def _copy_operations(builder: GraphBuilder, gm: GraphModule) -> None:
    """All of a graph but arguments and results; nodes are called as PyTorch calls them."""
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            builder.copy_as_theirs(node)


def flat_results(gm: GraphModule) -> list[Any]:
    """What a module returns, flat; nodes or constants."""
    (values,) = gm.graph.output_node().args
    return list(values) if isinstance(values, (tuple, list)) else [values]


@dataclass(frozen=True, slots=True)
class OpenSizes:
    """What of some arguments is open.

    Args:
        dims: the dimensions of each tensor, by its position, that may differ from call to call.
        places: of each argument that is such a size, by position: which argument has it, in which dimension.
    """

    dims: Mapping[int, frozenset[int]]
    places: Mapping[int, tuple[int, int]]

    @classmethod
    def of(cls, mod: nn.Module, args: Sequence[Any]) -> OpenSizes:
        """Read them off example arguments, or, of a graph of Dynamo's, off what it says of these."""
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
        """The arguments without those that are read off others."""
        return [value for position, value in enumerate(args) if position not in self.places]

    def put_in(self, args: Sequence[Any]) -> list[Any]:
        """All arguments again."""
        remaining = iter(args)
        count = len(args) + len(self.places)
        values: list[Any] = [0 if position in self.places else next(remaining) for position in range(count)]
        for position, (owner, dim) in self.places.items():
            values[position] = values[owner].size(dim)
        return values

    def by_identity(self, args: Sequence[Any]) -> dict[int, frozenset[int]]:
        """The open dimensions of arguments without those that are left out, by the identity of the tensor."""
        positions = (k for k in range(len(args) + len(self.places)) if k not in self.places)
        at = zip(positions, args, strict=True)
        return {id(value): self.dims[position] for position, value in at if position in self.dims}


def _examples(mod: nn.Module, args: Sequence[Any]) -> list[Any]:
    """The arguments, with symbols for sizes where a graph of Dynamo's has some."""
    if not isinstance(mod, GraphModule):
        return list(args)
    nodes = mod.graph.find_nodes(op="placeholder")
    if len(nodes) != len(args):
        return list(args)
    return [node.meta.get("example_value", value) for node, value in zip(nodes, args, strict=True)]
