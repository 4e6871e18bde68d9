"""A backend that looks in the cache before it compiles a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, TypeVar

from aotdist.artifacts.cache.folder import Entry, Folder, Turn
from aotdist.artifacts.cache.key import about, key_of, key_of_toolchain, read, with_origins, written
from aotdist.artifacts.live import NOTHING_LIVE
from aotdist.artifacts.typed import ERRORS_OF_READING
from aotdist.artifacts.values import Json, Values
from aotdist.codegen.contract import Backend, Emission, Emitted, Portable
from aotdist.codegen.inductor import InductorBackend
from aotdist.codegen.portable import emitted_from
from aotdist.errors import UnsupportedProgram
from aotdist.program import Graph
from aotdist.settings import Settings
from aotdist.torch_seam.functional import FakeTensor, FakeTensorMode
from aotdist.torch_seam.inductor import inductor_config


def caching(backend: Backend, settings: Settings) -> Backend:
    """`backend` with a cache around it, if it is Inductor.

    `fx` emits in a hundredth of the trace's time, and kernels of `triton` are in Triton's own cache.

    Args:
        backend: the user's choice.
        settings: where the cache is.
    """
    if not isinstance(backend, InductorBackend) or settings.cache_bytes == 0:
        return backend
    return CachingBackend(else_fx=backend.else_fx, settings=settings, folder=folder_of(settings))


def folder_of(settings: Settings) -> Folder:
    """The folder of the cache."""
    return Folder.within(Path(settings.cache_folder).expanduser() / "compiled", settings.cache_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachingBackend(InductorBackend):
    """Inductor with a cache.

    Args:
        settings: how to compile, and where the cache is.
        folder: the cache.
    """

    settings: Settings
    folder: Folder

    def check(self) -> None:
        """Check that there is a C++ compiler: once for a machine, since it takes 0.3 s.

        The check also starts to precompile headers, which a process that only finds entries does not need.

        Raises:
            BadSettings: there is none.
        """
        lookup = self._at(key_of_toolchain(), "C++", "toolchain")
        if lookup.find(lambda entry: entry) is not None:
            return
        try:
            InductorBackend.check(self)
            lookup.fill(None, ())
        finally:
            lookup.release()

    def prepare_joint(self, graph: Graph) -> Graph:
        """Inductor's rewrite of a joint or an inference graph, from the cache if it is there.

        After a miss, the graph is written and read as well, so that the keys of later graphs are the same.
        """
        vals = [node.meta.get("val") for node in graph.placeholders()]
        mode = next((val.fake_mode for val in vals if isinstance(val, FakeTensor)), None)
        lookup = self._lookup("joint", "program", graph, mode)
        if mode is None or lookup is None:
            InductorBackend.check(self)
            return InductorBackend.prepare_joint(self, graph)
        found = lookup.find(lambda entry: read(entry.content, graph, mode))
        if found is not None:
            return found
        try:
            InductorBackend.check(self)
            prepared = InductorBackend.prepare_joint(self, graph)
            try:
                content = written(prepared, mode)
            except UnsupportedProgram:
                return prepared
            lookup.fill(content, ())
            return with_origins(read(content, graph, mode), prepared)
        finally:
            lookup.release()

    def emit(self, graph: Graph, emission: Emission) -> Emitted:
        """The compiled graph, from the cache if it is there."""
        more = (emission.kind, sorted(emission.static_ins), sorted(emission.saved_ins))
        lookup = self._lookup(emission.kind, emission.name, graph, emission.fake_mode, *more)
        label = f"{emission.name} {emission.kind}"
        found = lookup.find(lambda entry: emitted_from(_portable_in(entry), label)) if lookup else None
        if found is not None:
            return replace(found, from_cache=True)
        if lookup is None:
            InductorBackend.check(self)
            return InductorBackend.emit(self, graph, emission)
        try:
            InductorBackend.check(self)
            with inductor_config(fx_graph_cache=False):  # it would keep the same, pickled
                emitted = InductorBackend.emit(self, graph, emission)
        except BaseException:
            lookup.release()
            raise
        return replace(emitted, finish=_finishing(emitted, lookup))

    def _lookup(
        self, what: str, name: str, graph: Graph, fake_mode: FakeTensorMode | None, *more: Any
    ) -> CacheLookup | None:
        """The cache lookup for a graph; None if its result cannot be cached."""
        if fake_mode is None:
            return None
        try:
            key = key_of(what, graph, fake_mode, self.settings, *more)
        except UnsupportedProgram:
            return None
        return self._at(key, name, what)

    def _at(self, key: str, name: str, what: str) -> CacheLookup:
        return CacheLookup(self.folder, key, about(name, what), self.settings.rank_timeout_s / 2)


def _finishing(emitted: Emitted, lookup: CacheLookup) -> Callable[[], None]:
    """A function that waits for the compiler, and keeps its output."""

    def finish() -> None:
        try:
            emitted.finish()
            portable = emitted.portable() if emitted.portable else None
            if portable is not None:
                lookup.fill(_portable_written(portable), portable.libraries)
        finally:
            lookup.release()

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


class CacheLookup:
    """The search for one entry; after a miss, it holds the right of this process to make the entry.

    Args:
        folder: the cache.
        key: see `key.key_of`.
        about: what the entry is, for people.
        patience_s: how long to wait for another process that is making it.
    """

    def __init__(self, folder: Folder, key: str, about: Mapping[str, str], patience_s: float) -> None:
        self._folder = folder
        self._key = key
        self._about = about
        self._patience_s = patience_s
        self._turn: Turn | None = None

    def find(self, read: Callable[[Entry], T]) -> T | None:
        """What `read` makes of the entry; None if there is none: this process is then to make it."""
        found = self._read(read)
        if found is None:
            self._turn = self._folder.turn(self._key, self._patience_s)
            found = self._read(read)  # another process may have made it meanwhile
        if found is not None:
            self.release()
        return found

    def fill(self, content: Any, binaries: tuple[bytes, ...]) -> None:
        """Keep what was made."""
        self._folder.keep(Entry(self._key, self._about, content, binaries))

    def release(self) -> None:
        """Let the next process look. Idempotent."""
        if self._turn is not None:
            self._turn.release()

    def _read(self, read: Callable[[Entry], T]) -> T | None:
        entry = self._folder.get(self._key)
        if entry is None:
            return None
        try:
            return read(entry)
        except (*ERRORS_OF_READING, OSError, ImportError) as error:
            self._folder.warn(f"the entry {self._key} is ignored: {type(error).__name__}: {error}")
            return None
