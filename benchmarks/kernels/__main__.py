"""Count and compile the kernels of real models: `make kernels`.

Writes `benchmarks/KERNELS.md`. No GPU is needed, and none is used: the models are never run.
"""

from __future__ import annotations

import datetime
import sys
from dataclasses import dataclass
from importlib import metadata

import tyro

from aotdist.kernels.compilation import check
from aotdist.kernels.gpus import Target
from benchmarks.kernels.counts import count
from benchmarks.kernels.inductor import inductor_bytes
from benchmarks.kernels.losses import counted_losses
from benchmarks.kernels.models import MODELS
from benchmarks.kernels.page import page
from benchmarks.record import ROOT, versions


@dataclass(frozen=True, slots=True)
class Options:
    """What to count.

    Args:
        target: the GPU to compile for.
        quick: the smallest model only, to the terminal: to see that everything runs.
    """

    target: Target = "sm_90"
    quick: bool = False


def main(options: Options) -> None:
    """Count, and write the page."""
    check(options.target)
    names = ["MLP"] if options.quick else list(MODELS)
    graphs = [
        graph
        for name in names
        for precision in MODELS[name].precisions
        for graph in count(name, MODELS[name], precision, options.target)
    ]
    losses = [] if options.quick else list(counted_losses())
    theirs = {} if options.quick else inductor_bytes("Llama")
    text = page(graphs, theirs, losses, options.target, _circumstances())
    if options.quick:
        print(text)
    else:
        (ROOT / "KERNELS.md").write_text(text)


def _circumstances() -> str:
    found = versions() | {name: metadata.version(name) for name in ("triton", "transformers")}
    command = " ".join(["python", "-m", "benchmarks.kernels", *sys.argv[1:]])
    made_with = ", ".join(f"{key} {value}" for key, value in found.items())
    return f"`{command}`, {datetime.date.today()}; {made_with}."


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
