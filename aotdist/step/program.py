"""The traced form of a step: a function of its arguments and of what its optimizers hold."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from aotdist.capture.source import Source
from aotdist.compiled import CompiledFunction
from aotdist.compiling import Compiling
from aotdist.errors import UnsupportedProgram
from aotdist.facts import DataGuard
from aotdist.step.accumulation import Accumulation
from aotdist.step.held import HeldItem, HeldState, methods_of
from aotdist.step.result import StepResult
from aotdist.step.stepping import MakesState, TracedSteps, steps_ahead
from aotdist.subclasses.protocol import SparseRows
from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.optimizers import note_step, optimizer_hooks, scaler_rules, scaler_state
from aotdist.torch_seam.patches import formulas_under_modes
from aotdist.torch_seam.proxies import node_here
from aotdist.torch_seam.symbols import SYMBOLIC, hint, number_kind
from aotdist.torch_seam.trees import pytree
from aotdist.trace.numbers.scalars import DTYPES, KNOWN, Scalars
from aotdist.trace.stand_ins import current_inputs


class StepInputs:
    """What a step gets at a call besides its arguments.

    Args:
        held: what the optimizers hold.
        asked: the schedules that step before the call, in order, since the program reads what they set.
    """

    def __init__(self, held: HeldState, asked: Sequence[Any]) -> None:
        self.held, self.asked = held, asked
        self.ahead = steps_ahead(asked, held)
        places = (*held.numbers, *itertools.chain(*self.ahead))
        named = [(f"{place.path}.{at}", n) for place in places for at, n in enumerate(place.numbers())]
        self.numbers = {name: _tensor_of(number) for name, number in named}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that the optimizers hold and that schedules will set, by name."""
        return {**{place.path: place.value for place in self.held.tensors}, **self.numbers}

    def known_before(self) -> dict[str, torch.Tensor]:
        """The tensors whose value can be read before the step without waiting: they are on the CPU."""
        plain = [place for place in self.held.tensors if type(place.value) is torch.Tensor]
        single = {place.path: place.value for place in plain if place.value.dim() == 0 and place.value.is_cpu}
        return {**self.numbers, **single}


@dataclass(frozen=True, slots=True)
class _Choice:
    """The branches that a step took on numbers.

    Args:
        guard: repeats the comparisons with the numbers of another call.
        given: where its numbers are, besides those that optimizers hold: positions among the leaves of the
            arguments, and places.
    """

    guard: DataGuard
    given: tuple[int | Source, ...]

    def holds(self, held: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call would take the same branches."""
        leaves = dict(enumerate(pytree.tree_leaves((args, kwargs)))) if self.given else {}
        numbers = [key.found() if isinstance(key, Source) else leaves.get(key) for key in self.given]
        return None not in map(number_kind, numbers) and self.guard.is_same(*held, *map(_tensor_of, numbers))


def _copied(held: HeldState, given: Mapping[str, torch.Tensor]) -> dict[str, SparseRows]:
    """Copies of the sparse tensors that optimizers hold, for the step to write; by name."""
    copies = {path: each.again() for path, each in given.items() if isinstance(each, SparseRows)}
    for place in held.tensors:
        if place.path in copies:
            place.put(copies[place.path])
    return copies


def _read(place: HeldItem, given: Mapping[str, torch.Tensor]) -> list[Any]:
    """The numbers of a place, read off the graph inputs that hold them."""
    return [given[f"{place.path}.{at}"].item() for at in range(len(place.numbers()))]


def _tensor_of(number: Any) -> torch.Tensor:
    kind = number_kind(number)
    assert kind is not None, "a number"
    return torch.tensor(number, dtype=DTYPES[kind])


class StepProgram:
    """A step, compiled for one layout of the optimizers' state and one choice of branches.

    Args:
        run: the user's function.
        optimizers: those that are known to step in it.
        make: compiles it.
    """

    def __init__(
        self, run: Callable[..., Any], optimizers: Sequence[torch.optim.Optimizer], make: Compiling
    ) -> None:
        self._run = run
        self._optimizers = tuple(optimizers)
        self._now: StepInputs | None = None
        self._asked: _Choice | None = None
        self._choices: list[_Choice] = []
        self._scalers: dict[torch.amp.GradScaler, Any] = {}
        # Of each trace: the optimizers that step, and the schedules that do when the call has run.
        self._traces = list[tuple[Sequence[torch.optim.Optimizer], Sequence[Any]]]()
        self.compiled = CompiledFunction(
            _reaching(run, optimizers, self._traced),
            lambda call, artifacts: make(
                replace(call, differentiates=True, excluded=self._containers()), artifacts
            ),
        )
        self.compiled.in_container = True  # nothing compiled for a step is a way to do one with values

    def _containers(self) -> list[Any]:
        """Containers that the trace handles itself: what the optimizers hold, and this object."""
        assert self._now is not None, "a trace belongs to a call"
        return [*self._now.held.all_containers(), self]

    def fits(self, now: StepInputs, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the step would take the same branches as when it was traced."""
        if any(_rules_of(scaler) != rules for scaler, rules in self._scalers.items()):
            return False
        held = list(now.known_before().values()) if self._choices else []
        return all(choice.holds(held, args, kwargs) for choice in self._choices)

    def __call__(self, now: StepInputs, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Do the step; returns what the user's function returns.

        Args:
            now: what the optimizers hold.
            args: of the user's function.
            kwargs: likewise.

        Raises:
            AsWritten: the step was refused; nothing has been done.
            MakesState: an optimizer creates state, or is not known; nothing has been done.
            ReadsAhead: the step reads what a schedule sets; nothing has been done.
        """
        self._now, self._asked = now, None
        try:
            done: StepResult = self.compiled(*args, **kwargs, **now.tensors())
        finally:
            self._now = None
        if self._asked is not None:
            self._choices.append(self._asked)
        done.assign(now.held)
        stepped, schedules = self._traces[done.trace]
        for optimizer in stepped:
            note_step(optimizer)
        result, later = done.read_results()
        for schedule, (args, kwargs) in zip(schedules, later, strict=True):
            schedule.step(*args, **kwargs)
        return result

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepResult:
        """The step, on stand-ins."""
        now = self._now
        assert now is not None, "a trace belongs to a call"
        for optimizer in self._optimizers:
            _check(optimizer)
        held, given = now.held, {name: kwargs.pop(name) for name in now.tensors()}
        numbers = _Numbers(args, kwargs)
        known = [(given[name], real) for name, real in now.known_before().items()]
        scalars = Scalars([*known, *numbers.read_off()], node_here)
        accumulation = Accumulation()
        done = StepResult(trace=len(self._traces))
        with held.put_back(), accumulation.running(), scalars.followed(), formulas_under_modes():
            for place in held.numbers:
                place.put(*_read(place, given))
            ahead = [[(place, _read(place, given)) for place in places] for places in now.ahead]
            args, kwargs = numbers.put()
            scalars.reads = False
            put, copies = [place.owner[place.key] for place in held.numbers], _copied(held, given)
            written = functools.partial(_written_by, held=held)
            steps = TracedSteps(self._optimizers, scalars, written, ahead, now.asked)
            with steps.intercepted():
                done.note_results(accumulation.as_given(self._run(*args, **kwargs)), steps.later)
            if held.has_grown():
                raise MakesState
            numbers.take_back()
            stand_ins = {id(place.value): {**given, **copies}[place.path] for place in held.tensors}
            done.note_replaced(held, stand_ins, put)
        scalars.is_over = True
        _refuse_skipped(steps, done)
        done.assigned, done.cleared = accumulation.assigned(), accumulation.cleared()
        copied = ((given[path], copy) for path, copy in copies.items())
        done.note_overwritten([*accumulation.begun(), *copied])
        self._traces.append((steps.stepped, steps.schedules))
        guard = scalars.guard()
        self._asked = None if guard is None else _Choice(guard, numbers.keys)
        self._scalers.update({scaler: _rules_of(scaler) for scaler in steps.scalers()})
        return done


class _Numbers:
    """Numbers that may differ from call to call: arguments, and those that the program finds elsewhere.

    Args:
        args: of a traced step, symbols among them.
        kwargs: likewise.

    Attributes:
        keys: positions among the leaves of the arguments, and places.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._leaves, self._spec = pytree.tree_flatten((args, dict(kwargs)))
        places = [count.place for count in current_inputs().counts() if not count.is_given]
        keyed: list[tuple[int | Source, Any]] = [
            *((at, leaf) for at, leaf in enumerate(self._leaves) if type(leaf) in SYMBOLIC),
            *((place, place.read()) for place in places),
        ]
        self.keys = tuple(key for key, _ in keyed)
        self._symbols = [symbol for _, symbol in keyed]
        self._stand_ins = list(map(_holding, self._symbols))

    def read_off(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each, the tensor that the program reads it off, and one with the value of this call."""
        for symbol, stand_in in zip(self._symbols, self._stand_ins, strict=True):
            with no_modes():
                yield stand_in, _tensor_of(hint(symbol))

    def put(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put traced numbers in their places; returns the arguments with those in them."""
        self._numbers: list[Any] = [stand_in.item() for stand_in in self._stand_ins]
        for number, symbol in zip(self._numbers, self._symbols, strict=True):
            number.symbol = symbol
        for key, number in zip(self.keys, self._numbers, strict=True):
            if isinstance(key, Source):
                key.write(number)
            else:
                self._leaves[key] = number
        return pytree.tree_unflatten(self._leaves, self._spec)

    def take_back(self) -> None:
        """Put the symbols back in places that the program has not assigned."""
        for place, number, symbol in zip(self.keys, self._numbers, self._symbols, strict=True):
            if isinstance(place, Source) and place.read_or(None) is number:
                place.write(symbol)


def _holding(symbol: Any) -> torch.Tensor:
    stand_in = torch.scalar_tensor(symbol, dtype=DTYPES[type(hint(symbol))])
    node_here(stand_in).meta[KNOWN] = hint(symbol)
    return stand_in


def _refuse_skipped(steps: TracedSteps, done: StepResult) -> None:
    """Refuse changes that could not be undone where a scaler skips a step."""
    if steps.scalers() and (done.tensors or done.numbers):
        names = " or ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in steps.stepped))
        raise UnsupportedProgram(
            f"{names} counts in Python, or replaces its tensors, and a scaler may skip its step",
            stage="capture",
            fix="let it count in a tensor, and write its tensors in place",
        )


def _check(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step does in Python what each call would have to repeat."""
    what, fix = None, ""
    if optimizer_hooks(optimizer):
        what = "has hooks of its step (`register_step_pre_hook`, `register_step_post_hook`)"
        fix = "call what they do before and after the step"
    elif isinstance(optimizer, torch.optim.LBFGS):
        what = "runs the model as often as its search asks for"
        fix = "use `aotdist.compile` for the model, and the optimizer as it is"
    if what is not None:
        raise UnsupportedProgram(f"{type(optimizer).__name__} {what}", stage="capture", fix=fix)


def _rules_of(scaler: torch.amp.GradScaler) -> Any:
    """The part of a scaler that a program is specialised on: its factors, and the tensors of its state."""
    return scaler_rules(scaler), tuple(map(id, scaler_state(scaler)))


def _written_by(optimizer: torch.optim.Optimizer, held: HeldState) -> list[torch.Tensor]:
    """The tensors that the step of an optimizer may write: its parameters, and all that optimizers hold."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [*params, *(place.owner[place.key] for place in held.tensors)]


def _reaching(
    run: Callable[..., Any],
    optimizers: Sequence[torch.optim.Optimizer],
    traced: Callable[[tuple[Any, ...], dict[str, Any]], Any],
) -> Callable[..., Any]:
    """The function to capture; the user's function and the optimizers' methods can be reached from it."""
    methods = [method for optimizer in optimizers for method in methods_of(optimizer)]
    reached = functools.partial(traced, *methods)  # the optimizers' methods, as something callable

    @functools.wraps(run, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    def step(*args: Any, **kwargs: Any) -> Any:
        _ = run, reached
        return traced(args, kwargs)

    del step.__wrapped__
    return step
