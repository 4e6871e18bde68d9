"""What users call: `compile`, `load`, `disable`, `mark_dynamic`, `reset`, `explain`."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import nn

from aotdist.artifacts.load import loading
from aotdist.capture.modules import refuse_script
from aotdist.codegen.backend import Compiler, is_eager
from aotdist.codegen.contract import Backend
from aotdist.compiled import EVERY_COMPILED, CompiledFunction, CompiledModule, ContainerCall, running_eagerly
from aotdist.compiling import Maker, compiling
from aotdist.errors import BadSettings
from aotdist.files import path_of
from aotdist.report.explain import Explained
from aotdist.report.summary import Report
from aotdist.settings import Dynamic, Settings, settings_of
from aotdist.step.whole import WholeStep
from aotdist.subclasses.protocol import container_rule, module_rules
from aotdist.torch_seam.dynamo import is_of_dynamo, keep_from_dynamo
from aotdist.torch_seam.modules import (
    compiled_call_of,
    set_compiled_call,
    take_compiled_call_off,
)
from aotdist.torch_seam.optimizers import method_of_schedule
from aotdist.torch_seam.tensors import mark_dims

M = TypeVar("M", bound=nn.Module)
F = TypeVar("F", bound=Callable[..., Any])

_NOT_GIVEN: Any = object()

_OF_TORCH_COMPILE: Mapping[str, str] = {
    "fullgraph": "leave it out: a call is always compiled as one graph, or refused",
    "mode": 'leave it out: "reduce-overhead" is `settings={"cuda_graphs": True}`, and "max-autotune" is '
    "`torch._inductor.config.max_autotune = True`",
    "options": "pass `settings`, an `aotdist.Settings` or a mapping of its fields; what is Inductor's own is "
    "set in `torch._inductor.config`",
    "disable": 'pass backend="eager", or call the program under `aotdist.disable()`',
}
"""Arguments of `torch.compile` that do not exist here, and what to use instead."""


@overload
def compile(  # pyright: ignore[reportOverlappingOverload]  # a module is callable too, and comes back as itself
    target: M,
    *,
    backend: str | Compiler | Backend = ...,
    dynamic: Dynamic | None = ...,
    settings: Settings | Mapping[str, Any] | None = ...,
) -> M: ...
@overload
def compile(
    target: Callable[..., Any],
    *,
    backend: str | Compiler | Backend = ...,
    dynamic: Dynamic | None = ...,
    settings: Settings | Mapping[str, Any] | None = ...,
) -> CompiledFunction: ...
@overload
def compile(
    *,
    backend: str | Compiler | Backend = ...,
    dynamic: Dynamic | None = ...,
    settings: Settings | Mapping[str, Any] | None = ...,
) -> Callable[[Callable[..., Any]], CompiledFunction]: ...
def compile(
    target: Any = _NOT_GIVEN,
    *,
    backend: str | Compiler | Backend = "auto",
    dynamic: Dynamic | None = None,
    settings: Settings | Mapping[str, Any] | None = None,
    **others: Any,
) -> Any:
    """Compile a module in place, or a function into a callable; the work is done at the first call.

    The same module is returned: its type, parameters, `state_dict` keys and hooks are untouched, only its
    call is compiled. `.source`, `.graphs` and `.explain()` are on the result. Without a target, the result is
    a decorator: `@aotdist.compile(backend="fx")`.

    Args:
        target: an `nn.Module` (plain, FSDP2, tensor parallel, in DDP or Fabric) or any callable.
        backend: `fx` (bit-equal to eager), `inductor`, `auto` (`inductor` where there is a C++ compiler, and
            for graphs that it compiles; else `fx`), `triton` (kernels of our own, for GPUs), or a function
            `(graph_module, fake_arguments)` that returns a callable. `eager` compiles nothing: it returns the
            function itself, and a module that was compiled in place is compiled no more.
        dynamic: `Settings.dynamic`: `"auto"`, True or False; None leaves it to `settings`.
        settings: a `Settings`, a mapping of its fields, or None for `Settings.from_environment()`.
        others: other arguments of `torch.compile` are refused, with what to use instead.

    Raises:
        BadSettings: `target` is not callable, or a class; the backend, a setting or an argument is unknown.
        UnsupportedProgram: at the first call: the program cannot be compiled ahead of time. Nothing
            has been changed then.
    """
    for name in others:
        raise BadSettings(
            f"`{name}` is not an argument of `aotdist.compile`",
            fix=_OF_TORCH_COMPILE.get(name, "it takes `backend`, `dynamic` and `settings`"),
        )
    if target is _NOT_GIVEN:
        return functools.partial(compile, backend=backend, dynamic=dynamic, settings=settings)
    _require_target(target, "compile")
    if dynamic is not None:
        settings = replace(settings_of(settings), dynamic=dynamic)
    if is_eager(backend):
        return _as_written(target)
    keep_from_dynamo(_own_call_of)
    make = compiling(backend, settings)
    if isinstance(target, nn.Module):
        return _calling(target, make)
    return CompiledFunction(target, make, lambda: WholeStep(target, make))


def _require_target(target: Any, verb: str) -> None:
    """Raise `BadSettings` if `target` is neither a module nor a function."""
    if isinstance(target, type):
        raise BadSettings(
            f"cannot {verb} the class {target.__name__}",
            fix=f"pass a module, `{target.__name__}(...)`, or a function",
        )
    if not callable(target):
        raise BadSettings(f"cannot {verb} a {type(target).__name__}", fix="pass a module or a function")
    if (name := method_of_schedule(target)) is not None:
        raise BadSettings(
            f"cannot {verb} `{name}`: what a schedule computes are no tensors",
            fix="call it in the step that is compiled, or as it is",
        )


def _as_written(target: Any) -> Any:
    """The function behind a compiled one, or the module, with its own call again."""
    if not isinstance(target, nn.Module):
        return target.__wrapped__ if isinstance(target, CompiledFunction) else target
    container, call = container_rule(target), compiled_call_of(target)
    if container is not None:
        _as_written(container[1])
    if isinstance(call, CompiledModule):
        call.hide()
    take_compiled_call_off(target)
    return target


@overload
def load(path: str | Path, target: M) -> M: ...  # pyright: ignore[reportOverlappingOverload]  # as for `compile`
@overload
def load(path: str | Path, target: Callable[..., Any]) -> CompiledFunction: ...
def load(path: str | Path, target: Any) -> Any:
    """Run a module or a function by an artifact that `aotdist build` made; nothing is compiled.

    As with `compile`, the same module is returned, and only its call is replaced. A call that the artifact
    was not built for is refused, with what differs.

    Args:
        path: of the artifact.
        target: the module, or the function, that it was built from.

    Raises:
        BadSettings: `target` is not callable, or a class; or `path` is no path.
        BadArtifact: the file is damaged, or was built by other versions, for another target, or for another
            number of ranks.
        SignatureMismatch: at a call: the artifact was built for other calls.
    """
    _require_target(target, "run")
    return _calling(target, loading(path_of(path)))


def _calling(target: Any, make: Maker) -> Any:
    """`target` with its call replaced, if it is a module, or else a compiled function."""
    if not isinstance(target, nn.Module):
        return CompiledFunction(target, make)
    _compile_in_place(target, make)
    return target


def mark_dynamic(tensor: torch.Tensor, *dims: int) -> None:
    """Let the sizes of some dimensions differ from call to call without recompilation.

    Sizes of 0 and 1 are always compiled for separately. Marks of `torch._dynamo.mark_dynamic` count too.

    Args:
        tensor: to be passed to a compiled call; parameters and buffers may be marked too.
        dims: the dimensions; negative ones count from the end.

    Raises:
        BadSettings: this is no tensor, or it has no such dimension.
        UnsupportedProgram: at the first call: the program only works for the size at hand.
    """
    if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # not for the untyped
        raise BadSettings(f"cannot mark sizes of a {type(tensor).__name__}", fix="pass a tensor")
    for dim in dims:
        if not hasattr(dim, "__index__") or not -tensor.dim() <= dim < tensor.dim():
            raise BadSettings(
                f"a tensor of size {list(tensor.shape)} has no dimension {dim!r} to mark as dynamic",
                fix=f"name dimensions from {-tensor.dim()} to {tensor.dim() - 1}",
            )
    mark_dims(tensor, [dim % tensor.dim() for dim in dims])


def _compile_in_place(module: nn.Module, make: Maker) -> CompiledModule:
    """Set the compiled call of a module; of a container (DDP, Fabric), that of the module inside as well."""
    container = container_rule(module)
    if container is not None:
        rule, contained = container
        compiled = _compile_in_place(contained, make)
        set_compiled_call(module, ContainerCall(module, rule, compiled))
        return compiled
    module_rules(module)
    refuse_script("", module)  # a traced module keeps its own call
    call = CompiledModule(module, make)
    set_compiled_call(module, call)
    return call


def compiled_call(target: Any) -> Explained:
    """The compiled call of what `compile`, `train_step` or `freeze` returned.

    Raises:
        BadSettings: it was not compiled.
    """
    target = target.__func__ if isinstance(target, types.MethodType) else target
    call = compiled_call_of(target) if isinstance(target, nn.Module) else target
    call = call.contained if isinstance(call, ContainerCall) else call
    if not isinstance(call, Explained):
        if is_of_dynamo(target):
            raise BadSettings(
                "this was compiled by `torch.compile`, graph by graph",
                fix='ask each of `aotdist.dynamo.regions()`, which are those of backend="aotdist"',
            )
        raise BadSettings(
            f"this {type(target).__name__} was not compiled",
            fix='call `aotdist.compile` on it first; backend="eager" compiles nothing',
        )
    return call


def _own_call_of(module: nn.Module) -> CompiledModule | ContainerCall | None:
    call = compiled_call_of(module)
    return call if isinstance(call, CompiledModule | ContainerCall) else None


def explain(target: Any, *, html: str | Path | None = None) -> Report:
    """What compiling `target` produced; the same as `target.explain()`.

    Args:
        target: a module or function that went through `compile`; or what `train_step` or `freeze` returned.
        html: a file to write as well: a page of its own, without a network, with every graph, what is saved,
            collectives, kernels and the printed call. Call it on all ranks: rank 0 writes the page, and it
            says how the others differ.

    Returns:
        a report, to be printed.

    Raises:
        BadSettings: `target` did not go through `compile`, or `html` cannot be written.
    """
    return compiled_call(target).explain(html=html)


@overload
def disable(target: F) -> F: ...
@overload
def disable() -> AbstractContextManager[None]: ...
def disable(target: Any = None) -> Any:
    """Run eagerly: compiled functions called inside are not compiled and do not look for artifacts.

    Args:
        target: a function to wrap; without it, the result is a context manager.
    """
    return running_eagerly() if target is None else running_eagerly()(target)


def reset(target: Any = None) -> None:
    """Forget the artifacts of `target`, or of everything that was compiled; the next call compiles again."""
    for compiled in [compiled_call(target)] if target is not None else list(EVERY_COMPILED):
        compiled.reset()
