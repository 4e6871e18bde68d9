"""Which graphs can be recorded as CUDA graphs, and how a run is recorded and replayed.

A CUDA graph repeats the launches of a run and asks the CPU nothing in between. Tests that need no GPU put a
class of their own in the place of `CudaGraphCapture`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from aotdist.codegen.region_graph import tensors_of
from aotdist.errors import UnsupportedProgram
from aotdist.partition.traits import is_collective, is_random
from aotdist.program import Graph
from aotdist.torch_seam.operators import OpOverload, written_arguments

Results: TypeAlias = Sequence[Any]


class CudaGraphCapture:
    """The capture of NVIDIA's GPUs, by `torch.cuda.CUDAGraph`.

    All recordings share one pool of memory: what one needs while it runs, and does not return, the next may
    use. That is sound for replays that come one after the other. The default generator is registered by
    PyTorch: a replay draws the numbers that a run would draw.

    Attributes:
        device_type: the type of device that it records.
    """

    device_type = "cuda"

    def place(self, device: torch.device) -> Hashable:
        """The current stream; replays of one memory pool must be on the same stream, to run in order."""
        return torch.cuda.current_stream(device).cuda_stream

    def warm(self, run: Callable[[], Results], device: torch.device) -> Results:
        """Run without recording, on the side stream: libraries and kernels initialise themselves there.

        The side stream waits for the current one before, and the current one for it after.
        """
        with torch.cuda.device(device):
            current, side = torch.cuda.current_stream(), _side_stream(device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                results = run()
            current.wait_stream(side)
        for result in results:
            if isinstance(result, torch.Tensor):
                result.record_stream(current)
        return results

    def record(self, run: Callable[[], Results], device: torch.device) -> tuple[Callable[[], None], Results]:
        """Record a run on the side stream, and compute nothing; other threads do what they like meanwhile.

        Returns:
            the replay, and the tensors that each replay writes the results to.
        """
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(device),
            torch.cuda.graph(graph, _pool(device), _side_stream(device), capture_error_mode="thread_local"),
        ):
            results = run()

        def replay() -> None:
            with torch.cuda.device(device):
                graph.replay()

        return replay, results


@functools.cache
def _pool(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return torch.cuda.graph_pool_handle()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def recorded_device(graph: Graph, static_ins: frozenset[int], device_type: str) -> torch.device | None:
    """The device on which all of a graph runs; none for a graph that runs nothing.

    Args:
        graph: what is to be recorded.
        static_ins: positions of the placeholders that keep their address.
        device_type: what can be recorded.

    Raises:
        UnsupportedProgram: it cannot be recorded; the message says why, and where.
    """
    for what, node in _obstacles(graph, static_ins, device_type):
        raise UnsupportedProgram(
            f"a CUDA graph cannot hold this program: {what}",
            where=node.meta.get("source"),
            stage="codegen",
            fix="leave `cuda_graphs` off, or move this out of the compiled function",
        )
    if not any(node.op == "call_function" for node in graph.gm.graph.nodes):
        return None
    devices = {value.device for node in graph.gm.graph.nodes for value in tensors_of(node)}
    return next(iter(devices), None)


def _obstacles(graph: Graph, static_ins: frozenset[int], device_type: str) -> Iterator[tuple[str, Node]]:
    """What is in the way, in words, and the node that is."""
    names = {node: f"`{slot}`" for slot, node in graph.named_placeholders().items()}
    static = {node for position, node in enumerate(graph.placeholders()) if position in static_ins}
    around = {*graph.placeholders(), *filter(None, graph.results())}
    first: torch.device | None = None
    for node in graph.gm.graph.nodes:
        called = names.get(node, f"`{node.target}`")
        for value in tensors_of(node):
            if value.device.type != device_type:
                yield f"{called} is a tensor on the {value.device.type}", node
            first = first or value.device
            if value.device != first:
                yield f"{called} is on {value.device}, and others are on {first}", node
        if node in around and not all(map(_is_what_its_bytes_are, tensors_of(node))):
            yield f"{called} is to be read otherwise than its bytes (conjugate, negated, sparse)", node
        if node.op == "call_function":
            yield from ((f"{called} {why}", node) for why in _reasons(node, static))


def _reasons(node: Node, static: set[Node]) -> Iterator[str]:
    if node.target is torch.ops.higher_order.cond:
        yield "goes on by what a tensor holds"
    if not isinstance(node.target, OpOverload):
        return
    if is_collective(node):
        yield "is a collective, which other ranks take part in"
    if _waits_for_data(node, node.target):
        yield "waits for what a tensor holds"
    if is_random(node) and node.kwargs.get("generator") is not None:
        yield "draws from a generator of its own, whose state no replay moves"
    if any(written.op == "placeholder" and written not in static for written in _written(node)):
        yield "writes an input that does not stay where it is"


_INDEXING = frozenset(
    {
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
        torch.ops.aten._unsafe_index.Tensor,
        torch.ops.aten._unsafe_index_put.default,
    }
)


def _waits_for_data(node: Node, op: OpOverload) -> bool:
    """Whether the CPU has to know what a tensor holds: masks are counted, indices are not."""
    if op in _INDEXING:
        indices = node.args[1] if isinstance(node.args[1], list | tuple) else ()
        values = (value for index in indices if isinstance(index, Node) for value in tensors_of(index))
        return any(value.dtype in (torch.bool, torch.uint8) for value in values)
    return not {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}.isdisjoint(op.tags)


def _written(node: Node) -> Iterator[Node]:
    """The arguments that an operator writes."""
    if isinstance(node.target, OpOverload):
        for position, name in written_arguments(node.target):
            value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
            if isinstance(value, Node):
                yield value


def _is_what_its_bytes_are(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
