"""Around a program and inside: autocast, anomaly mode, deterministic mode, checkpoints, flags."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacfwd, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import (
    CheckpointFunction,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import aotdist
from aotdist.api import compiled_call
from aotdist.errors import BadSettings, UnsupportedProgram
from tests.semantics.observation import Scene, same_as_eager


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(*(size or (3, 4)), requires_grad=True)


# --- autocast of the backward --------------------------------------------------------------------


def bfloat16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def in_float32(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Autocast is on around it and off inside, so that the backward's own casts show."""
    with torch.autocast("cpu", enabled=False):
        return (x @ w).sin()


def gradients(fn: Callable[..., Any], *, backward_within: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, w = leaf(4, 4), leaf(4, 4)
    with bfloat16():
        out = fn(x, w).sum()
        if backward_within:
            out.backward()
    if not backward_within:
        out.backward()
    assert x.grad is not None and w.grad is not None
    return [x.grad, w.grad]


def policy_is(policy: str, expected: list[torch.Tensor]) -> bool:
    compiled = aotdist.compile(in_float32, backend="fx", settings={"backward_autocast": policy})
    return all(map(torch.equal, gradients(compiled), expected))


def test_the_backward_is_recorded_under_the_autocast_that_is_asked_for() -> None:
    outside, within = gradients(in_float32), gradients(in_float32, backward_within=True)
    assert not torch.equal(outside[0], within[0])
    assert policy_is("off", outside)
    assert policy_is("same_as_forward", within)
    assert policy_is("cpu:bfloat16", within)


@contextmanager
def autocast_by_default(dtype: torch.dtype, *, casts_once: bool) -> Iterator[None]:
    """What autocast does where a program switches it on and says nothing else."""
    torch.set_autocast_dtype("cpu", dtype)
    torch.set_autocast_cache_enabled(casts_once)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        torch.set_autocast_cache_enabled(True)


@pytest.mark.parametrize("within", [False, True])
def test_how_autocast_casts_by_default_is_asked_at_each_call(within: bool) -> None:
    """Gradients of a parameter that is cast once are summed before they are cast back."""
    linear = nn.Linear(4, 4)

    def twice(x: torch.Tensor) -> torch.Tensor:
        with nullcontext() if within else torch.autocast("cpu"):
            return linear(linear(x).float().tanh()).float().square().sum()

    compiled, x = aotdist.compile(twice, backend="fx"), torch.randn(5, 4)
    for dtype, casts_once in itertools.product([torch.bfloat16, torch.float16], [True, False]):
        with autocast_by_default(dtype, casts_once=casts_once), torch.autocast("cpu", enabled=within):
            eager, ours = (torch.autograd.grad(call(x), linear.weight)[0] for call in (twice, compiled))
        assert torch.equal(eager, ours)


def test_autocast_around_backward_changes_nothing() -> None:
    compiled = aotdist.compile(in_float32, backend="fx")
    assert all(map(torch.equal, gradients(compiled, backward_within=True), gradients(in_float32)))


@pytest.mark.parametrize("policy", ["on", "cpu", "cpu:int", "cpu:bfloat16,", ""])
def test_other_policies_are_bad_settings(policy: str) -> None:
    with pytest.raises(BadSettings, match="backward_autocast"):
        aotdist.Settings(backward_autocast=policy)


# --- anomaly mode --------------------------------------------------------------------------------


def nan_in_backward(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = torch.where(y > 0, y.log(), y)  # the culprit: 0 * inf
    return z.sin() + y


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("is_compiled_before", [False, True])
def test_a_nan_is_traced_to_the_line_of_the_forward(is_compiled_before: bool) -> None:
    compiled = aotdist.compile(nan_in_backward, backend="fx")
    if is_compiled_before:
        compiled(torch.zeros(3, requires_grad=True)).sum().backward()
    for fn in (nan_in_backward, compiled):
        with (
            torch.autograd.detect_anomaly(),
            pytest.raises(RuntimeError, match="Function 'LogBackward0' returned nan values"),
            pytest.warns(UserWarning, match=r"z = torch.where\(y > 0, y.log\(\), y\)  # the culprit"),
        ):
            fn(torch.zeros(3, requires_grad=True)).sum().backward()


@pytest.mark.filterwarnings("ignore:Error detected in")
def test_anomaly_mode_around_the_backward_alone_sees_a_nan() -> None:
    results = aotdist.compile(nan_in_backward, backend="fx")(torch.zeros(3, requires_grad=True))
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="returned nan values"):
        results.sum().backward()


def test_a_nan_inside_of_one_node_is_none_of_eagers_business() -> None:
    x = torch.zeros(3, requires_grad=True)
    compiled = aotdist.compile(nan_in_backward, backend="fx")
    compiled(x).sum().backward()  # without anomaly mode nobody looks
    assert x.grad is not None and x.grad.isnan().all()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        compiled(x).sum().backward()


def test_an_error_in_backward_is_traced_to_the_line_of_the_forward() -> None:
    x = torch.ones(3, 3, requires_grad=True)

    @torch.library.custom_op("aotdist_tests::fails", mutates_args=())
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("fails when it runs")

    fails.register_fake(torch.empty_like)
    twice = torch.library.custom_op(
        "aotdist_tests::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, g: fails(g))
    compiled = aotdist.compile(lambda x: twice(x).sin(), backend="fx")
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(ArithmeticError),
        pytest.warns(UserWarning, match=r"compiled = aotdist.compile\(lambda x: twice\(x\).sin\(\)"),
    ):
        compiled(x).sum().backward()


# --- sequence numbers ----------------------------------------------------------------------------


def sequence_numbers(compiled: Any, name: str) -> list[tuple[str, int | None]]:
    graph = compiled_call(compiled).artifacts[0].compilation.graphs()[name]
    nodes = [node for node in graph.gm.graph.nodes if node.op == "call_function"]
    return [(str(node.target), node.meta.get("seq_nr")) for node in nodes]


def test_sequence_numbers_begin_at_zero_in_each_trace_and_link_backward_to_forward() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp().cos()

    found = []
    for _ in range(2):
        leaf().sin().sum()  # autograd counts on, whatever happens outside
        compiled = aotdist.compile(program, backend="fx")
        compiled(leaf()).sum().backward()
        found.append([sequence_numbers(compiled, name) for name in ("forward", "backward")])
    assert found[0] == found[1]
    forward, backward = found[0]
    numbers = {target: number for target, number in forward}
    assert numbers == {"aten.sin.default": 0, "aten.exp.default": 1, "aten.cos.default": 2}
    assert [k for k, _ in itertools.groupby(number for _, number in backward)] == [2, 1, 0]


# --- checkpoints and transforms inside -----------------------------------------------------------


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.up, self.down, self.options = nn.Linear(4, 8), nn.Linear(8, 4), options

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.down(self.up(x).sin()), 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, **self.options) + x  # type: ignore[operator]


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "not reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, keep_products),
    },
    "selective by list": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]),
    },
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_inside(name: str) -> None:
    same_as_eager(lambda: Scene(Block(**CHECKPOINTS[name]), (leaf(),)), calls=2)


class Routing(Block):
    """Counts, in what is recomputed too, and has a loss of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("count", torch.zeros(4))

    def body(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates = super().body(x).softmax(-1)
        self.count.add_(gates.detach().sum(0))
        return x * gates, gates.mean(0).square().sum()

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.body, x, **self.options)


@pytest.mark.parametrize("left_out", [(), (0,), (1,)])
@pytest.mark.parametrize("name", ["not reentrant", "selective"])
def test_checkpoints_that_write_and_have_several_results(name: str, left_out: tuple[int, ...]) -> None:
    same_as_eager(
        lambda: Scene(Routing(**CHECKPOINTS[name]), (leaf(),), left_out=frozenset(left_out)), calls=2
    )


@pytest.mark.parametrize("name", ["not reentrant", "reentrant"])
def test_what_a_checkpoint_recomputes_is_not_kept(name: str) -> None:
    saved = []
    for options in (CHECKPOINTS[name], None):
        block = Block(**(options or {}))
        compiled = aotdist.compile(
            block.forward if options else lambda x, b=block: b.body(x) + x, backend="fx"
        )
        compiled(leaf(64, 4)).sum().backward()
        saved.append(compiled_call(compiled).artifacts[0].compilation.region.joint.split.saved_bytes)
    assert saved[0] < saved[1]


class Attending(Block):
    """Attention to what a buffer says, which it writes, in what is recomputed too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("mean", torch.zeros(4))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.add_(x.mean((0, 1)))
        y = self.down(self.up(x - self.mean))[:, None]
        return F.scaled_dot_product_attention(y, y, y)[:, 0]


@pytest.mark.parametrize("name", ["not reentrant", "reentrant", "selective"])
def test_attention_in_a_checkpoint_is_recomputed(name: str) -> None:
    """It is an operator that may draw, as dropout does, whose numbers are those of the first time."""
    same_as_eager(lambda: Scene(Attending(**CHECKPOINTS[name]), (leaf(2, 3, 4),)), calls=2)
    compiled = aotdist.compile(Attending(**CHECKPOINTS[name]), backend="fx")
    compiled(leaf(2, 3, 4)).sum().backward()
    backward = compiled.graphs[0]["backward"].graph
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert backward.find_nodes(op="call_function", target=flash)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_of_what_has_no_gradient() -> None:
    """Its parameters get none either, as in eager."""
    same_as_eager(lambda: Scene(Block(use_reentrant=True), (torch.randn(3, 4),)))


class Balanced(nn.Module):
    """Two blocks, each with a loss of its own that it hands out in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.way, self.last = way, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses: list[Any] = []

        def block(layer: nn.Module, x: torch.Tensor) -> Any:
            y = layer(x).sin()
            loss = y.square().mean()
            match self.way:
                case "a list":
                    losses.append(loss)
                case "an attribute":
                    self.last = loss
                case "the second part of a chunk":
                    y, loss = torch.cat([y, loss.expand_as(y)]).chunk(2)
                    losses.append(loss.sum())
                case "a result in a list":
                    return y, [loss]
                case "a result":
                    return y, loss
            return y

        for layer in self.layers:
            found: Any = checkpoint(block, layer, x, use_reentrant=True)
            x, *more = found if isinstance(found, tuple) else (found,)
            losses += more[0] if self.way == "a result in a list" else more
        return x.sum() + sum(losses, self.last)


def test_results_of_a_reentrant_checkpoint_have_a_history() -> None:
    """In eager it runs without gradients, and its results get them from what it recomputes."""
    same_as_eager(lambda: Scene(Balanced("a result"), (leaf(),)), calls=2)


def _returning_a_dictionary(x: torch.Tensor) -> torch.Tensor:
    found: Any = checkpoint(lambda x: {"y": x.sin()}, x, use_reentrant=True)
    return found["y"].sum() + x.sum()


def _calling_the_function(x: torch.Tensor) -> torch.Tensor:
    found: Any = CheckpointFunction.apply(torch.sin, False, x)
    return found.sum()


@pytest.mark.parametrize(
    "program",
    [
        *map(Balanced, ("a list", "an attribute", "the second part of a chunk", "a result in a list")),
        _returning_a_dictionary,
        _calling_the_function,
    ],
)
def test_what_else_a_reentrant_checkpoint_hands_out_is_refused(program: Callable[..., Any]) -> None:
    """In eager it has no gradient."""
    with pytest.raises(UnsupportedProgram, match=r"reentrant checkpoint(.|\n)*use_reentrant=False"):
        aotdist.compile(program, backend="fx")(leaf())


linear = nn.Linear(4, 4)
TRANSFORMS: dict[str, Callable[[], Scene]] = {
    "functional_call": lambda: Scene(
        lambda x, w: functional_call(linear, {"weight": w}, (x,)), (leaf(), leaf(4, 4))
    ),
    "grad of functional_call": lambda: Scene(
        lambda x, w: grad(lambda w: functional_call(linear, {"weight": w}, (x,)).sin().sum())(w),
        (leaf(), leaf(4, 4)),
    ),
    "vjp": lambda: Scene(lambda x: vjp(torch.sin, x)[1](x), (leaf(3),)),
    "jacfwd": lambda: Scene(lambda x: jacfwd(lambda x: x.sin() * x.sum())(x), (leaf(3),)),
    "vmap, other numbers for each": lambda: Scene(
        lambda x: vmap(lambda row: F.dropout(row, 0.5), randomness="different")(x), (leaf(),)
    ),
    "vmap, the same numbers for each": lambda: Scene(
        lambda x: vmap(lambda row: F.dropout(row, 0.5), randomness="same")(x), (leaf(),)
    ),
    "vmap of a write": lambda: Scene(lambda x: vmap(lambda row: (row * 1).add_(1))(x), (leaf(),)),
}


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_more_transforms_inside(name: str, around: Callable[[], Any]) -> None:
    same_as_eager(TRANSFORMS[name], calls=2, around=around)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_a_tracer_inside_is_refused() -> None:
    with pytest.raises(UnsupportedProgram, match="computed by a tracer of the program's own"):
        aotdist.compile(lambda x: torch.func.linearize(torch.sin, x)[1](x), backend="fx")(leaf(3))


# --- deterministic mode, and flags between calls --------------------------------------------------


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("fill", [True, False])
def test_deterministic_mode(fill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill)
    index = torch.tensor([0, 1, 0, 2])

    def program(x: torch.Tensor) -> Any:
        made = torch.empty(3, 4)
        summed = torch.zeros(3, 4).index_add(0, index, x)
        return (
            (made.isnan().all() if fill else made.fill_(1)),
            summed,
            x.new_zeros(3, 4).scatter_add(0, index[:, None].expand(4, 4), x),
        )

    same_as_eager(lambda: Scene(program, (leaf(4, 4),)), calls=2)


@pytest.mark.usefixtures("deterministic")
def test_what_is_not_deterministic_says_so_in_backward_too() -> None:
    index, x = torch.zeros(4, dtype=torch.int64), leaf(4, 4)
    program = aotdist.compile(lambda x: torch.cumsum(x, 0).put(index, x[0]), backend="fx")
    eager_raises = None
    for fn in (lambda x: torch.cumsum(x, 0).put(index, x[0]), program):
        try:
            fn(x).sum().backward()
            raised = None
        except RuntimeError as error:
            raised = str(error).partition(".")[0]
        assert fn is not program or raised == eager_raises
        eager_raises = raised


CHANGES: dict[str, Callable[[], Any]] = {
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": bfloat16,
    "default dtype": lambda: default_dtype(torch.float64),
    "deterministic": lambda: deterministic_algorithms(),
    "default device": lambda: torch.device("meta"),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
}


class default_dtype:  # noqa: N801  # a context
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *exc: Any) -> None:
        torch.set_default_dtype(torch.float32)


class deterministic_algorithms:  # noqa: N801  # a context
    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *exc: Any) -> None:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", CHANGES)
def test_another_state_takes_another_artifact_and_the_old_one_is_found_again(name: str) -> None:
    compiled = aotdist.compile(lambda x: x.sin() @ x.t(), backend="fx")
    x = leaf()
    for within in (False, True, False, True):
        if within:
            with CHANGES[name]():
                compiled(x)
        else:
            compiled(x)
        assert len(compiled_call(compiled).artifacts) <= 2
    assert len(compiled_call(compiled).artifacts) == 2


def test_new_tensors_are_made_where_a_context_says() -> None:
    compiled = aotdist.compile(lambda x: (torch.ones(3), x + 1), backend="fx")
    for device in ("cpu", "meta", "cpu"):
        with torch.device(device):
            made, y = compiled(torch.zeros(2, device="cpu"))
        assert made.device.type == device and y.device.type == "cpu"


def test_attention_is_computed_as_a_context_says() -> None:
    fn = partial(F.scaled_dot_product_attention, is_causal=True)
    compiled = aotdist.compile(lambda *qkv: fn(*qkv), backend="fx")
    q, k, v = (torch.randn(2, 4, 64, 32) for _ in range(3))
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(kernel):
            assert torch.equal(compiled(q, k, v), fn(q, k, v))


def test_attention_layers_take_the_fast_path_as_the_switch_says() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    compiled, x = aotdist.compile(lambda x: layer(x), backend="fx"), torch.randn(2, 3, 8)
    try:
        for fast in (True, False, True):
            torch.backends.mha.set_fastpath_enabled(fast)
            with torch.no_grad():
                assert torch.equal(compiled(x), layer(x))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert len(compiled.artifacts) == 2


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # by the context that turns it off
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_round_as_grad_mode_and_kernels_have_it(layer: type[nn.RNNBase]) -> None:
    rnn, x = layer(4, 4), torch.randn(3, 2, 4)
    compiled = aotdist.compile(lambda x: rnn(x)[0], backend="fx")
    for kernels in (True, False, True):
        for mode in (torch.enable_grad, torch.no_grad):
            with mode(), torch.backends.mkldnn.flags(enabled=kernels):
                assert torch.equal(compiled(x), rnn(x)[0])


def test_training_and_evaluation_take_turns() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    compiled = aotdist.compile(model, backend="fx")
    x = torch.randn(3, 4)
    for training in (True, False, True, False):
        model.train(training)
        torch.manual_seed(0)
        out = compiled(x)
        torch.manual_seed(0)
        assert torch.equal(out, model[1](model[0](x)))
    assert len(compiled_call(compiled).artifacts) == 2


@pytest.mark.parametrize("backend", ["fx", "triton"])
def test_a_mode_that_counts_operators(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees what runs, and nothing of how that is compiled; at the first call, too."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(8, 4, requires_grad=True)

    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x @ weight).relu() @ weight.t()

    def num_flops(call: Callable[..., torch.Tensor]) -> int:
        with FlopCounterMode(display=False) as counter:
            call(x, weight).sum().backward()
        return counter.get_total_flops()

    compiled = aotdist.compile(program, backend=backend)
    assert [num_flops(compiled) for _ in range(2)] == [num_flops(program)] * 2 != [0, 0]
