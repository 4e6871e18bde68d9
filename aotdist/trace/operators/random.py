"""Which random numbers an operation of the traced program draws.

A checkpointed region runs again in the backward, with the generator put back to where it stood, and must draw
the numbers of the forward, not new ones. No generator moves while only fakes are computed, so each recorded
draw advances one: that of a GPU, or a copy of the CPU's, as other threads may draw from that meanwhile. An
operation that finds the generator in the state in which an equal operation found it repeats that draw, and
gets its result. Whatever else the program does to the generator (`manual_seed`, `fork_rng`) would be lost in
the graph, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.ambient import default_generator_is, generator_id, times_seeded_elsewhere
from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.symbols import hint
from aotdist.torch_seam.trees import pytree
from aotdist.trace.failures import refusal


class Draws:
    """Remembers the draws of one trace; a context manager that leaves the generators as they were."""

    def __init__(self) -> None:
        self.are_refused = False
        """Whether nothing may be drawn, as in a branch of `cond`."""
        self._made: dict[Hashable, Any] = {}
        self._repeated: set[int] = set()
        self._users: set[int] = set()
        self._generators: dict[torch.device, _Generator] = {}
        self._scope = ExitStack()

    def __enter__(self) -> Draws:
        self._default, copied = torch.default_generator, torch.Generator("cpu")
        self._seed, self._seeded_elsewhere = self._default.initial_seed(), times_seeded_elsewhere()
        with no_modes():
            self._before = self._default.get_state()
            copied.set_state(self._before)
        self._generators[torch.device("cpu")] = _Generator(copied)
        self._scope.enter_context(default_generator_is(copied))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._scope.close()
        self._restore()

    def _restore(self) -> None:
        if self._is_seeded():
            with no_modes():
                self._default.set_state(self._before)
        for generator in self._generators.values():
            generator.restore()

    def _is_seeded(self) -> bool:
        """Whether the program has seeded the default generator by a method of its own (`manual_seed`).

        All threads draw from that generator, so only a new seed shows it; if another thread has seeded it
        meanwhile, nothing does.
        """
        was_seeded = self._default.initial_seed() != self._seed
        return was_seeded and self._seeded_elsewhere == times_seeded_elsewhere()

    def allow(self, generators: Iterable[torch.Generator]) -> None:
        """Let the program draw from these generators of the user's."""
        self._users.update(map(generator_id, generators))

    def draw(self, func: OpOverload, args: Any, kwargs: Any, record: Callable[[], Any]) -> Any:
        """The result of a random operation: that of an equal one from the same state, or what `record` makes.

        Raises:
            UnsupportedProgram: the program set the state of the generator, or draws from one of its own, or
                where nothing may be drawn.
        """
        if self.are_refused:
            raise refusal(
                "a function that is handed to an operator (a branch of `cond`) draws random numbers",
                fix="draw them outside of it",
            )
        given = kwargs.get("generator")
        if given is not None and generator_id(given) != generator_id(torch.default_generator):
            self._refuse_unknown(given)
            return record()
        generator = self._generator(args, kwargs)
        key = (func, generator.state(), *map(_describe, pytree.tree_leaves((args, kwargs))))
        if key in self._made:
            generator.move()
            self._repeated.update(map(id, pytree.tree_leaves(self._made[key])))
            return self._made[key]
        generator.check()
        result = self._made[key] = record()
        generator.advance()
        return result

    def are_repeated(self, value: torch.Tensor) -> bool:
        """Whether `value` was drawn, and is the result of a repeated draw, too."""
        return id(value) in self._repeated

    def _refuse_unknown(self, generator: torch.Generator) -> None:
        if generator_id(generator) not in self._users:
            raise refusal(
                "the program draws from a random generator that it makes itself",
                fix="make the generator outside, where the function can read it",
            )

    def check(self) -> None:
        """Raise if the program left a generator in another state than its draws do.

        Raises:
            UnsupportedProgram: the program set the state of a generator.
        """
        if self._is_seeded():
            raise _sets_state()
        for generator in self._generators.values():
            generator.check()

    def _generator(self, args: Any, kwargs: Any) -> _Generator:
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        device = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu"))
        if device.type != "cuda" or not torch.cuda.is_available():
            device = torch.device("cpu")
        elif not device.index and str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._generators:
            self._generators[device] = _Generator(torch.cuda.default_generators[device.index])
        return self._generators[device]


class _Generator:
    """A generator, and the state in which our last step left it."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        with no_modes():
            self._before = generator.get_state()
        self._expected = self.state()

    def state(self) -> bytes:
        """The state of the generator."""
        with no_modes():
            return self._generator.get_state().numpy().tobytes()

    def check(self) -> None:
        """Raise unless the generator is in the state in which our last step left it."""
        if self.state() != self._expected:
            raise _sets_state()

    def advance(self) -> None:
        """Move one step for a new draw, as the graph will move the generator."""
        self.move()
        self._expected = self.state()

    def move(self) -> None:
        """Move one step: only that the state changes matters, not the number."""
        with no_modes():
            torch.empty(1, device=self._generator.device).uniform_(generator=self._generator)

    def restore(self) -> None:
        """Put the generator back in its first state."""
        with no_modes():
            self._generator.set_state(self._before)


def _sets_state() -> UnsupportedProgram:
    return refusal(
        "the program sets the state of the random generator (`manual_seed`, `fork_rng`)",
        fix="set it outside of the compiled function",
    )


def _describe(leaf: Any) -> Hashable:
    """What an argument of a random operation contributes to what is drawn."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.device, *map(hint, (*leaf.size(), *leaf.stride()))
    return type(leaf), str(leaf)
