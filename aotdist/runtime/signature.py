"""What an artifact is specialised on, in words: to say why a call needed one more."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aotdist.capture.arguments import CodeLeaf, ConstantLeaf
from aotdist.capture.modules import ModuleGuard
from aotdist.runtime.artifact import Artifact


def what_changed(artifact: Artifact, others: Sequence[Artifact]) -> str:
    """The parts of the signature in which `artifact` differs from the artifacts before it."""
    mine = _parts(artifact)
    changed: dict[str, None] = {}
    for other in others:
        theirs = _parts(other)
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                changed[f"{name} ({theirs.get(name, 'absent')} -> {mine.get(name, 'absent')})"] = None
    return ", ".join(list(changed)[:4]) or "something that the function itself changes"


def _parts(artifact: Artifact) -> dict[str, str]:
    fit = artifact.fit
    parts = {f"{mode}": repr(value) for mode, value in fit.around.ambient._asdict().items()}
    for leaf in fit.arguments.leaves:
        if isinstance(leaf, (ConstantLeaf, CodeLeaf)):
            is_code = isinstance(leaf, CodeLeaf)
            parts[f"`{leaf.path}`"] = f"another {type(leaf.value).__name__}" if is_code else repr(leaf.value)
    for instance in fit.arguments.instances:
        parts[f"what `{instance.path}` holds"] = f"{instance.cls.__name__}: {instance.spec}"
    for slot, example in zip(fit.slots, fit.examples, strict=True):
        parts[f"`{slot.path}`"] = _describe(example)
    for _, holds in fit.around.holds:
        parts |= holds.described() if isinstance(holds, ModuleGuard) else {}
    for source, value in fit.around.constants:
        parts[f"`{source.path}`"] = repr(value)
    for source, first in fit.around.again:
        parts[f"what `{source.path}` is"] = f"`{first.path}`"
    return parts


def _describe(tensor: torch.Tensor) -> str:
    grad = ", requires_grad" if tensor.requires_grad else ""
    return f"{type(tensor).__name__} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{grad}"
