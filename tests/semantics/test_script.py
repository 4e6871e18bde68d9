"""A program that fails is written down as a script; the script runs by itself and finds what differs."""

import contextlib
import io

import pytest
import torch

from tests.semantics.programs import Program
from tests.semantics.script import script_of

PROGRAM = Program(
    inputs=("torch.randn(3, 4, requires_grad=True) * 1.5", "x0[1:]"),
    statements=("x1.mul_(2)", "t0 = Scaled.apply(x0)", "t1, t1b, *_ = t0.split(1)"),
    returned=("t0", "t1b", "x1"),
    other_inputs=("torch.randn(3, 4)", "torch.randn(3, 4, requires_grad=True) * 2"),
    left_out=frozenset({1}),
)
COMPILED = "aotdist.compile(program, backend='fx')"
WRONG = {
    "numbers": "lambda *args: [out * 1.5 for out in program(*args)]",
    "identity": "lambda *args: [out.view_as(out) for out in program(*args)]",
    "history": "lambda *args: [out.detach() for out in program(*args)]",
}


def output_of(script: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(script, "script.py", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


@pytest.mark.parametrize("around", [None, torch.no_grad, torch.inference_mode])
def test_it_runs_by_itself(around):
    wrappers = Program(("TwoTensor(torch.randn(3, 4), torch.randn(3, 4))",), ("t0 = x0 * 2",), ("t0", "x0"))
    for program in (PROGRAM, wrappers) if around is None else (wrappers,):
        assert "\n0 of" in "\n" + output_of(script_of(program, around, "what was seen"))


@pytest.mark.parametrize("what", WRONG)
def test_it_finds_what_differs(what):
    script = script_of(PROGRAM)
    assert COMPILED in script
    printed = output_of(script.replace(COMPILED, WRONG[what]))
    assert "    compiled " in printed and not printed.startswith("0 of")
