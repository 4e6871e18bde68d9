"""Which half of the step a node belongs to, before anything is saved or recomputed.

The forward must run what its results need and what it does for effect; the backward runs what only
its results need. A node that is in neither list is dead.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from aotdist.errors import InternalError
from aotdist.partition.traits import is_effectful, is_getitem, is_late, is_size, is_wait, view_base
from aotdist.program import BACKWARD_ROLES, FORWARD_ROLES, LATE_ROLES, Graph
from aotdist.torch_seam.nodes import inputs_of


@dataclass(frozen=True, slots=True)
class Halves:
    """The two halves of a joint graph.

    Args:
        joint: the graph that is cut.
        order: its nodes, in order, the output left out.
        late: nodes that exist only in the backward: tangents, what was recorded during the backward,
            and all that depends on either.
        backward: the late nodes that the backward's results and effects need, in order, arguments left out.
        forward_roots: nodes whose values the forward must produce whatever is saved.
        backward_roots: nodes that the backward returns.
        written: primals whose value is replaced once the forward is over.
        rng: seed and offset, which both halves are given.
        must_save: nodes that are never recomputed; a tag on a view is one on its base.
        must_recompute: nodes that are never saved; a collective and its wait go together.
    """

    joint: Graph
    order: tuple[Node, ...]
    late: frozenset[Node]
    backward: tuple[Node, ...]
    forward_roots: tuple[Node, ...]
    backward_roots: tuple[Node, ...]
    written: frozenset[Node]
    rng: frozenset[Node]
    must_save: frozenset[Node]
    must_recompute: frozenset[Node]

    def early(self) -> tuple[Node, ...]:
        """The nodes that are not late, in order: no late node is among their inputs."""
        return tuple(n for n in self.order if n not in self.late)

    def boundary(self) -> list[Node]:
        """Early values that the backward reads or returns itself, each once, in order of first use."""
        reads = (i for node in self.backward for i in inputs_of(node))
        wanted = dict.fromkeys([*reads, *self.backward_roots])
        return [n for n in wanted if n not in self.late and not is_size(n)]


def results_of(graph: Graph, roles: Container[str]) -> list[Node]:
    """Result nodes whose slots have one of `roles`, absent ones left out."""
    named = zip(graph.outs, graph.results(), strict=True)
    return [node for slot, node in named if slot.role in roles and node is not None]


def find_halves(joint: Graph) -> Halves:
    """Sorts the joint graph's nodes into halves.

    Raises:
        InternalError: an output or a forward write depends on a tangent.
    """
    order = tuple(n for n in joint.gm.graph.nodes if n.op != "output")
    tangents = _late_arguments(joint)
    _check_forward(joint, joint.descendants(tangents))
    forward_results = results_of(joint, FORWARD_ROLES)
    forward_needs = joint.ancestors(forward_results)
    late = _late_nodes(order, tangents, forward_needs)
    effects = [n for n in order if is_effectful(n)]
    backward_roots = results_of(joint, BACKWARD_ROLES)
    backward_needs = joint.ancestors([*backward_roots, *(n for n in effects if n in late)])
    must_save = must_save_of(order)
    return Halves(
        joint=joint,
        order=order,
        late=frozenset(late),
        backward=tuple(n for n in order if n in late and n in backward_needs and n.op != "placeholder"),
        forward_roots=(*forward_results, *(n for n in effects if n not in late)),
        backward_roots=tuple(backward_roots),
        written=overwritten_primals(joint),
        rng=frozenset(n for slot, n in joint.named_placeholders().items() if slot.role == "rng"),
        must_save=must_save,
        must_recompute=must_recompute_of(order, never=must_save | set(effects)),
    )


def _late_arguments(joint: Graph) -> list[Node]:
    return [node for slot, node in joint.named_placeholders().items() if slot.role in LATE_ROLES]


def overwritten_primals(joint: Graph) -> frozenset[Node]:
    """The arguments whose value is replaced once the forward is over."""
    writes = {(slot.path, slot.inner) for slot in joint.outs if slot.role == "write"}
    named = joint.named_placeholders().items()
    return frozenset(
        node
        for slot, node in named
        if slot.role == "primal" and ((slot.path, slot.inner) in writes or node.meta.get("overwritten"))
    )


def _late_nodes(order: Sequence[Node], tangents: Iterable[Node], forward_needs: set[Node]) -> set[Node]:
    """What only the backward runs; waiting for a value or picking it out goes with its source."""
    late = set(tangents)
    for node in order:
        if node in forward_needs or node.op in ("placeholder", "get_attr"):
            continue
        recorded_late = is_late(node) and not _follows_source(node)
        if recorded_late or any(i in late for i in inputs_of(node)):
            late.add(node)
    return late


def _follows_source(node: Node) -> bool:
    """Whether a node has no say of its own: it waits for its source, or picks out one of its results."""
    return is_getitem(node) or is_wait(node)


def must_save_of(order: Sequence[Node]) -> frozenset[Node]:
    """Nodes that are tagged not to be made again."""
    pinned: set[Node] = set()
    for node in order:
        if node.meta.get("policy") == "must_save":
            base = view_base(node)
            pinned.add(base)
            while _follows_source(base):
                base = view_base(base.all_input_nodes[0])
                pinned.add(base)
    return frozenset(pinned)


def must_recompute_of(order: Sequence[Node], never: Container[Node]) -> frozenset[Node]:
    """Nodes that are tagged not to be saved, unless `never` has them."""
    tagged = {n for n in order if n.meta.get("policy") == "must_recompute"}
    for node in reversed(order):
        if node in tagged and _follows_source(node):
            tagged.update(node.all_input_nodes)
    recomputed: set[Node] = set()
    for node in order:
        if _follows_source(node):
            is_wanted = node.all_input_nodes[0] in recomputed
        else:
            is_wanted = node in tagged
        if is_wanted and node not in never:
            recomputed.add(node)
    return frozenset(recomputed)


def _check_forward(joint: Graph, after_tangents: set[Node]) -> None:
    for slot, node in zip(joint.outs, joint.results(), strict=True):
        if slot.role in FORWARD_ROLES and node in after_tangents:
            raise InternalError(
                f"{slot.role} `{slot}` (`{node.name}`) depends on a tangent, so no forward can compute it",
                where=node.meta.get("source"),
                stage="partition",
                fix="report this: what a forward returns is computed before a tangent is used",
            )
