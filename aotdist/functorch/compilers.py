"""Compilers that change nothing, and the boxed form of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from torch.fx import GraphModule


def make_boxed_func(f: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """`f(*args)` as a call that takes its arguments as one list."""

    @functools.wraps(f, updated=())
    def boxed(args: list[Any]) -> Any:
        return f(*args)

    cast(Any, boxed)._boxed_call = True
    return boxed


def make_boxed_compiler(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler whose result is boxed, from one whose result is not."""

    @functools.wraps(compiler)
    def boxing(fx_g: GraphModule, inps: Any) -> Any:
        return make_boxed_func(compiler(fx_g, inps))

    return boxing


@make_boxed_compiler
def nop(fx_g: GraphModule, _: Any) -> GraphModule:
    """The compiler that leaves a graph as it is."""
    return fx_g


@make_boxed_compiler
def print_compile(fx_g: GraphModule, _: Any) -> GraphModule:
    """The compiler that prints a graph's code and leaves it as it is."""
    print(fx_g.code)
    return fx_g
