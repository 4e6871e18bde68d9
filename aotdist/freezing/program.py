"""One call of a frozen module as a function of its arguments: traced, edited, folded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node

from aotdist.capture.constants import is_leaf
from aotdist.errors import InternalError, UnsupportedProgram
from aotdist.export.assembly import Assembly
from aotdist.export.export_module import refuse_writes
from aotdist.export.trace import Call, ExportTrace, state_of, trace_for_export
from aotdist.facts import DataWritten, IsInput, OutputFact, ViewOfInput, ViewOfOutput
from aotdist.freezing.folding import Constants
from aotdist.freezing.state import FrozenState, unsupported
from aotdist.origins import set_current_line, set_current_module
from aotdist.program import OutIdx
from aotdist.settings import Settings
from aotdist.sizes import Expression, evaluate
from aotdist.torch_seam.functional import is_fake
from aotdist.torch_seam.trees import TreeSpec, pytree

Edit: TypeAlias = Callable[[GraphModule, set[str]], None]
"""Edits a graph, given the names of the inputs that are parameters and buffers; it changes the rounding."""


def frozen_program(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    state: FrozenState,
    constants: Constants,
    edits: Sequence[Edit],
    settings: Settings,
) -> FrozenProgram:
    """Trace one call of a module and compute what depends on its state alone.

    Args:
        constants: those of earlier calls; new ones are added.

    Raises:
        UnsupportedProgram: the module writes its state, or cannot be expressed as a graph.
    """
    # In inference mode eager decomposes fewer operators: the expressions of constants would be others.
    with state.traceable(), torch.inference_mode(False), torch.no_grad():
        call = Call(module, args, dict(kwargs), state_of(module))
        paths = state.named({leaf.path: leaf.value for leaf, _ in call.state})
        traced = trace_for_export(call, {}, settings=settings)
    _refuse_state_writes(traced)
    refuse_writes(traced, joint=False)
    assembly = Assembly(traced, prefix="arg{}_1")
    written = assembly.new_values()
    values = assembly.values()
    gm = assembly.module([*written.values(), *values])
    placeholders = gm.graph.find_nodes(op="placeholder")
    of_state = {
        node.name: paths[leaf.path]
        for node, leaf in zip(placeholders, traced.inputs, strict=True)
        if leaf.kind != "argument"
    }
    for edit in edits:
        edit(gm, set(of_state))
    gm.graph.eliminate_dead_code()
    folded, held = constants.fold(gm, of_state)
    holder = nn.Module()
    vars(holder)["__name__"] = type(module).__name__
    vars(holder)["_buffers"].update(_in_mode_of(traced, held))
    arguments = [leaf for leaf in traced.inputs if leaf.kind == "argument"]
    position = {leaf: at for at, leaf in enumerate(arguments)}
    leaves, sizes = dict(traced.primals()), traced.trace.symbols.sizes()
    return FrozenProgram(
        gm=folded,
        holder=holder,
        written=tuple(position[leaf] for leaf in written),
        same={
            out: position[leaves[fact.input]]
            for out, fact in enumerate(traced.outputs())
            if isinstance(fact, IsInput) and leaves[fact.input] in written
        },
        spec=traced.returned().spec,
        symbols=tuple((name, position[leaves[m.input]], m.dim) for name, m in sizes.symbols),
        guards=sizes.guards,
    )


def _in_mode_of(traced: ExportTrace, constants: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Constants as fake tensors, if arguments are fake: operators do not mix the two."""
    tensors = (leaf.value for leaf in traced.inputs if isinstance(leaf.value, torch.Tensor))
    if not any(map(is_fake, tensors)):
        return constants
    mode = traced.trace.fake_mode
    return {name: mode.from_tensor(value) for name, value in constants.items()}


@dataclass(frozen=True, slots=True)
class FrozenProgram:
    """A call of a frozen module as a function of its arguments, for the pipeline to compile.

    It runs a folded graph, writes the arguments that the module writes, and returns the module's result.

    Args:
        gm: the graph; its inputs are the leaves of the arguments.
        holder: a module whose buffers are the constants; a trace replaces these with its stand-ins.
        written: positions of the leaves that are written; their new values are the first results.
        same: results that are a written leaf, with the position of the leaf.
        symbols: sizes that are symbols in the graph: name, position of the leaf, dimension.
        guards: conditions on these symbols that the graph relies on.
    """

    gm: GraphModule
    holder: nn.Module
    written: tuple[int, ...]
    same: Mapping[int, int]
    spec: TreeSpec
    symbols: tuple[tuple[str, int, int], ...]
    guards: tuple[Expression, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on the leaves of these arguments."""
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=is_leaf)
        self._check_guards(leaves)
        results = list(_Lines(self.gm, self.holder).run(*leaves))
        for at, value in zip(self.written, results, strict=False):
            leaves[at].copy_(value)
        values = results[len(self.written) :]
        for out, at in self.same.items():
            values[out] = leaves[at]
        return pytree.tree_unflatten(values, self.spec)

    def _check_guards(self, leaves: list[Any]) -> None:
        """Evaluate the guards: a trace of this program records them as guards of its own."""
        sizes = {name: leaves[at].size(dim) for name, at, dim in self.symbols}
        for guard in self.guards:
            if not evaluate(guard, sizes):
                raise InternalError(f"a frozen program does not fit its own trace: {guard}", stage="freeze")


class _Lines(Interpreter):
    """Runs a folded graph; a trace records the source lines and modules of its nodes."""

    def __init__(self, gm: GraphModule, holder: nn.Module) -> None:
        super().__init__(gm)
        self.extra_traceback = False  # errors say where they come from themselves
        self._constants = vars(holder)["_buffers"]

    def run_node(self, n: Node) -> Any:
        """Run one node."""
        set_current_module(n.meta.get("module", ""))
        set_current_line(n.meta.get("source", ""))
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A constant of the holder, or another attribute of the graph's module."""
        found = self._constants.get(target)
        return super().get_attr(target, args, kwargs) if found is None else found


def _refuse_state_writes(traced: ExportTrace) -> None:
    """Refuse a program that writes its state, or returns a view of an argument that it writes."""
    facts, leaves = traced.trace.facts, dict(traced.primals())
    for idx, leaf in leaves.items():
        if isinstance(facts.inputs[idx], DataWritten) and leaf.kind != "argument":
            raise _written(leaf.path)
    for place, _ in traced.returned().assigned():
        raise _written(place.path)
    outputs = traced.outputs()
    for position, fact in enumerate(outputs):
        fact = _of_base(fact, outputs)
        if isinstance(fact, ViewOfInput) and isinstance(facts.inputs[fact.base], DataWritten):
            what = f"`out[{position}]` is a view of `{leaves[fact.base].path}`, which is written"
            raise unsupported(what, "return a clone of it, or take the view outside")


def _of_base(fact: OutputFact, outputs: list[OutputFact]) -> OutputFact:
    while isinstance(fact, ViewOfOutput) and fact.steps:
        fact = outputs[OutIdx(fact.base)]
    return fact


def _written(path: str) -> UnsupportedProgram:
    return unsupported(
        f"`{path}` is written by a call, and frozen state stays as it is",
        "pass it as an argument and return its new value, or compile without freezing: `aotdist.compile`",
    )
