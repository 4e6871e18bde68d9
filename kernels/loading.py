"""The source of kernels as functions that Triton compiles."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Mapping
from typing import Any

from aotdist.kernels import triton_seam

_serial = itertools.count()


def loaded(source: str, label: str) -> Mapping[str, Any]:
    """The functions of a module of kernels.

    Args:
        source: the module.
        label: a word for the file name that tracebacks show.
    """
    filename = f"<aotdist {label} kernels {next(_serial)}>"
    # Triton reads the source of a function through `linecache`, and an mtime of None keeps it there.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = triton_seam.namespace() | {"__name__": filename}  # Triton asks functions for their module
    exec(compile(source, filename, "exec"), namespace)
    weakref.finalize(namespace["product"], linecache.cache.pop, filename, None)  # gone with the rest
    return namespace
