"""A minimum cut through a directed graph whose nodes, not edges, cost something to cut.

Each item is split in two, `in -> out`, by an edge that costs what saving the item costs; an edge
between items may not be cut. scipy's `maximum_flow` counts in int32 and silently returns 0 beyond,
so costs are scaled to fit (`Scale`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Scale:
    """Turns bytes into integers that int32 flows can carry.

    `factor` units stand for a byte, so that up to `factor - 1` ties of one unit each never outweigh a
    byte; where the whole does not fit, units grow coarser and that order is kept only approximately.
    """

    factor: float
    infinite: int

    @classmethod
    def fitting(cls, upper_bound: int, num_ties: int) -> Scale:
        """For flows of at most `upper_bound` bytes, with `num_ties` costs of one unit."""
        room = (_LARGEST - num_ties - 2) // 2
        factor = min(float(num_ties + 1), room / max(upper_bound, 1))
        return cls(factor, math.ceil(upper_bound * factor) + num_ties + 1)

    def units(self, num_bytes: int) -> int:
        """Bytes in units, rounded up, at most infinite."""
        return min(math.ceil(num_bytes * self.factor), self.infinite)


@dataclass(frozen=True, slots=True)
class Network:
    """Items, what they cost, and who feeds whom.

    Args:
        save_cost: for each item, units that cutting it costs.
        source_cost: for each item, units that leaving it on the sink's side costs; 0 for nothing.
        edges: pairs (feeding item, fed item), never cut.
        needed: items that feed the sink.
        infinite: units that no cut reaches.
    """

    save_cost: Sequence[int]
    source_cost: Sequence[int]
    edges: Sequence[tuple[int, int]]
    needed: Sequence[int]
    infinite: int

    def cut(self) -> list[int]:
        """The items of a cheapest cut, of all cheapest the one nearest to the sink."""
        capacities = self._capacities()
        source, sink = 2 * len(self.save_cost), 2 * len(self.save_cost) + 1
        flow = maximum_flow(capacities, source, sink)
        residual = capacities - flow.flow
        residual.eliminate_zeros()
        reaches = breadth_first_order(residual.T.tocsr(), sink, return_predecessors=False)
        on_sink_side = np.zeros(sink + 1, dtype=bool)
        on_sink_side[reaches] = True
        ins, outs = on_sink_side[0:source:2], on_sink_side[1:source:2]
        return np.flatnonzero(~ins & outs).tolist()

    def _capacities(self) -> csr_array:
        """Item i is nodes 2i (in) and 2i+1 (out); then come the source and the sink."""
        num_items = len(self.save_cost)
        source, sink = 2 * num_items, 2 * num_items + 1
        items = np.arange(num_items)
        feeds = np.asarray(self.edges, dtype=np.int64).reshape(-1, 2)
        needed = np.asarray(self.needed, dtype=np.int64)
        paid = np.flatnonzero(np.asarray(self.source_cost) > 0)
        rows = [2 * items, 2 * feeds[:, 0] + 1, np.full(len(paid), source), 2 * needed + 1]
        columns = [2 * items + 1, 2 * feeds[:, 1], 2 * paid, np.full(len(needed), sink)]
        costs = [
            np.asarray(self.save_cost),
            np.full(len(feeds), self.infinite),
            np.asarray(self.source_cost)[paid],
            np.full(len(needed), self.infinite),
        ]
        values = np.concatenate(costs)
        if values.size and (values.max() > _LARGEST or values.min() < 0):
            raise OverflowError(f"a cost of {values.max()} does not fit the int32 of maximum_flow")
        places = (np.concatenate(rows), np.concatenate(columns))
        return csr_array(coo_array((values.astype(np.int32), places), shape=(sink + 1, sink + 1)))
