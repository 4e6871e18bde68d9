"""The first minutes on a GPU: `python3 -m benchmarks.gpu.first_contact`.

Every step runs in a process of its own, which is ended at its deadline; what it found until then is kept.
It writes `first_contact.json`, `first_contact.xml` (JUnit), `first_contact.log` and a page, anew after each
step. Nothing has to be installed beside torch, Triton, transformers and what these need. `--dry-run` runs
all of it on a CPU, with tiny tensors and interpreted kernels, to see that everything runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.contact_page import page
from benchmarks.gpu.families import FAMILIES
from benchmarks.gpu.findings import Finding, Reporter, junit, read

SHORT = 240.0
"""Seconds below which only the short form is run."""
STEPS: Mapping[str, float] = {
    "environment": 60,
    "launchers": 120,
    "float8": 120,
    "sparse": 90,
    "strides": 120,
    **{f"kernels: {name}": 150 for name in FAMILIES},
}
"""Steps, with the seconds that each may take."""
IN_SHORT = ("environment", "launchers", "float8", "kernels: Llama", "kernels: ResNet", "kernels: GPT-2")
_SPARE = 8.0  # seconds in which everything is written


@dataclass(frozen=True, slots=True)
class Options:
    """How first contact is made.

    Args:
        seconds: that all of it may take.
        folder: where results go.
        steps: which; those of the form when none is named.
        dry: on a CPU.
        workers: steps at a time; only one of them measures.
    """

    seconds: float
    folder: Path
    steps: tuple[str, ...]
    dry: bool
    workers: int


def main(options: Options) -> int:
    """Run the steps; 1 if something failed."""
    options.folder.mkdir(parents=True, exist_ok=True)
    form = IN_SHORT if options.seconds <= SHORT else tuple(STEPS)
    results = _Results(options.folder)
    deadline = time.monotonic() + options.seconds - _SPARE
    first, *rest = [step for step in options.steps or form if step in STEPS]

    def run(step: str) -> None:
        results.add(step, *_run(step, options, deadline))

    run(first)  # alone: it measures what the others are held against
    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(run, rest))
    failed = [each for each in results.findings if each.outcome == "failed"]
    for each in failed:
        print(f"FAILED {each.step} / {each.case}: {each.reason.strip().splitlines()[-1][:200]}")
    print(f"{len(results.findings)} cases, {len(failed)} failed")
    return int(bool(failed) or all(each.outcome == "skipped" for each in results.findings))


class _Results:
    """What was found until now, in files.

    Args:
        folder: where.
    """

    def __init__(self, folder: Path) -> None:
        self.findings: list[Finding] = []
        self._folder = folder
        self._command = shlex.join(["python3", "-m", "benchmarks.gpu.first_contact", *sys.argv[1:]])
        self._lock = threading.Lock()
        (folder / "first_contact.log").write_text("")

    def add(self, step: str, found: Sequence[Finding], log: str) -> None:
        """Write the findings of a step with those before."""
        with self._lock:
            self.findings += found
            fields = [dataclasses.asdict(each) for each in self.findings]
            (self._folder / "first_contact.json").write_text(json.dumps(fields, indent=1) + "\n")
            (self._folder / "first_contact.xml").write_text(junit(self.findings))
            (self._folder / "FIRST_CONTACT.md").write_text(page(self.findings, self._command))
            with (self._folder / "first_contact.log").open("a") as lines:
                lines.write(f"===== {step}\n{log}\n")


def _run(step: str, options: Options, deadline: float) -> tuple[list[Finding], str]:
    """The findings of a step in a process of its own, and what it printed."""
    allowed = min(STEPS[step], deadline - time.monotonic())
    if allowed < 5:
        return [Finding(step, "step", "skipped", 0.0, {}, "left out for want of time")], ""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "findings"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.gpu.first_contact", "--only", step, "--into", str(file)]
        environment = os.environ | {"AOTDIST_CACHE_FOLDER": folder, "TOKENIZERS_PARALLELISM": "false"}
        if options.dry:
            command, environment = [*command, "--dry-run"], environment | {"TRITON_INTERPRET": "1"}
        started = time.monotonic()
        why = ""
        with log.open("wb") as output:
            try:
                done = subprocess.run(
                    command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=allowed
                )
                why = f"its process ended with {done.returncode}" if done.returncode else ""
            except subprocess.TimeoutExpired:
                why = f"it took longer than {allowed:.0f} s"
        found, printed = list(read(file)), log.read_text(errors="replace")
        if why or not found:
            seconds = time.monotonic() - started
            found.append(
                Finding(step, "process", "failed", seconds, {}, f"{printed}\n{why or 'found nothing'}")
            )
        return found, printed


def _one_step(step: str, file: Path, *, dry: bool) -> None:
    """Runs in a process of its own."""
    import torch

    from benchmarks.gpu import steps
    from benchmarks.gpu.per_kernel import check_kernels

    where = steps.Where(torch.device("cpu") if dry else torch.device("cuda", 0), dry)
    report = Reporter(step, file)
    kind, _, family = step.partition(": ")
    if kind == "kernels":
        copied = steps.copy_bandwidth(where)
        check_kernels(family, dry=dry, device=where.device, copied=copied, report=report)
    else:
        getattr(steps, step)(where, report)


def _parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.first_contact", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2 * SHORT, help="that all of it may take")
    parser.add_argument(
        "--folder", type=Path, default=Path(__file__).parents[1] / "results" / "first_contact"
    )
    parser.add_argument("--steps", nargs="*", default=(), choices=tuple(STEPS), help="only these")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) // 4))
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, to see that everything runs")
    parser.add_argument("--only", choices=tuple(STEPS), help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    given = _parsed()
    if given.only:
        _one_step(given.only, given.into, dry=given.dry_run)
    else:
        sys.exit(main(Options(given.seconds, given.folder, tuple(given.steps), given.dry_run, given.workers)))
