"""The inductor backend: right numbers, told strides, nothing leaked, nothing changed."""

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import aotdist
from aotdist.codegen.contract import Emitted, Kind
from aotdist.codegen.inductor import InductorBackend
from aotdist.codegen.kernel_batch import KernelBatch
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.program import Graph, Slot
from aotdist.torch_seam.inductor import (
    compile_with_inductor,
    inductor_config,
    submit_compilation,
)
from tests.codegen.captured import branching, calls, captured, emission

pytestmark = pytest.mark.usefixtures("inductor_cache")


def emit(graph: Graph, kind: Kind = "inference", static_ins: frozenset[int] = frozenset()) -> Emitted:
    return InductorBackend().emit(graph, emission(graph, kind, static_ins))


def assert_close(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def mlp(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    hidden = torch.nn.functional.gelu(x @ w)
    return [hidden / hidden.norm(), hidden.softmax(-1).sum(0)]


@pytest.mark.parametrize("kind", ["inference", "forward", "backward"])
def test_close_to_eager(kind: Kind):
    inputs = [torch.randn(5, 8), torch.randn(8, 16)]
    graph = captured(mlp, inputs, decompositions=InductorBackend().decompositions())
    emitted = emit(graph, kind, frozenset({1}))
    arguments = list(inputs)
    results = emitted.call(arguments)
    assert arguments == []
    assert_close(results, mlp(*inputs))


SCALED_SUMS: dict[str, Callable[..., torch.Tensor]] = {
    "a product added": lambda x, a, b: torch.add(x, a @ b, alpha=0.5),
    "added to a product": lambda x, a, b: (a @ b).add(x, alpha=-2.0),
    "a moving average": lambda x, a, b: x.mul(0.9).add(a.t().t() @ b, alpha=0.1),
    "added to a number": lambda x, a, b: x + torch.add(2, a @ b, alpha=3),
}


@pytest.mark.parametrize("name", SCALED_SUMS)
def test_sums_with_products_keep_their_factor(name: str):
    """PyTorch's own rewrite of such a sum as `addmm` loses `alpha`."""
    inputs = [torch.randn(4, 5), torch.randn(4, 6), torch.randn(6, 5)]
    assert_close(
        emit(captured(lambda *tensors: [SCALED_SUMS[name](*tensors)], inputs)).call(list(inputs)),
        [SCALED_SUMS[name](*inputs)],
    )


def test_constants_of_the_program():
    graph = captured(lambda x: [x[:, [1, 0]] * torch.tensor(2.5)], [torch.ones(3, 2)])
    x = torch.arange(6.0).reshape(3, 2)
    assert_close(emit(graph).call([x]), [x[:, [1, 0]] * 2.5])


def test_matrices_of_half_precision_that_are_transposed():
    """g++ 12 on AVX-512 took the stores of such transposes for dead, where a program has more than one."""
    dtypes = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float16)
    xs = [torch.randn(2, 64, 64, dtype=dtype) for dtype in dtypes]

    def transposed(*xs: torch.Tensor) -> list[torch.Tensor]:
        return [x.transpose(-1, -2).contiguous().float() for x in xs]

    assert all(map(torch.equal, aotdist.compile(transposed, backend="inductor")(*xs), transposed(*xs)))


def test_a_branch():
    emitted = emit(captured(branching, [torch.ones(3)]))
    for x in (torch.ones(3), -torch.ones(3)):
        assert_close(emitted.call([x]), [x.sin() if x.sum() > 0 else x.cos()])


def test_several_graphs_compile_in_the_background_and_finish():
    inputs = [torch.randn(64, 64)]
    programs: list[Callable[..., list[torch.Tensor]]] = [
        lambda x: [x.sin() + i for i in range(3)],
        lambda x: [x.cos().cumsum(0), x.exp().mean()],
    ]
    emitted = [emit(captured(program, inputs)) for program in programs]
    for each in emitted:
        each.finish()
    for each, program in zip(emitted, programs, strict=True):
        assert_close(each.call(list(inputs)), program(*inputs))


def test_a_call_before_finish_waits():
    emitted = emit(captured(lambda x: [x.sinh() * 3], [torch.ones(8)]))
    assert_close(emitted.call([torch.ones(8)]), [torch.ones(8).sinh() * 3])


def test_source_is_what_runs():
    assert "def call(args)" in emit(captured(lambda x: [x.tan()], [torch.ones(8)])).source


def test_a_graph_without_operators():
    x, y = torch.ones(2), torch.zeros(3)
    emitted = emit(captured(lambda x, y: [y, x], [x, y]))
    assert "def forward(args)" in emitted.source
    results = emitted.call([x, y])
    assert results[0] is y and results[1] is x


def saved_convolution(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    hidden = torch.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return [hidden.sum(), hidden.relu()]


def test_strides_of_saved_values_are_reported_as_they_are():
    inputs = [torch.randn(2, 8, 8, 8), torch.randn(8, 8, 3, 3).to(memory_format=torch.channels_last)]
    graph = captured(saved_convolution, inputs, out_roles=["output", "saved"])
    emitted = emit(graph, "forward")
    results = emitted.call(list(inputs))
    assert emitted.output_strides == tuple(result.stride() for result in results)
    assert_close(results, saved_convolution(*inputs))


def test_strides_of_what_the_user_sees_are_eagers():
    inputs = [torch.randn(2, 8, 8, 8), torch.randn(8, 8, 3, 3).to(memory_format=torch.channels_last)]
    graph = captured(saved_convolution, inputs)
    results = emit(graph, "inference").call(list(inputs))
    for result, node in zip(results, graph.results(), strict=True):
        assert node is not None and result.stride() == node.meta["val"].stride()


def test_an_absent_result_has_no_strides():
    graph = captured(lambda x: [x + 1, x + 2], [torch.ones(4)], out_roles=["grad", "grad"])
    first, _ = graph.results()
    graph.gm.graph.output_node().args = ((first, None),)
    emitted = emit(graph, "backward")
    assert emitted.output_strides == ((1,), None)
    assert emitted.call([torch.ones(4)])[1] is None


@pytest.mark.parametrize("backend", ["inductor", "auto"])
def test_tensors_without_data(backend: str):
    """What is computed on the meta device has eager's sizes and strides; what is beside it, too."""

    def program(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.nn.functional.linear(x, w).relu().t(), y * 2, y.detach().to("meta") + 1

    found = []
    for fn in (program, aotdist.compile(program, backend=backend)):
        x, w = (torch.empty(size, 4, device="meta", requires_grad=True) for size in (3, 5))
        y = torch.arange(3.0).requires_grad_()
        out = fn(x, w, y)
        (out[0].sum().backward(), out[1].sum().backward())
        found.append([(t.device.type, t.shape, t.stride()) for t in (*out, x.grad, w.grad)])
        torch.testing.assert_close([out[1], y.grad], [torch.arange(3.0) * 2, torch.full((3,), 2.0)])
    assert found[0] == found[1]


def state(graph: Graph) -> list[Any]:
    nodes = graph.gm.graph.nodes
    return [(node.name, node.target, node.args, node.kwargs, dict(node.meta)) for node in nodes]


def test_the_graph_is_not_changed():
    inputs = [torch.randn(4, 6, 8), torch.randn(4, 8, 3)]
    graph = captured(lambda x, y: [(x @ y).view(24, 3) * 1.0], inputs)
    before = state(graph)
    InductorBackend().prepare_joint(graph)
    emit(graph)
    assert state(graph) == before


def test_operators_that_a_pass_introduced_are_broken_up():
    graph = captured(lambda x: [x.sin() @ x], [torch.ones(3, 3)])
    sine, _ = calls(graph)
    sine.target = torch.ops.aten.logit.default
    emitted = emit(graph)
    assert "logit" not in emitted.source and "extern_kernels.mm" in emitted.source
    x = torch.rand(3, 3)
    assert_close(emitted.call([x]), [x.logit() @ x])


def test_the_same_graph_comes_from_inductors_cache():
    hits = counters["inductor"]["fxgraph_cache_hit"]
    x = torch.randn(7)
    for expected_hits in (hits, hits + 1):
        graph = captured(lambda x: [x.sigmoid() * 7, x + 7], [x], out_roles=["output", "saved"])
        emitted = emit(graph, "forward")
        assert counters["inductor"]["fxgraph_cache_hit"] == expected_hits
        assert emitted.output_strides == ((1,), (1,))
        assert "def call(args)" in emitted.source
        assert_close(emitted.call([x]), [x.sigmoid() * 7, x + 7])


def test_a_gpu_graph_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch):
    graph = captured(lambda x: [x + 1], [torch.ones(2)])
    (placeholder,) = graph.placeholders()
    with placeholder.meta["val"].fake_mode:
        placeholder.meta["val"] = torch.empty(2, device="cuda")
    monkeypatch.setattr("aotdist.codegen.inductor.find_spec", lambda name: None)
    with pytest.raises(BadSettings, match="Triton, which is not installed"):
        InductorBackend().prepare_joint(graph)


def test_users_settings_of_inductor_are_respected_and_kept():
    with inductor_config(cpp__simdlen=0):
        emitted = emit(captured(lambda x: [x.atan()], [torch.ones(32)]))
        assert "Vectorized" not in emitted.source
    assert "Vectorized" in emit(captured(lambda x: [x.atan() + 1], [torch.ones(32)])).source


def test_nothing_of_ours_stays_in_inductor():
    inductor = sys.modules["torch._inductor"]
    emit(captured(lambda x: [x.acos()], [torch.ones(32)]))
    before = (inductor.config.get_config_copy(), inductor.async_compile.AsyncCompile)
    emit(captured(lambda x: [x.asin()], [torch.ones(32)]))
    assert (inductor.config.get_config_copy(), inductor.async_compile.AsyncCompile) == before
    compiled = torch.compile(lambda x: x.asinh() + 2)
    assert_close([compiled(torch.ones(32))], [torch.ones(32).asinh() + 2])


def test_compiling_under_autocast_and_grad_mode_changes_nothing():
    inputs = [torch.randn(4, 4), torch.randn(4, 4)]
    graph = captured(lambda x, y: [x @ y], inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        emitted = emit(graph)
    assert_close(emitted.call(list(inputs)), [inputs[0] @ inputs[1]])


def test_random_numbers_of_the_user_are_untouched():
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    graph = captured(lambda x: [x.tanh()], [torch.ones(16)])
    InductorBackend().prepare_joint(graph)
    emit(graph)
    assert torch.equal(torch.get_rng_state(), expected)


def test_compiling_inside_a_compiled_call():
    inner: list[Emitted] = []

    def compile_another() -> None:
        inner.append(emit(captured(lambda x: [x.erf() * 2], [torch.ones(8)])))

    graph = captured(lambda x: [x.square()], [torch.ones(8)])
    outer = emit(graph)

    class Compiling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return outer.call([x])[0]

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            compile_another()
            return inner[0].call([grad.contiguous()])[0]

    x = torch.ones(8, requires_grad=True)
    Compiling.apply(x).sum().backward()
    assert x.grad is not None
    assert_close([x.grad], [torch.ones(8).erf() * 2])


@pytest.fixture
def lone_group(tmp_path: Any) -> Iterator[str]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD.group_name  # type: ignore[union-attr]
    dist.destroy_process_group()


def test_collectives_compile(lone_group: str):
    ops = torch.ops._c10d_functional

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        gathered = ops.wait_tensor(ops.all_gather_into_tensor(x * 2, 1, lone_group))
        reduced = ops.wait_tensor(ops.reduce_scatter_tensor(gathered + 1, "avg", 1, lone_group))
        total = ops.wait_tensor(ops.all_reduce(reduced.sum(), "sum", lone_group))
        return [reduced, total]

    x = torch.randn(4, 4)
    untouched = x.clone()
    emitted = emit(captured(program, [x]))
    for _ in range(2):
        assert_close(emitted.call([x]), [x * 2 + 1, (x * 2 + 1).sum()])
    assert torch.equal(x, untouched)


def written_out_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / 4.0, -1) @ v


def test_prepare_joint_finds_attention_and_keeps_provenance():
    def joint(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tangent: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = written_out_attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, tangent)]

    inputs = [torch.randn(2, 4, 32, 16) for _ in range(4)]
    graph = captured(
        joint,
        inputs,
        in_roles=["primal", "primal", "primal", "tangent"],
        out_roles=["output", "grad", "grad", "grad"],
        decompositions=InductorBackend().decompositions(),
    )
    for node in calls(graph):
        node.meta["phase"] = "backward" if "autograd_backward" in node.meta else "forward"
    ready = InductorBackend().prepare_joint(graph)
    flash = [node for node in calls(ready) if "flash_attention" in str(node.target)]
    assert [node.meta["phase"] for node in flash] == ["forward", "backward"]
    assert all("val" in node.meta and "phase" in node.meta for node in calls(ready))
    assert ready.ins == graph.ins and ready.outs == graph.outs
    assert_close(emit(ready, "forward").call(list(inputs)), joint(*inputs))


NO_COMPILER = """
from aotdist.codegen.backend import resolve
from aotdist.errors import BadSettings
assert resolve("auto").name == "fx"
try:
    resolve("inductor").check()
except BadSettings as error:
    print(error)
"""


def test_a_missing_compiler_is_a_clear_error_before_anything_is_traced(tmp_path: Any):
    environment = os.environ | {"CXX": str(tmp_path / "no-compiler"), "PATH": str(tmp_path)}
    shown = subprocess.run(
        [sys.executable, "-c", NO_COMPILER], env=environment, capture_output=True, text=True, cwd=os.getcwd()
    )
    assert "needs a C++ compiler" in shown.stdout, shown.stderr
    assert "fix: install one" in shown.stdout


@pytest.mark.parametrize(
    ("complaint", "fix"),
    [
        ("fatal error: Python.h: No such file or directory", "install Python's headers"),
        ("fatal error: omp.h: No such file or directory", "OpenMP"),
        ("internal compiler error", "repair it"),
    ],
)
def test_a_compiler_that_cannot_build_says_why(
    complaint: str, fix: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\necho '{complaint}' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr("aotdist.codegen.cpp_toolchain.find_cpp_compiler", lambda: str(compiler))
    with pytest.raises(Exception, match="cannot build a Python extension") as caught:
        InductorBackend().check()
    assert complaint in str(caught.value) and fix in str(caught.value)


def test_slots_of_saved_values_alone_may_change_layout():
    graph = captured(lambda x: [x + 1, x + 2, x + 3], [torch.ones(2)])
    roles = [Slot("output", "out"), Slot("saved", "s"), Slot("write", "w")]
    emitted = emit(Graph(graph.gm, graph.ins, tuple(roles)), "forward")
    assert emitted.output_strides == ((1,), (1,), (1,))


def convolve(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """An update: what reads a gradient of a weight beside the weight."""
    y = torch.nn.functional.conv2d(x.sin(), w, b)
    args = ([8], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
    gradient = torch.ops.aten.convolution_backward(y.cos(), x.sin(), w, *args)[1]
    assert gradient is not None
    return [w - gradient]


def test_gradients_of_convolutions_lie_as_the_weights_do():
    inputs = [torch.randn(2, 16, 6, 6), torch.randn(8, 16, 3, 3), torch.randn(8)]
    emitted = emit(captured(convolve, inputs))
    assert_close(emitted.call(list(inputs)), convolve(*inputs))
    channels_last = str(torch.empty(8, 16, 3, 3).contiguous(memory_format=torch.channels_last).stride())
    assert str(inputs[1].stride()) in emitted.source
    assert channels_last not in emitted.source


@pytest.mark.sweep
def test_a_pool_is_the_first_thing_that_is_compiled():
    """Inductor's table of decompositions asks for a module that it does not import."""
    script = """
import torch, aotdist
pool = aotdist.compile(torch.nn.MaxPool2d(2), backend="inductor")
with torch.no_grad():
    print(tuple(pool(torch.ones(1, 1, 4, 4)).shape))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "(1, 1, 2, 2)", done.stderr


@pytest.fixture(
    params=["While executing %{0.name} : [num_users=1] = call_function[]", "  target: {0.target}"]
)
def failing_backwards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_or_fail(gm: torch.fx.GraphModule, *args: Any, backward: bool, **options: Any) -> Any:
        if backward:
            at = next(node for node in gm.graph.nodes if node.target is torch.ops.aten.cos.default)
            raise ValueError(f"no such kernel\n\n{request.param.format(at)}")
        return compile_with_inductor(gm, *args, backward=backward, **options)

    monkeypatch.setattr("aotdist.codegen.inductor.compile_with_inductor", compile_or_fail)


def waves(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def gradient(fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x = torch.arange(4.0).requires_grad_()
    fn(x).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.usefixtures("failing_backwards")
def test_what_inductor_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AOTDIST_TRACEBACK", "full")
    compiled = aotdist.compile(waves, backend="inductor", settings={"cache_bytes": 0})
    with pytest.raises(UnsupportedProgram, match=r"the backward graph of `waves`: no such kernel") as caught:
        gradient(compiled)
    assert "return x.sin() * 2" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.usefixtures("failing_backwards")
@pytest.mark.parametrize("cache_bytes", [0, 2**20])
def test_auto_runs_by_fx_what_inductor_does_not_compile(cache_bytes: int, tmp_path: Path):
    settings = {"cache_bytes": cache_bytes, "cache_folder": str(tmp_path)}
    compiled = aotdist.compile(waves, backend="auto", settings=settings)
    with pytest.warns(
        UserWarning, match="does not compile `aten.cos.default` in the backward graph .* by `fx`"
    ):
        found = gradient(compiled)
    torch.testing.assert_close(found, gradient(waves))


def warns_and_sines(x: torch.Tensor) -> torch.Tensor:
    warnings.warn("of the user's program", stacklevel=2)
    return x.sin()


def test_filters_of_warnings_decide_nothing_about_compilers(monkeypatch: pytest.MonkeyPatch):
    """Neither in this thread nor in those of Inductor; other threads, and the user's program, meet theirs."""
    elsewhere: list[type[Warning]] = []

    def elsewhere_warned() -> None:
        try:
            warnings.warn("elsewhere", stacklevel=2)
        except UserWarning as error:
            elsewhere.append(type(error))

    def compiling(*args: Any, **kwargs: Any) -> Any:
        warnings.warn("by Python", FutureWarning, stacklevel=2)
        torch.ones(2, 2, 2).T  # noqa: B018  # in C++
        submit_compilation(lambda: warnings.warn("in a thread", stacklevel=2))()
        other = threading.Thread(target=elsewhere_warned)
        other.start()
        other.join()
        return compile_with_inductor(*args, **kwargs)

    monkeypatch.setattr("aotdist.codegen.inductor.compile_with_inductor", compiling)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "by Python", DeprecationWarning)
        filters = list(warnings.filters)
        compiled = aotdist.compile(waves, backend="inductor", settings={"cache_bytes": 0})
        assert_close([compiled(torch.ones(3))], [waves(torch.ones(3))])
        assert warnings.filters == filters
        assert {"by Python", "The use of `x", "in a thread"} <= {str(one.message)[:13] for one in shown}
        assert elsewhere == [UserWarning]
        for call in (warns_and_sines, aotdist.compile(warns_and_sines, backend="inductor")):
            with pytest.raises(UserWarning, match="of the user's program"):
                call(torch.ones(3))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_kernel_that_does_not_build(needs_grad: bool, monkeypatch: pytest.MonkeyPatch):
    """Is an error of ours; `auto` runs the program by `fx`, and says so once."""

    def finish(batch: KernelBatch) -> None:
        raise RuntimeError("C++ compile error")

    monkeypatch.setattr(KernelBatch, "finish", finish)
    x, settings = torch.arange(4.0, requires_grad=needs_grad), {"cache_bytes": 0}
    with pytest.raises(UnsupportedProgram, match="C\\+\\+ compile error"):
        aotdist.compile(waves, backend="inductor", settings=settings)(x)
    compiled = aotdist.compile(waves, backend="auto", settings=settings)
    with pytest.warns(UserWarning, match="C\\+\\+ compile error; .* by `fx`") as told:
        found = [compiled(x), *([gradient(compiled)] if needs_grad else [])]
    assert len(told) == 1
    assert_close(found, [waves(x), *([gradient(waves)] if needs_grad else [])])


def _negated() -> torch.Tensor:
    """The imaginary parts of conjugated numbers: they lie in memory as they were, with gaps."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, dtype=torch.complex64, generator=generator).conj().imag


def test_numbers_that_lie_negated_are_refused() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2 + 1
        x.mul_(3)
        return y

    with pytest.raises(UnsupportedProgram, match="of numbers that lie in memory negated"):
        aotdist.compile(fn, backend="inductor")(_negated())
    expected, given = _negated(), _negated()
    with pytest.warns(UserWarning, match="by `fx`"):
        result = aotdist.compile(fn, backend="auto")(given)
    assert torch.equal(result, fn(expected)) and torch.equal(given, expected)
    assert given.is_neg()


def test_a_gradient_that_is_zeros_without_memory_arrives() -> None:
    layer = torch.nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    torch.sgn(aotdist.compile(layer, backend="inductor")(x)).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.zeros(2, 3))
    assert layer.bias.grad is not None and torch.equal(layer.bias.grad, torch.zeros(3))


def test_what_inductor_makes_of_operators_is_differentiated_and_checked_as_that() -> None:
    """Pins what docs/differences.md says of gradients of gradients, and of sizes that eager refuses."""

    def of_first_bias(backend: str) -> torch.Tensor | None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LeakyReLU(), torch.nn.Linear(3, 1))
        x = torch.randn(2, 4, requires_grad=True)
        (grad,) = torch.autograd.grad(aotdist.compile(model, backend=backend)(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        return model[0].bias.grad

    eager = of_first_bias("eager")
    assert eager is not None and not eager.any() and of_first_bias("inductor") is None

    def fn(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.index_add(x, 0, torch.arange(3), v)

    with pytest.raises(RuntimeError, match="source tensor shape must match"):
        fn(torch.zeros(3, 3), torch.ones(3))
    assert aotdist.compile(fn, backend="inductor")(torch.zeros(3, 3), torch.ones(3)).equal(torch.ones(3, 3))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_labels_that_are_missing_are_no_labels(reduction: str) -> None:
    """Made of other operators by PyTorch, each counts as class 0 (2.13, `torch.compile` too)."""

    def fn(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.multilabel_margin_loss(x, target, reduction=reduction)

    x, target = torch.randn(3, 4), torch.tensor([[0, 1, -1, 2], [3, -1, -1, -1], [-1, 0, 1, 2]])
    compiled = aotdist.compile(fn, backend="inductor")
    for rows in (slice(None), 0):
        ours, eager = (x[rows].clone().requires_grad_() for _ in range(2))
        result, expected = compiled(ours, target[rows]), fn(eager, target[rows])
        torch.testing.assert_close(result, expected)
        result.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(ours.grad, eager.grad)


def test_an_unreduced_loss_of_one_sample_has_no_dimension() -> None:
    """PyTorch's decomposition gives it one, and eager does not."""

    def loss(scores: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.multi_margin_loss(scores, label, reduction="none") * 2

    label = torch.tensor(1)
    eager, ours = (torch.tensor([0.3, -0.1, 0.8], requires_grad=True) for _ in range(2))
    expected, found = loss(eager, label), aotdist.compile(loss, backend="inductor")(ours, label)
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    torch.testing.assert_close(ours.grad, eager.grad)
    assert eager.grad is not None and eager.grad.any()
