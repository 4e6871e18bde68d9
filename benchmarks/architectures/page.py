"""`benchmarks/ZOO.md`: what was found as tables, with every failure's message."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from benchmarks.architectures.making import ARCHITECTURES
from benchmarks.architectures.record import Entries
from benchmarks.architectures.vocabulary import (
    MUCH,
    NEAR,
    ROUNDING,
    WAYS,
    Found,
    Half,
    Rounded,
    Rounding,
    Way,
)
from benchmarks.tables import header, row

_HEAD = """# Forty architectures

Forty architectures of Hugging Face's transformers, from tiny configs with random weights (two layers, 32
elements a token): each is trained with its own loss, and generates, if it can. Written by `make zoo` from
`results/zoo.json`; do not edit. [MODELS.md](MODELS.md) has six of them sharded, and in other precisions.

- **`aotdist.compile`** is `aotdist.compile(model, backend="fx")`; **`backend="aotdist"`** is
  `torch.compile(model, backend="aotdist", options={"backend": "fx"})`; **`aot_eager`** is
  `torch.compile(model, backend="aot_eager")`, the peer. All three run operators one by one: no kernels are
  made, so none are compared.
- Three steps of AdamW. Dropout is 0.1 wherever a config has any; encoders get a padded batch. **same** means:
  loss, gradients, parameters, buffers, and the state of the random numbers after each step equal eager's bit
  for bit; else the largest relative difference, and of what.
- **told**: a program reads data to choose its way, but not where `torch.compiler.is_compiling()` is true.
  aotdist refuses to compile it, and names `Settings(is_compiling=True)` as the way out; with that the model
  trains. Eager is not told so, and may go another way, as it does beside `torch.compile`.
- What stays refused reads data whatever it is told; `torch.compile(backend="aotdist")` compiles the rest.
- **the program's own**: eager has these very bits where it runs what was compiled: told that it is being
  compiled, or, beside Dynamo, what that captured (`torch.compile(model, backend="eager")`). A key's bias has
  no gradient but what rounding leaves, so that a relative difference there is large or none.
- **graphs**, and **breaks** of Dynamo's. `aotdist.compile` has no breaks.
- **compile**: seconds of the first step beyond the others. **step / eager**: forward and backward, the median
  of rounds in which both took turns. The machine was shared: read times to a tenth.
- **generation**: three tokens, drawn at random, with the model's own cache. Tokens, logits and the state of
  the random numbers are compared. **told** is with `Settings(is_compiling=True)`, as in training; **no
  cache** with `use_cache=False`, where the cache is refused.
"""

_BESIDE = "Seconds of compiling, and a step's ratio to eager, to those of `aot_eager`."

_KERNELS = f"""Backends that make kernels round in other places than eager. **losses**: ten steps of AdamW
with dropout, the largest relative difference of a loss from eager's with the same seeds. On a CPU aotdist
draws eager's random numbers; `torch.compile` draws others, so its losses only show how far those carry.
**float64**: loss and gradients of a step without dropout, how far they are from the same step in float64,
to how far eager's are. **wrong**: a loss is not finite or more than {NEAR:g} from eager's, or rounding is
more than {MUCH:g} times eager's. `triton` runs in the interpreter. **fx**: `auto` ran a graph by `fx`, and
said so."""

_OWN = ", the program's own"

_SHOWN: Mapping[Way, str] = {
    "aotdist.compile": "`aotdist.compile`",
    "backend aotdist": '`backend="aotdist"`',
    "aot_eager": "`aot_eager`",
}


def page(entries: Entries) -> str:
    """The whole page."""
    circumstances = ", ".join(
        f"{key} {value}" for key, value in {**entries.versions, **entries.machine}.items()
    )
    older = sorted({each.aotdist for each in entries.entries} - {entries.versions.get("aotdist", "")})
    lines = [_HEAD, f"`{entries.command}`, {entries.date}; {circumstances}."]
    lines += [f"Some rows are from {', '.join(older)}."] if older else []
    lines += ["", "## Summary", "", *_summary(entries), "", "## Training", "", *_training(entries)]
    lines += ["", "## Beside torch.compile", "", _BESIDE, "", *_beside(entries)]
    lines += ["", "## With kernels", "", _KERNELS, "", *_rounding(entries)]
    lines += ["", "## Generation", "", *_generation(entries)]
    lines += ["", "## What fails, and what it says", "", *_failures(entries)]
    lines += ["", "## Where Dynamo breaks", "", *_breaks(entries)]
    return "\n".join(lines) + "\n"


def _all(entries: Entries, way: Way) -> list[Found]:
    return [found for model in ARCHITECTURES if (found := entries.at(model, way)) is not None]


def _summary(entries: Entries) -> Iterator[str]:
    """Each way in a line."""
    yield from header(
        "",
        "models",
        "same bits",
        "same bits if told",
        "other bits",
        "refused or fails",
        "one graph, no break",
        "compile",
        "step / eager",
        "generate the same",
    )
    for way in WAYS:
        found = _all(entries, way)
        ran = [each for each in found if each.came_through()]
        halves = [each.came_through() for each in ran]
        told = [each for each in ran if each.training.failure]
        generations = [each.came_through_generation() for each in found if each.generation is not None]
        yield row(
            _SHOWN[way],
            str(len(found)),
            str(sum(_is_same(each.training) for each in found)),
            str(sum(_is_same(each.told) for each in told)),
            str(sum(not _is_same(half) for half in halves)),
            str(len(found) - len(ran)),
            str(sum(half is not None and half.num_graphs == 1 and not half.breaks for half in halves)),
            _range((each.compile_seconds() for each in ran), "{:.1f} s"),
            _range((each.time_ratio() for each in ran), "{:.2f}"),
            f"{sum(map(_is_same, generations))} of {len(generations)}" if generations else "-",
        )


def _is_same(half: Half | None) -> bool:
    return half is not None and not half.failure and not half.differs


def _range(numbers: Iterable[float], form: str) -> str:
    values = sorted(numbers)
    if not values:
        return "-"
    median, low, high = (form.format(value) for value in (statistics.median(values), values[0], values[-1]))
    return f"{median} ({low}-{high})"


def _training(entries: Entries) -> Iterator[str]:
    parts = [("bits", _bits), ("graphs", _graphs), ("compile", _compile), ("step / eager", _ratio)]
    columns = [f"{_SHOWN[way]} {name}" for way in WAYS for name, _ in parts]
    yield from header("kind", "model", *columns)
    for model, architecture in ARCHITECTURES.items():
        found = [entries.at(model, way) for way in WAYS]
        cells = ["not run" if each is None else show(each) for each in found for _, show in parts]
        yield row(architecture.kind, model, *cells)


def _bits(found: Found) -> str:
    half = found.came_through()
    if half is None:
        return "refused" if found.training.is_ours else "**fails**"
    return f"{'told: ' if half is found.told else ''}{_sameness(half)}"


def _sameness(half: Half) -> str:
    if not half.differs:
        return "same"
    return f"{half.differs:.0e}: `{half.where}`{_OWN if half.is_programs else ''}"


def _graphs(found: Found) -> str:
    half = found.came_through()
    if half is None:
        return "-"
    return _cuts(half)


def _cuts(half: Half) -> str:
    return f"{half.num_graphs}{f', {len(half.breaks)} breaks' if half.breaks else ''}"


def _compile(found: Found) -> str:
    return f"{found.compile_seconds():.1f} s" if found.seconds else "-"


def _ratio(found: Found) -> str:
    return f"{found.time_ratio():.2f}" if found.seconds else "-"


def _beside(entries: Entries) -> Iterator[str]:
    """What both of ours take to what the peer takes; first the medians."""
    ours: tuple[Way, ...] = ("aotdist.compile", "backend aotdist")
    yield from header("model", *(f"{_SHOWN[way]} {what}" for way in ours for what in ("compile", "step")))
    rows = {model: [_ratios(entries, model, way) for way in ours] for model in ARCHITECTURES}
    medians = [
        _range((found[which][part] for found in rows.values() if found[which]), "{:.2f}")
        for which in range(len(ours))
        for part in range(2)
    ]
    yield row("all, median", *medians)
    for model, found in rows.items():
        if any(found):
            yield row(
                model, *(f"{ratio:.2f}" if ratio else "-" for pair in found for ratio in pair or (0, 0))
            )


def _ratios(entries: Entries, model: str, way: Way) -> tuple[float, float] | tuple[()]:
    found, peer = (entries.at(model, each) for each in (way, "aot_eager"))
    if found is None or peer is None or not found.seconds or not peer.seconds:
        return ()
    return found.compile_seconds() / peer.compile_seconds(), found.time_ratio() / peer.time_ratio()


def _rounding(entries: Entries) -> Iterator[str]:
    yield from header("model", *(f"`{way}` {part}" for way in ROUNDING for part in ("losses", "float64")))
    yield row("**wrong**, of", *(cell for way in ROUNDING for cell in _num_wrong(entries, way)))
    for model in ARCHITECTURES:
        found = [entries.at(model, way) for way in ROUNDING]
        if any(found):
            pairs = (_of_rounding(each, way) for each, way in zip(found, ROUNDING, strict=True))
            yield row(model, *(cell for pair in pairs for cell in pair))


def _num_wrong(entries: Entries, way: Rounding) -> tuple[str, str]:
    rounded = [each.rounded for each in _all(entries, way) if each.rounded and not each.rounded.failure]
    wrong = sum(not each.is_right() for each in rounded)
    return ("-" if way == "torch.compile" else f"{wrong} of {len(rounded)}"), "-"


def _of_rounding(found: Found | None, way: Rounding) -> tuple[str, str]:
    if found is None or found.rounded is None:
        return "not run", "-"
    rounded = found.rounded
    if rounded.failure:
        return "refused" if rounded.is_ours else "**fails**", "-"
    wrong = way != "torch.compile" and not rounded.is_right()
    losses = f"{'**wrong** ' if wrong else ''}{rounded.apart:.0e}{', fx' if rounded.told else ''}"
    return losses, f"{rounded.error / rounded.eager_error:.2f}"


def _generation(entries: Entries) -> Iterator[str]:
    ways: list[Way] = [way for way in WAYS if any(found.generation for found in _all(entries, way))]
    yield from header("model", *(f"{_SHOWN[way]} {part}" for way in ways for part in ("bits", "graphs")))
    for model in ARCHITECTURES:
        found = [entries.at(model, way) for way in ways]
        if any(each is not None and each.generation for each in found):
            yield row(model, *(cell for each in found for cell in _of_generation(each)))


def _of_generation(found: Found | None) -> tuple[str, str]:
    if found is None or found.generation is None:
        return "not run", "-"
    half = found.came_through_generation()
    if half is None:
        return "refused" if found.generation.is_ours else "**fails**", "-"
    how = "" if half is found.generation else "told: " if half.with_cache else "told, no cache: "
    return f"{how}{_sameness(half)}", _cuts(half)


def _failures(entries: Entries) -> Iterator[str]:
    """The messages, each once, with what they were said to."""
    messages: dict[str, list[str]] = {}
    for way in (*WAYS, *ROUNDING):
        for model in ARCHITECTURES:
            for what, half in _halves(entries.at(model, way)):
                if half.failure:
                    said = f"{_SHOWN.get(way, f'`{way}`')}, {what}: {_in_markdown(half.failure)}"
                    messages.setdefault(said, []).append(model)
    for message, models in messages.items():
        yield f"- {', '.join(models)}: {message}"


def _halves(found: Found | None) -> Iterator[tuple[str, Half | Rounded]]:
    if found is not None:
        halves: dict[str, Half | Rounded | None] = {
            "training": found.rounded or found.training,
            "training, told": found.told,
            "generation": found.generation,
            "generation, told": found.told_generation,
        }
        yield from ((what, half) for what, half in halves.items() if half is not None)


def _breaks(entries: Entries) -> Iterator[str]:
    """The reasons, as Dynamo gives them, with how often it gave them; the same for both backends."""
    for model in ARCHITECTURES:
        found = entries.at(model, "backend aotdist")
        if found is not None and found.training.breaks:
            counted = Counter(found.training.breaks)
            reasons = "; ".join(f"{_in_markdown(reason)} ({times})" for reason, times in counted.items())
            yield f"- {model}: {reasons}"


def _in_markdown(text: str) -> str:
    """A message that markdown shows as it is."""
    return re.sub(r"([<>*|])", r"\\\1", text)
