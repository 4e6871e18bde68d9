"""The signature of a call, part by part, in words that two processes can compare."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

from aotdist.artifacts.archive import version_of
from aotdist.artifacts.values import Values
from aotdist.capture.arguments import ConstantLeaf
from aotdist.capture.captured import Captured
from aotdist.capture.code import is_users_class, is_users_code
from aotdist.capture.modules import ModuleGuard
from aotdist.convention.dedupe import DedupePlan
from aotdist.errors import SignatureMismatch
from aotdist.program import PrimalIdx, Program
from aotdist.runtime.guards import place_in_storage
from aotdist.subclasses.protocol import Wrapper, plain_tensors, recipe_of

Signature: TypeAlias = Mapping[str, str]
"""The description of each part of a call, by the part's name."""

_HOOK = re.compile(r"(\b_\w*hooks)\[\d+\]")
_DEVICE = re.compile(r"device\(type='(?:cpu|cuda)'(?:, index=\d+)?\)")
_MAX_SHOWN = 4  # differences in one error


def signature_of(
    target: Any, captured: Captured, deduped: DedupePlan, program: Program[PrimalIdx], values: Values
) -> Signature:
    """The signature of a call.

    Args:
        target: the module or function.
        captured: the call.
        deduped: which of its tensors are the same.
        program: the program, with the call's tensors.
        values: writes values that are no text.
    """
    parts = {mode: str(value) for mode, value in captured.ambient._asdict().items()}
    del parts["kernels"]  # the builder chooses them for the machine that the artifact is for
    parts |= {"structure of the arguments": str(captured.arguments.spec)}
    for leaf in captured.arguments.leaves:
        if isinstance(leaf, ConstantLeaf):
            parts[f"`{leaf.path}`"] = repr(leaf.value)
    parts["same tensors"] = str(list(deduped.source))
    for slot, example in zip(program.ins, program.examples, strict=True):
        parts[f"`{slot.path}`"] = _described(example, values)
    for name, text in _environment(target, captured, values):
        steady = steady_path(name)
        parts[steady] = f"{parts[steady]}, {text}" if steady in parts else text
    return {name: _for_target(text, values.live.device_type) for name, text in parts.items()}


def steady_path(path: str) -> str:
    """`path` without the numbers of hooks, which PyTorch counts over all modules of a process."""
    return _HOOK.sub(r"\1[]", path)


def _environment(target: Any, captured: Captured, values: Values) -> Iterator[tuple[str, str]]:
    """The parts of a signature that are no tensors: modules, constants, functions, code."""
    environment = captured.environment
    yield from ModuleGuard(environment.modules, environment.state).described().items()
    for source, _ in environment.reached.constants:
        if not source.path.endswith("_hash"):  # each process hashes texts with a seed of its own
            yield f"`{source.path}`", repr(source.read())
    for source, value in environment.reached.identities:
        yield (
            f"`{source.path}`",
            f"{type(value).__name__} {getattr(value, '__qualname__', '')} {_code(value)}",
        )
    for source, first in environment.reached.ties:
        yield f"what `{source.path}` is", f"`{first.path}`"
    for claim in environment.rules:
        flags = _with_group_names(claim.flags, values)
        yield f"switches of {claim.rule.name}", json.dumps(flags)
    yield f"code of `{captured.name}`", _code(target)
    classes = sorted({type(module) for module in environment.modules.values()}, key=str)
    for cls in filter(is_users_class, classes):
        yield f"code of `{cls.__qualname__}`", _code(cls)
    installed = {cls.__module__.partition(".")[0] for cls in classes if not is_users_class(cls)}
    for package in sorted(installed):
        yield f"version of `{package}`", version_of(package)


def _described(tensor: torch.Tensor, values: Values) -> str:
    recipe, strided = recipe_of(tensor), tensor.layout is torch.strided
    text = f"{type(tensor).__name__} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    text += f" of strides {list(tensor.stride())}" if strided else f" {tensor.layout}"
    text += f" on {values.live.device_in_artifact(tensor.device)}"
    text += ", requires_grad" if tensor.requires_grad else ""
    text += "" if tensor.is_leaf else ", with a history"
    if isinstance(recipe, Wrapper):
        text += f", {json.dumps(values.written(recipe, type(tensor).__name__))}"
    return text


def storages_of(storages: tuple[tuple[PrimalIdx, int], ...], program: Program[PrimalIdx]) -> Signature:
    """Storage offset and bytes of the plain tensors for which the program depends on them."""
    return {
        f"storage of `{program.ins[idx].path}`": str(
            place_in_storage(plain_tensors(program.examples[idx])[leaf])
        )
        for idx, leaf in storages
    }


def _with_group_names(flags: Any, values: Values) -> Any:
    if isinstance(flags, tuple):
        return [_with_group_names(part, values) for part in flags]
    known = values.live.groups.get(flags) if isinstance(flags, str) else None
    return repr(flags) if known is None else values.written(known, "a process group")


def _code(value: Any) -> str:
    """A fingerprint of a function or class of the user's; empty for other code."""
    function = inspect.unwrap(value) if callable(value) else value
    code: types.CodeType | None = getattr(function, "__code__", None)
    known = is_users_class(function) if isinstance(function, type) else code and is_users_code(code)
    if not known:
        return ""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):  # typed at a prompt
        return ""
    if code is not None and code.co_name == "<lambda>":  # of which a line may have several
        columns = [place[2:] for place in code.co_positions() if place[2] is not None]
        text += str((min(columns), max(columns)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _for_target(text: str, device_type: str) -> str:
    """`text` with every device replaced by the target's type, without an index."""
    return _DEVICE.sub(f"device(type={device_type!r})", text)


def check_same(name: str, built: Signature, called: Signature) -> None:
    """Check that a call has the signature that an artifact was built for.

    Raises:
        SignatureMismatch: it has not; the parts that differ are named.
    """
    names = [part for part in {**built, **called} if built.get(part) != called.get(part)]
    if not names:
        return
    shown = "; ".join(
        f"{part}: built for {built.get(part, 'none')}, called with {called.get(part, 'none')}"
        for part in names[:_MAX_SHOWN]
    )
    more = f" (and {len(names) - _MAX_SHOWN} more)" if len(names) > _MAX_SHOWN else ""
    raise SignatureMismatch(
        f"the artifact of `{name}` does not fit this call: {shown}{more}",
        stage="store",
        fix="call it as it was built for, or build an artifact for this call too: `aotdist build`",
    )
