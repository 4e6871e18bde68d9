"""Modules of one kind, called with one kind of inputs, are recorded once, and copied for the others.

Promises: the graph is node for node the one that a trace of every call would have given, names, source lines,
modules, sequence numbers and metadata included. It takes less time: a block's nodes are copied, and neither
its Python, nor autograd's formulas, nor the fake kernels run again. `Settings(instantiate=False)` traces
every call.

1. **Kind** (`kinds.py`): all that decides what a call of a module records: classes, the attributes that it
   reads, the metadata of parameters, buffers and arguments, which of these are one tensor or lie in one
   memory, and the modes around. Symbolic sizes are compared by their expressions. A checkpoint of a module
   counts as a call of it.
2. **Recording** (`recording.py`): the first two calls of a kind are traced as any other. If both recorded the
   same, and leave nothing but results and new values of buffers (no other write to tensors of before, no
   effect in Python, no branch on data), later calls are copied. Any other block is traced at each call, and
   `explain()` says why.
3. **Instance** (`instances.py`): from the third call on the nodes of the forward are copied, what it writes
   is written, and autograd gets one node for all of it. When the backward reaches that node, the backward of
   the recorded call is run by itself, once for each kind of gradients, into a graph of its own, and its nodes
   are copied (`backwards.py`).

What FSDP2's hooks do with each parameter, outside of blocks, is a function of one tensor. It is recorded once
for each kind of tensor, and copied (`functions.py`).

Autograd runs nodes in the order of their sequence numbers, the last first, so the nodes of a block run
without others in between, as the copy does. Where several places in a block, and others outside, send
gradients to one tensor, the copy sends the block's one by one: autograd adds them in the order in which it
does without instances.

An instance cannot be differentiated twice. A program that does so, or that hooks gradients of blocks, is
traced without instances; where gradients of gradients are asked for later, it is traced again
(`retracing.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Copies:
    """Which calls of modules were copied, and which were not.

    Args:
        instances: the path of each module that was called, with that of the one whose call was recorded.
        reasons: why calls of other modules were traced, by path.
    """

    instances: Sequence[tuple[str, str]]
    reasons: Mapping[str, str]

    def by_model(self) -> Mapping[str, int]:
        """For each module that was recorded, how many calls of others were copied of it."""
        return Counter(model for _, model in self.instances)

    def traced(self) -> Mapping[tuple[str, str], int]:
        """How many calls were traced, by path (with `*` for numbers) and reason, without those in others."""
        counts = Counter((_NUMBER.sub("*", path), why) for path, why in self.reasons.items())
        several = {named: count for named, count in counts.items() if count > 1}
        paths = {path for path, _ in several} | {_NUMBER.sub("*", path) for path, _ in self.instances}
        within = tuple(f"{path}." for path in paths if path)
        return {named: count for named, count in several.items() if not named[0].startswith(within)}


NO_COPIES = Copies((), {})
_NUMBER = re.compile(r"\d+")
