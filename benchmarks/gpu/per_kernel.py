"""Each kernel of a model beside the nodes that it computes, run one by one; and how long it takes.

The models run as they train. What a kernel reads is what the nodes gave, so that no error hides in another;
what it writes is filled with NaN before. Kernels that differ in nothing but names are timed once.
"""

from __future__ import annotations

import fcntl
import functools
import operator
import tempfile
import time
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

import aotdist
from aotdist.codegen.contract import Backend, Decompositions, Emission, Emitted
from aotdist.codegen.triton import TritonBackend, with_kernels
from aotdist.kernels import triton_seam
from aotdist.kernels.costs import estimate
from aotdist.kernels.emission import Fused
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.launching import Config, Launch, blocks_of
from aotdist.kernels.running import Jitted
from aotdist.kernels.triton_seam import loaded
from aotdist.kernels.tuning import nameless_source
from aotdist.program import Graph
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.trees import pytree
from benchmarks.gpu.families import FAMILIES, LARGE, SMALL, loss_of
from benchmarks.gpu.findings import Reporter

_NARROW = 2e-2
"""How far a kernel may be from its nodes where these round to 16 bits or less, as a part of their norm: each
node rounds, the kernel rounds once."""
_WIDE = 1e-4
"""The same in float32: sums in another order, approximate `exp` and division."""
_NOISE = 4.0
"""How many times as far from float64 as its nodes a kernel may be."""
_LOCK = Path(tempfile.gettempdir(), "aotdist-first-contact.lock")


def check_kernels(name: str, *, dry: bool, device: torch.device, copied: float, report: Reporter) -> None:
    """Run a step of training of a family, and check every kernel of it.

    Args:
        name: of the family.
        dry: tiny, and interpreted.
        device: where it runs.
        copied: bytes a second of a copy.
        report: where findings go.
    """
    module, inputs = FAMILIES[name].program(SMALL if dry else LARGE, device)
    checker = Checker(report, copied, dry)

    def loss(**batch: Tensor) -> Tensor:
        return loss_of(module(**batch))

    program = aotdist.compile(loss, backend=checker)

    def step() -> Mapping[str, Any]:
        program(**inputs).backward()
        return {"graphs": len(checker.labels), "kernels": len(checker.timed)}

    report.check("step", step)


@dataclass(frozen=True, slots=True)
class Checker(Backend):
    """Stands in for the Triton backend: its graphs run node by node, and their kernels are checked beside.

    Args:
        report: where findings go.
        copied: bytes a second of a copy.
        dry: whether kernels are interpreted.
        timed: kernels that have been timed, see `nameless_source`.
        labels: of the graphs that it was given.
    """

    report: Reporter
    copied: float
    dry: bool
    timed: set[str] = field(default_factory=set[str])
    labels: list[str] = field(default_factory=list[str])
    name: str = "checker"
    partition: Literal["default", "min_cut"] = "min_cut"

    def decompositions(self) -> Decompositions:
        """As of the Triton backend."""
        return TritonBackend().decompositions()

    def emit(self, graph: Graph, emission: Emission) -> Emitted:
        """Emit kernels, and check them whenever the graph runs."""
        label = f"{emission.kind} {len(self.labels) + 1}"
        self.labels.append(label)
        fused = with_kernels(graph, keeps_casts=False, label=label)

        def call(args: list[Any]) -> Sequence[Any]:
            given = list(args)
            args.clear()
            return self._run(fused, given, label)

        return Emitted(call, fused.source)

    def _run(self, fused: Fused, args: list[Any], label: str) -> Sequence[Any]:
        values = _Values(fused.kernels[0].nodes[0].graph if fused.kernels else fused.graph.gm.graph)
        results = values.run(*args)
        known = {node.name: value for node, value in values.env.items()}
        kernels = {kernel.printed.name: kernel for kernel in fused.kernels}
        functions = loaded(fused.source, label)
        nodes = list(fused.graph.gm.graph.nodes)
        library = {node.name for node in nodes if isinstance(node.target, OpOverload)}
        self.report.check(f"{label}: library", lambda: values.laid_out_otherwise(library))
        for node in nodes:
            if isinstance(node.target, Launch):
                kernel = kernels[node.target.name]
                one = _OneKernel(node, node.target, kernel, known, functions[kernel.printed.name])
                self.report.check(f"{label}: {node.target.name}", functools.partial(self._check, one))
        return results

    def _check(self, one: _OneKernel) -> Mapping[str, Any]:
        error = one.error()
        alike = nameless_source(one.kernel)
        numbers = {"operators": one.operators(), "bytes": one.kernel.num_bytes, "error": error}
        if alike in self.timed:
            return numbers
        self.timed.add(alike)
        ways = [one.timed(way, dry=self.dry) for way in one.kernel.ways]
        best = min(ways, key=operator.itemgetter("us"))
        share = one.kernel.num_bytes / (best["us"] * 1e-6) / self.copied
        return numbers | {"us": best["us"], "of_copy": round(share, 4), "ways": ways}


class _Values(fx.Interpreter):
    """Runs a graph node by node, keeps what each gives, and lays it out as it was traced."""

    def __init__(self, graph: fx.Graph) -> None:
        module = graph.owning_module
        assert module is not None
        super().__init__(module, garbage_collect_values=False, graph=graph)
        self._otherwise: dict[str, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        """The result of a node."""
        if n.target is torch.ops.aten.view.default:  # kernels see through it where memory allows none
            (source, sizes), _ = self.fetch_args_kwargs_from_env(n)
            value = source.reshape(sizes)
        else:
            value = super().run_node(n)
        val = n.meta.get("val")
        if not isinstance(value, Tensor) or not isinstance(val, Tensor):
            return value
        if meaningful_strides(val) != meaningful_strides(value):
            self._otherwise[n.name] = f"{n.target}: traced {tuple(val.stride())}, is {tuple(value.stride())}"
        return _laid_out(value, val)

    def laid_out_otherwise(self, library: Container[str]) -> Mapping[str, Any]:
        """The results of libraries that lie in memory otherwise than they were traced."""
        return {"otherwise": [why for name, why in self._otherwise.items() if name in library]}


@dataclass(frozen=True, slots=True)
class _OneKernel:
    """A kernel, and what its nodes gave.

    Args:
        node: its launch.
        launch: the same.
        kernel: what was emitted.
        known: results of nodes by name.
        function: the kernel as Triton has it.
    """

    node: fx.Node
    launch: Launch
    kernel: EmittedKernel
    known: Mapping[str, Any]
    function: Any

    def operators(self) -> list[str]:
        """What it computes."""
        return [str(node.target).removesuffix(".default") for node in self.kernel.nodes]

    def error(self) -> float:
        """How far it is from its nodes; raises if that is too far."""
        inputs, written, outs = self._tensors(poisoned=True)
        self.launch.runner(inputs, written)
        narrow = any(tensor.dtype.itemsize < 4 for tensor in (*inputs, *outs))
        allowed = _NARROW if narrow else _WIDE
        errors = dict[str, float]()
        for name, out in zip(self.kernel.printed.outputs, outs, strict=True):
            error = _apart(out, self.known[name])
            errors[name] = error if error <= allowed else self._beside_float64(name, out)
        wrong = {name: error for name, error in errors.items() if not error <= allowed}
        if wrong:
            raise AssertionError(f"{wrong}, where {allowed} is allowed:\n{self.kernel.printed.source}")
        return max(errors.values())

    def _beside_float64(self, name: str, out: Tensor) -> float:
        """How much further from float64 a result is than that of the nodes: sums that cancel are noise."""
        nodes = {node.name: node for node in self.kernel.nodes[0].graph.nodes}
        exact = self._exactly(nodes[name], {})
        further = _apart(out, exact) - _NOISE * _apart(self.known[name], exact)
        return 0.0 if further <= 0 else further  # NaN stays NaN: `max` would make it 0.0

    def _exactly(self, node: fx.Node, made: dict[fx.Node, Any]) -> Any:
        """The result of a node, computed in float64 from what the kernel reads."""
        if node not in made:
            if node.op != "call_function" or node.name in self.kernel.printed.inputs:
                made[node] = _in_float64(self.known[node.name])
            else:
                given = map_arg((node.args, node.kwargs), lambda each: self._exactly(each, made))
                args, kwargs = pytree.tree_map(_in_float64, given)
                target: Any = node.target
                made[node] = target(*args, **kwargs)
        return made[node]

    def timed(self, way: Config, *, dry: bool) -> dict[str, Any]:
        """How long it takes when it is cut in this way, and how long the model of costs says."""
        inputs, written, _ = self._tensors(poisoned=False)
        blocks, count = blocks_of(self.kernel.kernel, way), self.kernel.num_blocks_in(way)
        runner = Jitted(self.function, count, blocks, way.options, self.launch.device)
        start = functools.partial(runner, inputs, written)
        start()
        with _alone():
            seconds = _by_the_wall(start) if dry else triton_seam.seconds_of(start)
        return {
            **blocks,
            "num_warps": way.num_warps,
            "us": round(seconds * 1e6, 3),
            "estimated_us": round(estimate(self.kernel, way).seconds * 1e6, 3),
            "registers": runner.registers,
        }

    def _tensors(self, *, poisoned: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """What it reads, what it is given to write, and its results among both."""
        sources = [arg for arg in self.node.args if isinstance(arg, fx.Node)]
        inputs = [_laid_out(self.known[arg.name], arg.meta["val"]) for arg in sources]
        outs: list[Tensor] = []
        for result in self.launch.results:
            if result.into is not None:
                inputs[result.into] = inputs[result.into].clone()
                outs.append(inputs[result.into])
                continue
            sizes, strides = result.sizes, result.strides
            outs.append(torch.empty_strided(sizes, strides, dtype=result.dtype, device=self.launch.device))
            if poisoned:
                _poison(outs[-1])
        results = zip(outs, self.launch.results, strict=True)
        return inputs, [out for out, result in results if result.into is None], outs


def meaningful_strides(tensor: Tensor) -> list[int]:
    """Those that say where elements lie."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _laid_out(value: Tensor, val: Any) -> Tensor:
    """`value` with the strides and the dtype of the trace: kernels hand on parts of sums in float32."""
    if not isinstance(val, Tensor) or (
        meaningful_strides(val) == meaningful_strides(value) and val.dtype == value.dtype
    ):
        return value
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=value.device).copy_(value)


def _poison(tensor: Tensor) -> None:
    """Fill a tensor with NaN, or with a number that no kernel means."""
    if tensor.dtype.itemsize == 1:
        flat = tensor.as_strided((tensor.untyped_storage().nbytes(),), (1,), 0)
        (flat.view(torch.uint8) if tensor.dtype != torch.bool else flat).fill_(0x7F)
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0x5555)


def _apart(found: Tensor, expected: Tensor) -> float:
    """The distance as a part of the norm; of whole numbers the part that differs. NaN: only one is finite."""
    if not expected.is_floating_point():
        return float((found != expected).double().mean()) if expected.numel() else 0.0
    ours, theirs = found.double(), expected.double()
    finite = theirs.isfinite()
    if not torch.equal(ours[~finite].nan_to_num(7.0), theirs[~finite].nan_to_num(7.0)):
        return float("nan")
    return float((ours[finite] - theirs[finite]).norm() / theirs[finite].norm().clamp(min=1e-30))


def _in_float64(value: Any) -> Any:
    """The same, or its type, in float64 where it is in floating point."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


@contextmanager
def _alone() -> Generator[None]:
    """No two processes of first contact measure at a time."""
    with _LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _by_the_wall(start: Callable[[], object]) -> float:
    started = time.perf_counter()
    start()
    return time.perf_counter() - started
