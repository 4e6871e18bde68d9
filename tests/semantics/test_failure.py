"""A call that fails leaves no trace: what the user holds is as before, and the next call works.

Where a program fails while it is captured, nothing that it did before is done; eager would have written.
Where it fails at run time, its random numbers are drawn as far as eager draws them.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aotdist
from aotdist.api import compiled_call
from aotdist.errors import UnsupportedProgram
from tests.semantics.observation import Scene, assert_same, gradients, observe, play, versions


class Fault(Exception):
    """What the user's code raises."""


class Model(nn.Module):
    """It writes an input and buffers, assigns, draws, has hooks, changes modes; then it fails, if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros(()))
        self.fails = ""
        self.heard: list[str] = []
        self.linear.register_forward_hook(lambda *_: None)
        self.linear.weight.register_hook(lambda grad: None)

    def hear(self, grad: torch.Tensor) -> None:
        if self.fails == "hook":
            raise Fault("in a hook of the backward")

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        cache.add_(1)
        h = F.dropout(self.norm(self.linear(x)), 0.5)
        if h.requires_grad:
            h.register_hook(self.hear)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            self.last = h @ h.t()
            match self.fails:
                case "forward":
                    raise Fault("in the forward")
                case "data":
                    if h.sum() > 0:
                        h = h * 2
                case "refused":
                    torch.manual_seed(0)
                case _:
                    pass
        return Failing.apply(h, self.fails == "backward")


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.fails = fails
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.fails:
            raise Fault("in a custom backward")
        return grads[0] * 2, None


def scene() -> Scene:
    torch.manual_seed(0)
    x = torch.randn(3, 4, requires_grad=True)
    return Scene(Model(), (x, torch.zeros(3)))


def state(seen: Scene) -> dict[str, Any]:
    """All that a call could have changed."""
    tensors, model = seen.tensors(), seen.fn
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return {
        **observe(tensors),
        **versions(tensors),
        **gradients(tensors),
        "identities": {name: id(tensor) for name, tensor in tensors.items()},
        "attributes": sorted(name for name in vars(model) if name not in ("source", "graphs", "explain")),
        "hooks": (hooks, len(model.linear.weight._backward_hooks)),
        "random numbers": torch.get_rng_state().tolist(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_anomaly_enabled()),
        "asks Dynamo": (torch.compiler.is_dynamo_compiling, torch.utils.checkpoint.CheckpointFunction),
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
    }


def works_now(model: Model, args: tuple[Any, ...]) -> None:
    """The next call is compiled, and is the same as eager's."""
    eager = scene()
    sights = []
    for seen, call in ((eager, eager.fn), (Scene(model, args), model)):
        call.fails = ""
        torch.manual_seed(1)
        sights.append(play(seen, call))
    assert_same(*sights)
    assert len(compiled_call(model).artifacts) == 1


WHILE_CAPTURING: dict[str, type[Exception]] = {
    "forward": Fault,
    "data": UnsupportedProgram,
    "refused": UnsupportedProgram,
    "backward": Fault,
    "hook": Fault,
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("fails", WHILE_CAPTURING)
def test_a_failure_while_capturing(fails: str, times: int) -> None:
    built = scene()
    model = aotdist.compile(built.fn, backend="fx")
    before = state(built)
    for _ in range(times):
        model.fails = fails
        with pytest.raises(WHILE_CAPTURING[fails]):
            model(*built.args)
        assert state(built) == before
        assert not compiled_call(model).artifacts
    works_now(model, built.args)


class Compiler:
    """A backend whose compiler, or what it compiles, fails when asked to."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.num_graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        self.num_graphs += 1
        which = "forward" if self.num_graphs % 2 else "backward"
        if self.kind == f"compiling the {which}":
            raise Fault(self.kind)

        def run(*args: Any) -> Any:
            if self.kind == f"running the {which}":
                raise Fault(self.kind)
            return gm(*args)

        return run


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_failure_in_a_compiler(half: str) -> None:
    built = scene()
    compiler = Compiler(f"compiling the {half}")
    model = aotdist.compile(built.fn, backend=compiler)
    before = state(built)
    with pytest.raises(Fault):
        model(*built.args)
    assert state(built) == before
    compiler.kind, compiler.num_graphs = "", 0
    works_now(model, built.args)


def test_a_failure_of_the_compiled_forward() -> None:
    built = scene()
    compiler = Compiler("running the forward")
    model = aotdist.compile(built.fn, backend=compiler)
    before = state(built)
    with pytest.raises(Fault):
        model(*built.args)
    assert state(built) == before
    compiler.kind = ""
    works_now(model, built.args)


def test_a_failure_of_the_compiled_backward() -> None:
    """The forward stands; there are no gradients, and nothing hangs on."""
    built = scene()
    compiler = Compiler("running the backward")
    model = aotdist.compile(built.fn, backend=compiler)
    out = model(*built.args)
    before = state(built)
    with pytest.raises(Fault):
        out.sum().backward()
    assert state(built) == before
    compiler.kind = ""
    model(*built.args).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_kernel_that_raises_has_drawn_what_eager_draws() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(torch.rand(3, 3) * 0 + x.detach()) * torch.rand(3)

    compiled = aotdist.compile(program, backend="fx")
    compiled(torch.eye(3, requires_grad=True))
    states = []
    for fn in (program, compiled):
        torch.manual_seed(4)
        with pytest.raises(torch.linalg.LinAlgError):
            fn(-torch.eye(3).requires_grad_())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@contextmanager
def modes() -> Iterator[None]:
    with (
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        yield


@pytest.mark.parametrize("around", [modes, torch.inference_mode])
def test_modes_around_a_failure_stay(around: Callable[[], Any]) -> None:
    built = scene()
    model = aotdist.compile(built.fn, backend="fx")
    with around():
        model.fails = "forward"
        before = state(built)
        with pytest.raises(Fault):
            model(*built.args)
        assert state(built) == before


def test_functions_that_control_flow_is_given_fail_too() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise Fault("in a branch")

    asked = torch.compiler.is_dynamo_compiling
    compiled = aotdist.compile(lambda x: torch.cond(x.sum() > 0, fails, torch.sin, (x,)), backend="fx")
    for _ in range(2):
        with pytest.raises(Fault):
            compiled(torch.ones(2, requires_grad=True))
    assert torch.compiler.is_dynamo_compiling is asked and torch._C._len_torch_dispatch_stack() == 0
    assert not compiled.artifacts


def test_dispatch_keys_that_a_failure_leaves_excluded_are_put_back() -> None:
    """As an assertion of PyTorch's own does that fails inside of `torch.func.jvp` (torch 2.13)."""
    key = torch._C.DispatchKey.ADInplaceOrView

    def program(x: torch.Tensor) -> torch.Tensor:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
        raise Fault

    with pytest.raises(Fault):
        aotdist.compile(program, backend="fx")(torch.ones(3))
    assert not torch._C._dispatch_tls_is_dispatch_key_excluded(key)


def test_a_failure_that_the_program_catches_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        try:
            return x @ torch.ones(7, 7)
        except RuntimeError:
            return x * 2

    assert torch.equal(aotdist.compile(program, backend="fx")(torch.ones(3)), torch.full((3,), 2.0))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("in_args", [True, False])
def test_an_exception_that_carries_a_tensor_out_is_refused(in_args: bool) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        fault = Fault("bad", x * 2) if in_args else Fault("bad")
        if not in_args:
            fault.tensor = x * 2  # type: ignore[attr-defined]
        raise fault

    with pytest.raises(UnsupportedProgram, match=r"raises a Fault that carries a tensor[^$]*test_failure.py"):
        aotdist.compile(program, backend="fx")(torch.ones(2))


def test_a_hook_that_raises_in_the_trace_says_so() -> None:
    def hook(grad: torch.Tensor) -> None:
        raise Fault("called outside of the library's own backward")

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.register_hook(hook)
        return y.cos()

    with pytest.raises(Fault, match="outside of the library") as caught:
        aotdist.compile(program, backend="fx")(torch.ones(2, requires_grad=True))
    assert caught.value.__notes__[0].startswith("aotdist traces the backward when it compiles a call")
