"""Results that a kernel may write over the inputs whose new values they are.

A graph is functional: where a program writes an input, the graph returns its new value, which is copied there
after it has run. A kernel that computes it from the old value, element by element, can store it there
directly, if nothing reads the old value afterwards; the copy then has nothing to do. An optimizer's step is
bound by memory: AdamW moves 28 bytes for each float32 parameter, and the copies would move 24 more.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from aotdist.kernels.emitted import EmittedKernel, Schedule, Step
from aotdist.kernels.ir import Expr, Load, Store, every_part
from aotdist.kernels.rule import View, val_of
from aotdist.kernels.rules import rule_of
from aotdist.program import Graph
from aotdist.torch_seam.operators import OpOverload


def overwritten(graph: Graph, schedule: Schedule, fixed: Sequence[Node]) -> dict[Node, Node]:
    """The results that may be stored in the memory of an input, and of which.

    Args:
        graph: with these results.
        schedule: its steps, in the order in which they will run.
        fixed: nodes that keep their order; collectives among them may read an input until they are waited
            for.
    """
    held = set(fixed)
    position = {step: at for at, step in enumerate(schedule.in_order())}
    readers: dict[Node, list[Step]] = {}
    makers: dict[Node, EmittedKernel] = {}
    for step in position:
        for node in schedule.reads(step):
            readers.setdefault(node, []).append(step)
        if isinstance(step, EmittedKernel):
            makers.update({schedule.by_name[name]: step for name in step.printed.outputs})

    def is_free(old: Node, new: Node) -> bool:
        maker = makers.get(new)
        if maker is None or not _have_one_layout(old, new) or not _is_element_by_element(maker, old, new):
            return False
        return all(isinstance(step, EmittedKernel) or step.op == "output" for step in readers[new]) and all(
            step not in held and position[step] <= position[maker] for step in _who_reads(readers, old)
        )

    return {new: old for old, new in _written(graph) if is_free(old, new)}


def stored_over(emitted: EmittedKernel, old_of: Mapping[Node, Node]) -> EmittedKernel:
    """A kernel that stores some of its results in the memory of inputs.

    Args:
        emitted: the kernel.
        old_of: results of any kernels, with the inputs that they overwrite.
    """
    printed = emitted.printed
    over = {new.name: old.name for new, old in old_of.items() if new.name in printed.outputs}
    names = {f"out_{new}": f"in_{old}" for new, old in over.items()}
    body = tuple(
        re.sub(r"\bout_\w+", lambda name: names.get(name[0], name[0]), line) for line in printed.body
    )
    return replace(emitted, printed=replace(printed, body=body, over=over))


def _who_reads(readers: Mapping[Node, Sequence[Step]], node: Node) -> Iterator[Step]:
    """The steps that read a tensor, or what may share its memory."""
    stack, seen = [node], {node}
    while stack:
        for step in readers.get(stack.pop(), ()):
            yield step
            if isinstance(step, Node) and _may_alias(step) and step not in seen:
                seen.add(step)
                stack.append(step)


def _may_alias(node: Node) -> bool:
    """Whether what a library returns may share memory with what it is given."""
    if isinstance(node.target, OpOverload):
        return node.target.is_view or isinstance(rule_of(node), View)
    return node.op == "call_function"


def _written(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Inputs that the program writes, with new values that are no other result of the graph."""
    primals = {
        replace(slot, role="write"): node
        for slot, node in graph.named_placeholders().items()
        if slot.role == "primal"
    }
    times = Counter(graph.results())
    for slot, new in graph.named_results().items():
        if slot in primals and new is not None and times[new] == 1:
            yield primals[slot], new


def _have_one_layout(old: Node, new: Node) -> bool:
    one, other = val_of(old), val_of(new)
    is_of_one_kind = one.dtype is other.dtype and one.device == other.device
    return is_of_one_kind and one.shape == other.shape and one.stride() == other.stride()


def _is_element_by_element(emitted: EmittedKernel, old: Node, new: Node) -> bool:
    """Whether a launch reads each old element only to compute the new one in its place.

    Threads that reduce together may each hold the same element, and one could read it when another wrote it.
    """
    for member in emitted.members:
        reads = [part for part in member.parts() if isinstance(part.op, Load) and part.op.buffer == old.name]
        store = next((store for store in member.stores if store.buffer == new.name), None)
        if store is None:
            if reads:
                return False
        elif member.r or not reads or not _precede(reads, store):
            return False
    return True


def _precede(reads: Sequence[Expr], store: Store) -> bool:
    """Whether each element is loaded at the index of the store, as part of the stored value."""
    needed = set(every_part([store.value]))
    return all(list(read.own_indices()) == [store.index] and read in needed for read in reads)
