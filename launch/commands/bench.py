"""`aotdist bench`: times a step of a model in eager mode, by `torch.compile` and by aotdist, in turns."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import aotdist
from aotdist.artifacts.build import Made, called_by, refuse_maker
from aotdist.errors import BadSettings
from aotdist.launch.commands.build import maker_named
from aotdist.report.profile import most_allocated_by
from aotdist.settings import Settings
from aotdist.torch_seam.dtensor import local_part
from aotdist.torch_seam.trees import pytree

_DESCRIPTION = """\
Run one step of a model or function (forward, and backward of the sum of its results) as it is, through
torch.compile and through aotdist, in turns, and compare times, memory (the most that a step has tensors in at
once, on rank 0) and results. What draws random numbers differs where a compiler draws others than eager.

MODEL names a function that makes what to compile and what to call it with, see `aotdist build --help`; it is
called once for each of the three. Under torchrun (`torchrun --no-python aotdist bench ...`) it may make
meshes and shard. How to compile is read from AOTDIST_* variables."""

_EAGER, _OURS = "eager", "aotdist"


def add_to(subparsers: Any) -> None:
    """Add the subcommand to the parser of `aotdist`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench", help="time a step beside eager and torch.compile", description=_DESCRIPTION
    )
    parser.add_argument("model", metavar="MODEL", help="package.module:function, or file.py:function")
    parser.add_argument("--backend", default="auto", help="of aotdist.compile (default: %(default)s)")
    parser.add_argument("--rounds", metavar="N", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--inference", action="store_true", help="no backward: under torch.no_grad()")
    parser.set_defaults(run=_run)


@dataclass(slots=True)
class _Contender:
    """One way to run the step.

    Args:
        step: runs the step, and returns its results and gradients.
        first_s: seconds of the first step, which compiles.
        failure: why it has no results; empty if it has.
        peak: MiB of tensors that a step allocates at its peak.
    """

    name: str
    step: Callable[[], Sequence[Tensor]]
    first_s: float = 0.0
    results: Sequence[Tensor] = ()
    failure: str = ""
    seconds: list[float] = field(default_factory=list)
    peak: float = 0.0


def _run(options: argparse.Namespace) -> int:
    """Time all, print the table and return the exit code: 1 where aotdist has no results."""
    if options.rounds < 1:
        raise BadSettings(f"--rounds is {options.rounds}", fix="give 1 or more")
    make, settings = maker_named(options.model), Settings.from_environment()
    refuse_maker(make)
    ways: dict[str, Callable[[Any], Any]] = {
        _EAGER: lambda target: target,
        "torch.compile": torch.compile,
        _OURS: lambda target: aotdist.compile(target, backend=options.backend, settings=settings),
    }
    with _ranks(), torch.no_grad() if options.inference else nullcontext():
        contenders = [_Contender(name, _step_of(make, way)) for name, way in ways.items()]
        for contender in contenders:
            _begin(contender)
        running = [each for each in contenders if not each.failure]
        _take_turns(running, options.rounds)
        for each in running:
            each.peak = most_allocated_by(each.step)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print("\n".join(_table(contenders)))
        return int(any(each.failure for each in contenders if each.name == _OURS))


@contextmanager
def _ranks() -> Generator[None]:
    """The process group of a launcher's ranks, if one started this process."""
    if "RANK" not in os.environ:
        yield
        return
    dist.init_process_group()
    try:
        yield
    finally:
        dist.destroy_process_group()


def _step_of(make: Callable[[], Made], way: Callable[[Any], Any]) -> Callable[[], Sequence[Tensor]]:
    """The step of a new model, with the same parameters as the others."""
    torch.manual_seed(0)
    made = make()
    target, args, kwargs = called_by(next(made, None) if isinstance(made, Generator) else made)
    parameters = list(target.parameters()) if isinstance(target, nn.Module) else []
    leaves = [x for x in (*parameters, *_tensors((args, kwargs))) if x.requires_grad and x.is_leaf]
    call = way(target)

    def step() -> Sequence[Tensor]:
        results = _tensors(call(*args, **kwargs))
        differentiable = [x for x in results if x.requires_grad]
        if differentiable:
            torch.autograd.backward([x.sum() for x in differentiable])
        gradients = [x.grad for x in leaves if x.grad is not None]
        for leaf in leaves:
            leaf.grad = None
        return [x.detach() for x in (*results, *gradients)]

    return step


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _begin(contender: _Contender) -> None:
    """Run the first step; a contender that fails is not timed."""
    torch.manual_seed(0)
    started = time.perf_counter()
    try:
        contender.results = [x.clone() for x in contender.step()]
    except Exception as error:
        if contender.name == _EAGER:
            raise
        contender.failure = f"{type(error).__name__}: {error}".splitlines()[0]
    contender.first_s = _seconds_since(started)


def _take_turns(contenders: Sequence[_Contender], rounds: int) -> None:
    for _ in range(rounds):
        for contender in contenders:
            gc.collect()
            if dist.is_initialized():
                dist.barrier()
            started = time.perf_counter()
            contender.step()
            contender.seconds.append(_seconds_since(started))


def _seconds_since(started: float) -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _table(contenders: Sequence[_Contender]) -> Generator[str]:
    eager = contenders[0]
    yield f"{'':<14}{'first step':>12}{'step':>12}{'of eager':>10}{'memory':>14}   results and gradients"
    for each in contenders:
        if each.failure:
            yield f"{each.name:<14}{each.first_s:>10.2f} s   failed: {each.failure}"
            continue
        ratios = [own / other for own, other in zip(each.seconds, eager.seconds, strict=True)]
        times = f"{each.first_s:>10.2f} s{1e3 * statistics.median(each.seconds):>9.2f} ms"
        ratio, peak = statistics.median(ratios), f"{each.peak:.2f} MiB"
        yield f"{each.name:<14}{times}{ratio:>10.2f}{peak:>14}   {_likeness(each, eager)}"


def _likeness(one: _Contender, eager: _Contender) -> str:
    """How the results of the first step compare with eager's."""
    if one is eager:
        return ""
    ours, theirs = ([local_part(x) for x in each.results] for each in (one, eager))
    if [(x.shape, x.dtype) for x in ours] != [(x.shape, x.dtype) for x in theirs]:
        return "of other sizes or dtypes than eager's"
    apart = torch.tensor([_apart(*pair) for pair in zip(ours, theirs, strict=True) if pair[0].numel()])
    if not apart.numel():
        return "no numbers to compare"
    # PyTorch's `amax` and `any` propagate NaN; Python's `max` does not.
    return f"off eager's by at most {apart.amax():.1e}" if apart.any() else "eager's, bit for bit"


def _apart(own: Tensor, other: Tensor) -> float:
    """The largest difference; NaN if a number is NaN in one of them only."""
    own, other = _wide(own), _wide(other)
    same = (own == other) | (own.isnan() & other.isnan())
    return float(torch.where(same, 0.0, (own - other).abs()).amax())


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float64))
