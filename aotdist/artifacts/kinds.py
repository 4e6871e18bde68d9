"""The classes and functions that an artifact may contain; nothing else is written or read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from aotdist import facts
from aotdist.aliasing import metadata as changes
from aotdist.artifacts.live import GroupName, MeshName, Place
from aotdist.capture.captured import Returned
from aotdist.capture.checks import Check
from aotdist.capture.effects import Add, Assign, Delete, EffectLog, Print, TensorResult, Tree
from aotdist.capture.results import Shown
from aotdist.codegen.ahead import PackedLaunch
from aotdist.codegen.contract import Fusion, KernelSummary
from aotdist.codegen.triton import Result
from aotdist.convention import bases as synthetic_base
from aotdist.program import Slot
from aotdist.runtime.derive import BackwardRequest
from aotdist.settings import Settings
from aotdist.subclasses import protocol


@dataclass(frozen=True, slots=True)
class NodeAt:
    """A node of a graph, by its position."""

    position: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The metadata of a tensor that a node computes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_OURS: tuple[type[Any], ...] = (
    *(NodeAt, Shape, Slot, Settings, Returned, Shown, Check, MeshName, GroupName, Place),
    *(EffectLog, Assign, Add, Delete, Print, Tree, TensorResult),
    *(BackwardRequest, PackedLaunch, Result, Fusion, KernelSummary),
    *(protocol.Plain, protocol.Constant, protocol.Wrapper),
    *(synthetic_base.Member, synthetic_base.Span, synthetic_base.ViewBase, synthetic_base.BasePlan),
    *(facts.Facts, facts.BackwardFacts, facts.Choice),
    *(facts.NodeOut, facts.Untouched, facts.DataWritten),
    *(facts.NotATensor, facts.Fresh, facts.IsInput, facts.Kept, facts.Keep, facts.MetadataWrite),
    *(facts.ViewOfInput, facts.ViewOfIntermediate, facts.ViewOfOutput, facts.ViewStep, facts.FunctionView),
    *(facts.Inside, facts.ObservedGrad),
)

CLASSES: Mapping[str, type[Any]] = {str(cls.__name__): cls for cls in _OURS}
"""Dataclasses of ours by name, which are written field by field."""

NOT_WRITTEN = ("cache_folder", "cache_bytes")
"""Fields of `Settings` that belong to the machine, and are taken from the process that loads a file."""

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "data_of": facts.data_of,
    "assign_data": changes.assign_data,
    "release_history": changes.release_history,
    "detach_": torch.Tensor.detach_,
    "retain_grad": torch.Tensor.retain_grad,
    "requires_grad_": torch.Tensor.requires_grad_,
    **{name: getattr(operator, name) for name in ("add", "mul", "floordiv", "truediv", "mod", "pow", "neg")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_")},
    **{name: getattr(torch, name) for name in ("sym_max", "sym_min", "sym_float", "sym_int", "sym_not")},
}
"""Functions that graphs, views and metadata writes call besides operators; the last rows are for sizes."""

HIGHER_ORDER = frozenset({"cond"})
"""Higher-order operators that graphs may call."""

NAMES_OF_FUNCTIONS: Mapping[int, str] = {id(function): name for name, function in FUNCTIONS.items()}
"""The names of `FUNCTIONS`, by identity."""
