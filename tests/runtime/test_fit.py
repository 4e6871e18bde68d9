"""Which tensors of a call are compared for memory that they share."""

from __future__ import annotations

import pytest
import torch

from aotdist.runtime import guards as fit


def test_tensors_are_compared_with_those_of_their_own_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 written tensors and two rows of one batch, only the rows may meet."""
    compared: list[tuple[torch.Tensor, torch.Tensor]] = []
    decide = fit.share_memory
    monkeypatch.setattr(fit, "share_memory", lambda a, b: compared.append((a, b)) or decide(a, b))
    written = [torch.zeros(2) for _ in range(300)]
    tokens, targets = torch.zeros(2, 3)
    assert fit.no_overlap(written, [tokens, targets])
    assert compared == []
    assert fit.no_overlap([*written, tokens], [targets])
    assert len(compared) == 1
    assert not fit.no_overlap([*written, tokens], [tokens[1:]])
