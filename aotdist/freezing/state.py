"""The state of a frozen module: its parameters and buffers when it was frozen.

Nothing is copied: constants share memory with the module until its parameters are discarded. Version counters
show whether the module was written meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from aotdist.aliasing.overwrite import version_of
from aotdist.capture.modules import named_modules, state_tensors, swapped
from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import is_real, is_wrapper
from aotdist.torch_seam.modules import compiled_call_of, set_compiled_call


def unsupported(what: str, fix: str) -> UnsupportedProgram:
    """The error for a module, or a call of it, that cannot be frozen."""
    return UnsupportedProgram(what, stage="freeze", fix=fix)


class FrozenState:
    """Parameters and buffers of a module; tied ones have the first of their names."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = named_modules([("", module)])
        self._held = state_tensors(self._modules)
        self._parameters = {id(tensor) for tensor in module.parameters()}
        self._values = {one.path: one.value.detach() for one in self._held if not is_wrapper(one.value)}
        self._versions = {one.path: version_of(one.value) for one in self._held}
        self._shells: dict[str, torch.Tensor] = {}
        """Tensors without memory, in place of the parameters that were discarded, for later traces."""
        self._calls: dict[nn.Module, Any] = {}
        """What each module ran when called, before its parameters were discarded."""

    def named(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """The name that each tensor had when the module was frozen, by its present name.

        Args:
            tensors: parameters and buffers, or their shells, by their present names.

        Raises:
            UnsupportedProgram: one of them was not there when the module was frozen.
        """
        paths = {id(self._shells.get(one.path, one.value)): one.path for one in self._held}
        for name, tensor in tensors.items():
            if id(tensor) not in paths:
                raise unsupported(
                    f"`{name}` was not there when its module was frozen", "freeze the module again"
                )
        return {name: paths[id(tensor)] for name, tensor in tensors.items()}

    def value(self, path: str) -> torch.Tensor:
        """The value of a parameter or buffer.

        Raises:
            UnsupportedProgram: it was discarded.
        """
        found = self._values.get(path)
        if found is None:
            raise unsupported(
                f"this call needs `{path}`, which was discarded: no call before it needed the same of it",
                "freeze without `discard_parameters`, and discard them after each kind of call was made",
            )
        return found

    def refuse_writes(self) -> None:
        """Refuse a module whose state was written or replaced since it was frozen.

        Raises:
            UnsupportedProgram: naming the parameter or buffer.
        """
        for one in self._held:
            if one.path in self._shells:
                continue
            owner, key = one.places[0]
            is_same = owner.get(key) is one.value
            if not is_same or version_of(one.value) != self._versions[one.path]:
                what = f"`{one.path}` was {'written' if is_same else 'replaced'} after its module was frozen"
                raise unsupported(what, "freeze the module again: what is frozen shares memory with it")

    def refuse_discarded(self) -> None:
        """Refuse to copy a module whose parameters were discarded.

        Raises:
            UnsupportedProgram: they were.
        """
        if self._shells:
            what = "what was frozen with `discard_parameters` cannot be copied: its parameters are gone"
            raise unsupported(what, "copy the module before, and freeze both")

    def discard_parameters(self) -> None:
        """Free the memory of the parameters, and let calls of the module raise.

        Constants that are parameters, or views of parameters, keep their memory.
        """
        if self._shells:
            return
        for one in self._held:
            if id(one.value) in self._parameters and one.path in self._values:
                self._shells[one.path] = _shell(one.value)
                del self._values[one.path]
                one.value.grad = None
                if is_real(one.value):
                    one.value.data = torch.empty(0, dtype=one.value.dtype, device=one.value.device)
        for path, module in self._modules.items():
            kind = type(module).__name__
            name = f"`{path}` ({kind})" if path else f"this {kind}"
            refusal = functools.partial(_refuse_without_parameters, name)
            self._calls[module] = compiled_call_of(module)
            set_compiled_call(module, refusal)
            module.register_state_dict_pre_hook(refusal)

    @contextlib.contextmanager
    def traceable(self) -> Generator[None]:
        """Inside, the module can be traced although its parameters were discarded: it has shells instead."""
        gone = [one for one in self._held if one.path in self._shells]
        refusals = {module: compiled_call_of(module) for module in self._calls}
        try:
            for module, call in self._calls.items():
                set_compiled_call(module, call)
            with swapped(gone, [self._shells[one.path] for one in gone]):
                yield
        finally:
            for module, refusal in refusals.items():
                set_compiled_call(module, refusal)


def _refuse_without_parameters(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    """Runs in place of a call, or of `state_dict`, of a module without its parameters."""
    what = f"the parameters of {name} are gone: it was frozen with `discard_parameters`"
    raise unsupported(what, "call what `aotdist.freeze` returned, or make the module again")


def _shell(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the metadata of another and no memory, which is all that a trace reads."""
    if not is_real(tensor):
        return tensor
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    made.untyped_storage().resize_(0)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
