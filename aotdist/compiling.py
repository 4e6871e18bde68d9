"""Makes artifacts by compiling, or lets calls that are refused run as they were written."""

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
from aotdist.runtime.artifact import Artifact, Artifacts
from aotdist.runtime.kinds import Kind
from aotdist.runtime.ranks import (
    agree,
    board_of_this_process,
    fingerprint_of_state,
)
from aotdist.runtime.signature import Changing, changed_since, symbols_for, what_changed, what_helps
from aotdist.settings import Settings, settings_of
from aotdist.trace.failures import AccumulatesInside

Maker: TypeAlias = Callable[[UserCall, Artifacts], Artifact | None]
"""Makes an artifact for a call that none of those fits that there are.

None where calls of that kind run as they were written, which `Artifacts.kinds` says.
"""


OpenDims: TypeAlias = Callable[[UserCall], Mapping[int, frozenset[int]]]
"""From a call to the dimensions that are dynamic, by the identity of the tensor."""


class Compiling:
    """Makes artifacts by compiling; warns when that goes on and on, and when artifacts begin to be dropped.

    Args:
        backend: turns graphs into callables.
        settings: how to compile.
        open_dims: says of a call which dimensions may differ from call to call, by the identity of the
            tensor; besides those that `settings` and marks name.
        else_eager: whether a call that is refused may run as it was written, if `settings` say so.
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
        self._said = set[bool]()  # whether programs were dropped, when it was said
        self._guesses = settings.dynamic == "auto" and open_dims is None
        self._fit_one_size = set[Ambient]()  # modes whose programs cannot be compiled for other sizes
        self._numbers: Changing = {}

    def agree_on_state(self, model: nn.Module) -> None:
        """Compare a model's distributed state with the peers', before it runs as it is written.

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
        kind, kinds = Kind.of(call), artifacts.kinds
        is_agreed = kind.common in kinds.agreed
        try:
            artifact = self._compiled(call, artifacts, None if is_agreed else kind.common)
        except UnsupportedProgram as refusal:
            if _is_step(call, refusal):
                raise
            if is_agreed:
                refusal.or_else("`aotdist.reset` it on all ranks, which agreed to run such calls compiled")
                raise
            if kinds.refuse(kind, refusal):
                said = f"aotdist: such calls of `{call.name}` run as they were written: {refusal}"
                warnings.warn(said, stacklevel=6)
            return None
        if artifact.agreed and board_of_this_process() is not None:
            kinds.agreed.add(kind.common)
        return artifact

    def _compiled(self, call: UserCall, artifacts: Artifacts, undecided: str | None = None) -> Artifact:
        symbolic = not any(artifact.compilation.takes_no_symbols() for artifact in artifacts)
        if self._open_dims is not None:
            call = replace(call, dims=self._open_dims(call))
        modes = ambient()
        if self._guesses and symbolic:
            dims, varying = changed_since(call, artifacts, modes, self._numbers)
            call = replace(call, guessed={} if modes in self._fit_one_size else dims, varying=varying)
        artifact = compile_call(
            call,
            self._backend,
            self._settings,
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
        """Say what keeps changing: early, and once more where artifacts begin to be dropped."""
        most, count = self._settings.max_artifacts, len(others)
        drops = count >= most
        if count < min(_MANY, most):
            self._said.clear()
        elif drops not in self._said:
            self._said.add(drops)
            name, changes = artifact.compilation.captured.name, what_changed(artifact, others)
            limit = f"; `max_artifacts` is {most}: for each new program, the one used longest ago is dropped"
            warnings.warn(
                f"aotdist: `{name}` was compiled {count + 1} times; what keeps changing: {changes}; "
                f"{what_helps(artifact, others)}{limit if drops else ''}",
                stacklevel=7,
            )


def _is_step(call: UserCall, refusal: UnsupportedProgram) -> bool:
    """Whether what was refused is a function that is compiled as a step."""
    return isinstance(refusal, AccumulatesInside) and not isinstance(call.target, nn.Module)


def compiling(backend: str | Compiler | Backend, settings: Settings | Mapping[str, Any] | None) -> Compiling:
    """What compiles as a user says, and looks in the cache first.

    Args:
        backend: see `compile`.
        settings: see `compile`.

    Raises:
        BadSettings: the backend or a setting is unknown.
    """
    chosen = settings_of(settings)
    return Compiling(caching(resolve(backend), chosen), chosen)


_MANY = 8
"""How many artifacts a function has before it is asked what keeps changing: it may well go on."""
