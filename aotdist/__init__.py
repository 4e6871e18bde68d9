"""Compiles the training step that you already wrote, ahead of time, into one explicit program.

`aotdist.compile` takes a module or a function, FSDP2, DTensor and in-place updates included, and captures
forward and backward as flat functional graphs, collectives among them; every mutation and alias is handed
back exactly as eager would.
"""

from aotdist.api import compile, disable, explain, load, mark_dynamic, reset
from aotdist.dynamo.tape import compile_backward
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
from aotdist.export.export_module import aot_export_module
from aotdist.export.joint_simple import aot_export_joint_simple
from aotdist.export.signature import BackwardSignature, GraphSignature
from aotdist.freezing.frozen import Frozen, freeze
from aotdist.functorch.entry import aot_function, aot_module, aot_module_simplified
from aotdist.launch.prepare import prepare
from aotdist.report.profile import Profile, profile
from aotdist.settings import Settings
from aotdist.step.train_step import TrainStep, train_step
from aotdist.store.build import Built, build
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
