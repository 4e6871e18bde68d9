"""Random programs, written out as Python: arithmetic, views, writes, and what they are given.

A program is grown statement by statement while a rehearsal runs on scratch tensors; a statement that
eager PyTorch refuses there is left out. So every program runs in eager, and a failing example prints as
source that can be pasted into a test.
"""

from __future__ import annotations

import itertools
import linecache
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional
from hypothesis import event, reject
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam import storage_id
from tests.semantics.observation import Around, Scene, play

INPUTS = {
    "leaf": "torch.randn(3, 4, requires_grad=True)",
    "plain": "torch.randn(3, 4)",
    "non_leaf": "torch.randn(3, 4, requires_grad=True) * 1.5",
    "non_leaf_view": "(torch.randn(4, 3, requires_grad=True) * 1.5).t()",
    "transposed": "torch.randn(4, 3).t()",
    "transposed_leaf": "torch.empty_strided((3, 4), (1, 3)).normal_().requires_grad_()",
    "expanded": "torch.randn(1, 4).expand(3, 4)",
    "part": "torch.randn(6, 4)[1:4]",
    "strided": "torch.randn(3, 8)[:, ::2]",
    "scalar": "torch.randn((), requires_grad=True)",
    "empty": "torch.randn(0, 4, requires_grad=True)",
    "integers": "torch.arange(12).view(3, 4)",
    "booleans": "torch.randn(3, 4) > 0",
    "double": "torch.randn(3, 4, dtype=torch.float64, requires_grad=True)",
    "half": "torch.randn(3, 4, dtype=torch.bfloat16)",
}

WRAPPERS = (
    "TwoTensor(torch.randn(3, 4), torch.randn(3, 4)).requires_grad_()",
    "TwoTensor(torch.randn(3, 4), torch.randn(3, 4))",
    "TwoTensor(torch.randn(3, 4), torch.randn(3, 4)).requires_grad_() * 1.5",
    "TwoTensor(torch.randn(4, 3).t(), torch.randn(4, 3).t())",
    "TwoTensor(TwoTensor(torch.randn(3, 4), torch.randn(3, 4)), torch.randn(3, 4)).requires_grad_()",
    "torch.randn(3, 4, requires_grad=True)",
    "torch.randn(3, 4)",
)
"""Two tensors in one, plain ones beside them."""

PARTS = (
    "{a}.t()",
    "{a}[1:]",
    "{a}[..., ::2]",
    "{a}[0]",
    "{a}.reshape(-1)",
    "{a}.detach()",
    "{a}.view(-1)[2:9]",
)
"""Arguments that share memory with another argument."""

ARITHMETIC = (
    "{a} * {b}",
    "{a} + {b}",
    "{a} - 1.5",
    "{a}.sin()",
    "{a}.relu()",
    "{a}.sum(0)",
    "{a}.mean()",
    "{a}.clone()",
    "{a}.contiguous()",
    "{a}.softmax(-1)",
    "{a}.cumsum(0)",
    "{a} > 0",
    "{a}.double()",
    "{a}.to(torch.float32)",
    "{a}.transpose(0, 1) @ {b}",
    "torch.cat([{a}, {b}])",
    "torch.where({a} > 0, {a}, {b})",
    "torch.rand_like({a}) * {a}",
    "F.dropout({a}, 0.5)",
    "torch.zeros_like({a})",
    "torch.tensor([1.0, 2.0, 3.0, 4.0]) * {a}",
    "torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 3)",
    "checkpoint(lambda x: F.dropout(x.sin(), 0.5) * x, {a}, use_reentrant=False)",
    "{a}.amax(-1)",
    "F.layer_norm({a}, {a}.shape[-1:])",
    "checkpoint(lambda x: x.sin() * x, {a}, use_reentrant=False)",
)

VIEWS = (
    "{a}.t()",
    "{a}.view(-1)",
    "{a}.view(2, 6)",
    "{a}.reshape(-1)",
    "{a}[0]",
    "{a}[1:]",
    "{a}[..., ::2]",
    "{a}[:, None]",
    "{a}.unsqueeze(0)",
    "{a}.squeeze()",
    "{a}.expand(2, 3, 4)",
    "{a}.split(2)[0]",
    "{a}.unbind(0)[1]",
    "{a}.chunk(2, -1)[1]",
    "{a}.diagonal()",
    "{a}.narrow(0, 1, 1)",
    "{a}.detach()",
    "{a}.view(torch.int32)",
    "{a}.view_as({a})",
    "{a}.T",
)

EMPTY_SPLIT = "{a}.split(2)[0]" if torch.__version__ < "2.12" else None
"""On fake tensors torch 2.11 fails to split what is empty."""

WRITES = (
    "{a}.add_(1)",
    "{a}.mul_({b})",
    "{a}.add_({b}, alpha=2)",
    "{a}.zero_()",
    "{a}.copy_({b})",
    "{a}[0] = 2.5",
    "{a}[1:] = {b}[1:]",
    "{a}.relu_()",
    "{a}.sin_()",
    "{a}.fill_(0.5)",
    "{a}[{b} > 0] = 0.25",
    "{a}.masked_fill_({b} > 0, -1)",
    "{a}.uniform_()",
    "{a} += {b}",
    "{a}.detach().mul_(2)",
    "{a}.t()[0].mul_(3)",
    "{a}.clamp_(min=0)",
    "torch.sin({b}, out={a})",
)

RESHAPES = ("{a}.t_()", "{a}.unsqueeze_(0)", "{a}.squeeze_()", "{a}.detach_()", "{a}.swapaxes_(0, -1)")
"""Writes of metadata."""

MOVES = (
    "{a}.resize_({a}.shape[:-1])",
    "{a}.resize_(5, 4).fill_(0.5)",
    "{a}.as_strided_((2, 2), (2, 1))",
    "{a}.set_({b})",
    "{a}.set_({b}.detach())",
    "{a}.data = {b}",
    "{a}.data = {b}.clone()",
    "torch.sin({b}.detach(), out={a})",
)
"""Writes of metadata after which a tensor lies elsewhere."""

MODES = ("", "", "", "", "with torch.no_grad(): ", "with torch.enable_grad(): ")

_serial = itertools.count()


@dataclass(frozen=True)
class Program:
    """A program as text.

    Args:
        inputs: an expression for each argument, or the name of an argument that is passed again.
        statements: the body.
        returned: names of what is returned.
    """

    inputs: tuple[str, ...]
    statements: tuple[str, ...]
    returned: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"x{k}" for k in range(len(self.inputs)))

    def source(self) -> str:
        body = [*self.statements, f"return [{', '.join(self.returned)}]"]
        return f"def program({', '.join(self.names)}):\n" + "".join(f"    {line}\n" for line in body)

    def load(self) -> Callable[..., Any]:
        return load(self.source(), "program")

    def arguments(self) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        for name, expression in zip(self.names, self.inputs, strict=True):
            made[name] = eval(expression, {**SCOPE, **made})
        return made

    def scenes(self, count: int = 2, fn: Callable[..., Any] | None = None) -> list[Scene]:
        """The same function, `fn` if it is loaded already, called on different numbers."""
        fn = self.load() if fn is None else fn
        return [self._scene(fn) for _ in range(count)]

    def _scene(self, fn: Callable[..., Any]) -> Scene:
        arguments = self.arguments()
        for tensor in arguments.values():
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.retain_grad()
        leaves = {f"behind {name}": leaf for name, t in arguments.items() for leaf in _leaves_behind(t)}
        return Scene(fn, tuple(arguments.values()), held=leaves)

    def runs_in_eager(self, around: Around = nullcontext, *, backward: bool = True) -> bool:
        """Whether calling it, and differentiating what it returns, works in eager."""
        torch.manual_seed(1)
        try:
            for scene in self.scenes():
                play(scene, scene.fn, around=around, backward=backward)
        except RuntimeError as error:
            event(f"eager: {str(error)[:60]}")
            return False
        return True

    def __repr__(self) -> str:
        made = "".join(f"    {name} = {text}\n" for name, text in zip(self.names, self.inputs, strict=True))
        return f"\n{made}{self.source()}"


def _leaves_behind(tensor: torch.Tensor) -> list[torch.Tensor]:
    found, stack = [], [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None:
            found += [node.variable] if hasattr(node, "variable") else []
            stack += [following for following, _ in node.next_functions]
    return found


SCOPE = {
    "torch": torch,
    "F": torch.nn.functional,
    "checkpoint": torch.utils.checkpoint.checkpoint,
    "TwoTensor": TwoTensor,
}


def load(source: str, name: str) -> Callable[..., Any]:
    """Run `source` as if it were a file of the user's, so that error messages can show its lines."""
    filename = f"generated_{next(_serial)}.py"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope = dict(SCOPE)
    exec(compile(source, filename, "exec"), scope)
    return scope[name]


class _Rehearsal:
    """Runs statements on scratch tensors, to leave out those that eager refuses."""

    def __init__(self, arguments: dict[str, torch.Tensor]) -> None:
        self.scope: dict[str, Any] = {**SCOPE, **arguments}
        self.names = list(arguments)
        self.statements: list[str] = []

    def writes_what_it_reads(self, a: str, b: str) -> bool:
        """Whether a write of `a` that reads `b` would meet its own results: eager's are arbitrary then."""
        first, second = self.scope[a], self.scope[b]
        owners = [{storage_id(plain) for plain in plain_tensors(tensor)} for tensor in (first, second)]
        return a != b and not owners[0].isdisjoint(owners[1])

    def try_statement(self, statement: str, name: str | None) -> None:
        torch.set_warn_always(True)  # a warning is given every time, or the search would not repeat
        try:
            with warnings.catch_warnings(action="error"):
                exec(statement, self.scope)
        except (RuntimeError, IndexError, TypeError, ValueError, UserWarning):
            return
        finally:
            torch.set_warn_always(False)
        self.statements.append(statement)
        if name is not None:
            self.names.append(name)


@st.composite
def programs(
    draw: st.DrawFn,
    *,
    inputs: Sequence[str] = tuple(INPUTS.values()),
    repeat_inputs: bool = True,
    share_memory: bool = False,
    writes: Sequence[str] = WRITES,
    modes: Sequence[str] = MODES,
    max_statements: int = 8,
) -> Program:
    """A program that runs in eager PyTorch (its backward may still fail there)."""
    count = draw(st.integers(1, 3))
    chosen: list[str] = []
    for position in range(count):
        before = [f"x{k}" for k in range(position)]
        again = before if repeat_inputs else []
        parts = [part.format(a=name) for name in before for part in PARTS] if share_memory else []
        chosen.append(draw(st.one_of(*(st.sampled_from(kind) for kind in (inputs, again, parts) if kind))))
    program = Program(tuple(chosen), (), ())
    try:
        rehearsal = _Rehearsal(program.arguments())
    except (RuntimeError, IndexError):
        reject()
    for position in range(draw(st.integers(1, max_statements))):
        template = draw(
            st.one_of(st.sampled_from(ARITHMETIC), st.sampled_from(VIEWS), st.sampled_from(writes))
        )
        a, b = draw(st.sampled_from(rehearsal.names)), draw(st.sampled_from(rehearsal.names))
        name = None if template in writes else f"t{position}"
        if "view(torch." in template and rehearsal.scope[a].dtype is torch.bool:
            continue  # written through such a view, a boolean is neither true nor false
        if template == EMPTY_SPLIT and rehearsal.scope[a].shape[:1] == (0,):
            continue
        if name is None and "{b}" in template and rehearsal.writes_what_it_reads(a, b):
            continue
        text = template.format(a=a, b=b)
        mode = draw(st.sampled_from(modes))
        rehearsal.try_statement(f"{mode}{name} = {text}" if name else f"{mode}{text}", name)
    returned = draw(st.lists(st.sampled_from(rehearsal.names), max_size=4))
    return Program(tuple(chosen), tuple(rehearsal.statements), tuple(returned))
