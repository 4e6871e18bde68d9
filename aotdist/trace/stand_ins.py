"""The traced stand-ins of a program's inputs.

A plain input becomes `FunctionalTensor(Fake)`. A wrapper is taken apart, its plain tensors become
functional, and it is put together around them: `DTensor(FunctionalTensor(Fake))`. The user's
function, autograd and the wrapper's own dispatch run above, exactly as in eager, and writes are
decided only among plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from aotdist.aliasing.metadata import with_history_of
from aotdist.aliasing.overwrite import kind_of, version_of
from aotdist.aliasing.views import Opened
from aotdist.capture.source import UNNAMED
from aotdist.convention.bases import BasePlan
from aotdist.errors import UnsupportedProgram
from aotdist.origins import holding
from aotdist.program import PrimalIdx, Row, Slot
from aotdist.sizes import is_symbolic
from aotdist.subclasses.protocol import (
    Plain,
    Recipe,
    is_real,
    is_wrapper,
    leaves,
    plain_tensors,
    rebuild,
    recipe_of,
    refuse_unknown_subclass,
)
from aotdist.torch_seam.autograd import creation_meta, nodes_behind, set_creation_meta
from aotdist.torch_seam.functional import (
    FunctionalTensor,
    data_writes,
    given_attributes,
    made_again,
    part_of,
    second_shell,
)
from aotdist.torch_seam.modes import class_functions_off
from aotdist.torch_seam.symbols import hint
from aotdist.torch_seam.tensors import as_parameter, is_zero_tensor, set_versions
from aotdist.torch_seam.transforms import beneath_transforms
from aotdist.trace.classes import show_as_example
from aotdist.trace.failures import refusal, unsupported
from aotdist.trace.numbers.symbols import Count, Symbols
from aotdist.trace.recorder import Recorder


@dataclass(frozen=True, slots=True)
class StandIn:
    """What the traced function sees in place of one real tensor.

    Args:
        slot: the input's name.
        example: the real tensor.
        recipe: how it is put together.
        leaf: what gradients are taken with respect to.
        opened: what the function is given, and what lies inside of it before it runs.
        plains: other shells of the functional tensors beneath `tensor`; they stay in the memory that it had,
            if the program moves it to other memory.
        derived: whether it is a base without history, or a view of another stand-in: writes to it, and
            gradients for it, are those of the other inputs.
        spans: the spans that its plain tensors lie in, together with others.
        first_version: version counter of `tensor` before the program ran.
    """

    slot: Slot
    example: torch.Tensor
    recipe: Recipe
    leaf: torch.Tensor
    opened: Opened
    plains: tuple[FunctionalTensor, ...]
    derived: bool = False
    spans: frozenset[PrimalIdx] = frozenset()
    first_version: int = 0

    @property
    def tensor(self) -> torch.Tensor:
        """What the function is given: `leaf` itself, or a non-leaf copy of it when the example is no leaf.

        Only a non-leaf may be written while it requires grad.
        """
        return self.opened.tensor

    @property
    def takes_grad(self) -> bool:
        """Whether the input is differentiated for."""
        return self.example.requires_grad and not self.derived

    def bumps(self) -> int:
        """How many writes autograd counted, of this tensor and of views of it."""
        return 1 if self.tensor.is_inference() else version_of(self.tensor) - self.first_version

    def writes(self) -> tuple[int, ...]:
        """How often each plain tensor was written, also through tensors that share its memory."""
        return tuple(data_writes(plain) for plain in self.plains)

    def counts(self) -> tuple[tuple[int, ...], int]:
        """`writes` and `bumps`."""
        return self.writes(), self.bumps()


class Inputs:
    """Makes and remembers stand-ins, one for each tensor."""

    def __init__(self, recorder: Recorder, symbols: Symbols, bases: BasePlan) -> None:
        self._recorder = recorder
        self._symbols = symbols
        self._bases = bases
        self._aliases = bases.aliases()
        self._views = bases.views()
        self._stand_ins: list[StandIn] = []
        self._by_example: dict[int, torch.Tensor] = {}
        self._by_tensor: dict[int, PrimalIdx] = {}

    def counts(self) -> tuple[Count, ...]:
        """The numbers that symbols stand for."""
        return self._symbols.counts()

    def add(self, slot: Slot, example: torch.Tensor) -> torch.Tensor:
        """What the traced function is given in place of `example`."""
        with _mode_of(example), class_functions_off(), beneath_transforms():
            return self._add(slot, example)

    def _add(self, slot: Slot, example: torch.Tensor) -> torch.Tensor:
        refuse_unknown_subclass(example, slot.path)
        _refuse_layout(example, slot)
        at = PrimalIdx(len(self._stand_ins))
        stand_in = _counted_from_here(self._made(at, slot, example))
        self._note_storages(at, stand_in)
        self._by_tensor[id(stand_in.tensor)] = at
        self._by_example[id(example)] = stand_in.tensor
        self._stand_ins.append(stand_in)
        return stand_in.tensor

    def _made(self, at: PrimalIdx, slot: Slot, example: torch.Tensor) -> StandIn:
        """A new stand-in, around arguments of the graph: of its own, in spans, or a view of another."""
        is_span = self._bases.is_span(at)
        recipe = recipe_of(example)
        if not is_span and at not in self._views and not any(primal == at for primal, _ in self._aliases):
            recipe = self._symbols.recipe(at, slot, example, recipe)
        pairs = zip(leaves(recipe), plain_tensors(example), strict=True)
        fakes = [self._fake(leaf, plain) for (_, leaf), plain in pairs]
        functionals = [
            self._recorder.argument(Slot("primal", slot.path, inner), fake, overwritten=is_span)
            for (inner, _), fake in zip(leaves(recipe), fakes, strict=True)
        ]
        if is_real(example) and not example.requires_grad:
            self._recorder.note_data(at, functionals, plain_tensors(example))
        base = self._views.get(at)
        if base is not None:
            return self._view_of_base(slot, example, recipe, self._stand_ins[base])
        functionals = self._through_spans(at, functionals, example)
        stand_in = self._of_its_own(slot, example, recipe, functionals, fakes)
        spans = frozenset(span for (primal, _), (span, _) in self._aliases.items() if primal == at)
        return replace(stand_in, derived=is_span, spans=spans)

    def _note_storages(self, at: PrimalIdx, stand_in: StandIn) -> None:
        """Note which storages are larger than the input in them, and which are an input's."""
        is_own = is_real(stand_in.example) and not self._bases.is_span(at)
        for plain, real in zip(stand_in.plains, plain_tensors(stand_in.example), strict=True):
            is_larger = not is_symbolic(tuple(real.shape)) and real.untyped_storage().nbytes() > real.nbytes
            self._recorder.strided.note_storage(plain, of_input=is_own, is_larger=is_larger)

    def _fake(self, leaf: Plain, plain: torch.Tensor) -> torch.Tensor:
        if is_symbolic(leaf):
            return self._recorder.fake_like(leaf, plain.device, stands_for=plain)
        return self._recorder.fake(plain)

    def _of_its_own(
        self,
        slot: Slot,
        example: torch.Tensor,
        recipe: Recipe,
        functionals: Sequence[FunctionalTensor],
        fakes: Sequence[torch.Tensor],
    ) -> StandIn:
        leaf = rebuild(recipe, functionals)
        tensor = leaf
        if isinstance(example, torch.nn.Parameter):
            leaf = as_parameter(leaf)
        if example.requires_grad:
            leaf.requires_grad_(True)
            if not example.is_leaf:
                plains = tuple(map(self._recorder.second, functionals, fakes))
                functionals = plains
                tensor = with_history_of(leaf, lambda: rebuild(recipe, plains))
        return StandIn(slot, example, recipe, leaf, Opened.of(tensor), tuple(map(second_shell, functionals)))

    def _through_spans(
        self, at: PrimalIdx, functionals: Sequence[FunctionalTensor], example: torch.Tensor
    ) -> list[FunctionalTensor]:
        """Views of spans in the place of the plain tensors that lie in one."""
        found: list[FunctionalTensor] = []
        for leaf, (own, real) in enumerate(zip(functionals, plain_tensors(example), strict=True)):
            place = self._aliases.get((at, leaf))
            if place is None:
                found.append(own)
            else:
                span, member = place
                (memory,) = self._stand_ins[span].plains
                part = part_of(memory, member.size, member.stride, member.offset)
                self._recorder.strided.lies_in(memory, part, int(real.storage_offset()))
                found.append(part)
        return found

    def _view_of_base(self, slot: Slot, example: torch.Tensor, recipe: Recipe, base: StandIn) -> StandIn:
        if not is_wrapper(example) and kind_of(example) != kind_of(base.example):
            assert example._base is not None, "a view"
            raise unsupported(
                f"`{slot.path}` is a view of a {example._base.dtype} tensor, as {example.dtype} or "
                "conjugated; it, or another view of that tensor, is written with history",
                f"pass what `{slot.path}` is a view of, and take the view inside of the function",
            )
        with torch.enable_grad():
            view = made_again(example, base.tensor)
        if is_wrapper(example) and _shape_of(view) != _shape_of(example):
            raise unsupported(
                f"`{slot.path}` is a view of a {type(example).__name__} with history, and its size or "
                "strides were written in place before the call; it, or another view of that tensor, is "
                "written",
                f"reshape `{slot.path}` out of place: `unsqueeze` in the place of `unsqueeze_`",
            )
        set_creation_meta(view, creation_meta(example))
        plains = tuple(second_shell(plain) for plain in plain_tensors(view))  # type: ignore[arg-type]
        return StandIn(slot, example, recipe, view, Opened.of(view), plains, derived=True)

    def show_attributes(self) -> None:
        """Let the user's code see the attributes of the examples, and the methods of their classes.

        A tensor that the program closes over needs none: the user's code holds the example itself.
        """
        for stand_in in self._stand_ins:
            show_as_example(stand_in.tensor, stand_in.example, stand_in.slot.path)

    def forget_attributes(self) -> None:
        """Drop the attributes of stand-ins, whose values are the caller's."""
        for tensor in (one.tensor for one in self._stand_ins):
            if isinstance(tensor, FunctionalTensor):
                for name in given_attributes(tensor):
                    del vars(tensor)[name]

    def row(self) -> Row[PrimalIdx, StandIn]:
        """Every stand-in so far."""
        return Row(self._stand_ins)

    def index_of(self, tensor: torch.Tensor) -> PrimalIdx | None:
        """Which input the traced `tensor` is, if it is one."""
        return self._by_tensor.get(id(tensor))

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name of the input that the traced `tensor` is, if it is one."""
        at = self.index_of(tensor)
        return None if at is None else str(self._stand_ins[at].slot)

    def of_example(self, example: torch.Tensor) -> torch.Tensor | None:
        """The stand-in for a real tensor, if there is one yet."""
        return self._by_example.get(id(example))

    def current(self) -> AbstractContextManager[None]:
        """Let `current_inputs` return these while the context is active."""
        return holding(_CURRENT, self)

    def behind(self, tensors: Iterable[torch.Tensor]) -> list[StandIn]:
        """The inputs that are leaves of the history of `tensors`."""
        leaves = [node.variable for node in nodes_behind(tensors) if hasattr(node, "variable")]
        known = set(map(id, leaves))
        return [one for one in self._stand_ins if one.takes_grad and id(one.leaf) in known]


def _counted_from_here(stand_in: StandIn) -> StandIn:
    """The stand-in, with its example's version counter; its writes are counted from here."""
    tensor, example = stand_in.tensor, stand_in.example
    if not (example.is_inference() or tensor.is_inference()):
        set_versions((tensor,), (version_of(example),))
    return replace(stand_in, first_version=version_of(tensor))


def _shape_of(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Sizes, and strides of dimensions with several elements, as numbers.

    A wrapper that was reshaped in place is made again as the view that it was before (torch 2.13).
    """
    sizes = map(hint, tensor.size())
    return [
        (size, hint(stride) if size > 1 else 0) for size, stride in zip(sizes, tensor.stride(), strict=True)
    ]


_CURRENT: ContextVar[Inputs] = ContextVar("aotdist_inputs")


def current_inputs() -> Inputs:
    """The inputs of the running trace."""
    return _CURRENT.get()


def _mode_of(example: torch.Tensor) -> AbstractContextManager[Any]:
    """The mode to make a stand-in in: that of a normal tensor is a normal one, in inference mode, too."""
    if torch.is_inference_mode_enabled() and not example.is_inference():
        return torch.inference_mode(False)
    return nullcontext()


def _refuse_layout(example: torch.Tensor, slot: Slot) -> None:
    """Refuse tensors that are neither dense nor wrappers of dense ones, by name or by the user's line."""
    if is_wrapper(example):
        return
    if example.is_nested or example.is_quantized:
        what = f"is a {'nested' if example.is_nested else 'quantised'} tensor"
        fix = "pass a dense tensor, a jagged one (`layout=torch.jagged`), or the numbers of a quantised one"
    elif example.layout is not torch.strided:
        what = f"has layout {example.layout}"
        fix = (
            "pass its indices and values; its product with a dense matrix is "
            "`zeros.index_add(0, row, values[:, None] * dense[column])`"
        )
    elif is_zero_tensor(example):
        what, fix = "is zeros without memory, as the derivative of `sgn` is", "pass its `clone()`"
    else:
        return
    if slot.path.startswith(UNNAMED):
        raise refusal(f"a tensor that the program closes over {what}", fix)
    raise UnsupportedProgram(f"`{slot.path}` {what}", stage="capture", fix=fix)
