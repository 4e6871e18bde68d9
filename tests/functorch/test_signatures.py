"""The entry points have the parameters and the defaults of `functorch.compile`'s."""

from __future__ import annotations

import inspect
from types import ModuleType

import functorch.compile as theirs
import pytest
import torch

import aotdist
import aotdist.functorch as ours
from aotdist import export

LEFT_OUT = {"_disable_torch_fn_metadata_mode", "boxed_forward_device_index", "cudagraphs"}
"""Private, and about a mode of PyTorch's own tracing; two that only torch 2.11 had, about CUDA graphs."""

NAMES = [
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "default_partition",
    "make_boxed_compiler",
    "make_boxed_func",
    "min_cut_rematerialization_partition",
    "nop",
    "print_compile",
]


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_defaults(name: str):
    mine = dict(inspect.signature(getattr(ours, name)).parameters)
    other = dict(inspect.signature(getattr(theirs, name)).parameters)
    expected = {key: value for key, value in other.items() if key not in LEFT_OUT}
    shared = [key for key in mine if key in expected]
    assert set(expected) <= set(mine)
    assert shared == list(expected), "in the same order"
    for key in shared:
        assert mine[key].kind == expected[key].kind, key
        assert _comparable(mine[key].default) == _comparable(expected[key].default), key
    assert all(mine[key].default is not inspect.Parameter.empty for key in set(mine) - set(expected))


def _comparable(default):
    """Functions by name: a default partition of ours stands for one of theirs."""
    return getattr(default, "__name__", default) if callable(default) else default


def test_everything_public_has_its_counterpart():
    assert sorted(NAMES) == sorted(ours.__all__)
    assert all(hasattr(theirs, name) for name in ours.__all__)


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("aot_function", ours),
        ("aot_module", ours),
        ("aot_module_simplified", ours),
        ("aot_export_module", export),
        ("aot_export_joint_simple", export),
        ("GraphSignature", export),
        ("BackwardSignature", export),
    ],
)
def test_the_entry_points_are_public_names(name: str, home: ModuleType):
    assert name in aotdist.__all__
    assert getattr(aotdist, name) is getattr(home, name)


def test_errors_are_found_by_who_expects_those_of_pytorch():
    with pytest.raises(RuntimeError, match="cannot be honoured"):
        aotdist.aot_function(torch.sin, ours.nop, disable_functionalization=True)
    compiled = aotdist.aot_function(lambda x: x * 2 if x.sum() > 0 else x, ours.nop)
    with pytest.raises(RuntimeError, match="read off a tensor"):
        compiled(torch.ones(2))
