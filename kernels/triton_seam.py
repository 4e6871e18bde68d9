"""The door to Triton, which is imported when a kernel is made: 3.6 to 3.9 meet here.

On a GPU kernels are compiled. With `TRITON_INTERPRET=1` in the environment before Triton is first imported,
they run on CPU tensors, block by block in NumPy: slow, and what the tests hold kernels to. Triton's own
interpreter computes bfloat16 and float8 on their raw bits; `repair` has it round as a GPU does.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal


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


def compiled(
    function: Any,
    pointers: Mapping[str, str],
    blocks: Mapping[str, int],
    *,
    backend: Literal["cuda", "hip"],
    arch: int | str,
    options: Mapping[str, Any],
) -> Any:
    """A kernel compiled for a GPU that need not be there; no driver is asked.

    Args:
        function: the kernel, of `triton.jit` in a process that does not interpret.
        pointers: its tensors in the order of its arguments, with their types (`*fp32`); all of them lie at
            multiples of 16 bytes, as what PyTorch allocates does.
        blocks: its other arguments, which are constants.
        backend: who made the GPU.
        arch: its generation: 90 for `sm_90`, or `gfx942`.
        options: of Triton's.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict(pointers) | dict.fromkeys(blocks, "constexpr")
    places = {name: (at,) for at, name in enumerate(signature)}
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={places[name]: value for name, value in blocks.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in pointers},
    )
    target = GPUTarget(backend, arch, 32 if backend == "cuda" else 64)
    return triton.compile(source, target=target, options=dict(options))


def nvidia_tools() -> Path:
    """The folder with NVIDIA's tools that Triton brings."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
