"""One call of a block as it was recorded, and copies of its nodes for other calls."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from aotdist.capture.code import is_users_class
from aotdist.capture.constants import is_constant
from aotdist.convention.rng import draws_nothing
from aotdist.subclasses.protocol import Recipe, plain_tensors, rebuild, recipe_of
from aotdist.torch_seam.autograd import saves_tensors
from aotdist.torch_seam.block_gradients import consumers_within, functions_of
from aotdist.torch_seam.functional import (
    FakeMetadata,
    FakeTensor,
    FunctionalTensor,
    below_modes,
    is_functional_base,
)
from aotdist.torch_seam.modes import no_modes, torch_functions_off
from aotdist.torch_seam.nodes import Appender
from aotdist.torch_seam.operators import is_operator
from aotdist.torch_seam.tensors import storage_id
from aotdist.torch_seam.trees import pytree
from aotdist.trace.blocks.kinds import Kind, Unfit, metadata_of
from aotdist.trace.blocks.writes import Write
from aotdist.trace.recorder import Recorder

Value = tuple[tuple[Node, ...], Recipe]
"""The nodes of a tensor's plain tensors, and how it is put together."""
_NUMBERED = re.compile(r"_\d+$")


def value_of(tensor: torch.Tensor, recorder: Recorder) -> Value:
    """The nodes of a traced tensor's plain tensors, and how it is put together."""
    return tuple(map(recorder.value, plain_tensors(tensor))), recipe_of(tensor)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A recorded node, which may have been erased from its graph since.

    Args:
        node: the node, to which arguments of others refer.
        args: its arguments when it was recorded.
        kwargs: likewise.
        name: its name without a number at the end.
    """

    node: Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str

    @classmethod
    def of(cls, node: Node) -> Step:
        """A node of a graph."""
        return cls(node, node.args, dict(node.kwargs), _NUMBERED.sub("", node.name))


def nodes_since(nodes: Any, last: Node | None) -> list[Node]:
    """The nodes of a graph after `last`; all, if that is None."""
    found = itertools.takewhile(lambda node: node is not last, reversed(nodes))
    return [*found][::-1]


def closes_over(nodes: Sequence[Node], inputs: Sequence[Node]) -> bool:
    """Whether nodes take tensors from outside, other than these inputs."""
    known = {*nodes, *inputs}
    given = {one for node in nodes for one in node.all_input_nodes if one not in known}
    return any(not isinstance(one.meta.get("val"), torch.SymInt) for one in given)


def metadata_of_values(steps: Iterable[Step]) -> dict[int, FakeMetadata]:
    """The metadata of the values of nodes, by identity.

    Raises:
        Unfit: metadata do not describe a value.
    """
    values = pytree.tree_leaves([step.node.meta.get("val") for step in steps])
    with torch_functions_off():
        return {id(value): metadata_of(value) for value in values if isinstance(value, FakeTensor)}


@dataclass(frozen=True, slots=True)
class Copying:
    """How recorded nodes become those of another call.

    The copies' values have the metadata of the recorded ones, and share memory where those do.

    Args:
        recorder: records the copies.
        copies: the copy of each recorded node, and the node in the place of each input; it is added to.
        known: the metadata of the recorded values, by identity.
        memory: for each memory of recorded values a fake in the memory of the copy; it is added to.
        meta: the `meta` of a copy, from that of the recorded node; without a serial, the copy gets the next.
        made: the copies of recorded values, by identity; it is added to.
    """

    recorder: Recorder
    copies: dict[Node, Node]
    known: Mapping[int, FakeMetadata]
    memory: dict[int, torch.Tensor]
    meta: Callable[[Mapping[str, Any]], dict[str, Any]]
    made: dict[int, Any] = field(default_factory=dict)

    def copy(self, steps: Sequence[Step]) -> None:
        """Record copies."""
        tracer, copies = self.recorder.tracer, self.copies
        appender = Appender(tracer.graph)
        with below_modes():
            values = [self._copied(step.node.meta.get("val")) for step in steps]
        for step, value in zip(steps, values, strict=True):
            meta = self.meta(step.node.meta)
            if "val" in step.node.meta:
                meta["val"] = value
            if step.node.op == "get_attr":
                copies[step.node] = node = tracer.constant(str(step.node.target))
                node.meta.update({**meta, "serial": node.meta["serial"]})
                continue
            if "serial" not in meta:
                meta["serial"] = tracer.next_serial()
            args, kwargs = map_arg((step.args, step.kwargs), lambda node: copies.get(node, node))
            copies[step.node] = appender.add("call_function", step.node.target, args, kwargs, step.name, meta)

    def _copied(self, value: Any) -> Any:
        """The value of the copy of a node, from the value of the node; called in `below_modes`."""
        if not isinstance(value, FakeTensor):
            return type(value)(map(self._copied, value)) if isinstance(value, (list, tuple)) else value
        made = self.made.get(id(value))
        if made is None:
            like, memory = self.known[id(value)], storage_id(value)
            owner = self.memory.get(memory)
            made = self.made[id(value)] = like.made_below_modes(self.recorder.fake_mode, owner)
            if owner is None:
                self.memory[memory] = made
        return made

    def snapshot(self) -> Copying:
        """A copy of this, so that what is copied by it is not added here."""
        return replace(self, copies=dict(self.copies), memory=dict(self.memory), made=dict(self.made))

    def put_together(self, nodes: Sequence[Node], recipe: Recipe) -> torch.Tensor:
        """A traced tensor, made by a recipe from the copies of recorded nodes."""
        return rebuild(recipe, [self.recorder.traced_value(self.copies.get(node, node)) for node in nodes])


def meta_at(module: Callable[[str], str], seq_offset: int, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The `meta` of a node in another call, without its serial.

    Args:
        module: from the path of a module in the recorded call to that in the other call.
        seq_offset: is added to sequence numbers.
        recorded: the `meta` of the recorded node.
    """
    meta: dict[str, Any] = {**recorded, "module": module(recorded["module"])}
    del meta["serial"]
    if "seq_nr" in meta:
        meta["seq_nr"] += seq_offset
    return meta


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """A call of a block.

    Args:
        path: of the module.
        kind: of the call.
        inputs: the nodes of the plain tensors that it was given.
        steps: what was recorded.
        writes: what it wrote of what it was given.
        outs: the leaves of what it returned: traced tensors, `Given` and constants.
        spec: the structure of that.
        first_seq: the sequence number of the first autograd node that it made, as the graph counts them.
        num_seqs: how many it made.
        edges: for each tensor of `kind.tensors`, how many gradients the block sends to it.
        consumers: the autograd nodes that send them: node, position among what it sends, and the tensor.
        saves: whether autograd saved tensors.
        metadata: the metadata of its values, by identity: added when a second call has recorded the same,
            and by its backwards.
        parameters: the parameters of each module during the call: under FSDP2 not those between calls.
    """

    path: str
    kind: Kind
    inputs: tuple[Node, ...]
    steps: tuple[Step, ...]
    writes: tuple[Write, ...]
    outs: tuple[Any, ...]
    spec: pytree.TreeSpec
    first_seq: int
    num_seqs: int
    edges: tuple[int, ...]
    consumers: tuple[tuple[Any, int, int], ...]
    saves: bool
    metadata: dict[int, FakeMetadata]
    parameters: Mapping[int, Mapping[str, torch.Tensor | None]]

    @contextmanager
    def having_its_parameters(self) -> Generator[None]:
        """In this context its modules have these parameters again, which a checkpoint in it computes with."""
        held = {number: vars(module)["_parameters"] for number, module in self.kind.modules.items()}
        before = {number: dict(named) for number, named in held.items()}
        for number, named in self.parameters.items():
            held[number].update(named)
        try:
            yield
        finally:
            for number, named in before.items():
                held[number].update(named)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that it returned."""
        return [out for out in self.outs if isinstance(out, torch.Tensor)]

    def returned(self, kind: Kind, tensors: Sequence[torch.Tensor]) -> Any:
        """What another call of this kind returns, given the tensors that it computes."""
        made = iter(tensors)

        def leaf(out: Any) -> Any:
            if isinstance(out, Given):
                return kind.tensors[out.position]
            return next(made) if isinstance(out, torch.Tensor) else out

        return pytree.tree_unflatten(list(map(leaf, self.outs)), self.spec)

    def made(self, node: Node) -> bool:
        """Whether a node of a backward was recorded by autograd nodes of the block, or adds up gradients."""
        seq_nr = node.meta.get("seq_nr", self.first_seq)
        return node.op != "placeholder" and self.first_seq <= seq_nr < self.first_seq + self.num_seqs

    def module_in(self, path: str) -> Callable[[str], str]:
        """Renames modules for the same call of the module at another path."""
        before, inside = self.path, f"{self.path}."
        return lambda module: (
            path + module[len(before) :] if module == before or module.startswith(inside) else module
        )

    def difference_from(self, other: Recorded, recorder: Recorder) -> str | None:
        """How what another call recorded differs; None if it recorded the same."""
        if len(self.steps) != len(other.steps):
            return "two calls record different numbers of operators"
        counterpart: dict[Node, Node] = dict(zip(self.inputs, other.inputs, strict=True))
        module = self.module_in(other.path)
        for ours, theirs in zip(self.steps, other.steps, strict=True):
            args, kwargs = map_arg((ours.args, ours.kwargs), lambda node: counterpart.get(node, node))
            a, b = ours.node, theirs.node
            same = (args, kwargs) == (theirs.args, theirs.kwargs) and _same_target(a, b, recorder)
            if not same or not _same_meta(a.meta, b.meta, module):
                return f"two calls record different operators, at {b.meta['source']}"
            counterpart[a] = b
        our_writes = tuple(replace(write, node=counterpart[write.node]) for write in self.writes)
        if our_writes != other.writes:
            return "two calls write different values"
        made, made_there = ([value_of(out, recorder)[0] for out in one.tensors()] for one in (self, other))
        returned = [tuple(counterpart.get(node, node) for node in nodes) for nodes in made] == made_there
        constants = [[o for o in one.outs if not isinstance(o, torch.Tensor)] for one in (self, other)]
        same_way = (self.edges, self.num_seqs, self.saves) == (other.edges, other.num_seqs, other.saves)
        if not (returned and constants[0] == constants[1] and same_way and self.spec == other.spec):
            return "two calls return different values"
        return None


def _same_target(ours: Node, theirs: Node, recorder: Recorder) -> bool:
    if ours.op == theirs.op == "get_attr":
        a, b = (recorder.tracer.held(str(node.target)) for node in (ours, theirs))
        with no_modes(), torch_functions_off():
            return a.dtype == b.dtype and torch.equal(a, b)
    return ours.op == theirs.op and ours.target is theirs.target


_OF_ONE_CALL = frozenset({"serial", "val", "module", "seq_nr", "eager_input_vals", "tensor_meta"})
"""Entries of `node.meta` that differ between calls."""


def _same_meta(ours: Mapping[str, Any], theirs: Mapping[str, Any], module: Callable[[str], str]) -> bool:
    names = (ours.keys() | theirs.keys()) - _OF_ONE_CALL
    return (
        all(ours.get(name) == theirs.get(name) for name in names)
        and module(ours["module"]) == theirs["module"]
    )


_READS_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def check_copyable(nodes: Sequence[Node], recorder: Recorder) -> None:
    """Check that what a call recorded may be copied.

    Raises:
        Unfit: something in it would not be the same in a copy.
    """
    for node in nodes:
        held = recorder.tracer.held(str(node.target)) if node.op == "get_attr" else None
        is_plain = is_operator(node.target) or node.target is operator.getitem
        if not isinstance(held, torch.Tensor) and not is_plain:
            raise Unfit(f"it records more than operators (`{node.name}`)")
        tags = {*getattr(node.target, "tags", ())}
        if _READS_DATA & tags:
            raise Unfit(f"it reads data (`{node.name}`)")
        # A function whose forward runs without gradients may call the block again in its backward, from the
        # state of the generator of before: copies move none.
        may_draw = torch.Tag.nondeterministic_seeded in tags and not torch.is_grad_enabled()
        if may_draw and not draws_nothing(node.target, node.args, node.kwargs):  # type: ignore[arg-type]
            raise Unfit(f"it draws random numbers where no gradients are asked for (`{node.name}`)")


@dataclass(frozen=True, slots=True)
class Given:
    """A leaf of a result that is a tensor which the call was given: its position in `Kind.tensors`."""

    position: int


def checked_outs(outs: Sequence[Any], given: Kind, made: set[Node], recorder: Recorder) -> tuple[Any, ...]:
    """The leaves of what a call returned, with `Given` in the place of tensors that it was given.

    Raises:
        Unfit: a leaf is something other than these, new tensors and constants.
    """
    returned: set[int] = set()
    positions = {id(tensor): position for position, tensor in enumerate(given.tensors)}
    outs = tuple(Given(positions[id(out)]) if id(out) in positions else out for out in outs)
    for out in outs:
        if not isinstance(out, torch.Tensor):
            if not isinstance(out, Given) and not is_constant(out):
                raise Unfit(f"it returns a {type(out).__name__}")
            continue
        plains = plain_tensors(out)
        if not all(isinstance(plain, FunctionalTensor) for plain in plains):
            raise Unfit("it returns a tensor that it closes over")
        if out._is_view() or out._backward_hooks or id(out) in returned:
            raise Unfit("it returns a view, a tensor twice, or one with a hook")
        returned.add(id(out))
        for plain in plains:
            if not is_functional_base(plain) or recorder.value(plain) not in made:  # type: ignore[arg-type]
                raise Unfit("it returns a view, or a tensor that it did not make")
    return outs


def gradients_of(
    outs: Sequence[Any], given: Kind, first: int
) -> tuple[tuple[int, ...], tuple[tuple[Any, int, int], ...], bool]:
    """Where the gradients of a block's results go: see `Recorded.edges`, `consumers` and `saves`.

    Raises:
        Unfit: they go to tensors that the call was not given.
    """
    ends = [out for out in outs if isinstance(out, torch.Tensor) and out.requires_grad]
    inner, consumers = consumers_within(ends, given.tensors, first)
    if consumers is None:
        raise Unfit("gradients go to a tensor that it closes over")
    sources = {edge for node in inner for edge in node.next_functions}
    if any((end.grad_fn, end.output_nr) in sources for end in ends):
        # A copy has one autograd node: a gradient of the first would lack what comes through the other.
        raise Unfit("it returns a tensor, and what follows from it")
    if any(map(is_users_class, functions_of(inner))):
        raise Unfit("it calls an autograd function of the user's")
    edges = [0] * len(given.tensors)
    for _, _, position in consumers:
        edges[position] += 1
    return tuple(edges), tuple(consumers), any(map(saves_tensors, inner))
