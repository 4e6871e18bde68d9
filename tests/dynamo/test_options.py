"""`options` and `mode` of torch.compile, and errors as they arrive through Dynamo."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import aotdist
from aotdist.dynamo import backend
from tests.dynamo.comparison import FX, compiled
from tests.house.tree import ROOT


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"options": {"backend": "fxx"}}, "did you mean `fx`|did you mean 'fx'"),
        (
            {"options": {"bucket_byte": 3}},
            "`bucket_byte` is not a setting\n  fix: did you mean `bucket_bytes`",
        ),
        ({"options": {"nothing_like_it": 3}}, "settings are partition, "),
        ({"options": {"bucket_bytes": -1}}, "settings.bucket_bytes is -1"),
        ({"options": {"dynamic": True}}, r"torch.compile\(..., dynamic=True\)"),
        ({"options": aotdist.Settings(dynamic=True)}, r"torch.compile\(..., dynamic=True\)"),
        ({"options": ["a"]}, r"options are \['a'\]"),
        ({"options": {1: 2}}, r"options are \{1: 2\}"),
        ({"mode": "max-autotune"}, "mode='max-autotune' is Inductor's"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_refused(how: dict[str, Any], says: str):
    with pytest.raises(BackendCompilerFailed, match=says) as found:
        torch.compile(lambda x: x * 2, backend=backend, **how)(torch.ones(2))
    assert isinstance(found.value.inner_exception, aotdist.BadSettings)


def in_place(module: torch.nn.Module) -> torch.nn.Module:
    module.compile(backend=backend)
    return module


@pytest.mark.parametrize("make", [functools.partial(torch.compile, backend=backend), in_place])
def test_what_dynamo_compiled_is_explained_region_by_region(make):
    with pytest.raises(aotdist.BadSettings, match=r"ask each of `aotdist.dynamo.regions\(\)`"):
        aotdist.explain(make(torch.nn.Linear(2, 2)))
    with pytest.raises(aotdist.BadSettings, match=r"ask each of `aotdist.dynamo.regions\(\)`"):
        aotdist.explain(torch.compile(lambda x: x, backend=backend))


def test_options_are_settings(made):
    compiled(lambda x: x.sin(), partition="min_cut")(torch.ones(2, requires_grad=True))
    (region,) = made()
    assert region.artifacts[0].compilation.settings.partition == "min_cut"


def test_options_may_be_settings(made):
    options = aotdist.Settings(partition="min_cut")
    torch.compile(lambda x: x.sin(), backend="aotdist", options=options)(torch.ones(2, requires_grad=True))
    assert made()[-1].artifacts[0].compilation.settings == replace(options, dynamic=False)


def test_settings_come_from_the_environment_where_there_are_no_others(made, monkeypatch):
    monkeypatch.setenv("AOTDIST_PARTITION", "min_cut")
    compiled(lambda x: x.sin())(torch.ones(2))
    assert made()[-1].artifacts[0].compilation.settings.partition == "min_cut"


def test_reduced_overhead_is_cuda_graphs():
    with pytest.raises(BackendCompilerFailed, match="a CUDA graph cannot hold this program: `x` is a tensor"):
        reduced = functools.partial(backend, mode="reduce-overhead", options=FX)
        torch.compile(lambda x: x * 2, backend=reduced)(torch.ones(2))


def writes_through_expanded(x):
    y = x.expand(3, 4)
    y.add_(1)
    return y


def test_errors_name_the_users_line_and_the_way_out():
    with pytest.raises(BackendCompilerFailed) as found:
        compiled(writes_through_expanded)(torch.ones(4))
    inner = found.value.inner_exception
    assert isinstance(inner, aotdist.UnsupportedProgram)
    assert inner.where is not None and "test_options.py" in inner.where and "y.add_(1)" in inner.where
    assert "clone" in str(found.value) and "While executing" not in str(found.value)


def test_suppressed_errors_run_eagerly(monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "suppress_errors", True)
    with pytest.raises(RuntimeError, match="more than one element"):  # eager's own
        compiled(writes_through_expanded)(torch.ones(4))


def test_it_is_declared():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert declared == {"torch_dynamo_backends": {"aotdist": "aotdist.dynamo.backend:backend"}}
