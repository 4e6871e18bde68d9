"""A backend that looks whether a graph was compiled before, and compiles it if not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, TypeVar

from aotdist.artifacts.cache.folder import Entry, Folder, Turn
from aotdist.artifacts.cache.key import about, key_of, key_of_toolchain, read, with_origins, written
from aotdist.artifacts.live import NOTHING_LIVE
from aotdist.artifacts.values import Json, Values
from aotdist.codegen.contract import Backend, Emission, Emitted, Portable
from aotdist.codegen.inductor import InductorBackend
from aotdist.codegen.portable import emitted_from
from aotdist.errors import AotdistError, UnsupportedProgram
from aotdist.program import Graph
from aotdist.settings import Settings
from aotdist.torch_seam.functional import FakeTensor, FakeTensorMode
from aotdist.torch_seam.inductor import inductor_config


def caching(backend: Backend, settings: Settings) -> Backend:
    """`backend`, which looks in the cache before it compiles, if that is worth its while.

    `fx` emits in a hundredth of the time that the trace before it takes, and `triton` keeps kernels with
    Triton's own.

    Args:
        backend: of the user's choice.
        settings: say where the cache is.
    """
    if not isinstance(backend, InductorBackend) or settings.cache_bytes == 0:
        return backend
    return CachingBackend(else_fx=backend.else_fx, settings=settings, folder=folder_of(settings))


def folder_of(settings: Settings) -> Folder:
    """Where what is compiled is kept."""
    return Folder.within(Path(settings.cache_folder).expanduser() / "compiled", settings.cache_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachingBackend(InductorBackend):
    """Inductor behind a folder of what it made before.

    Args:
        settings: how to compile, and where the cache is.
        folder: what was compiled.
    """

    settings: Settings
    folder: Folder

    def check(self) -> None:
        """See that what compiling needs is there: once for a machine, since it takes 0.3 s.

        It also starts on the headers of kernels, which is the work of whoever will compile.

        Raises:
            BadSettings: it is not.
        """
        place = self._at(key_of_toolchain(), "C++", "toolchain")
        if place.look(lambda entry: entry) is not None:
            return
        try:
            InductorBackend.check(self)
            place.fill(None, ())
        finally:
            place.leave()

    def prepare_joint(self, graph: Graph) -> Graph:
        """Rewrite a joint or an inference graph as the compiler does, or did.

        The graph is what was written of it, whether it was found or not: what is made of it next has one key.
        """
        vals = [node.meta.get("val") for node in graph.placeholders()]
        mode = next((val.fake_mode for val in vals if isinstance(val, FakeTensor)), None)
        place = self._place("joint", "program", graph, mode)
        if mode is None or place is None:
            InductorBackend.check(self)
            return InductorBackend.prepare_joint(self, graph)
        found = place.look(lambda entry: read(entry.content, graph, mode))
        if found is not None:
            return found
        try:
            InductorBackend.check(self)
            prepared = InductorBackend.prepare_joint(self, graph)
            try:
                content = written(prepared, mode)
            except UnsupportedProgram:
                return prepared
            place.fill(content, ())
            return with_origins(read(content, graph, mode), prepared)
        finally:
            place.leave()

    def emit(self, graph: Graph, emission: Emission) -> Emitted:
        """Compile a graph, or take what was made of one that was the same."""
        more = (emission.kind, sorted(emission.static_ins), sorted(emission.saved_ins))
        place = self._place(emission.kind, emission.name, graph, emission.fake_mode, *more)
        label = f"{emission.name} {emission.kind}"
        found = None if place is None else place.look(lambda entry: emitted_from(_portable_in(entry), label))
        if found is not None:
            return replace(found, from_cache=True)
        if place is None:
            InductorBackend.check(self)
            return InductorBackend.emit(self, graph, emission)
        try:
            InductorBackend.check(self)
            with inductor_config(fx_graph_cache=False):  # which would keep it once more, pickled
                emitted = InductorBackend.emit(self, graph, emission)
        except BaseException:
            place.leave()
            raise
        return replace(emitted, finish=_finishing(emitted, place))

    def _place(
        self, what: str, name: str, graph: Graph, fake_mode: FakeTensorMode | None, *more: Any
    ) -> Place | None:
        """Where what is made of a graph is kept; None if it cannot be."""
        if fake_mode is None:
            return None
        try:
            key = key_of(what, graph, fake_mode, self.settings, *more)
        except UnsupportedProgram:
            return None
        return self._at(key, name, what)

    def _at(self, key: str, name: str, what: str) -> Place:
        return Place(self.folder, key, about(name, what), self.settings.rank_timeout_s / 2)


def _finishing(emitted: Emitted, place: Place) -> Callable[[], None]:
    """What waits for the compiler, and keeps what it made."""

    def finish() -> None:
        try:
            emitted.finish()
            portable = emitted.portable() if emitted.portable else None
            if portable is not None:
                place.fill(_portable_written(portable), portable.libraries)
        finally:
            place.leave()

    return finish


def _portable_written(portable: Portable) -> Json:
    values = Values(NOTHING_LIVE, {})
    fields = {field.name: getattr(portable, field.name) for field in fields_of(portable)}
    del fields["libraries"]
    return {name: values.written(value, "what was compiled") for name, value in fields.items()}


def _portable_in(entry: Entry) -> Portable:
    values = Values(NOTHING_LIVE, {})
    fields = {name: values.read(json) for name, json in entry.content.items()}
    return Portable(**fields, libraries=entry.binaries)


T = TypeVar("T")

_UNREADABLE = (AotdistError, OSError, ImportError, LookupError, TypeError, ValueError, AttributeError)
"""What reading an entry raises whose content is not what this aotdist writes."""


class Place:
    """A key of a folder, and the turn of this process to fill it.

    Args:
        folder: that it is in.
        key: see `key.key_of`.
        about: what is kept there, for people.
        patience_s: how long to wait for another process that is making it.
    """

    def __init__(self, folder: Folder, key: str, about: Mapping[str, str], patience_s: float) -> None:
        self._folder = folder
        self._key = key
        self._about = about
        self._patience_s = patience_s
        self._turn: Turn | None = None

    def look(self, read: Callable[[Entry], T]) -> T | None:
        """What is kept there; None if it is to be made, which is then this process's turn.

        Args:
            read: makes it of the entry.
        """
        found = self._read(read)
        if found is None:
            self._turn = self._folder.turn(self._key, self._patience_s)
            found = self._read(read)  # by whoever had the turn before
        if found is not None:
            self.leave()
        return found

    def fill(self, content: Any, binaries: tuple[bytes, ...]) -> None:
        """Keep what was made."""
        self._folder.keep(Entry(self._key, self._about, content, binaries))

    def leave(self) -> None:
        """Let the next one look. Idempotent."""
        if self._turn is not None:
            self._turn.release()

    def _read(self, read: Callable[[Entry], T]) -> T | None:
        entry = self._folder.get(self._key)
        if entry is None:
            return None
        try:
            return read(entry)
        except _UNREADABLE as error:
            self._folder.warn(f"the entry {self._key} is ignored: {type(error).__name__}: {error}")
            return None
