"""Captures one call of the user's function or module as a `Program` of flat, named tensors.

Its inputs are the tensors among the arguments, then the parameters and buffers of every module that the
function is or reaches. Tensors that it closes over become inputs when the trace first uses them. Its outputs
are the leaves of the result, then tensors that were assigned to attributes, and last a `Returned`, a constant
that tells how to rebuild the result and repeat the assignments.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from aotdist.capture.ambient import ambient, modes_left_alone
from aotdist.capture.argument_mutation import MutatedArguments, are_distinct
from aotdist.capture.arguments import Arguments, read_arguments
from aotdist.capture.assignments import Assignments, changed_outside_of_modules
from aotdist.capture.captured import Captured, Environment, Returned, UserCall, environment_of
from aotdist.capture.constants import is_leaf
from aotdist.capture.draws import no_python_random, none_advanced
from aotdist.capture.effects import (
    Assign,
    Check,
    Checks,
    Delete,
    Effect,
    EffectLog,
    Print,
    TensorResult,
    Tree,
)
from aotdist.capture.environment import Reached
from aotdist.capture.in_backward import InBackward
from aotdist.capture.instances import MadeObject, taken_apart
from aotdist.capture.leaked_tensors import no_results_kept, refuse_carried
from aotdist.capture.modules import (
    attribute_tensors,
    following_modules,
    swapped,
)
from aotdist.capture.prints import Prints
from aotdist.capture.results import (
    hand_over_attributes,
    inside_wrappers,
    refuse_attributes,
    refuse_replaced,
)
from aotdist.capture.source import ABSENT, Argument, Source
from aotdist.errors import UnsupportedProgram
from aotdist.program import Program, Row, Slot
from aotdist.settings import Settings
from aotdist.subclasses.protocol import is_real, is_wrapper, rule_of
from aotdist.torch_seam.checks import intercept_checks
from aotdist.torch_seam.control_flow import said_to_be_compiling
from aotdist.torch_seam.modes import class_functions_on
from aotdist.torch_seam.modules import own_attributes, recurrent_layers_referring_to
from aotdist.torch_seam.symbols import SYMBOLIC, as_pytorchs
from aotdist.torch_seam.tensors import marked_dims
from aotdist.torch_seam.trees import pytree


def capture(
    call: UserCall, settings: Settings, scope: contextlib.ExitStack, counted: Container[str] = ()
) -> Captured:
    """Describe one call as a program.

    Args:
        call: the call.
        settings: how to compile.
        counted: paths of numbers among its arguments for which symbols stand.
        scope: keeps stand-ins in the modules, as this thread sees them, and hooks replaced, from when the
            program runs until it is closed. It must outlast the backward, whose hooks may run a forward
            again.

    Raises:
        UnsupportedProgram: an argument cannot be an input, or a module rule refuses.
    """
    arguments, tensors, objects = read_arguments(call.args, call.kwargs, counted)
    num_args = len(tensors)
    environment = environment_of(call.target, _places(arguments, tensors), arguments.code(), call.excluded)
    _refuse_reached(arguments, objects, environment.reached)
    in_backward = InBackward(environment)
    distinct = are_distinct(call.args, call.kwargs)

    def fn(*flat: torch.Tensor) -> list[Any]:
        inner_args, inner_kwargs, inner_objects = arguments.unflatten(flat[:num_args])
        if settings.is_compiling:
            scope.enter_context(said_to_be_compiling())
        scope.enter_context(_tracing_modules(environment, flat[num_args:]))
        scope.enter_context(no_results_kept(environment.reached.caches))
        scope.enter_context(intercept_checks((checks := Checks()).note))
        run = functools.partial(call.run, *inner_args, **inner_kwargs)
        in_backward.watch_given = functools.partial(
            MutatedArguments, inner_args, inner_kwargs, inner_objects, distinct=distinct
        )
        trace = _Trace(call, environment, in_backward, in_backward.watch_given(), checks, flat, examples)
        return trace.outputs(run, reports_side_effects=settings.report_side_effects)

    slots = [Slot("primal", path) for path in arguments.tensor_paths()]
    slots += [Slot("primal", tensor.path) for tensor in environment.state]
    examples = [*tensors, *(tensor.value for tensor in environment.state)]
    program = Program(fn, Row(slots), Row(examples))
    closed_over = _closed_over(environment)
    state = ((tensor.source(), tensor.value) for tensor in environment.state)
    places = [*_places(arguments, tensors), *state, *environment.reached.tensors]
    inputs = [*examples, *(_sparse_gradients(places) if call.differentiates else ())]
    dims = {**_dynamic_dims(tensors, inputs, settings), **call.dims}
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
        in_backward=in_backward,
        number=call.number,
    )


def _refuse_reached(arguments: Arguments, objects: Sequence[Any], reached: Reached) -> None:
    """Refuse an argument object that the program also finds elsewhere: the trace gets a copy of it."""
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


def _sparse_gradients(places: Iterable[tuple[Source, torch.Tensor]]) -> list[torch.Tensor]:
    """Sparse gradients, whose number of rows differs from batch to batch."""
    return [one.grad for _, one in places if one.is_leaf and one.grad is not None and one.grad.is_sparse]


def _dynamic_dims(
    arguments: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], settings: Settings
) -> Mapping[int, frozenset[int]]:
    """Dynamic dimensions by tensor: marked ones, ragged ones, and all of arguments with `dynamic=True`."""
    dims = {id(tensor): found for tensor in inputs if (found := marked_dims(tensor))}
    if settings.dynamic is not False:
        ragged = ((id(one), rule_of(one).ragged_dims(one)) for one in inputs if is_wrapper(one))
        dims |= {key: dims.get(key, frozenset()) | found for key, found in ragged if found}
    if settings.dynamic is True:
        dims |= {id(tensor): frozenset(range(tensor.dim())) for tensor in arguments}
    return dims


@contextlib.contextmanager
def _tracing_modules(environment: Environment, stand_ins: tuple[torch.Tensor, ...]) -> Generator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(swapped(environment.state, stand_ins))
        pairs = zip(environment.state, stand_ins, strict=True)
        stand_in_of = {id(tensor.value): stand_in for tensor, stand_in in pairs}
        stack.enter_context(recurrent_layers_referring_to(environment.modules.values(), stand_in_of))
        for claim in environment.rules:
            stack.enter_context(claim.rule.capturing(claim.root))
        stack.enter_context(following_modules(environment.modules))
        yield


@dataclass(frozen=True, slots=True)
class _Trace:
    """One run of the user's code on stand-ins.

    Args:
        call: the call.
        environment: what it reaches.
        in_backward: watches the backward, and gets what the forward assigned.
        given: the containers and objects among the arguments.
        checks: the checks of data that the code makes.
        inputs: the stand-ins.
        examples: the tensors for which they stand.
    """

    call: UserCall
    environment: Environment
    in_backward: InBackward
    given: MutatedArguments
    checks: Checks
    inputs: Sequence[torch.Tensor]
    examples: Sequence[torch.Tensor]

    def outputs(self, run: Callable[[], Any], *, reports_side_effects: bool) -> list[Any]:
        """Run the user's code; returns the program's outputs."""
        assignments, reached = self.environment.assignments(), self.environment.reached
        classes = {type(module) for _, outer in reached.modules for module in outer.modules()}
        with (
            no_python_random(reached.python_generators, classes),
            none_advanced((*reached.opaque, *reached.assignable.owners)),
        ):
            outs, how = self._run(run, assignments)
        if reports_side_effects:
            for path in assignments.side_effects():
                warnings.warn(
                    f"aotdist: `{path}` was assigned while capturing; compiled calls will not assign it "
                    "again",
                    stacklevel=2,
                )
        for clock in reached.times:
            warnings.warn(
                f"aotdist: the program reads the time (`{clock}`), and every call will find that of the "
                "capture; read it outside of the compiled function",
                stacklevel=2,
            )
        refuse_attributes(outs, self.inputs)
        return [*outs, replace(how, shares=any(isinstance(out, MadeObject) for out in outs))]

    def _run(self, run: Callable[[], Any], assignments: Assignments) -> tuple[list[Any], Returned]:
        """The outputs, and how to rebuild the result.

        What the code has assigned is undone by means of `assignments`.
        """
        given, checks, in_backward = self.given, self.checks, self.in_backward
        inside, prints = inside_wrappers(self.inputs), Prints(assignments.existing)
        in_backward.watch_forward = functools.partial(changed_outside_of_modules, self.environment.reached)
        in_backward.num_effects = lambda: (len(checks.made), len(prints.made))
        try:
            noting = prints.noting() if self.call.prints else contextlib.nullcontext()
            with class_functions_on(), modes_left_alone(), noting:
                gc.collect(generation=0)  # what is in it afterwards is new; the collector is off
                result = run()
            checks.close()
            hand_over_attributes(self.inputs, self.examples)
            parts = taken_apart(result, assignments.existing, made := dict[int, int](), given.positions)
            leaves, spec = pytree.tree_flatten(parts, is_leaf=is_leaf)
            assigned = assignments.collect(given.positions, made)
            constants, gone = assignments.collect_constants()
            # Traced numbers of a step are symbols that are read off tensors.
            constants = [(place, Tree.of(value).map(_as_symbol).value()) for place, value in constants]
            in_backward.forward_left([*assigned, *constants, *((place, ABSENT) for place in gone)])
            refuse_replaced(self.inputs, inside)
            assigned += given.assigned(made)
            deleted, printed = [*given.deleted(), *gone], prints.made
        except BaseException as error:
            prints.fail(error)
            assignments.roll_back()
            refuse_carried(error, assignments.existing)
            raise
        outs = list(map(_as_symbol, leaves))  # those in an object; of others the step makes tensors
        trees = [(place, Tree.of(value).map(_as_symbol)) for place, value in assigned]
        if self.call.differentiates:  # its backward has run already
            detached = functools.partial(_without_history, inputs=self.inputs)
            trees = [(place, tree.map(detached)) for place, tree in trees]
        effects = [*(Assign(place, Tree.of(value)) for place, value in constants), *map(Delete, deleted)]
        log = _log(outs, trees, checks.made, printed, effects)
        return outs, Returned(spec, log, counted=tuple(given.counted))


def _log(
    outs: list[Any],
    assigned: Iterable[tuple[Source, Tree]],
    checks: Iterable[Check],
    printed: Iterable[Print],
    effects: Iterable[Effect],
) -> EffectLog:
    """The log of what a program does in Python; the tensors in it become outputs.

    Args:
        outs: the outputs; more are added.
        assigned: places that were assigned tensors, or containers of tensors, and these.
        checks: the checks of data.
        printed: what the program printed.
        effects: effects without tensors.
    """

    def output(leaf: Any) -> TensorResult:
        outs.append(leaf)
        return TensorResult(len(outs) - 1)

    assigns = [Assign(place, tree.map(output)) for place, tree in assigned]
    checked = [replace(each, holds=each.holds.map(output)) for each in checks]
    prints = [replace(each, given=each.given.map(output)) for each in printed]
    return EffectLog((*prints, *checked, *assigns, *effects))


def _as_symbol(leaf: Any) -> Any:
    return as_pytorchs(leaf) if isinstance(leaf, SYMBOLIC) else leaf


def _without_history(value: Any, inputs: Sequence[torch.Tensor]) -> Any:
    """A value that was assigned, detached; a tensor from before the call is returned as it is."""
    if not isinstance(value, torch.Tensor) or value.grad_fn is None or is_real(value):
        return value
    return value if any(value is one for one in inputs) else value.detach()


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
