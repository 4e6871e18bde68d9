"""Puts kernels into one launch that compute the same over different tensors.

An optimizer's step is one kernel for each parameter, and a launch costs more than most of them run. Two
kernels are alike if their sources say the same but for names of tensors and whole numbers (sizes, strides,
offsets). Alike kernels that need not wait for each other become one: its blocks are dealt out to its members
in order, and each block begins by choosing the tensors and numbers of the member that it works for.

Everything that is chosen stands in the launch's own arguments and code, so nothing is copied to the GPU for
it, results do not differ from run to run, and pointers stay as aligned as they were.

No launch waits for long: its members hold nothing large for each other, are read by one node, or copy parts
of what one collective gave, which is held until the last of them is copied. None makes a fixed node wait, or
waits itself for a collective that some of its members do not need.
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
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.launching import Config, is_persistent, num_blocks_of
from aotdist.kernels.polynomial import at_most
from aotdist.kernels.printing import BLOCK_NUMBER, LARGE, Printed
from aotdist.kernels.rule import val_of
from aotdist.kernels.scheduling import Schedule, Step
from aotdist.kernels.uses import num_bytes

MAX_TENSORS = 360
"""How many tensors the kernels of a launch read and write: the compiler loads many addresses ahead. On an
H100, a step of AdamW in place takes 49 registers with 360 of them, which are 225 addresses, and 114 with
480."""
SMALL_BYTES = 2**20
"""How large a tensor may be that is kept a while longer."""
FEW_RESULTS = 128
"""Up to so many results, a reduction may have larger blocks than it needs: a GPU has more multiprocessors."""

_CHOSEN = re.compile(r"\b(?:in|out)_\w+|(?<![\w.+-])\d+(?![\w.])")
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
    by_likeness: dict[_Likeness, list[EmittedKernel]] = {}
    found: list[Bundle] = []
    for kernel in kernels:
        if kernel.is_sized:
            found.append((kernel,))  # its blocks are counted in each call
            continue
        by_likeness.setdefault(_likeness(kernel, schedule.by_name), []).append(kernel)
    found += [bundle for alike in by_likeness.values() for bundle in _bundles(order, alike)]
    return sorted(found, key=lambda bundle: max(kernel.nodes[-1] for kernel in bundle))


@dataclass(frozen=True, slots=True)
class _Likeness:
    """What kernels of one launch have in common.

    Args:
        body: the lines, without what is chosen.
        dtypes: of the tensors, in the order of the arguments.
        lengths: how many elements a thread may take of each at once: numbers that are chosen must not tell
            Triton less than those that stand there.
        config: blocks, but for what may be larger than a kernel needs.
        is_persistent: whether all that is reduced is held in one block.
        device: where the tensors lie.
    """

    body: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    lengths: tuple[int, ...]
    config: Config
    is_persistent: bool
    device: torch.device


def _likeness(emitted: EmittedKernel, by_name: Mapping[str, Node]) -> _Likeness:
    kernel, printed = emitted.kernel, emitted.printed
    tensors = [val_of(by_name[name]) for name in (*printed.inputs, *printed.outputs)]
    return _Likeness(
        tuple(_CHOSEN.sub(_kind, line) for line in printed.body),
        tuple(tensor.dtype for tensor in tensors),
        tuple(vector_length(kernel, index, dtype) for index, dtype in (*reads(kernel), *writes(kernel))),
        _without_sizes(emitted),
        is_persistent(kernel),
        tensors[-1].device,
    )


def _without_sizes(emitted: EmittedKernel) -> Config:
    """The blocks of a kernel without what may be chosen for all: the largest are."""
    kernel, config = emitted.kernel, emitted.config
    if kernel.p is not None:
        return config
    if kernel.r and is_persistent(kernel) and at_most(kernel.num_results, FEW_RESULTS):
        return replace(config, xblock=1, rblock=1, num_warps=1)
    return replace(config, xblock=1)


def _kind(chosen: re.Match[str]) -> str:
    """What stands for a tensor or a number; one beyond 32 bits, which is of another type, stays."""
    text = chosen[0]
    if not text.isdigit():
        return "?in" if text.startswith("in_") else "?out"
    return text if int(text) >= LARGE else "?"


def _bundles(order: _Order, alike: Sequence[EmittedKernel]) -> list[Bundle]:
    """Alike kernels, each with as many of the others as may run with it."""
    bundles: list[Bundle] = []
    for kernel in alike:
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
    """What has to run before what, while kernels become one."""

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
        """Whether two bundles need not wait for each other, and nothing large or fixed has to for them."""
        steps = (*one, *other)
        if any(step not in self._position for step in steps):
            return False  # of what nobody reads
        if len({self._received(step) for step in steps}) > 1:
            return False
        is_read_together = bool(self._readers(one) & self._readers(other))
        are_parts = all(self._received(step) >= self._large_inputs(step) != frozenset() for step in steps)
        if not (is_read_together or are_parts or all(self._holds_little(step) for step in steps)):
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
        """Who reads a bundle, within the graph."""
        return {
            step for step in self._following(bundle) if isinstance(step, EmittedKernel) or step.op != "output"
        }

    def _received(self, kernel: EmittedKernel) -> frozenset[Node]:
        """What a kernel reads of what collectives gave: who waits for one is a step behind it."""
        read = frozenset(self._schedule.reads(kernel))
        return frozenset(node for node in read if not self._fixed.isdisjoint(node.all_input_nodes))

    def _large_inputs(self, kernel: EmittedKernel) -> frozenset[Node]:
        return frozenset(node for node in self._schedule.reads(kernel) if not _is_small(node))

    def _holds_little(self, kernel: EmittedKernel) -> bool:
        """Whether a kernel could as well run first or last: what is large is an argument, or a result."""
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
    """The source of the first, with names for what the others have otherwise, after a choice of these."""
    first = bundle[0].printed
    columns = list(zip(*(_chosen(emitted.printed) for emitted in bundle), strict=True))
    names: dict[tuple[str, ...], str] = {}
    for column in columns:
        if len(set(column)) > 1 and column not in names:
            names[column] = f"{'number' if column[0].isdigit() else 'tensor'}{len(names)}"
    texts = [names[column] if column in names else column[0] for column in columns]
    body = _with_chosen(first.body, texts)
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


def _chosen(printed: Printed) -> list[str]:
    """The tensors and numbers in a source, in order."""
    return [chosen[0] for line in printed.body for chosen in _CHOSEN.finditer(line)]


def _with_chosen(body: Iterable[str], texts: Iterable[str]) -> list[str]:
    """Lines with other texts in the place of tensors and numbers."""
    left = iter(texts)

    def replaced(_: re.Match[str]) -> str:
        return next(left)

    return [_CHOSEN.sub(replaced, line) for line in body]


def _choice(starts: Sequence[int], choices: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines that run one of several choices: the last whose first block does not come after this one."""
    if len(choices) == 1:
        yield from choices[0]
        return
    half = len(choices) // 2
    yield f"if launched < {starts[half]}:"
    yield from (f"    {line}" for line in _choice(starts[:half], choices[:half]))
    yield "else:"
    yield from (f"    {line}" for line in _choice(starts[half:], choices[half:]))
