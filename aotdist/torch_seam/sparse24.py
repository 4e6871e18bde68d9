"""2:4 sparse tensors."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch


def cutlass_word_places(words: torch.Tensor) -> torch.Tensor:
    """Where CUTLASS keeps each word of 2:4 metadata. Shapes: (R, W) int16 or int32 -> (R * W,) int64."""
    from torch.sparse._semi_structured_conversions import _calculate_meta_reordering_scatter_offsets

    rows, columns = words.shape
    return _calculate_meta_reordering_scatter_offsets(rows, columns, words.dtype, words.device)
