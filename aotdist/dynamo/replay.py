"""Runs a graph of Dynamo node by node, with the source lines and modules of the program."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.checkpoint import checkpoint, noop_context_fn

from aotdist.origins import line_of_stack, set_current_line, set_current_module
from aotdist.torch_seam.dynamo import is_data_assignment, lowers_version, reads_version, sets_versions
from aotdist.torch_seam.operators import HigherOrderOperator
from aotdist.torch_seam.tensors import set_versions
from aotdist.torch_seam.trees import pytree


class Replay(Interpreter):
    """Runs a graph; a trace records the user's source lines instead of those of the graph's code.

    Args:
        gm: the graph.
    """

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
