"""CTC losses, whose backward reads what their forward keeps: as much as the longest target needs.

How long that is depends on data, which no trace can answer. In the graph both are operators of our own. The
fake result of the forward has the size that the targets' own allows, and only the backward's kernel looks at
it; PyTorch's has no fake kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aotdist.torch_seam.operators import schema_of

_FORWARD = torch.ops.aten._ctc_loss.Tensor
_BACKWARD = torch.ops.aten._ctc_loss_backward.Tensor
_LIBRARY = torch.library.Library("aotdist", "FRAGMENT")
_LIBRARY.define(schema_of(_FORWARD).replace("aten::_ctc_loss.Tensor", "ctc_loss"))
_LIBRARY.define(schema_of(_BACKWARD).replace("aten::_ctc_loss_backward.Tensor", "ctc_loss_backward"))

OF_OUR_OWN = {
    _FORWARD: torch.ops.aotdist.ctc_loss.default,
    _BACKWARD: torch.ops.aotdist.ctc_loss_backward.default,
}
"""What stands in a graph for PyTorch's operators."""


@torch.library.impl(_LIBRARY, "ctc_loss", "CompositeExplicitAutograd")
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    return _FORWARD(*args)


@torch.library.impl(_LIBRARY, "ctc_loss_backward", "CompositeExplicitAutograd")
def _backward(*args: Any) -> Tensor:
    return _BACKWARD(*args)


def _like_forward(log_probs: Tensor, targets: Tensor, *_lengths: Any) -> tuple[Tensor, Tensor]:
    """Shapes: (time, batch, classes), (batch, length) or (sum of lengths,) -> (batch,), and what is kept."""
    time, batch, _ = log_probs.shape
    kept = log_probs.new_empty((batch, time, 2 * targets.shape[-1] + 1))
    return log_probs.new_empty((batch,)), kept


def _like_backward(_grad: Tensor, log_probs: Tensor, *_rest: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


torch.library.register_fake("aotdist::ctc_loss", _like_forward, lib=_LIBRARY)
torch.library.register_fake("aotdist::ctc_loss_backward", _like_backward, lib=_LIBRARY)
