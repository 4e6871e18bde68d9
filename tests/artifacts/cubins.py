"""A process that compiles kernels, or counts the launches of what was compiled, by a driver that is none."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import torch
import triton
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget

import aotdist
import aotdist.assumptions
from aotdist.artifacts import load as loading
from aotdist.artifacts.archive import open_archive
from aotdist.artifacts.live import Live
from aotdist.codegen.triton import launches_of, with_kernels
from aotdist.kernels.launching import Launch
from aotdist.kernels.sized import SizedLaunch
from aotdist.program import Graph, Slot
from benchmarks.kernels.graphs import graphs_of
from tests.artifacts.attention import kernels_for_attention
from tests.artifacts.programs import decoder

launches: Counter[str] = Counter()


class Utilities:
    def load_binary(
        self, name: str, code: bytes, shared: int, device: int
    ) -> tuple[object, str, int, int, int]:
        assert code[:4] == b"\x7fELF"
        return object(), name, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def unload_module(self, module: object) -> None:
        pass


class Launcher:
    """Takes what Triton's launcher takes, and sees that it could be launched."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.num_arguments = len(source.signature)
        assert all(
            source.signature[name] == "constexpr" for name in list(source.signature)[-len(source.constants) :]
        )

    def __call__(self, x: int, y: int, z: int, stream: int, name: str, packed: Any, *rest: Any) -> None:
        metadata, enter, leave, *arguments = rest
        assert (y, z, stream) == (1, 1, 7) and x > 0 and len(arguments) == self.num_arguments
        launches[name] += 1
        for hook in (enter, leave):
            if hook is not None:
                hook(metadata)


class Driver:
    utils = Utilities()
    launcher_cls = Launcher

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("something is compiled")


def run(target: str, path: Path) -> None:
    backend = GPUTarget("cuda", 90, 32) if target == "sm_90" else GPUTarget("hip", target, 64)
    triton.runtime.driver.set_active(Driver(backend))
    triton.compile = triton.compiler.compile = aotdist.assumptions.trace = refuse
    loading.gpu_here = lambda: target
    Live.device_here = lambda self, device: torch.device("cpu")  # type: ignore[method-assign]
    library = kernels_for_attention()
    model, args = decoder()
    aotdist.load(path, model)
    model(*args).square().mean().backward()
    halves = [graph.fusion for graph in model.explain().artifacts[0].graphs if graph.fusion]  # type: ignore[operator]
    assert all(kernel.registers for half in halves for kernel in half.kernels)
    record = open_archive(path).record_of(0)
    nodes = [node for half in record["calls"][0]["emitted"].values() for node in half["graph"]["nodes"]]
    kernels = [node["target"] for node in nodes if "PackedLaunch" in str(node["target"])]
    assert launches.total() == len(kernels) > 20, (launches.total(), len(kernels))
    assert set(launches) == {kernel["name"] for kernel in kernels}
    told: list[Any] = []
    triton.knobs.runtime.launch_enter_hook.add(told.append)
    model(*args).square().mean().backward()
    assert len(told) == len(kernels)
    del library
    print("as many launches as kernels, all of them told")


def run_jitted() -> None:
    """Launch one kernel on tensors that begin at multiples of 16 bytes, and on one that does not."""
    gm = make_fx(lambda x, y: (x + y.exp(),), tracing_mode="fake")(torch.empty(64), torch.empty(64))
    graph = Graph(gm, (Slot("primal", "x"), Slot("primal", "y")), (Slot("output", "out"),))
    fused = with_kernels(graph, keeps_casts=False, label="test")
    (launch,) = (node.target for node in fused.graph.gm.graph.nodes if isinstance(node.target, Launch))
    function, ways = launch.runner.function, list[str]()

    class Told:
        def __getitem__(self, grid: tuple[int]) -> Any:
            ways.append("Triton")
            return function[grid]

    launch.runner.function = Told()
    memory = torch.empty(80)
    memory = memory[(-memory.data_ptr() // 4) % 4 :]
    for x in (memory[:64], memory[4:68], memory[1:65], memory[:64]):
        before = len(ways)
        launch(x, memory[:64])
        ways += ["directly"] if len(ways) == before else []
    assert launches.total() == len(ways) == 4
    print(", ".join(ways))


def run_sized() -> None:
    """Launch a kernel whose sizes differ, at one more than once: rows that fit into a block, and others."""
    launches.clear()
    x = torch.empty(32, 96)
    aotdist.mark_dynamic(x, 0)
    aotdist.mark_dynamic(x, 1)
    ((_, graph),) = graphs_of(lambda x: torch.softmax(x, -1), x)
    (launch,) = launches_of(with_kernels(graph, keeps_casts=False, label="test")).values()
    assert isinstance(launch, SizedLaunch) and launch.registers is None
    symbols = [str(size) for node in graph.placeholders() for size in getattr(node.meta["val"], "shape", ())]
    for sizes in ((32, 96), (32, 96), (64, 17), (20, 9000)):
        values = dict(zip(symbols, sizes, strict=True))
        result = launch(torch.empty(sizes), *(values[name] for name in launch.names))
        assert isinstance(result, torch.Tensor) and result.shape == sizes
    assert launches.total() == 4 and launch.registers == 32
    print(", ".join(launches))


if __name__ == "__main__":
    part, target, *paths = sys.argv[1:]
    match part:
        case "build":
            aotdist.build(decoder, *paths, target=target)
        case "run":
            run(target, *map(Path, paths))
        case _:
            triton.runtime.driver.set_active(Driver(GPUTarget("cuda", 90, 32)))
            run_jitted()
            run_sized()
