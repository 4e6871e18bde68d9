"""Wrappers whose plain tensors a node has saved, and that nobody may write before its backward.

Autograd compares the version counters of what is saved, which are those of plain tensors. A write to the
wrapper around them, to a view of it or to what was detached from it, is counted in the wrapper's own only.
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

Noted: TypeAlias = tuple[tuple[torch.Tensor, int], ...]
"""Tensors that have the version counters of wrappers, and what these said in the forward."""


@dataclass(frozen=True, slots=True)
class SavedWrappers:
    """The wrappers whose memory the saved values of a node share.

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
        """Those that the two graphs share the memory of.

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
        # A write that the call repeats outside of the node is none of the user's.
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
    """The nodes of the forward graph whose memory the saved values share: no views."""
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


def check_unwritten(noted: Noted, names: Sequence[str]) -> None:
    """Raise autograd's error for what was saved and written since.

    Raises:
        RuntimeError: a wrapper was written.
    """
    for position, (wrapper, version) in enumerate(noted):
        if wrapper._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: `{names[position]}`, of size {list(wrapper.size())}, is at version "
                f"{wrapper._version}; expected version {version} instead"
            )
