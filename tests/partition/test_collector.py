"""Python's garbage collector while a program is compiled, and after it."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

import aotdist


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="counts generations in another way")
def test_what_compiling_leaves_brings_the_full_collection_closer() -> None:
    """It comes after ten of the next younger generation, and `gc.freeze` would begin to count anew.

    A process kept 290 MiB of 24 programs that it had dropped.
    """
    gc.collect()
    for number in range(3):
        aotdist.compile(lambda x, scale=number: x * scale, backend="fx")(torch.ones(2))
    assert gc.isenabled()
    assert gc.get_count()[2] >= 3
