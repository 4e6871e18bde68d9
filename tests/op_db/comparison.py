"""Runs a case eagerly and compiled, and says in what the two differ, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

import aotdist
from aotdist.api import compiled_call
from aotdist.torch_seam.tensors import storage_id
from aotdist.torch_seam.trees import pytree
from tests.op_db.samples import Case, Scene

Sight: TypeAlias = dict[str, Any]
"""What is seen after one call, by name."""
Outcome: TypeAlias = Literal["same", "differs", "refused", "raised", "eager raised"]

CALLS = 2  # the second finds the artifact of the first
NO_BACKWARD = "no backward"
LAST_BITS = 1e-5
"""How far numbers may be apart, relative to the largest, to be called the same but for rounding."""


@dataclass(frozen=True)
class Verdict:
    """How compiled compares with eager.

    Args:
        outcome: `refused` with an `UnsupportedProgram`; `raised` another error, where eager raises none.
        lines: each fact that differs, or the error.
    """

    outcome: Outcome
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n    ".join((self.outcome, *self.lines))


def compare(case: Case) -> Verdict:
    """Run `case` eagerly and compiled, each time on new tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scene = case.build()
        try:
            eager = play(scene, scene.target)
        except Exception as error:
            return Verdict("eager raised", (_message(error),))
        scene = case.build()
        target = aotdist.compile(scene.target, backend="fx", settings={"dynamic": case.walk.dynamic})
        try:
            compiled = play(scene, target)
        except aotdist.UnsupportedProgram as error:
            return Verdict("refused", (error.what,))
        except Exception as error:
            return Verdict("raised", (_message(error),))
    found = differences(eager, compiled)
    count = len(compiled_call(target).artifacts)
    if count > 1:
        found.append(f"compiled {count} times")
    if found:
        return Verdict("differs", tuple(found))
    error = eager[0].get(NO_BACKWARD)
    return Verdict("eager raised", (f"in backward: {error}",)) if error else Verdict("same")


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def play(scene: Scene, call: Callable[..., Any]) -> list[Sight]:
    """Call, differentiate and look, several times."""
    return [_observe(scene, call) for _ in range(CALLS)]


def _observe(scene: Scene, call: Callable[..., Any]) -> Sight:
    args, kwargs = scene.arguments()
    torch.default_generator.manual_seed(1)
    flat, spec = pytree.tree_flatten(call(*args, **kwargs))
    outs = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    named = {f"arg {n}": tensor for n, tensor in enumerate(given)} | dict(scene.state)
    named |= {f"out {n}": tensor for n, tensor in enumerate(outs)}
    seen: Sight = {
        "structure": str(spec),
        "constants": str([leaf for leaf in flat if not isinstance(leaf, torch.Tensor)]),
        "random numbers": Bits(torch.get_rng_state()),
    }
    seen |= _relations(named)
    for name, tensor in named.items():
        seen |= _look(name, tensor) | {f"{name} is_view": tensor._is_view()}
    return seen | _gradients(list(named.values()), scene.leaves)


def _relations(named: Mapping[str, torch.Tensor]) -> Sight:
    """Who is who, and who shares memory with whom: each by the first name."""
    same: dict[int, str] = {}
    memory: dict[int, str] = {}
    seen: Sight = {}
    for name, tensor in named.items():
        seen[f"{name} is"] = same.setdefault(id(tensor), name)
        if tensor.layout is torch.strided:
            seen[f"{name} lives in"] = memory.setdefault(storage_id(tensor), name)
    return seen


def _look(name: str, tensor: torch.Tensor) -> Sight:
    seen: Sight = {
        "type": type(tensor),
        "layout": tensor.layout,
        "dtype": tensor.dtype,
        "size": tuple(tensor.size()),
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "conjugated": tensor.is_conj(),
        "negated": tensor.is_neg(),
    }
    if tensor.layout is torch.strided:
        seen |= {"stride": tensor.stride(), "offset": tensor.storage_offset(), "values": Bits(tensor)}
    return {f"{name} {fact}": value for fact, value in seen.items()}


def _gradients(tensors: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> Sight:
    ends = list({id(t): t for t in tensors if t.grad_fn is not None}.values())
    wanted = list({id(t): t for t in leaves if t.requires_grad}.values())
    if not ends or not wanted:
        return {}
    try:
        grads = torch.autograd.grad(ends, wanted, [tangent_for(end) for end in ends], allow_unused=True)
    except Exception as error:
        return {NO_BACKWARD: _message(error)}
    seen: Sight = {}
    for n, grad in enumerate(grads):
        if grad is not None:  # pyright: ignore[reportUnnecessaryComparison]  # an unused input has none
            seen |= _look(f"grad {n}", grad)
    return seen


def tangent_for(tensor: torch.Tensor) -> torch.Tensor:
    """A gradient of fixed numbers, laid out as the output is."""
    numbers = torch.linspace(-1.5, 1.0, max(tensor.numel(), 1), dtype=torch.float64)[: tensor.numel()]
    if tensor.dtype.is_complex:
        numbers = torch.complex(numbers, numbers.flip(0) + 0.25)
    return torch.empty_like(tensor).copy_(numbers.view(tensor.shape))


class Bits:
    """The exact data of a tensor: NaN equals NaN, and 0.0 is not -0.0."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._data = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
        self._bytes = self._data.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bits) and self._bytes == other._bytes

    __hash__ = None  # type: ignore[assignment]

    def contrast(self, other: Bits) -> str:
        """In what the numbers differ, in a word, and the first that do."""
        a, b = self._data, other._data
        if a.shape != b.shape or a.dtype != b.dtype:
            return "differ"
        unequal = (a != b) & ~((a != a) & (b != b))
        if not unequal.any():
            return "differ in the signs of zeros or NaNs"
        gap = (a - b).abs().nan_to_num(torch.inf).max().item()
        word = "in the last bits" if gap <= LAST_BITS * a.abs().nan_to_num(0.0).max().item() else "much"
        return f"differ {word}: {a[unequal][:3].tolist()} in eager, {b[unequal][:3].tolist()} compiled"


def differences(eager: Sequence[Sight], compiled: Sequence[Sight]) -> list[str]:
    """Every fact in which two lists of sights differ, in words."""
    return [
        f"{name} {_contrast(a.get(name), b.get(name))}{' at the second call' if call else ''}"
        for call, (a, b) in enumerate(zip(eager, compiled, strict=True))
        for name in {**a, **b}
        if a.get(name) != b.get(name) and not (name.startswith(("grad ", NO_BACKWARD)) and NO_BACKWARD in a)
    ]


def _contrast(a: Any, b: Any) -> str:
    if isinstance(a, Bits) and isinstance(b, Bits):
        return a.contrast(b)
    return f"is {a} in eager, {b} compiled"
