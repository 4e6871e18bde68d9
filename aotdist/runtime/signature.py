"""How calls of one function differ: sizes and numbers to make dynamic, and why one was compiled again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from aotdist.capture.ambient import Ambient
from aotdist.capture.arguments import CodeLeaf, ConstantLeaf, Leaf, NumberLeaf, read_arguments
from aotdist.capture.captured import UserCall
from aotdist.capture.constants import is_number
from aotdist.capture.modules import ModuleGuard
from aotdist.capture.source import Source
from aotdist.runtime.artifact import Artifact
from aotdist.subclasses.protocol import rule_of
from aotdist.torch_seam.modes import class_functions_off, users_modes_off

Changing: TypeAlias = dict[str, tuple[str | Source, bool]]
"""Numbers that were seen to change, by path: their path (of an argument) or place, and whether they can be
symbols."""


def changed_since(
    call: UserCall, artifacts: Sequence[Artifact], modes: Ambient, numbers: Changing
) -> tuple[dict[int, frozenset[int]], tuple[str | Source, ...]]:
    """The sizes and numbers of a call that differ from those of artifacts for the same modes.

    Args:
        call: the call.
        artifacts: what was compiled.
        modes: the modes around the call.
        numbers: those that are known to change.

    Returns:
        dimensions by the identity of their tensor, and numbers: the paths of those among the arguments, and
        the places of others.
    """
    same_modes = [artifact for artifact in artifacts if artifact.fit.environment.ambient == modes]
    if not same_modes and not numbers:
        return {}, ()
    with users_modes_off(), class_functions_off():
        try:
            arguments, flat, _ = read_arguments(call.args, call.kwargs)
        except Exception:  # the compilation raises it again, and tells peers
            return {}, ()
        tensors = dict(zip(arguments.tensor_paths(), flat, strict=True))
        dims: dict[int, frozenset[int]] = {}
        for artifact in same_modes:
            for path, found in _changed_dims(tensors, artifact):
                key = id(tensors[path])
                dims[key] = dims.get(key, frozenset()).union(found)
    leaves = [{leaf.path: leaf for leaf in artifact.fit.arguments.leaves} for artifact in same_modes]
    constants = (leaf for leaf in arguments.leaves if isinstance(leaf, ConstantLeaf))
    changed = [
        one.path
        for one in constants
        if is_number(one.value)
        and (one.path in numbers or any(_has_changed(one, each.get(one.path)) for each in leaves))
    ]
    varying = (*changed, *_changed_places(same_modes, numbers))
    return dims, tuple(one for one in varying if numbers.get(_path(one), (one, True))[1])


def symbols_for(varying: Sequence[str | Source], artifact: Artifact) -> Changing:
    """Numbers that were guessed to change, with whether the artifact has symbols for them."""
    symbols = {leaf.path for leaf in artifact.fit.arguments.leaves if isinstance(leaf, NumberLeaf)}
    symbols |= {count.place.path for count in artifact.fit.numbers.counts}
    return {_path(one): (one, _path(one) in symbols) for one in varying}


def _path(number: str | Source) -> str:
    return number.path if isinstance(number, Source) else number


def _changed_places(artifacts: Sequence[Artifact], numbers: Changing) -> list[Source]:
    """Places of numbers that are known to change, or differ from what an artifact is guarded on."""
    places = [one for one, _ in numbers.values() if isinstance(one, Source)]
    found = {place.spot(): place for place in places if is_number(place.read_or(None))}
    for artifact in artifacts:
        for place, number in artifact.fit.numbers_found():
            now = place.read_or(None) if is_number(number) else number
            if type(now) is type(number) and now != number:
                found[place.spot()] = place
    return list(found.values())


def _has_changed(number: ConstantLeaf, leaf: Leaf | None) -> bool:
    """Whether a number has the type, but not the value, that it had in another call."""
    if isinstance(leaf, NumberLeaf):
        return leaf.kind is type(number.value)
    known = leaf.value if isinstance(leaf, ConstantLeaf) else None
    return type(known) is type(number.value) and known != number.value


def what_changed(artifact: Artifact, others: Sequence[Artifact]) -> str:
    """The parts of the guards in which `artifact` differs from the artifacts before it, in words."""
    mine = _parts(artifact)
    changed: dict[str, None] = {}
    for other in others:
        theirs = _parts(other)
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                changed[f"{name} ({theirs.get(name, 'absent')} -> {mine.get(name, 'absent')})"] = None
    asked = [[guard.holds for guard in one.fit.facts.data_guards] for one in (artifact, *others)]
    if any(answers != asked[0] for answers in asked):
        changed["numbers or flags that a library reads off inputs"] = None
    return ", ".join(list(changed)[:4]) or "something that the function itself changes"


def what_helps(artifact: Artifact, others: Sequence[Artifact]) -> str:
    """What a user can do about that: make the sizes that differ dynamic, or run such calls eagerly."""
    runs_eagerly = "`aotdist.disable()` runs such calls as they were written"
    marks = list(dict.fromkeys(mark for other in others for mark in _marks(artifact, other)))
    if not marks:
        return runs_eagerly
    return f"`dynamic=True`, or `{', '.join(marks[:2])}`, compiles once for all sizes; {runs_eagerly}"


def _marks(artifact: Artifact, other: Artifact) -> Iterator[str]:
    """The calls of `mark_dynamic` for the dimensions that differ between two artifacts."""
    if artifact.compilation.settings.dynamic or artifact.compilation.takes_no_symbols():
        return
    pairs = zip(artifact.fit.slots, artifact.fit.examples, strict=True)
    for path, dims in _changed_dims({slot.path: example for slot, example in pairs}, other):
        yield f"aotdist.mark_dynamic({path}, {', '.join(map(str, dims))})"


def _changed_dims(tensors: Mapping[str, torch.Tensor], other: Artifact) -> Iterator[tuple[str, list[int]]]:
    """The dimensions of tensors, by path, that differ from those of an artifact and can be symbolic."""
    for slot, example in zip(other.fit.slots, other.fit.examples, strict=True):
        if slot.path in tensors and (dims := _dims_that_differ(tensors[slot.path], example)):
            yield slot.path, dims


def _dims_that_differ(one: torch.Tensor, other: torch.Tensor) -> list[int]:
    """The dimensions that have to be symbolic for one program to take both tensors."""
    if one.dim() != other.dim():
        return []
    (shape, stride), (before, strides) = (rule_of(each).compared(each) for each in (one, other))
    sizes = list(enumerate(zip(shape, before, strict=True)))
    is_about_strides = shape == before and stride != strides
    return [dim for dim, (a, b) in sizes if min(a, b) > 1 and (a != b or is_about_strides)]


def _parts(artifact: Artifact) -> dict[str, str]:
    fit = artifact.fit
    parts = {f"{mode}": repr(value) for mode, value in fit.environment.ambient._asdict().items()}
    for leaf in fit.arguments.leaves:
        if isinstance(leaf, (ConstantLeaf, CodeLeaf)):
            is_code = isinstance(leaf, CodeLeaf)
            parts[f"`{leaf.path}`"] = f"another {type(leaf.value).__name__}" if is_code else repr(leaf.value)
    for instance in fit.arguments.instances:
        parts[f"what `{instance.path}` holds"] = f"{instance.cls.__name__}: {instance.spec}"
    for slot, example in zip(fit.slots, fit.examples, strict=True):
        parts[f"`{slot.path}`"] = _describe(example)
    for _, holds in fit.environment.holds:
        parts |= holds.described() if isinstance(holds, ModuleGuard) else {}
    for source, value in fit.environment.constants:
        parts[f"`{source.path}`"] = repr(value)
    for source, first in fit.environment.same_objects:
        parts[f"what `{source.path}` is"] = f"`{first.path}`"
    return parts


def _describe(tensor: torch.Tensor) -> str:
    grad = ", requires_grad" if tensor.requires_grad else ""
    strides = "" if tensor.is_contiguous() else f", strides {list(tensor.stride())}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{type(tensor).__name__} {dtype}{list(tensor.shape)}{strides}{grad}"
