"""Modules: what calling one runs, and attributes, parameters and buffers that one thread has for itself.

A module has one `__dict__` for all threads. While a thread has attributes of its own, the methods of
`nn.Module` that get and set attributes check which thread calls, and give it a `__dict__` of its own, with
its own parameters and buffers; other threads get the module's. Containers, and objects that are no modules,
are shared.
"""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.utils import parametrize

from aotdist.torch_seam.patches import Patch, replaced, replaced_here

PARAMETRIZATIONS: Mapping[str, Any] = vars(parametrize)
"""Where parametrized modules look for, and leave, what they compute once: `_cache`, if `_cache_enabled`."""


def uncompiled_call(module: nn.Module) -> Callable[..., Any]:
    """What calling a module runs when nothing has compiled it: its forward and its hooks."""
    return module._call_impl


def compiled_call_of(module: nn.Module) -> Any:
    """What calling a module runs instead, or None."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Run `call` instead when the module is called; its type and `state_dict` stay as they are.

    A class may hand attributes that it is assigned on to a module that it wraps (Lightning's Fabric).
    """
    vars(module)["_compiled_call_impl"] = call


def take_compiled_call_off(module: nn.Module) -> None:
    """Let calling a module run its own forward again."""
    vars(module).pop("_compiled_call_impl", None)


def global_module_hooks() -> list[Mapping[int, Callable[..., Any]]]:
    """The hooks that are called for all modules."""
    module = torch.nn.modules.module
    return [
        module._global_forward_hooks,
        module._global_forward_pre_hooks,
        module._global_backward_hooks,
        module._global_backward_pre_hooks,
    ]


@contextmanager
def recurrent_layers_referring_to(
    modules: Iterable[nn.Module], instead: Mapping[int, torch.Tensor]
) -> Generator[None]:
    """In this context, recurrent layers take the tensors in the places of their weights for these weights.

    They keep weak references to their weights, and rebuild their list of weights if one is another tensor.

    Args:
        modules: recurrent layers and others.
        instead: the tensor in the place of each weight, by the `id` of the weight.
    """
    known = {one: one._flat_weight_refs for one in modules if isinstance(one, nn.RNNBase)}
    for layer, references in known.items():
        weights = [None if reference is None else reference() for reference in references]
        layer._flat_weight_refs = [
            None if weight is None else ref(instead.get(id(weight), weight)) for weight in weights
        ]
    try:
        yield
    finally:
        for layer, references in known.items():
            layer._flat_weight_refs = references


_COPIED = ("_parameters", "_buffers")
_REGISTERED = (*_COPIED, "_modules")
_NOWHERE: Any = object()


class _Own:
    """What a thread has for itself.

    Attributes:
        attributes: its own `__dict__` of a module, by the identity of the module.
        own: its own dictionary in the place of one that all threads share, by the identity of that.
        shared: the other way round.
    """

    def __init__(self) -> None:
        self.attributes: dict[int, dict[str, Any]] = {}
        self.own: dict[int, dict[str, Any]] = {}
        self.shared: dict[int, dict[str, Any]] = {}
        self.reads: dict[tuple[int, str], nn.Module] | None = None
        """The modules whose attributes are read, by identity and name; None if these are not noted."""
        self._before: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        """Each module, the thread's own `__dict__` of it, and what was in that in the beginning."""

    def take(self, modules: Iterable[nn.Module]) -> None:
        """Give the thread attributes of its own for more modules."""
        for module in modules:
            if id(module) in self.attributes:
                continue
            theirs = vars(module)
            ours = dict(theirs)
            ours.update((name, theirs[name].copy()) for name in _COPIED)
            for one, other in ((theirs, ours), *((theirs[name], ours[name]) for name in _COPIED)):
                self.own[id(one)], self.shared[id(other)] = other, one
            self._before.append((module, ours, dict(ours)))
            self.attributes[id(module)] = ours

    def hand_over(self) -> None:
        """Let all threads see the attributes that hold something else than in the beginning."""
        for _, ours, before in self._before:
            theirs = self.shared[id(ours)]
            for name in [*ours, *(name for name in before if name not in ours)]:
                value = ours.get(name, _NOWHERE)
                if value is _NOWHERE:
                    theirs.pop(name, None)
                elif value is not before.get(name, _NOWHERE):
                    theirs[name] = value


@contextmanager
def own_attributes(modules: Iterable[nn.Module] = ()) -> Generator[None]:
    """In this context, this thread has the attributes, parameters and buffers of `modules` for itself.

    No other thread sees what it assigns to them, in whatever way, and it does not see what others assign. If
    no exception leaves the context, attributes that hold something else by then are assigned for all threads.
    Inside of another such context, this is done when that one is left.
    """
    held = _OWN.value
    if held is not None:
        held.take(modules)
        yield
        return
    held = _Own()
    held.take(modules)
    with _OWN.applied(held):
        yield
    held.hand_over()


@contextmanager
def noting_reads() -> Generator[dict[tuple[int, str], nn.Module]]:
    """The modules whose attributes this thread reads inside, by identity and name of the attribute.

    It is for a context in which the thread has attributes for itself, and knows of modules that are its own.
    """
    held, reads = _OWN.value, dict[tuple[int, str], nn.Module]()
    assert held is not None, "`_get` is called only where a thread has attributes of its own"
    outer, held.reads = held.reads, reads
    try:
        yield reads
    finally:
        held.reads = outer
        if outer is not None:
            outer |= reads


def noting_no_reads() -> AbstractContextManager[None]:
    """What this thread reads in this context is not noted by `noting_reads`: the program does not read it."""
    held = _OWN.value
    return nullcontext() if held is None else replaced(held, "reads", None)


def note_read(attributes: Mapping[tuple[int, str], nn.Module]) -> None:
    """Let `noting_reads` count attributes as read."""
    held = _OWN.value
    if held is not None and held.reads is not None:
        held.reads.update(attributes)


def own(value: Any) -> Any:
    """What this thread has for itself in the place of a dictionary of a module; any other value is itself."""
    held = _OWN.value
    return value if held is None else held.own.get(id(value), value)


def shared(value: Any) -> Any:
    """What all threads share in the place of a dictionary that this one has for itself; see `own`."""
    held = _OWN.value
    return value if held is None else held.shared.get(id(value), value)


def with_shared(items: list[Any] | dict[Any, Any]) -> list[Any] | dict[Any, Any]:
    """A dictionary with what all threads share for each of its values (see `shared`); a list as it is."""
    held = _OWN.value
    if held is None or not isinstance(items, dict):
        return items
    if held.shared.keys().isdisjoint(map(id, items.values())):
        return items
    return {key: held.shared.get(id(value), value) for key, value in items.items()}


def _attributes_of(module: nn.Module) -> dict[str, Any] | None:
    held = _OWN.value
    return None if held is None else held.attributes.get(id(module))


def _in_class(cls: type, name: str) -> Any:
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), _NOWHERE)


def _is_set_by_class(found: Any) -> bool:
    """Whether what a class has under a name (a property) decides what setting it does."""
    return hasattr(type(found), "__set__") or hasattr(type(found), "__delete__")


def _get(module: Any, name: str) -> Any:
    held = _OWN.value
    attributes = None if held is None else held.attributes.get(id(module))
    if held is None or attributes is None:
        return super(nn.Module, module).__getattribute__(name)
    if held.reads is not None:
        held.reads[id(module), name] = module
    if name == "__dict__":
        return attributes
    found = _in_class(type(module), name)
    if name in attributes and not _is_set_by_class(found):
        return attributes[name]
    if found is _NOWHERE:
        raise AttributeError(f"'{type(module).__name__}' object has no attribute '{name}'")
    if not hasattr(type(found), "__get__"):
        return found
    return type(found).__get__(found, module, type(module))


def _set(module: Any, name: str, value: Any) -> None:
    attributes = _attributes_of(module)
    if attributes is None or not _is_plain(attributes, module, name) or isinstance(value, _KINDS):
        _set_shared(module, name, value)
    else:
        attributes[name] = value


def _delete(module: Any, name: str) -> None:
    attributes = _attributes_of(module)
    if attributes is None or not _is_plain(attributes, module, name):
        _delete_shared(module, name)
    elif name in attributes:
        del attributes[name]
    else:
        raise AttributeError(name)


def _is_plain(attributes: Mapping[str, Any], module: nn.Module, name: str) -> bool:
    """Whether an attribute is one of Python's: neither registered nor a property."""
    registered = any(name in attributes.get(kind, ()) for kind in _REGISTERED)
    return not registered and not _is_set_by_class(_in_class(type(module), name))


_KINDS = (nn.Parameter, nn.Module, nn.Buffer)
_set_shared, _delete_shared = nn.Module.__setattr__, nn.Module.__delattr__


_OWN = Patch[_Own](
    "own_attributes",
    lambda: [
        (nn.Module, "__getattribute__", _get),
        (nn.Module, "__setattr__", _set),
        (nn.Module, "__delattr__", _delete),
    ],
)


def within(
    around: Callable[[nn.Module], AbstractContextManager[None] | None],
) -> AbstractContextManager[None]:
    """In this context and thread, a module that is called runs inside of `around(module)`, hooks included.

    Args:
        around: called with each module before it runs; returns a context, or None for none.
    """

    def call(run: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with around(module) or nullcontext():
            return run(module, *args, **kwargs)

    return replaced_here(nn.Module, "_call_impl", call)


def intercept_forwards(
    call: Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> AbstractContextManager[None]:
    """In this context and thread, modules with submodules run as `call(module, forward, args, kwargs)`.

    Their hooks run around that. The method is replaced by an attribute, which `call` does not see.
    """

    def around(run: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        attributes = vars(module)
        if not attributes["_modules"] or "forward" in attributes:
            return run(module, *args, **kwargs)
        forward = module.forward

        def instead(*args: Any, **kwargs: Any) -> Any:
            attributes.pop("forward", None)
            return call(module, forward, args, kwargs)

        attributes["forward"] = instead
        try:
            return run(module, *args, **kwargs)
        finally:
            attributes.pop("forward", None)

    return replaced_here(nn.Module, "__call__", around)
