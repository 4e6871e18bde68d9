"""The torch-function mode of a trace: closed-over real tensors, assigned attributes, questions to autograd.

The dispatcher sees none of these.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from aotdist.aliasing.metadata import assign_data
from aotdist.aliasing.view_mode import ViewMode
from aotdist.aliasing.views import is_another_name
from aotdist.capture.code import is_users_class
from aotdist.capture.leaked_tensors import text_of
from aotdist.capture.source import Source
from aotdist.errors import UnsupportedProgram
from aotdist.program import PrimalIdx
from aotdist.subclasses.protocol import is_real
from aotdist.torch_seam.autograd import in_backward
from aotdist.torch_seam.functional import FunctionalTensor, rebind
from aotdist.torch_seam.modes import class_functions_are_on
from aotdist.torch_seam.operators import HigherOrderOperator
from aotdist.torch_seam.tensors import seen_by_modes
from aotdist.torch_seam.trees import pytree
from aotdist.trace.classes import ask_classes
from aotdist.trace.failures import accumulates_inside, refusal
from aotdist.trace.numbers import python_numbers
from aotdist.trace.operators import corrections
from aotdist.trace.recorder import Recorder
from aotdist.trace.stand_ins import Inputs

_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad
_CHANGE_GRAD = {_GRAD.__set__: "assigned", _GRAD.__delete__: "deleted"}
_BASE: Any = torch.Tensor._base
_ASKS_AUTOGRAD = {getattr(torch.Tensor, name).__get__: name for name in ("is_leaf", "grad_fn", "_version")}
_RETAINS_GRAD: Any = torch.Tensor.retains_grad
_UNANSWERED: Mapping[Any, str] = {
    _BASE.__get__: "_base",
    _RETAINS_GRAD.__get__: "retains_grad",
    torch.Tensor._is_view: "_is_view()",
    torch.Tensor.is_inference: "is_inference()",
    torch.is_inference: "is_inference()",
}
"""Properties of an input that its stand-in cannot answer for."""
_RUN_BACKWARD = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})
_RESIZE_STORAGE = torch.ops.inductor.resize_storage_bytes_
_LOOK_AT_STRIDES = frozenset({torch.Tensor.contiguous, torch.Tensor.is_contiguous, torch.Tensor.stride})


class CaptureMode(TorchFunctionMode):
    """Puts stand-ins in the place of real tensors that the function closes over.

    Args:
        recorder: knows which tensors need a stand-in.
        inputs: the stand-ins.
        stand_in: gives the stand-in of a tensor; makes one for a tensor that has none yet.
        view_mode: gets writes of storage and history, and views that only this mode sees.
        higher_order: runs operators that take functions.

    Attributes:
        ran_backward: whether the program asked autograd for gradients itself.
        num_hooks: how many hooks of gradients the user's code has registered.
        retained: inputs whose gradients the program retains.
        asked: see `Facts.asked`.
    """

    def __init__(
        self,
        recorder: Recorder,
        inputs: Inputs,
        stand_in: Callable[[torch.Tensor], torch.Tensor],
        view_mode: ViewMode,
        *,
        higher_order: Callable[[HigherOrderOperator, tuple[Any, ...], Mapping[str, Any], CaptureMode], Any],
    ) -> None:
        super().__init__()
        self._recorder = recorder
        self._inputs = inputs
        self._stand_in = stand_in
        self._higher_order = higher_order
        self._view_mode, self._log = view_mode, view_mode.log
        self.ran_backward, self.num_hooks = False, 0
        self.retained: dict[PrimalIdx, None] = {}
        self.asked: dict[tuple[PrimalIdx, str], bool | int] = {}
        self._instead: Mapping[Any, Callable[..., Any]] = {
            torch.Tensor.detach_: self._detach,
            torch.detach_: self._detach,
            torch.Tensor.requires_grad_: self._require_grad,
            _REQUIRES_GRAD.__set__: self._require_grad,
            _GRAD.__get__: self._gradient,
            _DATA.__get__: view_mode.data_of,
            _DATA.__set__: self._assign_data,
            torch.Tensor.register_hook: self._hook_gradient,
            torch.Tensor.register_post_accumulate_grad_hook: self._hook_accumulation,
            torch.Tensor.retain_grad: self._retain_grad,
            torch.Tensor.untyped_storage: _storage_of,
            torch.Tensor.storage: _storage_of,
            _RESIZE_STORAGE: _refuse_resize,
            _RESIZE_STORAGE.default: _refuse_resize,
            torch.Tensor.__repr__: _described,
            torch.Tensor.__format__: _formatted,
            **corrections.functions(of_bits=recorder.options.of_bits, target=recorder.options.target),
            **(python_numbers.INSTEAD if recorder.unbacked is not None else {}),
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self._view_mode.settle()
        swapped_args, swapped_kwargs = _each(self.swap, args, kwargs)
        if func in _ASKS_AUTOGRAD and _is_asked_by_the_program(inspect.currentframe()):
            self._note_question(_ASKS_AUTOGRAD[func], swapped_args[0])
        if func in _UNANSWERED and _is_asked_by_the_program(inspect.currentframe()):
            self._refuse_question(func, swapped_args[0])
        if func == _GRAD.__get__:
            self._refuse_optimizer(inspect.currentframe(), swapped_args[0])
        if types and class_functions_are_on():
            with self:  # functions that the class calls come here, too
                return ask_classes(func, types, swapped_args, swapped_kwargs)
        if func in _LOOK_AT_STRIDES and _is_asked_by_the_program(inspect.currentframe()):
            self._recorder.asked_for_strides(swapped_args[0])
        self.ran_backward = self.ran_backward or func in _RUN_BACKWARD
        if func in _CHANGE_GRAD:
            self._refuse_change_of_gradient(func, swapped_args[0])
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, swapped_args, swapped_kwargs, self)
        instead = self._instead.get(func)
        if instead is None and swapped_kwargs.get("requires_grad"):
            made = func(*swapped_args, **{**swapped_kwargs, "requires_grad": False})
            return self._require_grad(made)
        if instead is None:
            result = func(*swapped_args, **swapped_kwargs)
            return seen_by_modes(result) if func in _RUN_BACKWARD else result
        return instead(*swapped_args, **swapped_kwargs)

    def swap(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the program works on in the place of `tensor`."""
        known = self.known_stand_in(tensor)
        return self._stand_in(tensor) if known is None else known

    def known_stand_in(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """As `swap`, but None for a tensor that has no stand-in yet."""
        if not self._recorder.is_foreign(tensor):
            return tensor
        (seen,) = seen_by_modes([tensor])
        return self._inputs.of_example(tensor) if seen is tensor else seen

    def _detach(self, tensor: torch.Tensor) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            return tensor  # autograd, which alone would do something, is out of the way
        self._log.changes_history(tensor, torch.Tensor.detach_)
        return tensor

    def _require_grad(self, tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        self._log.changes_history(tensor, torch.Tensor.requires_grad_, requires_grad)
        return tensor

    def _hook_gradient(self, tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
        """In eager, a hook of an input stays with the input when the call is over."""
        idx = self._inputs.index_of(tensor)
        if idx is None:
            by = getattr(hook, "__module__", None) or ""
            self.num_hooks += not by.startswith("aotdist.")  # as FSDP2's captured hooks do
            return tensor.register_hook(hook)
        raise self._hooked(idx, "gradient")

    def _hook_accumulation(self, tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
        """A hook of the program's own leaf never runs, as in eager; one of an input would have to."""
        idx = self._inputs.index_of(tensor)
        if idx is None:
            return tensor.register_post_accumulate_grad_hook(hook)
        raise self._hooked(idx, "accumulated gradient")

    def _hooked(self, idx: PrimalIdx, what: str) -> UnsupportedProgram:
        return refusal(
            f"`{self._inputs.row()[idx].slot}` gets a hook for its {what} inside of the compiled function",
            "register the hook before, outside of the compiled function: it is called then as in eager",
        )

    def _retain_grad(self, tensor: torch.Tensor) -> None:
        """Inputs and results retain their gradients outside, where they may have a history."""
        tensor.retain_grad()
        idx = self._inputs.index_of(tensor)
        if idx is not None:
            self.retained[idx] = None

    def _assign_data(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        if is_another_name(tensor, source):  # `x.data *= 2`, whose write is done
            return

        def assign() -> None:
            if isinstance(tensor, FunctionalTensor) and isinstance(source, FunctionalTensor):
                _refuse_as_eager(tensor, source)
                with torch.no_grad():
                    rebind(tensor, source.detach())  # type: ignore[arg-type]
            else:
                assign_data(tensor, source)

        self._log.move(tensor, assign_data, assign, source)

    def _note_question(self, name: str, tensor: torch.Tensor) -> None:
        idx = self._inputs.index_of(tensor)
        if idx is not None:
            answer = getattr(self._inputs.row()[idx].example, name)
            self.asked[idx, name] = answer is not None if name == "grad_fn" else answer

    def _refuse_question(self, func: Callable[..., Any], tensor: torch.Tensor) -> None:
        """Refuse a question about an input that its stand-in may answer otherwise."""
        idx = self._inputs.index_of(tensor)
        if idx is not None and not (func != _BASE.__get__ and func(tensor)):
            raise refusal(
                f"the program asks for `{self._inputs.row()[idx].slot}.{_UNANSWERED[func]}`",
                "ask before the call, and pass the answer",
            )

    def _gradient(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """`tensor.grad`; that of an input is one more input, read when the call begins."""
        idx = self._inputs.index_of(tensor)
        if idx is None:
            return tensor.grad
        stand_in = self._inputs.row()[idx]
        if in_backward():
            raise refusal(
                f"`{stand_in.slot}.grad` is read in the backward of the compiled function",
                fix="read it in the forward, or in a hook that is registered outside",
            )
        if tensor.grad is not None:
            raise accumulates_inside(f"`{stand_in.slot}` gets its `.grad` inside of the compiled module")
        grad = stand_in.example.grad
        self.asked[idx, "grad"] = grad is not None
        return None if grad is None else self._stand_in(grad)

    def _refuse_optimizer(self, frame: types.FrameType | None, tensor: torch.Tensor) -> None:
        """Refuse a library's optimizer, whose state would not be found again at the next call."""
        caller = None if frame is None else frame.f_back
        asks = None if caller is None else caller.f_locals.get("self")
        is_library = isinstance(asks, torch.optim.Optimizer) and not is_users_class(type(asks))
        idx = self._inputs.index_of(tensor)
        if idx is not None and is_library:
            raise accumulates_inside(
                f"a library's optimizer ({type(asks).__name__}) reads `{self._inputs.row()[idx].slot}.grad` "
                "inside of the compiled module, and its state would not be found again"
            )

    def _refuse_change_of_gradient(self, func: Callable[..., Any], tensor: torch.Tensor) -> None:
        idx = self._inputs.index_of(tensor)
        if idx is not None:
            slot = self._inputs.row()[idx].slot
            raise accumulates_inside(f"`{slot}.grad` is {_CHANGE_GRAD[func]} inside of the compiled module")


def _is_asked_by_the_program(frame: types.FrameType | None) -> bool:
    """Whether the caller is neither this library nor PyTorch, which looks at strides itself."""
    caller = None if frame is None else frame.f_back
    asks = "" if caller is None else caller.f_globals.get("__name__", "")
    return asks.partition(".")[0] not in ("torch", "aotdist")


class ReplayMode(TorchFunctionMode):
    """Puts stand-ins in the place of closed-over tensors that a later backward reads, as a checkpoint's does.

    They are recognised by the places where they are read: the tensors of the trace are not kept, and others
    may be in these places by now.

    Args:
        stand_ins: those of the trace.
    """

    def __init__(self, stand_ins: Mapping[PrimalIdx, torch.Tensor]) -> None:
        super().__init__()
        self._stand_ins = stand_ins
        self._sources: Mapping[PrimalIdx, Source] = {}

    def find_at(self, sources: Mapping[PrimalIdx, Source]) -> None:
        """Set where closed-over inputs are read."""
        self._sources = sources

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        swapped_args, swapped_kwargs = _each(self.swap, args, kwargs)
        if types and class_functions_are_on():
            with self:
                return ask_classes(func, types, swapped_args, swapped_kwargs)
        return func(*swapped_args, **swapped_kwargs)

    def swap(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the program works on in the place of `tensor`."""
        if not is_real(tensor):
            return tensor
        found = (idx for idx, source in self._sources.items() if source.read() is tensor)
        return next((self._stand_ins[idx] for idx in found), tensor)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    if isinstance(tensor, FunctionalTensor):
        raise refusal(
            "the program looks at the storage of a tensor, which has no memory while it is captured",
            fix="look at storages, free and allocate memory outside of the compiled function; what it "
            "computes is freed after its last use by itself",
        )
    return tensor.untyped_storage()


def _refuse_resize(variable: torch.Tensor, new_size: int) -> None:
    """`x.untyped_storage().resize_(n)` in a graph of Dynamo's, which passes these names."""
    _storage_of(variable)


def _described(tensor: torch.Tensor, **options: Any) -> str:
    return text_of(tensor) if isinstance(tensor, FunctionalTensor) else tensor.__repr__(**options)


def _formatted(tensor: torch.Tensor, spec: str) -> str:
    if isinstance(tensor, FunctionalTensor):  # a number of digits is for a value, and refused
        return object.__format__(tensor, spec) if spec else text_of(tensor)
    return tensor.__format__(spec)


def _each(
    swap: Callable[[torch.Tensor], torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with what `swap` gives for each tensor in them."""

    def swapped(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return swap(value)
        # For each function that the program calls: a pytree of all its arguments took 8% of a capture.
        return value if type(value) in _NO_CONTAINERS else pytree.tree_map_only(torch.Tensor, swap, value)

    return tuple(map(swapped, args)), {name: swapped(value) for name, value in (kwargs or {}).items()}


_NO_CONTAINERS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size})


def _refuse_as_eager(tensor: torch.Tensor, source: torch.Tensor) -> None:
    if tensor.requires_grad and not (source.is_floating_point() or source.is_complex()):
        raise RuntimeError(
            "data set to a tensor that requires gradients must be floating point or complex dtype"
        )
