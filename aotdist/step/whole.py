"""A function that calls `backward()` or steps optimizers, compiled as one program without autograd."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from aotdist.compiled import AsWritten
from aotdist.compiling import Compiling
from aotdist.report.explain import Explained
from aotdist.runtime.artifact import Artifacts
from aotdist.step.held import HeldState, held_by, hyperparameters
from aotdist.step.program import StepInputs, StepProgram
from aotdist.step.result import Varies
from aotdist.step.stepping import MakesState, ReadsAhead
from aotdist.torch_seam.dynamo import compiled_as_written
from aotdist.torch_seam.modules import within
from aotdist.torch_seam.optimizers import intercept_steps, optimizer_hooks

_VARYING = frozenset({"lr"})
"""Hyperparameters that are graph inputs from the first trace on; others once they are seen to change."""


class WholeStep(Explained):
    """A training step of the user's.

    Its first call runs eagerly, and so does any later one in which an optimizer or a scaler creates state.

    Args:
        run: the user's function.
        make: compiles it.
    """

    def __init__(self, run: Callable[..., Any], make: Compiling) -> None:
        self.run = run
        self.make = make
        self._optimizers: list[torch.optim.Optimizer] = []
        self._varying = set(_VARYING)
        self._hyperparameters: list[dict[str, Any]] = []
        self._held: HeldState | None = None
        self._names: dict[int, str] = {}
        self._modules: list[weakref.ref[nn.Module]] = []
        self._ahead: list[weakref.ref[Any]] = []
        self._has_run = False
        self._awaited: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self._programs: dict[Any, list[StepProgram]] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Do a step; returns what the user's function returns."""
        awaited = self._awaited()
        if not self._has_run or (awaited is not None and not awaited.state):
            return self.as_written(args, kwargs)
        self._notice_what_varies()
        schedules = [reference() for reference in self._ahead]
        now = StepInputs(self._held_now(), () if None in schedules else schedules)
        try:
            return self._program(now, args, kwargs)(now, args, kwargs)
        except AsWritten:
            return self.as_written(args, kwargs)
        except MakesState as found:
            if found.optimizer is None or not found.optimizer.state:
                if found.optimizer is not None:  # a scaler may skip many of its steps; a trace takes 90 ms
                    self._awaited = weakref.ref(found.optimizer)
                return self.as_written(args, kwargs)
            self._know(found.optimizer, hyperparameters([found.optimizer]))
        except ReadsAhead as found:
            self._ahead = [weakref.ref(schedule) for schedule in found.schedules]
        except Varies as found:
            self._vary({found.key})
        return self(args, kwargs)

    def as_written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Do a step eagerly, and note which optimizers step and still exist afterwards."""
        stepped: list[tuple[weakref.ref[torch.optim.Optimizer], list[dict[str, Any]]]] = []

        def note(optimizer: torch.optim.Optimizer) -> None:
            stepped.append((weakref.ref(optimizer), hyperparameters([optimizer])))

        with intercept_steps(note, lambda _: None), within(self._name), compiled_as_written():
            result = self.run(*args, **kwargs)
        for reference, found in stepped:
            if (optimizer := reference()) is not None:
                self._know(optimizer, found)
        self._has_run = True
        return result

    def _compiled_parts(self) -> list[Artifacts]:
        return [program.compiled.artifacts for program in self._made()]

    def reset(self) -> None:
        """Forget every artifact; the next call compiles again."""
        self._programs.clear()

    def _made(self) -> Iterator[StepProgram]:
        return itertools.chain(*self._programs.values())

    def _know(self, optimizer: torch.optim.Optimizer, found: list[dict[str, Any]]) -> None:
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
            self._awaited = lambda: None
            self._hyperparameters += found
            self._held = None

    def _name(self, module: nn.Module) -> None:
        """Note the names of a module's parameters; called for outer modules first."""
        new = [(id(param), name) for name, param in module.named_parameters() if id(param) not in self._names]
        if new:
            self._names.update(new)
            self._modules.append(weakref.ref(module))

    def _held_now(self) -> HeldState:
        held = None if self._held is None else self._held.now(self._optimizers)
        self._held = held or held_by(self._optimizers, self._names, self._varying)
        return self._held

    def _program(self, now: StepInputs, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StepProgram:
        """The program that fits this call, or a new one."""
        layout = (
            tuple((id(optimizer), optimizer_hooks(optimizer)) for optimizer in self._optimizers),
            tuple(now.held.layout),
            tuple(self._params()),
            (*map(id, now.asked), len(now.ahead)),
        )
        programs = self._programs.setdefault(layout, [])
        for program in programs:
            if program.fits(now, args, kwargs):
                return program
        programs.append(StepProgram(self.run, self._optimizers, self.make))
        return programs[-1]

    def _params(self) -> Iterator[int]:
        """Identities of the modules' parameters, which may no longer be those of the optimizers."""
        for reference in self._modules:
            module = reference()
            yield from map(id, () if module is None else module.parameters())

    def _notice_what_varies(self) -> None:
        """Make hyperparameters that changed since the last call graph inputs from now on."""
        now = hyperparameters(self._optimizers)
        for before, after in zip(self._hyperparameters, now, strict=False):
            self._vary({key for key in before.keys() & after.keys() if before[key] != after[key]})
        self._hyperparameters = now

    def _vary(self, keys: set[Any]) -> None:
        if not keys <= self._varying:
            self._varying |= keys
            self._held = None
