"""Random numbers of graphs that Inductor compiles.

On a CPU they are eager's: each random operator is called as it stands, in the order of the program, and the
generator is left where eager leaves it. That costs nothing there: `bernoulli_` and `normal_` run vectorised,
where Inductor's kernels draw their own numbers one by one. Inductor itself would reorder these calls, match
some of them by patterns that then fail, and read a mask before it is drawn (torch 2.11 to 2.14). So it is
given operators of our own, of which it knows nothing but that each takes a result of the last one.

On a GPU Inductor's kernels draw numbers of their own where they need them, from a seed that
`torch.manual_seed` decides, unless the user sets `torch._inductor.config.fallback_random`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from aotdist.codegen.decompose import decompose
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.ambient import generator_id
from aotdist.torch_seam.inductor import (
    inductor_decompositions,
    inductor_draws_as_eager,
    inductor_random_decompositions,
)
from aotdist.torch_seam.operators import OpOverload, operator_named, own_operator, schema_of


def _ordered(op: OpOverload) -> OpOverload:
    """A random operator with one more argument, `after`: a result of the random operator before it."""

    def draw(*args: Any, after: Tensor | None = None, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    name = "_".join(str(op).split(".")[1:])
    arguments, _, results = schema_of(op).partition("(")[2].rpartition(") -> ")
    arguments = arguments.replace(" from", " low")  # Inductor makes Python parameters of these names
    only_by_name = "" if "*" in arguments else ", *"
    schema = f"{name}({arguments}{only_by_name}, Tensor? after=None) -> {results}"
    # Tagged so that unused draws are not eliminated: they advance the generator.
    return own_operator(schema, draw, tags=[torch.Tag.nondeterministic_seeded])


_NAMES = """
    bernoulli.default bernoulli.p bernoulli.Tensor binomial.default cauchy.default exponential.default
    geometric.default log_normal.default multinomial.default native_dropout.default normal.float_float
    normal.float_Tensor normal.Tensor_float normal.Tensor_Tensor normal_functional.default poisson.default
    rand.default rand.generator rand_like.default randint.default randint.generator randint.low
    randint.low_generator randint_like.default randint_like.low_dtype randn.default randn.generator
    randn_like.default random.default random.from random.to randperm.default randperm.generator
    rrelu_with_noise_functional.default uniform.default _sample_dirichlet.default _standard_gamma.default
"""
_OPERATORS = filter(None, (operator_named(f"aten.{name}") for name in _NAMES.split()))
_ORDERED = {op: _ordered(op) for op in _OPERATORS}
_PLAIN = {ordered: op for op, ordered in _ORDERED.items()}


def draws_as_eager(gm: GraphModule) -> bool:
    """Whether a graph draws eager's numbers when Inductor has compiled it."""
    values = (node.meta.get("val") for node in gm.graph.nodes)
    on_gpu = any(isinstance(value, Tensor) and value.device.type != "cpu" for value in values)
    return not on_gpu or inductor_draws_as_eager()


def prepare_draws(gm: GraphModule) -> None:
    """Put the random operators of a graph into a form that Inductor compiles rightly, in place.

    Raises:
        UnsupportedProgram: one of them draws from a generator of the user's, for which Inductor has no text.
    """
    if not draws_as_eager(gm):
        made_of = inductor_random_decompositions()
        decompose(gm, {**inductor_decompositions(), **made_of}, only=made_of)
        return
    for node in gm.graph.nodes:
        if node.target in _ORDERED:
            _name_no_generator(node)
            node.target = _ORDERED[node.target]


def restore_draws(gm: GraphModule) -> None:
    """Undo `prepare_draws` in a graph that is not compiled yet, in place."""
    for node in gm.graph.nodes:
        node.target = _PLAIN.get(node.target, node.target)


def keep_draws_in_order(gm: GraphModule) -> None:
    """Let each random operator that `prepare_draws` left take a result of the last one, in place."""
    last = None
    for node in [node for node in gm.graph.nodes if node.target in _PLAIN]:
        if last is not None:
            node.update_kwarg("after", _first_result(last))
        last = node


def _first_result(node: Node) -> Node:
    value = node.meta["val"]
    if isinstance(value, Tensor):
        return node
    with node.graph.inserting_after(node):
        first = node.graph.call_function(operator.getitem, (node, 0))
    first.meta = {**node.meta, "val": value[0]}
    return first


def _name_no_generator(node: Node) -> None:
    """Drop the default generator from the arguments: Inductor cannot print a generator."""
    generator = node.kwargs.get("generator")
    if not isinstance(generator, torch.Generator):
        return
    if generator_id(generator) != generator_id(torch.default_generator):
        raise UnsupportedProgram(
            f"Inductor does not compile `{node.target}` with a generator",
            where=node.meta.get("source"),
            stage="codegen",
            fix='draw from the default generator, or use backend="fx"',
        )
    node.update_kwarg("generator", None)
