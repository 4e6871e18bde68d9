"""What aotdist asks of a wrapper tensor, and of a module whose hooks communicate.

The rest of `aotdist` knows subclasses through this file alone. A *wrapper* is a tensor subclass with
`__tensor_flatten__` and `__tensor_unflatten__` (DTensor, Float8, 2:4 sparse, nested ones). It is
flattened into plain tensors before the graph and rebuilt after it. A `Recipe` is the frozen
description of how to rebuild it, and part of an artifact's signature.

A *module rule* says how a module that communicates in hooks (FSDP2) is captured: its hooks are
replaced, while tracing, by collectives that land in the graph. A *container rule* knows a module
(DDP, Fabric's wrapper) that cannot be captured, but whose child can.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.sparse_matrix import SPARSE_PARTS as SPARSE_PARTS
from aotdist.subclasses.sparse_matrix import SparseMatrix, is_of_rows, is_sparse, sparse_parts
from aotdist.subclasses.sparse_rows import ADDED_ROWS as ADDED_ROWS
from aotdist.subclasses.sparse_rows import SparseRows as SparseRows
from aotdist.subclasses.sparse_rows import sparse_made as sparse_made
from aotdist.torch_seam.classes import (
    changes_functions,
    dispatches,
    flatten_protocol,
    is_wrapper_class,
)
from aotdist.torch_seam.functional import DataDependentOutputException, stands_for_another
from aotdist.torch_seam.operators import OpOverload

_SPECIALISTS = (
    "aotdist.subclasses.dtensor",
    "aotdist.subclasses.fsdp",
    "aotdist.subclasses.ddp",
    "aotdist.subclasses.fabric",
    "aotdist.subclasses.sparse24",
    "aotdist.subclasses.jagged",
    "aotdist.subclasses.sparse",
)


FIX_OF_OWN_CLASS = (
    "compute with `x.as_subclass(torch.Tensor)`, where its values are all that counts, and convert results "
    "outside"
)
"""The fix for a tensor whose class overrides `__torch_function__` only."""
_FLATTEN_PROTOCOL = ("__tensor_flatten__", "__tensor_unflatten__")

CONVERSION = "_aotdist_conversion"
"""Attribute of a module that was converted in place: what it computes in now, for `explain`."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A leaf of a recipe: one plain tensor of the graph."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf of a recipe: an attribute that is no tensor (`DTensor.device_mesh`)."""

    value: Any


@dataclass(frozen=True, slots=True)
class Wrapper:
    """How to rebuild a wrapper tensor: its class, its context and a recipe for each attribute."""

    cls: type[torch.Tensor]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]
    attributes: tuple[tuple[str, Recipe], ...]


Recipe: TypeAlias = Plain | Constant | Wrapper


def is_wrapper(tensor: object) -> bool:
    """Whether `tensor` is flattened into plain tensors before the graph."""
    return is_wrapper_class(type(tensor)) or is_sparse(tensor)


def _flattened(tensor: torch.Tensor) -> tuple[Mapping[str, Any], Any]:
    """The attributes of a wrapper by name, and its context."""
    if is_sparse(tensor):
        return sparse_parts(tensor)
    try:
        names, context = flatten_protocol(tensor)
    except DataDependentOutputException as error:
        raise UnsupportedProgram(
            f"what is inside of a {type(tensor).__name__} depends on data that the program computes",
            stage="joint",
            fix="change it outside of the compiled function, between two calls (torchao's "
            "`precompute_float8_dynamic_scale_for_fsdp`)",
        ) from error
    lost = _LOST.get(type(tensor).__name__)
    return {name: getattr(tensor, name) for name in names if name != lost}, context


_LOST = {"WeightWithDynamicFloat8CastTensor": "_precomputed_scale"}
"""Parts that a class flattens, and leaves out when it is made again (torchao 0.18); it computes them anew."""


def is_of_own_class(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is of a subclass that is a plain tensor to the graph (no `__torch_dispatch__`)."""
    cls = type(tensor)
    return cls not in (torch.Tensor, nn.Parameter) and not dispatches(cls) and not is_wrapper(tensor)


def is_real(tensor: torch.Tensor) -> bool:
    """Whether `tensor` holds data, rather than standing in for one that does."""
    if is_wrapper(tensor):
        return any(is_real(plain) for plain in plain_tensors(tensor))
    return not stands_for_another(tensor)


def recipe_of(tensor: torch.Tensor) -> Recipe:
    """How to rebuild `tensor` from its plain tensors."""
    if not is_wrapper(tensor):
        return Plain(tensor.size(), tensor.stride() if tensor.layout is torch.strided else (), tensor.dtype)
    parts, context = _flattened(tensor)
    attributes: list[tuple[str, Recipe]] = []
    for name, value in parts.items():
        attributes.append((name, recipe_of(value) if isinstance(value, torch.Tensor) else Constant(value)))
    cls = _class_of(tensor)
    size, stride = (tensor.size(), tensor.stride()) if wrapper_rule(cls).sized else (torch.Size(), ())
    return Wrapper(cls, context, size, stride, tuple(attributes))


def _class_of(tensor: torch.Tensor) -> type[torch.Tensor]:
    """The class that a tensor has in a trace."""
    if not is_sparse(tensor):
        return type(tensor)
    return SparseRows if is_of_rows(tensor) else SparseMatrix


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors beneath `tensor`, depth first: `[tensor]` itself when it is plain."""
    if not is_wrapper(tensor):
        return [tensor]
    values = _flattened(tensor)[0].values()
    return [plain for value in values if isinstance(value, torch.Tensor) for plain in plain_tensors(value)]


def inner_tensors(wrapper: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Attribute path and value of every tensor inside of `wrapper`, outer ones first."""
    if not is_wrapper(wrapper):
        return
    for name, inner in _flattened(wrapper)[0].items():
        if isinstance(inner, torch.Tensor):
            yield f".{name}", inner
            for path, deeper in inner_tensors(inner):
                yield f".{name}{path}", deeper


def leaves(recipe: Recipe) -> Iterator[tuple[str, Plain]]:
    """Attribute path (`._local_tensor`, empty for a plain tensor) and metadata of every plain tensor."""
    match recipe:
        case Plain():
            yield "", recipe
        case Constant():
            return
        case Wrapper(attributes=attributes):
            for name, part in attributes:
                for path, plain in leaves(part):
                    yield f".{name}{path}", plain


def rebuild(recipe: Recipe, plains: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put a tensor together around `plains`; the inverse of `plain_tensors`.

    No autograd history is attached: the result does not require grad.
    """
    remaining = iter(plains)
    tensor = _assembler(recipe)(remaining)
    assert next(remaining, None) is None, "more plain tensors than the recipe has leaves"
    return _without_grad(tensor) if isinstance(recipe, Wrapper) else tensor


def _without_grad(wrapper: torch.Tensor) -> torch.Tensor:
    """A context may carry `requires_grad` (DTensor's does); autograd decides that anew."""
    return wrapper.requires_grad_(False) if wrapper.requires_grad and wrapper.is_leaf else wrapper


def _assembler(recipe: Recipe) -> Callable[[Iterator[torch.Tensor]], Any]:
    """A function that rebuilds the tensor from an iterator of plain tensors; made once for many calls."""
    match recipe:
        case Plain():
            return next
        case Constant(value=value):
            return lambda _: value
        case Wrapper(cls=cls, stride=stride):
            unflatten = wrapper_rule(cls).unflattener(recipe)
            parts = [(name, _assembler(part)) for name, part in recipe.attributes]
            same_strides = _part_of_same_strides(recipe)

            def assemble(remaining: Iterator[torch.Tensor]) -> torch.Tensor:
                inner = {name: part(remaining) for name, part in parts}
                return unflatten(inner, stride if same_strides is None else inner[same_strides].stride())

            return assemble


def _part_of_same_strides(recipe: Wrapper) -> str | None:
    """The part with the wrapper's size and strides: at run time the wrapper has the strides of this part."""
    for name, part in recipe.attributes:
        if not isinstance(part, Constant) and (part.size, part.stride) == (recipe.size, recipe.stride):
            return name
    return None


class WrapperRule:
    """How aotdist treats a wrapper class; a specialist overrides what differs for its class.

    Attributes:
        mixes: whether operators take such wrappers and plain tensors together. The class of a gradient may
            then depend on which results have gradients.
        views_may_be_copies: whether a view, to autograd, may have memory of its own.
        sized: whether sizes and strides belong to the wrapper. Otherwise they follow from its parts, and
            recipes have none.
    """

    mixes = True
    views_may_be_copies = False
    sized = True

    def owns(self, cls: type[torch.Tensor]) -> bool:
        """Whether this rule speaks for `cls`."""
        return True

    def convert(self, tensor: torch.Tensor, recipe: Wrapper) -> torch.Tensor | None:
        """`tensor` (a tangent) converted to the metadata of `recipe`, or None if that is impossible."""
        return None

    def tangent_recipe(self, recipe: Wrapper) -> Recipe:
        """The metadata to assume for the tangent of an output with metadata `recipe`; it may be plain."""
        return recipe

    def same_layout(self, a: Wrapper, b: Wrapper) -> bool:
        """Whether the contexts of two recipes are interchangeable in tangents."""
        return bool(a.context == b.context)

    def is_redistributed(self, view: torch.Tensor, base: torch.Tensor) -> bool:
        """Whether a view has other placements than its base, so that its gradient has, too."""
        return False

    def refuse(self, tensor: torch.Tensor, path: str) -> None:
        """Raise `UnsupportedProgram` for a tensor that cannot pass between a program and its caller."""

    def compared(self, tensor: torch.Tensor) -> tuple[Sequence[int], Sequence[int]]:
        """Sizes and strides that are compared between calls."""
        return tensor.shape, tensor.stride()

    def ragged_dims(self, tensor: torch.Tensor) -> frozenset[int]:
        """Dimensions that are dynamic from the first call on."""
        return frozenset()

    def dims_inside(self, recipe: Wrapper, name: str, dims: frozenset[int]) -> frozenset[int]:
        """The dynamic dimensions of the part called `name`, if `dims` of the wrapper are dynamic."""
        return dims

    def tracing(self) -> AbstractContextManager[None]:
        """A context for each trace, for what operators on such wrappers cache or replace."""
        return nullcontext()

    def process_groups(self, recipe: Wrapper) -> Iterable[str]:
        """Names of the process groups that operations on such a tensor may communicate in."""
        return ()

    def placement(self, recipe: Wrapper) -> str:
        """How such a tensor is placed on ranks, in the same words on all of them; empty if it is not."""
        return ""

    def unwrap_source(self, tensor: str, recipe: Wrapper) -> Sequence[str]:
        """Python expressions for the plain tensors beneath the variable `tensor`."""
        return [f"{tensor}{path}" for path, _ in leaves(recipe)]

    def context_of(self, tensor: torch.Tensor) -> Any:
        """The context that `same_context_source` compares with."""
        return _flattened(tensor)[1]

    def same_context_source(self, tensor: str, expected: str) -> str:
        """Python expression for whether the variable `tensor` has the context in the variable `expected`."""
        return f"{tensor}.__tensor_flatten__()[1] == {expected}"

    def unflattener(self, recipe: Wrapper) -> Callable[[Mapping[str, Any], tuple[int, ...]], torch.Tensor]:
        """A function from attributes by name, and strides, to the wrapper."""
        unflatten: Callable[..., torch.Tensor] = recipe.cls.__tensor_unflatten__  # type: ignore[attr-defined]

        def put_together(inner: Mapping[str, Any], stride: tuple[int, ...]) -> torch.Tensor:
            return unflatten(inner, recipe.context, recipe.size, stride)

        return put_together

    def rebuilder(self, recipe: Wrapper) -> Callable[..., torch.Tensor]:
        """A function from plain tensors to the wrapper, for the printed runtime."""
        assemble = _assembler(recipe)
        return lambda *plains: _without_grad(assemble(iter(plains)))


Policy: TypeAlias = Literal["must_save", "must_recompute"]


class ModuleRule:
    """How a module whose hooks communicate is captured; methods do nothing unless overridden."""

    name: str

    def claims(self, root: nn.Module) -> bool:
        """Whether this rule has work to do in `root`."""
        raise NotImplementedError

    def check(self, root: nn.Module) -> None:
        """Raise `UnsupportedProgram`, naming module and feature, before anything is changed."""

    def flags(self, root: nn.Module) -> Hashable:
        """Further values that an artifact is specialised on; evaluated at every call, so cheap."""

    def prepare(self, root: nn.Module) -> None:
        """Bring the module into the state that a compiled call expects; cheap."""

    def capturing(self, root: nn.Module) -> AbstractContextManager[None]:
        """Replace the module's hooks while it is traced; restore them exactly.

        What the replacements record of a unit goes into `aotdist.origins.annotate`.
        """
        return nullcontext()

    def lifted(self, root: nn.Module) -> Iterable[tuple[str, object, str]]:
        """Extra tensors that the program reads: display name, owner, attribute."""
        return ()

    def after_backward(self, root: nn.Module) -> None:
        """What eager's last backward hook would do to the module's own state."""


class ContainerRule:
    """How a module is compiled whose own forward stays uncompiled, around the module that it contains.

    Attributes:
        communicates: whether that forward, or a hook of it, communicates: no program may contain it.
    """

    communicates = False

    def contained(self, module: nn.Module) -> nn.Module | None:
        """The module to compile in place of `module`; None if the rule is for other classes."""
        raise NotImplementedError

    def calling(self, module: nn.Module) -> AbstractContextManager[None]:
        """Around each compiled call of `module`."""
        return nullcontext()


def conversions(modules: Mapping[str, nn.Module]) -> dict[str, tuple[str, ...]]:
    """Paths of the modules that were converted in place (`aotdist.to_float8`), by their conversion."""
    found: dict[str, list[str]] = {}
    for path, module in modules.items():
        conversion = vars(module).get(CONVERSION)
        if conversion is not None:
            found.setdefault(conversion, []).append(path or "(root)")
    return {conversion: tuple(paths) for conversion, paths in found.items()}


@functools.cache
def _specialists() -> tuple[Any, ...]:
    return tuple(importlib.import_module(name) for name in _SPECIALISTS)


_GENERAL = WrapperRule()
_registered: list[WrapperRule] = []


def register_wrapper_rule(rule: WrapperRule) -> None:
    """Use `rule` for the classes that it owns; the latest rule comes first.

    Programs that are compiled already do not change: register before the first call.
    """
    _registered.insert(0, rule)
    wrapper_rule.cache_clear()


def rule_of(tensor: torch.Tensor) -> WrapperRule:
    """The rule for a tensor's class."""
    return wrapper_rule(_class_of(tensor))


@functools.cache
def wrapper_rule(cls: type[torch.Tensor]) -> WrapperRule:
    """The rule for `cls`: one that was registered, a specialist of aotdist's, or the general one."""
    return next((rule for rule in _wrapper_rules() if rule.owns(cls)), _GENERAL)


def _wrapper_rules() -> tuple[WrapperRule, ...]:
    specialists = (getattr(module, "WRAPPER_RULE", None) for module in _specialists())
    return (*_registered, *(rule for rule in specialists if rule is not None))


def operators_made_of_others() -> dict[OpOverload, Callable[..., Any]]:
    """Decompositions of the wrappers' own operators, for compilers that fuse."""
    tables = (getattr(module, "MADE_OF", {}) for module in _specialists())
    return {op: made for table in tables for op, made in table.items()}


@contextmanager
def tracing_wrappers() -> Generator[None]:
    """The contexts that the rules of all wrappers want around a trace."""
    with ExitStack() as stack:
        for rule in _wrapper_rules():
            stack.enter_context(rule.tracing())
        yield


def module_rules(root: nn.Module) -> list[ModuleRule]:
    """Every rule that has work to do in `root`, checked.

    Raises:
        UnsupportedProgram: a rule refuses a feature that `root` uses.
    """
    rules = [getattr(module, "MODULE_RULE", None) for module in _specialists()]
    claimed: list[ModuleRule] = [rule for rule in rules if rule is not None and rule.claims(root)]
    for rule in claimed:
        rule.check(root)
    return claimed


def container_rule(module: nn.Module) -> tuple[ContainerRule, nn.Module] | None:
    """The container rule for a module, and the module to compile in its place."""
    for specialist in _specialists():
        rule: ContainerRule | None = getattr(specialist, "CONTAINER_RULE", None)
        contained = None if rule is None else rule.contained(module)
        if rule is not None and contained is not None:
            return rule, contained
    return None


def communicates_around(module: nn.Module) -> bool:
    """Whether `module` is a container whose own forward communicates (DDP)."""
    container = container_rule(module)
    return container is not None and container[0].communicates


def tangent_recipe(recipe: Recipe) -> Recipe:
    """The metadata to assume for the tangent of an output with metadata `recipe`."""
    if not isinstance(recipe, Wrapper):
        return recipe
    return wrapper_rule(recipe.cls).tangent_recipe(recipe)


def same_layout(before: Recipe, after: Recipe) -> bool:
    """Whether a wrapper kept its placements; an in-place operator may change those of a DTensor."""
    if not isinstance(before, Wrapper) or not isinstance(after, Wrapper):
        return True
    return wrapper_rule(before.cls).same_layout(before, after)


def mixes_with_plain(recipes: Iterable[Recipe]) -> bool:
    """Whether some of these wrappers, or wrappers inside of them, mix with plain tensors in operators."""
    wrappers = [recipe for recipe in recipes if isinstance(recipe, Wrapper)]
    return any(
        wrapper_rule(wrapper.cls).mixes or mixes_with_plain(part for _, part in wrapper.attributes)
        for wrapper in wrappers
    )


def process_groups(recipes: Iterable[Recipe]) -> set[str]:
    """Names of the process groups that a program with such inputs may communicate in."""
    wrappers = [recipe for recipe in recipes if isinstance(recipe, Wrapper)]
    return {name for recipe in wrappers for name in wrapper_rule(recipe.cls).process_groups(recipe)}


def refuse_unknown_subclass(tensor: torch.Tensor, path: str) -> None:
    """Raise for a tensor subclass that overrides operators or functions but cannot be flattened.

    Raises:
        UnsupportedProgram: the class overrides `__torch_dispatch__` without the flatten protocol, or
            `__torch_function__` alone, or its rule refuses the tensor.
    """
    cls = type(tensor)
    if is_wrapper(tensor):
        rule_of(tensor).refuse(tensor, path)
        return
    if not is_real(tensor):
        return
    if dispatches(cls):
        missing = [f"`{name}`" for name in _FLATTEN_PROTOCOL if not hasattr(cls, name)]
        raise UnsupportedProgram(
            f"`{path}` is a {cls.__name__}, which has no {' and no '.join(missing)}",
            stage="capture",
            fix=f"give {cls.__name__} what is missing, or pass the plain tensor inside it",
        )
    if changes_functions(cls):
        raise UnsupportedProgram(
            f"`{path}` is a {cls.__name__}, and what its `__torch_function__` (its own, or that of "
            "`torch.Tensor`) makes of functions is no part of a graph",
            stage="capture",
            fix=FIX_OF_OWN_CLASS,
        )
