"""One call of the user's function or module: what it reaches, takes, returns and assigns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from aotdist.capture.ambient import Ambient
from aotdist.capture.arguments import Arguments
from aotdist.capture.assignments import Assignments
from aotdist.capture.effects import EffectLog, TensorResult
from aotdist.capture.environment import Reached
from aotdist.capture.in_backward import InBackward
from aotdist.capture.modules import (
    StateTensor,
    named_modules,
    state_tensors,
)
from aotdist.capture.reach import reach
from aotdist.capture.source import UNNAMED, Given, Item, Source
from aotdist.errors import InternalError
from aotdist.facts import Facts, NotATensor
from aotdist.program import ArgIdx, I, Program, Row, Slot
from aotdist.subclasses.protocol import ModuleRule, leaves, module_rules, recipe_of
from aotdist.torch_seam.modes import torch_functions_off
from aotdist.torch_seam.modules import shared
from aotdist.torch_seam.symbols import number_kind
from aotdist.torch_seam.trees import pytree


@dataclass(frozen=True, slots=True)
class UserCall:
    """A call of the user's function or module.

    Args:
        target: the module or callable, to look for state in.
        run: what to call for it (a module's call without our own hook on it).
        args: positional arguments, pytrees of tensors and constants.
        kwargs: keyword arguments, likewise.
        dims: dimensions whose size may differ from call to call, by the identity of the tensor; others are
            marked by the user, or set by `Settings(dynamic=True)`.
        guessed: dimensions that have differed so far; they are dynamic if the program is the same then.
        varying: numbers that have differed so far: paths of those among the arguments, and places of others.
        differentiates: whether the call runs its own backward: then what it assigns has no history.
        excluded: containers whose items the program gets as arguments: an optimizer's state.
        prints: whether calls print what the program prints; otherwise only the capture does.
        number: how many modules like this one were compiled before it, for ranks to tell them apart.
    """

    target: Any
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dims: Mapping[int, frozenset[int]] = field(default_factory=dict)
    guessed: Mapping[int, frozenset[int]] = field(default_factory=dict)
    varying: Sequence[str | Source] = ()
    differentiates: bool = False
    excluded: Sequence[Any] = ()
    prints: bool = True
    number: int = 0

    @property
    def name(self) -> str:
        """The name of the function, or of the module's class."""
        return getattr(self.target, "__name__", type(self.target).__name__)


@dataclass(frozen=True, slots=True)
class Returned:
    """How to rebuild what the function returned, and to repeat what it assigned, from the outputs.

    Args:
        spec: pytree structure of the returned value; its leaves are the first outputs.
        log: what the program does in Python; the tensors that it assigns are the next outputs.
        shares: whether an object that the program makes is in several places.
        counted: paths of numbers among the arguments that the program changes to others of their type.
    """

    spec: pytree.TreeSpec
    log: EffectLog
    shares: bool = False
    counted: tuple[str, ...] = ()

    def counts(self) -> list[Source]:
        """Places outside of the arguments where the program finds a number and leaves another of its type."""
        found = [(place, number_kind(value)) for place, value in self.constants()]
        return [place for place, kind in found if kind and type(place.read_or(None)) is kind]

    def assigned(self) -> list[tuple[Source, pytree.TreeSpec]]:
        """Places that are assigned outputs, and the structure of each value."""
        return [(place, tree.spec) for place, tree in self.log.assigned() if tree.has(TensorResult)]

    def constants(self) -> list[tuple[Source, Any]]:
        """Places that are assigned constants, or containers of constants, and these."""
        assigned = [(place, tree) for place, tree in self.log.assigned() if not isinstance(place.root, Given)]
        return [(place, tree.value()) for place, tree in assigned if not tree.has(TensorResult)]

    def changes_given(self) -> bool:
        """Whether lists or dictionaries among the arguments are changed."""
        roots = (place.root for place in self.log.places())
        return any(isinstance(root, Given) and root.name in ("args", "kwargs") for root in roots)

    @classmethod
    def of(cls, facts: Facts) -> Returned:
        """The `Returned` among the outputs of a captured program."""
        for fact in facts.outputs:
            if isinstance(fact, NotATensor) and isinstance(fact.value, cls):
                return fact.value
        raise InternalError("the program did not say how to put its result back", stage="capture")


@dataclass(frozen=True, slots=True)
class Claim:
    """A module rule, the module that it applies to, and that module's flags at capture."""

    rule: ModuleRule
    root: nn.Module
    flags: Hashable

    def holds(self) -> bool:
        """Whether the flags are what they were."""
        return self.rule.flags(self.root) == self.flags


@dataclass(frozen=True, slots=True)
class Environment:
    """What a function reaches besides its arguments.

    Args:
        reached: closures, globals and attributes.
        modules: every module that it is or reaches, by qualified name.
        state: their parameters and buffers.
        rules: module rules at work.
    """

    reached: Reached
    modules: Mapping[str, nn.Module]
    state: tuple[StateTensor, ...]
    rules: tuple[Claim, ...]

    def assignments(self) -> Assignments:
        """A snapshot of all that the program may assign to."""
        ruled = {module for claim in self.rules for module in claim.root.modules()}
        return Assignments(self.modules, self.reached, ruled)

    def may_read(self, place: Source) -> bool:
        """Whether the program may read a place; for a list, whether it does more than append to it."""
        if place.is_whole_list:
            held = place.owner().read()
            wholes = (source.container() for source, _ in self.reached.constants)
            return any(whole is not None and whole.read_or(None) is held for whole in wholes)
        names, step = self.reached.names, place.steps[-1]
        is_unread = names is not None and isinstance(step, Item) and step.key not in names
        return not (is_unread and self.is_attribute(place))

    def is_attribute(self, place: Source) -> bool:
        """Whether it is an attribute of a module or of an object, rather than an item of a dictionary."""
        held = shared(place.owner().read())
        owners = (*self.modules.values(), *(owner for _, owner in self.reached.assignable.owners))
        return any(held is shared(vars(owner)) for owner in owners)


@dataclass(frozen=True, slots=True)
class Captured:
    """One call, ready to be traced.

    Args:
        program: the function of flat tensors.
        arguments: structure of the call; its tensors come first among the program's inputs.
        environment: what else it reads; its state comes after them.
        ambient: the modes that were on.
        closed_over: places of tensors outside of arguments and modules, by identity; gradients are added when
            the trace uses one.
        places: tensors whose gradients the program may use, with their places.
        name: the name of the function, or of the module's class.
        dims: dimensions whose size may differ from call to call, by the identity of the tensor.
        in_backward: watches what the backward changes in Python.
        leaves: assigns again the objects that the program has assigned, if these would change it: then the
            artifact is for this call alone.
        number: see `UserCall`.
        set_up: spots of setup flags that had the value of the next call in this trace.
    """

    program: Program[ArgIdx]
    arguments: Arguments
    environment: Environment
    ambient: Ambient
    closed_over: dict[int, Source]
    places: list[tuple[Source, torch.Tensor]]
    name: str
    dims: Mapping[int, frozenset[int]]
    in_backward: InBackward
    leaves: Callable[[], None] | None = None
    number: int = 0
    set_up: frozenset[Any] = frozenset()

    def static_slots(self) -> frozenset[Slot]:
        """Slots of plain tensors whose address stays from call to call: parameters and buffers."""
        return frozenset(
            Slot("primal", tensor.path, inner)
            for tensor in self.environment.state
            for inner, _ in leaves(recipe_of(tensor.value))
        )

    def name_closed_over(self, real: torch.Tensor) -> Slot:
        """The slot of a closed-over tensor that the trace uses."""
        return Slot("primal", self.source_of(real).path)

    def sources(self, tensors: Row[I, torch.Tensor]) -> dict[I, Source]:
        """The places of those of `tensors` that are neither arguments nor reached from one."""
        known = {id(tensor.value): tensor.source() for tensor in self.environment.state}
        known.update(self.closed_over)
        found = {idx: known[id(tensor)] for idx, tensor in tensors.enumerate() if id(tensor) in known}
        return {idx: source for idx, source in found.items() if not source.is_of_argument}

    def source_of(self, real: torch.Tensor) -> Source:
        """The place of a tensor that the trace uses; one that the walk has not found is kept by identity."""
        if id(real) not in self.closed_over:
            self.closed_over.update(self._gradients())
        known = self.closed_over.get(id(real))
        if known is None:
            known = Source(f"{UNNAMED}{id(real):x}", (real,)).item(0, f"{UNNAMED}{id(real):x}")
            self.places.append((known, real))  # its gradient may be used next: an optimizer's parameter
        return known

    def all_closed_over(self) -> dict[int, Source]:
        """`closed_over` and all gradients."""
        return {**self.closed_over, **self._gradients()}

    def _gradients(self) -> dict[int, Source]:
        """Places of the gradients that leaves have now, by identity; optimizers read these.

        PyTorch crashes where one thread reads `.grad` while the backward of another writes it. So gradients
        are read only if the program uses a tensor that was found nowhere else.
        """
        with torch_functions_off():
            leaves = [(source, tensor.grad) for source, tensor in self.places if tensor.is_leaf]
        return {id(grad): source.attribute("grad") for source, grad in leaves if grad is not None}


def environment_of(
    target: Any,
    arguments: Sequence[tuple[Source, torch.Tensor]],
    code: Iterable[tuple[str, Any]],
    excluded: Iterable[Any] = (),
) -> Environment:
    """What `target`, a module or any callable, reaches besides its arguments; see `reach`.

    Raises:
        UnsupportedProgram: a module in it uses a feature that cannot be captured.
    """
    reached = reach(target, arguments, code, excluded)
    roots = [(source.path, module) for source, module in reached.modules]
    modules = named_modules(roots)
    claims: list[Claim] = []
    for _, root in roots:
        for rule in module_rules(root):
            rule.prepare(root)
            claims.append(Claim(rule, root, rule.flags(root)))
    return Environment(reached, modules, tuple(state_tensors(modules)), tuple(claims))
