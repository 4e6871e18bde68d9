"""`aotdist.freeze`: an inference program of a module whose parameters and buffers are constants."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from aotdist.artifacts.cache.backend import caching
from aotdist.capture.arguments import read_arguments
from aotdist.capture.captured import UserCall
from aotdist.codegen.backend import Compiler, resolve
from aotdist.codegen.contract import Backend
from aotdist.codegen.fx import FxBackend
from aotdist.compiled import Compiled
from aotdist.compiling import Compiling
from aotdist.errors import BadSettings
from aotdist.export.refusals import refuse_arguments
from aotdist.freezing import batch_norm
from aotdist.freezing.channels_last import lay_channels_last
from aotdist.freezing.folding import Constants
from aotdist.freezing.program import Edit, frozen_program
from aotdist.freezing.state import FrozenState, unsupported
from aotdist.origins import short_tracebacks
from aotdist.runtime.artifact import Artifact, Artifacts
from aotdist.settings import Settings, settings_of
from aotdist.subclasses.protocol import communicates_around, module_rules
from aotdist.torch_seam.trees import pytree


class Frozen(Compiled):
    """A frozen module: a callable for inference, which compiles itself for each kind of call.

    Constants are computed once for all calls. `.source`, `.graphs` and `.explain()` are those of all compiled
    callables.
    """

    def __init__(
        self,
        module: nn.Module,
        backend: Backend,
        settings: Settings,
        edits: Sequence[Edit],
        *,
        discard_parameters: bool,
    ) -> None:
        super().__init__(lambda: module, module, self._make_for)
        self._module, self._backend = module, backend
        self._state = FrozenState(module)
        self._constants = Constants(self._state)
        self._compile = Compiling(backend, settings, else_eager=False)
        self._settings, self._edits = settings, edits
        self._discards = discard_parameters

    @property
    def constant_bytes(self) -> int:
        """Bytes of memory that the constants of all calls hold, including parameters."""
        return self._constants.num_bytes()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns, detached.

        Raises:
            UnsupportedProgram: an argument requires grad in grad mode; or the module was written meanwhile.
        """
        self._state.refuse_writes()
        _refuse_gradients(args, kwargs)
        with torch.no_grad():
            return super().__call__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Frozen:
        """A copy of the module, frozen with the same options; it computes its own constants, and recompiles.

        Raises:
            UnsupportedProgram: the parameters were discarded; or the module was written meanwhile.
        """
        self._state.refuse_writes()
        self._state.refuse_discarded()
        module = copy.deepcopy(self._module, memo)
        frozen = Frozen(module, self._backend, self._settings, self._edits, discard_parameters=self._discards)
        memo[id(self)] = frozen
        return frozen

    @short_tracebacks
    def compile_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Compile for a call with these arguments, without calling."""
        _refuse_gradients(tuple(args), kwargs)
        with torch.no_grad():
            self._made(tuple(args), kwargs)

    def discard_parameters(self) -> None:
        """Free the module's parameters; constants of the calls compiled so far stay.

        A later kind of call is refused if it needs a constant that no earlier call has computed. The module
        itself cannot be called any more.
        """
        self._state.discard_parameters()

    def _make_for(self, call: UserCall, artifacts: Artifacts) -> Artifact | None:
        """See `aotdist.api.Maker`."""
        _refuse_training(call.target)
        program = frozen_program(
            call.target, call.args, call.kwargs, self._state, self._constants, self._edits, self._settings
        )
        artifact = self._compile(replace(call, target=program.holder, run=program), artifacts)
        if self._discards:
            self.discard_parameters()
        return artifact


def freeze(
    module: nn.Module,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    backend: str | Compiler | Backend = "auto",
    settings: Settings | Mapping[str, Any] | None = None,
    fold_batch_norms: bool | None = None,
    channels_last: bool | None = None,
    discard_parameters: bool = False,
) -> Frozen:
    """An inference program of a module in evaluation mode, with its parameters and buffers as constants.

    What depends on them alone (casts, transposes, quantised weights, tables) is computed once, by the
    operators of the program itself, unless it takes more than 1 MiB and more memory than the parameters it is
    computed from. The module stays as it is, unless its parameters are discarded. Until then, constants share
    its memory: a call after one of its parameters was written is refused.

    With the backend `fx` results are eager's bit for bit. Folded batch norms and channels last change the
    rounding, so `fx` applies them only when asked to.

    Args:
        module: a plain module in evaluation mode.
        args: positional arguments to compile for now; by default the first call compiles.
        kwargs: keyword arguments to compile for.
        backend: as for `aotdist.compile`.
        settings: as for `aotdist.compile`.
        fold_batch_norms: fold batch norms into the convolutions and linear layers before them. None means
            True, but False for the backend `fx`.
        channels_last: run convolutions in channels last; results keep eager's strides. None means the same.
        discard_parameters: free the module's parameters once the first call is compiled, so that memory holds
            the constants alone. The module itself cannot be called any more then.

    Returns:
        a callable that takes what the module takes; it has `.source`, `.graphs`, `.explain()` and
        `.constant_bytes`.

    Raises:
        BadSettings: `module` is no module, `args` are no sequence or `kwargs` no mapping, or the backend or a
            setting is unknown.
        UnsupportedProgram: a part of the module is in training mode; or, at a call, the program writes its
            state, an argument requires grad in grad mode, or the program cannot be compiled ahead of time.
    """
    _check_module(module)
    refuse_arguments(() if args is None else args, kwargs, stage="freeze")
    chosen = settings_of(settings)
    resolved = resolve(backend)
    rounds = not isinstance(resolved, FxBackend)
    edits: list[Edit] = []
    if rounds if fold_batch_norms is None else fold_batch_norms:
        edits.append(batch_norm.fold_batch_norms)
    if rounds if channels_last is None else channels_last:
        edits.append(lay_channels_last)
    frozen = Frozen(module, caching(resolved, chosen), chosen, edits, discard_parameters=discard_parameters)
    if args is not None or kwargs is not None:
        frozen.compile_for(args or (), kwargs or {})
    return frozen


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise BadSettings(f"cannot freeze a {type(module).__name__}", stage="freeze", fix="pass a module")
    if communicates_around(module) or module_rules(module):
        raise unsupported(
            f"this {type(module).__name__} communicates in hooks: what it has is spread over ranks",
            "freeze the plain module on each rank, or compile without freezing: `aotdist.compile`",
        )
    _refuse_training(module)


def _refuse_training(module: nn.Module) -> None:
    for path, part in module.named_modules():
        if part.training:
            name = f"`{path}` ({type(part).__name__})" if path else f"this {type(part).__name__}"
            what = f"{name} is in training mode, and what is frozen is never trained"
            raise unsupported(what, "call `eval()` on the module first")


def _refuse_gradients(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if not torch.is_grad_enabled():
        return
    flat = pytree.tree_leaves((args, kwargs))
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in flat):
        arguments, tensors, _ = read_arguments(args, kwargs)
        pairs = zip(arguments.tensor_paths(), tensors, strict=True)
        path = next(path for path, tensor in pairs if tensor.requires_grad)
        what = f"`{path}` requires grad, and nothing that is frozen is differentiated"
        raise unsupported(what, "call it under `torch.no_grad()`, or pass it detached")
