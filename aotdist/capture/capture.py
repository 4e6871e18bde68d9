"""One call of the user's function or module, as a `Program` of flat tensors with names.

The tensors of a program are those of the arguments, then the parameters and buffers of every module
that the function is, or reaches. Tensors that it merely closes over are met while it is traced, and
named here. What the function returns travels as its flat outputs, followed by the tensors that it
assigned to attributes and one constant, a `Returned`, that says how to put both back.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Container, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from aotdist.capture.ambient import Ambient, ambient, modes_left_alone
from aotdist.capture.argument_mutation import MutatedArguments, are_apart
from aotdist.capture.arguments import Arguments, read_arguments
from aotdist.capture.assignments import Assignments
from aotdist.capture.checks import Check, Checks
from aotdist.capture.constants import is_leaf
from aotdist.capture.effects import Assign, Delete, Effect, EffectLog, Print, TensorResult, Tree
from aotdist.capture.environment import Reached
from aotdist.capture.in_backward import InBackward
from aotdist.capture.iterators import none_advanced
from aotdist.capture.leaked_tensors import no_results_kept, refuse_carried
from aotdist.capture.modules import (
    StateTensor,
    attribute_tensors,
    following_modules,
    named_modules,
    state_tensors,
    swapped,
)
from aotdist.capture.objects import MadeObject, taken_apart
from aotdist.capture.prints import Prints
from aotdist.capture.python_random import no_python_random
from aotdist.capture.reach import reach
from aotdist.capture.results import (
    Shown,
    hand_over_attributes,
    inside_wrappers,
    replaced_inside,
    with_attributes,
)
from aotdist.capture.source import ABSENT, UNNAMED, Argument, Given, Item, Source
from aotdist.errors import InternalError, UnsupportedProgram
from aotdist.facts import Facts, NotATensor
from aotdist.origins import annotate
from aotdist.program import ArgIdx, I, Program, Row, Slot
from aotdist.settings import Settings
from aotdist.subclasses.protocol import ModuleRule, is_real, leaves, module_rules, recipe_of
from aotdist.torch_seam.checks import intercept_checks
from aotdist.torch_seam.control_flow import said_to_be_compiling
from aotdist.torch_seam.modes import class_functions_on, torch_functions_off
from aotdist.torch_seam.modules import recurrent_layers_referring_to
from aotdist.torch_seam.own_attributes import own_attributes, shared
from aotdist.torch_seam.symbols import number_kind
from aotdist.torch_seam.tensors import marked_dims
from aotdist.torch_seam.trees import pytree


class Guess(Protocol):
    """From the tensors among the arguments, by path, to the dimensions that may differ from call to call."""

    opened: bool
    """Whether it has found any."""

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[int, frozenset[int]]:
        """The dimensions, by the identity of the tensor."""
        ...


@dataclass(frozen=True, slots=True)
class UserCall:
    """A call of the user's function or module.

    Args:
        target: the module or callable, to look for state in.
        run: what to call for it (a module's call without our own hook on it).
        args: positional arguments, pytrees of tensors and constants.
        kwargs: keyword arguments, likewise.
        dims: dimensions whose size may differ from call to call, by the identity of the tensor; others may be
            marked, or named by settings.
        differentiates: whether the call runs its own backward: then what it assigns has no history.
        guess: says which dimensions may differ besides, though nobody asked for it.
        apart: containers whose items the program is given as arguments: an optimizer's state.
        prints: whether every call is to print what the program prints; else the capture prints it.
        number: how many modules like this one were compiled before it, for ranks to tell them apart.
    """

    target: Any
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dims: Mapping[int, frozenset[int]] = field(default_factory=dict)
    guess: Guess | None = None
    differentiates: bool = False
    apart: Sequence[Any] = ()
    prints: bool = True
    number: int = 0

    @property
    def name(self) -> str:
        """A word for the function or module."""
        return getattr(self.target, "__name__", type(self.target).__name__)


@dataclass(frozen=True, slots=True)
class Returned:
    """How to put back what the function returned and assigned.

    Args:
        spec: pytree structure of the returned value; its leaves are the first outputs.
        log: what the program does in Python; results in it are outputs, those in assignments the next ones.
        replaced: attributes of wrappers that are assigned the next outputs: position of the wrapper among the
            program's inputs, and path.
        shown: classes and attributes of outputs; the last outputs are what these attributes hold.
        checks: what to raise if one of the outputs between `replaced` and `shown` is false.
        shares: whether an object that the program makes is in several places.
        counted: paths of numbers among the arguments that the program changes to others of their type.
    """

    spec: pytree.TreeSpec
    log: EffectLog
    replaced: tuple[tuple[int, str], ...] = ()
    shown: tuple[Shown, ...] = ()
    checks: tuple[Check, ...] = ()
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

    def first_checked(self) -> int:
        """Position of the first output that is checked."""
        num_assigned = sum(spec.num_leaves for _, spec in self.assigned())
        return self.spec.num_leaves + num_assigned + len(self.replaced)

    def assigned_paths(self) -> list[str]:
        """The names of what is assigned; of a wrapper, that of the attribute."""
        return [*(source.path for source, _ in self.assigned()), *(path[1:] for _, path in self.replaced)]

    @classmethod
    def of(cls, facts: Facts) -> Returned:
        """The `Returned` among the outputs of a captured program."""
        for fact in facts.outputs:
            if isinstance(fact, NotATensor) and isinstance(fact.value, cls):
                return fact.value
        raise InternalError("the program did not say how to put its result back", stage="capture")


@dataclass(frozen=True, slots=True)
class Claim:
    """A module rule, the module that it claims, and that module's flags at capture."""

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
        """What may be assigned to, as it is now."""
        ruled = {module for claim in self.rules for module in claim.root.modules()}
        return Assignments(self.modules, self.reached, ruled)

    def may_read(self, place: Source) -> bool:
        """Whether the program may read a place; of a whole list, whether it does more than append to it."""
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
        closed_over: tensors outside of arguments and modules, by identity, with where to read them; gradients
            are among them as soon as the trace meets one.
        places: tensors whose gradients it may meet, with where to read them.
        name: a word for the function or module.
        dims: dimensions whose size may differ from call to call, by the identity of the tensor.
        guessed: more of them, that the program may be compiled for where it is the same program then.
        in_backward: watches what the backward changes in Python.
        leaves: puts back the objects that the program left in Python, if it is another program once they are
            there: the artifact is for this call alone then.
        number: see `UserCall`.
    """

    program: Program[ArgIdx]
    arguments: Arguments
    environment: Environment
    ambient: Ambient
    closed_over: dict[int, Source]
    places: list[tuple[Source, torch.Tensor]]
    name: str
    dims: Mapping[int, frozenset[int]]
    guessed: Mapping[int, frozenset[int]]
    in_backward: InBackward
    leaves: Callable[[], None] | None = None
    number: int = 0

    def static_slots(self) -> frozenset[Slot]:
        """Plain tensors that keep their address from call to call: parameters and buffers."""
        return frozenset(
            Slot("primal", tensor.path, inner)
            for tensor in self.environment.state
            for inner, _ in leaves(recipe_of(tensor.value))
        )

    def name_closed_over(self, real: torch.Tensor) -> Slot:
        """The slot of a tensor that the trace met."""
        return Slot("primal", self.source_of(real).path)

    def sources(self, tensors: Row[I, torch.Tensor]) -> dict[I, Source]:
        """Where to read those of `tensors` that are neither arguments nor reached from one."""
        known = {id(tensor.value): tensor.source() for tensor in self.environment.state}
        known.update(self.closed_over)
        found = {idx: known[id(tensor)] for idx, tensor in tensors.enumerate() if id(tensor) in known}
        return {idx: source for idx, source in found.items() if not source.is_of_argument}

    def source_of(self, real: torch.Tensor) -> Source:
        """Where to read a tensor that the trace met; one without a known place is kept as it is."""
        if id(real) not in self.closed_over:
            self.closed_over.update(self._gradients())
        known = self.closed_over.get(id(real))
        if known is None:
            known = Source(f"{UNNAMED}{id(real):x}", (real,)).item(0, f"{UNNAMED}{id(real):x}")
            self.places.append((known, real))  # its gradient may be met next: an optimizer's parameter
        return known

    def all_closed_over(self) -> dict[int, Source]:
        """`closed_over`, all gradients included."""
        return {**self.closed_over, **self._gradients()}

    def _gradients(self) -> dict[int, Source]:
        """The gradients that leaves have, by identity, with where to read them: what an optimizer does.

        PyTorch crashes where one thread reads `.grad` while the backward of another writes it. So they are
        looked at only for a program that meets a tensor of which nothing else is known.
        """
        with torch_functions_off():
            leaves = [(source, tensor.grad) for source, tensor in self.places if tensor.is_leaf]
        return {id(grad): source.attribute("grad") for source, grad in leaves if grad is not None}


def environment_of(
    target: Any,
    arguments: Sequence[tuple[Source, torch.Tensor]],
    code: Iterable[tuple[str, Any]],
    apart: Iterable[Any] = (),
) -> Environment:
    """What `target`, a module or any callable, reaches besides its arguments; see `reach`.

    Raises:
        UnsupportedProgram: a module in it uses a feature that cannot be captured.
    """
    reached = reach(target, arguments, code, apart)
    roots = [(source.path, module) for source, module in reached.modules]
    modules = named_modules(roots)
    claims: list[Claim] = []
    for _, root in roots:
        for rule in module_rules(root):
            rule.prepare(root)
            claims.append(Claim(rule, root, rule.flags(root)))
    return Environment(reached, modules, tuple(state_tensors(modules)), tuple(claims))


def capture(
    call: UserCall, settings: Settings, scope: contextlib.ExitStack, counted: Container[str] = ()
) -> Captured:
    """Describe one call as a program.

    Args:
        call: the call.
        settings: how to compile.
        counted: paths of numbers among its arguments that symbols stand for.
        scope: from when the program runs until this closes, stand-ins hang in the modules, as this thread
            sees them, and their hooks are replaced. It must outlast the backward, whose hooks may run a
            forward again.

    Raises:
        UnsupportedProgram: an argument cannot be lifted, or a module rule refuses.
    """
    arguments, tensors, objects = read_arguments(call.args, call.kwargs, counted)
    num_args = len(tensors)
    environment = environment_of(call.target, _places(arguments, tensors), arguments.code(), call.apart)
    _refuse_reached(arguments, objects, environment.reached)
    in_backward = InBackward(environment)
    apart = are_apart(call.args, call.kwargs)

    def fn(*flat: torch.Tensor) -> list[Any]:
        inner_args, inner_kwargs, inner_objects = arguments.unflatten(flat[:num_args])
        if settings.is_compiling:
            scope.enter_context(said_to_be_compiling())
        scope.enter_context(_tracing_modules(environment, flat[num_args:]))
        scope.enter_context(no_results_kept(environment.reached.caches))
        scope.enter_context(intercept_checks((checks := Checks()).note))
        run = functools.partial(call.run, *inner_args, **inner_kwargs)
        in_backward.watch_given = functools.partial(
            MutatedArguments, inner_args, inner_kwargs, inner_objects, apart=apart
        )
        changes = _Changes(in_backward.watch_given(), checks, in_backward, prints=call.prints)
        keeps_history = not call.differentiates
        return _call(environment, run, changes, flat, examples, settings, keeps_history=keeps_history)

    slots = [Slot("primal", path) for path in arguments.tensor_paths()]
    slots += [Slot("primal", tensor.path) for tensor in environment.state]
    examples = [*tensors, *(tensor.value for tensor in environment.state)]
    program = Program(fn, Row(slots), Row(examples))
    dims = {**_dynamic_dims(tensors if settings.dynamic is True else (), examples), **call.dims}
    paths = dict(zip(arguments.tensor_paths(), tensors, strict=True))
    closed_over = _closed_over(environment)
    state = ((tensor.source(), tensor.value) for tensor in environment.state)
    places = [*_places(arguments, tensors), *state, *environment.reached.tensors]
    closed_over = {**_bases(places), **closed_over}
    scope.enter_context(own_attributes(environment.modules.values()))
    return Captured(
        program=program,
        arguments=arguments,
        environment=environment,
        ambient=ambient(),
        closed_over=closed_over,
        places=places,
        name=call.name,
        dims=dims,
        guessed={} if call.guess is None else call.guess(paths),
        in_backward=in_backward,
        number=call.number,
    )


def _refuse_reached(arguments: Arguments, objects: Sequence[Any], reached: Reached) -> None:
    """Refuse an argument object that the program also finds elsewhere: a trace is given another instance."""
    owners = {id(owner): source for source, owner in reached.assignable.owners}
    for instance, value in zip(arguments.instances, objects, strict=True):
        if (source := owners.get(id(value))) is not None:
            raise UnsupportedProgram(
                f"`{instance.path}` is an object that the program also finds in `{source.path}`",
                stage="capture",
                fix="pass it, or close over it, but not both",
            )


def _places(arguments: Arguments, tensors: Sequence[torch.Tensor]) -> list[tuple[Source, torch.Tensor]]:
    """The places of the tensors among the arguments: where to read their attributes, bases and gradients."""
    paths = arguments.tensor_paths()
    return [
        (Source(path, Argument(position, tensor)), tensor)
        for position, (path, tensor) in enumerate(zip(paths, tensors, strict=True))
    ]


def _dynamic_dims(
    everywhere: Sequence[torch.Tensor], marked: Sequence[torch.Tensor]
) -> Mapping[int, frozenset[int]]:
    """The marked dimensions of some tensors, and all dimensions of those that are dynamic `everywhere`."""
    dims = {id(tensor): found for tensor in marked if (found := marked_dims(tensor))}
    return dims | {id(tensor): frozenset(range(tensor.dim())) for tensor in everywhere}


@dataclass(frozen=True, slots=True)
class _Changes:
    """What records the changes of one call, besides `Assignments`.

    Args:
        given: changes of containers and objects among the arguments.
        checks: checks of data.
        in_backward: is told what the forward assigned.
        prints: whether prints are noted.
    """

    given: MutatedArguments
    checks: Checks
    in_backward: InBackward
    prints: bool


@contextlib.contextmanager
def _tracing_modules(environment: Environment, stand_ins: tuple[torch.Tensor, ...]) -> Generator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(swapped(environment.state, stand_ins))
        pairs = zip(environment.state, stand_ins, strict=True)
        hung = {id(tensor.value): stand_in for tensor, stand_in in pairs}
        stack.enter_context(recurrent_layers_referring_to(environment.modules.values(), hung))
        for claim in environment.rules:
            stack.enter_context(claim.rule.capturing(claim.root, annotate))
        stack.enter_context(following_modules(environment.modules))
        yield


def _call(
    environment: Environment,
    run: Callable[[], Any],
    changes: _Changes,
    inputs: Sequence[torch.Tensor],
    examples: Sequence[torch.Tensor],
    settings: Settings,
    *,
    keeps_history: bool,
) -> list[Any]:
    """Run the user's code; returns its flat results, what it assigned, and how to put them back."""
    assignments = environment.assignments()
    reached = environment.reached
    with (
        no_python_random(reached.python_generators),
        none_advanced((*reached.opaque, *reached.assignable.owners)),
    ):
        found = _run(run, changes, assignments, inputs, examples)
    if settings.report_side_effects:
        for path in assignments.side_effects():
            warnings.warn(
                f"aotdist: `{path}` was assigned while capturing; compiled calls will not assign it again",
                stacklevel=2,
            )
    for clock in environment.reached.times:
        warnings.warn(
            f"aotdist: the program reads the time (`{clock}`), and every call will find that of the capture; "
            "read it outside of the compiled function",
            stacklevel=2,
        )
    outs, log = _outputs(found, changes.checks, inputs, detaches=not keeps_history)
    outs, shown = with_attributes(outs, inputs, environment.reached, assignments.existing)
    how = Returned(
        spec=found.spec,
        log=log,
        replaced=tuple(found.replaced),
        shown=tuple(shown),
        checks=tuple(changes.checks.made),
        shares=any(isinstance(out, MadeObject) for out in outs),
        counted=tuple(changes.given.counted),
    )
    return [*outs, how]


def _outputs(
    found: _Found, checks: Checks, inputs: Sequence[torch.Tensor], *, detaches: bool
) -> tuple[list[Any], EffectLog]:
    """All outputs of the program, and its effects, in which results stand for outputs.

    Args:
        found: what the user's code did.
        checks: what it checked.
        inputs: the stand-ins.
        detaches: whether what it assigned has no history: its backward has run already.
    """
    outs = list(found.leaves)

    def output(leaf: Any) -> TensorResult:
        outs.append(leaf)
        return TensorResult(len(outs) - 1)

    def assigned(leaf: Any) -> TensorResult:
        return output(_without_history(leaf, inputs) if detaches else leaf)

    effects: list[Effect] = [Assign(place, Tree.of(value).map(assigned)) for place, value in found.assigned]
    effects += [Assign(place, Tree.of(value)) for place, value in found.constants]
    effects += map(Delete, found.deleted)
    outs += [*found.replaced.values(), *checks.outs]
    printed = [replace(each, given=each.given.map(output)) for each in found.printed]
    return outs, EffectLog((*printed, *effects))


@dataclass(frozen=True, slots=True)
class _Found:
    """What the user's code did; the places that it assigned hold again what they held before.

    Args:
        leaves: the leaves of what it returned.
        spec: the structure of that.
        assigned: places that were assigned tensors, or containers of tensors, and these.
        constants: places that were assigned constants, or containers of constants, and these.
        deleted: places that were deleted.
        replaced: tensors that were put inside of wrappers: see `replaced_inside`.
        printed: what it printed.
    """

    leaves: Sequence[Any]
    spec: pytree.TreeSpec
    assigned: Sequence[tuple[Source, Any]]
    constants: Sequence[tuple[Source, Any]]
    deleted: Sequence[Source]
    replaced: Mapping[tuple[int, str], torch.Tensor]
    printed: Sequence[Print]


def _run(
    run: Callable[[], Any],
    changes: _Changes,
    assignments: Assignments,
    inputs: Sequence[torch.Tensor],
    examples: Sequence[torch.Tensor],
) -> _Found:
    """Run the user's code on stand-ins.

    Args:
        run: the code.
        changes: record what it does besides assignments.
        assignments: has what it may assign, as that was before.
        inputs: the stand-ins.
        examples: what they stand for.
    """
    inside, prints = inside_wrappers(inputs), Prints(assignments.existing)
    try:
        hearing = prints.heard() if changes.prints else contextlib.nullcontext()
        with class_functions_on(), modes_left_alone(), hearing:
            result = run()
        changes.checks.close()
        hand_over_attributes(inputs, examples)
        apart = taken_apart(result, assignments.existing, made := dict[int, int](), changes.given.positions)
        leaves, spec = pytree.tree_flatten(apart, is_leaf=is_leaf)
        assigned = assignments.collect(changes.given.positions)
        constants, gone = assignments.collect_constants()
        changes.in_backward.forward_left([*assigned, *constants, *((place, ABSENT) for place in gone)])
        return _Found(
            leaves=leaves,
            spec=spec,
            assigned=[*assigned, *changes.given.assigned(made)],
            constants=constants,
            deleted=[*changes.given.deleted(), *gone],
            replaced=replaced_inside(inputs, inside),
            printed=prints.noted(),
        )
    except BaseException as error:
        prints.fail(error)
        assignments.roll_back()
        refuse_carried(error, assignments.existing)
        raise


def _without_history(value: Any, inputs: Sequence[torch.Tensor]) -> Any:
    """What was assigned, detached; a tensor that was there before the call is returned as it is."""
    if not isinstance(value, torch.Tensor) or value.grad_fn is None or is_real(value):
        return value
    return value if any(value is one for one in inputs) else value.detach()


def _bases(places: Iterable[tuple[Source, torch.Tensor]]) -> dict[int, Source]:
    """What tensors are views of, by identity, with where to read it."""
    views = ((source, tensor) for source, tensor in places if tensor._base is not None)
    return {id(tensor._base): source.attribute("_base") for source, tensor in views}


def _closed_over(environment: Environment) -> dict[int, Source]:
    found = {id(value): source for source, value in environment.reached.tensors}
    for source, value in attribute_tensors(environment.modules):
        found.setdefault(id(value), source)
    for claim in environment.rules:
        for path, owner, name in claim.rule.lifted(claim.root):
            value = getattr(owner, name)
            if value is not None:
                found.setdefault(id(value), Source(path, owner).attribute(name, path))
    return found
