"""Traces a program again for `create_graph` and other later backwards, after the first trace was dropped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch

from aotdist.assumptions import TracedCall, traced_by_itself
from aotdist.capture.constants import is_constant
from aotdist.equivalence import are_same, without_returned
from aotdist.errors import UnsupportedProgram
from aotdist.job import Job
from aotdist.subclasses.protocol import Plain, is_real
from aotdist.torch_seam.ambient import AutocastState, autocast_state, put_autocast
from aotdist.torch_seam.functional import memory_of
from aotdist.torch_seam.trees import pytree
from aotdist.trace.later_backwards import LaterBackwards
from aotdist.trace.trace import Traced, Traces


def _maker_like(tensor: Any) -> Callable[[], Any]:
    """A function that returns a tensor like this plain one, without keeping it, or this constant."""
    if not isinstance(tensor, torch.Tensor):
        return lambda: tensor
    requires_grad, is_leaf = tensor.requires_grad, tensor.is_leaf
    like = {"dtype": tensor.dtype, "device": tensor.device, "requires_grad": requires_grad}
    make = functools.partial(torch.empty_strided, tensor.size(), tensor.stride(), **like)
    return make if is_leaf or not requires_grad else lambda: (made := make()).view_as(made)


def with_traces(job: Job, traced_call: TracedCall) -> Traced:
    """The trace of a call, which may be dropped if the program can be traced again.

    Gradients of copied blocks have no history, so a trace with some is dropped at once.
    """
    traced = traced_call.traced
    if traced.later_backwards is None:
        return traced
    retrace = _retracing(job, traced_call)
    is_of_use = retrace is None or not traced.copies.instances
    return replace(traced, traces=Traces(traced.later_backwards if is_of_use else None, retrace))


def _retracing(job: Job, traced_call: TracedCall) -> Callable[[], LaterBackwards] | None:
    """A function that traces a program again for its backwards.

    None if that may give another trace, because it depends on more than the module and the metadata of the
    arguments.

    Args:
        job: what was traced.
        traced_call: the trace.
    """
    call, captured, traced = job.call, traced_call.captured, traced_call.traced
    tensors, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
    given = [each for each in tensors if isinstance(each, torch.Tensor)]
    outs = (out.recipe for out in traced.facts.node_outs)
    depends = (
        tuple(traced.symbols)
        or not all(isinstance(recipe, Plain) for recipe in (*traced.facts.recipes, *outs))
        or traced.facts.data_guards
        or captured.leaves is not None
        or not all(isinstance(each, torch.Tensor) or is_constant(each) for each in tensors)
        or any(each._base is not None or not is_real(each) for each in given)
        or len(set(map(memory_of, given))) < len(given)
    )
    if depends:
        return None
    makers = [_maker_like(each) for each in tensors]
    name, (recorded, held) = captured.name, _recorded(traced)
    settings, autocast = replace(job.settings, instantiate=False), autocast_state()
    without = replace(call, args=(), kwargs={}, dims={}, guessed={}, varying=(), prints=False)
    empty = replace(job, call=without, settings=settings)

    def retrace() -> LaterBackwards:
        made = [make() for make in makers]
        args, kwargs = pytree.tree_unflatten(made, spec)
        asked = replace(empty, call=replace(empty.call, args=args, kwargs=kwargs))
        try:
            with ThreadPoolExecutor(1) as pool:  # autograd's formulas depend on whether a backward runs
                another = pool.submit(_traced_under, autocast, asked).result()
        except Exception as error:
            raise _changed(name, str(error).partition("\n")[0]) from error
        later = another.traced.later_backwards
        recorded_anew, held_anew = _recorded(another.traced)
        if later is None or recorded_anew != recorded or not are_same(held, held_anew):
            raise _changed(name, "it is another program now")
        return later

    return retrace


def _traced_under(autocast: AutocastState, job: Job) -> TracedCall:
    put_autocast(autocast)  # of this thread, which ends afterwards
    return traced_by_itself(job)


def _recorded(traced: Traced) -> tuple[Any, list[torch.Tensor]]:
    """A description of a trace to compare with another's, and the tensors that its graph holds.

    It has a digest of the forward's operations, since passes change the graph itself; only these pass
    values to another backward.
    """
    nodes = traced.graph.gm.graph.nodes
    forward = (node for node in nodes if node.op == "call_function" and node.meta["phase"] == "forward")
    lines = ((node.meta.get("serial"), node, node.target, node.args, node.kwargs) for node in forward)
    digest = sha256("\n".join(map(str, lines)).encode()).hexdigest()
    held = [each for each in traced.graph.held() if isinstance(each, torch.Tensor)]
    return (traced.program.ins, without_returned(traced.facts), digest), held


def _changed(name: str, reason: str) -> UnsupportedProgram:
    return UnsupportedProgram(
        f"`{name}` is traced anew for gradients of gradients, or gradients of other kinds, and {reason}",
        stage="joint",
        fix="leave the module as it was when it was called; or compile a clone of it for these calls",
    )
