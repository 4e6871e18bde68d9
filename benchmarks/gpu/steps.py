"""The steps of first contact but for the models: what is there, every launcher, FP8, 2:4, and strides."""

from __future__ import annotations

import contextlib
import functools
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import aotdist
from aotdist.kernels import triton_seam
from aotdist.subclasses.float8 import Recipe
from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.torch_seam.trees import pytree
from aotdist.trace.operators.corrections import fake_result
from benchmarks.gpu.families import FAMILIES, LARGE, SMALL, loss_of
from benchmarks.gpu.findings import NotHere, Reporter
from benchmarks.gpu.per_kernel import meaningful_strides
from benchmarks.gpu.place import Gpu, described

_COPIED = 2**30
_PRODUCT = 8192
_WIDTH = 4096


@dataclass(frozen=True, slots=True)
class Where:
    """Where steps run.

    Args:
        device: the GPU, or a CPU that stands in for it.
        dry: whether it is a CPU: tiny tensors, interpreted kernels, and times that mean nothing.
    """

    device: torch.device
    dry: bool

    def need_gpu(self) -> None:
        """Leave a case that a CPU has nothing for."""
        if self.dry:
            raise NotHere("needs a GPU")

    def seconds(self, start: Callable[[], object]) -> float:
        """Of one run: the GPU's median with its cache emptied, or the wall's."""
        if not self.dry:
            return triton_seam.seconds_of(start)
        started = time.perf_counter()
        start()
        return time.perf_counter() - started


def environment(where: Where, report: Reporter) -> None:
    """Versions, the card, and what its memory and its matrix units can do."""
    report.check("versions", _versions)
    report.check("card", lambda: {"cpu": platform.processor()} if where.dry else described(Gpu()))
    report.check("copy", lambda: {"bytes_per_s": copy_bandwidth(where)})
    report.check("bf16 product", lambda: {"flop_per_s": _product_rate(where)})


def _versions() -> Mapping[str, str]:
    names = ("torch", "triton", "numpy", "transformers", "torchao", "liger-kernel")
    found = {name: list(metadata.distributions(name=name)) for name in names}
    return {"python": platform.python_version()} | {
        name: each[0].version if each else "none" for name, each in found.items()
    }


def copy_bandwidth(where: Where) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(2**12 if where.dry else _COPIED, dtype=torch.int8, device=where.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / where.seconds(lambda: target.copy_(source))


def _product_rate(where: Where) -> float:
    size = 64 if where.dry else _PRODUCT
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=where.device) for _ in range(2))
    return 2 * size**3 / where.seconds(lambda: a @ b)


def launchers(where: Where, report: Reporter) -> None:
    """One kernel by each way to start it."""
    cases: Mapping[str, Callable[[Where], Mapping[str, Any] | None]] = {
        "just in time": _just_in_time,
        "direct": _direct,
        "tuned": _tuned,
        "loaded from an artifact": _loaded,
        "unaligned": _unaligned,
        "of any size": _of_any_size,
        "in a backward": _in_a_backward,
        "on a side stream": _on_a_side_stream,
        "in the user's CUDA graph": _in_a_graph,
        "in our CUDA graphs": _in_our_graphs,
        "functional random numbers": _functional_rng,
        "a step of an optimizer": _optimizer,
    }
    for name, tried in cases.items():
        report.check(name, functools.partial(tried, where))


def _program(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh") * 2 + x.sin()


def _x(where: Where, *, grad: bool = False) -> Tensor:
    rows = 8 if where.dry else 4096
    return torch.randn(rows, 64 if where.dry else _WIDTH, device=where.device, requires_grad=grad)


def _close(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 10)


def _untuned(program: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    return aotdist.compile(program, backend="triton", settings={"tune_kernels": False, **settings})


def _just_in_time(where: Where) -> None:
    x = _x(where)
    _close(_untuned(_program)(x), _program(x))


def _direct(where: Where) -> Mapping[str, Any]:
    x, compiled = _x(where), _untuned(_program)
    compiled(x)
    _close(compiled(x), _program(x))
    started = time.perf_counter()
    for _ in range(2 if where.dry else 1000):
        compiled(x)
    calls = (time.perf_counter() - started) / (2 if where.dry else 1000)
    return {"call_us": calls * 1e6, "us": where.seconds(lambda: compiled(x)) * 1e6}


def _tuned(where: Where) -> Mapping[str, Any]:
    where.need_gpu()
    x = _x(where)
    with tempfile.TemporaryDirectory() as folder:
        compiled = aotdist.compile(_program, backend="triton", settings={"cache_folder": folder})
        _close(compiled(x), _program(x))
        _close(compiled(x), _program(x))
        kept = [path.read_text() for path in Path(folder, "kernels").iterdir()]
    return {"kept": kept}


def _artifact() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), (
        torch.randn(32, 64),
    )


def _loaded(where: Where) -> None:
    where.need_gpu()
    with tempfile.TemporaryDirectory() as folder:
        aotdist.build(_artifact, Path(folder, "it.aot"), target="sm_90")
        eager, (x,) = _artifact()
        model, _ = _artifact()
        eager, model, x = eager.to(where.device), model.to(where.device), x.to(where.device)
        aotdist.load(Path(folder, "it.aot"), model)
        found, expected = model(x), eager(x)
        _close(found, expected, 1e-3)
        for out in (found, expected):
            out.square().mean().backward()
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            _close(ours.grad, theirs.grad, 1e-3)


def _unaligned(where: Where) -> None:
    x, compiled = _x(where).flatten(), _untuned(_program)
    _close(compiled(x[4:]), _program(x[4:]))
    for first in (1, 4, 3):
        _close(compiled(x[first : first - 4 or None]), _program(x[first : first - 4 or None]))


def _of_any_size(where: Where) -> None:
    compiled = aotdist.compile(_program, backend="triton", dynamic=True)
    for rows in (8, 5, 33, 128):
        x = torch.randn(rows, 40, device=where.device)
        _close(compiled(x), _program(x))


def _in_a_backward(where: Where) -> None:
    gradients = []
    for program in (_untuned(_program), _program):
        torch.manual_seed(0)
        x = _x(where, grad=True)
        program(x).square().mean().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-9)


def _on_a_side_stream(where: Where) -> None:
    where.need_gpu()
    x, compiled, stream = _x(where), _untuned(_program), torch.cuda.Stream()
    compiled(x)
    for number in range(20):
        with torch.cuda.stream(stream):
            y = torch.full_like(x, 1.0 + number)
            torch.cuda._sleep(1_000_000)  # pyright: ignore[reportPrivateUsage]
            y = y.add_(1)
            found = compiled(y)
        torch.cuda.current_stream().wait_stream(stream)
        _close(found, _program(torch.full_like(x, 2.0 + number)))


def _in_a_graph(where: Where) -> None:
    where.need_gpu()
    x, compiled = _x(where), _untuned(_program)
    compiled(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(x)
    for number in range(3):
        x.fill_(float(number))
        graph.replay()
        _close(out, _program(x))


def _in_our_graphs(where: Where) -> Mapping[str, Any]:
    where.need_gpu()
    compiled = _untuned(_program, cuda_graphs=True)
    for number in range(5):
        x = _x(where) + number
        _close(compiled(x), _program(x))
    x = _x(where)
    return {"us": where.seconds(lambda: compiled(x)) * 1e6}


def _functional_rng(where: Where) -> Mapping[str, Any]:
    def dropped(x: Tensor) -> Tensor:
        return F.dropout(x, 0.25) * 2

    compiled = _untuned(dropped, functional_rng=True)
    x = torch.ones_like(_x(where)).requires_grad_()
    out = compiled(x)
    out.sum().backward()
    kept = (out != 0).float().mean().item()
    assert abs(kept - 0.75) < (0.1 if where.dry else 0.005), kept
    assert x.grad is not None and torch.equal(x.grad != 0, out != 0)
    return {"kept": kept}


def _optimizer(where: Where) -> None:
    states = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).to(where.device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            return model(x).square().mean()

        step = _eager_step(model, loss, optimizer)
        if compiles:
            step = aotdist.train_step(model, loss, optimizer, backend="triton")
        for _ in range(3):
            step(torch.randn(32, 64, device=where.device))
        states.append([parameter.detach() for parameter in model.parameters()])
    _close(states[1], states[0], 1e-3)


def _eager_step(
    model: nn.Module, loss: Callable[..., Tensor], optimizer: torch.optim.Optimizer
) -> Callable[[Tensor], object]:
    def step(x: Tensor) -> None:
        loss(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def float8(where: Where, report: Reporter) -> None:
    """Each recipe of FP8, compiled in each way, beside bf16."""
    for recipe in get_args(Recipe):
        for backend in ("fx", "triton") if where.dry else ("fx", "triton", "inductor"):
            report.check(f"{recipe}, {backend}", functools.partial(_float8, where, recipe, backend))


def _float8(where: Where, recipe: Recipe, backend: str) -> Mapping[str, Any]:
    size, rows = (64, 32) if where.dry else (2048, 4096)
    outs: list[list[Tensor]] = []
    times: list[float] = []
    for converted in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(size, size, bias=False, device=where.device, dtype=torch.bfloat16)
        if converted:
            _convert(layer, recipe)
        x = torch.randn(rows, size, device=where.device, dtype=torch.bfloat16, requires_grad=True)
        call = aotdist.compile(layer, backend=backend)

        def step(call: Any = call, x: Tensor = x, layer: nn.Linear = layer) -> list[Tensor]:
            x.grad = layer.weight.grad = None
            out = call(x)
            out.square().mean().backward()
            return [out.detach(), x.grad, layer.weight.grad]  # pyright: ignore[reportReturnType]

        step()
        outs.append(step())
        times.append(where.seconds(step))
    apart = [_distance(a, b) for a, b in zip(outs[1], outs[0], strict=True)]
    if not all(distance < 0.15 for distance in apart):
        raise AssertionError(f"{apart} from bf16: result, gradient of the input, gradient of the weight")
    return {"from_bf16": apart, "us": times[1] * 1e6, "bf16_us": times[0] * 1e6}


def _convert(layer: nn.Linear, recipe: Recipe) -> None:
    try:
        aotdist.to_float8(layer, recipe)
    except aotdist.BadSettings as missing:
        if "torchao" in str(missing):
            raise NotHere("needs torchao") from missing
        raise


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def sparse(where: Where, report: Reporter) -> None:
    """Linear layers with 2:4 sparse weights, beside the same with zeros."""
    for backend in ("fx", "triton") if where.dry else ("fx", "triton", "inductor"):
        report.check(f"2:4, {backend}", functools.partial(_sparse, where, backend))


def _sparse(where: Where, backend: str) -> Mapping[str, Any]:
    size, rows = (64, 32) if where.dry else (4096, 4096)
    torch.manual_seed(0)
    layer = nn.Linear(size, size, device=where.device, dtype=torch.bfloat16)
    x = torch.randn(rows, size, device=where.device, dtype=torch.bfloat16, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors in beta state
        aotdist.sparsify_24(layer)
        eager = layer(x)
        call = aotdist.compile(layer, backend=backend)
        found = call(x)
        found.square().mean().backward()
        seconds = where.seconds(lambda: call(x).square().mean().backward())
    distance = _distance(found.detach(), eager.detach())
    if not distance < 2e-2:
        raise AssertionError(f"{distance} from eager's")
    return {"from_eager": distance, "us": seconds * 1e6}


def strides(where: Where, report: Reporter) -> None:
    """Every operator of the models lays its results out as fakes say, which traces go by."""
    for name in FAMILIES:
        report.check(name, functools.partial(_strides, where, name))


def _strides(where: Where, name: str) -> Mapping[str, Any]:
    module, inputs = FAMILIES[name].program(SMALL if where.dry else LARGE, where.device)
    compared = Compared({}, set())
    with compared:
        loss_of(module(**inputs)).backward()
    if compared.wrong and not where.dry:
        raise AssertionError("\n".join(f"{op}: {why}" for op, why in compared.wrong.items()))
    if not compared.seen:
        raise AssertionError("nothing was compared")
    return {"operators": len(compared.seen), "differ": compared.wrong}


class Compared(TorchDispatchMode):
    """Compares the strides of what operators return with those of fakes.

    Args:
        wrong: the first difference of each operator.
        seen: the operators that were compared.
    """

    def __init__(self, wrong: dict[str, str], seen: set[str]) -> None:
        super().__init__()
        self.wrong, self.seen = wrong, seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        real = func(*args, **(kwargs or {}))
        for ours, theirs in zip(self._fakes(func, args, kwargs or {}), _tensors(real), strict=False):
            self.seen.add(str(func))
            if meaningful_strides(ours) != meaningful_strides(theirs):
                shapes = [(tuple(each.shape), each.stride()) for each in (theirs, *_tensors(args))]
                self.wrong.setdefault(str(func), f"traced {ours.stride()}; real, and given: {shapes}")
        return real

    def _fakes(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Tensor]:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with contextlib.suppress(Exception), mode:  # what fakes cannot say
            given, named = pytree.tree_map_only(Tensor, mode.from_tensor, (args, dict(kwargs)))
            return list(_tensors(fake_result(func, given, named, on_gpu=False)))
        return ()


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))
