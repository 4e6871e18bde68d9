"""Runs the same program eagerly and compiled, and compares everything that its user can see.

A *scene* is built twice from the same seed: once for eager, once for the compiled call. What a user
can see of a set of tensors (bits, layout, autograd state, who shares memory with whom, who is whose
`_base`) is written down as plain data, so that a difference reads as a difference of two dictionaries.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeAlias, TypeVar

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.aliasing.overwrite import version_of
from aotdist.api import compiled_call
from aotdist.compiled import Compiled
from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import (
    Plain,
    is_wrapper,
    plain_tensors,
    rebuild,
    recipe_of,
    tangent_recipe,
)
from aotdist.torch_seam.autograd import history_of
from aotdist.torch_seam.classes import overrides_torch_functions
from aotdist.torch_seam.modes import class_functions_off
from aotdist.torch_seam.tensors import storage_id
from aotdist.torch_seam.trees import pytree

P = ParamSpec("P")
R = TypeVar("R")


def class_functions_are_off(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn`, which looks at tensors and is not to be heard by their classes."""

    @functools.wraps(fn)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> R:
        with class_functions_off():
            return fn(*args, **kwargs)

    return quiet


Sight: TypeAlias = dict[str, Any]
"""What is seen at one moment, by name."""
Around: TypeAlias = Callable[[], AbstractContextManager[Any]]
"""A context for each call: a grad mode, autocast."""


@dataclass
class Scene:
    """A callable with what it is called with, and whatever else the user holds.

    Args:
        fn: function or module.
        args: positional arguments.
        kwargs: keyword arguments.
        held: further things whose tensors the user can look at: modules, containers, tensors.
        left_out: which of the results with history no gradient is taken from.
        other_kinds: for which of them it is plain if they are wrappers, and a wrapper if they are plain.
        lenient: some things are not compared. Last bits of gradients that meet outside of `fn`, at the base
            of a view that is made again, or at that of an argument that was written; of the latter strides,
            too. Strides of dimensions of one element and of what is empty: PyTorch's fakes have them wrong
            (torch 2.13: of `x * 2` and `torch.empty_like(x)`); a write keeps what they say. How gradients of
            DTensors are placed that pass the write of an argument: those that arrive there placed otherwise
            than its result, as from a view along what is sharded, are converted.
    """

    fn: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    held: Mapping[str, Any] = field(default_factory=dict)
    left_out: frozenset[int] = frozenset()
    other_kinds: frozenset[int] = frozenset()
    lenient: bool = False

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that the user holds, by name."""
        things = {"args": self.args, "kwargs": dict(self.kwargs), **self.held}
        if isinstance(self.fn, nn.Module):
            things["fn"] = self.fn
        return {
            name: tensor for prefix, thing in things.items() for name, tensor in tensors_in(prefix, thing)
        }

    def arguments(self) -> dict[str, torch.Tensor]:
        """The tensors among the arguments, by name."""
        return dict(tensors_in("args", (self.args, dict(self.kwargs))))


def tensors_in(prefix: str, thing: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a module or of any pytree, by name."""
    if isinstance(thing, nn.Module):
        found = [*thing.named_parameters(prefix), *thing.named_buffers(prefix)]
        for path, module in thing.named_modules(prefix=prefix):
            found += [(f"{path}.{k}", v) for k, v in vars(module).items() if isinstance(v, torch.Tensor)]
        return found
    pairs, _ = pytree.tree_flatten_with_path(thing)
    found = [(prefix + pytree.keystr(path), leaf) for path, leaf in pairs if isinstance(leaf, torch.Tensor)]
    return [*found, *(inside for name, tensor in found for inside in _on(name, tensor))]


def _on(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensors among the attributes of one that is no wrapper."""
    return [] if is_wrapper(tensor) else tensors_in(f"{name}.", vars(tensor))


def bits(tensor: torch.Tensor) -> bytes:
    """The exact data: NaN equals NaN, and 0.0 is not -0.0."""
    with class_functions_off():
        plains = [
            p.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for p in plain_tensors(tensor)
        ]
    return b"|".join(p.view(torch.uint8).numpy().tobytes() if p.numel() else b"" for p in plains)


@class_functions_are_off
def look(tensor: torch.Tensor, *, rounded: bool = False) -> Sight:
    """What one tensor shows of itself; if `rounded`, its numbers but for rounding."""
    seen: Sight = {
        "type": type(tensor),
        "dtype": tensor.dtype,
        "size": tuple(tensor.size()),
        "stride": tensor.stride(),
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "has_grad_fn": tensor.grad_fn is not None,
        "is_view": tensor._is_view(),
        "is_inference": tensor.is_inference(),
        "numbers": Rounded(tensor) if rounded else str([p.detach().tolist() for p in plain_tensors(tensor)]),
        "bits": None if rounded else bits(tensor),
    }
    if is_wrapper(tensor):
        return seen | {"context": str(tensor.__tensor_flatten__()[1])}  # type: ignore[attr-defined]
    own = {name: value for name, value in vars(tensor).items() if name != _LEFT_BY_DYNAMO}
    return seen | {"offset": tensor.storage_offset(), "attributes": constants_in(own)}


_LEFT_BY_DYNAMO = "fake_device"
"""What Dynamo of torch 2.14 leaves on a tensor whose `.data` a program assigns, whatever the backend."""


def constants_in(attributes: Mapping[str, Any]) -> Sight:
    """What is no tensor among attributes, and what the containers there are."""
    return {
        name: shape_of(value) for name, value in attributes.items() if not isinstance(value, torch.Tensor)
    }


@class_functions_are_off
def relations(named: Mapping[str, torch.Tensor]) -> Sight:
    """Who is who, who shares memory with whom, who is whose base: each by the first name."""
    same: dict[int, str] = {}
    memory: dict[int, str] = {}
    seen: Sight = {}
    for name, tensor in named.items():
        seen[f"{name} is"] = same.setdefault(id(tensor), name)
        owners = enumerate(storage_id(plain) for plain in plain_tensors(tensor))
        seen[f"{name} lives in"] = [memory.setdefault(owner, f"{name}#{k}") for k, owner in owners]
    bases = {id(t._base): name for name, t in reversed(list(named.items())) if t._base is not None}
    for name, tensor in named.items():
        if tensor._base is not None:
            base = same.get(id(tensor._base), f"the base of {bases[id(tensor._base)]}")
            seen[f"{name} is a view of"] = base
    return seen


def observe(named: Mapping[str, torch.Tensor], *, rounded: bool = False) -> Sight:
    """Everything that the user can see of these tensors; if `rounded`, their numbers but for rounding."""
    return {name: look(tensor, rounded=rounded) for name, tensor in named.items()} | relations(named)


@class_functions_are_off
def versions(named: Mapping[str, torch.Tensor]) -> Sight:
    """How often each tensor was written, as autograd counts."""
    return {f"{name} version": version_of(tensor) for name, tensor in named.items()}


class Rounded:
    """Numbers that equal others which differ in the last bits.

    Args:
        tensor: holds them.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._plains = [plain.detach().clone() for plain in plain_tensors(tensor)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rounded) and all(map(_close, self._plains, other._plains))

    def __repr__(self) -> str:
        return f"about {[plain.tolist() for plain in self._plains]}"


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    bound = 16 * torch.finfo(a.dtype).eps
    if a.dtype.itemsize == 1:  # of 8-bit numbers PyTorch has no `nan_to_num`
        a, b = a.float(), b.float()
    largest = a.abs().nan_to_num(0, 0, 0).amax().item() if a.numel() else 0.0
    return torch.allclose(a, b, rtol=bound, atol=bound * largest, equal_nan=True)


@class_functions_are_off
def gradients(named: Mapping[str, torch.Tensor], *, rounded: bool = False) -> Sight:
    """What hangs on `.grad` of every leaf; of a gradient without elements not its strides.

    A leaf whose sizes were written under `no_grad` is known to the node in its sizes of before. A gradient
    of another size is copied into one laid out like the leaf, where `unsqueeze_` made a stride 0.

    Args:
        named: the tensors.
        rounded: say what the numbers are but for rounding.
    """
    leaves = {name: t for name, t in named.items() if t.is_leaf}
    grads = {f"{name}.grad": t.grad for name, t in leaves.items()}
    seen = {name: None if grad is None else look(grad, rounded=rounded) for name, grad in grads.items()}
    return {name: one | {"stride": None} if one and 0 in one["size"] else one for name, one in seen.items()}


@class_functions_are_off
def tangent_for(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """A gradient for one output: fixed numbers, laid out as the output is.

    In another layout eager's own formulas add up in another order; see `test_autograd.py` for those.
    """
    if is_wrapper(tensor) and isinstance(tangent_recipe(recipe_of(tensor)), Plain):
        return tangent_for(torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype), seed)
    if is_wrapper(tensor):
        plains = [tangent_for(plain, seed + k) for k, plain in enumerate(plain_tensors(tensor))]
        with torch.no_grad():
            return rebuild(tangent_recipe(recipe_of(tensor)), plains)
    generator = torch.Generator().manual_seed(seed)
    shape = (2, *tensor.shape) if tensor.dtype.is_complex else tensor.shape
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    tangent = (torch.complex(*numbers) if tensor.dtype.is_complex else numbers).to(tensor.dtype)
    return torch.empty_like(tensor, requires_grad=False).copy_(tangent)


def tangent_of_other_kind(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """A plain gradient for a wrapper, and a wrapper for a plain tensor."""
    if is_wrapper(tensor):
        return tangent_for(plain_tensors(tensor)[0], seed)
    return TwoTensor(tangent_for(tensor, seed), tangent_for(tensor, seed + 1))


@class_functions_are_off
def differentiable(named: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The distinct tensors with history among `named`."""
    return list({id(t): t for t in named.values() if t.requires_grad and not t.is_leaf}.values())


def backward_through(
    outputs: Sequence[torch.Tensor], of_other_kinds: Collection[torch.Tensor] = (), **options: Any
) -> None:
    """Run autograd from `outputs`, each with a tangent of its own; some have one of another kind."""
    if outputs:
        others = {id(output) for output in of_other_kinds}
        makers = [tangent_of_other_kind if id(t) in others else tangent_for for t in outputs]
        tangents = [make(t, seed) for seed, (make, t) in enumerate(zip(makers, outputs, strict=True))]
        # As the usual `__torch_function__` has it; classes that differ would not agree on who is to be asked.
        heard = any(overrides_torch_functions(type(output)) for output in outputs)
        with class_functions_off() if heard else nullcontext():
            torch.autograd.backward(list(outputs), tangents, **options)


def shape_of(result: Any) -> Sight:
    """What is no tensor in a result."""
    leaves, spec = pytree.tree_flatten(result)
    return {
        "structure": str(spec),
        "constants": [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)],
    }


def play(
    scene: Scene,
    call: Callable[..., Any],
    *,
    calls: int = 1,
    backward: bool = True,
    around: Around = nullcontext,
    rounded: bool = False,
) -> list[Sight]:
    """Call, look, differentiate, look; as often as asked; if `rounded`, see numbers but for rounding."""
    sights: list[Sight] = []
    for _ in range(calls):
        arguments = list(scene.arguments().values())
        with class_functions_off():
            history = list(map(history_of, arguments))
            # Held, so that what the program makes does not get the number of memory that it lets go of.
            before = [plain.untyped_storage() for tensor in arguments for plain in plain_tensors(tensor)]
            counted = scene.tensors()
        with around():
            counts_writes = not torch.is_inference_mode_enabled()
            result = call(*scene.args, **scene.kwargs)
        outputs = dict(tensors_in("out", result))
        everything = scene.tensors() | outputs
        sights.append(observe(everything, rounded=rounded) | shape_of(result))
        if counts_writes:
            sights.append(versions(counted))
        if backward:
            ends = differentiable(outputs | scene.arguments())
            others = [end for position, end in enumerate(ends) if position in scene.other_kinds]
            ends = [end for position, end in enumerate(ends) if position not in scene.left_out]
            writes_view = scene.lenient and meet_outside(arguments, history)
            outside = writes_view or (scene.lenient and any(map(_is_view, ends)))
            moved = scene.lenient and writes_dtensors(arguments, history)
            taken = {owner for tensor in arguments for owner in _memory(tensor)}
            taken |= {storage._cdata for storage in before}
            seen = differentiate(everything, ends, taken, others, rounded=rounded or outside)
            hidden = {"context": moved, "stride": writes_view}
            sights += [
                _without(sight, [name for name, is_hidden in hidden.items() if is_hidden]) for sight in seen
            ]
    return [leniently(sight) for sight in sights] if scene.lenient else sights


def leniently(sight: Sight) -> Sight:
    """The same without the strides that say nothing about where elements lie."""
    return {name: _without_idle_strides(seen) for name, seen in sight.items()}


def _without_idle_strides(seen: Any) -> Any:
    if not isinstance(seen, dict) or seen.get("stride") is None:
        return seen
    strides, is_empty = zip(seen["size"], seen["stride"], strict=True), 0 in seen["size"]
    return seen | {"stride": tuple(None if is_empty or size == 1 else stride for size, stride in strides)}


def _without(sight: Sight, facts: Sequence[str]) -> Sight:
    """The same without these facts about gradients."""
    return {
        name: seen | dict.fromkeys(facts) if name.endswith(".grad") and isinstance(seen, dict) else seen
        for name, seen in sight.items()
    }


@class_functions_are_off
def writes_dtensors(arguments: Sequence[torch.Tensor], history: Sequence[Any]) -> bool:
    """Whether a DTensor among the arguments was written with history.

    Args:
        arguments: after the call.
        history: what made each, before the call.
    """
    pairs = zip(arguments, history, strict=True)
    return any(isinstance(t, DTensor) and history_of(t) is not before for t, before in pairs)


@class_functions_are_off
def meet_outside(arguments: Sequence[torch.Tensor], history: Sequence[Any]) -> bool:
    """Whether gradients meet at a tensor that is no argument: an argument is a view of it, and was written.

    Eager adds up there what the write passes on, and the sum of what else used the argument before; a
    compiled call returns the sum of all. Of three numbers, they may differ in the last bit.

    Args:
        arguments: after the call.
        history: what made each, before the call.
    """
    given = set(map(id, arguments))
    return any(
        t._base is not None and id(t._base) not in given and t.requires_grad and history_of(t) is not before
        for t, before in zip(arguments, history, strict=True)
    )


def differentiate(
    everything: Mapping[str, torch.Tensor],
    ends: Sequence[torch.Tensor],
    taken: Set[int],
    of_other_kinds: Collection[torch.Tensor] = (),
    *,
    rounded: bool = False,
) -> list[Sight]:
    """Run autograd from several ends at once, then one by one from those that share memory with another.

    Gradients of tensors that share memory meet outside of the compiled region, and arrive as a sum. Eager
    adds each to the others when its turn is, and floating-point sums of three show it. Of tensors made inside
    that share memory, the one that the others are views of is among the ends that are run at once.

    Args:
        everything: what to look at.
        ends: where to start.
        taken: the memory of the arguments, before the call and after it.
        of_other_kinds: the ends that get a gradient of another kind.
        rounded: whether numbers are compared but for rounding.
    """
    taken = set(taken)
    # By `.data =` a view can lie elsewhere than the base where its gradient arrives.
    with class_functions_off():
        memories = [_memory(end) | (set() if end._base is None else _memory(end._base)) for end in ends]
    counts = Counter(owner for memory in memories for owner in memory)
    together: list[torch.Tensor] = []
    alone: list[list[torch.Tensor]] = []
    for end, memory in zip(ends, memories, strict=True):
        is_only = not _is_view(end) or all(counts[owner] == 1 for owner in memory)
        if is_only and memory.isdisjoint(taken):
            together.append(end)
            taken |= memory
        else:
            alone.append([end])
    return [
        _seen_after(everything, together, of_other_kinds, rounded=rounded),
        {
            f"from end {position}: {name}": seen
            for position, group in enumerate(alone)
            for name, seen in _seen_after(everything, group, of_other_kinds, rounded=rounded).items()
        },
    ]


@class_functions_are_off
def _is_view(tensor: torch.Tensor) -> bool:
    return tensor._is_view()


@class_functions_are_off
def _memory(tensor: torch.Tensor) -> set[int]:
    return {storage_id(plain) for plain in plain_tensors(tensor)}


def _seen_after(
    everything: Mapping[str, torch.Tensor],
    ends: Sequence[torch.Tensor],
    of_other_kinds: Collection[torch.Tensor],
    *,
    rounded: bool,
) -> Sight:
    backward_through(ends, of_other_kinds, retain_graph=True)
    seen = gradients(everything, rounded=rounded) | observe(everything, rounded=rounded)
    with class_functions_off():
        for tensor in everything.values():
            if tensor.is_leaf:
                tensor.grad = None
    return seen


def differences(eager: Sequence[Sight], compiled: Sequence[Sight]) -> list[str]:
    """Every fact in which two lists of sights differ, in words."""
    return [
        f"step {step}: {name}: {_contrast(a.get(name), b.get(name))}"
        for step, (a, b) in enumerate(zip(eager, compiled, strict=True))
        for name in {**a, **b}
        if a.get(name) != b.get(name)
    ]


def _contrast(a: Any, b: Any) -> str:
    if isinstance(a, dict) and isinstance(b, dict):
        shown = [k for k in a if a[k] != b.get(k) and k != "bits"] or ["bits"]
        return ", ".join(f"{k} {a[k]} in eager, {b.get(k)} compiled" for k in shown)
    return f"{a} in eager, {b} compiled"


def assert_same(eager: Sequence[Sight], compiled: Sequence[Sight]) -> None:
    found = differences(eager, compiled)
    assert not found, "\n".join(found)


def skip_unless_eager_runs(build: Callable[[], Scene], **play_options: Any) -> None:
    """Skip the test whose program eager itself refuses; `play_options` as `play` takes them."""
    eager = build()
    try:
        play(eager, eager.fn, **play_options)
    except (RuntimeError, AssertionError) as error:
        pytest.skip(f"eager refuses it: {str(error)[:60]}")


def same_as_eager(
    build: Callable[[], Scene | Sequence[Scene]],
    *,
    calls: int = 1,
    backward: bool = True,
    around: Around = nullcontext,
    backend: Any = "fx",
    compilations: int | None = 1,
    seed: int = 0,
    rounded: bool = False,
    **settings: Any,
) -> Compiled:
    """Play a scene eagerly and compiled, and assert that nobody can tell the difference.

    Args:
        build: makes the scene, or several of one function; called twice, with the same seed.
        calls: how often the function is called on the same arguments.
        backward: whether autograd runs after each call.
        around: a context for each call.
        backend: what to compile with.
        compilations: how many artifacts the calls may need; None for any number.
        seed: of torch's random numbers, before building and before playing.
        rounded: whether numbers are compared but for rounding.
        settings: fields of `aotdist.Settings`.
    """
    played: list[list[Sight]] = []
    for compiles in (False, True):
        torch.manual_seed(seed)
        built = build()
        scenes = [built] if isinstance(built, Scene) else built
        target = scenes[0].fn
        if compiles:
            target = aotdist.compile(target, backend=backend, settings=settings)
        torch.manual_seed(seed + 1)
        sights = [
            sight
            for scene in scenes
            for sight in play(scene, target, calls=calls, backward=backward, around=around, rounded=rounded)
        ]
        played.append([*sights, {"random numbers": torch.get_rng_state().tolist()}])
    assert_same(*played)
    compiled = compiled_call(target)
    assert compilations in (None, len(compiled.artifacts)), f"compiled {len(compiled.artifacts)} times"
    return compiled


def same_as_eager_or_refused(
    build: Callable[[], Scene | Sequence[Scene]], refusals: Collection[str], **options: Any
) -> None:
    """`same_as_eager`, unless the program is refused for one of the reasons that are known.

    Args:
        build: as for `same_as_eager`.
        refusals: parts of what refusals say.
        options: as for `same_as_eager`.
    """
    try:
        same_as_eager(build, **options)
    except UnsupportedProgram as refusal:
        if not any(reason in refusal.what for reason in refusals):
            raise


def assert_both_give_the_same(fn: Any, use: Callable[[Any], Sequence[torch.Tensor | None]]) -> None:
    """Assert that `use` returns the same numbers, or None, of the eager and of the compiled function.

    For whatever a `Scene` is too rigid to say: other calls, hooks, gradients of some things only.
    """
    found: list[Sequence[torch.Tensor | None]] = []
    for call in (fn, aotdist.compile(fn, backend="fx")):
        torch.manual_seed(0)
        found.append(use(call))
    for eager, ours in zip(*found, strict=True):
        assert (eager is None) == (ours is None), (eager, ours)
        assert eager is None or ours is None or bits(eager) == bits(ours), (eager, ours)
