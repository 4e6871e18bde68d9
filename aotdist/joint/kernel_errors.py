"""What an operator's kernel says of arguments that do not fit; PyTorch's fakes say it in other words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from aotdist.capture.origins import current_module, note_kernels
from aotdist.torch_seam.modes import no_modes, torch_functions_off
from aotdist.torch_seam.operators import OpOverload, is_operator
from aotdist.torch_seam.symbols import SYMBOLIC, hint
from aotdist.torch_seam.trees import pytree

_ABOUT_ARGUMENTS = (RuntimeError, IndexError, ValueError, TypeError)
_MOST_ELEMENTS = 1 << 16
"""Larger tensors are stood for by one element, expanded: a check of sizes does not read them."""


def as_in_eager(error: Exception, func: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> Exception:
    """The error that the operator's kernel raises for tensors of such sizes; `error` if it raises none.

    Args:
        error: what its fake raised.
        func: the operator.
        args: its arguments.
        kwargs: likewise.
    """
    if type(error) not in _ABOUT_ARGUMENTS or not is_operator(func) or func.namespace != "aten":
        return error
    if torch.Tag.nondeterministic_seeded in func.tags:
        return error
    try:
        with no_modes(), torch_functions_off(), torch.no_grad():
            given, named = pytree.tree_map(_real, (args, dict(kwargs)))
            func(*given, **named)
    except Exception as eagers:
        if type(eagers) is type(error):
            if module := current_module():
                eagers.add_note(f"(in module `{module}`)")
            note_kernels(eagers)
            return eagers.with_traceback(None)
    return error


def _real(value: Any) -> Any:
    """Zeros in the place of a traced tensor, on the CPU; its value in this call in that of a symbol."""
    if isinstance(value, SYMBOLIC):
        return hint(value)
    if not isinstance(value, torch.Tensor):
        return torch.device("cpu") if isinstance(value, torch.device) else value
    size, stride = (tuple(map(hint, numbers)) for numbers in (value.size(), value.stride()))
    if value.numel() <= _MOST_ELEMENTS:
        return torch.empty_strided(size, stride, dtype=value.dtype).zero_()
    return torch.zeros((), dtype=value.dtype).expand(size)
