"""A graph of Dynamo as a function of named tensors and constants, which `capture` can take.

Dynamo passes dynamic sizes as numbers, beside the tensors that have them: each is read off its tensor
instead. Other integers become the size of an empty tensor. Dynamic floats come as tensors and become numbers
again, since eager computes with numbers. Objects (meshes) become constants, compared by identity.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.checkpoint import checkpoint, noop_context_fn

from aotdist.capture.constants import is_constant
from aotdist.errors import UnsupportedProgram
from aotdist.origins import line_of_stack, set_current_line, set_current_module
from aotdist.torch_seam.dynamo import (
    dynamo_source,
    grad_mode_left_by,
    is_data_assignment,
    is_of_hooks,
    is_wrapped_number,
    lowers_version,
    reads_version,
    sets_versions,
)
from aotdist.torch_seam.operators import HigherOrderOperator
from aotdist.torch_seam.symbols import expression, open_sizes
from aotdist.torch_seam.tensors import set_versions
from aotdist.torch_seam.trees import pytree

Kind = Literal["tensors", "size", "integer", "float", "other"]


SizePlace: TypeAlias = tuple[int, int, int]
"""Where a size is read: position of the input, position of the tensor in it, dimension."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a graph.

    Args:
        name: as the user would write it.
        kind: `tensors`: a tensor, or a list of them; `size`: of one of the tensors; `integer`: any other;
            `float`, which comes as a tensor; `other`: a constant or an object.
        dims: the dynamic dimensions of each of its tensors.
        place: where a `size` is read.
    """

    name: str
    kind: Kind
    dims: tuple[frozenset[int], ...] = ()
    place: SizePlace | None = None


@dataclass(frozen=True, slots=True)
class DynamoGraph:
    """A graph, and its inputs.

    Args:
        left_grad_mode: the grad mode that the graph leaves behind; None if it does not set it.
        objects: arguments that are neither tensors nor constants, by a unique name. They are kept alive, so
            that no other object gets their address.
    """

    gm: GraphModule
    inputs: tuple[Input, ...]
    left_grad_mode: bool | None
    objects: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, gm: GraphModule) -> DynamoGraph:
        """Read the inputs of a graph.

        Raises:
            UnsupportedProgram: it has hooks, which differ from call to call.
        """
        nodes = gm.graph.find_nodes(op="placeholder")
        names = distinct(as_written(dynamo_source(node) or str(node.target)) for node in nodes)
        sizes = _first_places([node.meta.get("example_value") for node in nodes])
        inputs = tuple(_input(name, node, sizes) for name, node in zip(names, nodes, strict=True))
        return cls(gm, inputs, grad_mode_left_by(gm))

    def named(self, values: Sequence[Any]) -> dict[str, Any]:
        """The arguments of a call of the graph as tensors and constants, by name; sizes are left out."""
        return {
            each.name: self._argument(each.kind, value)
            for each, value in zip(self.inputs, values, strict=True)
            if each.kind != "size"
        }

    def open_dims(self, named: Mapping[str, Any]) -> dict[int, frozenset[int]]:
        """The dynamic dimensions of these arguments, by the `id` of the tensor."""
        found: dict[int, frozenset[int]] = {}
        for each in self.inputs:
            if each.kind == "tensors":
                for tensor, dims in zip(_tensors(named[each.name]), each.dims, strict=True):
                    found[id(tensor)] = found.get(id(tensor), frozenset()) | dims
            elif each.kind == "integer" and isinstance(named[each.name], torch.Tensor):
                found[id(named[each.name])] = frozenset((0,))
        return {identity: dims for identity, dims in found.items() if dims}

    def run(self, **named: Any) -> Any:
        """Run the graph node by node, in a trace or eagerly."""
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # see `left_grad_mode`
            return Replay(self.gm).run(*(self._value(each, named) for each in self.inputs))

    def _argument(self, kind: Kind, value: Any) -> Any:
        match kind:
            case "float":
                return value.item()
            case "integer" if value >= 0:
                return torch.empty(value, 0)
            case "other" if not is_constant(value):
                name = f"{type(value).__name__} at {id(value):#x}"
                self.objects[name] = value
                return name
            case _:
                return value

    def _value(self, each: Input, named: Mapping[str, Any]) -> Any:
        """The value of an input; the inverse of `_argument`."""
        if each.place is not None:
            owner, number, dim = each.place
            return _tensors(named[self.inputs[owner].name])[number].size(dim)
        value = named[each.name]
        match each.kind:
            case "integer" if isinstance(value, torch.Tensor):
                return value.size(0)
            case "other" if isinstance(value, str):
                return self.objects.get(value, value)
            case _:
                return value


def _tensors(value: Any) -> Sequence[Any]:
    """The tensors of an input: itself, or those of a list, which tapes take."""
    return value if isinstance(value, (list, tuple)) else (value,)


def _first_places(examples: Sequence[Any]) -> dict[str, SizePlace]:
    """For each symbol, the first tensor and dimension of that size."""
    found: dict[str, SizePlace] = {}
    for position, example in enumerate(examples):
        for number, tensor in enumerate(_tensors(example) if _is_of_tensors(example) else ()):
            for dim, size in open_sizes(tensor):
                found.setdefault(expression(size), (position, number, dim))
    return found


def _is_of_tensors(example: Any) -> bool:
    return all(isinstance(each, torch.Tensor) for each in _tensors(example))


def _input(name: str, node: Node, places: Mapping[str, SizePlace]) -> Input:
    example = node.meta.get("example_value")
    if isinstance(example, torch.SymInt):
        place = places.get(expression(example))
        return Input(name, "integer") if place is None else Input(name, "size", place=place)
    if is_of_hooks(example):
        raise UnsupportedProgram(
            "Dynamo compiles a hook together with the program that registers it, for a compiled backward",
            stage="capture",
            fix="call the program before `compile_backward()`: Dynamo breaks the graph at the hook then",
        )
    if not _is_of_tensors(example):
        return Input(name, "other")
    if is_wrapped_number(node) and all(_reads_number(user) for user in node.users):
        return Input(name, "float")
    dims = tuple(frozenset(dim for dim, _ in open_sizes(tensor)) for tensor in _tensors(example))
    return Input(name, "tensors", dims)


def _reads_number(node: Node) -> bool:
    """Whether a node reads the number inside of a tensor (`item`), itself or in a body that it calls."""
    if isinstance(node.target, HigherOrderOperator):
        return True
    return node.op == "call_method" and node.target == "item"


class Replay(Interpreter):
    """Runs a graph; a trace records the user's source lines instead of those of the graph's code."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.extra_traceback = False  # errors say where they come from themselves

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph."""
        result = super().run(*args, **kwargs)
        set_current_line("")
        return result

    def run_node(self, n: Node) -> Any:
        """Run one node."""
        set_current_module(_module_of(n))
        # It stays set if the node raises: the error names it.
        set_current_line(line_of_stack(n.stack_trace or ""))
        if is_data_assignment(n):
            (tensor, data), _ = self.fetch_args_kwargs_from_env(n)
            tensor.data = data
            return tensor
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function; of higher-order operators that only mark a region, the region is run."""
        if lowers_version(target):  # the write that it takes back was not counted
            return args[0]
        if reads_version(target):  # the operator would read the counter of the tensor inside a stand-in
            return args[0]._version
        if sets_versions(target):
            return set_versions(*map(tuple, args))
        match target:
            case torch.ops.higher_order.tag_activation_checkpoint:
                return _checkpointed(*args, **kwargs)
            case torch.ops.higher_order.invoke_subgraph:
                body, _, *given = args
                return Replay(body).run(*given)
            case torch.ops.higher_order.autograd_function_apply if "saved_for_backward_idx" in kwargs:
                return _applied(*args, **kwargs)
            case HigherOrderOperator():
                given = pytree.tree_map_only(GraphModule, lambda body: Replay(body).run, (args, kwargs))
                return super().call_function(target, *given)
            case _:
                return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method; `item` of a float, which Dynamo passes as a tensor, is the float."""
        if target == "item" and isinstance(args[0], float):
            return args[0]
        return super().call_method(target, args, kwargs)


def _module_of(node: Node) -> str:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return path_of_module(stack[-1][0]) if stack else ""


class _Last(torch.autograd.Function):
    """A gradient that depends on `sources`, and raises when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, *sources: Any) -> torch.Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError("it goes through an `autograd.Function` that Dynamo went through")


def _applied(forward: GraphModule, backward: GraphModule, *args: Any, **options: Any) -> Any:
    """Apply an autograd function that Dynamo has traced into two graphs.

    Its saved tensors are saved, with their history. Gradients of its gradients raise: Dynamo does not record
    what its backward does under `no_grad`, so PyTorch's own operator computes wrong ones.
    """
    to_save = frozenset(options["saved_for_backward_idx"])

    class ApplyTemplate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output, values = Replay(forward).run(*inputs)
            outs = output if isinstance(output, (tuple, list)) else (output,)
            ctx.mark_dirty(*(outs[k] for k in options.get("dirty_idx", ())))
            ctx.mark_non_differentiable(*(outs[k] for k in options["non_differentiable_idx"]))
            ctx.save_for_backward(*(value for k, value in enumerate(values) if k in to_save))
            ctx.others = {k: value for k, value in enumerate(values) if k not in to_save}
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            saved = iter(ctx.saved_tensors)
            count = len(to_save) + len(ctx.others)
            values = [next(saved) if k in to_save else ctx.others[k] for k in range(count)]
            results = Replay(backward).run(*grads, *values)
            if not torch.is_grad_enabled():
                return results
            return tuple(
                None if one is None else _Last.apply(one.detach(), *grads, *values) for one in results
            )

    return ApplyTemplate.apply(*args)


def _checkpointed(body: GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Run `body` in a checkpoint; PyTorch's operator would only tag its nodes for the partition.

    The arguments contain tensors that the program closes over and may write. As arguments of `checkpoint`
    these may not be written, so `body` closes over them here too.
    """
    context_fn = body.meta.get("_checkpoint_context_fn", noop_context_fn)
    options: dict[str, Any] = {**kwargs, "use_reentrant": False, "context_fn": context_fn}
    return checkpoint(lambda: Replay(body).run(*args), **options)


_OF_THE_MODULE = re.compile(r"^L\['(?:self|fn)'\](?=\._(?:modules|parameters|buffers)\[)")
_MODULE = re.compile(r"^L\['(?:self|fn)'\]\.?")
_LOCAL = re.compile(r"^[LG]\['([^']+)'\]")
_IN_DICTIONARY = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_ATTRIBUTE = re.compile(r"\.__dict__\['([^']+)'\]")


def as_written(source: str) -> str:
    """`blocks.3.scale` for `L['self']._modules['blocks']._modules['3']._parameters['scale']`.

    Parameters of the module whose `forward` is compiled have the names that they have in its `state_dict`.
    """
    source = _LOCAL.sub(r"\1", _OF_THE_MODULE.sub("", source))
    return _IN_DICTIONARY.sub(r".\1", _ATTRIBUTE.sub(r".\1", source)).removeprefix(".")


def path_of_module(path: str) -> str:
    """`blocks.3` for `L['self'].blocks.3`, as Dynamo names modules; empty for the compiled module itself."""
    return as_written(_MODULE.sub("", path))


def distinct(names: Iterable[str]) -> list[str]:
    """The names, with a number behind each that stands before."""
    found: dict[str, None] = {}
    for name in names:
        number, new = 1, name
        while new in found:
            number += 1
            new = f"{name} ({number})"
        found[new] = None
    return list(found)
