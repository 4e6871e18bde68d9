"""The graphs that a compilation records, as something to compare: nodes, with all that is known of each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import aotdist
from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.torch_seam.tensors import storage_id
from aotdist.trace.recorder import Recorder


def _described(value: Any, memory: dict[int, int]) -> Any:
    """A value of a graph, with the storages in the order of first use."""
    if isinstance(value, (list, tuple)):
        return [_described(one, memory) for one in value]
    if not isinstance(value, torch.Tensor):
        return str(value)
    of_storage = str(value.untyped_storage().nbytes()), str(value.storage_offset())
    lies_in = memory.setdefault(storage_id(value), len(memory)), of_storage
    sizes = str(value.size()), str(value.stride())
    keys = str(torch._C._dispatch_keys(value))  # pyright: ignore[reportPrivateUsage]
    flags = value.requires_grad, value.is_conj(), value.is_neg(), value._is_view(), value.is_inference()
    return type(value).__name__, sizes, lies_in, value.dtype, value.device, keys, flags


def recorded(
    program: Callable[..., Any], size: tuple[int, ...], patch: pytest.MonkeyPatch, **settings: Any
) -> list[list[Any]]:
    """The graphs that a compilation of `program` records: their nodes, with all that is known of each."""
    graphs: list[list[Any]] = []
    record = Recorder.graph

    def noted(self: Recorder, *args: Any) -> Any:
        graph, memory = record(self, *args), dict[int, int]()
        nodes = graph.gm.graph.nodes
        metas = [{key: _described(value, memory) for key, value in node.meta.items()} for node in nodes]
        lines = [(n.op, n.name, n.target, str(n.args), str(n.kwargs)) for n in nodes]
        graphs.append(list(zip(lines, metas, strict=True)))
        return graph

    with patch.context() as here:
        here.setattr(Recorder, "graph", noted)
        torch.manual_seed(0)
        FakeTensorMode.cache_clear()  # PyTorch's own cache forgets which results are one tensor
        call = aotdist.compile(_calling(program), backend="fx", settings=aotdist.Settings(**settings))
        ends = pytree.tree_leaves(call(torch.ones(size, requires_grad=True)))
        ends = [end for end in ends if isinstance(end, torch.Tensor) and end.requires_grad]
        if ends:
            sum(end.sum() for end in ends).backward()
    return graphs


def _calling(program: Callable[..., Any]) -> Callable[[torch.Tensor], Any]:
    def call(x: torch.Tensor) -> Any:
        return program(x)

    return call
