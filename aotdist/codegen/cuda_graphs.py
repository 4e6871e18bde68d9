"""Compiled graphs recorded as CUDA graphs, one for each signature of sizes.

The first call of a signature runs as it is, and warms up. The second is recorded, and from then on it is
replayed: the GPU repeats its launches, at the addresses that they had. So

- parameters and buffers are used where they lie, which is looked at in each call, and so is what another
  recording returned: the saved values of a backward. Other inputs are copied to where the recording reads
  them;
- results lie where they lay before. The recording keeps their memory and lends it: each replay returns
  tensors of other storages over the same bytes. While anybody holds one of them, or a view of one, the next
  call runs without the recording, so several steps may be in flight. What a forward returns to the user is
  copied out: a loss is held until the next one takes its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch

from aotdist.codegen.contract import BoxedCall, Emission, Emitted, Recordings
from aotdist.codegen.cuda_capture import CudaGraphCapture, recorded_device
from aotdist.errors import UnsupportedProgram
from aotdist.program import Graph
from aotdist.torch_seam.tensors import StorageWeakRef, another_storage, copy_each

CAPTURE = CudaGraphCapture()
"""Tests put one here that needs no GPU."""

_MOST_RECORDINGS = 3
"""How often one signature is recorded: parameters that move more often are not worth waiting for."""

_MOST_SIZES = 8
"""Signatures of sizes that a graph is recorded for, if `max_artifacts` is more: each holds a GPU's memory."""

_NOT_REPLAYED = "the forward ran without its recording"

NOT_SETTLED = "the strides of a library's results had to be looked at"
"""Why a call was not recorded: the kernels for it were not known yet."""

_kept: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""The memory that recordings keep for their results, by its address."""


def with_cuda_graphs(emitted: Emitted, graph: Graph, emission: Emission) -> Emitted:
    """What records and replays a compiled graph.

    Args:
        emitted: the graph, compiled.
        graph: the same, to look at.
        emission: what is known of it.

    Raises:
        UnsupportedProgram: it cannot be recorded.
    """
    device = recorded_device(graph, emission.static_ins, CAPTURE.device_type)
    if device is None:
        return emitted
    call = GraphedCall(
        call=emitted.call,
        emission=emission,
        device=device,
        leaving=frozenset(position for position, slot in enumerate(graph.outs) if slot.role == "output"),
        capture=CAPTURE,
        is_settled=emitted.is_settled,
    )
    return replace(emitted, call=call, recordings=call.recordings)


_View: TypeAlias = tuple[torch.dtype, int, Sequence[int], Sequence[int]]
"""How a tensor sees its storage: dtype, offset in elements, sizes and strides."""


_Made: TypeAlias = Callable[[Sequence[Any], Sequence[torch.UntypedStorage]], Any]
"""Makes a result of a replay's inputs and of the storages over the memory that the recording keeps."""


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    """A graph, recorded.

    Args:
        replay: computes the results.
        place: where it was recorded, and must be replayed.
        addresses: of the inputs that are used where they lie, by position.
        copied: where other inputs are copied to, by position.
        kept: the memory of the results, in bytes.
        results: make what is returned.
        lent: who holds results of the last replay.
    """

    replay: Callable[[], None]
    place: Hashable
    addresses: dict[int, int]
    copied: dict[int, torch.Tensor]
    kept: tuple[torch.Tensor, ...]
    results: tuple[_Made, ...]
    lent: list[StorageWeakRef]

    def is_in_use(self) -> bool:
        """Whether anybody holds a result of the last replay."""
        return not all(reference.expired() for reference in self.lent)

    def run(self, args: list[Any]) -> list[Any]:
        """Copy what moves, replay, and lend the results."""
        _copy_all(self.copied, args)
        self.replay()
        storages = [another_storage(memory) for memory in self.kept]
        self.lent[:] = [StorageWeakRef(storage) for storage in storages]
        results = [made(args, storages) for made in self.results]
        args.clear()
        return results


@dataclass(frozen=True, slots=True, eq=False)
class GraphedCall:
    """A boxed call that is recorded, once for each signature of sizes.

    Args:
        call: runs the graph.
        emission: what is known of the graph: which inputs keep their address from call to call, and which the
            forward computed, and its recording keeps.
        device: on which it runs.
        leaving: positions of results that are copied out.
        capture: how recordings are made.
        is_settled: see `Emitted`; other calls are not recorded.
    """

    call: BoxedCall
    emission: Emission
    device: torch.device
    leaving: frozenset[int]
    capture: CudaGraphCapture
    is_settled: Callable[[Sequence[Any]], bool] | None = None
    recorded: dict[Hashable, _Recording | None] = field(default_factory=dict[Hashable, _Recording | None])
    made: Counter[Hashable] = field(default_factory=Counter[Hashable])
    replays: Counter[Hashable] = field(default_factory=Counter[Hashable])
    without: Counter[str] = field(default_factory=Counter[str])

    def recordings(self) -> Recordings:
        """What was recorded until now, for reports."""
        return Recordings(self.made.total(), self.replays.total(), dict(self.without))

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Replay the call, or record it, or run it.

        Raises:
            UnsupportedProgram: recording it fails.
        """
        key = self._signature_of(args)
        if key not in self.recorded:
            if len(self.recorded) >= min(_MOST_SIZES, self.emission.settings.max_artifacts):
                return self._run(args, "more sizes than `max_artifacts`")
            self.recorded[key] = None
            self.without["to warm up"] += 1
            return self.capture.warm(lambda: self.call(args), self.device)
        why = self._why_not(key, args)
        if why is not None:
            return self._run(args, why)
        recording = self.recorded[key]
        if recording is None:
            recording = self.recorded[key] = self._record(args)
            self.made[key] += 1
        self.replays[key] += 1
        return recording.run(args)

    def _run(self, args: list[Any], why: str) -> Sequence[Any]:
        self.without[why] += 1
        return self.call(args)

    def _signature_of(self, args: Sequence[Any]) -> Hashable:
        static = self.emission.static_ins
        return tuple(
            (arg.shape, arg.stride()) if isinstance(arg, torch.Tensor) else arg
            for position, arg in enumerate(args)
            if position not in static
        )

    def _why_not(self, key: Hashable, args: Sequence[Any]) -> str | None:
        """Why a call cannot be replayed or recorded now; drops a recording whose parameters have moved."""
        recording = self.recorded[key]
        if recording is None:
            return self._why_not_yet(args)
        if recording.is_in_use():
            return "results of the last replay are in use"
        if recording.place != self.capture.place(self.device):
            return "on another stream than it was recorded for"
        moved = {at for at, address in recording.addresses.items() if args[at].data_ptr() != address}
        if any(_memory_of(args[at]) is None for at in moved - self.emission.static_ins):
            return _NOT_REPLAYED
        if not moved:
            return None
        if self.made[key] >= _MOST_RECORDINGS:
            return "parameters keep moving"
        self.recorded[key] = None
        return self._why_not_yet(args)

    def _why_not_yet(self, args: Sequence[Any]) -> str | None:
        """Saved values would be copied for ever if they lay elsewhere while the backward is recorded."""
        if self.emission.saved_ins and not any(
            _memory_of(args[position]) is not None for position in self.emission.saved_ins
        ):
            return _NOT_REPLAYED
        return None if self.is_settled is None or self.is_settled(args) else NOT_SETTLED

    def _record(self, args: Sequence[Any]) -> _Recording:
        """A recording of the call: it reads inputs where they lie, or where they are copied to.

        Raises:
            UnsupportedProgram: the graph cannot be recorded.
        """
        addresses: dict[int, int] = {}
        copied: dict[int, torch.Tensor] = {}
        inputs = list(args)
        for position, arg in enumerate(args):
            if not isinstance(arg, torch.Tensor):
                continue
            memory = _memory_of(arg)
            if memory is not None:
                inputs[position] = _tensor(memory.untyped_storage(), *_view_of(arg))
                addresses[position] = arg.data_ptr()
            elif position in self.emission.static_ins:
                inputs[position] = arg.detach()
                addresses[position] = arg.data_ptr()
            else:
                inputs[position] = copied[position] = _buffer_like(arg)
        _copy_all(copied, args)  # a capture may run while it records
        borrowed = {_address(buffer) for buffer in copied.values()}

        def run() -> Sequence[Any]:
            return [_copied_out_of(borrowed, result) for result in self.call(list(inputs))]

        try:
            replay, results = self.capture.record(run, self.device)
        except Exception as error:
            raise UnsupportedProgram(
                f"`{self.emission.name} {self.emission.kind}` cannot be recorded as a CUDA graph: {error}",
                stage="codegen",
                fix="leave `cuda_graphs` off for this program",
            ) from error
        makers, kept = _makers_of(results, inputs, self.leaving)
        _kept.update({memory.data_ptr(): memory for memory in kept})
        place = self.capture.place(self.device)
        return _Recording(replay, place, addresses, copied, kept, makers, lent=[])


def _copy_all(copied: Mapping[int, torch.Tensor], args: Sequence[Any]) -> None:
    """Copy inputs to where the recording reads them."""
    if copied:
        targets, sources = copied.values(), (args[position] for position in copied)
        copy_each([_compact(target) for target in targets], [_compact(source) for source in sources])


def _copied_out_of(addresses: Collection[int], result: Any) -> Any:
    """The result, cloned if it lies in the copy of an input (at one of `addresses`)."""
    if isinstance(result, torch.Tensor) and _address(result) in addresses:
        return result.clone()
    return result


def _makers_of(
    results: Sequence[Any], inputs: Sequence[Any], leaving: Collection[int]
) -> tuple[tuple[_Made, ...], tuple[torch.Tensor, ...]]:
    """What makes each result, and the memory to be kept for those that do not lie in an input.

    Args:
        results: of the run that was recorded.
        inputs: of that run.
        leaving: positions of results that are copied out.
    """
    input_at = {_address(arg): at for at, arg in enumerate(inputs) if isinstance(arg, torch.Tensor)}
    kept: dict[int, torch.Tensor] = {}
    made: list[_Made] = []
    for at, result in enumerate(results):
        if not isinstance(result, torch.Tensor) or not result.untyped_storage().nbytes():
            made.append(partial(_constant, result))
        elif (position := input_at.get(_address(result))) is not None:
            view = None if result is inputs[position] else _view_of(result)
            made.append(partial(_of_input, position, view))
        else:
            kept.setdefault(_address(result), _bytes_of(result))
            memory = list(kept).index(_address(result))
            made.append(partial(_lent, memory, _view_of(result), at in leaving))
    return tuple(made), tuple(kept.values())


def _constant(value: Any, _args: Any, _storages: Any) -> Any:
    """A result that is the same at every call: a number, or a tensor without bytes."""
    return value


def _of_input(position: int, view: _View | None, args: Sequence[Any], _: Any) -> torch.Tensor:
    """A result that is an input or a view of one; kernels may have written it in place."""
    return args[position] if view is None else _tensor(args[position].untyped_storage(), *view)


def _lent(
    memory: int, view: _View, leaves: bool, _: Any, storages: Sequence[torch.UntypedStorage]
) -> torch.Tensor:
    """A result in memory that the recording keeps; copied out if it leaves."""
    lent = _tensor(storages[memory], *view)
    return _copied(lent) if leaves else lent


def _tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    sizes: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, sizes, strides)


def _view_of(tensor: torch.Tensor) -> _View:
    return tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's whole storage, as bytes."""
    storage = tensor.untyped_storage()
    return _tensor(storage, torch.uint8, 0, (storage.nbytes(),), (1,))


def _memory_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The memory of a recording's results that a tensor lies in, if any."""
    return _kept.get(_address(tensor))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _buffer_like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor with the sizes and strides of another; expanded where that is expanded."""
    compact = _compact(tensor)
    buffer = torch.empty_strided(compact.shape, compact.stride(), dtype=tensor.dtype, device=tensor.device)
    return _tensor(buffer.untyped_storage(), tensor.dtype, 0, tensor.shape, tensor.stride())


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copy = _buffer_like(tensor)
    _compact(copy).copy_(_compact(tensor))
    return copy


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """A view of an expanded tensor in which each element occurs once."""
    if 0 not in tensor.stride():
        return tensor
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())
