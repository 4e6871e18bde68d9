"""The recorder: plain-tensor operations become FX nodes; arguments may be added at any moment.

Below the user's function stand, from top to bottom, functionalisation (writes become new values),
proxies (values become nodes) and fake tensors (no data is touched). Tangents, and tensors that the function
closes over, turn up in the middle of the trace, so `argument` can be called at any time: its placeholder is
inserted after those that are already there.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from aotdist.aliasing.overwrite import bump
from aotdist.capture.arguments import NO_FAKES, UserFakes
from aotdist.convention.rng import SLOTS as RNG_SLOTS
from aotdist.convention.rng import Stream
from aotdist.errors import InternalError
from aotdist.origins import is_asked_by_a_library, is_asked_by_the_user
from aotdist.program import LATE_ROLES, Graph, PrimalIdx, Role, Slot
from aotdist.sizes import NumberStep
from aotdist.subclasses.protocol import Plain, is_real, plain_tensors, tracing_wrappers
from aotdist.torch_seam.ambient import autocast_off, own_autocast_cache
from aotdist.torch_seam.autograd import running_node, saved_tensor_hooks_off
from aotdist.torch_seam.control_flow import calling_to_be_traced, recomputing_reentrant_checkpoints
from aotdist.torch_seam.dynamo import compiled_as_written
from aotdist.torch_seam.functional import (
    FakeTensorMode,
    FunctionalTensor,
    fake_of_its_own,
    functional,
    functional_storage_id,
    functional_value,
    is_fake,
    is_functional_base,
    new_fake,
    quiet_fakes,
    replace_functional_value,
    second_shell,
)
from aotdist.torch_seam.groups import no_objects_exchanged
from aotdist.torch_seam.inductor import TracingContext, tracing
from aotdist.torch_seam.jagged import share_ragged_size
from aotdist.torch_seam.modes import dispatch_keys_kept, no_modes, torch_functions_off
from aotdist.torch_seam.operators import HigherOrderOperator, OpOverload
from aotdist.torch_seam.patches import hand_on
from aotdist.torch_seam.proxies import PythonKeyTracer, decomposing, graph_module, node_of, track
from aotdist.torch_seam.symbols import depends_on_data, expression, hint, number_kind, shape_env
from aotdist.torch_seam.tensors import unwrapped
from aotdist.trace.failures import refusal
from aotdist.trace.functionalise import Functionalisation, computed_elsewhere
from aotdist.trace.numbers.data_guards import WHOLE, NeedsSizes, NotKnown
from aotdist.trace.numbers.python_numbers import lists_known
from aotdist.trace.numbers.unbacked import Unbacked
from aotdist.trace.operators.attention import chosen_for
from aotdist.trace.proxy_mode import ProxyMode
from aotdist.trace.tracer import Tracer

Writers: TypeAlias = tuple[set[tuple[int, int | None]], dict[torch.fx.Node, int]]
"""What a backward writes: storages, each with the sequence number of the autograd node that writes it (of a
hook, None); and values of the forward that are overwritten, each with its storage."""


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """How a program is recorded, and each function that it hands to an operator.

    Args:
        decompositions: operators to record as simpler ones; empty keeps the program's own.
        functional_rng: draw random numbers from a seed and an offset, which become the last arguments.
        backward_autocast: what the backward is recorded in.
        of_bits: the recorded graph runs operator by operator, and is to have eager's bits.
        target: the generation of the GPUs that a trace on the CPU is for, if it is for any.
    """

    decompositions: Mapping[OpOverload, Callable[..., Any]] = field(default_factory=dict)
    functional_rng: bool = False
    backward_autocast: Callable[[], AbstractContextManager[Any]] = autocast_off
    of_bits: bool = False
    target: str | None = None


class Recorder:
    """Records what is done to its arguments. Use as a context manager, then call `graph`.

    Args:
        options: how to record.
        within: the recorder of the enclosing program, whose tensors are to this one what real tensors are.
        symbolic: whether sizes may be symbolic.
        of_data: whether sizes and numbers may depend on data.
        fakes: the user's fake tensors, which are treated like real ones. Their mode then decides whether
            sizes may be symbolic.
        finds_out: let the program branch on data of its inputs, see `aotdist.trace.numbers.data_guards`.
    """

    def __init__(
        self,
        options: RecordOptions,
        within: Recorder | None = None,
        *,
        symbolic: bool = False,
        of_data: bool = False,
        fakes: UserFakes = NO_FAKES,
        finds_out: bool = False,
    ) -> None:
        self.options = options
        mode, self._user_fakes = fakes
        if within is not None:
            self.shape_env, self.fake_mode, self._user_fakes = None, within.fake_mode, within._user_fakes
        elif mode is not None:
            self.shape_env, self.fake_mode = mode.shape_env, mode
        else:
            asked = self._is_asked if of_data else None
            self.shape_env = shape_env(of_data=asked) if symbolic or of_data else None
            self.fake_mode = FakeTensorMode(static_shapes=not symbolic, shape_env=self.shape_env)
        self._within = within
        self.tracer, self.asked_at = Tracer(), ""
        self._finds_out = finds_out
        self._functionalisation = Functionalisation()
        self.strided = self._functionalisation.strided
        self._stream = Stream(self._rng_state) if options.functional_rng else None
        self.of_data = of_data or (within is not None and within.of_data)
        self.unbacked: Unbacked | None = None
        if of_data and self.shape_env is not None:
            self.unbacked = Unbacked(self.shape_env, self.tracer, self.size)
        self._proxy_mode = ProxyMode(
            self.tracer,
            options.decompositions,
            self.fake_mode,
            self._stream,
            self.size,
            self.unbacked,
            on_gpu=options.target is not None,
            refuses_data=within is not None and within.of_data,
        )
        self.draws, self.data_guards = self._proxy_mode.draws, self._proxy_mode.data_guards
        self.draws.are_refused = within is not None
        self._functionalisation.record_known = self._proxy_mode.record_known
        self._rng: list[torch.fx.Node] = []
        self._arguments: dict[Slot, torch.fx.Node] = {}
        self._first: torch.fx.GraphModule | None = None
        self._goes_on = False
        self.is_aside = False
        """Whether it records into a graph that the program does not run: see `aside`."""
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        modes = (
            dispatch_keys_kept(),
            quiet_fakes(),
            own_autocast_cache(),
            saved_tensor_hooks_off(),
            chosen_for(self.options.target),
            calling_to_be_traced(),
            recomputing_reentrant_checkpoints(),
            compiled_as_written(),
            _anomaly_mode_off(),
            self.draws,
            tracing_wrappers(),
            lists_known(self.known_list),
            no_objects_exchanged(),
            tracing(TracingContext(self.fake_mode)),
            self.fake_mode,
            decomposing(self.options.decompositions),
            self._proxy_mode,
            self._functionalisation,
        )
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            self._exit = stack.pop_all()
        hand_on(self._functionalisation)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._exit.__exit__(*exc)

    def can_instantiate(self) -> bool:
        """Whether blocks may be copied: not with a random stream, nor inside of another trace."""
        return self._stream is None and self._within is None

    def intercept_functions(self, call: Callable[..., torch.Tensor]) -> None:
        """Route functions that may be recorded once through `call` from now on; see `recorded_once`."""
        self._proxy_mode.calling_functions = call

    @contextlib.contextmanager
    def aside(self) -> Generator[torch.fx.Graph]:
        """Record into another graph, which may refer to nodes of this one, and is emptied at the end."""
        ours, serials = self.tracer.graph, self.tracer.num_serials
        aside = self.tracer.graph = torch.fx.Graph(tracer_cls=PythonKeyTracer)
        was_aside, self.is_aside = self.is_aside, True
        try:
            yield aside
        finally:
            self.is_aside = was_aside
            self.tracer.graph, self.tracer.num_serials = ours, serials
            self.tracer.erase(aside)

    def nested(self) -> Recorder:
        """A recorder for a function that the program hands to an operator."""
        return Recorder(self.options, self)

    @contextlib.contextmanager
    def resumed(self) -> Generator[None]:
        """Record here again, while a nested recorder is at work."""
        with no_modes(), self.fake_mode, self._proxy_mode, self._functionalisation:
            yield

    def is_foreign(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has to become an argument before the program can work on it."""
        if self.is_given(tensor):
            return True
        if self._within is None:
            return False
        plains = map(unwrapped, plain_tensors(tensor))
        return any(isinstance(p, FunctionalTensor) and self._node_of(p) is None for p in plains)

    def is_given(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` comes from outside of the trace: it is real, or a fake of the user's."""
        return is_real(tensor) or id(tensor) in self._user_fakes

    def fake(self, example: torch.Tensor) -> torch.Tensor:
        """A fake of a plain tensor, real or another recorder's; its storage is not touched."""
        if isinstance(example, FunctionalTensor) or is_fake(example):
            plain = Plain(example.size(), example.stride(), example.dtype)
            return self.fake_like(plain, example.device, stands_for=example)
        with torch.no_grad(), no_modes():
            fake = fake_of_its_own(self.fake_mode, example.detach())
        share_ragged_size(fake, example)
        return fake

    def fake_like(
        self, plain: Plain, device: torch.device, *, stands_for: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A new fake with the metadata of a recipe's leaf, and the ragged size that goes with it."""
        fake = new_fake(self.fake_mode, plain.size, plain.stride, plain.dtype, device)
        if stands_for is not None:
            share_ragged_size(fake, stands_for)
        return fake

    def second(self, tensor: FunctionalTensor, fake: torch.Tensor) -> FunctionalTensor:
        """Another tensor with the value of `tensor`; in the same memory, if `tensor` is a view."""
        is_base = is_functional_base(tensor)
        return functional(fake, self._functionalisation) if is_base else second_shell(tensor)

    def argument(self, slot: Slot, fake: torch.Tensor, *, overwritten: bool = False) -> FunctionalTensor:
        """A new argument of the graph that stands for `fake`.

        Args:
            slot: its name.
            fake: its value in the trace.
            overwritten: its memory is written through another argument, so the backward cannot keep it.
        """
        node = self._placeholder(slot, fake)
        node.meta["overwritten"] = overwritten
        track(fake, node, self.tracer)
        return self._functionalisation.remember(functional(fake, self._functionalisation))

    def note_data(
        self, at: PrimalIdx, arguments: Sequence[FunctionalTensor], reals: Sequence[torch.Tensor]
    ) -> None:
        """Note that an input's data exists before a call: with `finds_out`, the program may branch on it.

        Args:
            at: the input.
            arguments: the graph's arguments for its plain tensors.
            reals: the plain tensors.
        """
        if self._finds_out:
            for leaf, (argument, real) in enumerate(zip(arguments, reals, strict=True)):
                self.data_guards.note_data(self.value(argument), at, leaf, real)

    def known_list(self, tensor: FunctionalTensor) -> Any:
        """`tensor.tolist()` as it is in this call, if a library asks for it; else None."""
        if (
            tensor.dtype in WHOLE
            and self.data_guards.takes_numbers
            and is_asked_by_a_library(inspect.currentframe(), of_pytorch=False)
        ):
            with contextlib.suppress(NotKnown), torch_functions_off():
                return self.data_guards.answer(self.value(tensor), self.tracer.root, torch.Tensor.tolist)
        return None

    def _is_asked(self) -> bool:
        """Whether the user's own code asks for a number that depends on data, rather than a library."""
        if self.tracer.phase == "backward":
            self.asked_at = self.tracer.origin()[2]
        return is_asked_by_the_user(inspect.currentframe())

    def _rng_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Seed and offset, which become arguments when they are first asked for."""
        assert self._stream is not None, "only a stream asks for its state"
        if not self._rng:
            like = Plain(torch.Size(), (), torch.int64)
            for slot in RNG_SLOTS:
                fake = self.fake_like(like, self._stream.device)
                self._rng.append(self._placeholder(slot, fake))
                track(fake, self._rng[-1], self.tracer)
        seed, offset = (node.meta["val"] for node in self._rng)
        if seed.device != self._stream.device:
            raise refusal(
                f"random numbers are drawn on {seed.device} and on {self._stream.device}, and "
                "`functional_rng` asks for one stream",
                "draw them all on one device, or compile without `functional_rng`",
            )
        return seed, offset

    def size(self, number: Any) -> Any:
        """The argument of the graph that stands for a symbolic number; a certain number is itself."""
        spelled = expression(number)
        if number.node.expr.is_number:
            return hint(number)
        if self.unbacked is not None and depends_on_data(number):
            return self.unbacked.node_of(number)
        if self._within is not None:
            raise NeedsSizes("a function handed to an operator (a branch of `cond`) has some")
        slot = Slot("size", spelled)
        if slot not in self._arguments:
            self.data_guards.note_size(self._placeholder(slot, number), spelled, hint(number))
        return self._arguments[slot]

    def sources_of_numbers(self, numbers: Mapping[str, Any]) -> list[tuple[str, torch.Tensor | NumberStep]]:
        """The sources of numbers that depend on data, in order, without those that the forward returns.

        Each is a tensor of one element for the graph to return, or how Python computes the number.

        Args:
            numbers: by the names of the symbols.
        """
        if self.unbacked is None:
            return []
        steps, returned = self.unbacked.steps, self.unbacked.returned
        asked, numbers = numbers.keys(), {**numbers, **self.unbacked.numbers}
        names = [name for name in self.unbacked.needed_for(asked) if name not in returned]
        return [(name, steps.get(name) or self._holding(name, numbers[name])) for name in names]

    def _holding(self, name: str, number: Any) -> torch.Tensor:
        assert self.unbacked is not None, "there is a number"
        if (read := self.unbacked.read_outside(name)) is not None:
            return functional(read, self._functionalisation)
        dtype = torch.int64 if number_kind(number) is int else torch.float64
        return torch.scalar_tensor(number, dtype=dtype, device="cpu")

    def check_numbers(self) -> None:
        """Record the checks of numbers that depend on data."""
        if self.unbacked is not None:
            with no_modes():
                self.unbacked.check()

    def sizes(self) -> list[Any]:
        """The symbolic numbers that the graph takes so far."""
        return [node.meta["val"] for slot, node in self._arguments.items() if slot.role == "size"]

    def _placeholder(self, slot: Slot, val: Any) -> torch.fx.Node:
        """A new argument, inserted after the existing ones."""
        graph = self.tracer.graph
        last = next(reversed(self._arguments.values()), None)
        with graph.inserting_before(None) if last is None else graph.inserting_after(last):
            node = self.tracer.create_node("placeholder", _identifier(slot), (), {})
        node.meta["val"] = val
        self._arguments[slot] = node
        return node

    def placeholder(self, slot: Slot) -> torch.fx.Node:
        """The argument of that name."""
        return self._arguments[slot]

    def asked_for_strides(self, tensor: torch.Tensor) -> None:
        """Note that the program's backward reads the strides of a tensor, which depend on the tangents'."""
        if self.tracer.phase != "backward":
            return
        for plain in plain_tensors(tensor):
            if isinstance(plain, FunctionalTensor):
                self.value(plain).meta["strides_asked"] = True

    def value(self, tensor: torch.Tensor) -> torch.fx.Node:
        """The node that computes the current value of a traced plain tensor.

        Raises:
            InternalError: the tensor is no functional one.
            UnsupportedProgram: something else recorded the operations that made it.
        """
        if not isinstance(tensor, FunctionalTensor):
            raise InternalError(f"a {type(tensor).__name__} reached the graph's results", stage="joint")
        node = self._node_of(tensor)
        if node is None:
            raise computed_elsewhere(tensor)
        return node

    def traced_value(self, node: torch.fx.Node) -> FunctionalTensor:
        """A new traced tensor that holds the value of a node."""
        return self._functionalisation.remember(functional(self._fake_of(node), self._functionalisation))

    def _fake_of(self, node: torch.fx.Node) -> torch.Tensor:
        """The value of a node, which the tracer tracks from now on."""
        fake = node.meta["val"]
        if node_of(fake, self.tracer) is None:
            track(fake, node, self.tracer)
        return fake

    def _node_of(self, tensor: FunctionalTensor) -> torch.fx.Node | None:
        return node_of(functional_value(tensor), self.tracer)

    def attribute(self, name: str, module: torch.fx.GraphModule) -> torch.fx.Node:
        """A `get_attr` node for a graph that an operator takes."""
        root = self.tracer.root
        unique = next(n for k in itertools.count() if not hasattr(root, n := f"{name}_{k}"))
        root.register_module(unique, module)
        return self.tracer.create_node("get_attr", unique, (), {})

    def call(
        self, op: HigherOrderOperator, args: tuple[Any, ...], like: Sequence[torch.Tensor]
    ) -> list[FunctionalTensor]:
        """Record a call of `op` that returns a tuple of new tensors.

        Args:
            op: a higher-order operator.
            args: its arguments: nodes of this graph, and containers of them.
            like: fakes with the metadata of its results.
        """
        fakes = [self.fake_like(Plain(f.size(), f.stride(), f.dtype), f.device) for f in like]
        node = self.tracer.create_node("call_function", op, args, {})
        node.meta["val"] = tuple(fakes)
        for position, fake in enumerate(fakes):
            pick = self.tracer.create_node("call_function", operator.getitem, (node, position), {})
            pick.meta["val"] = fake
            track(fake, pick, self.tracer)
        return [functional(fake, self._functionalisation) for fake in fakes]

    def num_writes(self) -> int:
        """How many writes of tensors were recorded so far."""
        return self._functionalisation.num_writes

    def write(self, tensor: FunctionalTensor, node: torch.fx.Node, num_versions: int) -> None:
        """Let a tensor that owns its memory hold the value of a node; raise its version by `num_versions`."""
        self._functionalisation.num_writes += 1
        replace_functional_value(tensor, self._fake_of(node))
        bump(tensor, num_versions)

    def num_nodes(self) -> int:
        """How many nodes were recorded so far."""
        return len(self.tracer.graph.nodes)

    @contextlib.contextmanager
    def noting_writers(self) -> Generator[Writers]:
        """Note what is written while the context is active, and by which autograd nodes."""
        nodes, of_forward = set[tuple[int, int | None]](), dict[torch.fx.Node, int]()

        def note(tensor: FunctionalTensor) -> None:
            storage = functional_storage_id(tensor)
            nodes.add((storage, running_node()[0]))
            value = self._node_of(tensor)
            if value is None or self.draws.are_repeated(functional_value(tensor)):
                return
            if value.meta.get("phase") == "forward":
                of_forward[value] = storage

        self._functionalisation.on_write = note
        try:
            yield nodes, of_forward
        finally:
            self._functionalisation.on_write = None

    @contextlib.contextmanager
    def on_trial(self) -> Generator[None]:
        """Erase, at the end, what was recorded in the context: only its effects in Python are of interest."""
        nodes = self.tracer.graph.nodes
        before = set(nodes)
        yield
        for node in reversed([node for node in nodes if node not in before]):
            if node.op == "call_function" and not node.users:
                self.tracer.graph.erase_node(node)

    def graph(
        self, results: Sequence[tuple[Slot, torch.fx.Node | None]], symbols: Iterable[Any] = ()
    ) -> Graph:
        """The recorded graph with `results` as its outputs.

        It takes every symbol, used or not: a pass may add an operator that needs it.
        """
        for symbol in symbols:
            self.size(symbol)
        self._proxy_mode.calling_functions = None  # it holds nodes
        graph, now = self.tracer.graph, dict[torch.fx.Node, torch.fx.Node]()
        if self._goes_on:
            graph = torch.fx.Graph(tracer_cls=PythonKeyTracer)
            graph.graph_copy(self.tracer.graph, now)
        graph.output(tuple(now.get(node, node) if node is not None else None for _, node in results))
        slots = sorted(self._arguments, key=lambda slot: _SEGMENTS.index(slot.role))
        for slot in reversed(slots):
            node = self._arguments[slot]
            next(iter(graph.nodes)).prepend(now.get(node, node))
        gm = graph_module(self.tracer.root, graph)
        self._first = gm if self._first is None else self._first
        return Graph(gm, tuple(slots), tuple(slot for slot, _ in results))

    def go_on(self) -> None:
        """Allow more to be recorded after `graph`: the graph that it returned gets a copy of the nodes."""
        if self._goes_on or self._first is None:
            return
        recorded, handed_out = self.tracer.graph, torch.fx.Graph(tracer_cls=PythonKeyTracer)
        handed_out.output(handed_out.graph_copy(recorded, {}))
        self._first.graph = handed_out
        recorded.erase_node(recorded.output_node())
        self._goes_on = True


def _anomaly_mode_off() -> contextlib.AbstractContextManager[Any]:
    """It would look for NaNs in fakes. The flag is global to all threads, so it is set only if it is on."""
    return (
        torch.autograd.set_detect_anomaly(False) if torch.is_anomaly_enabled() else contextlib.nullcontext()
    )


_SEGMENTS: tuple[Role, ...] = ("primal", "size", "tangent", "total", "buffer", "rng")
"""The order of a joint graph's arguments."""


def _identifier(slot: Slot) -> str:
    text = "".join(c if c.isalnum() else "_" for c in str(slot)).strip("_") or "arg"
    return f"{slot.role}_{text}" if slot.role in LATE_ROLES or not text[0].isalpha() else text
