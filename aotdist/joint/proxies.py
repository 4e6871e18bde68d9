"""The recorder: plain-tensor operations become FX nodes; arguments may be added at any moment.

Below the user's function stand, from top to bottom, functionalisation (writes become new values),
proxies (values become nodes) and fake tensors (no data is touched). A tangent, or a tensor that the
function merely closes over, is met in the middle of the trace, so `argument` can be called at any
time: its placeholder is inserted after those that are already there.

Every node is stamped with where it comes from, see `aotdist.program.Graph`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from aotdist.capture.annotations import current_module, current_tags
from aotdist.capture.origins import Origins
from aotdist.errors import InternalError
from aotdist.joint.functional import Functionalisation
from aotdist.joint.random import Draws
from aotdist.joint.recording import Recording
from aotdist.program import Graph, Slot
from aotdist.subclasses.protocol import Plain
from aotdist.torch_seam import (
    FakeTensorMode,
    FunctionalTensor,
    OpOverload,
    PythonKeyTracer,
    TracingContext,
    decomposing,
    functional,
    functional_storage_id,
    functional_value,
    graph_module,
    is_functional_base,
    next_sequence_nr,
    no_modes,
    node_of,
    own_autocast_cache,
    running_sequence_nr,
    saved_tensor_hooks_off,
    second_shell,
    tracing,
    track,
)

Phase = Literal["forward", "backward"]


class _Tracer(PythonKeyTracer):
    """FX's tracer for proxies, which stamps every node that it makes."""

    def __init__(self, stamp: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self.root = torch.nn.Module()
        self.tensor_attrs: dict[Any, str] = {}  # literal tensors (`x[0] = 3.0`) become attributes of `root`
        self.graph = torch.fx.Graph(tracer_cls=PythonKeyTracer)
        self.tensor_attrs = {}  # constants met on the way; FX's own entry point sets it up
        self._stamp = stamp

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta.update(self._stamp())
        return node


class Recorder:
    """Records what is done to its arguments. Use as a context manager, then call `graph`.

    Args:
        decompositions: operators to record as simpler ones; empty keeps the program's own.
    """

    def __init__(self, decompositions: Mapping[OpOverload, Callable[..., Any]]) -> None:
        self.fake_mode = FakeTensorMode(static_shapes=True)
        self.phase: Phase = "forward"
        self._tracer = _Tracer(self._stamp)
        self._decompositions = decompositions
        self.draws = Draws()
        self._functionalisation = Functionalisation()
        self._recording = Recording(self._tracer, decompositions, self._stamp, self.draws)
        self._origins = Origins()
        self._first_seq_nr = next_sequence_nr()
        self._forward_origins: dict[int, tuple[str, str]] = {}
        self._slots: list[Slot] = []
        self._last_placeholder: torch.fx.Node | None = None
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        for mode in (
            own_autocast_cache(),
            saved_tensor_hooks_off(),
            self.draws,
            tracing(TracingContext(self.fake_mode)),
            self.fake_mode,
            decomposing(self._decompositions),
            self._recording,
            self._functionalisation,
        ):
            self._exit.enter_context(mode)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._exit.__exit__(*exc)

    def fake(self, example: torch.Tensor) -> torch.Tensor:
        """A fake of a real plain tensor; its storage is not touched."""
        with torch.no_grad(), no_modes():
            return self.fake_mode.from_tensor(example.detach(), static_shapes=True)

    def fake_like(self, plain: Plain, device: torch.device) -> torch.Tensor:
        """A new fake with the metadata of a recipe's leaf."""
        with no_modes(), self.fake_mode:
            return torch.empty_strided(plain.size, plain.stride, dtype=plain.dtype, device=device)

    def second(self, tensor: FunctionalTensor, fake: torch.Tensor) -> FunctionalTensor:
        """Another tensor of the value that `tensor` has: of the memory too, if it is a part of some."""
        return functional(fake) if is_functional_base(tensor) else second_shell(tensor)

    def argument(self, slot: Slot, fake: torch.Tensor, *, overwritten: bool = False) -> FunctionalTensor:
        """A new argument of the graph that stands for `fake`.

        Args:
            slot: its name.
            fake: what it is like.
            overwritten: its memory is written by another name, so that backward cannot keep it.
        """
        graph = self._tracer.graph
        where = (
            graph.inserting_after(self._last_placeholder)
            if self._last_placeholder is not None
            else graph.inserting_before(None)
        )
        with where:
            node = self._tracer.create_node("placeholder", _identifier(slot), (), {})
        node.meta["val"] = fake
        node.meta["overwritten"] = overwritten
        track(fake, node, self._tracer)
        self._last_placeholder = node
        self._slots.append(slot)
        return self._functionalisation.remember(functional(fake))

    def lies_in_more(self, tensor: FunctionalTensor) -> None:
        """The storage of `tensor` holds more than the tensor does."""
        self._functionalisation.rebinding.in_more.add(functional_storage_id(tensor))

    def _stamp(self) -> dict[str, Any]:
        if self.phase == "forward":
            seq_nr = next_sequence_nr() - 1
            source, module = self._origins.current(), current_module()
            # The first operation that an autograd node covers is the one the user wrote.
            self._forward_origins.setdefault(seq_nr, (source, module))
        else:
            seq_nr = running_sequence_nr()
            source, module = self._forward_origins.get(seq_nr, ("", "")) if seq_nr is not None else ("", "")
        stamp: dict[str, Any] = {"phase": self.phase, "source": source, "module": module, **current_tags()}
        if self.phase == "forward":
            stamp["grad"] = torch.is_grad_enabled()
        if seq_nr is not None:
            stamp["seq_nr"] = seq_nr - self._first_seq_nr
        return stamp

    def value(self, tensor: torch.Tensor) -> torch.fx.Node:
        """The node that computes the current value of a traced plain tensor.

        Raises:
            InternalError: the tensor was not made by the program being recorded.
        """
        if not isinstance(tensor, FunctionalTensor):
            raise InternalError(f"a {type(tensor).__name__} reached the graph's results", stage="joint")
        fake = functional_value(tensor)
        node = node_of(fake, self._tracer)
        if node is None:
            raise InternalError(f"no node computes {fake}", stage="joint")
        return node

    def graph(self, results: Sequence[tuple[Slot, torch.fx.Node | None]]) -> Graph:
        """The recorded graph with `results` as its outputs."""
        graph = self._tracer.graph
        graph.output(tuple(node for _, node in results))
        gm = graph_module(self._tracer.root, graph)
        return Graph(gm, tuple(self._slots), tuple(slot for slot, _ in results))


def _identifier(slot: Slot) -> str:
    text = "".join(c if c.isalnum() else "_" for c in str(slot)).strip("_") or "arg"
    return f"{slot.role}_{text}" if slot.role == "tangent" or not text[0].isalpha() else text
