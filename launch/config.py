"""Every option of the training job: nested frozen dataclasses that tyro turns into the command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

import tyro

from aotdist.errors import BadSettings
from aotdist.files import with_checksum

PROGRAM = "aotdist.launch.train"
DESCRIPTION = """\
Train a Llama-style decoder, byte by byte, on the sources of Python's own standard library.

Runs as it is (`python -m aotdist.launch.train`) or on several ranks (`torchrun --nproc-per-node 2 -m
aotdist.launch.train`): FSDP2 by default, HSDP and tensor parallelism on request; gloo on CPUs, NCCL and bf16
on GPUs."""

CONFIG_FILE = "config.json"
"""File of a run's options in its folder."""

AUTO = "auto"
"""Value of `--resume` instead of a folder."""


def _require(holds: bool, what: str, fix: str) -> None:
    if not holds:
        raise BadSettings(what, fix=fix)


def _flag(options: Any, name: str) -> str:
    """The command-line flag of a field: `--optim.warmup-steps`."""
    section = type(options).__name__.removesuffix("Options").lower()
    return f"--{section}.{name.replace('_', '-')}"


def _require_positive(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        _require(value > 0, f"{_flag(options, name)} is {value!r}", "give a positive number")


def _require_not_negative(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        _require(value >= 0, f"{_flag(options, name)} is {value!r}", "give 0 or more")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The shape of the decoder.

    Args:
        dim: width of the residual stream.
        num_layers: decoder blocks.
        num_heads: query heads; the width of a head is dim / num_heads and must be even.
        num_kv_heads: key and value heads, each shared by num_heads / num_kv_heads query heads.
        hidden_dim: width inside the SwiGLU; by default 8/3 of dim, rounded up to a multiple of 32.
        tie_head: let the output head be the embedding's weight.
        rope_theta: base of the rotary frequencies.
        norm_eps: what RMSNorm adds to the mean square.
    """

    dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    hidden_dim: int | None = None
    tie_head: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        _require_positive(self, "dim", "num_layers", "num_heads", "num_kv_heads", "rope_theta", "norm_eps")
        _require(
            self.dim % (2 * self.num_heads) == 0,
            f"dim {self.dim} does not split into {self.num_heads} heads of even width",
            f"choose dim as a multiple of {2 * self.num_heads}",
        )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly",
            "choose num_kv_heads among the divisors of num_heads",
        )
        if self.hidden_dim is not None:
            _require_positive(self, "hidden_dim")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads

    @property
    def swiglu_dim(self) -> int:
        """Width inside the SwiGLU."""
        return self.hidden_dim or -(-self.dim * 8 // 3 // 32) * 32


@dataclass(frozen=True, slots=True)
class Sparse24Options:
    """2:4 sparsity of each block's weights.

    Args:
        mask: `row` keeps the two largest of four neighbours in a row, chosen in each forward; `transposable`
            in a column too, so that the backward's product with the weight is sparse as well; `off` keeps
            all.
        decay: share of the dropped weights that each step adds to their gradient (SR-STE).
    """

    mask: Literal["off", "row", "transposable"] = "off"
    decay: float = 0.0

    def __post_init__(self) -> None:
        _require_not_negative(self, "decay")


@dataclass(frozen=True, slots=True)
class DataOptions:
    """The text, and how it is cut into batches.

    Args:
        root: folder whose Python files are the text; by default the standard library's.
        seq_len: bytes that the model sees at once.
        batch_size: sequences per data-parallel rank and micro step.
        validation_percent: share of the files that is held out for validation.
    """

    root: Path | None = None
    seq_len: int = 256
    batch_size: int = 8
    validation_percent: int = 5

    def __post_init__(self) -> None:
        _require_positive(self, "seq_len", "batch_size")
        _require(
            0 < self.validation_percent < 100,
            f"--data.validation-percent is {self.validation_percent}",
            "give a number from 1 to 99",
        )


@dataclass(frozen=True, slots=True)
class OptimOptions:
    """AdamW, its schedule, clipping and accumulation.

    Args:
        steps: optimizer steps.
        lr: peak learning rate.
        min_lr_ratio: final learning rate, as a share of the peak.
        warmup_steps: steps of linear warm-up before the cosine.
        beta1: decay of AdamW's first moment.
        beta2: decay of AdamW's second moment.
        eps: AdamW's denominator offset.
        weight_decay: decoupled decay of the matrices; vectors (norm scales) are never decayed.
        clip_norm: largest norm of the whole gradient; 0 switches clipping off.
        accumulate: micro steps whose gradients are summed before one optimizer step.
        sync_every_micro_step: reduce gradients across ranks in every micro step (less memory), not
            only in the last one (less communication).
    """

    steps: int = 300
    lr: float = 3e-3
    min_lr_ratio: float = 0.1
    warmup_steps: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    accumulate: int = 1
    sync_every_micro_step: bool = False

    def __post_init__(self) -> None:
        _require_positive(self, "steps", "lr", "accumulate", "eps")
        _require(0 <= self.min_lr_ratio <= 1, f"--optim.min-lr-ratio is {self.min_lr_ratio}", "give 0 to 1")
        _require_not_negative(self, "warmup_steps", "weight_decay", "clip_norm")


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """How the ranks share the work; `dp_replicate x dp_shard x tp` must be the number of ranks.

    Args:
        dp_replicate: replicas of the sharded model; more than 1 makes the mesh an HSDP one.
        dp_shard: ranks over which FSDP2 shards the parameters; by default all remaining ones.
        tp: ranks over which each block's matrices are split (tensor and sequence parallelism).
        reshard_after_forward: free a block's gathered parameters after its forward and gather them
            again for its backward.
        device: `auto` takes the GPUs if there are any.
        precision: arithmetic of the blocks; `auto` is bf16 on GPUs and fp32 on CPUs. Parameters,
            gradients and optimizer state stay fp32 either way.
        timeout_s: seconds that a collective waits for a missing rank before the job fails.
    """

    dp_replicate: int = 1
    dp_shard: int | None = None
    tp: int = 1
    reshard_after_forward: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        _require_positive(self, "dp_replicate", "tp", "timeout_s")
        if self.dp_shard is not None:
            _require_positive(self, "dp_shard")


@dataclass(frozen=True, slots=True)
class Float8Options:
    """8-bit products in the blocks.

    Args:
        recipe: where scales come from, see `aotdist.to_float8`; `off` for none. The output head, and
            everything that is no product with a weight, keeps its precision in any case.
        all_gather: with `delayed`, let FSDP2 gather the weights of the blocks in 8 bits.
    """

    recipe: Literal["off", "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise"] = "off"
    all_gather: bool = False

    def __post_init__(self) -> None:
        fits = self.recipe == "delayed" or not self.all_gather
        needed = f"--float8.all-gather needs --float8.recipe delayed, not {self.recipe}"
        _require(fits, needed, "choose that recipe, or leave the option out")


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How the model is compiled; settings are those of `AOTDIST_*` variables.

    Args:
        backend: `eager` does not compile; `fx` runs the graphs operator by operator (bit-equal to eager);
            `inductor` compiles them by Inductor; `triton` by aotdist's own kernels, on GPUs; `auto` chooses.
    """

    backend: Literal["auto", "eager", "fx", "inductor", "triton"] = "auto"


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Checkpoints; see docs/checkpoints.md.

    Args:
        every: steps between checkpoints; another one is made at the end, and when a signal ends the run. 0
            for none at all.
        keep: how many of the latest checkpoints to keep; 0 for all.
        asynchronous: write in a thread while training continues.
    """

    every: int = 100
    keep: int = 2
    asynchronous: bool = True

    def __post_init__(self) -> None:
        _require_not_negative(self, "every", "keep")


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Steps to profile; each rank writes files to the run's folder.

    Args:
        first_step: the first of them; earlier steps compile and warm up.
        steps: how many; 0 for none.
        memory: also write a snapshot of the GPU's memory (for pytorch.org/memory_viz).
    """

    first_step: int = 5
    steps: int = 0
    memory: bool = False

    def __post_init__(self) -> None:
        _require_positive(self, "first_step")
        _require_not_negative(self, "steps")
        fits = self.steps > 0 or not self.memory
        _require(fits, "--profile.memory needs --profile.steps > 0", "say how many steps")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The run: where it writes, how often, and its seed.

    Args:
        folder: for the folders of runs.
        name: name of this run's folder; by default the time of its start.
        loggers: further loggers besides the run's own files.
        seed: of the initial parameters and the order of the data.
        log_every: steps between reports; every step is recorded in any case.
        validate_every: steps between validations; 0 for validations at the start and at the end only.
        validation_batches: batches of each data-parallel rank in a validation.
        deterministic: refuse kernels that are not repeatable bit for bit (on GPUs).
    """

    folder: Path = Path("runs")
    name: str | None = None
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    seed: int = 0
    log_every: int = 1
    validate_every: int = 50
    validation_batches: int = 8
    deterministic: bool = False

    def __post_init__(self) -> None:
        _require_positive(self, "log_every", "validation_batches")
        _require_not_negative(self, "validate_every")
        name = self.name
        # An empty name is more likely an unset variable of the shell than a wish for the default.
        plain_name = name is None or (name not in ("", ".", "..") and Path(name).name == name)
        _require(plain_name, f"--run.name is {name!r}", "give the name of a folder, without slashes")


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The whole job.

    Args:
        model: the decoder.
        sparse24: its 2:4 weights.
        data: the text.
        optim: the optimizer.
        parallel: the ranks.
        float8: the FP8 recipe.
        compile: the compiler.
        checkpoint: checkpoints.
        profile: steps to profile.
        run: the run.
        resume: the folder of a run to resume from its last good checkpoint, with its options except those
            that are given; or `auto`: the run of --run.name if there is one, else a new one.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    sparse24: Sparse24Options = field(default_factory=Sparse24Options)
    data: DataOptions = field(default_factory=DataOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    float8: Float8Options = field(default_factory=Float8Options)
    compile: CompileOptions = field(default_factory=CompileOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    profile: ProfileOptions = field(default_factory=ProfileOptions)
    run: RunOptions = field(default_factory=RunOptions)
    resume: str | None = None

    def __post_init__(self) -> None:
        first, last = self.profile.first_step, self.optim.steps
        _require(
            self.profile.steps == 0 or first <= last,
            f"--profile.first-step {first} comes after the last step, --optim.steps {last}",
            "profile an earlier step, or train for longer",
        )


def parse_options(arguments: Sequence[str] | None, *, speaks: bool, program: str = PROGRAM) -> JobOptions:
    """Options from the command line (`sys.argv` if `arguments` is None).

    With `--resume FOLDER`, the defaults are the options of that run.

    Args:
        arguments: the words after the program's name.
        speaks: whether to print help and errors; with many ranks only one should.
        program: its name in help and errors.

    Raises:
        SystemExit: 0 after `--help`, 2 when an option is unknown or does not parse.
        BadSettings: options contradict each other, or the folder of `--resume` holds no run.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    resume = _resumed_folder(words)
    default = JobOptions() if resume is None else read_options(resume / CONFIG_FILE)
    return tyro.cli(
        JobOptions, prog=program, description=DESCRIPTION, args=words, default=default, console_outputs=speaks
    )


def _resumed_folder(words: Sequence[str]) -> Path | None:
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--resume", nargs="?")  # without a value, tyro is to say so
    folder: str | None = finder.parse_known_args(words)[0].resume
    return None if folder is None or folder == AUTO else Path(folder)


def read_options(config: Path) -> JobOptions:
    """The options in the configuration file of a run.

    Raises:
        BadSettings: there is no such file, its checksum does not fit, or this version has other options.
    """
    try:
        text = config.read_text()
        whole: Any = json.loads(text)
        document: Any = whole["options"]
        if with_checksum(whole) != text:
            raise ValueError("it is not as it was written")
    except OSError as error:
        fix = "name the folder of a run, as --run.folder and --run.name made it"
        raise BadSettings(f"--resume: {config} cannot be read: {error.strerror}", fix=fix) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fix = (
            "restore the file, or begin a new run with all the options of this one; to change an option, "
            "give it beside --resume; a run of a version without checksums is resumed with that version"
        )
        raise BadSettings(f"--resume: {config} is damaged: it is not as it was written", fix=fix) from error
    try:
        return JobOptions(
            **{
                section.name: _section(section.default_factory, document.get(section.name, {}))
                for section in dataclasses.fields(JobOptions)
                if section.default_factory is not dataclasses.MISSING
            }
        )
    except TypeError as error:
        what = f"--resume: the options in {config} are not those of this version: {error}"
        raise BadSettings(what, fix="resume it with the version that began it") from error


def _section(kind: Any, values: dict[str, Any]) -> Any:
    """One group of options, with paths and tuples, which JSON does not have."""
    hints = get_type_hints(kind)
    return kind(**{name: _typed(value, str(hints.get(name))) for name, value in values.items()})


def _typed(value: Any, hint: str) -> Any:
    if isinstance(value, str) and "Path" in hint:
        return Path(value)
    return tuple(value) if isinstance(value, list) else value
