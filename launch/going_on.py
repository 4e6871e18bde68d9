"""What a run keeps when it goes on: its ranks, if nobody says otherwise, and the sequences of a step."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from aotdist.errors import BadSettings
from aotdist.launch.config import AUTO, CONFIG_FILE, JobOptions, parse_options, read_options
from aotdist.launch.parallel import Layout, Place, require_even_split
from aotdist.launch.run_folder import folder_of_run, read_environment, refuse_taken


@dataclass(frozen=True, slots=True)
class Before:
    """A run as it was written down when it last started.

    Args:
        options: as they were asked for.
        ranks: that it ran on.
        batch_ranks: data-parallel ranks that `--data.batch-size` and its like were meant for.
    """

    options: JobOptions
    ranks: int
    batch_ranks: int


def run_before(options: JobOptions, place: Place) -> Before | None:
    """The run that is to go on, as it was; None for a new one.

    Raises:
        BadSettings: there is no such run, or what it wrote down is damaged.
    """
    folder = folder_of_run(options, place)
    if folder is None:
        return None
    options = read_options(folder / CONFIG_FILE)  # which sees that the file is as it was written
    environment = read_environment(folder / CONFIG_FILE)
    return Before(options, environment["ranks"], environment["batch_ranks"])


def ranks_before(words: Sequence[str], program: str) -> int | None:
    """The ranks that a run had which a command line goes on with, if they were several; said to the user."""
    if not any(word.partition("=")[0] == "--resume" for word in words):
        return None
    before = run_before(parse_options(words, speaks=True, program=program), Place())
    if before is None or before.ranks == 1:
        return None
    print(f"going on with {before.ranks} ranks, as the run had; --ranks says otherwise", flush=True)
    return before.ranks


def require_sound(words: Sequence[str], ranks: int, program: str) -> None:
    """Refuse before ranks are started what every one would: torchrun would start them again, and again.

    Raises:
        SystemExit: an option is unknown or does not parse, or help was asked for.
        BadSettings: the options contradict each other, do not fit the ranks, or name a run that is there.
        RunInUse: the run that is to go on is under way.
    """
    options = parse_options(words, speaks=True, program=program)
    layout, before = Layout.of(options.parallel, ranks), run_before(options, Place())
    require_even_split(options, layout.tp)
    refuse_taken(options)
    is_anew = says_batch_anew(words, options, Place())
    meant_for = batch_ranks(options, before, layout.num_dp_ranks, is_anew=is_anew)
    with_same_batch(options, meant_for, layout.num_dp_ranks)


def says_batch_anew(words: Sequence[str], options: JobOptions, place: Place) -> bool:
    """Whether a command line says how many sequences a step is to take from now on.

    With `--resume auto`, and when torchrun starts the ranks again, it is the command that began the run.
    """
    return options.resume != AUTO and not place.restarts and names_batch(words)


def names_batch(words: Sequence[str]) -> bool:
    """Whether a command line says how many sequences a step takes."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--data.batch-size", "--data.batch_size", "--optim.accumulate"):
        finder.add_argument(name, dest="batch", nargs="?", const="")
    return finder.parse_known_args(words)[0].batch is not None


def batch_ranks(options: JobOptions, before: Before | None, num_dp_ranks: int, *, is_anew: bool) -> int:
    """The data-parallel ranks that the options of the batch are meant for.

    These are the ranks of now, unless a run goes on whose batch nobody has changed.

    Args:
        options: as they were asked for.
        before: the run that goes on.
        num_dp_ranks: of now.
        is_anew: whether somebody says what the batch is, see `says_batch_anew`.
    """
    if before is None or is_anew or _batch(options) != _batch(before.options):
        return num_dp_ranks
    return before.batch_ranks


def _batch(options: JobOptions) -> tuple[int, int]:
    return options.data.batch_size, options.optim.accumulate


def sequences(options: JobOptions, num_dp_ranks: int) -> int:
    """What a step takes on so many ranks that read different data."""
    return options.data.batch_size * options.optim.accumulate * num_dp_ranks


def with_same_batch(options: JobOptions, meant_for: int, num_dp_ranks: int) -> JobOptions:
    """Options by which steps and validations take what `options` say, on another number of ranks.

    A rank never takes more sequences at once than it was to: it has room for these.

    Args:
        options: for `meant_for` ranks that read different data.
        meant_for: see `batch_ranks`.
        num_dp_ranks: that there are.

    Raises:
        BadSettings: the sequences of a step do not split over the ranks.
    """
    if meant_for == num_dp_ranks:
        return options
    whole = sequences(options, meant_for)
    if whole % num_dp_ranks:
        raise BadSettings(
            f"a step of this run takes {whole} sequences, which do not split over {num_dp_ranks} ranks",
            fix="go on with another number of ranks, or say what a step is to take from now on: "
            "--data.batch-size, --optim.accumulate",
        )
    share, most = whole // num_dp_ranks, options.data.batch_size
    size = max(size for size in range(1, most + 1) if share % size == 0)
    validated = options.run.validation_batches * most * meant_for
    return dataclasses.replace(
        options,
        data=dataclasses.replace(options.data, batch_size=size),
        optim=dataclasses.replace(options.optim, accumulate=share // size),
        run=dataclasses.replace(options.run, validation_batches=-(-validated // (size * num_dp_ranks))),
    )


def other_ranks(before: Before, ranks: int, options: JobOptions, num_dp_ranks: int) -> str:
    """What it means that a run goes on with another number of ranks; empty where it does not."""
    if before.ranks == ranks:
        return ""
    taken, was = sequences(options, num_dp_ranks), sequences(before.options, before.batch_ranks)
    still, change = "still " * (taken == was), f", not {was}" * (taken != was)
    size, accumulate = _batch(options)
    return (
        f"; with {ranks} rank{'s' * (ranks > 1)}, not {before.ranks}: a step {still}takes {taken} sequences"
        f"{change} (--data.batch-size {size}, --optim.accumulate {accumulate})"
    )
