"""Callables that compile themselves for each new kind of call: functions, modules, containers of modules."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from aotdist.capture.captured import UserCall
from aotdist.capture.compile_lock import alone, waited_for_lock
from aotdist.capture.module_attributes import ATTACHED, Explain, GraphList, PrintedSource
from aotdist.capture.prints import made_before
from aotdist.compiling import Maker
from aotdist.errors import InternalError
from aotdist.origins import holding, shortened
from aotdist.report.explain import Explained
from aotdist.runtime.artifact import Artifact, Artifacts, Kind, call_fitting
from aotdist.runtime.guards import MISS
from aotdist.runtime.ranks import number_of_its_kind, present
from aotdist.subclasses.protocol import ContainerRule
from aotdist.torch_seam.dynamo import tapes_off
from aotdist.torch_seam.modes import under_transform
from aotdist.torch_seam.modules import uncompiled_call
from aotdist.trace.failures import AccumulatesInside

_eager: ContextVar[bool] = ContextVar("aotdist_eager", default=False)
"""Whether compiled functions that this thread calls run eagerly."""


def runs_eagerly() -> bool:
    """Whether a compiled call is to run eagerly.

    It is inside `torch.func` transforms and forward-mode differentiation as well: these batch, or
    differentiate, the operators that they see. So it is in anomaly mode, where autograd names the operator of
    the forward whose backward fails or returns NaN.
    """
    return _eager.get() or under_transform() or torch.is_anomaly_enabled()


@contextmanager
def running_eagerly() -> Generator[None]:
    """Compiled functions that this thread calls inside run eagerly, and make no artifacts."""
    with holding(_eager, True):
        yield


class AsWritten(Exception):
    """A call is refused whose container (DDP, for example) has to run eagerly, too."""


class Compiled(Explained):
    """A callable that compiles itself for each new kind of call.

    A call runs the artifact that fits. If there is none, one is made: the call is captured and compiled, or
    what was built ahead of time is loaded.

    Attributes:
        artifacts: the artifacts made so far, most recently used first.
        in_container: whether a refused call raises `AsWritten` for its container.
    """

    def __init__(self, target: Any, run: Callable[..., Any], make: Maker) -> None:
        self._target = target
        self._run = run
        self._make = make
        self._number = 0
        self.artifacts = Artifacts()
        self.in_container = False
        EVERY_COMPILED.add(self)
        present()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the artifact that fits; make one if there is none."""
        if runs_eagerly():
            return self._run(*args, **kwargs)
        if self.artifacts.refused and self.is_refused(args, kwargs):
            return self._as_written(args, kwargs)
        result = call_fitting(self.artifacts, args, kwargs)
        if result is not MISS:
            return result
        try:
            result = self._called_anew(args, kwargs)
        except Exception as error:
            made_before(error)
            raise shortened(error)  # noqa: B904  # the same one
        return self._as_written(args, kwargs) if result is MISS else result

    def is_refused(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether calls with such arguments run eagerly, because one was refused."""
        refused = bool(self.artifacts.refused)
        return refused and self.artifacts.is_refused(Kind.of(self._call(args, kwargs)))

    def _as_written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.in_container:
            raise AsWritten
        return self._run(*args, **kwargs)

    def _called_anew(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Make an artifact and run it; `MISS` if such calls are to run eagerly.

        Meanwhile, another thread may have made one that fits, or changed what this one was compiled for.
        """
        made: list[Artifact] = []
        result = MISS
        while result is MISS:
            if len(made) >= (_MOST_MADE if threading.active_count() > 1 else 1):
                raise InternalError(
                    f"`{made[-1].compilation.captured.name}` does not fit the call that it was compiled for",
                    stage="runtime",
                    fix="please report this with the program; `aotdist.disable` runs it eagerly",
                )
            if (artifact := self._made_in_turn(args, kwargs)) is not None:
                made.append(artifact)
            elif self.is_refused(args, kwargs):
                return MISS
            result = call_fitting(self.artifacts, args, kwargs)
        return result

    @alone
    def _made_in_turn(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Artifact | None:
        """A new artifact; None if this thread had to wait for another, whose artifact may fit."""
        return None if waited_for_lock() else self._made(args, kwargs)

    def _made(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Artifact | None:
        with running_eagerly(), tapes_off():
            artifact = self._make(self._call(args, kwargs), self.artifacts)
        if artifact is not None:
            self.artifacts.put_first(artifact)
        return artifact

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> UserCall:
        return UserCall(self._target(), self._run, args, kwargs, number=self._number)

    def _compiled_parts(self) -> Sequence[Artifacts]:
        return [self.artifacts]

    def reset(self) -> None:
        """Forget every artifact."""
        self.artifacts.clear()


_MOST_MADE = 4
"""How many artifacts are made for one call, while other threads change what it reads."""

EVERY_COMPILED: weakref.WeakSet[Compiled] = weakref.WeakSet()
"""All compiled callables, for `reset`."""


class CompiledFunction(Compiled):
    """A compiled function: it keeps the name, the docstring and the signature of the original.

    Attributes that scripts set, and read, are those of the original, too (`step.calls += 1`); and like it, a
    copy is the function itself, and a pickle is its name.

    Args:
        fn: the function.
        make: makes artifacts.
        as_step: makes a training step of it, once it turns out to be one.
        step: the training step, if it is known to be one.
    """

    __wrapped__: Callable[..., Any]

    def __init__(
        self,
        fn: Callable[..., Any],
        make: Maker,
        as_step: Callable[[], Explained] | None = None,
        step: Explained | None = None,
    ) -> None:
        super().__init__(lambda: fn, fn, make)
        self._as_step = as_step
        self._step = step
        functools.update_wrapper(self, fn, updated=())

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if "__wrapped__" not in vars(self):
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "__wrapped__" in vars(self) and name not in vars(self):
            setattr(self.__wrapped__, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__wrapped__, name)

    def __reduce__(self) -> str:
        return self.__qualname__

    def _called_anew(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the training step, if the function is known or found to be one."""
        if self._step is None:
            try:
                return super()._called_anew(args, kwargs)
            except AccumulatesInside:
                if self._as_step is None:
                    raise
                self.artifacts.clear()
                self._step = self._as_step()
        return self._step(args, kwargs)

    def _compiled_parts(self) -> Sequence[Artifacts]:
        return super()._compiled_parts() if self._step is None else self._step._compiled_parts()

    def reset(self) -> None:
        """Forget every artifact."""
        super().reset()
        if self._step is not None:
            self._step.reset()


class CompiledModule(Compiled):
    """The compiled call of a module; it is an attribute of the module, and does not keep it alive."""

    def __init__(self, module: nn.Module, make: Maker) -> None:
        reference = weakref.ref(module)

        def target() -> nn.Module:
            alive = reference()
            assert alive is not None, "a module outlives its own call"
            return alive

        def run(*args: Any, **kwargs: Any) -> Any:
            return uncompiled_call(target())(*args, **kwargs)

        super().__init__(target, run, make)
        self._number = number_of_its_kind(module)
        self._shown_on = weakref.WeakSet([module])
        self._attach()

    def show_on(self, module: nn.Module) -> None:
        """Set `source`, `graphs` and `explain` on another module, too."""
        self._shown_on.add(module)
        self._attach()

    def _made(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Artifact | None:
        artifact = super()._made(args, kwargs)
        self._attach()
        return artifact

    def reset(self) -> None:
        """Forget every artifact."""
        super().reset()
        self._attach()

    def _attach(self) -> None:
        """Set `source`, `graphs` and `explain` on the module, unless it has attributes of these names."""
        shown = {
            "source": PrintedSource(self.source),
            "graphs": GraphList(self.graphs),
            "explain": Explain(self.explain),
        }
        for module in self._shown_on:
            for name, value in shown.items():
                if isinstance(vars(module).get(name), ATTACHED) or not hasattr(module, name):
                    vars(module)[name] = value

    def hide(self) -> None:
        """Delete these attributes from modules, whose call this is no more."""
        for module in self._shown_on:
            for name in [name for name, value in vars(module).items() if isinstance(value, ATTACHED)]:
                del vars(module)[name]
        self._shown_on.clear()


class ContainerCall:
    """The call of a module that runs its own forward around a compiled one (DDP, Fabric's wrapper).

    Args:
        container: the module; not kept alive.
        rule: what to do around each call.
        contained: the compiled call of the module inside.
    """

    def __init__(self, container: nn.Module, rule: ContainerRule, contained: CompiledModule) -> None:
        self._container = weakref.ref(container)
        self._rule = rule
        self.contained = contained
        contained.show_on(container)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the container's own forward."""
        container = self._container()
        assert container is not None, "a module outlives its own call"
        if runs_eagerly():
            return uncompiled_call(container)(*args, **kwargs)
        contained, outer = self.contained, self.contained.in_container
        if self._rule.communicates and contained.is_refused(args, kwargs):
            return self._as_written(container, args, kwargs)
        contained.in_container = outer or self._rule.communicates
        try:
            with self._rule.calling(container):
                return uncompiled_call(container)(*args, **kwargs)
        except AsWritten:
            if outer:
                raise
        finally:
            contained.in_container = outer
        return self._as_written(container, args, kwargs)

    def _as_written(self, container: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with running_eagerly():  # the container's own hooks then reduce gradients
            return uncompiled_call(container)(*args, **kwargs)
