"""Whether a graph from a file is what it says: its operators are run once more, on tensors without data.

Each has to take what it is given, and to give a tensor of the sizes and of the dtype that the file tells of
it. So a graph that is loaded runs, and what is derived from its values (kernels' sizes, strides of gradients,
bytes to keep) is of the program that runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from aotdist.artifacts.kinds import NAMES_OF_FUNCTIONS
from aotdist.artifacts.typed import damaged
from aotdist.codegen.fx import attribute_of
from aotdist.facts import (
    Facts,
    Fresh,
    FunctionView,
    IsInput,
    NotATensor,
    OutputFact,
    Step,
    ViewOfInput,
    ViewOfIntermediate,
    ViewOfOutput,
)
from aotdist.passes.verify import verify
from aotdist.program import BACKWARD_ROLES, Graph, PrimalIdx, Program, Row, Slot
from aotdist.runtime.plan import is_plain
from aotdist.subclasses.protocol import Plain, Recipe, Wrapper, leaves, recipe_of
from aotdist.torch_seam.functional import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    quiet_fakes,
)
from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.operators import HigherOrderOperator, OpOverload
from aotdist.torch_seam.symbols import is_open
from aotdist.torch_seam.trees import pytree

_UNTOLD = (
    *(DataDependentOutputException, DynamicOutputShapeException),
    *(UnsupportedOperatorException, NotImplementedError),
)
"""Raised for operators of which nothing is known without data."""


class Rerun:
    """Runs the operators of graphs of one file; what was seen once of sizes and constants, not again.

    Args:
        fake_mode: made the values of the graphs, one for all that are alike.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._fake_mode = fake_mode
        self._seen = set[str]()

    def check(self, graph: Graph) -> None:
        """See that a graph holds together, and that its operators compute what it says of its values.

        Raises:
            BadArtifact: they don't.
            InternalError: an invariant of all graphs does not hold.
        """
        verify(graph, "reading a file")
        for slot, result in graph.named_results().items():
            if result is None and slot.role not in BACKWARD_ROLES:
                raise damaged(f"a graph returns nothing for `{slot}`")
        self.check_operators(graph.gm)

    def check_operators(self, gm: GraphModule) -> None:
        """See that operators compute what a graph says of its values, and say it where it says nothing.

        Raises:
            BadArtifact: they don't.
        """
        with no_modes(), self._fake_mode, torch.no_grad(), quiet_fakes():
            self._check_nodes(gm)

    def _check_nodes(self, gm: GraphModule) -> None:
        for node in gm.graph.nodes:
            if isinstance(node.target, OpOverload) or id(node.target) in NAMES_OF_FUNCTIONS:
                self._check_node(gm, node)
            elif isinstance(node.target, HigherOrderOperator):
                self._check_control_flow(gm, node)

    def _check_control_flow(self, gm: GraphModule, node: Node) -> None:
        """See that the graphs of a `cond` take what it is given, and return its results."""
        inner = [_val_of(gm, arg) for arg in node.args[1:3]]
        if len(inner) != 2 or not all(isinstance(part, GraphModule) for part in inner):
            raise damaged(f"`{node.name}` is given no graphs")
        given = [_kind(_val_of(gm, arg)) for arg in pytree.tree_leaves(node.args[3:])]
        for part in inner:
            taken = [_kind(each.meta["val"]) for each in part.graph.find_nodes(op="placeholder")]
            if taken != given:
                raise damaged(f"`{node.name}` gives a graph {given}, which takes {taken}")
            self._check_nodes(part)
            results: Any = part.graph.output_node().args[0]
            found = tuple(_kind(_val_of(part, result)) for result in results)
            if type(results) is not tuple or found != _kind(node.meta["val"]):
                raise damaged(f"`{node.name}` has other results than its graphs")

    def _check_node(self, gm: GraphModule, node: Node) -> None:
        target, val_of = cast("Any", node.target), functools.partial(_val_of, gm)
        args, kwargs = map_arg((node.args, dict(node.kwargs)), val_of)
        # Equal values are one object, as long as the graphs live.
        given: Any = map_arg((node.args, node.kwargs), lambda source: cast("Any", _Same(val_of(source))))
        key = str((target, given, _Same(node.meta["val"])))
        if key in self._seen:
            return
        try:
            found = target(*map_aggregate(args, self._faked), **map_aggregate(kwargs, self._faked))
        except _UNTOLD:
            return
        except Exception as error:
            raise damaged(f"`{node.name}` does not run: {type(error).__name__}: {error}") from error
        if node.meta["val"] is None:
            node.meta["val"] = found
        elif has_symbols(found) or _kind(found) != _kind(node.meta["val"]):
            raise damaged(f"`{node.name}` is said to be {_kind(node.meta['val'])}, and is {_kind(found)}")
        else:
            self._seen.add(key)

    def _faked(self, value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return self._fake_mode.from_tensor(value) if is_real else value


def check_results(graph: Graph, facts: Facts, ins: Row[PrimalIdx, Slot]) -> None:
    """See that results and gradients are of the sizes and dtypes that the facts tell, as whoever gets them.

    Args:
        graph: returns them.
        facts: tell of them.
        ins: the names of the inputs.

    Raises:
        BadArtifact: they are of others.
    """
    told = {
        Slot(out.slot.role, out.slot.path, inner): plain
        for out in facts.node_outs
        for inner, plain in leaves(out.recipe)
    }
    for slot, recipe, grad in zip(ins, facts.recipes, facts.backward.grads, strict=True):
        if isinstance(grad, Plain | Wrapper):
            told |= {Slot("grad", slot.path, inner): plain for inner, plain in leaves(grad)}
            if isinstance(recipe, Plain | Wrapper) and grad.size != recipe.size and not facts.reshaped():
                raise damaged(f"the gradient of `{slot}` is of other sizes than `{slot}`")
    for slot, node in graph.named_results().items():
        if node is not None and slot in told and _kind(_val_of(graph.gm, node)) != _kind_of(told[slot]):
            raise damaged(f"the {slot.role} `{slot}` is {_kind(_val_of(graph.gm, node))}, and told otherwise")


def _kind_of(plain: Plain) -> Any:
    return tuple(plain.size), plain.dtype


def check_views(facts: Facts, program: Program[PrimalIdx], fake_mode: FakeTensorMode) -> None:
    """See that what is made outside of the graph can be made: views, of plain tensors that nothing reshapes.

    Args:
        facts: say of what, and how.
        program: with the inputs of the call.
        fake_mode: to make them in.

    Raises:
        BadArtifact: they cannot.
    """
    if facts.reshaped() or not is_plain(facts):
        return
    with no_modes(), fake_mode, torch.no_grad(), quiet_fakes():
        inputs = program.examples.map(recipe_of).map(_without_data)
        for fact in facts.outputs:
            _outside(fact, facts, inputs)


def _outside(fact: OutputFact, facts: Facts, inputs: Row[PrimalIdx, torch.Tensor]) -> Any:
    """An output, made of tensors without data; None if it is none."""
    match fact:
        case NotATensor():
            return None
        case IsInput(input=base):
            return inputs[base]
        case ViewOfInput(base=base, steps=steps):
            return _viewed(inputs[base], steps)
        case ViewOfOutput(base=base, steps=steps):
            return _viewed(_outside(facts.outputs[base], facts, inputs), steps)
        case Fresh(value=value):
            return _without_data(facts.node_outs[value].recipe)
        case ViewOfIntermediate(base=base, steps=steps):
            return _viewed(_without_data(facts.node_outs[base].recipe), steps)


def _without_data(recipe: Recipe) -> torch.Tensor:
    plain = cast("Plain", recipe)
    if len(plain.stride) < len(plain.size):  # of another layout
        return torch.empty(plain.size, dtype=plain.dtype)
    return torch.empty_strided(plain.size, plain.stride, dtype=plain.dtype)


def _viewed(base: Any, steps: Sequence[Step]) -> Any:
    for step in steps:
        for each in step.steps if isinstance(step, FunctionView) else (step,):
            found = each.of(base)
            base = found if each.pick is None else found[each.pick]
    return base


def _val_of(gm: GraphModule, value: Any) -> Any:
    """What a node says of its value, or what it holds; what is no node is its own."""
    if not isinstance(value, Node):
        return value
    return attribute_of(gm, value) if value.op == "get_attr" else value.meta["val"]


class _Same:
    """Shows which object a value is; no text of a file looks like that."""

    def __init__(self, value: Any) -> None:
        parts = value if isinstance(value, tuple) else (value,)
        self._shown = f"<{' '.join(str(id(part)) for part in parts)}>"

    def __repr__(self) -> str:
        return self._shown


def has_symbols(val: Any) -> bool:
    """Whether a value is, or has sizes, that differ from call to call."""
    if isinstance(val, (tuple, list)):
        return any(map(has_symbols, val))
    return any(map(is_open, (*val.shape, *val.stride()) if isinstance(val, torch.Tensor) else (val,)))


def _kind(val: Any) -> Any:
    if isinstance(val, (tuple, list)):
        return tuple(map(_kind, val))
    return (tuple(val.shape), val.dtype) if isinstance(val, torch.Tensor) else type(val)
