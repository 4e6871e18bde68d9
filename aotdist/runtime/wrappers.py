"""Checks that wrappers whose plain tensors were saved are not written before the backward.

Autograd compares the version counters of saved tensors, which are plain tensors. A write to a wrapper around
them, or to its views, increases the wrapper's own counter only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from aotdist.convention.stack import Plans
from aotdist.convention.subclass import plain_positions
from aotdist.facts import Facts, NodeOut
from aotdist.partition.traits import view_base
from aotdist.program import NodeOutIdx, PlainIdx, PrimalIdx, Row, Slot, Split
from aotdist.subclasses.protocol import Wrapper, leaves

Versions: TypeAlias = tuple[tuple[torch.Tensor, int], ...]
"""Tensors that share the version counters of wrappers, each with the version in the forward."""


@dataclass(frozen=True, slots=True)
class SavedWrappers:
    """The wrappers that share memory with values saved by the node.

    Args:
        ins: those among the inputs.
        outs: those among the outputs.
        names: of all of them, inputs first.
    """

    ins: tuple[PrimalIdx, ...]
    outs: tuple[NodeOutIdx, ...]
    names: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.names)

    @classmethod
    def of(
        cls,
        facts: Facts,
        plans: Plans,
        split: Split,
        names: Row[PrimalIdx, Slot],
        outs: Row[NodeOutIdx, NodeOut],
    ) -> SavedWrappers:
        """The wrappers that share memory with what the forward graph saves for the backward graph.

        Args:
            facts: of the program.
            plans: of the convention layers.
            split: the two graphs.
            names: of the inputs.
            outs: what the node returns.
        """
        saved = _saved(split)
        given = {node: at for at, node in enumerate(split.forward.placeholders())}
        taken = {PlainIdx(given[node]) for node in saved if node in given}
        # These are written by the call itself, outside of the node.
        repeated = facts.reshaped() | {idx for idx, _, _ in plans.writes.writes}
        repeated |= facts.backward.writes.keys()
        ins = tuple(
            idx
            for idx, plains in plain_positions(facts.recipes).enumerate()
            if isinstance(facts.recipes[idx], Wrapper)
            and idx not in repeated
            and not taken.isdisjoint(plains)
        )
        made = tuple(idx for idx, nodes in _wrapped(split, outs) if not saved.isdisjoint(nodes))
        return cls(ins, made, (*(names[idx].path for idx in ins), *(outs[idx].slot.path for idx in made)))


def _saved(split: Split) -> set[torch.fx.Node]:
    """The nodes of the forward graph that own the memory of the saved values."""
    results = dict(zip(split.forward.outs, split.forward.results(), strict=True))
    inputs = split.forward.named_placeholders()
    found = (
        inputs[split.saved_primals[slot]] if slot in split.saved_primals else results[slot]
        for slot in split.saved
    )
    return {view_base(node) for node in found if node is not None}


def _wrapped(
    split: Split, outs: Row[NodeOutIdx, NodeOut]
) -> Iterator[tuple[NodeOutIdx, list[torch.fx.Node]]]:
    """The wrappers that the node returns to the user, each with the nodes that own its memory."""
    results = iter(split.forward.results())
    for idx, out in outs.enumerate():
        nodes = [next(results) for _ in leaves(out.recipe)]
        if isinstance(out.recipe, Wrapper) and out.slot.role == "output":
            yield idx, [view_base(node) for node in nodes if node is not None]


def check_unwritten(versions: Versions, names: Sequence[str]) -> None:
    """Check that no wrapper has been written since the forward.

    Raises:
        RuntimeError: one was; with autograd's message.
    """
    for position, (wrapper, version) in enumerate(versions):
        if wrapper._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: `{names[position]}`, of size {list(wrapper.size())}, is at version "
                f"{wrapper._version}; expected version {version} instead"
            )
