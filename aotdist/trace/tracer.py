"""FX's tracer for proxies, which stamps every node with where it comes from; see `aotdist.program.Graph`."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.fx.node import map_arg

from aotdist.origins import current_module, current_source_line, current_tags
from aotdist.torch_seam.autograd import ACCUMULATION, next_sequence_nr, running_node
from aotdist.torch_seam.modes import no_modes, torch_functions_off
from aotdist.torch_seam.nodes import Appender, is_erased
from aotdist.torch_seam.proxies import PythonKeyTracer

Phase = Literal["forward", "backward"]

STAMPED = frozenset({"phase", "source", "module", "unit", "policy", "serial", "grad", "function", "seq_nr"})
"""The entries of `node.meta` that `Tracer.stamp` may set."""


class NotInstantiable(Exception):
    """An instance of a block cannot do what the block would do: the program is traced without instances."""


class Tracer(PythonKeyTracer):
    """Makes nodes.

    Attributes:
        phase: whether the forward or the backward is recorded now.
        num_serials: how many serials were given to nodes so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = torch.nn.Module()
        # Literal tensors (`x[0] = 3.0`) become attributes of `root`; FX's own entry point sets this up.
        self.tensor_attrs: dict[Any, str] = {}
        self.graph = torch.fx.Graph(tracer_cls=PythonKeyTracer)
        self.phase: Phase = "forward"
        self.num_serials = 0
        self._first_seq_nr = next_sequence_nr()
        self._skips: list[tuple[int, int]] = []
        self._origins_by_seq_nr: dict[int, tuple[str, str]] = {}
        self._erased: dict[torch.fx.Node, tuple[Any, Any]] = {}
        """Arguments and keyword arguments of nodes that were recorded aside, and are erased."""
        self._replacements: dict[torch.fx.Node, torch.fx.Node] = {}
        """The nodes that were recorded in place of erased ones."""

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """A node, stamped."""
        node = super().create_node(*args, **kwargs)
        node.meta.update(self.stamp())
        return node

    def stamp(self) -> dict[str, Any]:
        """The origin of the operation that runs now, for `node.meta`."""
        seq_nr, function, source, module = self.origin()
        stamp: dict[str, Any] = {"phase": self.phase, "source": source, "module": module, **current_tags()}
        stamp["serial"] = self.next_serial()
        stamp["grad"] = torch.is_grad_enabled()
        if function:
            stamp["function"] = function
        if seq_nr is not None and function != ACCUMULATION:
            stamp["seq_nr"] = self.graph_seq_nr(seq_nr)
        return stamp

    def origin(self) -> tuple[int | None, str, str, str]:
        """Sequence number, autograd node's name, user's line and module of the operation that runs now."""
        seq_nr, function = running_node()
        # The program may call for a backward, too. A node for writes to views has no operator of the forward.
        if self.phase == "backward" or function:
            source, module = self._origins_by_seq_nr.get(seq_nr, ("", "")) if seq_nr is not None else ("", "")
            return seq_nr, function, source, module
        seq_nr = next_sequence_nr() - 1
        # The first operation that an autograd node covers is the one the user wrote.
        origin = current_source_line(), current_module()
        self._origins_by_seq_nr.setdefault(seq_nr, origin)
        return seq_nr, "", *origin

    def erase(self, graph: torch.fx.Graph) -> None:
        """Empty a graph that something was recorded into aside; see `recorded_again`."""
        self._erased.update((node, (node.args, node.kwargs)) for node in graph.nodes)
        for node in reversed(list(graph.nodes)):
            graph.erase_node(node)

    def recorded_again(self, node: torch.fx.Node) -> torch.fx.Node:
        """For a node that was erased, one that computes the same in this graph.

        Functionalisation computes a view of a written tensor when it is first read, and the view then holds
        that value. If it was first read aside (autograd saved the view), later readers find the erased node.

        Raises:
            NotInstantiable: it was an argument of what was recorded aside.
        """
        known = self._replacements.get(node)
        if known is not None and not is_erased(known):
            return known
        if node.op != "call_function":
            raise NotInstantiable("what is computed for a block's instances is read elsewhere")
        given = map_arg(self._erased[node], lambda one: self.recorded_again(one) if is_erased(one) else one)
        meta = {key: value for key, value in node.meta.items() if key not in STAMPED} | self.stamp()
        made = Appender(self.graph).add(node.op, node.target, *given, None, meta)
        self._replacements[node] = made
        return made

    def held(self, name: str) -> Any:
        """What a `get_attr` node of this name reads: a literal tensor, or the graph of an operator."""
        return getattr(self.root, name)

    def constant(self, name: str) -> torch.fx.Node:
        """A node for a copy of a literal tensor."""
        with no_modes(), torch_functions_off():
            made = self.held(name).clone()
        node = self.create_arg(made)
        assert isinstance(node, torch.fx.Node), "of a tensor"
        return node

    def next_serial(self) -> int:
        """The serial of a node that is made now."""
        self.num_serials += 1
        return self.num_serials - 1

    def graph_seq_nr(self, seq_nr: int) -> int:
        """The sequence number that nodes of the graph get for one of autograd's."""
        skipped = next((skipped for first, skipped in reversed(self._skips) if first <= seq_nr), 0)
        return seq_nr - self._first_seq_nr + skipped

    def next_graph_seq_nr(self) -> int:
        """The sequence number in the graph of the next autograd node."""
        return self.graph_seq_nr(next_sequence_nr())

    def continue_seq_nrs_at(self, counted: int) -> None:
        """Let the next autograd node have this sequence number in the graph, as if others had been made."""
        following = next_sequence_nr()
        self._skips.append((following, counted - (following - self._first_seq_nr)))
