"""cuSPARSELt's form of 2:4 matrices, cached for those that are multiplied more than once.

The layout is opaque: a matrix has to be unpacked and compressed for it, which reads and writes it twice. A
matrix that is packed in each forward is multiplied once, and its form is not cached: it would take another
9/16 of the dense matrix until backward. When a matrix comes a second time unchanged (a packed parameter, or
the choice of a step that multiplies it several times), its form is cached until the matrix is freed or
written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from aotdist.subclasses.sparse24_packing import unpack


class _Seen(NamedTuple):
    """A matrix at its latest compression.

    Args:
        state: shows whether it has changed: versions of values and metadata, address of the values, and the
            stream that compressed it, since another stream would have to wait.
        form: cuSPARSELt's, from the second compression on.
    """

    meta: torch.Tensor
    state: tuple[int, int, int, int]
    form: torch.Tensor | None


_seen = WeakTensorKeyDictionary()


def compressed(packed: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """The argument for `_cslt_sparse_mm`. Shapes: (R, C / 2), (R, C / 8) uint8 -> opaque."""
    if not _can_be_cached(packed, meta):
        return _compress(packed, meta)
    state = _state(packed, meta)
    before: _Seen | None = _seen.get(packed)
    if before is None or before.meta is not meta or before.state != state:
        _seen[packed] = _Seen(meta, state, None)
        return _compress(packed, meta)
    form = _compress(packed, meta) if before.form is None else before.form
    _seen[packed] = before._replace(form=form)
    return form


def forget_forms() -> None:
    """Clear the cache, after a write that version counters do not show: inside a wrapper, or by FSDP2."""
    _seen.clear()


def _compress(packed: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._cslt_compress(unpack(packed, meta))


def _can_be_cached(packed: torch.Tensor, meta: torch.Tensor) -> bool:
    """Tensors of inference mode have no version; a CUDA graph reads its inputs anew at every replay."""
    is_recorded = packed.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (is_recorded or packed.is_inference() or meta.is_inference())


def _state(packed: torch.Tensor, meta: torch.Tensor) -> tuple[int, int, int, int]:
    stream = torch.cuda.current_stream(packed.device).cuda_stream if packed.is_cuda else 0
    return packed._version, meta._version, packed.data_ptr(), stream
