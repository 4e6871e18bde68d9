"""Everything that an entry depends on, as one hash: graph, versions, machine, settings of the process."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from aotdist.artifacts.archive import version_of
from aotdist.artifacts.graphs import META, Graphs
from aotdist.artifacts.live import NOTHING_LIVE
from aotdist.artifacts.values import Json, Values
from aotdist.codegen.fx import attribute_of
from aotdist.codegen.portable import is_plain_constant
from aotdist.errors import UnsupportedProgram
from aotdist.program import Graph
from aotdist.settings import Settings
from aotdist.torch_seam.ambient import fills_uninitialized_memory, kernel_choices
from aotdist.torch_seam.functional import FakeTensor, FakeTensorMode
from aotdist.torch_seam.groups import extent_of_group
from aotdist.torch_seam.inductor import inductor_extensions, inductor_options, merges_gathers
from aotdist.torch_seam.nodes import all_nodes
from aotdist.torch_seam.operators import OpOverload, argument_names, schema_of
from aotdist.torch_seam.tensors import StorageWeakRef

_FOR_PEOPLE = ("original_aten", "stack_trace", "from_node", "nn_module_stack")
"""Node metadata that only affects the names of kernels."""

_RECOMPUTED = ("tensor_meta", "mutation_region_id")
"""Node metadata that Inductor's rewrites leave behind, and recompute when they need it."""

_KNOWN = frozenset({*META, "val", *_FOR_PEOPLE, *_RECOMPUTED})

_OUTSIDE = ("triton_kernel_wrapper",)
"""Higher-order operators whose arguments are in tables of the process, not in the graph."""


def written(graph: Graph, fake_mode: FakeTensorMode) -> Json:
    """`graph` as JSON, for this machine: its nodes, and the metadata of their tensors.

    Raises:
        UnsupportedProgram: it contains something that cannot be written, or would be lost.
    """
    for node in all_nodes(graph.gm):
        unknown = node.meta.keys() - _KNOWN
        if unknown:
            raise UnsupportedProgram(f"`{node.name}` carries {sorted(unknown)}", stage="cache")
        held = attribute_of(graph.gm, node) if node.op == "get_attr" else None
        if isinstance(held, torch.Tensor) and not is_plain_constant(held):
            raise UnsupportedProgram(f"`{node.name}` is no plain constant", stage="cache")
    if any(slot.role == "size" for slot in graph.ins):
        raise UnsupportedProgram("the program has symbolic sizes", stage="cache")
    values = Values(NOTHING_LIVE, {})
    graphs = Graphs(values, fake_mode, to_compile=True)
    nodes, shapes = graphs.written(graph), graphs.shapes()
    devices = {shape.device.type for shape in shapes}
    if devices - {"cpu"}:
        raise UnsupportedProgram(f"the program runs on {', '.join(sorted(devices))}", stage="cache")
    return [nodes, values.written(shapes, "the graph")]


def read(json: Json, given: Graph, fake_mode: FakeTensorMode) -> Graph:
    """The graph that was written as `json`.

    Args:
        json: what `written` returned.
        given: a graph with the same arguments.
        fake_mode: the mode of its `val`s.

    Raises:
        BadArtifact: `json` is no graph.
    """
    nodes, shapes = json
    values = Values(NOTHING_LIVE, {})
    graph = Graphs(values, fake_mode, values.read(shapes), to_compile=True).read(nodes)
    for ours, theirs in zip(graph.placeholders(), given.placeholders(), strict=True):
        ours.meta["val"] = theirs.meta["val"]
    return graph


def with_origins(graph: Graph, like: Graph) -> Graph:
    """`graph`, with the metadata of `like` from which kernels get their names; changed in place."""
    for ours, theirs in zip(graph.gm.graph.nodes, like.gm.graph.nodes, strict=True):
        ours.meta |= {name: theirs.meta[name] for name in _FOR_PEOPLE if name in theirs.meta}
    return graph


def key_of(what: str, graph: Graph, fake_mode: FakeTensorMode, settings: Settings, *more: Any) -> str:
    """The key of what is made of a graph on the CPU.

    Args:
        what: what is made of the graph, in a word.
        graph: the graph.
        fake_mode: the mode of its `val`s.
        settings: how to compile.
        more: everything else that the result depends on, as JSON values.

    Raises:
        UnsupportedProgram: the result depends on something that no key can include.
    """
    operators = frozenset(node.target for node in all_nodes(graph.gm) if isinstance(node.target, OpOverload))
    refuse_foreign_lowerings(operators)
    parts = {
        "what": what,
        "graph": written(graph, fake_mode),
        "arguments": [_argument(node.meta.get("val")) for node in graph.placeholders()],
        "storages": _storages(graph),
        "operators": sorted(map(_described, operators)),
        "groups": dict(sorted(_groups(graph.gm))),
        "settings": settings.fingerprint(),
        "machine": dict(machine()),
        "process": dict(process()),
        "more": more,
    }
    return _hash(parts)


def key_of_toolchain() -> str:
    """The key of the check of this machine's compilers."""
    return _hash({"what": "toolchain", "machine": dict(machine())})


def _hash(parts: Json) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def about(name: str, what: str) -> Mapping[str, str]:
    """What `aotdist cache ls` shows of an entry."""
    versions = machine()
    return {"name": name, "what": what, "torch": versions["torch"].partition(" ")[0]}


def _argument(val: Any) -> Json:
    """The properties of an argument besides its size, strides, dtype and device."""
    if not isinstance(val, FakeTensor):
        return repr(val)
    return [val.storage_offset(), val.requires_grad, val.is_conj(), val.is_neg(), val.is_inference()]


def _storages(graph: Graph) -> list[int]:
    """Which arguments share memory."""
    seen: dict[int, int] = {}
    vals = [node.meta.get("val") for node in graph.placeholders()]
    storages = [StorageWeakRef(val.untyped_storage()) for val in vals if isinstance(val, FakeTensor)]
    return [seen.setdefault(storage.cdata, len(seen)) for storage in storages]


def _described(operator: OpOverload) -> str:
    """An operator's schema and tags, which other packages may have registered."""
    return f"{schema_of(operator)} {sorted(map(str, operator.tags))}"


def _groups(gm: GraphModule) -> Iterator[tuple[str, Json]]:
    """The process groups of a graph: their sizes, and this rank's places if code depends on them."""
    has_places = merges_gathers()
    for node in all_nodes(gm):
        if str(node.target).startswith(_OUTSIDE):
            raise UnsupportedProgram(f"`{node.name}` calls a kernel of yours", stage="cache")
        names = argument_names(node.target) if isinstance(node.target, OpOverload) else []
        if "group_name" in names and names.index("group_name") < len(node.args):
            name = str(node.args[names.index("group_name")])
            size, place = extent_of_group(name)
            yield name, [size, place if has_places else None]


_VARIABLES = ("CXX", "CPATH", "CPLUS_INCLUDE_PATH", "OMP_NUM_THREADS", "CONDA_PREFIX")
"""Environment variables that a C++ compiler, or Inductor when it calls one, looks at."""


@functools.cache
def machine() -> Mapping[str, str]:
    """The parts of a key that stay the same while a process runs, by name."""
    return {
        "aotdist": _our_code(),
        "python": sys.version,
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "triton": version_of("triton"),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": f"{torch.backends.cpu.get_cpu_capability()} {_instructions()}",
        "compiler": _compiler(),
    }


def process() -> Mapping[str, str]:
    """The parts of a key that a program may change at any time, by name.

    Raises:
        UnsupportedProgram: Inductor's options contain functions of the user's.
    """
    options = inductor_options()
    foreign = sorted(name for name, value in options.items() if _is_function(value))
    if foreign:
        raise UnsupportedProgram(f"Inductor runs functions of yours: {', '.join(foreign)}", stage="cache")
    return {
        **{name: os.environ.get(name, "") for name in _VARIABLES},
        "threads": str(torch.get_num_threads()),
        "deterministic": f"{torch.are_deterministic_algorithms_enabled()} {fills_uninitialized_memory()}",
        "kernels": str(kernel_choices()),
        "defaults": f"{torch.get_default_dtype()} {torch.get_default_device()}",
        "inference": str(torch.is_inference_mode_enabled()),
        "matrix products": torch.get_float32_matmul_precision(),
        "inductor": hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest(),
    }


def refuse_foreign_lowerings(operators: frozenset[OpOverload]) -> None:
    """Check that a graph is lowered by Inductor's own functions.

    Args:
        operators: the operators that the graph calls.

    Raises:
        UnsupportedProgram: others registered lowerings for these operators, or for PyTorch's own.
    """
    for operator, function in inductor_extensions():
        if _is_of_torch(function):
            continue
        name = str(operator)
        if operator in operators or name.startswith(("aten.", "prims.", "aten::", "prims::")):
            raise UnsupportedProgram(f"`{name}` is lowered by a function of yours", stage="cache")


def _is_function(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_is_function, value))
    if isinstance(value, dict):
        return any(map(_is_function, value.values()))
    return callable(value) or " at 0x" in repr(value)


def _is_of_torch(function: Callable[..., Any] | functools.partial[Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    module = str(getattr(function, "__module__", None) or type(function).__module__)
    return module.partition(".")[0] in ("torch", "builtins", "_operator", "math")


def _our_code() -> str:
    """A hash of our own source, since the version stays the same while aotdist is developed."""
    digest = hashlib.sha256()
    for path in own_files():
        digest.update(f"{path.relative_to(_PACKAGE)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


_PACKAGE = Path(__file__).resolve().parents[2]


def own_files() -> list[Path]:
    """The files of the package `aotdist`, all rooms."""
    folders = os.walk(_PACKAGE, followlinks=True)  # `rglob` does not follow links
    return sorted(
        Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py")
    )


def _instructions() -> str:
    """The processor's features, for which kernels are compiled, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return hashlib.sha256("\n".join(features).encode()).hexdigest()


def _compiler() -> str:
    """Path, size and date of the C++ compiler; asking for its version would start it."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        return ""
    path = Path(found).resolve()
    known = path.stat()
    return json.dumps([str(path), known.st_size, known.st_mtime_ns])
