"""Symbolic sizes and numbers."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    # Imports sympy: 0.3 s that only symbolic sizes need.
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""The types of numbers that are not known before a call."""


def number_kind(value: Any) -> type[int] | type[float] | None:
    """Whether a value is a whole number or a float, known or not; None if it is neither."""
    if type(value) in (int, torch.SymInt):
        return int
    return float if isinstance(value, (float, torch.SymFloat)) else None


def as_pytorchs(number: Any) -> Any:
    """A symbolic number of a class of its own, as one of PyTorch's."""
    return next(kind for kind in SYMBOLIC if isinstance(number, kind))(number.node)


def shape_env(*, of_data: Callable[[], bool] | None = None) -> ShapeEnv:
    """A `ShapeEnv` that numbers its symbols `s0`, `s1`, ... as they are made; equal sizes do not share one.

    Args:
        of_data: if given, numbers that are read off tensors, and sizes that depend on data, become unbacked
            symbols (`u0`, `u1`, ...); without it they are refused. It is called where the value of one is
            asked for, and says whether the user's own code asks. If it does, the question is an error. A
            library (is there nothing to do? is there one element, to be expanded?) gets the answer for many.
    """
    from torch.fx.experimental import symbolic_shapes
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    symbolic_shapes.uninteresting_files().add(__file__)  # a guard names the innermost line of other files

    class NumberedShapeEnv(ShapeEnv):
        computed: dict[Any, Any]

        def _generate_unique_id(self, source_name: str) -> int:
            if source_name.startswith(_RAGGED):  # these have no range
                return int(source_name.removeprefix(_RAGGED))
            return len(self.var_to_range)

        def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().evaluate_expr(*args, **kwargs)
            except GuardOnDataDependentSymNode as error:
                condition: Any = error.cond.xreplace(self.computed)
                is_truth = any(self.var_to_range[one].upper == 1 for one in condition.free_symbols)
                answer = None if is_truth else _holds_for_many(condition, self.size_like)
                if of_data is None or of_data() or answer is None:
                    raise
                return answer

    is_allowed = of_data is not None
    env = NumberedShapeEnv(
        allow_scalar_outputs=is_allowed, allow_dynamic_output_shape_ops=is_allowed, duck_shape=False
    )
    env.computed = {}
    return env


def _holds_for_many(condition: Any, sizes: AbstractSet[Any]) -> Any:
    """Whether a condition holds if every size in it is at least two; None if that does not decide it.

    Equalities that it does not decide are taken not to hold.
    """
    import sympy

    if isinstance(condition, (sympy.And, sympy.Or, sympy.Not)):
        parts = [_holds_for_many(part, sizes) for part in condition.args]
        return None if None in parts else condition.func(*parts)
    two_or_more = {size: sympy.Dummy(integer=True, nonnegative=True) + 2 for size in sizes}
    answer = condition.xreplace(two_or_more)
    if answer in (sympy.true, sympy.false):
        return answer
    return {sympy.Eq: sympy.false, sympy.Ne: sympy.true}.get(type(condition))


def new_symbol(env: ShapeEnv, value: int, place: str) -> torch.SymInt:
    """A symbol that is `value` in this call; `place` says where it is read."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    symbol = env.create_symbol(value, _place(place), dynamic_dim=DimDynamic.DYNAMIC)
    made: Any = env.create_symintnode(symbol, hint=value)
    return made


def new_count(env: ShapeEnv, value: float, place: str) -> torch.SymInt | torch.SymFloat:
    """As `new_symbol`, for a number that is no size: of either sign, zero and one included, or a float."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    value = float(value) if isinstance(value, float) else value  # NumPy's are floats, too
    symbol = env.create_unspecified_symbol(value, _place(place), DimDynamic.DYNAMIC)
    create = env.create_symfloatnode if isinstance(value, float) else env.create_symintnode
    made: Any = create(symbol, hint=value)
    return made


_RAGGED = "ragged size "
_FIRST_RAGGED = 1_000_000
"""Where the numbers of symbols for ragged sizes begin, beyond those of all others."""


def new_ragged(env: ShapeEnv, size: torch.SymInt) -> torch.SymInt:
    """A symbol for the ragged size of jagged tensors."""
    number = _FIRST_RAGGED + size.node.nested_int()
    symbol: Any = env.create_symbol(size, _place(f"{_RAGGED}{number}"))  # type: ignore[arg-type]
    made: Any = env.create_symintnode(symbol, hint=size)  # type: ignore[arg-type]
    return made


@contextmanager
def ragged_hidden(env: ShapeEnv) -> Generator[None]:
    """In this context, no value is known of the symbols for ragged sizes, which are no numbers."""
    values = env.backed_var_to_val
    ragged = {one: value for one, value in values.items() if type(value).__name__ == "SingletonInt"}
    for symbol in ragged:
        del values[symbol]
    try:
        yield
    finally:
        values.update(ragged)


def _place(text: str) -> Any:
    from torch._guards import GuardSource, Source

    class Place(Source):
        _name_template: str = text  # type: ignore[assignment]
        guard_source: GuardSource = GuardSource.CONSTANT  # type: ignore[assignment]

    return Place()


def expression(value: Any) -> str:
    """A symbolic number as Python source, in terms of `math`, `torch` and symbols."""
    from torch.utils._sympy.printers import PythonPrinter

    return PythonPrinter().doprint(value.node.expr)


def hint(value: Any) -> Any:
    """A number, symbolic or not, as it is in the call that is traced."""
    return value.node.hint if isinstance(value, SYMBOLIC) else value


_TYPICAL_SIZE = 1024
"""What a size that depends on data is taken to be, where choices are made by how large tensors are."""


def estimate(number: Any) -> Any:
    """As `hint`, with a typical size in the place of each unbacked symbol."""
    known = hint(number)
    if known is not None:
        return known
    expr, env = number.node.expr, number.node.shape_env
    return int(expr.xreplace({one: hint(_number(env, one)) or _TYPICAL_SIZE for one in expr.free_symbols}))


def bind_unbacked(env: ShapeEnv, node: torch.fx.Node) -> None:
    """Note in `node.meta` which unbacked symbols first appear in the node's value, and where in it."""
    from torch.fx.experimental.symbolic_shapes import compute_unbacked_bindings

    if bindings := compute_unbacked_bindings(env, node.meta["val"]):
        node.meta["unbacked_bindings"] = bindings


def int_of_bool(truth: torch.SymBool) -> torch.SymInt:
    """1 for true, 0 for false."""
    from torch.fx.experimental.symbolic_shapes import cast_symbool_to_symint_guardless

    return cast_symbool_to_symint_guardless(truth)  # type: ignore[return-value]


def is_undecided(error: BaseException) -> bool:
    """Whether PyTorch raised an error because the value of an unbacked symbol was asked for."""
    # By its name: importing the class takes as long as importing sympy.
    return type(error).__name__ == "GuardOnDataDependentSymNode"


def new_float_of_data(env: Any, function: Callable[..., Any], numbers: Sequence[Any]) -> torch.SymFloat:
    """A new unbacked symbol, for a float that a function of Python's computes from numbers.

    Of sums, differences, products and quotients the environment knows what they are, but for rounding: a
    library may ask whether one is zero (`var` divides by one less than the count).
    """
    with env.ignore_fresh_unbacked_symbols():
        computed = env.create_unbacked_symfloat()
    if (of_reals := _OF_REALS.get(function)) is not None:
        exprs = (one.node.expr if isinstance(one, SYMBOLIC) else one for one in numbers)
        env.computed[computed.node.expr] = of_reals(*exprs).xreplace(env.computed)
    return computed


_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv)
_OF_REALS: dict[Any, Callable[..., Any]] = {
    torch.sym_float: lambda number: number,
    **{function: function for function in _ARITHMETIC},
}


def has_floats(number: Any) -> bool:
    """Whether there is a symbol of a float in a number: to compute with it may round."""
    return isinstance(number, SYMBOLIC) and any(not one.is_integer for one in number.node.expr.free_symbols)


def unbacked_symbols(number: Any) -> dict[str, Any]:
    """The unbacked symbols in a symbolic number, by name, each as a number."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    expr, env = number.node.expr, number.node.shape_env
    return {str(one): _number(env, one) for one in free_unbacked_symbols(expr)}


def _number(env: Any, symbol: Any) -> Any:
    make = env.create_symintnode if symbol.is_integer else env.create_symfloatnode
    return make(symbol, hint=None)


def depends_on_data(number: Any) -> bool:
    """Whether a number has unbacked symbols in it: it is known only once the program has read a tensor."""
    if not isinstance(number, SYMBOLIC) or number.node.is_nested_int():
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(number.node.expr))


def surely_equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two sequences of numbers are equal in every call; nothing is decided for symbols."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def are_equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether numbers are equal. Those that depend on data are assumed to be, and each call checks it."""
    for x, y in zip(a, b, strict=True):
        if depends_on_data(x) or depends_on_data(y):
            torch._check(x == y)
    return tuple(a) == tuple(b)


def symbols_of(expr: Any, env: ShapeEnv) -> dict[str, torch.SymInt]:
    """The symbols of an expression, by name, each as a number."""
    return {str(symbol): _number(env, symbol) for symbol in expr.free_symbols}


def num_checks(env: ShapeEnv) -> int:
    """How many checks of numbers that depend on data were recorded."""
    return env.num_deferred_runtime_asserts


def checks_of(env: ShapeEnv) -> list[Any]:
    """The conditions that numbers which depend on data have to meet, as expressions."""
    return [check.expr for checks in env.deferred_runtime_asserts.values() for check in checks]


def products_of(number: torch.SymInt) -> list[tuple[int, list[torch.SymInt]]]:
    """A symbolic whole number as a sum of products: of each its coefficient, and its factors, maybe none.

    A factor is a symbol, or what is no sum of products of symbols.
    """
    env: Any = number.node.shape_env
    total = env.simplify(number.node.expr).expand(deep=False)
    products: list[tuple[int, list[torch.SymInt]]] = []
    for product, scale in total.as_coefficients_dict().items():
        powers = {base: power for base, power in product.as_powers_dict().items() if base != 1}
        if not (scale.is_Integer and all(power.is_Integer and power > 0 for power in powers.values())):
            return [(1, [number])]
        factors = [env.create_symintnode(base, hint=None) for base in powers for _ in range(powers[base])]
        products.append((int(scale), factors))
    return products


def symbols_in(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> list[str]:
    """The names of the symbols that a symbolic number is made of."""
    return sorted(map(str, number.node.expr.free_symbols))


def quotient_of(number: torch.SymFloat) -> tuple[float | torch.SymInt, float | torch.SymInt] | None:
    """The operands of a number that Python's `/` computes, if each is a constant or an integer; else None."""
    from torch.utils._sympy.functions import FloatTrueDiv, Identity, IntTrueDiv, ToFloat

    env: Any = number.node.shape_env
    expr = number.node.expr.args[0] if isinstance(number.node.expr, Identity) else number.node.expr
    if not isinstance(expr, FloatTrueDiv | IntTrueDiv):
        return None
    parts: list[Any] = [part.args[0] if isinstance(part, ToFloat) else part for part in expr.args]
    if not all(part.is_number or part.is_integer for part in parts):
        return None
    left, right = (
        float(part) if part.is_number else env.create_symintnode(part, hint=None) for part in parts
    )
    return left, right


def as_computed(number: torch.SymFloat) -> torch.SymFloat:
    """What Python computed by one operation; sympy, which makes `t` of `1 - (1 - t)`, sees nothing of it."""
    from torch.utils._sympy.functions import Identity

    node: Any = number.node
    if node.expr.is_Symbol or node.expr.is_number:
        return number
    return node.shape_env.create_symfloatnode(Identity(node.expr), hint=node.hint)


def called(function: Callable[..., Any], numbers: Sequence[Any]) -> Any:
    """What a function of `math`, `max`, `min` or `pow` computes; if that is no float, it asks for values."""
    value = function(*map(hint, numbers))
    if not isinstance(value, float):
        return function(*numbers)
    exprs = [one.node.expr if isinstance(one, SYMBOLIC) else one for one in numbers]
    env = next(one.node.shape_env for one in numbers if isinstance(one, SYMBOLIC))
    return as_computed(env.create_symfloatnode(_unevaluated(function)(*exprs), hint=value))


@functools.cache
def _unevaluated(function: Callable[..., Any]) -> Any:
    """A function of sympy's that computes nothing but numbers of numbers, and is printed as it is called."""
    import sympy

    def of_numbers(cls: type, *args: Any) -> Any:
        if all(arg.is_number for arg in args):
            return sympy.Float(function(*(int(arg) if arg.is_Integer else float(arg) for arg in args)))
        return None

    name = f"math.{function.__name__}" if function.__module__ == "math" else function.__name__
    return type(name, (sympy.Function,), {"eval": classmethod(of_numbers), "is_real": True})


def computes_exactly(number: Any) -> bool:
    """Whether the expression of a symbolic number is computed as Python computed it, to the last bit.

    Whole numbers are, and floats that follow `as_computed` from others. Sums and products of fractions are
    not. Where numbers depend on data, each float that Python computes has a symbol.
    """
    if isinstance(number, torch.SymInt) or depends_on_data(number):
        return True
    expr = number.node.expr
    if isinstance(number, torch.SymBool):  # of whole numbers
        return all(symbol.is_integer for symbol in expr.free_symbols)
    return isinstance(number, torch.SymFloat) and (expr.is_Symbol or type(expr).__name__ == "Identity")


def least_of(number: torch.SymInt) -> int | None:
    """The lower bound of a symbolic integer; None if it has none."""
    env: Any = number.node.shape_env
    lower = env.bound_sympy(number.node.expr).lower
    return int(lower) if lower.is_Integer else None


def guards_of(env: ShapeEnv, names: Collection[str]) -> tuple[list[str], list[str]]:
    """The guards on symbols, as Python conditions: without those that follow from others, then all of them.

    Args:
        env: recorded them; a user's own has guards on symbols of other tensors, too, which are left out.
        names: of the symbols.
    """
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.printers import PythonPrinter

    def is_known(found: Any) -> bool:
        return all(str(symbol) in names for symbol in found.free_symbols)

    doprint = PythonPrinter().doprint
    kept: dict[str, None] = {}
    for symbol, bounds in env.var_to_range.items():
        if not is_known(symbol) or not is_known(env.replace(symbol)):
            continue
        if symbol in env.replacements:
            kept[f"{symbol} == {doprint(env.replace(symbol))}"] = None
            continue
        if bounds.lower != -int_oo and not bounds.lower.is_infinite:
            kept[f"{bounds.lower} <= {symbol}"] = None
        if bounds.upper != int_oo and not bounds.upper.is_infinite:
            kept[f"{symbol} <= {bounds.upper}"] = None
    guards = [guard.expr for guard in env.guards if is_known(guard.expr)]
    for guard in guards:
        left = env.replace(guard)
        if is_known(left) and str(left) != "True" and str(env.bound_sympy(left).lower) != "True":
            kept[doprint(left)] = None
    return list(kept), list(dict.fromkeys(map(doprint, guards)))


def specialised_at(env: ShapeEnv, symbol: Any) -> str | None:
    """The line where a symbol was found to be one certain number; None if it may still differ."""
    if not symbol.node.expr.is_number:
        return None
    named = symbol.node._expr
    lines = (str(guard.sloc).strip("()") for guard in env.guards if guard.expr.has(named))
    return next(lines, "")


def is_open(size: Any) -> bool:
    """Whether a size is still a symbol: no guard made a certain number of it."""
    return isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None


def open_sizes(tensor: torch.Tensor) -> Iterator[tuple[int, Any]]:
    """The sizes of a tensor that are open, each with its dimension."""
    return ((dim, size) for dim, size in enumerate(tensor.shape) if is_open(size))
