"""Which operators may run a second time in the backward: tables of names, and the limits around them.

Names are `namespace::operator`, overloads left out. The tables hold operators before and after
decomposition. What is in none of them is taken for a library call: never run twice, and a border
that no compiler fuses across.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch.fx import Node

from aotdist.partition.traits import WAIT, is_getitem, is_view, op_is_effectful, op_is_view
from aotdist.torch_seam.nodes import inputs_of
from aotdist.torch_seam.operators import OpOverload, cached_by_operator


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


POINTWISE = _aten(
    "abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or"
    " bitwise_xor bitwise_left_shift bitwise_right_shift ceil celu clamp clamp_max clamp_min copysign cos"
    " cosh div elu eq erf erfc erfinv exp exp2 expm1 fill floor floor_divide fmod frac ge gelu glu gt"
    " hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf isnan isneginf isposinf le leaky_relu"
    " lerp lgamma log log10 log1p log2 log_sigmoid_forward logical_and logical_not logical_or logical_xor"
    " logit lt masked_fill maximum minimum mish mul ne neg nan_to_num pow reciprocal relu relu6 remainder"
    " round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square sub"
    " tan tanh threshold true_divide trunc where xlogy"
    " gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward"
    " silu_backward sigmoid_backward softplus_backward tanh_backward threshold_backward"
) | frozenset({"prims::convert_element_type", "prims::device_put"})
"""One result element from one element of each argument."""

MOVES = _aten("clone _to_copy cat stack constant_pad_nd flip roll repeat tril triu copy") | _aten(
    "view_copy expand_copy permute_copy slice_copy unsqueeze_copy squeeze_copy transpose_copy t_copy"
)
"""Copies that change type or place, never a value."""

CREATIONS = (
    _aten("full full_like zeros zeros_like ones ones_like arange scalar_tensor eye linspace")
    | _aten("new_full new_zeros new_ones lift_fresh_copy")
    | frozenset({"prims::iota", "aotdist::philox"})
)
"""Tensors made from nothing."""

REDUCTIONS = _aten(
    "sum mean var var_mean std std_mean amax amin max min prod any all argmax argmin norm linalg_vector_norm"
    " logsumexp cumsum cumprod _softmax _log_softmax native_layer_norm _fused_rms_norm native_group_norm"
    " native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional"
)
"""Not run twice, but fused with their neighbours: no border."""

LOOKUPS = _aten("gather")
"""Nor are these: they read what another operator has made, element by element."""

RANDOM = _aten("bernoulli native_dropout rand rand_like randn randn_like uniform normal")
"""Drawn once, and fused with their neighbours: no border either."""

LONGEST_CHAIN = 50
"""Most operators in a row that may run again: a fused kernel of more spills registers."""


_CHEAP = POINTWISE | MOVES | CREATIONS
_FUSED_ONCE = REDUCTIONS | LOOKUPS | RANDOM


@cached_by_operator
def _op_is_cheap(op: OpOverload) -> bool:
    is_free = op.name().partition(".")[0] in _CHEAP or op_is_view(op)
    return is_free and not op_is_effectful(op)


@cached_by_operator
def _op_is_border(op: OpOverload) -> bool:
    return op is not WAIT and not _op_is_cheap(op) and op.name().partition(".")[0] not in _FUSED_ONCE


def is_cheap(node: Node) -> bool:
    """Whether a compiler would fuse the node away: running it again costs next to nothing."""
    return _op_is_cheap(node.target) if isinstance(node.target, OpOverload) else is_view(node)


def is_border(node: Node) -> bool:
    """Whether fusion ends here: a library call, a collective, an operator that we don't know."""
    if isinstance(node.target, OpOverload):
        return _op_is_border(node.target)
    return node.op == "call_function" and not is_getitem(node)


def chain_breaks(order: Iterable[Node], fixed: Container[Node]) -> set[Node]:
    """Where chains of operators that may run again get longer than `LONGEST_CHAIN`: fix these too.

    Args:
        order: nodes in order, with all that they are computed from.
        fixed: nodes that may not run again, where chains begin.
    """
    lengths: dict[Node, int] = {}
    breaks: set[Node] = set()
    for node in order:
        if node in fixed or not inputs_of(node):
            lengths[node] = 0
            continue
        lengths[node] = max(lengths[i] for i in inputs_of(node)) + (not is_view(node))
        if lengths[node] > LONGEST_CHAIN:
            breaks.add(node)
            lengths[node] = 0
    return breaks
