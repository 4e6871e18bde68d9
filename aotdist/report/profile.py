"""`profile`: runs a few steps under PyTorch's profiler, for a table of times and a trace for Perfetto."""

from __future__ import annotations

import gc
import gzip
import inspect
import itertools
import json
import tempfile
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from aotdist.errors import BadSettings
from aotdist.files import path_of, refuse_unwritable
from aotdist.report.lanes import (
    STEP_MARK,
    Lane,
    Lanes,
    exposed_percent,
    lanes_of,
    minus,
    seconds_exposed,
    stretches,
    total,
)
from aotdist.torch_seam.profiling import is_profiling, quiet_kineto

_MOST_ROWS = 8
_PROCESS = "aotdist"
"""The name of the process, in the trace, that has our lanes."""

_REST = "outside of these (the loss, Python)"


@dataclass(frozen=True, slots=True)
class GroupTime:
    """What a process group ran in a step, on average.

    Args:
        name: of the group.
        collectives: number of collectives.
        seconds: time in which at least one ran.
        exposed_seconds: the part of that time in which nothing computed.
    """

    name: str
    collectives: float
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of some steps went, on this rank.

    Args:
        steps: seconds of each step.
        exposed_percent: share of the steps' time that is exposed communication.
        phases: seconds of an average step by phase (graphs, optimizer steps), in order. The last is
            everything outside of these: the loss, for example, and Python.
        modules: likewise by module, with the modules inside of it; longest first.
        groups: what each process group ran.
        waits: seconds of an average step spent waiting, by collective and what it serves; longest first.
        path: where the trace was written.
        losses: the loss that each step returned, if it did.
    """

    steps: tuple[float, ...]
    exposed_percent: float
    phases: Mapping[str, float]
    modules: Mapping[str, float]
    groups: tuple[GroupTime, ...]
    waits: Mapping[str, float]
    path: Path | None
    losses: tuple[float, ...] = ()

    def __str__(self) -> str:
        return "\n".join(_text(self))

    def __repr__(self) -> str:
        return str(self)  # what a prompt shows

    def show(self) -> None:
        """Print it."""
        print(self)


def profile(
    step: Callable[[], Any], *, steps: int = 3, warmup: int = 1, path: str | Path | None = None
) -> Profile:
    """Run a step a few times, and record what runs when.

    The trace is one of PyTorch's profiler, for Perfetto (ui.perfetto.dev) or chrome://tracing, with lanes of
    ours above it: phases, modules, compute, each process group, waits, and exposed communication. With
    several ranks, all of them call this, and each writes a trace of its own.

    Args:
        step: a training step without arguments; if it returns the loss, the table shows it.
        steps: how many steps to profile.
        warmup: how many steps to run before, so that all is compiled; one more then runs under a profiler,
            since modules are marked from a profiler's first step on.
        path: where to write the trace: `trace.json`, or `trace.json.gz`; of several ranks, each writes
            `trace-rank1.json.gz`.

    Raises:
        BadSettings: `step` cannot be called, or needs arguments, `steps` is less than 1, `warmup` less than
            0, `path` is no JSON file that can be written, or a profiler is at work.
    """
    _require(callable(step), f"cannot profile a {type(step).__name__}", "pass a function that takes a step")
    refuse_arguments(step, "pass `lambda: step(batch)`, or a function that takes the next batch itself")
    _require(type(steps) is int and steps >= 1, f"steps={steps!r} profiles nothing", "run at least one step")
    _require(
        type(warmup) is int and warmup >= 0, f"warmup={warmup!r} is no number of steps", "say 0 for none"
    )
    _require(not is_profiling(), "a profiler is at work already", "profile outside of it: PyTorch has one")
    target = None if path is None else _of_this_rank(path_of(path))
    for _ in range(warmup):
        step()
    if warmup:
        with torch_profiler():  # marks of modules are made when a profiler first runs
            step()
    losses = list[float | None]()
    with torch_profiler() as recorded:
        for number in range(steps):
            with record_function(f"{STEP_MARK}{number}"):
                result = step()
                _synchronize()
            losses.append(_loss_in(result))
    return replace(profile_of(recorded, target), losses=tuple(loss for loss in losses if loss is not None))


def _loss_in(result: Any) -> float | None:
    """The loss in what a step returned, found as `aotdist.train_step` does: alone, first, or by name."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif isinstance(result, tuple | list) and result:
        result = result[0]
    if isinstance(result, torch.Tensor) and result.numel() == 1 and not isinstance(result, DTensor):
        return float(result.detach())
    return result if isinstance(result, float) else None


def profile_of(recorded: torch_profile, path: Path | None) -> Profile:
    """The profile of what PyTorch's profiler recorded, in steps that are marked with `STEP_MARK`.

    Args:
        recorded: the stopped profiler.
        path: where to write the trace with our lanes in it, compressed if it ends in `.gz`; None for nowhere.
    """
    trace = trace_of(recorded)
    lanes = lanes_of(trace["traceEvents"])
    if path is not None:
        whole = {**trace, "traceEvents": [*_events(lanes), *trace["traceEvents"]]}
        data = json.dumps(whole, separators=(",", ":")).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return _profile(lanes, path)


def trace_of(recorded: torch_profile) -> dict[str, Any]:
    """The recorded trace, in Chrome's format."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        return json.loads(path.read_bytes())


def torch_profiler() -> torch_profile:
    """PyTorch's profiler for the CPU, and for GPUs if there are any."""
    quiet_kineto()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return torch_profile(activities=activities, acc_events=True)  # one cycle; torch 2.11 warns of several


def _synchronize() -> None:
    """Let a step end with its last kernel."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _of_this_rank(path: Path) -> Path:
    stem, found, ending = path.name.partition(".json")
    _require(bool(found) and ending in ("", ".gz"), f"`{path}` is no trace", "end it in .json or .json.gz")
    is_alone = not (dist.is_initialized() and dist.get_world_size() > 1)
    own = path if is_alone else path.with_name(f"{stem}-rank{dist.get_rank()}{found}{ending}")
    refuse_unwritable(own)
    return own


def refuse_arguments(function: Callable[..., Any], fix: str, stage: str | None = None) -> None:
    """Refuse a function that needs arguments, where it will be called without any.

    Raises:
        BadSettings: it needs some.
    """
    called = function.forward if isinstance(function, nn.Module) else function
    is_own = isinstance(called, types.FunctionType)  # a wrapper may pass the arguments itself
    try:
        inspect.signature(called, follow_wrapped=not is_own).bind()
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise BadSettings(f"`{name}` is called without arguments: {error}", stage=stage, fix=fix) from error
    except ValueError:  # a built-in function does not say what it takes
        pass


def _require(holds: bool, problem: str, fix: str) -> None:  # noqa: FBT001  # reads like an assertion
    if not holds:
        raise BadSettings(f"profile: {problem}", fix=fix)


def _events(lanes: Lanes) -> Iterator[dict[str, Any]]:
    """Our lanes as trace events: a process of their own, shown at the top."""
    here = {"ph": "M", "pid": _PROCESS}
    yield {**here, "name": "process_name", "args": {"name": _PROCESS}}
    yield {**here, "name": "process_sort_index", "args": {"sort_index": -1}}
    for position, lane in enumerate(lanes.all()):
        yield {**here, "tid": position, "name": "thread_name", "args": {"name": lane.name}}
        yield {**here, "tid": position, "name": "thread_sort_index", "args": {"sort_index": position}}
        for span in lane.spans:
            times = {"ts": span.start, "dur": span.end - span.start}
            yield {"ph": "X", "cat": _PROCESS, "pid": _PROCESS, "tid": position, "name": span.name, **times}


def _profile(lanes: Lanes, path: Path | None) -> Profile:
    steps = lanes.steps.spans
    number = max(1, len(steps))
    groups = (
        GroupTime(
            lane.name,
            len(lane.spans) / number,
            total(stretches(lane.spans)) / 1e6 / number,
            seconds_exposed(lane, lanes) / number,
        )
        for lane in lanes.groups
    )
    rest = total(minus(stretches(steps), stretches(lanes.phases.spans))) / 1e6
    return Profile(
        steps=tuple((span.end - span.start) / 1e6 for span in steps),
        exposed_percent=exposed_percent(lanes),
        phases={**_seconds(lanes.phases, number), _REST: rest / number},
        modules=_most_first(_seconds(lanes.modules, number)),
        groups=tuple(groups),
        waits=_most_first(_seconds(lanes.waits, number)),
        path=path,
    )


def _seconds(lane: Lane, number: int) -> dict[str, float]:
    """The seconds of a lane's spans by name, divided by the number of steps."""
    seconds: dict[str, float] = defaultdict(float)
    for span in lane.spans:
        seconds[span.name] += (span.end - span.start) / 1e6 / number
    return dict(seconds)


def _most_first(seconds: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _text(profile: Profile) -> Iterator[str]:
    steps = profile.steps or (0.0,)
    whole, typical = fmean(steps), median(steps)
    yield (
        f"{len(profile.steps)} steps, {1e3 * whole:.1f} ms each on average (median {1e3 * typical:.1f}); "
        f"exposed communication {profile.exposed_percent:.1f} %"
    )
    if profile.losses:
        yield f"  loss {', '.join(f'{loss:.4g}' for loss in profile.losses)}"
    yield from _table("phase, of a step", profile.phases, whole)
    yield from _table("module", profile.modules, whole)
    for group in profile.groups:
        yield (
            f"  {group.name}: {group.collectives:,g} collectives, {_share(group.seconds, whole)}, "
            f"exposed {_share(group.exposed_seconds, whole)}"
        )
    yield from _table("waits for", profile.waits, whole)
    if profile.path is not None:
        yield f"  trace: {profile.path}"


def _table(title: str, seconds: Mapping[str, float], whole: float) -> Iterator[str]:
    rows: Sequence[tuple[str, float]] = list(seconds.items())
    if not rows:
        return
    yield f"  {title}"
    width = max(len(name) for name, _ in rows[:_MOST_ROWS])
    for name, value in rows[:_MOST_ROWS]:
        yield f"    {name:<{width}}  {_share(value, whole)}"
    if len(rows) > _MOST_ROWS:
        yield f"    and {len(rows) - _MOST_ROWS:,} more"


def _share(seconds: float, whole: float) -> str:
    return f"{1e3 * seconds:9.2f} ms {100 * seconds / whole if whole else 0.0:5.1f} %"


MIB = 2.0**20


def most_allocated_by(work: Callable[[], object]) -> float:
    """Peak memory while `work` runs, in MiB above what was allocated before; a GPU's, if one is used."""
    gc.collect()
    return (_on_the_gpu(work) if torch.cuda.is_initialized() else _on_the_cpu(work)) / MIB


def _on_the_gpu(work: Callable[[], object]) -> int:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() - before


def _on_the_cpu(work: Callable[[], object]) -> int:
    quiet_kineto()
    with torch_profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        work()
    changes = [event for event in trace_of(recorded)["traceEvents"] if event.get("name") == "[memory]"]
    # Not "Total Allocated": that goes on from what the process profiled before.
    sizes = (change["args"]["Bytes"] for change in sorted(changes, key=lambda event: event["ts"]))
    return max(itertools.accumulate(sizes), default=0)
