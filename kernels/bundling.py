"""Puts kernels into one launch that compute the same over different tensors.

An optimizer's step is one kernel for each parameter, and a launch costs more than most of them run. Two
kernels are similar if their sources are equal up to names of tensors and whole numbers (sizes, strides,
offsets). Similar kernels that need not wait for each other become one launch: its blocks are shared out among
its members in order, and each block begins by selecting the tensors and numbers of its member.

Everything that blocks select from is in the launch's own arguments and code, so nothing is copied to the GPU
for it, results do not differ from run to run, and pointers stay as aligned as they were.

No launch is delayed for long: its members keep nothing large alive for each other, are read by one node, or
copy parts of the result of one collective, which is alive until the last part is copied. No launch delays a
fixed node, or waits for a collective that some of its members do not need.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch.fx import Node

from aotdist.kernels.access import reads, vector_length, writes
from aotdist.kernels.emitted import EmittedKernel, Schedule, Step
from aotdist.kernels.launching import Config, is_persistent, num_blocks_of
from aotdist.kernels.polynomial import at_most
from aotdist.kernels.printing import BLOCK_NUMBER, LARGE, Printed
from aotdist.kernels.rule import val_of
from aotdist.kernels.uses import num_bytes

MAX_TENSORS = 360
"""How many tensors the kernels of a launch read and write: the compiler loads many addresses ahead. On an
H100, a step of AdamW in place takes 49 registers with 360 of them, which are 225 addresses, and 114 with
480."""
SMALL_BYTES = 2**20
"""How large a tensor may be that is kept a while longer."""
FEW_RESULTS = 128
"""Up to so many results, a reduction may have larger blocks than it needs: a GPU has more multiprocessors."""

_SELECTED = re.compile(r"\b(?:in|out)_\w+|(?<![\w.+-])\d+(?![\w.])")
"""Tensors and whole numbers in a kernel's source; not the digits of other numbers (`0.5`, `1e+20`)."""

Bundle: TypeAlias = Sequence[EmittedKernel]


def bundles(schedule: Schedule, kernels: Sequence[EmittedKernel], fixed: Sequence[Node]) -> list[Bundle]:
    """The kernels of a graph, those together that may be one launch.

    Args:
        schedule: of the graph.
        kernels: as fusion made them.
        fixed: nodes that keep their order, and wait no longer than they must.
    """
    order = _Order(schedule, fixed)
    by_similarity: dict[_Similarity, list[EmittedKernel]] = {}
    all_bundles: list[Bundle] = []
    for kernel in kernels:
        if kernel.is_sized:
            all_bundles.append((kernel,))  # its blocks are counted in each call
            continue
        by_similarity.setdefault(_similarity_of(kernel, schedule.by_name), []).append(kernel)
    all_bundles += [bundle for similar in by_similarity.values() for bundle in _bundles(order, similar)]
    return sorted(all_bundles, key=lambda bundle: max(kernel.nodes[-1] for kernel in bundle))


@dataclass(frozen=True, slots=True)
class _Similarity:
    """What kernels of one launch have in common.

    Args:
        body: the lines, without tensors and numbers.
        dtypes: of the tensors, in the order of the arguments.
        lengths: how many elements a thread may take of each at once: a number that is selected at run time
            must tell Triton no less than the literal that it replaces.
        config: blocks, without sizes that may be larger than a kernel needs.
        is_persistent: whether one block holds all that is reduced.
        device: where the tensors lie.
    """

    body: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    lengths: tuple[int, ...]
    config: Config
    is_persistent: bool
    device: torch.device


def _similarity_of(emitted: EmittedKernel, by_name: Mapping[str, Node]) -> _Similarity:
    kernel, printed = emitted.kernel, emitted.printed
    tensors = [val_of(by_name[name]) for name in (*printed.inputs, *printed.outputs)]
    return _Similarity(
        tuple(_SELECTED.sub(_placeholder, line) for line in printed.body),
        tuple(tensor.dtype for tensor in tensors),
        tuple(vector_length(kernel, index, dtype) for index, dtype in (*reads(kernel), *writes(kernel))),
        _without_sizes(emitted),
        is_persistent(kernel),
        tensors[-1].device,
    )


def _without_sizes(emitted: EmittedKernel) -> Config:
    """The block sizes of a kernel, with 1 for those that one launch may raise to its members' maximum."""
    kernel, config = emitted.kernel, emitted.config
    if kernel.p is not None:
        return config
    if kernel.r and is_persistent(kernel) and at_most(kernel.num_results, FEW_RESULTS):
        return replace(config, xblock=1, rblock=1, num_warps=1)
    return replace(config, xblock=1)


def _placeholder(match: re.Match[str]) -> str:
    """A placeholder for a tensor or a number. A number beyond 32 bits has another type, and stays."""
    text = match[0]
    if not text.isdigit():
        return "?in" if text.startswith("in_") else "?out"
    return text if int(text) >= LARGE else "?"


def _bundles(order: _Order, similar: Sequence[EmittedKernel]) -> list[Bundle]:
    """Similar kernels, each with as many of the others as may run with it."""
    bundles: list[Bundle] = []
    for kernel in similar:
        for at, bundle in enumerate(bundles):
            if _num_tensors((*bundle, kernel)) <= MAX_TENSORS and order.may_run_as_one(bundle, (kernel,)):
                bundles[at] = order.merge(bundle, (kernel,))
                break
        else:
            bundles.append((kernel,))
    return bundles


def _num_tensors(bundle: Iterable[EmittedKernel]) -> int:
    inputs = {name for emitted in bundle for name in emitted.printed.inputs}
    return len(inputs) + sum(len(emitted.printed.outputs) for emitted in bundle)


class _Order:
    """The order of steps, while kernels are merged into launches."""

    def __init__(self, schedule: Schedule, fixed: Iterable[Node]) -> None:
        self._schedule = schedule
        self._fixed = set(fixed)
        self._position = {step: at for at, step in enumerate(schedule.in_order())}
        self._together: dict[Step, Bundle] = {}
        self._after: dict[Step, dict[Step, None]] = {step: {} for step in self._position}
        for step in self._position:
            for other in schedule.needs(step):
                self._after[other][step] = None

    def may_run_as_one(self, one: Bundle, other: Bundle) -> bool:
        """Whether two bundles are independent, and merging delays no fixed node and extends few lifetimes."""
        steps = (*one, *other)
        if any(step not in self._position for step in steps):
            return False  # nobody reads its results
        if len({self._received(step) for step in steps}) > 1:
            return False
        is_read_together = bool(self._readers(one) & self._readers(other))
        copy_parts = all(self._received(step) >= self._large_inputs(step) != frozenset() for step in steps)
        if not (is_read_together or copy_parts or all(self._holds_little(step) for step in steps)):
            return False
        last = max(self._position[step] for step in steps)
        later = set[Step]()
        stack: list[Step] = [*self._following(steps)]
        while stack:
            step = stack.pop()
            if step in steps or (step in self._fixed and self._position[step] < last):
                return False
            if step not in later:
                later.add(step)
                stack.extend(self._following(self._together.get(step, (step,))))
        return True

    def merge(self, one: Bundle, other: Bundle) -> Bundle:
        """Have two bundles run as one."""
        both = (*one, *other)
        self._together.update(dict.fromkeys(both, both))
        return both

    def _following(self, steps: Iterable[Step]) -> Iterator[Step]:
        return itertools.chain.from_iterable(self._after[step] for step in steps)

    def _readers(self, bundle: Bundle) -> set[Step]:
        """The steps of the graph that read a bundle."""
        return {
            step for step in self._following(bundle) if isinstance(step, EmittedKernel) or step.op != "output"
        }

    def _received(self, kernel: EmittedKernel) -> frozenset[Node]:
        """The results of collectives that a kernel reads: nodes (waits) right behind a fixed node."""
        read = frozenset(self._schedule.reads(kernel))
        return frozenset(node for node in read if not self._fixed.isdisjoint(node.all_input_nodes))

    def _large_inputs(self, kernel: EmittedKernel) -> frozenset[Node]:
        return frozenset(node for node in self._schedule.reads(kernel) if not _is_small(node))

    def _holds_little(self, kernel: EmittedKernel) -> bool:
        """Whether moving a kernel keeps little alive: large tensors are inputs or outputs of the graph."""
        read, written = (
            [self._schedule.by_name[name] for name in names]
            for names in (kernel.printed.inputs, kernel.printed.outputs)
        )
        is_given = all(node.op in ("placeholder", "get_attr") or _is_small(node) for node in read)
        return is_given and all(_is_small(node) or _is_result(node) for node in written)


def _is_small(node: Node) -> bool:
    return num_bytes(node) <= SMALL_BYTES


def _is_result(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)


def one_launch(bundle: Bundle) -> EmittedKernel:
    """A bundle as one launch."""
    if len(bundle) == 1:
        return bundle[0]
    config = max((emitted.config for emitted in bundle), key=lambda config: (config.rblock, config.xblock))
    members = tuple(member for emitted in bundle for member in emitted.members)
    nodes = tuple(sorted(node for emitted in bundle for node in emitted.nodes))
    num_bytes = sum(emitted.num_bytes for emitted in bundle)
    return EmittedKernel(members, _printed(bundle, config), (config,), nodes, num_bytes, gpu=bundle[0].gpu)


def _printed(bundle: Bundle, config: Config) -> Printed:
    """The first kernel's source, with variables where members differ, set by the lines before it."""
    first = bundle[0].printed
    columns = list(zip(*(_selected_in(emitted.printed) for emitted in bundle), strict=True))
    names: dict[tuple[str, ...], str] = {}
    for column in columns:
        if len(set(column)) > 1 and column not in names:
            names[column] = f"{'number' if column[0].isdigit() else 'tensor'}{len(names)}"
    texts = [names[column] if column in names else column[0] for column in columns]
    body = _with_texts(first.body, texts)
    starts = list(
        itertools.accumulate((num_blocks_of(emitted.kernel, config) for emitted in bundle[:-1]), initial=0)
    )
    choices = [
        [f"first = {start}", *(f"{name} = {column[at]}" for column, name in names.items())]
        for at, start in enumerate(starts)
    ]
    return Printed(
        name=f"{first.name}_x{len(bundle)}",
        inputs=tuple(dict.fromkeys(name for emitted in bundle for name in emitted.printed.inputs)),
        outputs=tuple(name for emitted in bundle for name in emitted.printed.outputs),
        blocks=first.blocks,
        sizes=(),
        body=(
            f"launched = {BLOCK_NUMBER}",
            *_choice(starts, choices),
            *(line.replace(BLOCK_NUMBER, "(launched - first)") for line in body),
        ),
        over={new: old for emitted in bundle for new, old in emitted.printed.over.items()},
    )


def _selected_in(printed: Printed) -> list[str]:
    """The tensors and numbers of a source, in order."""
    return [match[0] for line in printed.body for match in _SELECTED.finditer(line)]


def _with_texts(body: Iterable[str], texts: Iterable[str]) -> list[str]:
    """Lines with `texts` in the place of tensors and numbers."""
    left = iter(texts)

    def replaced(_: re.Match[str]) -> str:
        return next(left)

    return [_SELECTED.sub(replaced, line) for line in body]


def _choice(starts: Sequence[int], choices: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines that select one of several choices by program id: the last that begins at or before it."""
    if len(choices) == 1:
        yield from choices[0]
        return
    half = len(choices) // 2
    yield f"if launched < {starts[half]}:"
    yield from (f"    {line}" for line in _choice(starts[:half], choices[:half]))
    yield "else:"
    yield from (f"    {line}" for line in _choice(starts[half:], choices[half:]))
