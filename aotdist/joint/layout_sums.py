"""Where gradients of different layouts are added up: without one of them, the sum is laid out otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aotdist.subclasses.protocol import is_wrapper, recipe_of, same_layout
from aotdist.torch_seam.modes import TorchDispatchMode
from aotdist.torch_seam.operators import OpOverload

_SUMS = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor})


class LayoutSums(TorchDispatchMode):
    """Notes, while autograd runs inside, whether wrappers of different layouts are added up."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.differ = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _SUMS and all(map(is_wrapper, args[:2])):
            self.differ |= not same_layout(*map(recipe_of, args[:2]))
        return func(*args, **(kwargs or {}))
