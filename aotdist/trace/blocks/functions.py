"""Functions of one tensor that are recorded once for each kind of argument, and copied from then on.

These are the operators that FSDP2's hooks call for each parameter, outside of any block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from aotdist.torch_seam.functional import (
    FakeMetadata,
    FunctionalTensor,
    functional_value,
    is_functional_base,
)
from aotdist.torch_seam.modes import torch_functions_off
from aotdist.torch_seam.tensors import storage_id
from aotdist.trace.blocks.kinds import Unfit, metadata_of
from aotdist.trace.blocks.recording import (
    Copying,
    Step,
    check_copyable,
    closes_over,
    metadata_of_values,
    nodes_since,
)
from aotdist.trace.recorder import Recorder
from aotdist.trace.tracer import STAMPED


@dataclass(frozen=True, slots=True, eq=False)
class _Chain:
    """What a function recorded.

    Args:
        given: the node of its argument.
        steps: what it recorded.
        result: the node of its result.
        metadata: the metadata of its values, by identity.
    """

    given: Node
    steps: tuple[Step, ...]
    result: Node
    metadata: dict[int, FakeMetadata]


class Functions:
    """What such functions recorded in one trace.

    Args:
        recorder: records the program.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[Hashable, _Chain | None] = {}
        """By what decides what is recorded; None for what cannot be copied."""

    def call(
        self, key: Hashable, function: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor
    ) -> torch.Tensor:
        """The result of a function; see `aotdist.torch_seam.proxies.recorded_once`."""
        if not isinstance(given, FunctionalTensor):
            return function(given)
        with torch_functions_off():
            node = self._recorder.value(given)
            try:
                key = key, metadata_of(functional_value(given))
            except Unfit:
                self._known[key] = None
            if (chain := self._known.get(key)) is not None:
                return self._copied(chain, node)
        if key in self._known:
            return function(given)
        nodes = self._recorder.tracer.graph.nodes
        last = next(iter(reversed(nodes)), None)
        result = function(given)
        with torch_functions_off():
            self._known[key] = self._chain(node, nodes_since(nodes, last), result)
        return result

    def _chain(self, given: Node, made: Sequence[Node], result: torch.Tensor) -> _Chain | None:
        """What a call recorded; None if that cannot be copied for another call."""
        if not isinstance(result, FunctionalTensor) or not is_functional_base(result):
            return None
        end = self._recorder.value(result)
        if end not in made or closes_over(made, [given]):
            return None
        try:
            check_copyable(made, self._recorder)
            steps = tuple(map(Step.of, made))
            return _Chain(given, steps, end, metadata_of_values(steps))
        except Unfit:
            return None

    def _copied(self, chain: _Chain, given: Node) -> torch.Tensor:
        stamp = self._recorder.tracer.stamp
        copying = Copying(
            recorder=self._recorder,
            copies={chain.given: given},
            known=chain.metadata,
            memory={storage_id(chain.given.meta["val"]): given.meta["val"]},
            meta=lambda recorded: {k: v for k, v in recorded.items() if k not in STAMPED} | stamp(),
        )
        copying.copy(chain.steps)
        return self._recorder.traced_value(copying.copies[chain.result])
