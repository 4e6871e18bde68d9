"""aotdist/torch_seam is the only importer of PyTorch's private modules."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.tree import package_files, parse

SEAM = Path("aotdist/torch_seam")


def is_private(dotted: str) -> bool:
    """Whether a dotted name reaches into what PyTorch does not promise to keep."""
    parts = dotted.split(".")
    if parts[0] not in ("torch", "functorch", "torchgen") or parts[:2] == ["torch", "ops"]:
        return False
    return parts[:3] == ["torch", "fx", "experimental"] or any(
        part.startswith("_") and not part.endswith("__") for part in _up_to_class(parts)
    )


def _up_to_class(parts: list[str]) -> list[str]:
    """The module part of a name: `torch.Tensor._make_subclass` is a method, not a private module."""
    for depth, part in enumerate(parts):
        if part[:1].isupper():
            return parts[:depth]
    return parts


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every private thing of PyTorch that a file imports or reaches by attributes."""
    for node in ast.walk(tree):
        for dotted in _dotted_names(node):
            if is_private(dotted):
                yield node.lineno, dotted  # type: ignore[attr-defined]


def _dotted_names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), level=0, names=names):
            yield from (f"{module}.{alias.name}" for alias in names)
        case ast.Attribute() if (dotted := _chain(node)) is not None:
            yield dotted
        case ast.Call(args=[ast.Constant(value=str(name)), *_], func=func) if _is_import_function(func):
            yield name


def _chain(node: ast.expr) -> str | None:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr) if (left := _chain(value)) is not None:
            return f"{left}.{attr}"
    return None


def _is_import_function(func: ast.expr) -> bool:
    return (_chain(func) or "").split(".")[-1] in ("import_module", "__import__", "find_spec")


def test_only_the_seam_imports_private_modules_of_torch():
    files = [path for path in package_files() if SEAM not in path.parents]
    found = [f"{path}:{line}   {name}" for path in files for line, name in private_names(parse(path))]
    assert not found, "re-export these from a module of aotdist/torch_seam instead:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "from torch._subclasses import FakeTensorMode",
        "from torch.utils import _pytree as pytree",
        "from torch.distributed.fsdp._fully_shard import FSDPState",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "from torch.fx import experimental",
        "import torch.testing._internal.common_utils as common",
        "x = torch._C._get_tracing_state()",
        "y = torch.fx.experimental.symbolic_shapes.guard_int(1)",
        "import importlib; importlib.import_module('torch._inductor.config')",
    ],
)
def test_private_names_are_found(source):
    assert list(private_names(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from torch.distributed.tensor import DTensor",
        "x = torch.ops._c10d_functional.wait_tensor.default",
        "x = torch.Tensor._make_wrapper_subclass(cls, size)",
        "x = torch.__version__",
        "from aotdist.torch_seam.functional import FakeTensorMode",
        "from aotdist._x import y",
    ],
)
def test_public_names_pass(source):
    assert not list(private_names(ast.parse(source)))
