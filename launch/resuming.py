"""What a resumed run keeps: its number of ranks, unless the command sets it, and the sequences of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from aotdist.errors import BadSettings
from aotdist.launch.config import AUTO, CONFIG_FILE, JobOptions, parse_options, read_options
from aotdist.launch.parallel import Layout, Place, require_even_split
from aotdist.launch.run_folder import folder_of_run, read_environment, refuse_taken

_BATCH_FLAGS = ("--data.batch-size", "--optim.accumulate")


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """A run when it last started.

    Args:
        batch_ranks: number of data-parallel ranks that the options of the batch were given for.
    """

    options: JobOptions
    ranks: int
    batch_ranks: int


def earlier_run(options: JobOptions, place: Place) -> EarlierRun | None:
    """The run that is resumed, from its folder; None for a new run.

    Raises:
        BadSettings: there is no such run, or its configuration is damaged.
    """
    folder = folder_of_run(options, place)
    if folder is None:
        return None
    options = read_options(folder / CONFIG_FILE)  # checks the checksum of the file
    environment = read_environment(folder / CONFIG_FILE)
    return EarlierRun(options, environment["ranks"], environment["batch_ranks"])


def earlier_ranks(words: Sequence[str], program: str) -> int | None:
    """The number of ranks of the run that a command resumes, if it was more than one; printed, too."""
    if not any(word.partition("=")[0] == "--resume" for word in words):
        return None
    before = earlier_run(parse_options(words, speaks=True, program=program), Place())
    if before is None or before.ranks == 1:
        return None
    print(f"going on with {before.ranks} ranks, as the run had; --ranks says otherwise", flush=True)
    return before.ranks


def check_command(words: Sequence[str], ranks: int, program: str) -> None:
    """Check a command before torchrun starts ranks, which it would restart if they refused the command.

    Raises:
        SystemExit: an option is unknown or does not parse, or help was asked for.
        BadSettings: the options contradict each other, do not fit the ranks, or name a run that exists.
        RunInUse: the run to resume is under way.
    """
    options = parse_options(words, speaks=True, program=program)
    layout, before = Layout.of(options.parallel, ranks), earlier_run(options, Place())
    require_even_split(options, layout.tp)
    refuse_taken(options)
    sets_batch = command_sets_batch(words, options, Place())
    meant_for = batch_ranks(options, before, layout.num_dp_ranks, sets_batch=sets_batch)
    with_same_batch(options, meant_for, layout.num_dp_ranks)


def command_sets_batch(words: Sequence[str], options: JobOptions, place: Place) -> bool:
    """Whether a command line sets the batch for the present ranks.

    With `--resume auto`, and when torchrun restarts the ranks, it is the command that started the run.
    """
    named = {word.partition("=")[0].replace("_", "-") for word in words}
    return options.resume != AUTO and not place.restarts and not named.isdisjoint(_BATCH_FLAGS)


def batch_ranks(
    options: JobOptions, before: EarlierRun | None, num_dp_ranks: int, *, sets_batch: bool
) -> int:
    """The number of data-parallel ranks that the options of the batch are meant for.

    These are the present ranks, unless a run is resumed with its batch unchanged.
    """
    if before is None or sets_batch or _batch(options) != _batch(before.options):
        return num_dp_ranks
    return before.batch_ranks


def _batch(options: JobOptions) -> tuple[int, int]:
    return options.data.batch_size, options.optim.accumulate


def sequences(options: JobOptions, num_dp_ranks: int) -> int:
    """Sequences in a step on this number of data-parallel ranks."""
    return options.data.batch_size * options.optim.accumulate * num_dp_ranks


def with_same_batch(options: JobOptions, meant_for: int, num_dp_ranks: int) -> JobOptions:
    """Options for another number of ranks by which steps and validations take as many sequences.

    The batch of a rank does not grow, since its memory might not suffice.

    Args:
        options: for `meant_for` data-parallel ranks.

    Raises:
        BadSettings: the sequences of a step do not divide by the number of ranks.
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


def describe_ranks(before: EarlierRun, ranks: int, options: JobOptions, num_dp_ranks: int) -> str:
    """A note about resuming with another number of ranks; empty if it is the same."""
    if before.ranks == ranks:
        return ""
    taken, was = sequences(options, num_dp_ranks), sequences(before.options, before.batch_ranks)
    still, change = "still " * (taken == was), f", not {was}" * (taken != was)
    size, accumulate = _batch(options)
    return (
        f"; with {ranks} rank{'s' * (ranks > 1)}, not {before.ranks}: a step {still}takes {taken} sequences"
        f"{change} (--data.batch-size {size}, --optim.accumulate {accumulate})"
    )
