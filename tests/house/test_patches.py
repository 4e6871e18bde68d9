"""Libraries are changed in one way only, `Patch`, and no other thread than the one that captures sees it."""

from __future__ import annotations

import ast
import importlib
import io
import logging
import math
import pkgutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _stance
from torch._inductor import async_compile
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import aotdist
from aotdist.torch_seam.checks import intercept_checks
from aotdist.torch_seam.classes import intercept_classes
from aotdist.torch_seam.control_flow import calling_to_be_traced
from aotdist.torch_seam.patches import PATCHES, _held_by, replaced_here
from aotdist.torch_seam.trees import pytree
from tests.house.tree import package_files, parse

PATCHES_FILE = Path("aotdist/torch_seam/patches.py")
NOT_OF_LIBRARIES = {
    ("aotdist/codegen/python_source.py", "linecache.cache"),  # an entry of its own, for tracebacks
    ("aotdist/torch_seam/dynamo.py", "UnspecializedNNModuleVariable.call_function"),  # for good
    ("aotdist/torch_seam/inductor.py", "os.environ"),  # for good: an address that kernels read
    ("kernels/interpreter.py", "interpreter.GridExecutor.__call__"),  # for good: its faults
    ("kernels/interpreter.py", "interpreter._patch_lang_tensor"),
    ("kernels/triton_seam.py", "linecache.cache"),
    ("launch/commands/build.py", "sys.modules"),  # a process of its own
}
"""Places of other modules that are assigned without a patch, by the file that does it."""


def assigned_in(path: Path) -> Iterator[str]:
    """What a file assigns to, or deletes, in modules and classes of others."""
    tree = parse(path)
    foreign = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        or (isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("aotdist"))
        for alias in node.names
    }
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                found = targets
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                found = [target]
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, *_]):
                found = [ast.Attribute(owner, "?")]
            case _:
                continue
        for place in (one for target in found for one in getattr(target, "elts", [target])):
            root = place
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if root is not place and isinstance(root, ast.Name) and root.id in foreign:
                yield ast.unparse(place.value if isinstance(place, ast.Subscript) else place)


def test_nothing_of_libraries_is_assigned_without_a_patch():
    found = {
        (str(path), place) for path in package_files() if path != PATCHES_FILE for place in assigned_in(path)
    }
    assert found == NOT_OF_LIBRARIES


class Poison:
    """A value that raises whatever is done with it; but a thread may give it to a patch."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("another thread has met the value of the thread that captures")

    __bool__ = __call__ = __iter__ = __getattribute__  # type: ignore[assignment]


def failure_of(run: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        run()
    return f"{caught.type.__name__}: {caught.value}".partition("\n")[0]


def leaf() -> torch.Tensor:
    return torch.arange(1.0, 4.0).requires_grad_()


class Sub(torch.Tensor):
    pass


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def attributes() -> Any:
    module = nn.Linear(1, 1)
    module.note = 3
    found = [module.note, module.weight.shape, sorted(vars(module))]
    del module.note
    return [*found, hasattr(module, "note")]


def classes() -> Any:
    x = torch.ones(2)
    made = x.as_subclass(Sub), Sub(x), torch.Tensor([1.0, 2.0]), nn.Parameter(x)
    return [(type(one).__name__, one.tolist()) for one in made]


def batches() -> Any:
    return getattr(async_compile.AsyncCompile(), "_batch", None)


def checks() -> Any:
    return [
        failure_of(lambda: torch._check_tensor_all(torch.tensor([True, False]), lambda: "not all")),
        failure_of(lambda: torch.distributions.Normal(0.0, -1.0, validate_args=True)),
        torch._is_all_true(torch.tensor([True])),
    ]


def said() -> Any:
    text, records, logger = io.StringIO(), list[str](), logging.getLogger("aotdist.of_this_test")
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.warning("%d rows", 3)
    logger.removeHandler(handler)
    print(1, "two", sep="-", file=text)
    return text.getvalue(), records


def traced_calls() -> Any:
    cond: Any = importlib.import_module("torch._higher_order_ops.cond").cond_op
    x = leaf()
    found = (
        torch.autograd.grad(checkpoint_again(x).sum(), x),
        cond(torch.tensor(True), torch.sin, torch.cos, (x,)),
    )
    trees = failure_of(lambda: cond(torch.tensor(True), torch.sin, torch.cos, ({"x": x},)))
    return torch.compiler.is_dynamo_compiling(), found, trees


def recomputed() -> Any:
    x = leaf()
    torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True).sum().backward()
    return x.grad


def checkpoint_again(x: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)


def seeds() -> Any:
    torch.manual_seed(3)
    return torch.initial_seed(), torch.rand(2), torch.get_rng_state().sum()


def numbers() -> Any:
    found: list[Any] = [max(1, 2.5), min([3, 4]), max("ab")]
    for name in sorted(name for owner, name, _ in PATCHES["functions_of_numbers"].places if owner is math):
        try:
            found.append(getattr(math, name)(0.5))
        except TypeError:
            found.append(getattr(math, name)(0.5, 2.0))
    number = ShapeEnv().create_unbacked_symint()
    symbols = number, number * 1.5, number > 3
    return [*found, [(str(one), f"{one}", repr(one)) for one in symbols], str((number * 1.5) ** 2)]


def transforms() -> Any:
    x = torch.arange(1.0, 4.0)
    return [
        torch.func.vmap(torch.sin)(x),
        torch.func.grad(lambda t: Doubled.apply(t).sum())(x),
        torch.func.jvp(torch.sin, (x,), (x,)),
        scripted(x),
    ]


def lists() -> Any:
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(torch.ones(2)).tolist()


LOOKS: dict[str, Callable[[], Any]] = {
    "own_attributes": attributes,
    "kernel_batches": batches,
    "compiled_as_written": lambda: _stance.stance,
    "prints_noted": said,
    "said_to_compile": torch.compiler.is_compiling,
    "recomputes": recomputed,
    "default_generator": seeds,
    "numbers_of_data_followed": numbers,
    "functions_of_numbers": numbers,
    "lists_of_numbers": lists,
    "lengths_open": lambda: len(torch.ones(2)),
    "tensors_swapped": transforms,
}
"""What shows another thread each patch, and is what it was: all that have a name."""


def told(value: Any) -> str:
    """A value to the last bit."""
    return repr(pytree.tree_map_only(torch.Tensor, torch.Tensor.tolist, value))


@pytest.fixture(scope="module", autouse=True)
def _all_are_there() -> None:
    for module in pkgutil.walk_packages(aotdist.__path__, "aotdist."):
        if not module.name.startswith("aotdist.launch"):
            importlib.import_module(module.name)


def test_other_threads_meet_the_librarys_own_functions():
    """Each patch is in force in this thread, with a value that nobody may touch; another does what it did."""
    own = [name for name in PATCHES if name.isidentifier()]
    assert sorted(own) == sorted(LOOKS), "a patch has no look, or a look no patch"
    expected = {name: told(look()) for name, look in LOOKS.items()}
    seen, failures = dict[str, str](), list[BaseException]()

    def elsewhere(name: str) -> None:
        try:
            assert all(_held_by(owner, key) is instead for owner, key, instead in PATCHES[name].places)
            seen[name] = told(LOOKS[name]())
        except BaseException as failure:
            failures.append(failure)

    for name in LOOKS:
        thread = threading.Thread(target=elsewhere, args=(name,))
        with PATCHES[name].applied(Poison()):
            thread.start()
            thread.join()
        assert not any(_held_by(owner, key) is instead for owner, key, instead in PATCHES[name].places)
    if failures:
        raise failures[0]
    assert seen == expected


@pytest.mark.parametrize(
    ("replaced", "look"),
    [
        (lambda: intercept_classes(Poison()), classes),
        (lambda: intercept_checks(Poison()), checks),
        (calling_to_be_traced, traced_calls),
    ],
    ids=["classes", "checks", "control flow"],
)
def test_other_threads_meet_functions_as_they_were(
    replaced: Callable[[], AbstractContextManager[None]], look: Callable[[], Any]
):
    expected, seen = told(look()), list[str]()
    thread = threading.Thread(target=lambda: seen.append(told(look())))
    with replaced():
        thread.start()
        thread.join()
    assert seen == [expected]


def test_functions_that_are_replaced_by_name():
    """Collectives of objects, DTensor's helpers and others are replaced so."""
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(ast.unparse(ast.parse("1"))))
    with replaced_here(ast, "unparse", lambda unparse, tree: f"{unparse(tree)} here"):
        thread.start()
        thread.join()
        seen.append(ast.unparse(ast.parse("1")))
    assert seen == ["1", "1 here"]
