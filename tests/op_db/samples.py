"""Programs out of PyTorch's own databases: every operator and every module, with their samples."""

from __future__ import annotations

import copy
import functools
import importlib.util
import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from aotdist.torch_seam.trees import pytree


@dataclass(frozen=True)
class Walk:
    """How a database is walked.

    Args:
        dtype: of the samples.
        grad: whether their tensors require grad, where that is supported.
        dynamic: whether they are compiled with symbolic sizes.
    """

    dtype: torch.dtype
    grad: bool = True
    dynamic: bool = False

    def __str__(self) -> str:
        words = [str(self.dtype).removeprefix("torch.")]
        words += ["without grad"] * (not self.grad) + ["with symbolic sizes"] * self.dynamic
        return " ".join(words)


@dataclass(frozen=True)
class Scene:
    """What can be called, any number of times.

    Args:
        target: function or module.
        arguments: makes the positional and keyword arguments of a call.
        leaves: tensors that gradients are taken of.
        state: further tensors to look at afterwards, by name.
    """

    target: Callable[..., Any]
    arguments: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]]
    leaves: Sequence[torch.Tensor]
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One program and what it is called with.

    Args:
        program: name of the operator, with a `_` if in place; or of the module, with its mode.
        number: of the sample.
        walk: how the sample was made.
        build: makes the scene; what it makes shares nothing with what it made before.
    """

    program: str
    number: int
    walk: Walk
    build: Callable[[], Scene]

    def __str__(self) -> str:
        return f"{self.program}[{self.number}, {self.walk}]"


@functools.cache
def databases() -> tuple[dict[str, Any], dict[str, Any]]:
    """PyTorch's operators and modules, by name.

    Imported when it is first asked for: that takes seconds, needs a package which only PyTorch's own test
    classes use, and forbids setting flags of `torch.backends` from then on.
    """
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # pyright: ignore[reportAttributeAccessIssue]
        sys.modules["expecttest"] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations, common_utils
        from torch.testing._internal.common_modules import module_db
        from torch.testing._internal.opinfo import core
    # `torch.backends` shows a stand-in of the module that its functions belong to.
    _replace(torch.backends.disable_global_flags.__globals__, "__allow_nonbracketed_mutation_flag", True)
    # The database seeds the generator inside of most random operators; the harness does it outside.
    _replace(common_methods_invocations.__dict__, "wrapper_set_seed", _unseeded)
    # It also seeds all kinds of devices at each sample, which takes longer than to run it.
    _replace(common_utils.__dict__, "set_rng_seed", _seed)
    # And it looks through the stack, source lines and all, for a test of a class: a third of a test's time.
    for module in (common_utils, core):
        _replace(module.__dict__, "extract_test_fn", lambda: None)
    operators = {op.full_name: op for op in common_methods_invocations.op_db}
    return operators, {module.name: module for module in module_db}


def _replace(variables: dict[str, Any], name: str, value: Any) -> None:
    assert name in variables, f"there is no `{name}` any more"
    variables[name] = value


def _unseeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def operator_names() -> list[str]:
    """Every operator of the database."""
    return sorted(databases()[0])


def module_names() -> list[str]:
    """Every module of the database."""
    return sorted(databases()[1])


def operator_cases(name: str, walk: Walk) -> Iterator[Case]:
    """The programs of one operator: of each sample, and of its variant in place where there is one."""
    op = databases()[0][name]
    if walk.dtype not in op.supported_dtypes("cpu"):
        return
    differentiable = op.supports_autograd and walk.dtype in op.supported_backward_dtypes("cpu")
    _seed()
    samples = op.sample_inputs("cpu", walk.dtype, requires_grad=walk.grad and differentiable)
    for number, sample in enumerate(samples):
        called = (sample.input, sample.args, sample.kwargs)
        yield Case(name, number, walk, _Function(op.op, called))
        writes = op.inplace_variant
        if writes is not None and isinstance(sample.input, torch.Tensor) and not sample.broadcasts_input:
            yield Case(f"{name}_", number, walk, _Function(writes, called, in_place=True))


def module_cases(name: str, walk: Walk) -> Iterator[Case]:
    """The programs of one module: of each sample, in training and in evaluation."""
    module_info = databases()[1][name]
    if walk.dtype not in module_info.supported_dtypes("cpu"):
        return
    for training in (True, False):
        _seed()
        samples = module_info.module_inputs_func(
            module_info, device="cpu", dtype=walk.dtype, requires_grad=walk.grad, training=training
        )
        for number, sample in enumerate(samples):
            build = _Module(module_info.module_cls, sample, walk, training)
            yield Case(f"{name} {'train' if training else 'eval'}", number, walk, build)


def _seed(seed: int | None = None) -> None:
    torch.default_generator.manual_seed(seed or 0)
    random.seed(seed or 0)
    np.random.seed(seed or 0)


@dataclass(frozen=True)
class _Function:
    """A function of tensors; whatever else an operator is called with is a constant of its.

    Args:
        op: the operator.
        called: first argument, further ones, keyword arguments.
        in_place: whether the first is written; it is then a tensor with a history.
    """

    op: Callable[..., Any]
    called: tuple[Any, tuple[Any, ...], dict[str, Any]]
    in_place: bool = False

    def __call__(self) -> Scene:
        op = self.op
        values, spec = pytree.tree_flatten(self.called)
        places = tuple(n for n, value in enumerate(values) if isinstance(value, torch.Tensor))
        constants = tuple(None if n in places else value for n, value in enumerate(values))

        def program(*tensors: torch.Tensor) -> Any:
            filled = list(constants)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            first, args, kwargs = pytree.tree_unflatten(filled, spec)
            return op(first, *args, **kwargs)

        leaves = copies([values[place] for place in places])

        def arguments() -> tuple[Sequence[torch.Tensor], Mapping[str, Any]]:
            if not self.in_place:
                return leaves, {}
            written = leaves[0].clone()
            return [written if leaf is leaves[0] else leaf for leaf in leaves], {}

        return Scene(program, arguments, leaves)


@dataclass(frozen=True)
class _Module:
    """A new module, with the numbers that it is initialised with."""

    cls: type[nn.Module]
    sample: Any
    walk: Walk
    training: bool

    def __call__(self) -> Scene:
        _seed()
        made = copy.deepcopy(self.sample.constructor_input)
        module = self.cls(*made.args, **made.kwargs).to(self.walk.dtype).train(self.training)
        given = self.sample.forward_input
        values, spec = pytree.tree_flatten((given.args, given.kwargs) if given is not None else ((), {}))
        places = [n for n, value in enumerate(values) if isinstance(value, torch.Tensor)]
        leaves = copies([values[place] for place in places])
        for place, leaf in zip(places, leaves, strict=True):
            values[place] = leaf
        call = pytree.tree_unflatten(values, spec)
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        return Scene(module, lambda: call, [*leaves, *module.parameters()], state)


def copies(tensors: Sequence[torch.Tensor], device: torch.device | None = None) -> list[torch.Tensor]:
    """Leaves with the data and the layout of `tensors`, which share memory where those do."""
    storages: dict[int, torch.UntypedStorage] = {}
    made: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in made:
            copied = _copy(tensor.detach(), storages, device or torch.device("cpu"))
            made[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
    return [made[id(tensor)] for tensor in tensors]


def _copy(
    tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage], device: torch.device
) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.clone().to(device)
    storage = tensor.untyped_storage()
    copied = storages.setdefault(storage.data_ptr(), storage.clone().to(device=device))
    empty = torch.empty(0, dtype=tensor.dtype, device=device)
    return empty.set_(copied, tensor.storage_offset(), tensor.shape, tensor.stride())
