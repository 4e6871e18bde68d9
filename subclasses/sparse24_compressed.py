"""cuSPARSELt's form of 2:4 matrices, which is kept for those that are multiplied again.

The layout is cuSPARSELt's own: a matrix is unpacked, and compressed for it, which reads and writes it twice.
What is packed in each forward is multiplied once, and its form is let go: it would take 9/16 of the dense
matrix once more until backward. A matrix that comes again as it was (a packed parameter, or the choice of a
step that multiplies it several times) is compressed for the last time then; its form lives as long as it
does, or until it is written to.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from aotdist.subclasses.sparse24_packing import unpack


class _Seen(NamedTuple):
    """A matrix at its latest compression.

    Args:
        meta: its metadata.
        moment: what says that it is as it was: the versions of both, where it lies; and the stream that
            has compressed it, since another would have to wait.
        form: of cuSPARSELt, at the second compression and later.
    """

    meta: torch.Tensor
    moment: tuple[int, int, int, int]
    form: torch.Tensor | None


_seen = WeakTensorKeyDictionary()


def compressed(packed: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """What `_cslt_sparse_mm` takes. Shapes: (R, C / 2), (R, C / 8) uint8 -> opaque."""
    if not _can_be_known_again(packed, meta):
        return _compress(packed, meta)
    moment = _moment(packed, meta)
    before: _Seen | None = _seen.get(packed)
    if before is None or before.meta is not meta or before.moment != moment:
        _seen[packed] = _Seen(meta, moment, None)
        return _compress(packed, meta)
    form = _compress(packed, meta) if before.form is None else before.form
    _seen[packed] = before._replace(form=form)
    return form


def forget_forms() -> None:
    """Packed matrices are written where version counters do not see it: beneath a wrapper, or by FSDP2."""
    _seen.clear()


def _compress(packed: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._cslt_compress(unpack(packed, meta))


def _can_be_known_again(packed: torch.Tensor, meta: torch.Tensor) -> bool:
    """Tensors of inference mode have no version; a CUDA graph reads its inputs anew at every replay."""
    is_recorded = packed.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (is_recorded or packed.is_inference() or meta.is_inference())


def _moment(packed: torch.Tensor, meta: torch.Tensor) -> tuple[int, int, int, int]:
    stream = torch.cuda.current_stream(packed.device).cuda_stream if packed.is_cuda else 0
    return packed._version, meta._version, packed.data_ptr(), stream
