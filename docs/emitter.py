"""Writes `docs/emitter.md`: one program followed from its graph to its kernels.

`python docs/emitter.py` prints the page; nothing in it is written by hand but the program and the words. It
runs kernels in Python, and has a second process compile them, `python docs/emitter.py machine`: one cannot do
both.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `benchmarks`, which is not installed

IS_COMPILING = sys.argv[1:] == ["machine"]
if not IS_COMPILING:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the page is made without a GPU

import torch
from torch.nn import functional as F

import aotdist
from aotdist.codegen import triton
from aotdist.kernels.assembly import assemble
from aotdist.kernels.costs import estimate
from aotdist.kernels.emission import Fused
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.fusion import Plan, plan
from aotdist.kernels.space import Group
from aotdist.program import Graph
from benchmarks.kernels.binaries import compile_kernel
from benchmarks.kernels.graphs import graphs_of


def attention_scores(x, gain, weight):
    wide = x.float()
    norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    hidden = (norm.to(x.dtype) * gain) @ weight
    scores = hidden.view(4, 16, 2, 32).transpose(1, 2)
    return torch.softmax(scores.float() * 0.5, -1)


def momentum_step(parameters, gradients, momenta):
    torch._foreach_mul_(momenta, 0.9)
    torch._foreach_add_(momenta, gradients)
    torch._foreach_add_(parameters, momenta, alpha=-0.1)


def centred(x):
    return x - x.mean(-1, keepdim=True)


def parameters() -> tuple[list[torch.Tensor], ...]:
    """What the second program is called with."""
    return tuple([torch.zeros(64, 64), torch.zeros(64), torch.zeros(128, 64)] for _ in range(3))


def arguments() -> tuple[torch.Tensor, ...]:
    """What the program is called with."""
    torch.manual_seed(0)
    sizes = ((4, 16, 64), (64,), (64, 64))
    return tuple(torch.randn(*size, dtype=torch.bfloat16) for size in sizes)


class Watched:
    """Compiles a program once, and keeps what the emitter was given and gave.

    Args:
        program: what to compile.
        args: what to call it with.
        dynamic: whether other calls may bring other sizes.
    """

    def __init__(
        self, program: Callable[..., object], args: tuple[Any, ...], *, dynamic: bool = False
    ) -> None:
        fuse = triton.fuse

        def watching(graph: Graph, *args: object, **kwargs: object) -> Fused:
            self.graph = graph
            self.fused = fuse(graph, *args, **kwargs)  # type: ignore[arg-type]
            return self.fused

        triton.fuse = watching  # type: ignore[assignment]
        try:
            self.compiled = aotdist.compile(program, backend="triton", settings={"dynamic": dynamic})
            with torch.no_grad():
                self.compiled(*args)
        finally:
            triton.fuse = fuse
        self.plan: Plan = plan(self.graph.gm.graph, [])


def page() -> Iterator[str]:
    """The page, paragraph by paragraph."""
    watched = Watched(attention_scores, arguments())
    yield "# From a graph to kernels"
    yield words(
        '`aotdist.compile(model, backend="triton")` hands each graph, functional and decomposed, to the '
        "emitter in "
        "[kernels/](../kernels/README.md). This page follows one program through it. It is written by "
        "`python docs/emitter.py`, which runs everything that it shows; a test holds the two together."
    )
    yield "## The program"
    yield code(inspect.getsource(attention_scores), "python")
    yield words(
        "Called with `x: bf16[4, 16, 64]`, `gain: bf16[64]` and `weight: bf16[64, 64]`. Its graph, as the "
        "trace and the decompositions leave it:"
    )
    yield code("\n".join(graph_lines(watched.graph)), "text")
    yield "## What each node is"
    yield words(
        "A rule says what an operator means: an element of its result as a function of its indices "
        "(`kernels/rule.py`). A **view** maps indices and computes nothing; a **pointwise** operator "
        "reads some elements of its operands; a **reducing** one reads a whole slice. An operator without "
        "a rule is a library call. Cheap pointwise nodes over memory, such as casts, are recomputed by each "
        "of their readers."
    )
    yield code("\n".join(roles(watched.plan, watched.graph)), "text")
    yield "## Which nodes share a kernel"
    yield words(
        "Each node starts as a group of its own, over an iteration space of `x` (results) and `r` (what "
        "is reduced). Groups merge, those that save the most bytes first, if every node of both can be "
        "*placed* in one space: given the indices at which a consumer is computed, rules say at which "
        "indices it reads its producers. No merged group may depend on itself "
        "(`kernels/fusion.py`)."
    )
    for group in watched.plan.groups:
        yield code("\n".join(group_lines(group)), "text")
    yield "## What a kernel computes"
    yield words(
        "Reading the stored nodes down to memory gives expressions over loads (`kernels/ir.py`). Indices "
        "are sums of variables; a view's division and its consumer's multiplication cancel "
        "(`kernels/index.py`). Variables that always go together become one (`kernels/assembly.py`)."
    )
    for number, group in enumerate(watched.plan.groups):
        yield code("\n".join(kernel_lines(watched.plan, group, number)), "text")
    yield "## The source"
    yield words(
        "A kernel is printed as a straight line over blocks, or as loops where what it reduces does not "
        "fit into one block (`kernels/printing.py`). Narrow floating point is widened when it is loaded "
        "and rounded when it is stored; with `Settings(emulate_casts=True)` it is rounded wherever the "
        "program rounds."
    )
    for kernel in watched.fused.kernels:
        yield code(kernel.printed.source, "python")
    yield "## What runs"
    yield words(
        "Kernels replace nodes in the graph, and the resulting graph is printed as one straight-line "
        "function."
    )
    yield code("\n".join(graph_lines(watched.fused.graph)), "text")
    yield "`compiled.explain()` summarises it:"
    yield code(as_everywhere(str(watched.compiled.explain())), "text")  # type: ignore[attr-defined]
    yield machine_code()
    yield from many_tensors()
    yield from many_sizes()
    yield GUIDE


def machine_code() -> str:
    """The sections on what a GPU runs, by the process that compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, "machine"]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def machine_page() -> Iterator[str]:
    """These sections."""
    yield "## What a GPU runs"
    yield words(
        "Triton compiles without the GPU being there (`kernels/compilation.py`). Below are the registers of "
        "a thread of the first kernel on an H100 or H200, and its instructions that access memory, exchange "
        "data with other threads, or compute a function. On a GPU `explain()` shows the registers, too."
    )
    first, *_ = kernels_of(attention_scores, *arguments())
    binary = compile_kernel(first, "sm_90")
    usage = f"{binary.usage.registers} registers, {binary.usage.spilled} bytes spilled"
    counted = (
        f"{count:>3} {name}" for name, count in sorted(binary.instructions.items()) if is_telling(name)
    )
    yield code("\n".join([usage, *counted]), "text")
    yield words(
        "On a GPU, all kernels of a graph are compiled in threads, in all the ways that may be needed, while "
        "the rest is still being emitted (`kernels/background.py`); kernels that differ in nothing but names "
        "are compiled once in a process, under the name of the first."
    )
    yield "## How large its blocks are"
    yield words(
        "A memory model (`kernels/costs.py`) estimates the cost of each way to cut a kernel into blocks. It "
        "knows how many blocks run at a time, what part of the bandwidth these can use, and how often a "
        "block waits for a load. Two to four ways are kept, measured when the kernel first runs on a GPU, "
        "and the fastest is remembered in "
        "`Settings(cache_folder)` (`kernels/tuning.py`). These are the ways of "
        "`rms_norm(x, (2048,))` for `x: bf16[16384, 2048]`, with the model's estimates:"
    )
    (norm,) = kernels_of(F.rms_norm, torch.zeros(16384, 2048, dtype=torch.bfloat16), (2048,))
    yield code("\n".join(way_lines(norm)), "text")
    yield "## Where a library lays its results out otherwise"
    yield words(
        "Kernels find elements by the strides of the trace, and those of a library's results are what its "
        "operators' fake kernels say. So when a graph first runs (where sizes differ from call to call: with "
        "each set of them), launches look at the strides of what they read (`kernels/checking.py`). What "
        "lies otherwise is copied, and what is computed from it gets the strides that eager gives it. The "
        "graph is then emitted anew with the strides that were found. The log says so once, and `explain()` "
        "from then on, with the operator, its line and both strides. Later calls look at nothing. Graphs "
        "that were loaded from an artifact are checked, too. Results of other sizes or dtypes than the fake "
        "kernel says are an error."
    )


def kernels_of(program: Callable[..., object], *args: Any) -> Sequence[EmittedKernel]:
    """The kernels of a program, which is not run."""
    ((_, graph),) = graphs_of(program, *args)
    return triton.with_kernels(graph, keeps_casts=False, label="page").kernels


def way_lines(emitted: EmittedKernel) -> Iterator[str]:
    """A line for each way to cut a kernel into blocks."""
    for way in emitted.ways:
        seconds = estimate(emitted, way).seconds
        blocks = f"{emitted.num_blocks_in(way):,} blocks of {way.xblock} x {way.rblock}"
        yield f"{blocks}, {way.num_warps} warps: {seconds * 1e6:.1f} us"


def is_telling(instruction: str) -> bool:
    """Whether an instruction goes to memory, to other threads, or computes a function."""
    return instruction.split(".")[0] in ("LDG", "STG", "MUFU", "SHFL", "BAR", "LDS", "STS")


def many_tensors() -> Iterator[str]:
    """The section on kernels of different tensors in one launch."""
    step = Watched(momentum_step, parameters())
    yield "## Many tensors in one launch"
    yield words(
        "An optimizer's step is one kernel for each parameter. Foreach operators are decomposed "
        "(`kernels/decompositions.py`), fused, and kernels whose sources are the same except for tensors and "
        "integers become one launch (`kernels/bundling.py`): its blocks are shared out, and each starts by "
        "selecting its tensors. Here are three parameters of 64 by 64, 64, and 128 by 64 elements; the "
        "blocks are the interpreter's, which are large."
    )
    yield code(inspect.getsource(momentum_step), "python")
    for kernel in step.fused.kernels:
        yield code(kernel.printed.source, "python")
    yield words(
        "The new values are stored over the old ones, as nothing reads those afterwards "
        "(`kernels/in_place.py`): the copies that would bring new values there have nothing to do."
    )


def many_sizes() -> Iterator[str]:
    """The section on sizes that differ from call to call."""
    watched = Watched(centred, (torch.zeros(4, 64),), dynamic=True)
    yield "## Sizes that differ from call to call"
    yield words(
        "With symbolic sizes, all of the above is done with sums of products of symbols instead of "
        "numbers (`kernels/polynomial.py`). A property of all sizes is proved, or not used; choices for "
        "which any answer is correct follow the sizes of the call that is traced. Each number that a "
        "kernel names becomes an argument, which Triton checks for divisibility by 16."
    )
    yield code(inspect.getsource(centred), "python")
    for kernel in watched.fused.kernels:
        for form in kernel.forms:
            yield code(form.source, "python")
    yield words(
        "The first form is for rows that one block holds, of the next power of two; the second goes "
        "through longer ones. A launch is made for the sizes of a call and kept (`kernels/sized.py`): it "
        "has the form, the arguments, the blocks and whether places need 64 bits. So a new size costs "
        "arithmetic, and a compilation only where it is the first of its power of two, that 16 divides, "
        "or that 16 does not. What needs to know how a size is divided is left out: sums of columns are "
        "not cut in two, those of everything only between dimensions, and launches are not put together."
    )


def words(text: str) -> str:
    """A paragraph."""
    return textwrap.fill(text, width=118)


def as_everywhere(report: str) -> str:
    """A report without what differs from run to run, or by the length of the path of this file."""
    lines = (line for line in report.splitlines() if not line.startswith(("  seconds:", "  memory:")))
    return "\n".join(lines).replace(f"{Path(__file__).parent}{os.sep}", "")


def code(text: str, language: str) -> str:
    """A block of code."""
    return f"```{language}\n{text.strip()}\n```"


def graph_lines(graph: Graph) -> Iterator[str]:
    """One line a node."""
    for node in graph.gm.graph.nodes:
        if node.op != "call_function":
            continue
        val = node.meta.get("val")
        shape = (
            f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)}"
            if isinstance(val, torch.Tensor)
            else ""
        )
        name = getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
        yield f"{node.name} = {name}({', '.join(map(str, node.args))})  # {shape}"


def roles(chosen: Plan, graph: Graph) -> Iterator[str]:
    """What the emitter makes of each node."""
    groups = {node: number for number, group in enumerate(chosen.groups) for node in group.nodes()}
    for node in graph.gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node in chosen.views:
            role = "view"
        elif node in chosen.reasons:
            role = f"library: {chosen.reasons[node]}"
        elif node in groups:
            role = f"kernel {groups[node]}"
        else:
            role = "computed by its readers"
        yield f"{node.name:<28}{role}"


def group_lines(group: Group) -> Iterator[str]:
    """A space, and where each node is computed in it."""
    x, r = (
        ", ".join(f"{var} < {var.size}" for var in axis) or "none" for axis in (group.space.x, group.space.r)
    )
    yield f"x: {x}    r: {r}"
    for node, place in group.places.items():
        yield f"  {node.name:<26} at ({', '.join(map(str, place))})"
    for node in sorted(group.absorbed):
        yield f"  {node.name:<26} wherever it is read"


def kernel_lines(chosen: Plan, group: Group, number: int) -> Iterator[str]:
    """Loads and stores of a kernel."""
    kernel = assemble(chosen, group, number, keeps_casts=False)
    spaces = (", ".join(f"{var} < {var.size}" for var in axis) or "none" for axis in (kernel.x, kernel.r))
    yield "{}: x: {}    r: {}".format(kernel.name, *spaces)
    for load in kernel.loads():
        yield f"  load   {load.buffer}[{load.index}]"
    for store in kernel.stores:
        yield f"  store  {store.buffer}[{store.index}]"


GUIDE = """\
## To add to it

- **An operator**: a rule in the table of the module that it belongs to (`elementwise.py`, `views.py`,
  `shaping.py`, `reductions.py`). A pointwise rule is a function of the operands' expressions; one that
  reads other elements than those at its place is a function of a reader, the node and a point. Raise
  `NotEmitted` with a reason for the calls that it cannot do: `explain()` shows it.
  `tests/kernels/test_operators.py` runs PyTorch's own samples of it.
- **A word for elements** (`exp`): one line in `spelling.py`.
- **A fusion**: groups that may become one are tried by `_merged` in `fusion.py`: `_placed` computes each
  node once, `_absorbed` wherever it is read. A third way is a third function there, from two groups to
  one or None.
- **A kind of reduction**: its name in `ir.Reduction`, and what it starts from, combines and ends with in
  `printing.py`.
- **Without a GPU**: `TRITON_INTERPRET=1` runs kernels on CPU tensors, where `interpreter.py` has Triton's
  interpreter round as a GPU does."""


if __name__ == "__main__":
    print("\n\n".join(machine_page() if IS_COMPILING else page()))
