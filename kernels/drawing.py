"""Random numbers: words of a stream that is a function of a seed and an offset.

A program that draws from such a stream (`Settings.functional_rng`) asks for words by number. A kernel
computes those that it needs where it needs them, the same ones when a backward does so again.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.fx import Node

from aotdist.kernels.ir import Expr
from aotdist.kernels.rule import Point, Pointwise, Reader, counted, elementwise, number_of, position

WORDS_IN_A_BLOCK = 4


def _word(reader: Reader, node: Node, point: Point) -> Expr:
    seed, offset, start = cast("tuple[Node, Node, int | Node]", node.args[:3])
    (index,) = point.indices
    first = elementwise("add", reader.read(offset, point.to(())), counted(number_of(start), torch.int64))
    block = elementwise("add", first, position(index // WORDS_IN_A_BLOCK))
    which = position(index % WORDS_IN_A_BLOCK)
    return elementwise("philox", reader.read(seed, point.to(())), block, which)


RULES_BY_NAME = {"aotdist.philox.default": Pointwise(_word)}
"""Rules of our own operators, by name: these are defined by stages that import this one."""
