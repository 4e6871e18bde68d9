"""The dispatch mode that turns operations on fake tensors into nodes.

PyTorch's proxy mode handles every kind of call: constants, higher-order operators, decompositions.
Most operations of a training step are none of these: plain functional operators on
tensors that already have nodes. Those are recorded here directly, in 0.3x of the time; everything else is
left to the general mode, which uses the same tracker of tensors.

A tensor that has a node keeps it: nothing is ever rebound, because a functional operator's results
are new tensors.

No node computes a symbolic number that is known before a call: each expression is an argument of the graph.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, cast

import torch
from torch.fx import Node

from aotdist.convention.rng import Stream, draws_nothing, functional_draw
from aotdist.origins import is_asked_by_a_library
from aotdist.torch_seam.functional import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from aotdist.torch_seam.modes import OutOfDynamo, set_aside
from aotdist.torch_seam.nodes import Appender
from aotdist.torch_seam.operators import (
    HigherOrderOperator,
    OpOverload,
    can_decompose,
    handle_in_mode,
    is_operator,
    whole_numbers,
    writes_arguments,
)
from aotdist.torch_seam.proxies import (
    ProxyTorchDispatchMode,
    decomposition_option,
    is_recording,
    node_of,
    track,
    track_number,
)
from aotdist.torch_seam.symbols import SYMBOLIC, as_computed, depends_on_data, has_floats
from aotdist.torch_seam.trees import pytree
from aotdist.trace.failures import needs_value
from aotdist.trace.known_results import KnownResults
from aotdist.trace.numbers.data_guards import (
    WHOLE,
    DataGuards,
    NeedsSizes,
    NotKnown,
    form_of,
    made_like,
    positions,
    result_of,
)
from aotdist.trace.numbers.scalars import Scalars, current_scalars
from aotdist.trace.numbers.unbacked import Unbacked
from aotdist.trace.operators import corrections
from aotdist.trace.operators.random import Draws
from aotdist.trace.tracer import Tracer

_PLAIN_NAMESPACES = ("aten", "_c10d_functional")
_ASK_THE_GENERAL_MODE = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
_ATOMS = (
    int,
    float,
    bool,
    str,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Generator,
)


_DEVICE = torch.ops.prim.device.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_INDEX = torch.ops.aten.index.Tensor
_ZEROS_WITHOUT_MEMORY = torch.ops.aten._efficientzerotensor.default
_ZEROS = torch.ops.aten.zeros.default


class _NeedsGeneralMode(Exception):
    """An argument is of a kind that only the general mode knows how to record."""


class ProxyMode(OutOfDynamo, ProxyTorchDispatchMode):
    """Records operations as nodes of a tracer's graph.

    Args:
        tracer: whose graph the nodes go to.
        decompositions: operators that are recorded as simpler ones.
        fake_mode: the mode of the trace's fakes.
        stream: where random numbers come from, if from a seed and an offset; else None.
        size: gives the node of a symbolic number; the number itself, if its expression is constant.
        unbacked: the numbers that depend on data; None where there may be none.
        on_gpu: whether the trace is for a GPU, though it is on the CPU.
        refuses_data: no number may depend on data, although numbers of the enclosing program may.

    Attributes:
        draws: gives a repeated draw (of a checkpoint) the result of the first.
        data_guards: answers conditions on data that exists before a call.
        known_results: the cache of results' metadata.
        calling_functions: calls functions that are recorded once; see `aotdist.torch_seam.proxies`.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        tracer: Tracer,
        decompositions: Mapping[OpOverload, Callable[..., Any]],
        fake_mode: FakeTensorMode,
        stream: Stream | None,
        size: Callable[[Any], Any],
        unbacked: Unbacked | None,
        *,
        on_gpu: bool,
        refuses_data: bool,
    ) -> None:
        super().__init__(tracer, "fake", **decomposition_option(decompositions))
        self._decompositions = decompositions
        self._stamp = tracer.stamp
        self.draws = Draws()
        self.data_guards = DataGuards()
        self.known_results = KnownResults(fake_mode)
        self.calling_functions: Callable[..., Any] | None = None
        self._stream = stream
        self._size = size
        self._unbacked = unbacked
        self._refuses_data = refuses_data
        self._symbolic, self._on_gpu = fake_mode.shape_env is not None, on_gpu
        self._is_direct: dict[OpOverload, bool] = {}

    @set_aside
    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # asked for each tensor that is made, 20 us through all modes
        if self._unbacked is not None:
            self._unbacked.check()
        if isinstance(func, HigherOrderOperator):
            return handle_in_mode(func, ProxyTorchDispatchMode, self, *args, **kwargs)
        tags = func.tags if is_operator(func) else ()
        if torch.Tag.nondeterministic_seeded in tags and not draws_nothing(func, args, kwargs):
            return self.draws.draw(func, args, kwargs, lambda: self._draw(func, types, args, kwargs))
        if torch.Tag.data_dependent_output in tags:
            return self._read(func, types, args, kwargs)
        if is_operator(func) and func.namespace == "profiler":
            return func(*args, **kwargs)  # `record_function` marks a range of the trace, not of the graph
        scalars = current_scalars()
        if scalars is not None and (tokens := scalars.tokens_among((args, kwargs))):
            return self._dispatch_with(tokens, scalars, func, types, args, kwargs)
        if rows := corrections.of("node", func):
            with self:
                result = corrections.corrected(rows, func, args, kwargs)
            if result is not NotImplemented:
                return result
        return self._dispatch(func, types, args, kwargs)

    def _read(
        self, func: OpOverload, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The number that an operator reads off a tensor.

        It is known at capture, the answer to a library's condition or question, a token
        (`aotdist.trace.numbers.scalars`), or what the general mode makes of it: an unbacked symbol, or an
        error.
        """
        scalars, token = current_scalars(), None
        try:
            node_args, node_kwargs = self._node_arguments(args, kwargs)
            with suppress(NotKnown):
                return result_of(func, node_args, node_kwargs, self.tracer.root)
            kind = WHOLE.get(args[0].dtype) if func is _ITEM else None
            is_open = kind is bool or self.data_guards.takes_numbers
            frame = inspect.currentframe()
            if kind is not None and is_open and is_asked_by_a_library(frame, of_pytorch=kind is bool):
                with suppress(NotKnown):
                    return self.data_guards.answer(node_args[0], self.tracer.root, kind)
                if kind is bool and self._symbolic:
                    raise NeedsSizes("a choice by data takes too many operators to be made at each call")
            if func is _ITEM and scalars is not None:
                token = scalars.read(
                    tuple(map(self._argument, args)), args[0], self._create, self.tracer.root
                )
        except _NeedsGeneralMode:
            pass
        if token is not None:
            return token
        if self._refuses_data:
            raise DataDependentOutputException(func)
        if self._unbacked is not None and func is _ITEM:
            args = (self._to_be_read(func, args[0]),)
        return self._dispatch_generally(func, types, args, kwargs)

    def _sized(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a library's operator, whose sizes depend on data, with the sizes of this call.

        `NotImplemented` if these are not there before a call.
        """
        if not self.data_guards.takes_numbers:
            return NotImplemented
        if not is_asked_by_a_library(inspect.currentframe(), of_pytorch=False):
            return NotImplemented
        if func is _INDEX:
            if not any(isinstance(at, FakeTensor) and at.dtype is torch.bool for at in args[1]):
                return NotImplemented
            with self:
                return func(args[0], [each for at in args[1] for each in positions(at)])
        try:
            node = self._create(func, *self._node_arguments(args, kwargs))
        except _NeedsGeneralMode:
            return NotImplemented
        try:
            form = self.data_guards.answer(node, self.tracer.root, form_of)
        except NotKnown:
            self.tracer.graph.erase_node(node)
            return NotImplemented
        made = made_like(form)
        self._bind(made, node)
        return made

    def _to_be_read(self, func: OpOverload, tensor: FakeTensor) -> FakeTensor:
        """A copy of a tensor of one element: a backward may read it again, whatever is written meanwhile."""
        node = node_of(tensor, self.tracer)
        if node is None:
            raise DataDependentOutputException(func)
        assert self._unbacked is not None
        copies = self._unbacked.copies
        if node not in copies:
            with self:
                copies[node] = torch.ops.aten.clone.default(tensor)
            copied = node_of(copies[node], self.tracer)
            assert copied is not None, "it was recorded"
            copied.meta["policy"] = "must_save"
            self._unbacked.copied[copied] = copies[node]
        return copies[node]

    def _dispatch_with(
        self,
        tokens: Sequence[float],
        scalars: Scalars,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record an operator that is given tokens, undecomposed: a decomposition might compute with them."""
        if scalars.tokens_among(whole_numbers(func, args, kwargs)):
            raise needs_value(func.name())
        try:
            node_args, node_kwargs = self._node_arguments(args, kwargs)
        except _NeedsGeneralMode:
            return self._dispatch_generally(func, types, args, kwargs)
        scalars.arrive(tokens)
        return self._record(func, args, kwargs, node_args, node_kwargs)

    def _draw(
        self, func: OpOverload, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._stream is None:
            return self._dispatch(func, types, args, kwargs)
        like = func(*args, **kwargs)
        with self:
            return functional_draw(func, args, kwargs, self._stream, like)

    def _dispatch(
        self, func: OpOverload, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record an operator directly, if it is a plain one on tensors that have nodes."""
        if self._is_recorded_directly(func):
            try:
                node_args, node_kwargs = self._node_arguments(args, kwargs)
            except _NeedsGeneralMode:
                pass
            else:
                return self._record(func, args, kwargs, node_args, node_kwargs)
        return self._dispatch_generally(func, types, args, kwargs)

    def record_known(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operator whose result is in the cache; `NotImplemented` if it is not."""
        if self._unbacked is not None or current_scalars() is not None or not is_recording(self):
            return NotImplemented
        if torch.Tag.nondeterministic_seeded in func.tags:
            return NotImplemented
        key = self.known_results.key(func, args, kwargs)
        if (
            not self.known_results.knows(key)
            or not self._is_recorded_directly(func)
            or corrections.of("node", func)
        ):
            return NotImplemented
        try:
            node_args, node_kwargs = self._node_arguments(args, kwargs)
        except _NeedsGeneralMode:
            return NotImplemented
        return self._record(func, args, kwargs, node_args, node_kwargs, key)

    def _dispatch_generally(
        self, func: OpOverload, types: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        for number in pytree.tree_leaves((args, kwargs)):
            if isinstance(number, SYMBOLIC) and isinstance(node := self._size(number), Node):
                track_number(number, node, self.tracer)
            elif isinstance(number, FakeTensor):  # if its node was erased, this records it again
                node_of(number, self.tracer)
        if torch.Tag.dynamic_output_shape in getattr(func, "tags", ()):
            if (sized := self._sized(func, args, kwargs)) is not NotImplemented:
                return sized
            if self._refuses_data:
                raise DynamicOutputShapeException(func)
        with nullcontext() if self._unbacked is None else self._unbacked.reading_off_new_nodes():
            return super().__torch_dispatch__(func, types, args, kwargs)

    def __sym_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Arithmetic of symbolic numbers is not recorded, except of floats where numbers depend on data."""
        result = func(*args, **kwargs)
        if not isinstance(result, torch.SymFloat):
            return result
        numbers = self._unbacked if depends_on_data(result) or any(map(has_floats, args)) else None
        return as_computed(result) if numbers is None else numbers.apply(func, args)

    def _is_recorded_directly(self, func: OpOverload) -> bool:
        if func not in self._is_direct:
            self._is_direct[func] = (
                is_operator(func)
                and func.namespace in _PLAIN_NAMESPACES
                and func not in self._decompositions
                and not writes_arguments(func)
                and not any(tag in func.tags for tag in _ASK_THE_GENERAL_MODE)
                and not func.name().startswith("aten::lift")
                and not can_decompose(func)
            )
        return self._is_direct[func]

    def _node_arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of an operator as those of its node.

        Raises:
            _NeedsGeneralMode: some can only be recorded by the general mode.
        """
        node_args = tuple(map(self._argument, args))  # first: symbols become arguments in this order
        return node_args, {name: self._argument(value) for name, value in kwargs.items()}

    def _argument(self, value: Any) -> Any:
        """`value` with a node in the place of each tensor."""
        if isinstance(value, FakeTensor):
            node = node_of(value, self.tracer)
            if node is None or value.constant is not None:
                raise _NeedsGeneralMode
            return node
        if isinstance(value, _ATOMS):
            return _number_or_itself(value)
        if isinstance(value, SYMBOLIC):
            return self._size(value)
        if type(value) in (list, tuple, torch.Size):
            return [self._argument(item) for item in value]
        raise _NeedsGeneralMode

    def _record(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        node_args: tuple[Any, ...],
        node_kwargs: dict[str, Any],
        key: Hashable | None = None,
    ) -> Any:
        result = self.known_results.result(
            key or self.known_results.key(func, args, kwargs),
            args,
            kwargs,
            lambda: corrections.fake_result(func, args, kwargs, on_gpu=self._on_gpu),
        )
        if func is _ZEROS_WITHOUT_MEMORY and self._decompositions:  # compilers read memory
            node = self._create(_ZEROS, node_args, node_kwargs)
            self._bind(result, node)
            node.meta["val"] = _ZEROS(*args, **kwargs)
            return result
        node = self._create(func, node_args, node_kwargs)
        self._bind(result, node)
        if self._unbacked is not None:
            self._unbacked.read_off(node)
        return result

    def _create(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        meta = self._stamp() | {"original_aten": target, "val": None}
        return Appender(self.tracer.graph).add("call_function", target, args, kwargs, None, meta)

    def _bind(self, value: Any, node: Node) -> None:
        """Let a node stand for a tensor, or for several, each of which gets a node that takes it out."""
        if isinstance(value, torch.Tensor):
            # Nothing writes a value of a functional graph, so it can stand for itself; the general mode
            # stores a detached copy (30 us each).
            node.meta["val"] = value
            if node_of(value, self.tracer) is None:
                track(value, node, self.tracer)
        elif isinstance(value, (list, tuple)):
            node.meta["val"] = value
            for position, each in enumerate(cast("Sequence[Any]", value)):
                if isinstance(each, (torch.Tensor, list, tuple)):
                    self._bind(each, self._create(operator.getitem, (node, position), {}))


def _number_or_itself(atom: Any) -> Any:
    """The node of the number that a token stands for; any other atom itself."""
    scalars = current_scalars()
    number = None if scalars is None else scalars.behind(atom)
    return atom if number is None else number.made_by
