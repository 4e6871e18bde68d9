"""The min-cut policy: save the fewest bytes, and make the rest again from them.

The idea of trading recomputation for memory is Chen et al., "Training Deep Nets with Sublinear
Memory Cost" (2016); that one minimum cut decides it for a whole graph is known from PyTorch's own
partitioner. The formulation is ours.

The problem. The backward reads some forward values (the boundary). Each must be saved or made
again, which needs its inputs, each saved or made again in turn. Choose what is saved so that

    bytes of saved storage  +  bytes written / 64  +  a tie's weight x number of operators that run twice

is least. Bytes are *written* to save what a compiler that fuses would keep in registers: of two choices of
about the same size, the one through results of library calls spares a kernel the writing. A tie weighs so
little that a byte always counts for more.

The network. Every forward value that the boundary can be made from is an item of `Network`, which is split in
two, `in -> out`, by an edge that costs what saving the item costs:

- cutting an item = saving it. It costs the bytes of its storage, and more if they are written for it.
  Nothing for an unwritten primal, which is alive anyway; nothing for what an output returns anyway, if
  eager saves it too.
- an item on the sink's side, not cut = made again. That costs a tie; infinitely much if it may not
  be made again, so that such an item is saved or not needed.
- an item feeds its users by edges that cannot be cut, and the boundary feeds the sink.

Why it is right. Let an item on the sink's side be uncut. Each of its inputs feeds it by an uncuttable
edge, so the input's `out` is on the sink's side too: the input is cut (saved) or itself uncut on the
sink's side (made again). By induction everything that is needed is available, and the cut's cost is
the sum above. Conversely every admissible choice is a cut of that cost. So a minimum cut is a best
choice, and no other saves less by more than a 64th. The default policy's choice is one of them, and is taken
where it saves no more; capacities above what it costs are as good as infinite.

Views are never saved: they keep their base's storage alive, so saving the base instead costs the
same and serves every other view. A collective is saved through its wait. Of several results of one
operator, each is saved by itself.

What may be made again (`recomputable.py` has the tables): cheap operators that a compiler fuses away,
views, and whatever is tagged `must_recompute`. Never: random draws and other effects, values tagged
`must_save`, the source of a forward write, a copy of an argument (the caller may write the argument
before the backward). And for speed rather than bytes:

- not a value that is read again beyond a library call that itself depends on it, such as a residual
  stream: chains of them would reach through all layers, and each link would be held until its own
  layer's backward, so that peak memory gained nothing;
- not more than `LONGEST_CHAIN` operators in a row.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from aotdist.partition.halves import Halves, results_of
from aotdist.partition.policy import default_saved
from aotdist.partition.recomputable import chain_breaks, is_border, is_cheap
from aotdist.partition.split import saved_bytes
from aotdist.partition.traits import (
    is_collective,
    is_getitem,
    is_size,
    is_view,
    is_wait,
    storage_root,
    value_bytes,
)
from aotdist.torch_seam.nodes import inputs_of

NEVER = 1 << 90
"""What costs this is left out of a cut: 10**15 bytes of 10**6 items cost less."""


class Network:
    """Items, what they cost, and who feeds whom; a flow through it finds a cheapest cut.

    Each needed item is filled in turn, along shortest paths (Dinic, 1970). Once no more flow reaches an item,
    none ever will: a path from the source through the places behind it would go on to the item. So these are
    skipped from then on. Which items are saved depends on nearby items only, so each is filled from its
    neighbourhood: 64 layers take 35 ms. scipy's flow through the whole network takes 5 ms, and 140 to import.

    Item i is places 2i (in) and 2i+1 (out); the source comes last. Arcs come in pairs: the way back along
    `arc` is `arc ^ 1`.

    Args:
        save_cost: for each item, what cutting it costs.
        again_cost: for each item, what leaving it on the sink's side costs; 0 for nothing.
        edges: pairs (feeding item, fed item), never cut.
        needed: items that feed the sink.
    """

    def __init__(
        self,
        save_cost: Sequence[int],
        again_cost: Sequence[int],
        edges: Sequence[tuple[int, int]],
        needed: Sequence[int],
    ) -> None:
        self.save_cost, self.again_cost, self.edges, self.needed = save_cost, again_cost, edges, needed
        self._source = 2 * len(save_cost)
        self._ends: list[int] = []
        self._room: list[int] = []
        self._arcs: list[list[int]] = [[] for _ in range(self._source + 1)]
        self._full: set[int] = set()  # places from which an item that was filled can be reached
        for item, (save, again) in enumerate(zip(save_cost, again_cost, strict=True)):
            self._connect(2 * item, 2 * item + 1, save)
            if again:
                self._connect(self._source, 2 * item, again)
        for feeding, fed in edges:
            self._connect(2 * feeding + 1, 2 * fed, NEVER)

    def cut(self) -> list[int]:
        """The items of a cheapest cut, of all cheapest the one nearest to the sink."""
        for item in self.needed:
            self._fill(2 * item + 1)
        full = self._full
        return [i for i in range(len(self.save_cost)) if 2 * i + 1 in full and 2 * i not in full]

    def _connect(self, start: int, end: int, room: int) -> None:
        self._arcs[start].append(len(self._ends))
        self._arcs[end].append(len(self._ends) + 1)
        self._ends += (end, start)
        self._room += (room, 0)

    def _fill(self, target: int) -> None:
        """Let as much flow to a place as can: along all shortest ways, then along those that are left."""
        if target in self._full:
            return
        while self._source in (distances := self._distances(target)):
            self._flow_along_shortest(target, distances)
        self._full.update(distances)

    def _distances(self, target: int) -> dict[int, int]:
        """How far the places are from which a way leads to one; if the source is, no place is further."""
        distances, places = {target: 0}, [target]
        for place in places:  # it grows
            for arc in self._arcs[place]:
                before = self._ends[arc]
                if self._room[arc ^ 1] and before not in distances and before not in self._full:
                    distances[before] = distances[place] + 1
                    places.append(before)
                    if before == self._source:
                        return distances
        return distances

    def _flow_along_shortest(self, target: int, distances: dict[int, int]) -> None:
        """Fill the shortest ways from the source to a place, looked for from their end."""
        ends, room = self._ends, self._room
        untried: dict[int, list[int]] = {}
        way: list[int] = []
        place = target
        while True:
            if place == self._source:
                most = min(room[arc ^ 1] for arc in way)
                for arc in way:
                    room[arc ^ 1] -= most
                    room[arc] += most
                way, place = [], target
                continue
            arcs = untried.get(place)
            if arcs is None:
                arcs = untried[place] = self._arcs[place][:]
            if not arcs:
                if not way:
                    return
                place = ends[way.pop() ^ 1]
                untried[place].pop()
            elif room[arcs[-1] ^ 1] and distances.get(ends[arcs[-1]]) == distances[place] + 1:
                way.append(arcs[-1])
                place = ends[arcs[-1]]
            else:
                arcs.pop()


def min_cut_saved(halves: Halves) -> set[Node]:
    """The forward values and primals of fewest bytes from which the backward can start.

    The choice of `default_saved` is returned where the cut is no better.
    """
    default = default_saved(halves)
    problem = Problem.of(halves, default)
    saved = problem.solve()
    return saved if problem.num_bytes(saved) < problem.num_bytes(default) else default


_WRITTEN = 64
"""Bytes that are written for being saved count for a 64th of a saved byte: enough to prefer the logits of a
loss, with a maximum for each row, to what is left of them without it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What a cut is looked for in.

    Args:
        items: forward values that the boundary can be made from, primals and constants included.
        fixed: items that may not be made again.
        free: storage that costs nothing to keep.
        unsaveable_outputs: storage of outputs that eager does not save; saving it would turn the
            caller's in-place write to the output into an error.
    """

    halves: Halves
    items: tuple[Node, ...]
    fixed: frozenset[Node]
    free: frozenset[Node]
    unsaveable_outputs: frozenset[Node]

    @classmethod
    def of(cls, halves: Halves, default: set[Node]) -> Problem:
        """The problem that `halves` pose, when eager would save `default`."""
        fixed = _fixed(halves)
        order = halves.order
        reachable = halves.joint.ancestors(halves.boundary(), stop=fixed)
        outputs = {storage_root(n) for n in results_of(halves.joint, {"output"})}
        kept_by_eager = {storage_root(n) for n in default}
        primals = {n for n in order if n.op == "placeholder" and n not in halves.written}
        return cls(
            halves=halves,
            items=tuple(n for n in order if n in reachable and not is_size(n)),
            fixed=frozenset(fixed),
            free=frozenset(primals | (outputs & kept_by_eager)),
            unsaveable_outputs=frozenset(outputs - kept_by_eager - primals),
        )

    def may_be_saved(self, node: Node) -> bool:
        """Whether a value can be handed over itself, rather than another from which it follows."""
        if node.op == "get_attr" or node in self.halves.must_recompute or not _is_tensor(node):
            return False
        return not (is_view(node) or is_collective(node) or storage_root(node) in self.unsaveable_outputs)

    def solve(self) -> set[Node]:
        """The best choice."""
        index = {node: i for i, node in enumerate(self.items)}
        remade = [node for node in self.items if node not in self.fixed]
        network = Network(
            save_cost=list(map(self._save_cost, self.items)),
            again_cost=list(map(self._again_cost, self.items)),
            edges=[(index[i], index[n]) for n in remade for i in inputs_of(n) if i in index],
            needed=[index[n] for n in self.halves.boundary() if n.op != "get_attr"],
        )
        return {self.items[i] for i in network.cut()}

    def num_bytes(self, saved: Collection[Node]) -> int:
        """What saving some values costs, operators that run twice left out."""
        roots = {storage_root(node) for node in saved} - self.free
        return saved_bytes(self.halves, saved) + sum(_bytes_written(root) for root in roots) // _WRITTEN

    def _save_cost(self, node: Node) -> int:
        root = storage_root(node)
        if not self.may_be_saved(node):
            return NEVER
        if root in self.free:
            return 0
        ties = len(self.items) + 1  # of one each: all of them together weigh less than a byte
        return (value_bytes(root) + _bytes_written(root) // _WRITTEN) * ties

    def _again_cost(self, node: Node) -> int:
        if node in self.fixed:
            return NEVER
        replayed = is_view(node) or node.op == "get_attr" or node in self.halves.must_recompute
        return 0 if replayed else 1


def _bytes_written(root: Node) -> int:
    """Bytes that are written for being saved."""
    return 0 if _is_in_memory(root) else value_bytes(root)


def _is_in_memory(node: Node) -> bool:
    """Whether a value is written even by a compiler that fuses: by a library call, or for one."""
    made_by = node.all_input_nodes[0] if is_getitem(node) or is_wait(node) else node
    if is_border(made_by) or made_by.op != "call_function":
        return True
    return any(_is_in_memory(user) if is_view(user) else is_border(user) for user in node.users)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _fixed(halves: Halves) -> set[Node]:
    """Early nodes that may not be made again."""
    early = halves.early()
    once = halves.must_save | set(results_of(halves.joint, {"write"})) | _carried_over_borders(early)
    fixed = {n for n in early if _is_fixed(n, halves.must_recompute, once)}
    return fixed | chain_breaks(early, fixed)


def _is_fixed(node: Node, recomputed: Container[Node], once: Container[Node]) -> bool:
    """Whether only the forward may run `node`; `recomputed` are tagged so, `once` may not run twice."""
    if node.op == "get_attr" or node in recomputed:
        return False
    if node.op == "placeholder" or not is_cheap(node):
        return True
    return not is_view(node) and (node in once or _copies_argument(node))


def _copies_argument(node: Node) -> bool:
    if node.target is not torch.ops.aten.clone.default:
        return False
    return storage_root(node.all_input_nodes[0]).op == "placeholder"


def _carried_over_borders(order: tuple[Node, ...]) -> set[Node]:
    """Values that a cheap operator reads beyond a library call.

    A node's level counts the library calls on the longest path to it; such a reader's is higher. What
    is made from nothing is not carried: it can be made anywhere.
    """
    levels: dict[Node, int] = {}
    carried: set[Node] = set()
    for node in order:
        below = max((levels[i] for i in inputs_of(node)), default=0)
        levels[node] = below + is_border(node)
        if is_cheap(node) and not is_view(node):
            carried.update(storage_root(i) for i in inputs_of(node) if levels[i] < levels[node])
    return {node for node in carried if inputs_of(node)}
