"""Operators: what their schemas say of them, and how to reach what is beneath."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

# The type of a resolved operator: graph targets, keys of decomposition tables.
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload

# What kernels make of a tensor's strides when they choose a memory format.
from torch._prims_common import suggest_memory_format as suggest_memory_format

T = TypeVar("T")


def cached_by_operator(ask: Callable[[Any], T]) -> Callable[[Any], T]:
    """`functools.cache` for what is asked of an operator, by its identity: PyTorch's hash takes 0.35 us."""
    answers: dict[int, tuple[Any, T]] = {}

    def answer(op: Any) -> T:
        known = answers.get(id(op))
        if known is None:
            known = answers[id(op)] = op, ask(op)  # with the operator, so that no other gets its identity
        return known[1]

    return answer


_LIBRARY = torch.library.Library("aotdist", "FRAGMENT")


def own_operator(
    schema: str,
    run: Callable[..., Any],
    like: Callable[..., Any] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> OpOverload:
    """Define an operator `aotdist::...`, which compilers know nothing about.

    Args:
        schema: name, arguments and results: `name(Tensor x) -> Tensor`.
        run: computes it, on any device, below autograd.
        like: computes fake results; `run` does if it is None.
        tags: of the operator.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tuple(tags))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"aotdist::{name}", like or run, lib=_LIBRARY)
    return getattr(torch.ops.aotdist, name).default


def is_operator(func: Any) -> bool:
    """Whether a call is of an operator, not of a higher-order one."""
    return isinstance(func, OpOverload)


@functools.cache
def has_effects(op: OpOverload) -> bool:
    """Whether PyTorch orders an operator by effect tokens, and never removes it: it prints, or raises."""
    from torch._higher_order_ops import effects

    asked: Any = effects.has_effects
    # torch 2.11 wants the arguments, and looks at none.
    return asked(op) if len(inspect.signature(asked).parameters) == 1 else asked(op, (), {})


def writes_arguments(op: OpOverload) -> bool:
    """Whether an operator writes one of its arguments."""
    return op._schema.is_mutable


@functools.cache
def functional_twin(op: OpOverload) -> OpOverload | None:
    """The operator that computes what an in-place one writes (`sin` for `sin_`); None for any other."""
    name = _name(op)
    if not name.endswith("_") or torch.Tag.inplace_view in op.tags or name == "copy_":
        return None
    taken = [str(argument.type) for argument in op._schema.arguments]
    # Names alone do not tell: `pow_.Scalar` is the twin of `pow.Tensor_Scalar`.
    overloads = _overloads(op, name.removesuffix("_"))
    fitting = (o for o in overloads if [str(argument.type) for argument in o._schema.arguments] == taken)
    return next(fitting, None)


def _name(op: OpOverload) -> str:
    """What an operator is called, without namespace and overload: `add_` for `aten.add_.Tensor`."""
    return op._schema.name.partition("::")[2]


def _overloads(op: OpOverload, name: str) -> list[OpOverload]:
    """The operators of a name, if there are any, in the namespace of another."""
    packet = getattr(getattr(torch.ops, op.namespace), name, None)
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


@functools.cache
def in_place_twin(op: OpOverload) -> OpOverload | None:
    """The operator that stores in its arguments what `op` computes element by element; None for none."""
    if op is torch.ops.aten.copy.default:
        return torch.ops.aten.copy_.default
    name, is_ours = _name(op), op.namespace == "aotdist"
    if not is_ours and torch.Tag.pointwise not in op.tags and not name.startswith(("_foreach_", "_fused_")):
        return None
    return next((o for o in _overloads(op, f"{name}_") if functional_twin(o) is op), None)


def with_defaults(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """`args`, and what the operator's schema gives for those that are not there."""
    missing = (a for a in op._schema.arguments[len(args) :] if not a.kwarg_only and a.name not in kwargs)
    return [*args, *(argument.default_value for argument in missing)]


@functools.cache
def out_of_place(op: OpOverload) -> OpOverload | None:
    """The view that an in-place one makes (`t` for `t_`); None for what makes none (`resize_`, `set_`)."""
    twins, names = _overloads(op, _name(op).removesuffix("_")), argument_names(op)
    # The overload may have another name: `transpose.int` for `transpose_`.
    return next((twin for twin in twins if twin.is_view and argument_names(twin) == names), None)


@functools.cache
def written_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that the operator's schema says it writes."""
    arguments = enumerate(op._schema.arguments)
    return tuple((k, a.name) for k, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def written_by(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call of an operator writes."""
    for position, name in written_arguments(op):
        given = args[position] if position < len(args) else kwargs.get(name)
        targets = given if isinstance(given, (list, tuple)) else (given,)
        yield from (target for target in targets if isinstance(target, torch.Tensor))


@functools.cache
def out_names(op: OpOverload) -> tuple[str, ...]:
    """Names of the tensors that an operator writes its results to (`out=`)."""
    return tuple(a.name for a in op._schema.arguments if a.is_out and a.kwarg_only)


def argument_names(op: OpOverload) -> list[str]:
    """The names that the operator's schema gives its arguments, in order."""
    return [argument.name for argument in op._schema.arguments]


def schema_of(op: OpOverload) -> str:
    """What an operator takes, returns and writes."""
    return str(op._schema)


def can_decompose(op: OpOverload) -> bool:
    """Whether PyTorch itself breaks an operator up (CompositeImplicitAutograd)."""
    return torch._C._dispatch_has_kernel(op.name()) and op._can_decompose()


@functools.cache
def is_functional(op: OpOverload) -> bool:
    """Whether functionalisation passes an operator of PyTorch through unchanged, as it has no rule for it."""
    return _is_pure(op) and not (_has_functional_rule(op) or op.is_view)


@functools.cache
def is_of_one_tensor(op: OpOverload) -> bool:
    """Whether functionalisation has a rule for an operator that takes one tensor, and that first.

    Most make views of it; `_unsafe_view` makes what might be one.
    """
    tensors = ["Tensor" in str(argument.type) for argument in op._schema.arguments]
    return _is_pure(op) and _has_functional_rule(op) and sum(tensors) == 1 and tensors[0]


def _is_pure(op: OpOverload) -> bool:
    """Whether an operator of PyTorch's writes nothing, is not broken up and lifts no constant."""
    if op.namespace != "aten" or not torch._C._dispatch_has_kernel(op.name()):  # `sym_stride` has none
        return False
    other = op._schema.is_mutable or can_decompose(op) or has_effects(op)
    return not (other or op.name().startswith("aten::lift"))


def _has_functional_rule(op: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Functionalize")


def is_left_whole_in_inference(func: Any) -> bool:
    """Whether a call is of an operator that eager breaks up, and that modes see whole in inference mode."""
    if not torch.is_inference_mode_enabled() or not is_operator(func) or func.namespace == "prim":
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def makes_views(op: OpOverload) -> bool:
    """Whether autograd tracks the results of an operator as views (it has an `ADInplaceOrView` kernel)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "ADInplaceOrView")


def broken_up(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """What an operator computes by the operators that eager breaks it up into.

    `OpOverload.decompose` prefers a decomposition in Python, which may copy where eager hands back what it
    was given (`dropout` of a model in evaluation).
    """
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def native_callable(op: OpOverload) -> Callable[..., Any]:
    """The C++ entry of an operator: the whole dispatcher, modes included, without a Python frame.

    1.52 us a call where `OpOverload.__call__` takes 1.97 (`mm` of 4x4). Script-object operators
    choose in Python whether to dispatch there, so they keep their own `__call__`.
    """
    return op._op if type(op).__call__ is OpOverload.__call__ else op


def dense_rule(op: HigherOrderOperator) -> Callable[..., Any]:
    """What a higher-order operator does with real tensors: for some, plain calls of other operators."""
    return op.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]


def handle_in_mode(
    op: HigherOrderOperator, mode_type: type[Any], mode: Any, *args: Any, **kwargs: Any
) -> Any:
    """What PyTorch's rule for `op` does in a mode of this type; `mode` may be of a class derived from it."""
    return op.python_key_table[mode_type](mode, *args, **kwargs)


def training_rnn(*args: Any) -> Any:
    """`mkldnn_rnn_layer` with grad mode on: by that it decides what it returns, and how it rounds."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


def inference_rnn(*args: Any) -> Any:
    """`mkldnn_rnn_layer` with grad mode off; see `training_rnn`."""
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


def whole_numbers(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments of an operator that are sizes, indices or the like, and not numbers to compute with."""
    schema = func._schema.arguments
    given = [
        *zip(schema, args, strict=False),
        *((arg, kwargs[arg.name]) for arg in schema if arg.name in kwargs),
    ]
    return [value for argument, value in given if _is_whole(argument.type)]


def _is_whole(kind: Any) -> bool:
    if kind.kind() in ("OptionalType", "ListType"):
        return _is_whole(kind.getElementType())
    return kind.kind() in ("IntType", "SymIntType")


def operator_name(target: Any) -> str | None:
    """What PyTorch's tracer calls a node of this target: `add` for `aten.add.Tensor`; None for others."""
    return target.overloadpacket.__name__ if isinstance(target, OpOverload) else None


def operator_named(name: str) -> OpOverload | None:
    """The operator of that name (`aten.add.Tensor`); None if there is none.

    Some of those that Inductor breaks others up into are only known once it is imported, in a second.
    """
    namespace, packet, overload = name.split(".")
    for late in (False, True):
        if late and namespace == "prims":
            importlib.import_module("torch._inductor.inductor_prims")
        found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
        if isinstance(found, OpOverload):
            return found
    return None


_OUTSIDE = ("debugprims", "profiler")
"""Namespaces of operators that read files, or act on the process, by a name."""

_NAMES_OF_FILES = ("file", "filename", "path", "uri", "url")

_OF_SIZES = ("aten::_assert_scalar", "aten::sym_constrain_range", "aten::sym_constrain_range_for_size")
"""Operators without tensors that graphs have."""


def is_of_tensors(operator: OpOverload) -> bool:
    """Whether an operator computes with tensors, and does nothing else.

    PyTorch also has some that map files, which are recognised by the names of their arguments, some that
    switch something in the process, and those of TorchScript, which have no kernel (`aten::save`).
    """
    schema = operator._schema
    if operator.namespace in _OUTSIDE or not torch._C._dispatch_has_kernel(operator.name()):
        return False
    if any(argument.name in _NAMES_OF_FILES and "str" in str(argument.type) for argument in schema.arguments):
        return False
    parts = (*schema.arguments, *schema.returns)
    return any("Tensor" in str(part.type) for part in parts) or operator.name() in _OF_SIZES
