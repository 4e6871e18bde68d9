"""Printed programs take arguments of any names, and functions of any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import aotdist

NAMES = [
    *("Node", "call", "region", "forward", "backward", "self", "args", "kwargs", "ctx", "results", "rng"),
    *("given", "symbols", "tensors", "values", "o0", "t0", "FORWARD", "MISS", "with_silenced_hooks"),
    *("float", "int", "len", "list", "max", "type", "KeyError"),
]


def compiled(source: str, name: str, **names: object) -> Any:
    """The function of that name that a text defines, compiled."""
    exec(source, names)
    return aotdist.compile(cast("Callable[..., Any]", names[name]), backend="fx")


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_of_any_name(name: str) -> None:
    ours = compiled(f"def f({name}, x):\n    return {name}, {name}.sin() * x, x.t()\n", "f")
    for requires_grad in (False, True):
        argument, x = (torch.randn(3, 3, requires_grad=requires_grad) for _ in range(2))
        same, product, view = ours(**{name: argument, "x": x})
        assert same is argument and torch.equal(product, argument.sin() * x) and torch.equal(view, x.t())
        if requires_grad:
            (grad,) = torch.autograd.grad(product.sum(), argument)
            assert torch.equal(grad, argument.cos() * x)


@pytest.mark.parametrize("name", NAMES)
def test_a_function_of_any_name(name: str) -> None:
    """What it reaches is read by its name."""
    layer = nn.Linear(3, 3)
    ours = compiled(f"def {name}(x, layer=layer):\n    return layer(x)\n", name, layer=layer)
    x = torch.randn(2, 3)
    ours(x).sum().backward()
    assert torch.equal(ours(x), layer(x)) and layer.weight.grad is not None
