"""Recording: which node stands for a tensor, and graphs as modules."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx._lazy_graph_module import _LazyGraphModule

# Operations as nodes.
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode as ProxyTorchDispatchMode
from torch.fx.experimental.proxy_tensor import PythonKeyTracer as PythonKeyTracer
from torch.fx.experimental.proxy_tensor import _ProxyTensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot as _get_proxy_slot
from torch.fx.experimental.proxy_tensor import make_fx as make_fx

from aotdist.torch_seam.functional import FunctionalTensor, functional_value
from aotdist.torch_seam.nodes import is_erased
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.trees import pytree, tree_children


def graph_module(root: torch.nn.Module | dict[str, Any], graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A `GraphModule` that generates its Python code only when it is needed: saves 0.6 s for 40,000 nodes."""
    return _LazyGraphModule(root, graph)


def unknown_to_the_innermost_tracer(args: Any) -> FunctionalTensor | None:
    """A functional tensor among arguments that the innermost proxy mode has not recorded, if any."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None:
        return None
    tensors = (arg for arg in pytree.tree_leaves(args) if isinstance(arg, FunctionalTensor))
    return next(
        (t for t in tensors if node_of(torch._from_functional_tensor(t.elem), mode.tracer) is None), None
    )


def track(fake: torch.Tensor, node: torch.fx.Node, tracer: PythonKeyTracer) -> None:
    """From now on, `fake` stands for `node` in what `tracer` records."""
    tracer.tensor_tracker[fake] = _ProxyTensor(torch.fx.Proxy(node, tracer), None)


def track_number(number: Any, node: torch.fx.Node, tracer: PythonKeyTracer) -> None:
    """From now on, a symbolic `number` stands for `node` in what PyTorch's own proxy mode records.

    Otherwise that mode adds a node that reads the size off the first tensor with it.
    """
    from torch.fx.experimental.proxy_tensor import thunkify

    tracer.symnode_tracker[number] = thunkify(tracer, lambda: torch.fx.Proxy(node, tracer))


def node_of(fake: torch.Tensor, tracer: PythonKeyTracer) -> torch.fx.Node | None:
    """The node that computed `fake`, or None when it was not recorded."""
    slot = _get_proxy_slot(fake, tracer, None)
    if slot is None or not is_erased(slot.proxy.node):
        return None if slot is None else slot.proxy.node
    node = tracer.recorded_again(slot.proxy.node)
    track(fake, node, tracer)
    return node


def node_here(tensor: torch.Tensor) -> torch.fx.Node:
    """The node that computes the current value of a functional tensor, in what is recorded now."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    assert mode is not None and isinstance(tensor, FunctionalTensor), (
        "a trace runs, and the tensor is its own"
    )
    node = node_of(functional_value(tensor), mode.tracer)
    assert node is not None, "the trace made the tensor"
    return node


def recorded_once(
    key: Hashable, function: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor
) -> torch.Tensor:
    """`function(given)`, of which a trace may copy what it recorded for an argument that was like this one.

    Args:
        key: equal for functions that run the same operators on equal arguments.
        function: computes one new tensor, and does nothing besides; not with autograd.
        given: its argument.
    """
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    by_way_of = getattr(mode, "calling_functions", None)
    return function(given) if by_way_of is None else by_way_of(key, function, given)


def is_recording(mode: ProxyTorchDispatchMode) -> bool:
    """Whether a proxy mode records what happens now beneath functionalisation."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is mode


_PROXY_MODE_OPTIONS = inspect.signature(ProxyTorchDispatchMode).parameters


def decomposition_option(table: Mapping[OpOverload, Callable[..., Any]]) -> dict[str, Any]:
    """How a proxy mode gets its decompositions: an argument from torch 2.12 on, a global before."""
    return {"decomposition_table": dict(table)} if "decomposition_table" in _PROXY_MODE_OPTIONS else {}


def decomposing(table: Mapping[OpOverload, Callable[..., Any]]) -> AbstractContextManager[Any]:
    """The other half of `decomposition_option`: the context that sets the global."""
    if "decomposition_table" in _PROXY_MODE_OPTIONS:
        return nullcontext()
    from torch.fx.experimental.proxy_tensor import decompose

    return decompose(dict(table))


def record_on_fakes(
    call: Callable[..., Any], fakes: Sequence[torch.Tensor], table: Mapping[OpOverload, Callable[..., Any]]
) -> torch.fx.GraphModule:
    """The graph of what `call` does with these fake tensors; operators in `table` are decomposed."""
    return make_fx(call, decomposition_table=dict(table), tracing_mode="real")(*fakes)


def call_with_primals_and_tangents(gm: torch.fx.GraphModule, num_primals: int, num_values: int) -> None:
    """Let a flat joint graph be called as PyTorch's: `(primals, tangents)` -> `(values, gradients)`."""
    from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

    num_tangents = len(gm.graph.find_nodes(op="placeholder")) - num_primals
    results: Any = gm.graph.output_node().args[0]
    ins: Any = [[0] * num_primals, [0] * num_tangents]
    outs: Any = ((0,) * num_values, (0,) * (len(results) - num_values))
    info = _PyTreeInfo(["primals", "tangents"], pytree.tree_structure(ins), pytree.tree_structure(outs))
    gm.graph.set_codegen(_PyTreeCodeGen(info))
    gm.recompile()


def primals_and_values(gm: torch.fx.GraphModule) -> tuple[int, int] | None:
    """The counts that a graph was given by `call_with_primals_and_tangents`; None if it was not."""
    from torch.fx.graph import _PyTreeCodeGen

    codegen = gm.graph._codegen
    if not isinstance(codegen, _PyTreeCodeGen) or codegen.pytree_info.orig_args != ["primals", "tangents"]:
        return None
    info = codegen.pytree_info
    assert info.out_spec is not None, "a joint graph returns values and gradients"
    return tree_children(info.in_spec)[0].num_leaves, tree_children(info.out_spec)[0].num_leaves
