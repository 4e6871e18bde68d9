"""Functions of Python and PyTorch that need the value of a number, and get a symbol in a trace.

- `x[count.item()]` becomes `select`, which takes a symbol as an index.
- `max` and `min`, which would compare, become PyTorch's functions of symbolic numbers; of floats, they and
  the functions of `math` are recorded, and called by Python at run time.
- `float(t)` and texts need the value at once: they are refused.
- `torch._check` becomes a check that every call makes, with the program's own message.
- `dist.all_to_all_single` becomes the functional collective, whose splits may be symbols.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

import torch

from aotdist.errors import UnsupportedProgram
from aotdist.origins import is_called_by_the_user
from aotdist.torch_seam.checks import intercept_checks_of_numbers
from aotdist.torch_seam.functional import FunctionalTensor
from aotdist.torch_seam.groups import all_to_all_of_symbols
from aotdist.torch_seam.patches import Patch
from aotdist.torch_seam.symbols import SYMBOLIC, called, depends_on_data, is_undecided, number_kind
from aotdist.trace.failures import refusal
from aotdist.trace.numbers.unbacked import Unbacked
from aotdist.trace.operators import collectives

_MATH = (
    *("sqrt", "exp", "expm1", "log", "log2", "log10", "log1p", "pow", "fabs", "fmod", "copysign", "hypot"),
    *("isnan", "isinf", "isfinite"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "degrees", "radians"),
)
"""Functions of `math` that take floats, and compute with them without an operator."""


_IsTraced: TypeAlias = Callable[[Any], bool]
_Apply: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...]], Any]


def functions_recorded(is_traced: _IsTraced, apply: _Apply) -> AbstractContextManager[None]:
    """In this context, functions of Python that are called with numbers of one kind are recorded.

    Args:
        is_traced: whether a value is a number of that kind.
        apply: the result of a function, given its arguments, some of which are.
    """
    return _RECORDED.applied(((is_traced, apply), *(_RECORDED.value or ())))


def _is_known_at_a_call(number: Any) -> bool:
    """Whether a symbol stands for a number that is an argument, or that the program reads."""
    return type(number) in SYMBOLIC and not depends_on_data(number)


def _called_with_symbols(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    is_choice = function in (max, min) and not all(number_kind(one) is float for one in arguments)
    return function(*arguments) if is_choice else called(function, arguments)


def _recorder_for(numbers: Sequence[Any]) -> _Apply | None:
    """What records a function of these numbers; None if none of them is traced."""
    kinds = _RECORDED.value or ()
    return next((apply for is_traced, apply in kinds if any(map(is_traced, numbers))), None)


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        given: Sequence[Any] = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        apply = _recorder_for(given)
        if apply is None or kwargs or any(isinstance(one, torch.Tensor) for one in given):
            return function(*args, **kwargs)
        return apply(function, tuple(given))

    return recorded


def _power(base: Any, exponent: Any) -> Any:
    """`base ** exponent`: PyTorch's would require that the base is not negative."""
    apply = _recorder_for((base, exponent))
    return _POWER(base, exponent) if apply is None else apply(operator.pow, (base, exponent))


_POWER = torch.SymFloat.__pow__
_RECORDED = Patch[tuple[tuple[_IsTraced, _Apply], ...]](
    "functions_of_numbers",
    lambda: [
        (torch.SymFloat, "__pow__", _power),
        *(
            (module, name, _recorded(getattr(module, name)))
            for module, names in ((builtins, ("max", "min")), (math, _MATH))
            for name in names
        ),
    ],
)


def _length(of: Any) -> Any:
    """`len(x)`, which would need the value of a symbolic size."""
    if _LENGTHS.value is None or not isinstance(of, torch.Tensor) or of.dim() == 0:
        return _LENGTH(of)
    return of.shape[0]


_LENGTH = len
_LENGTHS = Patch[bool]("lengths_open", lambda: [(builtins, "len", _length)])


_GET_ITEM: Any = torch.Tensor.__getitem__
_SET_ITEM: Any = torch.Tensor.__setitem__
_TEXTS = ("__str__", "__repr__", "__format__")


def _is_unbacked(number: Any) -> bool:
    return isinstance(number, torch.SymInt) and depends_on_data(number)


def _needs_value(what: str) -> UnsupportedProgram:
    return refusal(
        f"{what} needs the value of a number that is read off a tensor, while the program is captured",
        fix="keep the number itself, as `.item()` gives it (`at = position.item()` for `int(position)`, "
        "`log.append(loss.item())`), compute with it by operators of Python and functions of `math`, choose "
        "by `torch.where`, and make a text or another type of it outside of the compiled function",
    )


def _converted(conversion: Callable[..., Any], name: str) -> Callable[[torch.Tensor], Any]:
    @functools.wraps(conversion)
    def converted(tensor: torch.Tensor) -> Any:
        try:
            return conversion(tensor)
        except Exception as error:
            if is_undecided(error):
                raise _needs_value(f"`{name}(tensor)`") from None
            raise

    return converted


def _to_list(tensor: torch.Tensor) -> Any:
    """`tensor.tolist()`, which moves the whole tensor to the CPU at once."""
    return _listed(tensor if tensor.device.type == "cpu" else tensor.detach().to("cpu"))


def _listed(tensor: torch.Tensor) -> Any:
    return tensor.item() if tensor.dim() == 0 else [_listed(part) for part in tensor]


def _list_of(tensor: FunctionalTensor) -> Any:
    """As the class's own method, which refuses lists of lists, or the list that is known."""
    if _LISTS.value is None or tensor.dim() == 0:
        return _OWN_LIST(tensor)
    if (known := _LISTS.value(tensor)) is not None:
        return known
    return _OWN_LIST(tensor) if tensor.dim() == 1 else [_list_of(part) for part in tensor]  # type: ignore[misc]


_OWN_LIST = FunctionalTensor.tolist
_LISTS = Patch[Callable[[FunctionalTensor], Any]](
    "lists_of_numbers", lambda: [(FunctionalTensor, "tolist", _list_of)]
)


def lists_known(known: Callable[[FunctionalTensor], Any]) -> AbstractContextManager[None]:
    """In this context, `known` is asked first for the list of a tensor's numbers; None if it is not known."""
    return _LISTS.applied(known)


def _unbind(tensor: torch.Tensor, dim: int = 0) -> Any:
    """`tensor.unbind(dim)`, which iteration, unpacking and `tolist` come to.

    Raises:
        UnsupportedProgram: how many parts there are depends on data.
    """
    if -tensor.dim() <= dim < tensor.dim() and _is_unbacked(tensor.shape[dim]):
        raise refusal(
            "a tensor is taken apart (`tolist`, `for`, `unbind`), and into how many parts depends on data",
            fix="take as many elements as there are in any case, "
            "`torch.bincount(i, minlength=num)[:num].tolist()`; or keep it a tensor",
        )
    return torch.unbind(tensor, dim)


def _item(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """`tensor[index]`, an unbacked integer in it by `select`."""
    parts = index if isinstance(index, tuple) else (index,)
    others = (bool, torch.Tensor, list, tuple)
    if not any(map(_is_unbacked, parts)) or any(isinstance(part, others) for part in parts):
        return _GET_ITEM(tensor, index)
    dim, skipped = 0, tensor.dim() - sum(part is not None and part is not ... for part in parts)
    for part in parts:  # as eager does it: one dimension after the other
        if part is ...:
            dim += skipped
        elif part is None or isinstance(part, slice):
            tensor = _GET_ITEM(tensor, (*[slice(None)] * dim, part))
            dim += 1
        else:
            tensor = tensor.select(dim, part)
    return tensor


def _set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """`tensor[index] = value`."""
    if any(map(_is_unbacked, index if isinstance(index, tuple) else (index,))):
        tensor, index = _item(tensor, index), ...
    _SET_ITEM(tensor, index, value)


INSTEAD: Mapping[Any, Callable[..., Any]] = {
    _GET_ITEM: _item,
    _SET_ITEM: _set_item,
    torch.Tensor.tolist: _to_list,
    **dict.fromkeys((torch.unbind, torch.Tensor.unbind), _unbind),
    torch.Tensor.__float__: _converted(torch.Tensor.__float__, "float"),
    torch.Tensor.__int__: _converted(torch.Tensor.__int__, "int"),
}
"""What runs instead of methods of tensors."""


def _text(cls: type, name: str) -> Callable[..., str]:
    """A method that makes a text of a symbolic number, and refuses to do it for the user's code."""
    method = getattr(cls, name)

    @functools.wraps(method)
    def text(self: Any, *args: Any) -> str:
        if _FOLLOWED.value is not None and depends_on_data(self) and is_called_by_the_user():
            raise _needs_value("a text (`str`, `format`, an f-string)")
        return method(self, *args)

    return text


_FOLLOWED = Patch[Unbacked](
    "numbers_of_data_followed",
    lambda: [
        (cls, name, _text(cls, name))
        for cls in (torch.SymInt, torch.SymFloat, torch.SymBool)
        for name in _TEXTS
    ],
)


@contextmanager
def followed(unbacked: Unbacked | None, *, sizes: bool, numbers: bool) -> Generator[None]:
    """In this context, what the program does with symbolic numbers is recorded.

    Args:
        unbacked: those that depend on data; None if none may.
        sizes: whether sizes may be symbols: the length of a tensor is its first one.
        numbers: whether arguments, and numbers that the program reads, may be symbols.
    """
    with ExitStack() as stack:
        if sizes:
            stack.enter_context(_LENGTHS.applied(True))
        if numbers:
            stack.enter_context(functions_recorded(_is_known_at_a_call, _called_with_symbols))
        if unbacked is not None:
            stack.enter_context(_FOLLOWED.applied(unbacked))
            stack.enter_context(functions_recorded(unbacked.is_traced, unbacked.apply))
            stack.enter_context(intercept_checks_of_numbers(unbacked.require))
            stack.enter_context(all_to_all_of_symbols(collectives.all_to_all_single))
        yield
