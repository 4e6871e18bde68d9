"""Wrong use: one clear error of ours, with the user's line, and everything as it was."""

from __future__ import annotations

import copy
import functools
import re
import tempfile
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization

import aotdist
from aotdist import BadSettings, UnsupportedProgram
from tests.semantics.observation import Scene, same_as_eager

compiled = functools.partial(aotdist.compile, backend="fx")
DYNAMIC, EAGERLY = "`dynamic=True`, or `aotdist.mark_dynamic(args[0], ", "`aotdist.disable()` runs such calls"


class Writes(nn.Module):
    """Writes a buffer and draws a random number before it fails."""

    def __init__(self, fail: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(2))
        self.fail = fail

    def forward(self, x: torch.Tensor) -> Any:
        self.count.add_(1)
        self.extra = x + torch.rand(2)
        return self.fail(x * self.weight)


def number(x: torch.Tensor) -> Any:
    return float(x.sum()) * x


def branch(x: torch.Tensor) -> Any:
    return x if x.sum() > 0 else -x


def size(x: torch.Tensor) -> Any:
    return x if x.nonzero().shape[0] < 2 else -x


@pytest.mark.parametrize(
    ("fail", "line"),
    [(number, "float(x.sum())"), (branch, "if x.sum() > 0"), (size, "x.nonzero()")],
)
def test_needing_data_names_the_line_and_leaves_everything_alone(fail: Callable[..., Any], line: str) -> None:
    model = compiled(Writes(fail))
    x = torch.randn(2, requires_grad=True)
    rng, parameters = torch.get_rng_state(), dict(model.named_parameters())
    with pytest.raises(UnsupportedProgram) as raised:
        model(x)
    assert line in str(raised.value) and "test_wrong_use.py" in str(raised.value)
    assert "torch.where" in str(raised.value)
    assert torch.equal(rng, torch.get_rng_state())
    assert dict(model.named_parameters()) == parameters
    assert type(model.count) is torch.Tensor and torch.equal(model.count, torch.zeros(2))
    assert not hasattr(model, "extra")
    assert torch.is_grad_enabled() and x.grad is None
    assert not model._forward_hooks and not nn.modules.module._global_forward_hooks


def test_an_exception_of_the_users_passes_through() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    model = compiled(Writes(fails))
    with pytest.raises(KeyError, match="mine"):
        model(torch.ones(2))
    assert torch.equal(model.count, torch.zeros(2))


def test_a_leaf_that_cannot_be_lifted() -> None:
    with pytest.raises(UnsupportedProgram, match=r"`options\['mode'\]` is a .*iterator"):
        compiled(lambda x, options: x)(torch.ones(1), options={"mode": iter([1])})


def test_views_of_what_lies_elsewhere_now_are_refused_by_name() -> None:
    def move(x: torch.Tensor) -> torch.Tensor:
        row = x[0]
        part = row[1:]
        row.data = torch.zeros(4)
        return part

    x = torch.ones(2, 3)
    with pytest.raises(UnsupportedProgram, match="a view is used whose base .* was given another storage"):
        compiled(move)(x)
    assert torch.equal(x, torch.ones(2, 3))


def test_disjoint_views_of_one_buffer_are_fine() -> None:
    base, expected = torch.zeros(4), torch.tensor([1.0, 1.0, 0.0, 0.0])
    compiled(lambda a, b: a.add_(1) + b)(base[:2], base[2:])
    assert torch.equal(base, expected)


def test_zeros_without_memory_are_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    (zeros,) = torch.autograd.grad(torch.sgn(x).sum(), x)
    with pytest.raises(UnsupportedProgram, match=r"`args\[0\]` is zeros without memory"):
        compiled(torch.cos)(zeros)
    assert torch.equal(compiled(torch.cos)(zeros.clone()), torch.ones(3))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csc])
def test_sparse_inputs_are_refused_and_the_fix_computes_the_same(layout: torch.layout) -> None:
    dense, weight = torch.randn(4, 5).relu(), torch.randn(5, 3, requires_grad=True)
    given = dense.to_sparse(layout=layout).requires_grad_()
    with pytest.raises(UnsupportedProgram, match=rf"`args\[0\]` has layout {layout}") as refused:
        compiled(torch.sparse.mm)(given, weight)
    assert "zeros.index_add(0, row, values[:, None] * dense[column])" in str(refused.value)

    def product(row: torch.Tensor, column: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(4, 3).index_add(0, row, values[:, None] * weight[column])

    row, column = dense.nonzero().unbind(1)
    torch.testing.assert_close(
        compiled(product)(row, column, dense[row, column]), torch.sparse.mm(given, weight)
    )


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def _quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:.*nested tensors", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("make", "kind"), [(_nested, "nested"), (_quantised, "quantised")])
def test_other_kinds_of_tensors_are_refused(make: Callable[[], torch.Tensor], kind: str) -> None:
    given = make()
    with pytest.raises(UnsupportedProgram, match=rf"`args\[0\]` is a {kind} tensor"):
        compiled(lambda x: x)(given)
    with pytest.raises(UnsupportedProgram, match=f"`given` is a {kind} tensor"):
        compiled(lambda x: x + given.sum())(torch.ones(1))


_without_a_fake = torch.library.custom_op(
    "aotdist_tests::without_a_fake", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
)
_LIBRARY = torch.library.Library("aotdist_tests", "FRAGMENT")
_LIBRARY.define("for_the_cpu(Tensor x) -> Tensor")
_LIBRARY.impl("for_the_cpu", lambda x: x * 2, "CPU")

WITHOUT_A_FAKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "aotdist_tests::without_a_fake": lambda x: _without_a_fake(x),
    "aotdist_tests.for_the_cpu.default": lambda x: torch.ops.aotdist_tests.for_the_cpu(x),
    "aten._nested_tensor_from_tensor_list.default": lambda x: torch.nested.nested_tensor([x, x]),
}


@pytest.mark.parametrize("operator", WITHOUT_A_FAKE)
def test_operators_that_need_memory_are_refused_by_name(operator: str) -> None:
    program = WITHOUT_A_FAKE[operator]
    with pytest.raises(UnsupportedProgram, match=f"`{operator}` cannot be computed without data") as caught:
        compiled(program)(torch.ones(2))
    assert "test_wrong_use.py" in str(caught.value)


def without_grad(fn: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return fn()


@pytest.mark.parametrize(
    "program",
    [
        lambda x: ((view := x.t()), x.t_(), view.split(1)[0])[2],
        lambda x: ((view := x.t()), x.t_(), without_grad(view.t))[2],
    ],
)
def test_a_view_from_before_its_base_was_reshaped(program: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(3, 4, requires_grad=True) * 1.5
    with pytest.raises(UnsupportedProgram, match="whose base was reshaped in place after it was made"):
        compiled(program)(x)
    assert x.shape == (3, 4)


def test_a_user_without_a_home_has_a_cache_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert Path(aotdist.Settings().cache_folder).parent == Path(tempfile.gettempdir())


@pytest.mark.parametrize(
    ("options", "near"),
    [
        ({"backend": "inducto"}, "did you mean 'inductor'"),
        ({"backend": 3}, "a backend cannot be a int"),
        ({"backend": "fx", "settings": {"partitions": "default"}}, "did you mean `partition`"),
        ({"backend": "fx", "settings": {"partition": "mincut"}}, "choose one of auto, default, min_cut"),
        ({"backend": "fx", "settings": {"max_artifacts": 0}}, "positive"),
    ],
)
def test_bad_settings_know_near_misses(options: dict[str, Any], near: str) -> None:
    with pytest.raises(BadSettings, match=near):
        aotdist.compile(lambda x: x, **options)


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("partition", ["min_cut"], "choose one of auto, default, min_cut"),
        ("bucket_bytes", "64", "give a whole number"),
        ("bucket_bytes", 1.5, "give a whole number"),
        ("bucket_bytes", float("nan"), "give a whole number"),
        ("bucket_bytes", True, "give a whole number"),
        ("bucket_bytes", None, "give a whole number"),
        ("loss_chunk_bytes", "64", "give a whole number or None"),
        ("loss_chunk_bytes", -1, "give a positive number"),
        ("max_artifacts", "8", "give a whole number"),
        ("rank_timeout_s", "300", "give a number"),
        ("rank_timeout_s", None, "give a number"),
        ("rank_timeout_s", float("nan"), "give a positive number"),
        ("cache_bytes", "2G", "give a whole number"),
        ("cache_bytes", None, "give a whole number"),
        ("cache_folder", 5, "give a string"),
        ("cache_folder", None, "give a string"),
        ("cache_folder", "", "name a folder"),
        ("disabled_passes", "cleanup", "give a set of strings"),
        ("disabled_passes", [1], "give a set of strings"),
        ("disabled_passes", None, "give a set of strings"),
        ("verify", "false", "give True or False"),
        ("dynamic", "no", "give True or False"),
        ("dynamic", None, "give True or False"),
        ("cuda_graphs", 1, "give True or False"),
        ("backward_autocast", None, "give a string"),
        ("backward_autocast", "xyz:bfloat16", "choose off, same_as_forward, or pairs"),
        ("backward_autocast", "cpu:bfloat61", "choose off, same_as_forward, or pairs"),
    ],
)
def test_a_setting_of_another_type_is_named(name: str, value: Any, fix: str) -> None:
    said = f"settings.{name} is {value!r}\n  fix: {fix}"
    with pytest.raises(BadSettings, match=re.escape(said)):
        aotdist.compile(lambda x: x, backend="fx", settings={name: value})


def test_settings_are_taken_as_they_are_meant(tmp_path: Path) -> None:
    settings = aotdist.Settings.make(disabled_passes=["cleanup"], cache_folder=tmp_path, rank_timeout_s=5)
    assert settings.disabled_passes == frozenset({"cleanup"})
    assert settings.cache_folder == str(tmp_path)
    assert settings.fingerprint() == replace(settings, rank_timeout_s=5.0).fingerprint()


@pytest.mark.parametrize("settings", ["min_cut", ["x"], {1: 2}, 3, aotdist.Settings])
def test_what_are_no_settings(settings: Any) -> None:
    with pytest.raises(BadSettings, match=re.escape(f"settings are {settings!r}")):
        aotdist.compile(lambda x: x, backend="fx", settings=settings)


def test_an_unknown_pass_is_named() -> None:
    fn = compiled(lambda x: x * 2, settings={"disabled_passes": frozenset({"overlp"})})
    with pytest.raises(BadSettings, match="did you mean `overlap`"):
        fn(torch.ones(1))


def test_what_is_not_callable() -> None:
    with pytest.raises(BadSettings, match="cannot compile a Tensor"):
        aotdist.compile(torch.ones(1))


def test_a_schedule_alone() -> None:
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=1.0), 1)
    with pytest.raises(BadSettings, match=r"`StepLR\.step`.* no tensors"):
        aotdist.compile(schedule.step)


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTDIST_PARTITION", "best")
    with pytest.raises(BadSettings, match="settings.partition is 'best'"):
        aotdist.compile(lambda x: x, backend="fx")


def test_many_signatures_warn_once_and_say_what_changes() -> None:
    fn = compiled(lambda x: x * 2, settings={"max_artifacts": 2, "dynamic": False})
    fn(torch.ones(1))
    fn(torch.ones(2))
    with pytest.warns(UserWarning, match=r"`args\[0\]` .*float32\[2\].*float32\[3\].*mark_dynamic\(args"):
        fn(torch.ones(3))
    fn(torch.ones(4))


@pytest.mark.parametrize(
    ("program", "calls", "dynamic", "says", "leaves_out"),
    [
        (lambda x: x * 2, [(torch.ones(3, n),) for n in (3, 5, 7)], False, f"{DYNAMIC}1)", "strides"),
        (
            lambda x: x * 2,
            [(torch.ones(3, n)[:, :2],) for n in (3, 5, 7)],
            False,
            f"{DYNAMIC}0, 1)",
            "[3, 7]",
        ),
        (lambda x: x * 2, [(torch.ones(3, n)[:, :2],) for n in (3, 5, 7)], False, "strides [7, 1]", "[3, 7]"),
        (lambda x: x * int(x.shape[0]), [(torch.ones(n),) for n in (3, 5, 7)], True, EAGERLY, DYNAMIC),
        (lambda x, k: x * k, [(torch.ones(3), k) for k in (2, 3, 4)], False, EAGERLY, DYNAMIC),
    ],
)
def test_what_keeps_changing_comes_with_what_helps(
    program: Any, calls: Any, dynamic: bool, says: str, leaves_out: str
) -> None:
    fn = compiled(program, settings={"max_artifacts": 2, "dynamic": dynamic})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for call in calls:
            fn(*call)
    (text,) = (str(one.message) for one in seen)
    assert says in text and EAGERLY in text and leaves_out not in text


def test_side_effects_are_reported_on_request() -> None:
    class Logs(nn.Module):
        last = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = types.SimpleNamespace(num_rows=len(x))
            return x

    model = compiled(Logs(), settings={"report_side_effects": True})
    with pytest.warns(UserWarning, match="`last` was assigned while capturing"):
        model(torch.ones(1))


def test_lazy_modules_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedProgram, match="`weight` has no shape yet"):
        compiled(torch.nn.LazyLinear(3))(torch.ones(2, 4))


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    "convert",
    [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 4))],
    ids=["script", "trace"],
)
def test_modules_of_torchscript_are_refused_by_name(convert: Callable[[nn.Module], Any]) -> None:
    module = convert(nn.Linear(4, 4))
    with pytest.raises(UnsupportedProgram, match=r"`0` is a \w+ of TorchScript"):
        compiled(nn.Sequential(module))(torch.ones(2, 4))
    with pytest.raises(UnsupportedProgram, match="`module` is a .* of TorchScript"):
        compiled(lambda x: module(x))(torch.ones(2, 4))
    with pytest.raises(UnsupportedProgram, match="the module is a .* of TorchScript"):
        compiled(module)(torch.ones(2, 4))


def test_an_average_over_all_batches_is_refused() -> None:
    """As `torch.optim.swa_utils.update_bn` takes it: each batch counts by the number of those before."""
    module = nn.Sequential(nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(UnsupportedProgram, match=r"`float\(tensor\)` needs the value"):
        compiled(module)(torch.ones(2, 4))
    assert module[0].num_batches_tracked == 0
    module.eval()
    assert torch.equal(compiled(module)(torch.ones(2, 4)), nn.BatchNorm1d(4).eval()(torch.ones(2, 4)))


def test_sparse_results_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedProgram, match="makes a sparse tensor"):
        compiled(lambda x: x.to_sparse())(torch.ones(2, 4))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")
def test_the_first_call_of_an_observer_is_refused_and_later_ones_are_eagers() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).train()
    module.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    quantization.prepare_qat(module, inplace=True)
    with pytest.raises(UnsupportedProgram, match="an observer .* is called for the first time"):
        compiled(copy.deepcopy(module))(torch.ones(2, 4))
    module(torch.ones(2, 4))
    same_as_eager(lambda: Scene(copy.deepcopy(module), (torch.randn(2, 4),)), calls=2)


def test_a_view_of_what_was_detached_and_written_is_refused() -> None:
    def detach(x: torch.Tensor) -> torch.Tensor:
        view = x.squeeze()
        x.detach_()
        x.add_(1)
        return view * 2

    x = torch.ones(1, 2, requires_grad=True) * 1.5
    with pytest.raises(UnsupportedProgram, match="a view is used whose base was detached in place"):
        compiled(detach)(x)
    assert x.requires_grad
    assert x._version == 0


def test_writing_what_only_as_strided_shows_is_refused() -> None:
    def reach(x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided((3, 4), (8, 2)).copy_(x)
        return made.as_strided((2, 2), (2, 1)).add_(1)

    with pytest.raises(UnsupportedProgram, match="writes memory that `as_strided` shows"):
        compiled(reach)(torch.zeros(3, 4))


def _double_grad(weight: torch.Tensor) -> None:
    weight.grad *= 2


class HooksItsWeight(nn.Module):
    """As transformers' tensor parallelism does with norms: a hook at the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.is_hooked = False

    def hook(self) -> None:
        self.weight.register_post_accumulate_grad_hook(_double_grad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_hooked:
            self.is_hooked = True
            self.hook()
        return (x * self.weight).sum()


def test_a_hook_for_an_accumulated_gradient_is_registered_outside() -> None:
    model = compiled(HooksItsWeight())
    with pytest.raises(UnsupportedProgram, match="`weight` gets a hook for its accumulated gradient"):
        model(torch.ones(2))
    model = HooksItsWeight()
    model.is_hooked = True
    model.hook()
    compiled(model)(torch.ones(2)).backward()
    assert model.weight.grad.tolist() == [2.0, 2.0]


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    model = compiled(nn.Linear(2, 2))
    model(torch.ones(1, 2))
    with pytest.raises(BadSettings, match="does not exist"):
        model.explain(html=tmp_path / "none" / "report.html")
    with pytest.raises(BadSettings, match="is a folder"):
        aotdist.explain(model, html=tmp_path)
    with pytest.raises(BadSettings, match="`html` is ''"):
        aotdist.explain(model, html="")


def test_a_backend_that_returns_nothing_is_named() -> None:
    def mine(gm: torch.fx.GraphModule, examples: Any) -> Any:
        gm.graph.lint()

    with pytest.raises(BadSettings, match=r"the backend `.*\.mine` returned a NoneType"):
        aotdist.compile(lambda x: x * 2, backend=mine)(torch.ones(2))


def test_a_backend_that_returns_too_few_results_is_named_with_the_graph() -> None:
    def mine(gm: torch.fx.GraphModule, examples: Any) -> Any:
        return lambda *args: gm(*args)[1:]

    model = aotdist.compile(nn.Linear(2, 2), backend=mine)
    said = "made of the forward graph of `Linear` returned a tuple of 0, and the graph has 1 result\n"
    with pytest.raises(BadSettings, match=said):
        model(torch.ones(1, 2))


OF_TORCH_COMPILE = {
    "mode": ("reduce-overhead", "cuda_graphs"),
    "fullgraph": (True, "always compiled as one graph"),
    "options": ({"max_autotune": True}, "pass `settings`"),
    "disable": (False, 'backend="eager"'),
    "dinamic": (True, "it takes `backend`, `dynamic` and `settings`"),
}


@pytest.mark.parametrize("name", OF_TORCH_COMPILE)
def test_arguments_of_torch_compile_are_refused_by_their_counterparts(name: str) -> None:
    value, fix = OF_TORCH_COMPILE[name]
    with pytest.raises(BadSettings, match=f"`{name}` is not an argument") as raised:
        aotdist.compile(nn.Linear(2, 2), **{name: value})
    assert fix in str(raised.value)


@pytest.mark.parametrize("verb", [aotdist.compile, lambda target: aotdist.load("none.aot", target)])
def test_a_class_is_refused(verb: Callable[[Any], Any]) -> None:
    with pytest.raises(BadSettings, match=r"cannot \w+ the class Linear.*\n  fix: pass a module, `Linear\("):
        verb(nn.Linear)
    with pytest.raises(BadSettings, match=r"cannot \w+ a NoneType"):
        verb(None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((5, 0), "cannot mark sizes of a int"),
        ((torch.ones(2), "a"), "has no dimension 'a'"),
        ((torch.ones(2), 0.0), "has no dimension 0.0"),
        ((torch.ones(2), 1), "has no dimension 1 to mark as dynamic\n  fix: name dimensions from -1 to 0"),
    ],
)
def test_what_cannot_be_marked(given: Any, said: str) -> None:
    with pytest.raises(BadSettings, match=said):
        aotdist.mark_dynamic(*given)


def _linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16))


def _example() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Linear(2, 2), (torch.ones(1, 2),)


WRONG_ARGUMENTS: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "load, no path": (lambda path: aotdist.load(path, nn.Linear(2, 2)), None, "`path` is None"),
    "build, no path": (lambda path: aotdist.build(_example, path), 3, "`path` is 3"),
    "build, of a module": (
        lambda make: aotdist.build(make, "linear.aot"),
        nn.Linear(2, 2),
        "`make` is a Linear, and not a function",
    ),
    "build, of a tuple": (lambda make: aotdist.build(make, "linear.aot"), _example(), "`make` is a tuple"),
    "build, ranks as text": (
        lambda size: aotdist.build(_example, "linear.aot", world_size=size),
        "2",
        "a world has no '2' ranks",
    ),
    "profile, half a step": (
        lambda steps: aotdist.profile(lambda: None, steps=steps),
        2.5,
        "steps=2.5 profiles nothing",
    ),
    "profile, warmup as text": (
        lambda warmup: aotdist.profile(lambda: None, warmup=warmup),
        "1",
        "warmup='1' is no number of steps",
    ),
    "profile, no path": (lambda path: aotdist.profile(lambda: None, path=path), 3, "`path` is 3"),
    "to_float8, of a function": (aotdist.to_float8, _linear, "cannot convert layers of a function"),
    "to_float8, filter": (lambda filter: aotdist.to_float8(_linear(), filter=filter), 3, "`filter` is 3"),
    "sparsify_24, of a function": (aotdist.sparsify_24, _linear, "cannot convert layers of a function"),
    "sparsify_24, filter": (lambda filter: aotdist.sparsify_24(_linear(), filter), "0", "`filter` is '0'"),
    "sparsify_24, decay as text": (
        lambda decay: aotdist.sparsify_24(_linear(), decay=decay),
        "a",
        "decay='a' is no strength",
    ),
    "sparsify_24, decay that is no number": (
        lambda decay: aotdist.sparsify_24(_linear(), decay=decay),
        float("nan"),
        "decay=nan is no strength",
    ),
}


_ARGS = (torch.ones(1, 16),)


def _identity(gm: torch.fx.GraphModule, _: Any) -> Any:
    return gm


def _compile_a_backward(dynamic: Any) -> None:
    with aotdist.compile_backward(backend="fx", dynamic=dynamic):
        pass


WRONG_ARGUMENTS |= {
    "aot_function, no function": (lambda fn: aotdist.aot_function(fn, _identity), None, "`fn` is None"),
    "aot_function, a name": (
        lambda name: aotdist.aot_function(torch.sin, name),
        "fx",
        "`fw_compiler` is 'fx'",
    ),
    "aot_function, a name for backwards": (
        lambda name: aotdist.aot_function(torch.sin, _identity, name),
        "fx",
        "`bw_compiler` is 'fx'",
    ),
    "aot_function, no partition": (
        lambda cut: aotdist.aot_function(torch.sin, _identity, partition_fn=cut),
        None,
        "`partition_fn` is None",
    ),
    "aot_function, decompositions": (
        lambda table: aotdist.aot_function(torch.sin, _identity, decompositions=table),
        [torch.sin],
        "`decompositions` is a list",
    ),
    "aot_module, of a function": (
        lambda fn: aotdist.aot_module(fn, _identity),
        _linear,
        "`mod` is a function\n  fix: pass a module, or use `aot_function` for a function",
    ),
    "aot_module_simplified, a tensor": (
        lambda x: aotdist.aot_module_simplified(_linear(), x, _identity),
        _ARGS[0],
        "`args` is a Tensor",
    ),
    "aot_module_simplified, a name": (
        lambda name: aotdist.aot_module_simplified(_linear(), _ARGS, name),
        "fx",
        "`fw_compiler` is 'fx'",
    ),
    "aot_export_module, loss by name": (
        lambda loss: aotdist.aot_export_module(_linear(), _ARGS, trace_joint=True, output_loss_index=loss),
        "0",
        "result '0' is no loss",
    ),
    "aot_export_joint_simple, no function": (
        lambda fn: aotdist.aot_export_joint_simple(fn, _ARGS, trace_joint=False),
        None,
        "cannot export a NoneType",
    ),
    "compile, dynamic": (
        lambda dynamic: aotdist.compile(_linear(), dynamic=dynamic),
        "yes",
        "settings.dynamic is 'yes'\n  fix: give True or False",
    ),
    "freeze, eager": (
        lambda backend: aotdist.freeze(_linear().eval(), backend=backend),
        "eager",
        'backend="eager" compiles nothing',
    ),
    "compile_backward, dynamic": (_compile_a_backward, "auto", "`dynamic` is 'auto'"),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_an_argument_of_another_type_is_named(name: str) -> None:
    call, given, said = WRONG_ARGUMENTS[name]
    with pytest.raises(BadSettings, match=re.escape(said)):
        call(given)
