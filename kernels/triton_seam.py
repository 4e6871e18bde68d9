"""The door to Triton, which is imported when a kernel is made: 3.6 to 3.9 meet here.

On a GPU kernels are compiled. With `TRITON_INTERPRET=1` in the environment before Triton is first imported,
they run on CPU tensors, block by block in NumPy: slow, and what the tests hold kernels to. Triton's own
interpreter computes bfloat16 and float8 on their raw bits; `repair` has it round as a GPU does.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


def is_installed() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def is_interpreting() -> bool:
    """Whether kernels run on CPU tensors."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def namespace() -> dict[str, Any]:
    """What the source of kernels names."""
    import triton
    import triton.language as tl

    if is_interpreting():
        from aotdist.kernels.interpreter import repair

        repair()
    return {"triton": triton, "tl": tl}
