"""Inputs whose numbers lie in memory negated: `z.conj().imag` is one.

Inductor's kernels read memory as it is. So it compiles for a tensor of the numbers, and the call makes that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from aotdist.codegen.contract import BoxedCall
from aotdist.torch_seam.modes import no_modes


def materialise_inputs(gm: GraphModule) -> list[int]:
    """Let a graph take their numbers for such inputs; the positions of these.

    Args:
        gm: a private copy of the graph's module.
    """
    positions = list[int]()
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor) and val.is_neg():
            with no_modes(), val.fake_mode:  # type: ignore[attr-defined]
                node.meta["val"] = val.resolve_neg()
            positions.append(position)
    return positions


def materialising(call: BoxedCall, positions: Collection[int]) -> BoxedCall:
    """`call`, given tensors of the numbers at `positions`."""

    def materialised(args: list[Any]) -> Sequence[Any]:
        for position in positions:
            args[position] = args[position].resolve_neg()
        return call(args)

    return materialised
