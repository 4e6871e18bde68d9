"""Lanes of traces that were made up: what is exposed is known by hand."""

from typing import Any

import pytest

from aotdist.codegen.marks import GRAPH_MARK, MODULE_MARK
from aotdist.report.lanes import STEP_MARK, Lane, exposed_percent, lanes_of, seconds_exposed

Event = dict[str, Any]
HOST, GROUP_THREAD = 1, 7


def event(name: str, start: float, end: float, cat: str = "cpu_op", tid: int = HOST, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid, "args": args}


def mark(name: str, start: float, end: float, tid: int = HOST) -> Event:
    return event(name, start, end, "user_annotation", tid)


def shown(lane: Lane) -> list[tuple[str, float, float]]:
    return [(span.name, span.start, span.end) for span in lane.spans]


STEP = mark(f"{STEP_MARK}0", 0, 100)


def test_on_a_cpu_a_collective_is_exposed_while_the_program_waits_or_does_nothing():
    events = [
        STEP,
        event("aten::mm", 0, 20),
        event("aten::empty", 5, 6),  # within mm
        event("_c10d_functional::wait_tensor", 30, 60),
        event("aten::add", 60, 70),
        mark("gloo:all_reduce", 10, 55, GROUP_THREAD),
        event("aten::copy_", 12, 50, tid=GROUP_THREAD),  # gloo's own
    ]
    lanes = lanes_of(events)
    assert shown(lanes.compute) == [("aten::mm", 0, 20), ("aten::add", 60, 70)]
    assert shown(lanes.waits) == [("wait_tensor", 30, 60)]
    assert shown(lanes.exposed) == [("exposed", 20, 60)]
    assert exposed_percent(lanes) == pytest.approx(40)
    (group,) = lanes.groups
    assert group.name == "gloo" and shown(group) == [("all_reduce", 10, 55)]
    assert seconds_exposed(group, lanes) == pytest.approx(35e-6)


def test_a_compiled_graph_computes_while_it_does_not_wait():
    events = [
        STEP,
        event(f"{GRAPH_MARK}999: step forward", 0, 80),  # a graph that is gone: nothing is known of it
        event("extern", 10, 20),
        event("_c10d_functional::wait_tensor", 40, 50),
        mark("gloo:all_gather", 5, 50, GROUP_THREAD),
    ]
    lanes = lanes_of(events)
    assert shown(lanes.phases) == [("step forward", 0, 80)]
    compiled = [("compiled code", 0, 10), ("compiled code", 20, 40), ("compiled code", 50, 80)]
    assert shown(lanes.compute) == [("extern", 10, 20), *compiled]
    assert exposed_percent(lanes) == pytest.approx(10)


def test_what_is_outside_of_the_steps_does_not_count():
    events = [mark(f"{STEP_MARK}0", 50, 100), mark("gloo:barrier", 0, 60, GROUP_THREAD)]
    assert exposed_percent(lanes_of(events)) == pytest.approx(20)


def test_on_a_gpu_kernels_say_it():
    nccl = {"Collective name": "all_gather", "Process Group Description": "mesh_dp", "Group size": 8}
    events = [
        STEP,
        event("aten::mm", 0, 5),
        event("gemm", 10, 40, "kernel", 3),
        event("Memcpy", 45, 50, "gpu_memcpy", 3),
        event("ncclDevKernel_AllGather", 30, 60, "kernel", 4, **nccl),
    ]
    lanes = lanes_of(events)
    assert shown(lanes.compute) == [("gemm", 10, 40), ("Memcpy", 45, 50)]
    assert [lane.name for lane in lanes.groups] == ["mesh_dp (8 ranks)"]
    assert shown(lanes.exposed) == [("exposed", 40, 45), ("exposed", 50, 60)]


def test_modules_hold_the_modules_inside_of_them():
    paths = ["embed", "layers.0.norm", "layers.0.mlp", "layers.0.mlp", "layers.1.mlp (backward)"]
    events = [event(f"{GRAPH_MARK}999: step forward", 0, 100), STEP]
    events += [event(f"{MODULE_MARK}{path}", 10 * at, 10 * at + 8) for at, path in enumerate(paths)]
    assert sorted(shown(lanes_of(events).modules), key=lambda one: (one[1], -one[2])) == [
        ("embed", 0, 8),
        ("layers.0", 10, 38),
        ("layers.0.norm", 10, 18),
        ("layers.0.mlp", 20, 38),
        ("layers.1 (backward)", 40, 48),
        ("layers.1.mlp (backward)", 40, 48),
    ]


def test_a_trace_of_nothing_has_empty_lanes():
    lanes = lanes_of([{"ph": "M", "name": "process_name"}])
    assert not any(lane.spans for lane in lanes.all()) and exposed_percent(lanes) == 0
