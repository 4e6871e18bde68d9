"""What one trace showed: which inputs are written, and what each output is.

Facts are about the program's own tensors (wrappers included), and are all that later stages know of the
program. They are frozen data: a `match` over them ends in `assert_never`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from aotdist.program import NodeOutIdx, OutIdx, PrimalIdx, Row, Slot
from aotdist.sizes import Expression, NumberStep
from aotdist.subclasses.protocol import (
    Recipe,
    leaves,
)
from aotdist.torch_seam.ambient import autocast_off
from aotdist.torch_seam.modes import no_modes

DETACH = torch.ops.aten.detach.default
"""Its result is a view in the log of views, but not to autograd."""


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.data`: like `tensor.detach()`, but with a version counter of its own."""
    return tensor.data


@dataclass(frozen=True, slots=True)
class Inside:
    """The view step to the tensor inside a wrapper at a path of attributes (`._local_tensor`)."""

    path: str

    def __call__(self, wrapper: torch.Tensor) -> torch.Tensor:
        """The tensor inside, the same object each time."""
        return operator.attrgetter(self.path[1:])(wrapper)


@dataclass(frozen=True, slots=True)
class ViewStep:
    """One view operation, to be replayed on a base: `op(base, *args, **kwargs)[pick]`.

    Args:
        op: the operator (`aten.t.default`), or a function: `data_of`, `Inside`.
        args: its other positional arguments; they hold no tensors.
        kwargs: its keyword arguments as pairs.
        pick: which of several results (`split`, `unbind`), or None.
        grad: whether grad mode was on when the view was made; views made under `no_grad` have no gradient.
        serial: number of the operation in the trace, by which views share a step (all views of one
            `x.detach()`).
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    pick: int | None = None
    grad: bool = True
    serial: int = 0

    def of(self, base: torch.Tensor) -> Any:
        """Run the operation in its grad mode; it returns several views if there is a `pick`."""
        with torch.set_grad_enabled(self.grad):
            return self.op(base, *self.args, **dict(self.kwargs))

    def is_common(self) -> bool:
        """Whether views that share this step are made from one result of it."""
        return self.pick is not None or self.ends_views()

    def ends_views(self) -> bool:
        """Whether the result is no view to autograd, and so the base of its own views."""
        return self.op in (DETACH, data_of) or isinstance(self.op, Inside)


@dataclass(frozen=True, slots=True)
class FunctionView:
    """Views with a history that replaying would lose: by a user's `autograd.Function`, for example.

    Args:
        steps: the views, made without history; empty where a tensor inside a wrapper was written.
        value: the node output whose history the last view gets.
        creation: autograd's `CreationMeta` of the view, which decides whether it may be written; None if it
            is no view to autograd.
    """

    steps: tuple[ViewStep, ...]
    value: NodeOutIdx
    creation: Any

    @property
    def serial(self) -> int:
        """As `ViewStep.serial`, of the last step."""
        return self.steps[-1].serial

    def is_common(self) -> bool:
        """As `ViewStep.is_common`."""
        return bool(self.steps) and (self.creation is None or any(step.is_common() for step in self.steps))


Step: TypeAlias = ViewStep | FunctionView


@dataclass(frozen=True, slots=True)
class Untouched:
    """The input's data is not written.

    Args:
        bumps: by how much its version counter increases nevertheless (`x[0].t_()` counts as a write of `x`).
    """

    bumps: int = 0


@dataclass(frozen=True, slots=True)
class DataWritten:
    """The input's data has a new value after the forward.

    Args:
        value: the node output that holds the new value.
        differentiable: whether the write takes part in the backward.
        bumps: by how much its version counter increases; 0 for a write behind autograd's back (`.data`).
    """

    value: NodeOutIdx
    differentiable: bool
    bumps: int


InputFact: TypeAlias = Untouched | DataWritten


@dataclass(frozen=True, slots=True)
class NotATensor:
    """The output is a Python value, the same at every call."""

    value: Any


@dataclass(frozen=True, slots=True)
class Fresh:
    """The output is a tensor of its own."""

    value: NodeOutIdx


@dataclass(frozen=True, slots=True)
class IsInput:
    """The output is an input, the same object."""

    input: PrimalIdx


@dataclass(frozen=True, slots=True)
class ViewOfInput:
    """The output is a view of an input."""

    base: PrimalIdx
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class ViewOfIntermediate:
    """The output is a view of a tensor that the program made and does not return."""

    base: NodeOutIdx
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class ViewOfOutput:
    """The output is a view of another output, or (no steps) the same object again."""

    base: OutIdx
    steps: tuple[Step, ...]


OutputFact: TypeAlias = NotATensor | Fresh | IsInput | ViewOfInput | ViewOfIntermediate | ViewOfOutput


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that was made before and kept under this number."""

    number: int


Place: TypeAlias = Fresh | IsInput | ViewOfInput | ViewOfIntermediate | ViewOfOutput | Kept
"""Where to find a tensor outside the region, or how to make it there."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Make a tensor now and keep it under a number for later, when its base will have changed."""

    number: int
    place: Place


@dataclass(frozen=True, slots=True)
class MetadataWrite:
    """Sizes, strides, storage or history are changed in place: `op(target, *args, **kwargs)`.

    Args:
        target: an input, a tensor that the region returns, or (without steps) an output.
        op: the operator (`aten.t_.default`), or a function that does the same (`Tensor.detach_`).
        args: its other positional arguments, with a `Place` for each tensor.
        kwargs: its keyword arguments as pairs; they hold no tensors.
        grad: whether grad mode was on.
        number: position among all metadata writes of the program; negative if it comes after all others.
        data: the tensor's new data, if it was given a larger storage.
    """

    target: Place
    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    grad: bool
    number: int
    data: NodeOutIdx | None = None


Action: TypeAlias = OutIdx | Keep | MetadataWrite
"""What is done outside the region, after it has run."""


@dataclass(frozen=True, slots=True)
class NodeOut:
    """One tensor that the autograd node returns.

    Args:
        slot: its name; role `output` or `write`.
        recipe: how it is made of plain tensors.
        differentiable: whether it can get a gradient.
    """

    slot: Slot
    recipe: Recipe
    differentiable: bool


HeldPlace: TypeAlias = Fresh | OutIdx
"""Where the caller holds a waypoint; an output that is not fresh is made as a view outside of the node."""


@dataclass(frozen=True, slots=True)
class ObservedGrad:
    """A tensor that the caller has, and through which gradients of other results flow: a waypoint.

    The caller may read or change its gradient: by hooks, `retain_grad`, or `autograd.grad` with respect to
    it.

    Args:
        path: its name among the graph's slots.
        place: where the caller has it: it is a result, or a view of one.
        value: the node output that its gradient belongs to; None for a view, whose gradient flows outside.
        total: recipe of its whole gradient, if it gets one from the caller.
        pieces: recipes of the summands that the program itself adds to its gradient, in order.
    """

    path: str
    place: HeldPlace
    value: NodeOutIdx | None
    total: Recipe | None
    pieces: tuple[Recipe, ...]

    def piece_slots(self, position: int) -> list[Slot]:
        """The names of the plain tensors of one piece among the graph's results."""
        path = f"{self.path}#{position}"
        return [Slot("piece", path, inner) for inner, _ in leaves(self.pieces[position])]


@dataclass(frozen=True, slots=True)
class Choice:
    """Some of the differentiable results, whose backward was traced separately.

    Args:
        outs: these results.
        grads: the inputs that get a gradient from them, with its recipe.
        kept: recipes of what user code in that backward keeps.
    """

    outs: tuple[NodeOutIdx, ...]
    grads: Mapping[PrimalIdx, Recipe]
    kept: tuple[Recipe, ...] = ()

    def slots(self, ins: Row[PrimalIdx, Slot]) -> list[Slot]:
        """The names of the results when only these outputs are differentiated; `ins` names the inputs."""
        suffix = f" from {','.join(map(str, self.outs))}"
        grads = [
            Slot("grad", ins[idx].path + suffix, inner)
            for idx, recipe in self.grads.items()
            for inner, _ in leaves(recipe)
        ]
        return grads + kept_slots(self.kept, suffix)


def kept_slots(recipes: Sequence[Recipe], suffix: str = "") -> list[Slot]:
    """The names of tensors that user code in a backward keeps."""
    return [
        Slot("kept", f"{position}{suffix}", inner)
        for position, recipe in enumerate(recipes)
        for inner, _ in leaves(recipe)
    ]


@dataclass(frozen=True, slots=True)
class DataGuard:
    """Conditions on the data of inputs, on which the program branched at capture.

    Args:
        ask: computes the conditions from tensors and numbers of the call, tensors first.
        holds: whether each was true at capture, or what else was read off it.
        of: the plain tensors that they depend on, as (input, index of its plain tensor); empty if `ask` has
            them itself.
        sizes: the symbolic numbers that they depend on.
        read: reads what the program depended on off what `ask` computes.
    """

    ask: Callable[..., Sequence[Any]]
    holds: tuple[Any, ...]
    of: tuple[tuple[PrimalIdx, int], ...] = ()
    sizes: tuple[Expression, ...] = ()
    read: Callable[[Any], Any] = bool

    def is_same(self, *given: torch.Tensor | float) -> bool:
        """Whether the conditions are as at capture for these tensors and numbers."""
        with no_modes(), autocast_off(), torch.no_grad():
            return tuple(map(self.read, self.ask(*given))) == self.holds


@dataclass(frozen=True, slots=True)
class BackwardFacts:
    """What the trace showed of the backward.

    Args:
        grads: for each input, the recipe of its gradient, or None if it gets none.
        writes: inputs that it writes, and by how much their version counters increase.
        writers: for each autograd node that writes an input, the results that follow from it: the node runs
            if one of these gets a gradient. An empty set if it is not known which node writes.
        waypoints: the waypoints, in the order in which the program made them.
        levels: for each node output, one more than the position of the last waypoint that its gradient
            flows through; 0 if there is none. Empty if there are no waypoints.
        once: whether it can run only once for each call: it writes a tensor that the forward made and nobody
            else has, so that a second run may read another value.
        choices: the choices of results for which it was traced separately.
        adds_layouts: whether it adds gradients of different layouts (DTensors of other placements), so that
            the backward of some results is not a part of this one.
        freed: sets of results whose histories share saved tensors: after the backward of one of them,
            autograd has freed what the others need.
    """

    grads: Row[PrimalIdx, Recipe | None]
    writes: Mapping[PrimalIdx, int] = field(default_factory=dict)
    writers: frozenset[frozenset[NodeOutIdx]] = frozenset()
    waypoints: tuple[ObservedGrad, ...] = ()
    levels: Row[NodeOutIdx, int] = field(default_factory=Row[NodeOutIdx, int])
    once: bool = False
    choices: tuple[Choice, ...] = ()
    adds_layouts: bool = False
    freed: frozenset[frozenset[NodeOutIdx]] = frozenset()


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that one trace showed.

    Args:
        inputs: what happens to each input.
        outputs: what each output is.
        order: outputs and metadata writes, in the program's order, in which they are repeated: a view depends
            on the metadata of its base at that point, and autograd sums the gradients of several views in
            that order.
        node_outs: what the autograd node returns: fresh outputs, bases of views, new values of inputs.
        recipes: how each input is made of plain tensors.
        backward: what the backward does.
        rewinds: inputs, with their number of metadata writes. Version counters count these twice: in the
            region, so that inputs are saved with the final version, and when they are repeated outside; in
            between, they are set back by this number.
        switched_on: inputs on which the program calls `requires_grad_`.
        storages: plain tensors inside inputs, by position, on whose storage offset and bytes the program
            depends.
        related: whether some inputs are functions of others, so that results depend on more than the graph
            shows.
        asked: attributes of inputs that the program reads from autograd (`is_leaf`), with their values; of
            `grad_fn` and `grad`, whether there is one.
        data_guards: conditions on the data of inputs that the program branched on.
        numbers: names of the unbacked symbols in these facts, each with the node output that holds its value,
            or with how Python computes it from earlier ones.
    """

    inputs: Row[PrimalIdx, InputFact]
    outputs: Row[OutIdx, OutputFact]
    order: tuple[Action, ...]
    node_outs: Row[NodeOutIdx, NodeOut]
    recipes: Row[PrimalIdx, Recipe]
    backward: BackwardFacts
    rewinds: tuple[tuple[PrimalIdx, int], ...] = ()
    switched_on: tuple[PrimalIdx, ...] = ()
    storages: tuple[tuple[PrimalIdx, int], ...] = ()
    related: bool = False
    asked: tuple[tuple[PrimalIdx, str, bool | int], ...] = ()
    data_guards: tuple[DataGuard, ...] = ()
    numbers: tuple[tuple[str, NodeOutIdx | NumberStep], ...] = ()

    def written(self) -> Set[PrimalIdx]:
        """Inputs whose data is written, in forward or backward, or that get a larger storage."""
        forward = {idx for idx, fact in self.inputs.enumerate() if isinstance(fact, DataWritten)}
        grown = [write.target for write in self.metadata_writes() if write.data is not None]
        forward |= {target.input for target in grown if isinstance(target, IsInput)}
        return forward | self.backward.writes.keys()

    def reshaped(self) -> Set[PrimalIdx]:
        """Inputs whose metadata is written."""
        writes = [write for write in self.metadata_writes() if write.op is not torch.Tensor.retain_grad]
        targets = [write.target for write in writes]
        return {target.input for target in targets if isinstance(target, IsInput)}

    def metadata_writes(self) -> list[MetadataWrite]:
        """Writes of metadata, in order."""
        return [item for item in self.order if isinstance(item, MetadataWrite)]
