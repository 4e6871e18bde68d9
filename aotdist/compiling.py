"""Makes artifacts by compiling, and decides which refused calls run eagerly."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from torch import nn

from aotdist.artifacts.cache.backend import caching
from aotdist.capture.ambient import Ambient, ambient
from aotdist.capture.captured import UserCall
from aotdist.codegen.backend import Compiler, resolve
from aotdist.codegen.contract import Backend
from aotdist.errors import UnsupportedProgram
from aotdist.pipeline import compile_call
from aotdist.runtime.artifact import Artifact, Artifacts, Kind
from aotdist.runtime.ranks import (
    agree,
    board_of_this_process,
    fingerprint_of_state,
)
from aotdist.runtime.signature import Changing, changed_since, symbols_for, what_changed, what_helps
from aotdist.settings import Settings, settings_of
from aotdist.trace.failures import AccumulatesInside

Maker: TypeAlias = Callable[[UserCall, Artifacts], Artifact | None]
"""Makes an artifact for a call that no existing one fits; None if such calls run eagerly from now on."""

OpenDims: TypeAlias = Callable[[UserCall], Mapping[int, frozenset[int]]]
"""From a call to its dynamic dimensions, by the identity of the tensor."""


class Compiling:
    """Makes artifacts by compiling; warns of many recompilations, and when artifacts are first dropped.

    Args:
        backend: turns graphs into callables.
        settings: how to compile.
        open_dims: further dynamic dimensions of a call, besides those that `settings` and marks name.
        else_eager: whether a refused call may run eagerly, if `settings` say so.
    """

    def __init__(
        self,
        backend: Backend,
        settings: Settings,
        open_dims: OpenDims | None = None,
        *,
        else_eager: bool = True,
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._open_dims = open_dims
        self._else_eager = else_eager
        self._warned = set[bool]()  # whether artifacts were being dropped, at each warning
        self._guesses = settings.dynamic == "auto" and open_dims is None
        self._fit_one_size = set[Ambient]()  # modes whose programs cannot have dynamic sizes
        self._numbers: Changing = {}

    def agree_on_state(self, model: nn.Module) -> None:
        """Compare a model's distributed state with the peers', before it runs eagerly.

        Raises:
            RankDivergence: a name, a shape, a dtype, a placement or the order differs.
            RankLost: a peer failed, died, or did not come to compare.
        """
        agree(fingerprint_of_state(model), label=type(model).__name__, settings=self._settings)

    def __call__(self, call: UserCall, artifacts: Artifacts) -> Artifact | None:
        """See `Maker`."""
        if self._else_eager and self._settings.unsupported == "eager":
            return self._compiled_unless_refused(call, artifacts)
        try:
            return self._compiled(call, artifacts)
        except UnsupportedProgram as refusal:
            if self._else_eager and not _is_step(call, refusal):
                refusal.or_else('`Settings(unsupported="eager")` runs such calls as they were written')
            raise

    def _compiled_unless_refused(self, call: UserCall, artifacts: Artifacts) -> Artifact | None:
        kind = Kind.of(call)
        is_agreed = kind.common in artifacts.compiled_kinds
        try:
            artifact = self._compiled(call, artifacts, None if is_agreed else kind.common)
        except UnsupportedProgram as refusal:
            if _is_step(call, refusal):
                raise
            if is_agreed:
                refusal.or_else("`aotdist.reset` it on all ranks, which agreed to run such calls compiled")
                raise
            if artifacts.refuse(kind, refusal):
                said = f"aotdist: such calls of `{call.name}` run as they were written: {refusal}"
                warnings.warn(said, stacklevel=6)
            return None
        if artifact.agreed and board_of_this_process() is not None:
            artifacts.compiled_kinds.add(kind.common)
        return artifact

    def _compiled(self, call: UserCall, artifacts: Artifacts, undecided: str | None = None) -> Artifact:
        symbolic = not any(artifact.compilation.takes_no_symbols() for artifact in artifacts)
        if self._open_dims is not None:
            call = replace(call, dims=self._open_dims(call))
        modes = ambient()
        if self._guesses and symbolic:
            dims, varying = changed_since(call, artifacts, modes, self._numbers)
            call = replace(call, guessed={} if modes in self._fit_one_size else dims, varying=varying)
        settings = self._settings
        if any(artifact.compilation.used_trace() for artifact in artifacts):
            # Gradients of copied blocks have no history, and programs with symbols are not traced anew.
            settings = replace(settings, instantiate=False)
        artifact = compile_call(
            call,
            self._backend,
            settings,
            earlier=artifacts,
            symbolic=symbolic,
            undecided=undecided,
        )
        if call.guessed and not artifact.fit.numbers.sizes.symbols:
            self._fit_one_size.add(modes)
        self._numbers |= symbols_for(call.varying, artifact)
        self._warn_of_many(artifact, artifacts)
        return artifact

    def _warn_of_many(self, artifact: Artifact, others: Artifacts) -> None:
        """Warn of what keeps changing: after `_MANY` artifacts, and again when they begin to be dropped."""
        most, count = self._settings.max_artifacts, len(others)
        drops = count >= most
        if count < min(_MANY, most):
            self._warned.clear()
        elif drops not in self._warned:
            self._warned.add(drops)
            name, changes = artifact.compilation.captured.name, what_changed(artifact, others)
            limit = f"; `max_artifacts` is {most}: for each new program, the one used longest ago is dropped"
            warnings.warn(
                f"aotdist: `{name}` was compiled {count + 1} times; what keeps changing: {changes}; "
                f"{what_helps(artifact, others)}{limit if drops else ''}",
                stacklevel=7,
            )


def _is_step(call: UserCall, refusal: UnsupportedProgram) -> bool:
    """Whether the refused call is of a function that can be compiled as a training step instead."""
    return isinstance(refusal, AccumulatesInside) and not isinstance(call.target, nn.Module)


def compiling(backend: str | Compiler | Backend, settings: Settings | Mapping[str, Any] | None) -> Compiling:
    """The maker of artifacts for a user's backend and settings, with the compile cache.

    Args:
        backend: see `compile`.
        settings: see `compile`.

    Raises:
        BadSettings: the backend or a setting is unknown.
    """
    chosen = settings_of(settings)
    return Compiling(caching(resolve(backend), chosen), chosen)


_MANY = 8
"""The number of artifacts of a function from which on it is likely that it goes on recompiling."""
