"""Tensors that the program exchanges: `torch.utils.swap_tensors`.

What a trace notes (views, changes, which input a stand-in is for) belongs to a tensor, and is found by its
Python object. When two objects exchange their tensors, all that was noted is exchanged as well, so nothing
else in the trace needs to know. Outside, exchanges come last: results are made and inputs written as if there
were none, then the objects are swapped in the order of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import swap_tensors

from aotdist.convention.swapping import Exchange
from aotdist.convention.view_log import ViewLog
from aotdist.errors import UnsupportedProgram
from aotdist.facts import IsInput, Place, Swap, ViewOfOutput
from aotdist.joint.failures import refusal
from aotdist.joint.inputs import Inputs
from aotdist.joint.recorder import Recorder
from aotdist.joint.storages import Storages
from aotdist.program import OutIdx
from aotdist.torch_seam.modes import torch_functions_off
from aotdist.torch_seam.swaps import swap_attributes, swap_contents, use_count


@dataclass(frozen=True, slots=True)
class _Swapped:
    exchange: Exchange
    poisoned: tuple[bool, bool]


class Swaps:
    """Is told of swaps, and repeats them in the trace.

    Args:
        inputs: the stand-ins.
        log: views and changes.
        storages: what the program knows of storages.
        recorder: where the program is recorded.
        stand_in: the stand-in of a tensor that the program closes over.
    """

    def __init__(
        self,
        inputs: Inputs,
        log: ViewLog,
        storages: Storages,
        recorder: Recorder,
        stand_in: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._inputs, self._log, self._storages = inputs, log, storages
        self._recorder, self._stand_in = recorder, stand_in
        self._swapped: list[_Swapped] = []
        self._now: dict[int, torch.Tensor] = {}
        """By the identity of an object: the object that has the tensor which it had at first."""

    def hear(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Swap two tensors, whose Python attributes are exchanged already."""
        swap_attributes(first, second)  # back: they may be real
        pair = first, second
        if any(map(self._recorder.is_foreign, pair)):
            with torch_functions_off():
                stand_ins = [self._stand_in(t) if self._recorder.is_foreign(t) else t for t in pair]
            swap_tensors(*stand_ins)
        elif first is not second:
            self._refuse(pair)
            self._swap(Exchange(first, second))

    def _swap(self, exchange: Exchange) -> None:
        first, second = exchange.first, exchange.second
        self._swapped.append(_Swapped(exchange, (use_count(first) > 1, use_count(second) > 1)))
        swap_contents(first, second)
        for book in (self._inputs, self._log, self._recorder):
            book.exchange(exchange)
        known = {id(first): first, id(second): second, **self._now}
        self._now = {key: exchange.of(tensor) for key, tensor in known.items()}

    def _refuse(self, pair: Sequence[torch.Tensor]) -> None:
        if self._recorder.phase == "backward":
            raise _refuse("in the backward")
        for tensor in pair:
            if self._storages.has_looked_at(tensor):
                raise _refuse("after its storage was asked for")
            if use_count(tensor) > 1 and self._log.changes_of(tensor):
                raise _refuse("after its size, storage or history was written in place")

    def seen_outside(self, outs: Sequence[Any]) -> list[Any]:
        """`outs` as they would be without swaps, then the other swapped tensors that are no inputs.

        Outside, they are made so, and swapped afterwards.
        """
        found = [self._now.get(id(out), out) for out in outs]
        known = set(map(id, found))
        others = [t for t in self._now.values() if self._inputs.index_of(t) is None and id(t) not in known]
        return [*found, *others]

    def actions(self, outs: Sequence[Any]) -> list[Swap]:
        """The swaps to do outside, last; `outs` are those of `seen_outside`."""
        first = {id(out): OutIdx(position) for position, out in reversed([*enumerate(outs)])}

        def place(tensor: torch.Tensor) -> Place:
            made = self._now[id(tensor)]
            as_input = self._inputs.index_of(made)
            return ViewOfOutput(first[id(made)], ()) if as_input is None else IsInput(as_input)

        return [
            Swap(place(swapped.exchange.first), place(swapped.exchange.second), swapped.poisoned)
            for swapped in self._swapped
        ]

    def refuse_with(self, written: Sequence[Any]) -> None:
        """Refuse writes in the backward: by then, other tensors are in the inputs' places.

        Raises:
            UnsupportedProgram: it writes something, and tensors are swapped.
        """
        if written and self._swapped:
            raise _refuse("and the backward writes a tensor")


def _refuse(how: str) -> UnsupportedProgram:
    return refusal(
        f"a tensor is swapped with another by `torch.utils.swap_tensors` {how}",
        fix="swap them outside of the compiled function, or assign `.data`",
    )
