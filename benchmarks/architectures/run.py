"""Train forty architectures of Hugging Face's transformers, and have them generate: `make zoo`.

Runs each in processes of its own, one for each way, writes `benchmarks/results/zoo.json` after each, and at
the end `benchmarks/ZOO.md`. Name some to run those anew and keep the others:
`make zoo ARGS="--models LlamaForCausalLM BertForMaskedLM"`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

import tyro

from benchmarks.architectures.making import ARCHITECTURES
from benchmarks.architectures.page import page
from benchmarks.architectures.record import Entries
from benchmarks.architectures.rounding import failed, found_by
from benchmarks.architectures.trial import Job
from benchmarks.architectures.vocabulary import ROUNDING, WAYS, Found, Way
from benchmarks.record import ROOT
from benchmarks.timing import Pace

RESULTS = ROOT / "results"
_TRIALS = ["benchmarks.architectures.trial", "benchmarks.architectures.rounding"]


@dataclass(frozen=True, slots=True)
class Options:
    """What to run.

    Args:
        models: some of the models, by the names of their classes.
        ways: some of the ways to run them.
        rounds: of the steps that are timed.
        timeout: seconds after which a process is ended.
        missing: only what has not been run yet.
        quick: into `results/quick/`, with one round: to see that everything runs.
    """

    models: tuple[str, ...] = tuple(ARCHITECTURES)
    ways: tuple[Way, ...] = (*WAYS, *ROUNDING)
    rounds: int = 3
    timeout: float = 600.0
    missing: bool = False
    quick: bool = False


def main(options: Options) -> int:
    """Run them; the number of rows in which aotdist trains otherwise, or fails at unworded."""
    os.environ["OMP_NUM_THREADS"] = "1"  # models are too small for more
    folder = RESULTS / "quick" if options.quick else RESULTS
    entries = Entries.load(folder)
    for model, way in itertools.product(options.models, options.ways):
        if options.missing and entries.at(model, way) is not None:
            continue
        entries = entries.with_found(model, way, _found(model, way, options))
        entries.save(folder)
    text = page(entries)
    if options.quick:
        print(text)
    else:
        (ROOT / "ZOO.md").write_text(text)
    return sum(_is_lost(entry.way, entry.found) for entry in entries.entries)


def _found(model: str, way: Way, options: Options) -> Found:
    """What the process says; what is known of one that comes to no end."""
    job = Job(model, way, num_steps=3, pace=Pace(rounds=1 if options.quick else options.rounds, warmup=1))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        process = _context(way).Process(target=_answer, args=(job, answer))
        process.start()
        process.join(options.timeout)
        print(f"  {model}, {way}: {time.perf_counter() - start:.0f} s", flush=True)
        if process.is_alive():
            process.kill()
            process.join()
            return failed(job, f"came to no end in {options.timeout:.0f} s")
        if not answer.exists():
            return failed(job, f"ended its process with {process.exitcode}")
        found: Found = pickle.loads(answer.read_bytes())
        return found


def _context(way: Way) -> SpawnContext | ForkServerContext:
    """Processes are forked off one that has imported everything: that takes 7 s, most models less.

    Triton looks whether it is to interpret when it is imported, so its processes begin anew.
    """
    if way == "triton":
        os.environ["TRITON_INTERPRET"] = "1"
        return multiprocessing.get_context("spawn")
    os.environ.pop("TRITON_INTERPRET", None)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_TRIALS)
    return context


def _answer(job: Job, file: Path) -> None:
    file.write_bytes(pickle.dumps(found_by(job)))


def _is_lost(way: Way, found: Found) -> bool:
    half, rounded = found.training, found.rounded
    if rounded is not None:
        return way != "torch.compile" and not rounded.is_ours and not rounded.is_right()
    return way == "aotdist.compile" and (bool(half.differs) or bool(half.failure and not half.is_ours))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
