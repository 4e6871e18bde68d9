"""The settings of a compilation: frozen, validated when made, and passed down explicitly.

`Settings.from_environment` is the only reader of `AOTDIST_*` variables, but for `AOTDIST_TRACEBACK`.
Variables that the C++ compiler reads (`CXX`) are part of the cache's key.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import os
import tempfile
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal, cast

import torch

from aotdist.errors import BadSettings

PartitionPolicy = Literal["auto", "default", "min_cut"]
Dynamic = bool | Literal["auto"]
Unsupported = Literal["raise", "eager"]


def default_cache_folder() -> str:
    """The user's folder of caches; a temporary folder for a user without a home."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return str(Path(tempfile.gettempdir()) / f"aotdist-{os.getuid()}")
    return str(caches / "aotdist")


_TRACEBACK = "AOTDIST_TRACEBACK"


@dataclass(frozen=True, slots=True, kw_only=True)
class _RuntimeSettings:
    """The settings that change nothing in a compiled graph; `Settings` documents them."""

    max_artifacts: int = 64
    rank_timeout_s: float = 300.0
    check_ranks: str = "every"
    cache_folder: str = field(default_factory=default_cache_folder)
    cache_bytes: int = 2 * 2**30
    report_side_effects: bool = False
    unsupported: Unsupported = "raise"
    instantiate: bool = True
    keep_freed_memory: bool = True


@dataclass(frozen=True, slots=True)
class Settings(_RuntimeSettings):
    """How to compile.

    Args:
        partition: what to save for the backward: `default` saves what eager saves, `min_cut` saves
            the fewest bytes and recomputes cheap operations; `auto` is `default` for `fx` (nothing
            fuses a recomputation there) and `min_cut` for a compiler that fuses.
        bucket_bytes: largest collective that merging may build, in bytes. A unit of FSDP is never
            split below its own size unless it exceeds this.
        loss_chunk_bytes: largest size of the logits in `cross_entropy(linear(x, w), labels)`, in bytes.
            Larger ones are never made as a whole: the loss and its gradients are computed in the forward,
            in chunks of rows, and summed in another order than in eager, so close to it but not bit for
            bit. Logits that anything else reads are made whole. None leaves all losses as they are written.
        disabled_passes: names of graph passes to leave out (see `aotdist.passes.run`).
        max_artifacts: compiled programs that one callable keeps, one for each signature. Beyond that, the
            least recently used is dropped: its results can still be differentiated, and calls that it fits
            compile again. 64 hold every length of an epoch that pads to multiples of 8 up to 512. A warning
            says what keeps changing, at the ninth and when the first is dropped.
        rank_timeout_s: seconds that a rank waits for its peers to agree before it raises.
        check_ranks: before which runs of programs that communicate ranks compare what they are about to run:
            `every`; `steps:N`, before those of each Nth step; or `first`, before a program's first run alone.
            A difference is a `RankDivergence` on all ranks instead of an abort or mixed batches. A comparison
            takes 0.3 ms on two ranks; with many ranks, it loads the process that hosts the store.
        verify: check the graph's invariants after every pass.
        dynamic: which sizes of the arguments may differ from call to call without recompilation: with False,
            those of `aotdist.mark_dynamic` alone; with True, all; with `auto`, those that have changed, from
            the second program on, if the program supports it; numbers of rows of jagged tensors from the
            first. Sizes of 0 and 1 are always compiled for separately. With `auto`, numbers among the
            arguments that have changed are read at each call, too.
        validate_guards: prove with Z3 (extra `validate`) that the guards of a call imply every decision by
            symbolic sizes that was made while it was compiled.
        backward_autocast: the autocast that the backward is traced under: `off`, as in eager if `backward()`
            is called outside of autocast; `same_as_forward`; or `cpu:bfloat16`, `cuda:float16,cpu:bfloat16`.
            The autocast around the actual call of `backward()` makes no difference.
        functional_rng: make random operators functions of a seed and an offset, which both graphs take last.
            A random number may then be drawn again instead of being saved for the backward. The numbers are
            Philox's, not eager's; their seed is drawn from the user's generator once a call. On CPUs and CUDA
            GPUs.
        emulate_casts: round to bfloat16 and float16 wherever the program does. The `triton` backend keeps
            values in float32 between operators that share a kernel; with this it is closer to eager.
        tune_kernels: when a kernel of the `triton` backend first runs on a GPU, measure the two to four block
            shapes that should be fastest, and keep the choice in `cache_folder`. A reduction may then sum in
            another order; reductions are not measured in programs of several ranks, which have to agree, or
            under `torch.use_deterministic_algorithms`.
        cache_folder: folder of the caches, by default `aotdist` in the user's folder of caches
            (`XDG_CACHE_HOME`, or `~/.cache`).
        cache_bytes: limit of the compile cache; 0 for none (see `docs/cache.md`).
        cuda_graphs: record each compiled graph as a CUDA graph at its second call, one for each signature of
            sizes, and replay it from then on, without the CPU's cost of launches. Programs that cannot be
            recorded are refused (collectives, tensors on the CPU, operators that wait for data).
        is_compiling: the value of `torch.compiler.is_compiling()` in the program while it is captured.
            Libraries read it before they branch on data (transformers: whether a padding mask pads), and
            avoid the branch if it is true. That is not what they do in eager, and may round differently.
        report_side_effects: warn about objects that the program changes only while it is captured.
        unsupported: what happens to a call that cannot be compiled. With `raise` it is refused. With `eager`
            it and later calls of its kind run eagerly, on all ranks if one rank's is refused; a warning says
            why, once, and so does `explain()`. Refusals after the compilation (in a backward, for example),
            and errors of the program itself, are errors with either.
        instantiate: trace two calls of each kind of module, and copy what they recorded for the others
            (`aotdist.trace.blocks`). Without it every call is traced; the graph is the same.
        keep_freed_memory: when the first program is loaded, let glibc keep up to 2 GiB of freed memory for
            the rest of the process (`mallopt`; other allocators are left alone). Otherwise a small step
            spends up to a sixth of its time on getting back memory that it freed before (20,000 pages of 93
            ms).
    """

    partition: PartitionPolicy = "auto"
    bucket_bytes: int = 64 * 2**20
    loss_chunk_bytes: int | None = None
    disabled_passes: frozenset[str] = field(default_factory=frozenset)
    verify: bool = True
    dynamic: Dynamic = "auto"
    validate_guards: bool = False
    backward_autocast: str = "off"
    functional_rng: bool = False
    emulate_casts: bool = False
    tune_kernels: bool = True
    cuda_graphs: bool = False
    is_compiling: bool = False

    def __post_init__(self) -> None:
        for name, hint in _hints().items():
            object.__setattr__(self, name, _taken(name, hint, getattr(self, name)))
        self.explicit_autocast()
        self.check_every()
        for name in ("bucket_bytes", "loss_chunk_bytes", "max_artifacts", "rank_timeout_s"):
            number = getattr(self, name)
            if number is not None and not number > 0:  # so is nan
                raise _bad(name, number, "give a positive number")
        if self.cache_bytes < 0:
            raise _bad("cache_bytes", self.cache_bytes, "give 0, or a positive number")
        if not self.cache_folder:
            raise _bad("cache_folder", self.cache_folder, "name a folder; `cache_bytes=0` keeps nothing")

    def explicit_autocast(self) -> tuple[tuple[str, torch.dtype], ...]:
        """The devices and dtypes that `backward_autocast` names, if it names any.

        Raises:
            BadSettings: its value is not allowed.
        """
        if self.backward_autocast in ("off", "same_as_forward"):
            return ()
        pairs = [part.strip().partition(":") for part in self.backward_autocast.split(",")]
        named = [(device, getattr(torch, dtype, None)) for device, _, dtype in pairs]
        types = [(d, dtype) for d, dtype in named if _has_autocast(d) and isinstance(dtype, torch.dtype)]
        found = tuple((device, dtype) for device, dtype in types if dtype.is_floating_point)
        if len(found) != len(pairs):
            fix = "choose off, same_as_forward, or pairs of device and dtype: cpu:bfloat16"
            raise _bad("backward_autocast", self.backward_autocast, fix)
        return found

    def check_every(self) -> int | None:
        """N, if every Nth step is checked (see `check_ranks`); None for first runs alone.

        Raises:
            BadSettings: its value is not allowed.
        """
        match self.check_ranks.partition(":"):
            case ("first", "", ""):
                return None
            case ("every", "", ""):
                return 1
            case ("steps", ":", number) if number.isdecimal() and int(number) > 0:
                return int(number)
            case _:
                raise _bad("check_ranks", self.check_ranks, "choose every, first, or steps:N (steps:100)")

    @classmethod
    def make(cls, **options: Any) -> Settings:
        """`Settings(**options)`, with an error that suggests similar names.

        Raises:
            BadSettings: an option is unknown or its value is out of range.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise BadSettings(
                    f"`{name}` is not a setting",
                    fix=f"did you mean `{near[0]}`?" if near else f"settings are {', '.join(known)}",
                )
        return cls(**options)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """The defaults, overridden by `AOTDIST_<NAME>` variables (`AOTDIST_PARTITION=min_cut`).

        Raises:
            BadSettings: a variable names no setting or its value does not parse.
        """
        options: dict[str, Any] = {}
        hints = _hints()
        for variable, text in environ.items():
            if not variable.startswith("AOTDIST_"):
                continue
            if variable == _TRACEBACK and text in ("full", "short"):  # of the process, not of a compilation
                continue
            name = variable.removeprefix("AOTDIST_").lower()
            if name not in hints:
                near = difflib.get_close_matches(name, hints, n=1)
                raise BadSettings(
                    f"the environment has {variable}, and `{name}` is not a setting",
                    fix=f"did you mean AOTDIST_{near[0].upper()}?" if near else f"unset {variable}",
                )
            try:
                options[name] = _parsed(text, hints[name])
            except ValueError as error:
                raise BadSettings(f"{variable}={text!r}: {error}", fix="see `aotdist.Settings`") from error
        try:
            return cls.make(**options)
        except BadSettings as error:
            said = ", ".join(f"AOTDIST_{name.upper()}" for name in options)
            raise BadSettings(f"{error.what} (the environment has {said})", fix=error.fix) from None

    def fingerprint(self) -> str:
        """A hash of every setting that a compiled graph may depend on: part of each cache key."""
        fields = dataclasses.asdict(self)
        for of_none in dataclasses.fields(_RuntimeSettings):
            del fields[of_none.name]
        fields["disabled_passes"] = sorted(self.disabled_passes)
        return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16]


def shows_all_frames() -> bool:
    """Whether tracebacks show the frames of PyTorch and aotdist as well: `AOTDIST_TRACEBACK=full`."""
    return os.environ.get(_TRACEBACK) == "full"


def settings_of(settings: Settings | Mapping[str, Any] | None) -> Settings:
    """A `Settings` from what a user passed.

    Raises:
        BadSettings: a setting is unknown, or out of range, or `settings` is something else.
    """
    if settings is None:
        return Settings.from_environment()
    if isinstance(settings, Settings):
        return settings
    return Settings.make(**by_name("settings", settings))


def by_name(what: str, options: Any) -> dict[str, Any]:
    """`options` as a dictionary with names as keys.

    Args:
        what: the name of the argument, for the error.
        options: what the user passed.

    Raises:
        BadSettings: it is no mapping from names.
    """
    if isinstance(options, Mapping):
        found = dict(cast("Mapping[Any, Any]", options))
        if all(isinstance(name, str) for name in found):
            return found
    raise BadSettings(
        f"{what} are {options!r}",
        fix="pass an `aotdist.Settings`, a mapping from names of its fields to their values, or None",
    )


_WANTED: Mapping[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    frozenset[str]: "a set of strings",
    NoneType: "None",
    Literal["auto"]: "'auto'",
}
"""Descriptions of the types of settings, by annotation."""


@functools.cache
def _hints() -> dict[str, Any]:
    """The annotation of each setting."""
    return typing.get_type_hints(Settings)


def _taken(name: str, hint: Any, value: Any) -> Any:
    """`value`, converted to the type of the setting: paths to strings, lists of names to sets.

    Raises:
        BadSettings: the setting's annotation does not allow it.
    """
    if typing.get_origin(hint) is Literal:
        if isinstance(value, str) and value in typing.get_args(hint):
            return value
        raise _bad(name, value, f"choose one of {', '.join(typing.get_args(hint))}")
    kinds = (hint,) if hint in _WANTED else typing.get_args(hint)
    match value:
        case os.PathLike() if str in kinds:
            return os.fspath(value)
        case set() | frozenset() | list() | tuple() if frozenset[str] in kinds:
            if all(isinstance(one, str) for one in value):
                return frozenset(value)
        case int() | float() if float in kinds and not isinstance(value, bool):
            return float(value)
        case _ if type(value) in kinds:  # a bool is no number here
            return value
        case str() if any(value in typing.get_args(kind) for kind in kinds):
            return value
        case _:
            pass
    raise _bad(name, value, f"give {' or '.join(_WANTED[kind] for kind in kinds)}")


def _bad(name: str, value: Any, fix: str) -> BadSettings:
    return BadSettings(f"settings.{name} is {value!r}", fix=fix)


def _has_autocast(device: str) -> bool:
    try:
        return torch.amp.is_autocast_available(device)
    except RuntimeError:  # there is no such device
        return False


def _parsed(text: str, hint: Any) -> Any:
    """The value of a setting with this annotation that the text of an environment variable stands for.

    Raises:
        ValueError: it stands for none; what `_taken` refuses is returned as it is.
    """
    kinds = (hint, *typing.get_args(hint))
    if bool in kinds:
        if (lowered := text.lower()) in ("0", "1", "true", "false"):
            return lowered in ("1", "true")
        if hint is bool:
            raise ValueError("expected 0, 1, true or false")
        return lowered
    if hint == frozenset[str]:
        return frozenset(part.strip() for part in text.split(",") if part.strip())
    number = next((kind for kind in (int, float) if kind in kinds), None)
    return text if number is None else number(text)
