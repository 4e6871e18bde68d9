"""What is taken out of a generated module is what its entry needs, and nothing else."""

from typing import Any

import pytest
import torch

from aotdist.codegen.portable import emitted_from, portable_of
from aotdist.codegen.python_source import load_function

MODULE = """
import math
import unheard_of_module
from somewhere_else import align
from torch._inductor.select_algorithm import extern_kernels
aten = torch.ops.aten
scale = math.pi
def branch(args):
    return extern_kernels.mm(args[0], args[0])
def call(args):
    x, = args
    args.clear()
    total = sum(each for each in (1.0, 2.0))
    return [aten.mul(branch([x]), scale), constant, total]
def benchmark(args):
    return align(unheard_of_module, args)
"""


def loaded(source: str, **bound: Any) -> Any:
    """`call` as a module that Inductor imports has it."""
    absent = ("import unheard", "from somewhere")
    runs = "\n".join(line for line in source.splitlines() if not line.startswith(absent))
    scope: dict[str, Any] = {"torch": torch, **bound}
    exec(runs, scope)
    return scope["call"]


def test_what_the_entry_needs() -> None:
    constant, x = torch.arange(3.0), torch.randn(3, 3)
    call = loaded(MODULE.replace("aten = ", "import torch\naten = "), constant=constant)
    portable = portable_of(call, MODULE.replace("aten = ", "import torch\naten = "), None)
    assert portable is not None
    assert portable.functions == ("mm",) and dict(portable.constants) == {"constant": constant}
    for absent in ("somewhere_else", "unheard_of_module", "_inductor", "benchmark"):
        assert absent not in portable.text
    ours, theirs = emitted_from(portable, "test").call([x]), call([x])
    assert all(map(torch.equal, ours[:2], theirs[:2])) and ours[2] == theirs[2] == 3.0


@pytest.mark.parametrize(
    "source",
    [
        "def call(args):\n    return kernel(args)",
        "scale = 1\nscale = 2\ndef call(args):\n    return scale",
        "async_compile = None\nkernel = async_compile\ndef call(args):\n    return kernel",
    ],
    ids=["a name from elsewhere", "a name with two meanings", "a kernel of another kind"],
)
def test_what_cannot_be_taken_along(source: str) -> None:
    assert portable_of(loaded(source), source, None) is None


def test_another_function_than_the_modules_own() -> None:
    source = "def call(args):\n    return args"
    assert portable_of(load_function(source, "call", {}, "test"), source, None) is None


def test_a_constant_that_text_cannot_tell() -> None:
    source = "def call(args):\n    return constant"
    assert portable_of(loaded(source, constant=torch.ones(2, 3).t()), source, None) is None


def test_an_operator_that_is_not_there() -> None:
    source = "import torch\ndef call(args):\n    return torch.ops.aotdist_gone.operator(args)"
    portable = portable_of(loaded(source), source, None)
    assert portable is not None
    with pytest.raises(LookupError, match="aotdist_gone"):
        emitted_from(portable, "test")
