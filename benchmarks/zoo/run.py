"""Train six models of Hugging Face's transformers in each layout and precision: `make models`.

Fills every cell in processes of its own, writes `benchmarks/results/models.json` after each, and at the end
`benchmarks/MODELS.md`. Name some to fill those anew and keep the others:
`make models ARGS="--families Llama --layouts TP 2-D"`.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from dataclasses import dataclass, replace

import tyro

from benchmarks import workers
from benchmarks.record import ROOT
from benchmarks.timing import Pace
from benchmarks.zoo.cell import Job, fill
from benchmarks.zoo.families import Size
from benchmarks.zoo.page import page
from benchmarks.zoo.record import Cells
from benchmarks.zoo.vocabulary import (
    COMPILERS,
    FAMILIES,
    KERNELS,
    LAYOUTS,
    NUM_RANKS,
    PRECISIONS,
    Compiler,
    Family,
    Found,
    Kernels,
    Layout,
    Outcome,
    Precision,
)

RESULTS = ROOT / "results"
_TIMEOUT_S = {"operators": 300.0, "inductor": 900.0}


@dataclass(frozen=True, slots=True)
class Options:
    """What to run.

    Args:
        kernels: compilers run operators as captured, or what Inductor makes of them.
        families: some of the models.
        layouts: some of the ways to spread them.
        precisions: some of the precisions.
        compilers: who takes part; eager has to be the first.
        quick: smaller models, few rounds, into `results/quick/`: to see that everything runs.
    """

    kernels: tuple[Kernels, ...] = KERNELS
    families: tuple[Family, ...] = FAMILIES
    layouts: tuple[Layout, ...] = LAYOUTS
    precisions: tuple[Precision, ...] = PRECISIONS
    compilers: tuple[Compiler, ...] = COMPILERS
    quick: bool = False


def main(options: Options) -> int:
    """Fill the cells; the number of those in which aotdist failed where eager did not."""
    folder = RESULTS / "quick" if options.quick else RESULTS
    cells = Cells.load(folder)
    for place in itertools.product(options.kernels, options.layouts, options.families, options.precisions):
        cells = cells.with_found(place, _filled(*place, options))
        cells.save(folder)
    text = page(cells)
    if options.quick:
        print(text)
    else:
        (ROOT / "MODELS.md").write_text(text)
    return sum(cell.found.ran("eager") and not cell.found.ran("aotdist") for cell in cells.cells)


def _filled(
    kernels: Kernels, layout: Layout, family: Family, precision: Precision, options: Options
) -> Found:
    """The cell; without a contender that ends, or hangs, the processes."""
    size = Size(hidden=64, inner=128, sequence=16, batch=2) if options.quick else Size()
    pace = Pace(rounds=3, warmup=1) if options.quick else Pace(rounds=5, warmup=1)
    label, lost = f"{kernels}, {layout}, {family}, {precision}", dict[Compiler, Outcome]()
    timeout_s = _TIMEOUT_S[kernels]
    for num_compilers in range(len(options.compilers), 0, -1):
        compilers = options.compilers[:num_compilers]
        job = Job(kernels, family, layout, precision, compilers, size, num_steps=3, pace=pace)
        try:
            found = workers.call(label, fill, job, num_ranks=NUM_RANKS[layout], timeout_s=timeout_s)
        except subprocess.TimeoutExpired:
            lost[compilers[-1]] = Outcome(failure=f"came to no end in {timeout_s:.0f} s")
        except RuntimeError as error:
            print(error, file=sys.stderr)
            lost[compilers[-1]] = Outcome(failure=f"ended its process: {_reason(str(error))}")
        else:
            return replace(found, outcomes=found.outcomes | lost)
    return Found(0, 0, lost)


def _reason(text: str) -> str:
    """The last error that the output of a worker names."""
    errors = [
        line.partition("]: ")[2] for line in text.splitlines() if re.match(r"\[rank\d\]: \w+Error: ", line)
    ]
    return errors[-1] if errors else "without a word"


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
