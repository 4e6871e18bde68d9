"""What a rank runs in `test_bucket_ranks.py`: a graph as recorded, then bucketed and overlapped."""

from __future__ import annotations

import torch
import torch.distributed as dist

from aotdist.partition import partition
from aotdist.passes.run import run_passes
from aotdist.program import Graph
from aotdist.settings import Settings
from tests.partition.running import assert_same_bits
from tests.passes.fsdp_graphs import REPLICA_GROUP, SHARD_GROUP, Layout, record_mlp

UNITS = [[(8, 5), (6, 8)], [(7, 6), (5, 7), (3, 5)], [(4, 3)]]


def runs_alike(reduce_dtype: torch.dtype) -> int:
    """Number of collectives in the merged graphs; raises where a bit differs."""
    layout = Layout(2, param_dtype=reduce_dtype, reduce_dtype=reduce_dtype)
    split = partition(record_mlp(UNITS, layout, rank=dist.get_rank()), "default")
    return _assert_alike(split.forward, "forward") + _assert_alike(split.backward, "backward")


def _assert_alike(graph: Graph, stage: str) -> int:
    merged, _ = run_passes(graph, stage, Settings())  # type: ignore[arg-type]
    names = {SHARD_GROUP: dist.group.WORLD.group_name, REPLICA_GROUP: dist.group.WORLD.group_name}
    for one in (graph, merged):
        _rename_groups(one, names)
    args = [torch.randn(n.meta["val"].shape).to(n.meta["val"].dtype) for n in graph.placeholders()]
    with torch.no_grad():
        assert_same_bits(merged.gm(*args), graph.gm(*args))
    return sum("_c10d" in str(n.target) and "wait" not in str(n.target) for n in merged.gm.graph.nodes)


def _rename_groups(graph: Graph, names: dict[str, str]) -> None:
    """Recorded graphs name groups that do not exist; these ranks have only the default one."""
    for node in graph.gm.graph.nodes:
        node.args = tuple(names.get(arg, arg) if isinstance(arg, str) else arg for arg in node.args)
    graph.gm.recompile()
