"""Compiles the training step that you already wrote, ahead of time, into one explicit program.

`aotdist.compile` takes a module or a function, FSDP2, DTensor and in-place updates included, and captures
forward and backward as flat functional graphs, collectives among them; every mutation and alias is handed
back exactly as eager would.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aotdist.api import compile, disable, explain, load, mark_dynamic, reset
    from aotdist.artifacts.build import Built, build
    from aotdist.dynamo.backend import compile_backward
    from aotdist.errors import (
        AotdistError,
        BadArtifact,
        BadSettings,
        CacheCorrupt,
        IndexOutOfBounds,
        InternalError,
        RankDivergence,
        RankLost,
        SignatureMismatch,
        UnsupportedProgram,
    )
    from aotdist.export.export_module import BackwardSignature, GraphSignature, aot_export_module
    from aotdist.export.joint_simple import aot_export_joint_simple
    from aotdist.freezing.frozen import Frozen, freeze
    from aotdist.functorch.entry import aot_function, aot_module, aot_module_simplified
    from aotdist.launch.prepare import prepare
    from aotdist.report.profile import Profile, profile
    from aotdist.settings import Settings
    from aotdist.step.train_step import TrainStep, train_step
    from aotdist.subclasses.float8 import to_float8
    from aotdist.subclasses.sparse24_linear import Sparsified, sparsify_24

__version__ = "0.1.0"

__all__ = [
    "AotdistError",
    "BackwardSignature",
    "BadArtifact",
    "BadSettings",
    "Built",
    "CacheCorrupt",
    "Frozen",
    "GraphSignature",
    "IndexOutOfBounds",
    "InternalError",
    "Profile",
    "RankDivergence",
    "RankLost",
    "Settings",
    "SignatureMismatch",
    "Sparsified",
    "TrainStep",
    "UnsupportedProgram",
    "__version__",
    "aot_export_joint_simple",
    "aot_export_module",
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "build",
    "compile",
    "compile_backward",
    "disable",
    "explain",
    "freeze",
    "load",
    "mark_dynamic",
    "prepare",
    "profile",
    "reset",
    "sparsify_24",
    "to_float8",
    "train_step",
]

_NAMES = {
    "aotdist.api": ("compile", "disable", "explain", "load", "mark_dynamic", "reset"),
    "aotdist.dynamo.backend": ("compile_backward",),
    "aotdist.errors": (
        "AotdistError",
        "BadArtifact",
        "BadSettings",
        "CacheCorrupt",
        "IndexOutOfBounds",
        "InternalError",
        "RankDivergence",
        "RankLost",
        "SignatureMismatch",
        "UnsupportedProgram",
    ),
    "aotdist.export.export_module": ("BackwardSignature", "GraphSignature", "aot_export_module"),
    "aotdist.export.joint_simple": ("aot_export_joint_simple",),
    "aotdist.freezing.frozen": ("Frozen", "freeze"),
    "aotdist.functorch.entry": ("aot_function", "aot_module", "aot_module_simplified"),
    "aotdist.launch.prepare": ("prepare",),
    "aotdist.report.profile": ("Profile", "profile"),
    "aotdist.settings": ("Settings",),
    "aotdist.step.train_step": ("TrainStep", "train_step"),
    "aotdist.artifacts.build": ("Built", "build"),
    "aotdist.subclasses.float8": ("to_float8",),
    "aotdist.subclasses.sparse24_linear": ("Sparsified", "sparsify_24"),
}
"""The public names of each module. A module is imported when one of its names is first used: importing all of
them takes as long as importing torch, and many programs need one."""

_HOMES = {name: home for home, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    missing = AttributeError(f"module `aotdist` has no attribute `{name}`")
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name.startswith("_"):
        raise missing
    else:  # a module of the package's: `aotdist.dynamo.regions()`
        try:
            value = importlib.import_module(f"aotdist.{name}")
        except ModuleNotFoundError as error:
            raise (missing if error.name == f"aotdist.{name}" else error) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
