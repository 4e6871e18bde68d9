"""Errors that PyTorch raises while a program is traced, as errors of ours with what to do about them."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from aotdist.aliasing.view_log import ViewLog
from aotdist.aliasing.views import detached_since, reshaped_since
from aotdist.errors import AotdistError, UnsupportedProgram
from aotdist.origins import current_source_line, raised_at
from aotdist.program import Slot
from aotdist.torch_seam.dynamo import is_compiling_a_frame
from aotdist.torch_seam.functional import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from aotdist.torch_seam.groups import ObjectsExchangedError
from aotdist.torch_seam.symbols import is_undecided
from aotdist.trace.operators.fakes import CANNOT_VIEW


def unsupported(what: str, fix: str, where: str | None = None) -> UnsupportedProgram:
    """An error of this stage."""
    return UnsupportedProgram(what, where=where, stage="joint", fix=fix)


def refusal(what: str, fix: str) -> UnsupportedProgram:
    """An error that names the user's line that is being traced."""
    return unsupported(what, fix, current_source_line() or None)


_ASKS_FOR_DATA = (
    "tracing tensor",
    "data is not allocated yet",
    ".numpy() is not supported",
    "on a tensor with unallocated storage",
    "FunctionalTensor.__format__",
)
"""How errors of PyTorch's say that a traced tensor has no data."""

_FIX = (
    "or move that part out of the compiled function, or use `Settings(is_compiling=True)` if the line is not "
    "reached where `torch.compiler.is_compiling()` is true, or "
    '`torch.compile(..., backend="aotdist")`, which compiles what comes before and after it'
)
_FIX_BEHIND_DYNAMO = (
    "or move that part into a function with `@torch.compiler.disable`: what comes before and after it is "
    "compiled then"
)

_SYMBOL = re.compile(r"\bz?uf?\d+\b|[Ss]ym(?:bol|py|Int|Float|Bool)|[Uu]nbacked|\b[Hh]int")
"""How PyTorch speaks of numbers that depend on data."""

_NO_ADDRESS = "Cannot access data pointer of Tensor"
"""How PyTorch says that a traced tensor has no memory."""

_NO_FAKE = re.compile(r"There was no fake impl registered for <CustomOpDef\((\S+)\)>")
"""How PyTorch says of a user's operator that it can only be computed with data."""

_LOST_HISTORY = "new_fn INTERNAL ASSERT FAILED"
"""How autograd says that it would make a view's history again, and its base has none any more."""

_DOES_NOT_FIT = re.compile(r"[Ff]unction (\S+) returned an (?:invalid gradient|incorrect number)")
"""How autograd says of which function the gradients do not fit."""

SPENT = "Trying to backward through the graph a second time"
"""How autograd says that it has freed what it saved."""


@contextmanager
def naming_failures(log: ViewLog | None = None, line: Callable[[], str] = str) -> Generator[None]:
    """Errors that data, or a history, is missing in the trace become ours, with the user's line.

    Args:
        log: the program's views. If the base of one was reshaped in place since, autograd makes its history
            again by the view's own operator, which may not fit the new shape.
        line: says where it may have been, if no line of the user's ran.
    """
    try:
        yield
    except AotdistError:
        raise
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        RuntimeError,
        TypeError,
        AssertionError,
    ) as error:
        where = raised_at(error.__traceback__) or line()
        if _LOST_HISTORY in str(error):
            raise detached_since(where) from error
        is_outdated = log is not None and any(change.reshapes() for change in log.changes)
        if is_outdated and CANNOT_VIEW in str(error):
            raise reshaped_since(str(error), where) from error
        if (named := _what_and_fix(error)) is None:
            raise
        raise unsupported(*named, where) from error


def _what_and_fix(error: Exception) -> tuple[str, str] | None:
    """What an error of PyTorch's says of a program that is traced, and a fix; None for any other error."""
    if is_undecided(error):
        return (
            "what the program does depends on a number, or a size, that is read off a tensor",
            "choose by `torch.where` or `torch.cond`, say what always holds (`torch._check(count > 0)`), "
            "keep the number itself (`.item()`; `float`, `int` and `bool` need its value at once), "
            + _elsewhere(),
        )
    if isinstance(error, ObjectsExchangedError):
        return (
            "the program exchanges Python objects with other ranks (`all_gather_object`; "
            "`DTensor.from_local(run_check=True)` does so)",
            "do it outside of the compiled function, or leave `run_check` off",
        )
    if _NO_ADDRESS in str(error):
        return (
            "a tensor's address is needed (`.data_ptr()`, `copy.deepcopy` of a tensor or a module) while "
            "the program is captured",
            "do so outside of the compiled function, or `clone()` inside of it",
        )
    no_fake = _NO_FAKE.match(str(error))
    if no_fake or isinstance(error, UnsupportedOperatorException):
        operator = no_fake[1] if no_fake else error.func  # type: ignore[attr-defined]
        return (
            f"`{operator}` cannot be computed without data, and there is none while the program is captured",
            "say which sizes and dtypes its results have, if it is an operator of yours "
            "(`torch.library.register_fake`), or move it out of the compiled function",
        )
    match error:
        case DynamicOutputShapeException():
            what = f"the shape of the result of `{error.func}` depends on data"
        case DataDependentOutputException():
            what = f"`{error.func}` reads a tensor's data, which does not exist while the program is captured"
        case _ if any(text in str(error) for text in _ASKS_FOR_DATA):
            what = "a tensor's value is needed (`.item()`, `.numpy()`, `if`) while the program is captured"
        case _:
            return None
    return what, f"keep it a tensor (`torch.where` for a branch, a mask for a shape), {_elsewhere()}"


def _elsewhere() -> str:
    """What else to do where a program needs data."""
    return _FIX_BEHIND_DYNAMO if is_compiling_a_frame() else _FIX


def is_of_the_program(error: Exception) -> bool:
    """Whether an error does not mention a symbol, so that it would be raised for any numbers."""
    own = (RuntimeError, ValueError, LookupError, Warning)
    return (
        type(error) is not NotImplementedError and isinstance(error, own) and not _SYMBOL.search(str(error))
    )


def asks_for_data(refused: UnsupportedProgram) -> bool:
    """Whether a program was refused because a number, or a size, depends on data."""
    return isinstance(refused.__cause__, (DataDependentOutputException, DynamicOutputShapeException))


_NO_BACKWARD = (
    "the program has no backward, as in eager ({})",
    "call it under `torch.no_grad()`, or on tensors that do not require grad",
)
_MIXED = re.compile(r"[\s\S]*got mixed torch\.Tensor and DTensor[\s\S]*")
"""How DTensor says of some (`split`) that their backward makes plain zeros."""
_OF_AUTOGRAD: Mapping[re.Pattern[str], tuple[str, str]] = {
    re.compile(r"derivative for \S+ is not implemented"): _NO_BACKWARD,  # `_foreach_copy_`
    _MIXED: (
        "one operator (`split`) or autograd function gives several DTensors, and some get no gradient with "
        "the others, for which autograd makes plain zeros; or the program returns one and computes with "
        "another: there is a backward for all at once only ({})",
        "make each by an operator of its own (`narrow`), return a clone of it, or call "
        "`ctx.set_materialize_grads(False)` in the function",
    ),
    re.compile(r"[\s\S]*modified by an inplace operation[\s\S]*?(?=\s*Hint|\s*$)"): (
        "the backward of the program fails, as in eager: a tensor that it needs was written in place after "
        "its use ({})",
        "write a clone, or write before the use; call it under `torch.no_grad()` if it has no backward",
    ),
    re.compile(r"[\s\S]*a saved tensor that has been detached in-place[\s\S]*"): (
        "a tensor is detached in place (`detach_`) that a write of it with history needs, which is done to "
        "the caller's tensor too ({})",
        "detach a tensor of its own (`x = x.detach()`), or write under `torch.no_grad()`",
    ),
    re.compile(SPENT): (
        "the program asks autograd for gradients itself, and returns a tensor whose graph was already freed "
        "by its own `autograd.grad` ({})",
        "say `retain_graph=True` there, or return a detached tensor (`loss.detach()`)",
    ),
}
"""Errors of a backward, each with what it says of the program (`{}` is what was matched), and a fix."""


@contextmanager
def naming_failures_of_backward(*, of_assumed: bool, line: Callable[[], str] = str) -> Generator[None]:
    """As `naming_failures`, for a backward; what autograd refuses becomes an error of ours, too.

    Args:
        of_assumed: whether it starts from gradients with the metadata that a trace assumes, rather than from
            those of a call.
        line: the user's line of what asked last for a number that depends on data.
    """
    with _noting_when(), naming_failures(line=line):
        try:
            yield
        except AotdistError:
            raise
        except RuntimeError as error:
            if isinstance(error, NotImplementedError):
                what, fix = _NO_BACKWARD
                raise unsupported(what.format(error), fix) from error
            for pattern, (what, fix) in _OF_AUTOGRAD.items():
                if (of_assumed or pattern is not _MIXED) and (found := pattern.search(str(error))):
                    raise unsupported(what.format(found[0]), fix) from error
            if found := _DOES_NOT_FIT.match(str(error)):
                raise _does_not_fit(found[1], error) from error
            raise


@contextmanager
def _noting_when() -> Generator[None]:
    """Adds to an error of the user's code why it comes now, and not when `backward()` is called."""
    try:
        yield
    except AotdistError:
        raise
    except Exception as error:
        error.add_note(
            "aotdist traces the backward when it compiles a call: hooks and user-defined backwards run then. "
            "Register a hook that depends on where `backward()` is called outside of what is compiled."
        )
        raise


def _does_not_fit(function: str, error: RuntimeError) -> UnsupportedProgram:
    """An error for a gradient that does not fit: of a user's function, which is wrong, or of autograd's own.

    The names of the latter end in a number; for them, a tensor was reshaped.
    """
    if not function.endswith("Backward"):
        return reshaped_unrecorded(str(error))
    return unsupported(
        f"the backward of an autograd function gives gradients that do not fit, in eager too ({error})",
        "return one for each input, and of its size; call it under `torch.no_grad()` if it needs none",
    )


def reshaped_unrecorded(how: str) -> UnsupportedProgram:
    """An error for a gradient that has other sizes than autograd knows of; `how` says which."""
    return unsupported(
        "the sizes of a tensor with history are changed in place under `no_grad`, or by `.data`, so that its "
        f"gradient does not fit any more ({how})",
        "use the function that is not in place (`t` for `t_`), or change them with grad mode on",
    )


class AccumulatesInside(UnsupportedProgram):
    """The program is a step: inputs get gradients, or an optimizer reads these, or a schedule steps."""


def accumulates_inside(what: str) -> AccumulatesInside:
    """An error for a step that is compiled as a part of something else; `what` says what it does to what."""
    fix = "compile a function that calls the module, the whole step, and not the module"
    return AccumulatesInside(what, where=current_source_line() or None, stage="joint", fix=fix)


def steps_inside(step: Callable[..., None], schedule: Any, *_: Any, **__: Any) -> None:
    """Refuse the step of a schedule: what it changes in Python would only be changed while it is traced."""
    raise accumulates_inside(f"a {type(schedule).__name__} steps inside of the compiled module")


def retyped_unrecorded(slot: Slot, known: torch.dtype, given: torch.dtype) -> UnsupportedProgram:
    """An error for a gradient of another dtype than the input has when the program's node takes it."""
    return unsupported(
        f"the `.data` of `{slot}`, which gets a gradient, is given another dtype ({given} for {known})",
        f"change `{slot}` before the call, or use its conversion (`{slot}.to({given})`) inside",
    )


def needs_value(function: str) -> UnsupportedProgram:
    """An error for a function that computes with the value of a traced number, or takes it as a size."""
    return refusal(
        f"`{function}` needs the value of a number that differs from call to call (a learning rate, or what "
        "follows from a step count)",
        fix="pass it as a tensor, or compute with it in Python before",
    )


def wants_number(conversion: str) -> UnsupportedProgram:
    """An error for a conversion of a traced number to one of Python's own."""
    return refusal(
        f"`{conversion}(tensor)` has to be a number of Python's at once, and it differs from call to call",
        fix="read it by `tensor.item()`, and compute with it by operators of Python, and by the functions of "
        "`math`",
    )


def only_at_a_call() -> UnsupportedProgram:
    """An error for a use of a traced number that needs its value."""
    return refusal(
        "the program needs the value of a number that is only known at a call (a learning rate, or what "
        "follows from a step count)",
        fix="compute with it by operators of Python, and by the functions of `math`",
    )
