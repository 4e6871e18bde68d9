"""What one trace showed: which inputs are written, and what each output is.

Facts speak of the program's own tensors (wrappers still on) and are all that the later stages know
of it. They are plain frozen data: a `match` over them ends in `assert_never`.
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
    Wrapper,
    leaves,
    wrapper_rule,
)
from aotdist.torch_seam.ambient import autocast_off
from aotdist.torch_seam.modes import no_modes

DETACH = torch.ops.aten.detach.default
"""The log takes what it makes for a view; autograd does not."""


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.data`: as `tensor.detach()`, with a version counter of its own."""
    return tensor.data


@dataclass(frozen=True, slots=True)
class Inside:
    """The tensor that lies inside of a wrapper at a path of attributes (`._local_tensor`)."""

    path: str

    def __call__(self, wrapper: torch.Tensor) -> torch.Tensor:
        """Take it out, the same object each time."""
        return operator.attrgetter(self.path[1:])(wrapper)


@dataclass(frozen=True, slots=True)
class Around:
    """The wrapper around one tensor that shows the memory of that tensor.

    Args:
        recipe: how to put it together; the tensor inside counts as plain, whatever it is.
    """

    recipe: Wrapper

    def __call__(self, inner: torch.Tensor) -> torch.Tensor:
        """Put a new one together."""
        return wrapper_rule(self.recipe.cls).around(inner, self.recipe)

    def __str__(self) -> str:
        return f"in_{self.recipe.cls.__name__}"


@dataclass(frozen=True, slots=True)
class ViewStep:
    """One view operation, to be replayed on a base: `op(base, *args, **kwargs)[pick]`.

    Args:
        op: the operator (`aten.t.default`), or a function: `data_of`, `Inside`, `Around`.
        args: its other positional arguments; they hold no tensors.
        kwargs: its keyword arguments as pairs.
        pick: which of several results (`split`, `unbind`), or None.
        grad: whether grad mode was on when the view was made; a view made under `no_grad` stays
            without gradient.
        serial: number of the operation in the trace; views of one `x.detach()` have that step in common.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    pick: int | None = None
    grad: bool = True
    serial: int = 0

    def of(self, base: torch.Tensor) -> Any:
        """Run the operation, in the grad mode that it was recorded in; several views, if it has a `pick`."""
        with torch.set_grad_enabled(self.grad):
            return self.op(base, *self.args, **dict(self.kwargs))

    def is_common(self) -> bool:
        """Whether views that have this step in common are made from one result of it."""
        return self.pick is not None or self.ends_views()

    def ends_views(self) -> bool:
        """Whether autograd does not take the result for a view, so that it is the base of its own views."""
        return self.op in (DETACH, data_of) or isinstance(self.op, (Inside, Around))


@dataclass(frozen=True, slots=True)
class FunctionView:
    """Views with a history that replaying would lose: a user's `autograd.Function` made them, for example.

    Args:
        steps: the views, to be made without history; none where a tensor inside of a wrapper was written.
        value: the node output whose history the last view gets.
        creation: autograd's `CreationMeta` of the view, which decides whether it may be written; None for
            what autograd does not take for a view.
    """

    steps: tuple[ViewStep, ...]
    value: NodeOutIdx
    creation: Any

    @property
    def serial(self) -> int:
        """Which operation of the trace made the last of them."""
        return self.steps[-1].serial

    def is_common(self) -> bool:
        """As `ViewStep.is_common`."""
        return bool(self.steps) and (self.creation is None or any(step.is_common() for step in self.steps))


Step: TypeAlias = ViewStep | FunctionView


@dataclass(frozen=True, slots=True)
class Untouched:
    """The input's data is as it was.

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
"""Where to find a tensor outside of the region, or how to make it there."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Make a tensor now and keep it under a number for later, when its base will have changed."""

    number: int
    place: Place


@dataclass(frozen=True, slots=True)
class MetadataWrite:
    """Sizes, strides, storage or history are written in place: `op(target, *args, **kwargs)`.

    Args:
        target: an input, a tensor that the region returns, or (without steps) an output.
        op: the operator (`aten.t_.default`), or a function that does the same (`Tensor.detach_`).
        args: its other positional arguments; tensors stand there as a `Place`.
        kwargs: its keyword arguments as pairs; they hold no tensors.
        grad: whether grad mode was on.
        number: position among all such writes of the program; negative for one that comes after all others.
        data: what the tensor holds afterwards, if it was given a larger storage.
    """

    target: Place
    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    grad: bool
    number: int
    data: NodeOutIdx | None = None


Action: TypeAlias = OutIdx | Keep | MetadataWrite
"""What is done outside of the region, after it."""


@dataclass(frozen=True, slots=True)
class NodeOut:
    """One tensor that the autograd node returns.

    Args:
        slot: its name; role `output` or `write`.
        recipe: how it is put together from plain tensors.
        differentiable: whether a gradient can come back for it.
        version: its version counter: how often the program wrote it after making it.
    """

    slot: Slot
    recipe: Recipe
    differentiable: bool
    version: int = 0


HeldPlace: TypeAlias = Fresh | OutIdx
"""Where the caller holds a waypoint; an output that is not fresh is made as a view outside of the node."""


@dataclass(frozen=True, slots=True)
class ObservedGrad:
    """A tensor in the caller's hands that the gradient of another result passes on its way back.

    The caller may watch what passes, or change it: hooks, `retain_grad`, `autograd.grad` with respect to it.

    Args:
        path: its name among the graph's slots.
        place: what it is to the caller: a result, or a view of one.
        value: the node output that its gradient belongs to; None for a view, whose gradient goes on outside.
        total: recipe of its gradient, if any arrives.
        pieces: recipes of the summands that the program itself adds to its gradient, in their order.
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
        grads: the inputs that get a gradient from them, and its recipe.
        writes: the inputs that their backward writes, see `BackwardFacts`.
        kept: recipes of what user code in that backward keeps.
    """

    outs: tuple[NodeOutIdx, ...]
    grads: Mapping[PrimalIdx, Recipe]
    writes: Mapping[PrimalIdx, int] = field(default_factory=dict)
    kept: tuple[Recipe, ...] = ()

    def slots(self, ins: Row[PrimalIdx, Slot], recipes: Row[PrimalIdx, Recipe]) -> list[Slot]:
        """The names of the results when only these outputs are differentiated.

        Args:
            ins: names of the inputs.
            recipes: how each of them is put together.
        """
        suffix = f" from {','.join(map(str, self.outs))}"
        grads = [
            Slot("grad", ins[idx].path + suffix, inner)
            for idx, recipe in self.grads.items()
            for inner, _ in leaves(recipe)
        ]
        writes = [
            Slot("backward_write", ins[idx].path + suffix, inner)
            for idx in self.writes
            for inner, _ in leaves(recipes[idx])
        ]
        return grads + writes + kept_slots(self.kept, suffix)


def kept_slots(recipes: Sequence[Recipe], suffix: str = "") -> list[Slot]:
    """The names of what user code in a backward keeps."""
    return [
        Slot("kept", f"{position}{suffix}", inner)
        for position, recipe in enumerate(recipes)
        for inner, _ in leaves(recipe)
    ]


@dataclass(frozen=True, slots=True)
class DataGuard:
    """Conditions on data that is there before a call, on which the program branched at capture.

    Args:
        ask: computes the conditions from tensors and numbers of the call, tensors first.
        holds: whether each held at capture.
        of: the plain tensors that they depend on: an input, and which of its plain tensors; empty where who
            asks knows them.
        sizes: the symbolic numbers that they depend on.
    """

    ask: Callable[..., Sequence[Any]]
    holds: tuple[bool, ...]
    of: tuple[tuple[PrimalIdx, int], ...] = ()
    sizes: tuple[Expression, ...] = ()

    def is_same(self, *given: torch.Tensor | float) -> bool:
        """Whether the answers are the same for these tensors, and numbers."""
        with no_modes(), autocast_off(), torch.no_grad():
            return tuple(map(bool, self.ask(*given))) == self.holds


@dataclass(frozen=True, slots=True)
class BackwardFacts:
    """What the trace showed of the backward.

    Args:
        grads: for each input, the recipe of its gradient, or None when it gets none.
        writes: inputs that it wrote, and by how much their version counters increase.
        waypoints: tensors in the caller's hands that gradients of results pass, in the order in which the
            program made them.
        levels: for each node output, one more than the position of the last waypoint that its gradient
            passes; 0 if it passes none. Empty if there are no waypoints.
        once: whether it runs once for each call: it is computed of a tensor that the forward makes and nobody
            holds, and writes it, so that another would find another value.
        choices: choices of results for which it was traced separately.
        adds_layouts: whether it adds gradients of different layouts (DTensors of other placements), so that
            the backward of some of the results is more than a part of this one.
        freed: results in whose histories autograd frees the same saved tensors after a backward, so that
            there is no other backward of these; each such set once.
    """

    grads: Row[PrimalIdx, Recipe | None]
    writes: Mapping[PrimalIdx, int] = field(default_factory=dict)
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
        order: outputs, and writes of metadata, in the order in which the program made them. They are made
            again in that order: a view shows its base as it was then, and autograd sums the gradients of
            several views in that order.
        node_outs: what the autograd node returns: fresh outputs, bases of views, new values of inputs.
        recipes: how each input is put together from plain tensors.
        backward: what the backward does.
        rewinds: inputs, and how many of their counted writes are writes of metadata. Those are counted twice,
            by the region, which saves inputs as they are after all writes, and when they are repeated
            outside; so the counters are set back in between.
        switched_on: inputs that the program lets require grad.
        storages: plain tensors beneath inputs, by position, whose offset and bytes of storage matter.
        related: whether some inputs are functions of others, so that the graph does not show all that its
            results depend on.
        asked: attributes of inputs by which the program asks autograd (`is_leaf`), and the answers; of
            `grad_fn` and `grad`, whether there is one.
        data_guards: conditions on data of inputs that the program branched on.
        numbers: names of the unbacked symbols in these facts, each with the node output that holds its value,
            or with how Python computes it from those before.
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
        """Inputs whose data is written, in forward or backward, or that grow, and may be written then."""
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
