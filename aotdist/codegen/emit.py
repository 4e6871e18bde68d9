"""Compiles the graphs of one program: an inference graph, or both halves of a training graph.

The backward is compiled for saved values and tangents of the strides that the compiler chose for the
forward's outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from aotdist.codegen.ahead import Ahead
from aotdist.codegen.contract import Backend, Emission, Emitted, Kind, Strides, finished
from aotdist.codegen.cuda_graphs import with_cuda_graphs
from aotdist.codegen.fx import FxBackend, warn_of_fx
from aotdist.codegen.marks import with_marks
from aotdist.codegen.numbers import read_sizes_ahead, split_off_numbers
from aotdist.codegen.regions import emit_by_regions
from aotdist.codegen.rewrites import gathers_into_buffers, takes_any_strides
from aotdist.errors import UnsupportedProgram
from aotdist.program import Graph, Role, Slot, Split
from aotdist.settings import Settings
from aotdist.torch_seam.functional import FakeTensorMode, new_fake
from aotdist.torch_seam.symbols import surely_equal


@dataclass(frozen=True, slots=True)
class EmittedHalves:
    """Forward and backward, compiled.

    Args:
        forward: primals -> results, saved values.
        backward: saved values, tangents -> gradients, writes.
        tangent_strides: the strides that backwards are compiled for; none if they take any.
        saved_strides: those of saved values, where the forward's compiler chose them.
    """

    forward: Emitted
    backward: Emitted
    tangent_strides: Mapping[Slot, Strides]
    saved_strides: Mapping[Slot, Strides]


@dataclass(frozen=True, slots=True)
class Emitter:
    """Compiles graphs with one backend.

    Args:
        backend: turns graphs into callables.
        static: slots of the plain tensors that keep their address: parameters and buffers.
        fake_mode: the mode of the graphs' `val`s.
        settings: how to compile.
        name: a word for files and tracebacks.
    """

    backend: Backend
    static: Collection[Slot]
    fake_mode: FakeTensorMode
    settings: Settings
    name: str

    def inference(self, graph: Graph) -> Emitted:
        """Compile a program that is never differentiated."""
        emitted = self._emit(graph, "inference", graph.ins)
        done = self._finished(emitted)
        return self.of_reference().inference(graph) if done is None else done[0]

    def halves(self, split: Split, whole: Graph) -> EmittedHalves:
        """Compile both halves; the second is generated while the first is still being built.

        Args:
            split: the two halves.
            whole: the backward of all results; that of `split` may be of some.
        """
        forward = self._emit(split.forward, "forward", split.forward.ins)
        chosen = _chosen_strides(split.forward, forward)
        tangents = {
            slot: chosen.get(Slot(_forward_role(split, slot), slot.path, slot.inner), _strides_of(node))
            for slot, node in whole.named_placeholders().items()
            if slot.role == "tangent"
        }
        saved = {slot: chosen[slot] for slot in split.saved if slot in chosen}
        backward = self._emit_backward(split, split.backward, {**saved, **tangents})
        done = self._finished(forward, backward)
        if done is None:
            return self.of_reference().halves(split, whole)
        forward, backward = done
        loose = self.takes_any_strides(whole) and self.takes_any_strides(split.backward)
        return EmittedHalves(forward, backward, {} if loose else tangents, saved)

    def takes_any_strides(self, backward: Graph) -> bool:
        """Whether a backward, compiled, takes tangents of other strides than their `val`s."""
        return self.backend.any_tangents and takes_any_strides(backward)

    def another_backward(self, split: Split, halves: EmittedHalves, graph: Graph) -> Emitted:
        """Compile a backward that takes what `halves.forward` saved, beside the one in `halves`."""
        backward = self._emit_backward(split, graph, {**halves.saved_strides, **halves.tangent_strides})
        done = self._finished(backward)
        return self.reference_backward(graph) if done is None else done[0]

    def _finished(self, *emitted: Emitted) -> list[Emitted] | None:
        """Graphs once they may be used; None if `fx` is to emit the program instead."""
        done, failures = list[Emitted](), list[UnsupportedProgram]()
        for each in emitted:
            try:
                done.append(finished(each))
            except UnsupportedProgram as failure:
                failures.append(failure)
        if failures and not any(each.else_fx for each in emitted):
            raise failures[0]
        for failure in failures[:1]:
            warn_of_fx(failure)
        return None if failures else done

    def of_reference(self) -> Emitter:
        """The same with the `fx` backend."""
        return replace(self, backend=FxBackend())

    def reference_backward(self, graph: Graph) -> Emitted:
        """Compile a backward with `fx`, for every size that the trace allows."""
        return FxBackend().emit(graph, Emission("backward", self.fake_mode, self.settings, name=self.name))

    def _emit_backward(self, split: Split, graph: Graph, strides: Mapping[Slot, Strides]) -> Emitted:
        restrided = with_strides(graph, strides, self.fake_mode)
        origins = [split.saved_primals.get(slot, slot) for slot in restrided.ins]
        return self._emit(restrided, "backward", origins)

    def _emit(self, graph: Graph, kind: Kind, origins: Collection[Slot]) -> Emitted:
        static = frozenset(position for position, slot in enumerate(origins) if slot in self.static)
        saved = frozenset(position for position, slot in enumerate(origins) if slot.role == "saved")
        graph = gathers_into_buffers(graph)
        emission = Emission(kind, self.fake_mode, self.settings, static, self.name, saved)
        wholes = list[Callable[[Emitted], Emitted]]()
        cuts = partial(split_off_numbers, fake_mode=self.fake_mode), read_sizes_ahead
        # The reference emitter runs functions of numbers like any operator.
        for cut in () if isinstance(self.backend, FxBackend) else cuts:
            if (parts := cut(graph)) is not None:
                graph, whole = parts
                wholes.append(whole)
        emitted = emit_by_regions(self.backend, graph, emission)
        runs_here = not isinstance(emitted.call, Ahead)
        if self.settings.cuda_graphs:
            # What was recorded is replayed as a whole.
            emitted = replace(with_cuda_graphs(emitted, graph, emission), with_modules=None)
        if runs_here:
            emitted = with_marks(emitted, graph, f"{emission.name} {kind}")
        return functools.reduce(lambda rest, whole: whole(rest), reversed(wholes), emitted)


def _forward_role(split: Split, tangent: Slot) -> Role:
    as_write = Slot("write", tangent.path, tangent.inner)
    return "write" if as_write in split.forward.outs else "output"


def _chosen_strides(graph: Graph, emitted: Emitted) -> dict[Slot, Strides]:
    if emitted.output_strides is None:
        return {}
    pairs = zip(graph.outs, emitted.output_strides, strict=True)
    return {slot: strides for slot, strides in pairs if strides is not None}


def _strides_of(node: torch.fx.Node) -> Strides:
    return tuple(node.meta["val"].stride())


def with_strides(graph: Graph, strides: Mapping[Slot, Strides], fake_mode: FakeTensorMode) -> Graph:
    """`graph` with other strides on some arguments; the same graph when nothing differs."""
    different = {
        slot: strides[slot]
        for slot, node in graph.named_placeholders().items()
        if slot in strides and not surely_equal(strides[slot], _strides_of(node))
    }
    if not different:
        return graph
    changed = graph.copied()
    for slot, node in changed.named_placeholders().items():
        if slot in different:
            val = node.meta["val"]
            node.meta["val"] = new_fake(fake_mode, val.size(), different[slot], val.dtype, val.device)
    return changed
