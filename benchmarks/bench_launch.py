"""Launch cost: microseconds of Python that it takes to start one kernel, without a GPU.

The kernel adds four tensors up. It is compiled for `sm_90`, and a driver that does nothing stands where
CUDA's would: what is left is Triton's launcher, or what aotdist does in its place. Tensors are allocated
beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotdist.codegen.triton import with_kernels
from aotdist.kernels.compilation import pack, unpack
from aotdist.kernels.launching import Launch
from aotdist.kernels.running import Jitted
from aotdist.program import Graph, Slot
from benchmarks import workers
from benchmarks.effort import Case, Effort
from benchmarks.timing import Contender, Pace, Series, as_series, take_turns
from benchmarks.verdicts import Target

NUM_INPUTS = 4
NUM_ELEMENTS = 4096

CASE = f"{NUM_INPUTS} inputs, 1 result"
QUANTITY = "start of a kernel"
TRITON, AGAIN, LOADED = "Triton's launcher", "aotdist, after the first launch", "aotdist, from an artifact"

TARGETS = tuple(
    Target(CASE, QUANTITY, ours, (TRITON,), limit=0.35, prediction=0.25, reason="1.5 us of 7")
    for ours in (AGAIN, LOADED)
)


def cases(effort: Effort) -> list[Case]:
    """Microseconds a start, by contender."""
    pace = Pace(rounds=10, calls=100) if effort.quick else Pace(rounds=60, calls=2000)
    return [Case(CASE, partial(_measure, pace, effort))]


def _measure(pace: Pace, effort: Effort) -> list[Series]:
    environment = effort.environment | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    answer = workers.call(CASE, time_starts, pace, environment=environment)
    return as_series(answer, case=CASE, quantity=QUANTITY, unit="us")


def time_starts(pace: Pace) -> dict[str, list[float]]:
    """Seconds a start, by contender."""
    import triton

    driver: Any = _Driver()
    triton.runtime.driver.set_active(driver)
    inputs, written = [torch.empty(NUM_ELEMENTS) for _ in range(NUM_INPUTS)], [torch.empty(NUM_ELEMENTS)]
    launch, loaded = _added_up()
    jitted = launch.runner
    assert isinstance(jitted, Jitted), "nothing was loaded yet"
    function = jitted.function
    arguments = {"XBLOCK": NUM_ELEMENTS // jitted.num_blocks, "num_warps": 4, "enable_fp_fusion": True}

    def by_triton() -> None:
        function[(jitted.num_blocks,)](*inputs, *written, **arguments)

    contenders = [
        Contender(TRITON, by_triton),
        Contender(AGAIN, lambda: jitted(inputs, written)),
        Contender(LOADED, lambda: loaded(inputs, written)),
    ]
    return take_turns(contenders, pace)


def _added_up() -> tuple[Launch, Callable[..., None]]:
    """The kernel as it is launched where it is emitted, and what starts it where it is loaded."""
    tensors = [torch.empty(NUM_ELEMENTS) for _ in range(NUM_INPUTS)]
    gm = make_fx(lambda *given: (sum(given[1:], given[0]),), tracing_mode="fake")(*tensors)
    ins = tuple(Slot("primal", f"x{position}") for position in range(NUM_INPUTS))
    fused = with_kernels(Graph(gm, ins, (Slot("output", "out"),)), keeps_casts=False, label="bench")
    (launch,) = (node.target for node in fused.graph.gm.graph.nodes if isinstance(node.target, Launch))
    (emitted,) = fused.kernels
    return launch, unpack(pack(emitted, "sm_90"), launch.runner.num_blocks, torch.device("cpu"), frozenset())


class _Utilities:
    """What the driver does to binaries: nothing."""

    def load_binary(self, *_: object) -> tuple[int, int, int, int, int]:
        return (1, 2, 32, 0, 1024)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def unload_module(self, module: object) -> None:
        return None


class _Driver:
    """A driver of no GPU."""

    utils = _Utilities()

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *_: None

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
