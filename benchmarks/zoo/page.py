"""`benchmarks/MODELS.md`: the cells as tables, with every failure's message."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Iterator

from benchmarks.tables import header, row
from benchmarks.zoo.record import Cells
from benchmarks.zoo.vocabulary import (
    FAMILIES,
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

_HEAD = """# Real models

Six models of Hugging Face's transformers, from tiny configs with random weights, trained with their own loss:
in each layout and each precision, eager, compiled by aotdist (`backend="fx"`), and by `torch.compile` with
`backend="aot_eager", dynamic=False`. Both compilers run what they captured operator by operator: no kernels
are made, so none are compared, but in the last table, where both have Inductor make them. Written by
`make models` from `results/models.json`; do not edit.

- **FSDP2**: 2 ranks, a unit for each block and one for the rest. **TP**: 2 ranks, transformers' own plan
  (Llama, Qwen3, Mixtral) or one of ours in the same words. **2-D**: 4 ranks, FSDP2 over one axis, TP over the
  other.
- **bf16**: by FSDP2's policy, gradients reduced in fp32; under TP alone the whole model. **fp8**
  (`to_float8`, recipe `delayed`) and **2:4** (`sparsify_24`) come on top of bf16 and leave output heads as
  they are. GPT2's layers, which hold their weights transposed, are made `nn.Linear` for them; Mixtral's
  experts are no linear layers, and stay in bf16.
- On a CPU the arithmetic of FP8 and 2:4 is emulated: times say nothing about the formats, and what is saved
  in memory is what is kept for the backward.
- **same bits**: loss, gradients, parameters and buffers of three steps of SGD equal eager's bit for bit, on
  every rank; else the largest relative difference, and of what. Dropout is what the configs say: 0.1 in GPT2
  and T5.
- **time**, of forward and backward, and **peak**, of tensors beyond the model in one such step, gradients
  included, are ratios to eager; of times, the median of rounds in which both took turns in the same
  processes. Ranks share two cores: read times to a tenth.
- **graphs**: what `torch.compile` cut the forward into. aotdist makes one of it.
- Why `torch.compile` differs, as far as it was looked into (FSDP2, first step). Llama, in bf16 and FP8: by
  transformers, which goes another way where `torch.compiler.is_compiling()` is true (a mask in the place of
  `is_causal`, which rounds otherwise): eager has the bits of `torch.compile` when it is told so, and so has
  aotdist with `Settings(is_compiling=True)`. GPT2 and T5, in bf16: by itself, as eager keeps its bits then.
"""

_GLANCE = (
    "Time / eager of aotdist; **=** where it has eager's bits. Where it fails, its message stands below."
)
_INDUCTOR = """By aotdist's default, `backend="auto"`, and by `torch.compile(model, dynamic=False)`, which is
told to draw eager's random numbers. **loss**: the largest relative difference of a loss from eager's, in
three steps of SGD."""
_MEMORY = "Peak of FP8 and of 2:4 against that of bf16, by the same contender."


def page(cells: Cells) -> str:
    """The whole page."""
    circumstances = ", ".join(f"{key} {value}" for key, value in {**cells.versions, **cells.machine}.items())
    older = sorted({cell.aotdist for cell in cells.cells} - {cells.versions.get("aotdist", "")})
    lines = [_HEAD, f"`{cells.command}`, {cells.date}; {circumstances}."]
    lines += [f"Some cells are from {', '.join(older)}."] if older else []
    lines += ["", "## At a glance", "", _GLANCE, "", *_glance(cells), "", *_summary(cells)]
    lines += ["", "## Memory", "", _MEMORY, "", *_memory(cells)]
    for layout in LAYOUTS:
        ranks = NUM_RANKS[layout]
        lines += ["", f"## {layout}, {ranks} ranks", "", *_cells(cells, layout)]
        lines += [*_failures(cells, "operators", layout), *_left_out(cells, layout)]
    lines += ["", "## By Inductor's kernels", "", _INDUCTOR, "", *_by_inductor(cells)]
    lines += _failures(cells, "inductor", *LAYOUTS)
    return "\n".join(lines) + "\n"


def _places(
    cells: Cells, *layouts: Layout, kernels: Kernels = "operators"
) -> Iterator[tuple[Layout, Family, Precision, Found | None]]:
    for layout in layouts or LAYOUTS:
        for family in FAMILIES:
            for precision in PRECISIONS:
                yield layout, family, precision, cells.at(kernels, layout, family, precision)


def _glance(cells: Cells) -> Iterator[str]:
    """Model by layout and precision."""
    columns = list(itertools.product(LAYOUTS, PRECISIONS))
    yield from header("model", *(f"{layout} {precision}" for layout, precision in columns))
    for family in FAMILIES:
        yield row(
            family,
            *(_in_short(cells.at("operators", layout, family, precision)) for layout, precision in columns),
        )


def _in_short(found: Found | None) -> str:
    if found is None:
        return "not run"
    if not found.ran("aotdist"):
        return "fails"
    return f"{'=' if found.outcomes['aotdist'].differs == 0 else '~'} {found.time_ratio('aotdist'):.2f}"


def _summary(cells: Cells) -> Iterator[str]:
    """Who is as eager is, who is faster, who fails: all cells counted."""
    found = [each for *_, each in _places(cells) if each is not None]
    yield from header(
        "", "cells", "same bits as eager", "fails", "time / eager", "peak / eager", "faster of the two"
    )
    names: tuple[Compiler, ...] = ("aotdist", "torch.compile")
    for name in names:
        tried = [each for each in found if name in each.outcomes]
        ran = [each for each in tried if each.ran(name)]
        yield row(
            name,
            str(len(tried)),
            str(sum(each.outcomes[name].differs == 0 for each in ran)),
            str(len(tried) - len(ran)),
            _range(each.time_ratio(name) for each in ran),
            _range(each.peak_ratio(name) for each in ran),
            str(sum(each.fastest(names) == name for each in found if names[1] in each.outcomes)),
        )


def _range(ratios: Iterable[float]) -> str:
    values = sorted(ratios)
    if not values:
        return "-"
    return f"{statistics.median(values):.2f} ({values[0]:.2f}-{values[-1]:.2f})"


def _memory(cells: Cells) -> Iterator[str]:
    """Peaks in FP8 and 2:4 against bf16."""
    names: tuple[Compiler, ...] = ("eager", "aotdist")
    columns = [f"{precision} / bf16, {name}" for precision in ("fp8", "2:4") for name in names]
    yield from header("layout", "model", *(f"bf16, {name}" for name in names), *columns)
    for layout in LAYOUTS:
        for family in FAMILIES:
            base = [_peak(cells.at("operators", layout, family, "bf16"), name) for name in names]
            ratios = [
                _peak(cells.at("operators", layout, family, precision), name) / peak
                for precision in ("fp8", "2:4")
                for name, peak in zip(names, base, strict=True)
            ]
            yield row(layout, family, *(_mib(peak) for peak in base), *map(_ratio, ratios))


def _peak(found: Found | None, name: Compiler) -> float:
    return found.outcomes[name].peak if found is not None and found.ran(name) else math.nan


def _mib(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f} MiB"


def _ratio(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _cells(cells: Cells, layout: Layout) -> Iterator[str]:
    yield from header(
        "model",
        "precision",
        "linear layers in it",
        "aotdist",
        "time / eager",
        "peak / eager",
        "`torch.compile`",
        "graphs",
        "time / eager",
        "peak / eager",
    )
    for _, family, precision, found in _places(cells, layout):
        if found is None:
            continue
        share = f"{found.num_converted} of {found.num_linear}" if found.num_converted else ""
        ours, theirs = (_contender(found, name) for name in ("aotdist", "torch.compile"))
        graphs = str(found.outcomes["torch.compile"].num_graphs) if found.ran("torch.compile") else "-"
        yield row(family, precision, share, *ours, theirs[0], graphs, *theirs[1:])


def _contender(found: Found, name: Compiler) -> tuple[str, str, str]:
    if name not in found.outcomes:
        return "not run" if found.ran("eager") else "eager fails", "-", "-"
    if not found.ran(name):
        return "fails", "-", "-"
    return _sameness(found.outcomes[name]), f"{found.time_ratio(name):.2f}", f"{found.peak_ratio(name):.2f}"


def _sameness(outcome: Outcome) -> str:
    return f"{outcome.differs:.0e}: `{outcome.where}`" if outcome.differs else "same bits"


def _by_inductor(cells: Cells) -> Iterator[str]:
    yield from header(
        "layout",
        "model",
        "precision",
        *("aotdist loss", "time / eager"),
        *("`torch.compile` loss", "time / eager"),
    )
    for layout, family, precision, found in _places(cells, kernels="inductor"):
        if found is not None:
            both = (_loss_and_time(found, name) for name in ("aotdist", "torch.compile"))
            yield row(layout, family, precision, *itertools.chain(*both))


def _loss_and_time(found: Found, name: Compiler) -> tuple[str, str]:
    if not found.ran(name):
        return "fails" if name in found.outcomes else "not run", "-"
    return f"{found.outcomes[name].loss_differs:.0e}", f"{found.time_ratio(name):.2f}"


def _failures(cells: Cells, kernels: Kernels, *layouts: Layout) -> Iterator[str]:
    """The messages of what failed, each once."""
    messages: dict[str, list[str]] = {}
    for _, family, precision, found in _places(cells, *layouts, kernels=kernels):
        for name, outcome in found.outcomes.items() if found is not None else ():
            if outcome.failure:
                said = re.sub(r" object at 0x[0-9a-f]+", "", outcome.failure)
                messages.setdefault(f"`{name}`: {said}", []).append(f"{family} {precision}")
    if messages:
        yield ""
        yield "What fails, and what it says:"
        yield ""
    for message, places in messages.items():
        yield f"- {', '.join(places)}: {message}"


def _left_out(cells: Cells, layout: Layout) -> Iterator[str]:
    """Where `torch.compile` has not been run yet, and what would."""
    places = [
        (family, precision)
        for _, family, precision, found in _places(cells, layout)
        if found is not None and found.ran("eager") and "torch.compile" not in found.outcomes
    ]
    if places:
        families, precisions = (" ".join(dict.fromkeys(column)) for column in zip(*places, strict=True))
        arguments = f"--layouts {layout} --families {families} --precisions {precisions}"
        yield ""
        yield "`torch.compile` was left out where it says so, for want of time. What runs it there:"
        yield f'`make models ARGS="{arguments}"`.'
