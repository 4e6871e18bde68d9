"""Programs that no flat graph of plain tensors can express."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from aotdist.aliasing.metadata import release_history
from aotdist.capture.arguments import UserFakes
from aotdist.capture.captured import Returned
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.facts import IsInput, ViewOfInput
from aotdist.subclasses.protocol import Plain, is_real, recipe_of
from aotdist.torch_seam.functional import is_fake
from aotdist.trace.trace import Traced


def unsupported(what: str, fix: str) -> UnsupportedProgram:
    """The error for a program that cannot be exported."""
    return UnsupportedProgram(what, stage="export", fix=fix)


def refuse_call(mod: Any, args: Any, kwargs: Any) -> None:
    """Refuse what `aot_export_module` cannot call.

    Raises:
        BadSettings: `mod` is no module, or an argument is no container of arguments.
    """
    if not isinstance(mod, nn.Module):
        raise BadSettings(
            f"`aot_export_module` takes a module, and was given a {type(mod).__name__}",
            stage="export",
            fix="pass a module, or use `aot_export_joint_simple` for a function",
        )
    refuse_arguments(args, kwargs, stage="export")


def refuse_arguments(args: Any, kwargs: Any = None, *, stage: str | None = None) -> None:
    """Refuse `args` that are no sequence, and `kwargs` that are no mapping.

    Raises:
        BadSettings: naming the argument.
    """
    if not isinstance(args, Sequence):  # a tensor would be taken row by row
        fix = "pass a tuple of arguments: `(x,)`"
        raise BadSettings(f"`args` is a {type(args).__name__}", stage=stage, fix=fix)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        fix = "pass a dictionary of arguments"
        raise BadSettings(f"`kwargs` is a {type(kwargs).__name__}", stage=stage, fix=fix)


def refuse_example(path: str, example: torch.Tensor) -> None:
    """Refuse an input that is a wrapper, or a stand-in of a trace around this one."""
    if not isinstance(recipe_of(example), Plain):
        fix = "export a program of plain tensors: a graph alone cannot take a wrapper apart"
        raise unsupported(f"`{path}` is a {type(example).__name__}", fix)
    if not is_real(example) and not is_fake(example):
        raise unsupported(f"`{path}` holds no data", "pass a real tensor, or a fake one of a mode of yours")


def refuse_mode_without_symbols(fakes: UserFakes) -> None:
    """Refuse the user's fake tensors, if their mode has no symbols for sizes.

    Raises:
        BadSettings: it has none.
    """
    mode, _ = fakes
    if mode is not None and mode.shape_env is None:
        raise BadSettings(
            "`dynamic_shapes` asks for symbols, and the mode of the fake tensors has none",
            stage="export",
            fix="make them in a `FakeTensorMode(shape_env=ShapeEnv())`",
        )


def refuse_strays(traced: Traced, num_given: int) -> None:
    """Refuse a program that reads a tensor which is neither argument nor state."""
    arguments = traced.graph.named_placeholders()
    returned = {
        fact.input if isinstance(fact, IsInput) else fact.base
        for fact in traced.facts.outputs
        if isinstance(fact, (IsInput, ViewOfInput))
    }
    for idx, slot in traced.program.ins.enumerate():
        if idx >= num_given and (arguments[slot].users or idx in returned):
            what = f"`{slot}` is reached from outside: neither argument nor parameter nor buffer"
            raise unsupported(what, "register it as a buffer of the module, or pass it as an argument")


def refuse_metadata_writes(traced: Traced) -> None:
    """Refuse inputs whose metadata is written in place, and results whose graph the program has freed."""
    facts = traced.facts
    for idx in sorted({*facts.reshaped(), *facts.switched_on}):
        what = f"`{traced.program.ins[idx]}` has its size, strides or history written in place"
        raise unsupported(what, "return the changed tensor instead")
    if any(write.op is release_history for write in facts.metadata_writes()):
        raise unsupported("the program frees the graph of a result by `autograd.grad`", "return it detached")


def refuse_returned(returned: Returned) -> None:
    """Refuse results that are one object in two places, and checks of data."""
    if returned.shares:
        raise unsupported("the program returns an object, which it makes, in two places", "return it once")
    for check in returned.log.checks():
        raise unsupported(
            f"the program checks the data of a tensor (`{check.error}`), and an exported graph "
            "raises no errors",
            "export it without the check (`torch._check_tensor_all`, or `validate_args`)",
        )


def check_loss(outs: Sequence[Any], loss: int | None) -> None:
    """Refuse results that do not fit `output_loss_index`."""
    if loss is None:
        return
    values = outs[: outs[-1].spec.num_leaves]
    chosen = values[loss] if type(loss) is int and 0 <= loss < len(values) else None
    if not isinstance(chosen, torch.Tensor) or not chosen.requires_grad or chosen.numel() != 1:
        raise BadSettings(
            f"result {loss!r} is no loss: that is a tensor of one number which requires grad",
            stage="export",
            fix="let `output_loss_index` be the position of the loss among the results",
        )
    for position, out in enumerate(values):
        if out is not chosen and isinstance(out, torch.Tensor) and out.requires_grad:
            raise unsupported(f"`out[{position}]` requires grad and is not the loss", "return it detached")
