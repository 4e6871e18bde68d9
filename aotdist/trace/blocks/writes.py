"""Buffers that a call of a block writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Node

from aotdist.aliasing.overwrite import version_of
from aotdist.torch_seam.functional import FunctionalTensor, data_writes, is_functional_base, memory_of
from aotdist.trace.blocks.kinds import Unfit
from aotdist.trace.recorder import Recorder
from aotdist.trace.tracer import NotInstantiable


@dataclass(frozen=True, slots=True)
class Write:
    """A tensor that a call was given and wrote (a buffer).

    Args:
        position: of the tensor, among the plain ones that the call was given.
        node: its new value.
        num_versions: by how much its version counter rose.
    """

    position: int
    node: Node
    num_versions: int


def counts_of(plains: Iterable[FunctionalTensor]) -> list[tuple[int, int]]:
    """How often the data of each tensor has been written, and its version."""
    return [(data_writes(plain), version_of(plain)) for plain in plains]


def writes_since(
    before: Sequence[tuple[int, int]], plains: Sequence[FunctionalTensor], made: set[Node], recorder: Recorder
) -> tuple[Write, ...]:
    """The tensors that were written since `before`, which `counts_of` gave.

    Raises:
        Unfit: one is no buffer with memory of its own.
    """
    memories, found = Counter(map(memory_of, plains)), list[Write]()
    for position, (plain, was, now) in enumerate(zip(plains, before, counts_of(plains), strict=True)):
        if was[0] == now[0]:
            continue
        is_buffer = is_functional_base(plain) and not plain.requires_grad and memories[memory_of(plain)] == 1
        if not is_buffer or recorder.value(plain) not in made:
            raise Unfit("it writes to what it is given, and that is no buffer")
        found.append(Write(position, recorder.value(plain), now[1] - was[1]))
    return tuple(found)


def check_unwritten(written: Iterable[tuple[FunctionalTensor, Node]], recorder: Recorder) -> None:
    """Check, when its backward runs, that tensors which a block wrote still hold what it wrote.

    Raises:
        NotInstantiable: one was written again.
    """
    if any(recorder.value(tensor) is not node for tensor, node in written):
        raise NotInstantiable("what a block wrote was written again")
