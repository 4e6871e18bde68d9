"""What runs on several ranks, in batches: each has ranks of its own, which all tests of its jobs share."""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.launch.harness import Batch, GoesOn

LEARN = ["--optim.steps=30", "--optim.lr=1e-2"]

MESHES = {
    "fsdp": (2, ["--data.batch-size=4"]),
    "no-reshard": (2, ["--data.batch-size=4", "--parallel.no-reshard-after-forward"]),
    "tp": (2, ["--data.batch-size=8", "--parallel.tp=2"]),
    "hsdp": (4, ["--data.batch-size=2", "--parallel.dp-replicate=2"]),
    "fsdp+tp": (4, ["--data.batch-size=4", "--parallel.tp=2"]),
    "replicate+tp": (4, ["--data.batch-size=4", "--parallel.tp=2", "--parallel.dp-replicate=2"]),
}
"""Ranks and options by name; all have the same global batch."""

VARIANTS = {
    "untied": (2, ["--model.no-tie-head"]),
    "bf16": (2, ["--parallel.precision=bf16"]),
    "tp-bf16": (2, ["--parallel.precision=bf16", *MESHES["tp"][1]]),
    "float8": (2, ["--parallel.precision=bf16", "--float8.recipe=delayed", "--float8.all-gather"]),
    "float8-tp": (2, ["--float8.recipe=blockwise", *MESHES["tp"][1]]),
    "sparse24": (2, ["--sparse24.mask=transposable", "--sparse24.decay=2e-4"]),
    "accumulate": (2, ["--data.batch-size=2", "--optim.accumulate=2"]),
    "accumulate-sync": (2, ["--data.batch-size=2", "--optim.accumulate=2", "--optim.sync-every-micro-step"]),
}


SAVE = ["--optim.steps=6", "--checkpoint.every=3", "--checkpoint.keep=0", "--run.validate-every=2"]

SAVED = {
    "saved": (2, [*MESHES["fsdp"][1], "--compile.backend=fx"]),
    "saved-float8": (2, [*VARIANTS["float8"][1], "--data.batch-size=4"]),
    "saved-fsdp+tp": (4, MESHES["fsdp+tp"][1]),
}
"""Jobs that leave checkpoints of their third step."""

RESHARDED = {
    "2-to-1": ("saved", 1, ["--compile.backend=eager"]),
    "2-to-4": ("saved", 4, ["--compile.backend=eager"]),
    "2-to-fsdp+tp": ("saved", 4, ["--data.batch-size=4", "--parallel.tp=2", "--compile.backend=eager"]),
    "4-to-1": ("saved-fsdp+tp", 1, ["--parallel.tp=1"]),
}
"""Whose checkpoint goes on, on how many ranks, and how they share the work; a step takes what it took."""


ORDINARY = {
    *("alone", "fsdp", "fsdp-fx", "accumulate", "bf16", "learns", "min-cut"),
    *("saved", "saved-resumed", "2-to-1"),
}
"""Jobs that `make test` runs; only tests of the sweep ask for the others."""


def each(names: Iterable[Any], beside: str = "") -> list[Any]:
    """Parameters of a test: names of jobs, or tuples that begin with one.

    Args:
        names: of jobs.
        beside: what stands behind the name of a job that a test asks for beside each.
    """
    rows = (name if isinstance(name, tuple) else (name,) for name in names)
    return [
        pytest.param(*row, marks=() if {row[0], row[0] + beside} <= ORDINARY else pytest.mark.sweep)
        for row in rows
    ]


def batches():
    """Every job: each mesh and variant runs in eager and with `fx`.

    They run in this order, because some go on with what others have saved.
    """
    jobs = {ranks: {} for ranks in (2, 4, 1)}
    jobs[1] = {"alone": ["--data.batch-size=8"]}
    for name, (ranks, options) in (MESHES | VARIANTS).items():
        jobs[ranks][name] = options
        jobs[ranks][f"{name}-fx"] = [*options, "--compile.backend=fx"]
    jobs[2]["learns"] = LEARN
    jobs[2]["learns-again"] = LEARN
    jobs[2]["min-cut"] = ["AOTDIST_PARTITION=min_cut", *MESHES["fsdp"][1], "--compile.backend=fx"]
    jobs[2]["inductor"] = [*MESHES["fsdp"][1], "--compile.backend=inductor", "--optim.steps=2"]
    for name, (ranks, options) in SAVED.items():
        jobs[ranks][name] = [*options, *SAVE]
        jobs[ranks][f"{name}-resumed"] = GoesOn(name, 3)
    for name, (saved, ranks, options) in RESHARDED.items():
        jobs[ranks][name] = GoesOn(saved, 3, options)
    every = (
        Batch(ranks, {name: job for name, job in some.items() if (name in ORDINARY) is is_ordinary})
        for is_ordinary in (True, False)
        for ranks, some in jobs.items()
    )
    return [batch for batch in every if batch.jobs]
