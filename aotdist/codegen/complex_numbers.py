"""Complex numbers, for Inductor: it has no kernels for them, and calls PyTorch's operators (torch 2.13).

It does not know that a view of complex numbers shows the memory of what it is made of. So where it writes a
scatter in place, through such a view, what reads the result may run before: the gradient of a complex `qr`
was wrong by 1. Scatters are operators of our own here, which it leaves as they are.

Results of complex linear algebra lie otherwise than it takes for granted, by columns. That is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from aotdist.torch_seam.operators import OpOverload, operator_name, schema_of

_ATEN = torch.ops.aten
_LIBRARY = torch.library.Library("aotdist", "FRAGMENT")
_LINEAR_ALGEBRA = re.compile(r"linalg|^(cholesky|lu_|svd|qr|ormqr|geqrf|triangular_solve)")


def _own(scatter: OpOverload) -> OpOverload:
    """An operator that does the same, of which a compiler knows nothing."""
    schema = schema_of(scatter)
    name = f"complex_{operator_name(scatter)}"
    _LIBRARY.define(name + schema[schema.index("(") :])
    _LIBRARY.impl(name, scatter, "CompositeExplicitAutograd")
    return getattr(torch.ops.aotdist, name).default


_OWN = {
    scatter: _own(scatter)
    for scatter in (
        _ATEN.slice_scatter.default,
        _ATEN.select_scatter.default,
        _ATEN.diagonal_scatter.default,
        _ATEN.as_strided_scatter.default,
    )
}


def keep_scatters(gm: GraphModule) -> None:
    """Let scatters of complex numbers be left as they are, in place."""
    for scatter, own in _OWN.items():
        for node in gm.graph.find_nodes(op="call_function", target=scatter):
            if _is_complex(node):
                node.target = own


def linear_algebra(gm: GraphModule) -> Iterator[Node]:
    """The nodes that are linear algebra of complex numbers."""
    for node in gm.graph.nodes:
        name = operator_name(node.target)
        if name and _LINEAR_ALGEBRA.search(name) and any(map(_is_complex, node.all_input_nodes)):
            yield node


def _is_complex(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()
