"""Writes a generated program down as a script that runs by itself and says what differs."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

from tests.semantics.functions import FUNCTIONS
from tests.semantics.observation import Around
from tests.semantics.programs import Program, leaves_behind

_HEAD = """\
from typing import Any

import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import aotdist
"""

_CHECK = """\
def facts(tensor):
    if isinstance(tensor, TwoTensor):
        return [type(tensor), tensor.requires_grad, tensor.is_leaf, facts(tensor.a), facts(tensor.b)]
    numbers = tensor.detach().resolve_conj().resolve_neg()
    state = [tensor.requires_grad, tensor.is_leaf, tensor._is_view(), tensor.is_inference()]
    return [str(numbers.tolist()), tensor.dtype, tensor.size(), tensor.stride(), *state]


def tangent(tensor, *, other_kind):
    if isinstance(tensor, TwoTensor) is other_kind:
        return torch.ones(tensor.shape, dtype=tensor.dtype)
    if other_kind:
        return TwoTensor(*[torch.ones_like(tensor, requires_grad=False) for _ in "ab"])
    return torch.ones_like(tensor, requires_grad=False)


def play(call):
    seen = {}
    torch.manual_seed(2)
    for number, inputs in enumerate((INPUTS,)):
        args = inputs()
        leaves = [leaf for x in args for leaf in ([x] if x.is_leaf and x.requires_grad else leaves_behind(x))]
        with AROUND:
            outs = call(*args)
        named = {f"x{k}": x for k, x in enumerate(args)} | {f"out[{k}]": out for k, out in enumerate(outs)}
        seen |= {f"call {number}: {name}": facts(tensor) for name, tensor in named.items()}
        for name, tensor in named.items():
            seen[f"call {number}: {name} is"] = next(other for other in named if named[other] is tensor)
            if name.startswith("x") and not tensor.is_inference():
                seen[f"call {number}: {name} version"] = tensor._version
        ends = list({id(t): t for t in [*outs, *args] if t.requires_grad and not t.is_leaf}.values())
        for position, end in enumerate(ends):
            if position not in LEFT_OUT:
                with_ = tangent(end, other_kind=position in OTHER_KINDS)
                torch.autograd.backward(end, with_, retain_graph=True)
        for k, leaf in enumerate(leaves):
            seen[f"call {number}: gradient {k}"] = None if leaf.grad is None else facts(leaf.grad)
    return seen


eager, compiled = play(program), play(aotdist.compile(program, OPTIONS))
different = [name for name in eager if eager[name] != compiled[name]]
for name in different:
    print(f"{name}:\\n    eager    {eager[name]}\\n    compiled {compiled[name]}")
print(f"{len(different)} of {len(eager)} facts differ")
"""


def script_of(
    program: Program,
    around: Around | None = None,
    found: str = "",
    settings: Mapping[str, Any] | None = None,
    backend: str = "fx",
) -> str:
    """A script that runs `program` eagerly and compiled, and prints in what they differ.

    Args:
        program: the program.
        around: a context for each call.
        found: what was seen to differ; it becomes a comment.
        settings: of the compilation.
        backend: what compiles it; one that rounds otherwise shows that, too.
    """
    layouts = list(program.layouts())
    parts = [_HEAD, *_functions(program), *(_inputs(program, k) for k in range(len(layouts)))]
    parts += [
        program.source(),
        inspect.getsource(leaves_behind),
        _check(program, around, settings or {}, backend),
    ]
    if found:
        parts.append("# Seen:\n" + textwrap.indent(found, "# ") + "\n")
    return "\n\n".join(parts)


def _functions(program: Program) -> list[str]:
    """The source of the autograd functions that the program calls."""
    return [
        inspect.getsource(function) for function in FUNCTIONS if f"{function.__name__}." in program.source()
    ]


def _inputs(program: Program, number: int) -> str:
    lines = map("    {} = {}\n".format, program.names, program.layouts()[number])
    return f"def inputs{number}():\n{''.join(lines)}    return {', '.join(program.names)},\n"


def _check(program: Program, around: Around | None, settings: Mapping[str, Any], backend: str) -> str:
    name = getattr(around, "__name__", "nullcontext")
    context = f"torch.{name}()" if hasattr(__import__("torch"), name) else "torch.enable_grad()"
    options = [f"{backend=}", *([f"settings={dict(settings)!r}"] if settings else [])]
    inputs = ", ".join(f"inputs{number}" for number in range(len(program.layouts())))
    text = _CHECK.replace("INPUTS", inputs).replace("AROUND", context).replace("OPTIONS", ", ".join(options))
    text = text.replace("OTHER_KINDS", f"{set(program.other_kinds)!r}")
    return text.replace("LEFT_OUT", f"{set(program.left_out)!r}")
