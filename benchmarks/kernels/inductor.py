"""How many bytes Inductor's kernels read and write in a model, by its own count.

Its graphs are those of `torch.compile`, lowered for the CPU, since for a GPU it asks one that is there. What
it fuses differs between the two, and so do its numbers of kernels; on both a tensor counts once for each
kernel that reads or writes it. Nothing is compiled, and the model is not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from torch._inductor import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensor

from aotdist.codegen.contract import Kind
from benchmarks.kernels.graphs import blank
from benchmarks.kernels.models import MODELS, Precision

Half: TypeAlias = tuple[str, Precision, Kind]
"""A graph: of which model, in what, and which half."""


def inductor_bytes(name: str) -> dict[Half, int]:
    """Bytes that the kernels of a model move, in float32 and bfloat16; library calls are not counted."""
    found: dict[Half, int] = {}
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    for precision in precisions:
        for kind, count in _halves(name, precision).items():
            found[name, precision, kind] = count
    return found


def _halves(name: str, precision: Precision) -> dict[Kind, int]:
    found: dict[Kind, int] = {}

    def lowered(gm: torch.fx.GraphModule, examples: Sequence[Any], **how: Any) -> Any:
        found["backward" if how.get("is_backward") else "forward"] = sum(_bytes_of_kernels(gm, examples))
        return _computing_nothing(gm)

    def backend(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        return compile_fx.compile_fx(gm, examples, inner_compile=lowered)  # type: ignore[arg-type]

    program, inputs = MODELS[name].program(precision)
    compiled: Any = torch.compile(program, backend=backend)
    compiled(**inputs).backward()
    return found


def _bytes_of_kernels(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Iterator[int]:
    compile_fx.record_original_output_strides(gm)
    lowering = GraphLowering(gm, example_inputs=examples, graph_id=0)
    mode = next(example.fake_mode for example in examples if isinstance(example, FakeTensor))
    with ExitStack() as stack:
        for context in (V.set_graph_handler(lowering), V.set_fake_mode(mode), DebugContext()):
            stack.enter_context(context)
        lowering.run(*examples)
        lowering._update_scheduler()  # pyright: ignore[reportPrivateUsage]
        for node in lowering.scheduler.nodes:
            if not isinstance(node, ExternKernelSchedulerNode | NopKernelSchedulerNode):
                yield node.get_read_write_buffers_sizes()


def _computing_nothing(gm: torch.fx.GraphModule) -> Any:
    (output,) = gm.graph.find_nodes(op="output")
    results = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in output.args[0]]

    def call(args: list[Any]) -> list[Any]:
        args.clear()
        return [blank(result) for result in results]

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
