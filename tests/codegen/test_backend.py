"""What a user may call a backend, and compilers that users bring."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from aotdist.codegen import backend as backends
from aotdist.codegen.backend import Backend, BoxedCall, CallableBackend, Kind, is_eager, resolve
from aotdist.codegen.fx import FxBackend
from aotdist.codegen.inductor import InductorBackend
from aotdist.errors import BadSettings
from aotdist.torch_seam.functional import FakeTensor
from aotdist.torch_seam.inductor import TracingContext
from tests.codegen.captured import captured, emission

ARGUMENT = torch.tensor([0.25, -1.5])


def test_names():
    assert isinstance(resolve("fx"), FxBackend)
    assert isinstance(resolve("inductor"), InductorBackend)
    assert {resolve(name).name for name in ("fx", "inductor")} == {"fx", "inductor"}


def test_a_backend_stands_for_itself():
    backend = FxBackend()
    assert resolve(backend) is backend


@pytest.mark.parametrize("backend", [FxBackend(), InductorBackend(), CallableBackend(lambda gm, _: gm)])
def test_every_backend_keeps_the_protocol(backend: Backend):
    assert isinstance(backend, Backend)


def test_a_near_miss_is_suggested():
    with pytest.raises(BadSettings, match="did you mean 'inductor'"):
        resolve("inducter")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(BadSettings, match="auto, fx, inductor"):
        resolve("tensorrt")


def test_triton_is_a_backend():
    assert resolve("triton").name == "triton"


def test_something_else_is_no_backend():
    with pytest.raises(BadSettings, match="cannot be a int"):
        resolve(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("missing", "expected"), [(True, "fx"), (False, "inductor")])
def test_auto_is_inductor_where_it_can_compile(missing: bool, expected: str, monkeypatch: pytest.MonkeyPatch):
    def check(self: InductorBackend) -> None:
        if missing:
            raise BadSettings("no compiler")

    monkeypatch.setattr(backends.InductorBackend, "check", check)
    assert resolve("auto").name == expected


def emitted_by(compiler: Any, kind: Kind = "inference", **others: Any) -> BoxedCall:
    graph = captured(lambda x: [x.sin(), x * 2], [ARGUMENT])
    return CallableBackend(compiler, **others).emit(graph, emission(graph, kind)).call


def test_a_plain_compiler_is_called_unboxed():
    arguments = [ARGUMENT]
    sine, double = emitted_by(lambda gm, examples: gm)(arguments)
    assert arguments == []
    assert torch.equal(sine, ARGUMENT.sin()) and torch.equal(double, ARGUMENT * 2)


def test_an_unboxed_call_frees_its_arguments_when_it_returns():
    call = emitted_by(lambda gm, examples: lambda x: (x + 1, x))
    argument = torch.ones(2)
    watched = weakref.ref(argument)
    arguments = [argument]
    del argument
    call(arguments)
    assert watched() is None


def test_a_boxed_result_gets_the_list_itself():
    def compiler(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
        def boxed(args: list[Any]) -> Sequence[Any]:
            assert isinstance(args, list)
            return gm(args.pop())

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    assert torch.equal(emitted_by(compiler)([ARGUMENT])[0], ARGUMENT.sin())


def boxed_pair(args: list[Any]) -> Any:
    return (args.pop(),)


boxed_pair._boxed_call = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("compiled", "got"),
    [
        (lambda x: (), "a tuple of 0"),
        (lambda x: [x], "a list of 1"),
        (lambda x: (x, x, x), "a tuple of 3"),
        (lambda x: x, "a Tensor"),
        (lambda x: None, "a NoneType"),
        (boxed_pair, "a tuple of 1"),
    ],
)
def test_other_results_than_the_graphs_are_refused(compiled: Callable[..., Any], got: str):
    def mine(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        return compiled

    said = (
        f"`{__name__}.mine` made of the forward graph of `test` returned {got}, and the graph has 2 results"
    )
    with pytest.raises(BadSettings, match=said):
        emitted_by(mine, "forward")([ARGUMENT])


def test_a_tensor_is_one_result():
    graph = captured(lambda x: [x.sin()], [ARGUMENT])
    call = CallableBackend(lambda gm, _: lambda x: x.cos()).emit(graph, emission(graph)).call
    assert torch.equal(call([ARGUMENT])[0], ARGUMENT.cos())


class Compiles:
    def __call__(self, gm: torch.fx.GraphModule, examples: Sequence[Any]) -> torch.fx.GraphModule:
        return gm

    def inductor(self, gm: torch.fx.GraphModule, examples: Sequence[Any]) -> torch.fx.GraphModule:
        return gm


def test_a_compiler_has_the_name_of_where_it_is_defined():
    def fx(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> torch.fx.GraphModule:
        return gm

    named = {
        "fx": fx,
        "Compiles": Compiles(),
        "Compiles.inductor": Compiles().inductor,
        "boxed_pair": functools.partial(functools.partial(boxed_pair)),
        "<lambda>": lambda gm, _: gm,
    }
    for name, compiler in named.items():
        assert resolve(compiler).name == f"{__name__}.{name}"
    assert CallableBackend(fx, name="mine").name == "mine"


def test_eager_is_no_backend_of_its_own():
    assert is_eager("eager") and not is_eager("fx") and not is_eager(FxBackend())
    with pytest.raises(BadSettings, match='backend="eager" compiles nothing'):
        resolve("eager")


def test_each_kind_has_its_compiler():
    def named(name: str) -> Callable[..., Any]:
        return lambda gm, examples: lambda *args: (name, name)

    others = {"backward_compiler": named("backward"), "inference_compiler": named("inference")}
    for kind in ("forward", "backward", "inference"):
        assert emitted_by(named("forward"), kind, **others)([ARGUMENT])[0] == kind
        assert emitted_by(named("forward"), kind)([ARGUMENT])[0] == "forward"


def test_a_compiler_gets_fake_arguments_and_finds_their_mode():
    seen: list[Any] = []

    def compiler(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> torch.fx.GraphModule:
        seen.extend([examples, TracingContext.get().fake_mode])
        return gm

    emitted_by(compiler)
    ((example,), mode) = seen
    assert isinstance(example, FakeTensor) and example.fake_mode is mode
    assert example.shape == ARGUMENT.shape


def test_a_compiler_may_ruin_its_graph():
    graph = captured(lambda x: [x.sin()], [ARGUMENT])

    def compiler(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        for node in reversed(gm.graph.nodes):
            node.meta.clear()
            gm.graph.erase_node(node)
        return lambda x: (x,)

    before = [(node.name, dict(node.meta)) for node in graph.gm.graph.nodes]
    CallableBackend(compiler).emit(graph, emission(graph))
    assert [(node.name, dict(node.meta)) for node in graph.gm.graph.nodes] == before


def test_a_compilers_exception_is_the_users_to_see():
    def compiler(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        emitted_by(compiler)


def test_a_table_of_decompositions_reaches_the_trace():
    table = {torch.ops.aten.sin.default: torch.cos}
    assert CallableBackend(lambda gm, examples: gm, table=table).decompositions() is table
    assert resolve(lambda gm, examples: gm).decompositions() == {}
