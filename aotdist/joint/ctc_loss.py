"""CTC losses, whose backward reads what their forward keeps: as much as the longest target needs.

How long that is depends on data, which no trace can answer. In the graph the forward is one operator, whose
fake result has the size that the targets' own allows; nothing but the backward's kernel looks at it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aotdist.torch_seam.operators import schema_of

CTC_LOSS = torch.ops.aten._ctc_loss.Tensor
CTC_LOSS_BACKWARD = torch.ops.aten._ctc_loss_backward.Tensor
_LIBRARY = torch.library.Library("aotdist", "FRAGMENT")
_LIBRARY.define(schema_of(CTC_LOSS).replace("aten::_ctc_loss.Tensor", "ctc_loss"))
ctc_loss = torch.ops.aotdist.ctc_loss.default


@torch.library.impl(_LIBRARY, "ctc_loss", "CompositeExplicitAutograd")
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    return CTC_LOSS(*args)


def _sizes(log_probs: Tensor, targets: Tensor, *_lengths: Any) -> tuple[Tensor, Tensor]:
    """Shapes: (time, batch, classes), (batch, length) or (sum of lengths,) -> (batch,), and what is kept."""
    time, batch, _ = log_probs.shape
    kept = log_probs.new_empty((batch, time, 2 * targets.shape[-1] + 1))
    return log_probs.new_empty((batch,)), kept


torch.library.register_fake("aotdist::ctc_loss", _sizes, lib=_LIBRARY)
