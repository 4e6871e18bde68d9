"""What first contact found, as a page: failures whole, then each model's kernels, then the slow ones."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.findings import Finding

_SLOW_SHARE = 0.5
_SLOW_US = 50.0
_KERNELS = "kernels: "

_HEAD = f"""\
# First contact

Written by `python3 -m benchmarks.gpu.first_contact`; do not edit. Each kernel of a model's step of training
runs on what its nodes gave, into memory filled with NaN, and is held to what the nodes give one by one:
within 2 percent of their norm where they round to 16 bits, within 1e-4 in float32, or no further from
float64 than four times what they are. Its time is the median of the best way to cut it, with an empty
cache, beside the bandwidth of a copy. Kernels that differ in nothing but names are timed once. Slow ones
take over {_SLOW_US:.0f} us at under {_SLOW_SHARE} of that bandwidth; the cost model's estimate stands beside.
"""


def page(findings: Sequence[Finding], command: str) -> str:
    """The page.

    Args:
        findings: of all steps.
        command: what was typed.
    """
    parts = [_HEAD, f"`{command}`; {_circumstances(findings)}.", *_failures(findings)]
    return "\n".join([*parts, *_models(findings), *_slow(findings), *_launchers(findings)]) + "\n"


def _circumstances(findings: Sequence[Finding]) -> str:
    known: dict[str, Any] = {}
    for each in findings:
        if each.step == "environment":
            known |= each.numbers
    rates = {"bytes_per_s": ("copy", "TB/s"), "flop_per_s": ("bf16 product", "TFLOP/s")}
    shown = [
        f"{rates[name][0]} {value / 1e12:.3g} {rates[name][1]}" if name in rates else f"{name} {value}"
        for name, value in known.items()
    ]
    return ", ".join(shown)


def _failures(findings: Sequence[Finding]) -> Iterator[str]:
    failed = [each for each in findings if each.outcome == "failed"]
    skipped = sum(each.outcome == "skipped" for each in findings)
    yield f"\n{len(findings)} cases, {len(failed)} failed, {skipped} skipped.\n"
    for each in failed:
        yield f"- {each.step}, {each.case}: `{each.reason.strip().splitlines()[-1][:200]}`"


def _models(findings: Sequence[Finding]) -> Iterator[str]:
    yield "\n## Models\n"
    yield "| model | kernels | timed | us | of a copy's bandwidth | furthest from its nodes |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for step in dict.fromkeys(each.step for each in findings if each.step.startswith(_KERNELS)):
        checked = [each for each in findings if each.step == step and "error" in each.numbers]
        timed = _timed(checked)
        total = sum(each["us"] for each in timed)
        share = sum(each["of_copy"] * each["us"] for each in timed) / total if total else 0.0
        worst = max((each.numbers["error"] for each in checked), default=float("nan"))
        name = step.removeprefix(_KERNELS)
        yield f"| {name} | {len(checked)} | {len(timed)} | {total:,.0f} | {share:.2f} | {worst:.1e} |"


def _slow(findings: Sequence[Finding]) -> Iterator[str]:
    yield "\n## Slow kernels\n"
    yield "| model | kernel | MB | us | of a copy's bandwidth | should take, us | registers |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    slow = [
        (each.step.removeprefix(_KERNELS), each.case, each.numbers)
        for each in findings
        if each.numbers.get("us", 0.0) > _SLOW_US and each.numbers.get("of_copy", 1.0) < _SLOW_SHARE
    ]
    for model, case, numbers in sorted(slow, key=lambda row: -row[2]["us"]):
        best = min(numbers["ways"], key=lambda way: way["us"])
        yield (
            f"| {model} | {case} | {numbers['bytes'] / 1e6:,.0f} | {numbers['us']:,.0f} | "
            f"{numbers['of_copy']:.2f} | {best['estimated_us']:,.0f} | {best['registers']} |"
        )


def _launchers(findings: Sequence[Finding]) -> Iterator[str]:
    yield "\n## Steps\n"
    yield "| step | cases | seconds, median |"
    yield "| --- | --- | --- |"
    for step in dict.fromkeys(each.step for each in findings if not each.step.startswith(_KERNELS)):
        seconds = [each.seconds for each in findings if each.step == step]
        yield f"| {step} | {len(seconds)} | {statistics.median(seconds):.2f} |"


def _timed(findings: Sequence[Finding]) -> list[Mapping[str, Any]]:
    return [each.numbers for each in findings if "of_copy" in each.numbers]
