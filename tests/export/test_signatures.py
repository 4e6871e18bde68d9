"""The entry points have the parameters and the defaults of PyTorch's."""

from __future__ import annotations

import inspect

import pytest
from torch._functorch import aot_autograd as theirs

import aotdist.export as ours


@pytest.mark.parametrize("name", ["aot_export_joint_simple", "aot_export_module"])
def test_parameters_and_defaults(name: str):
    mine = inspect.signature(getattr(ours, name)).parameters
    other = inspect.signature(getattr(theirs, name)).parameters
    assert [(p.name, p.kind, p.default) for p in mine.values()] == [
        (p.name, p.kind, p.default) for p in other.values()
    ]


def test_what_is_public():
    assert sorted(ours.__all__) == [
        "BackwardSignature",
        "Exported",
        "GraphSignature",
        "aot_export_joint_simple",
        "aot_export_module",
        "load",
        "save",
    ]
