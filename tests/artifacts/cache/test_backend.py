"""A hit is what a miss is, bit for bit, and in its text; and what is not to be hit is not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import aotdist
from aotdist import api
from aotdist.artifacts.cache.backend import CachingBackend, caching
from aotdist.artifacts.cache.folder import Entry
from aotdist.artifacts.cache.key import own_files, process, refuse_foreign_lowerings, written
from aotdist.codegen.backend import resolve
from aotdist.codegen.inductor import InductorBackend
from aotdist.dynamo.backend import backend
from aotdist.errors import InternalError, UnsupportedProgram
from aotdist.settings import Settings
from aotdist.torch_seam.inductor import inductor_config
from aotdist.torch_seam.trees import pytree
from tests.artifacts.cache import cases_ranks
from tests.artifacts.cache.programs import (
    folder_of,
    mlp,
    refuse_to_compile,
    same,
    settings_in,
    stepped,
    trained,
)
from tests.artifacts.programs import PROGRAMS
from tests.codegen.captured import captured
from tests.ranks.harness import World

Warm = tuple[Path, tuple[Any, ...]]


@pytest.mark.usefixtures("compiles_nothing")
def test_a_hit_is_what_a_miss_is(warm: Warm) -> None:
    folder, shown = warm
    assert same(stepped(folder), shown)


@pytest.mark.usefixtures("compiles_nothing")
def test_the_report_names_what_was_found(warm: Warm) -> None:
    model, _ = trained(warm[0])
    assert "from the compile cache: forward, backward" in str(aotdist.explain(model))


def test_what_is_kept(warm: Warm) -> None:
    folder, _ = warm
    cache = folder_of(folder)
    kinds = sorted(cache.checked(each.key).about["what"] for each in cache.listed())
    assert kinds == ["backward", "forward", "joint", "toolchain"]
    assert all(each.num_bytes < 100_000 for each in cache.listed())


def test_only_the_owner_reads_it(warm: Warm) -> None:
    compiled = folder_of(warm[0]).path
    assert compiled.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in compiled.iterdir()} == {0o600}


def test_nothing_in_it_is_pickled(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise InternalError("something is unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    folder, shown = warm
    assert same(stepped(folder), shown)


CHANGED: dict[str, Any] = {
    "threads": lambda patch: patch.setattr(torch, "get_num_threads", lambda: 7),
    "default device": lambda patch: patch.setattr(torch, "get_default_device", lambda: "elsewhere"),
    "deterministic": lambda patch: patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True),
    "compiler": lambda patch: patch.setenv("CPATH", "/somewhere/else"),
}


@pytest.mark.usefixtures("compiles_nothing")
@pytest.mark.parametrize("what", CHANGED)
def test_another_environment_is_another_key(warm: Warm, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    CHANGED[what](monkeypatch)
    with pytest.raises(InternalError, match="something is compiled"):
        stepped(warm[0])


@pytest.mark.usefixtures("compiles_nothing")
def test_another_setting_of_inductors_is_another_key(warm: Warm) -> None:
    with inductor_config(max_fusion_size=3), pytest.raises(InternalError, match="something is compiled"):
        stepped(warm[0])


@pytest.mark.usefixtures("compiles_nothing")
def test_another_program_is_another_key(warm: Warm) -> None:
    model, x = mlp()
    model[1] = torch.nn.GELU(approximate="tanh")
    aotdist.compile(model, backend="inductor", settings=settings_in(warm[0]))
    with pytest.raises(InternalError, match="something is compiled"):
        model(x)


@pytest.mark.usefixtures("compiles_nothing")
def test_another_setting_is_another_key(warm: Warm) -> None:
    model, x = mlp()
    settings = {"cache_folder": str(warm[0]), "emulate_casts": True}
    aotdist.compile(model, backend="inductor", settings=settings)
    with pytest.raises(InternalError, match="something is compiled"):
        model(x)


def test_a_hit_with_a_constant(tmp_path: Path) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([1.0, 2.5, 4.0] * 5)

    x = torch.randn(15)
    for _ in range(2):
        compiled = aotdist.compile(program, backend="inductor", settings=settings_in(tmp_path))
        assert torch.equal(compiled(x), program(x))


def test_arguments_that_are_alike_are_not_taken_for_one(tmp_path: Path) -> None:
    """Read again, a graph must not say that two arguments of one shape share memory."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.sin() - y.cos()).softmax(-1)

    x, y = torch.randn(2, 6, 4).unbind()
    model = torch.nn.Linear(4, 4)
    results = []
    for _ in range(2):
        compiled = aotdist.compile(
            lambda x, y: program(model(x), model(y)), backend="inductor", settings=settings_in(tmp_path)
        )
        results.append(compiled(x, y))
    torch.testing.assert_close(results[0], program(model(x), model(y)))
    assert torch.equal(*results)


def test_no_cache_for_backends_that_have_nothing_to_keep() -> None:
    assert isinstance(caching(resolve("inductor"), Settings()), CachingBackend)
    assert isinstance(caching(resolve("inductor"), Settings(cache_bytes=0)), InductorBackend)
    assert caching(resolve("fx"), Settings()) == resolve("fx")


def test_symbolic_sizes_are_compiled_as_ever(tmp_path: Path) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    settings = Settings(dynamic=True, cache_folder=str(tmp_path))
    compiled = aotdist.compile(program, backend="inductor", settings=settings)
    for length in (4, 6):
        x = torch.randn(length)
        torch.testing.assert_close(compiled(x), program(x))
    kinds = {folder_of(tmp_path).checked(each.key).about["what"] for each in folder_of(tmp_path).listed()}
    assert kinds <= {"toolchain"}


def test_a_size_that_turns_out_to_be_a_number_is_one_in_what_is_kept(tmp_path: Path) -> None:
    x = torch.ones(4, 3)
    aotdist.mark_dynamic(x, 0)
    compiled = aotdist.compile(
        lambda x: x.view(2, 2, 3) + 1, backend="inductor", settings=Settings(cache_folder=str(tmp_path))
    )
    with pytest.raises(UnsupportedProgram, match=r"`args\[0\].size\(0\)` was marked .* only works for 4"):
        compiled(x)


def with_another_content(entry: Entry) -> Entry:
    return replace(entry, content=[1, {"is": "nonsense"}])


def with_another_library(entry: Entry) -> Entry:
    return replace(entry, binaries=tuple(b"no library" for _ in entry.binaries))


def with_an_unknown_operator(entry: Entry) -> Entry:
    if isinstance(entry.content, dict):
        text = entry.content["text"].replace("def call", "gone = torch.ops.aotdist_gone.operator\ndef call")
        return replace(entry, content=entry.content | {"text": text})
    return entry


@pytest.mark.parametrize("change", [with_another_content, with_another_library, with_an_unknown_operator])
def test_an_entry_that_cannot_be_used_is_made_anew(warm: Warm, change: Callable[[Entry], Entry]) -> None:
    """What stands in it is not what this aotdist writes, though its checksum is right."""
    folder, shown = warm
    cache = folder_of(folder)
    for each in cache.listed():
        found = cache.checked(each.key)
        if found.about["what"] != "toolchain":
            cache.keep(change(found))
    with pytest.warns(UserWarning, match="is ignored") as caught:
        results, _, _ = stepped(folder)
    assert all(map(torch.equal, results, shown[0]))
    assert len(caught) == 1


def test_a_lowering_of_the_users_is_not_kept() -> None:
    """What is generated then depends on code that no key knows."""
    import torch._inductor.lowering as lowering

    operator = torch.ops.aten.sin.default
    refuse_foreign_lowerings(frozenset([operator]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lowering.lowerings, operator, lambda x: x)
        with pytest.raises(UnsupportedProgram, match="lowered by a function of yours"):
            refuse_foreign_lowerings(frozenset())


def test_a_pass_of_the_users_is_not_kept() -> None:
    with inductor_config(post_grad_custom_post_pass=lambda graph: None):
        with pytest.raises(UnsupportedProgram, match="post_grad_custom_post_pass"):
            process()


def test_what_nobody_knows_of_a_node_is_not_kept() -> None:
    graph = captured(lambda x: [x + 1], [torch.ones(2)])
    next(iter(graph.gm.graph.nodes)).meta["new"] = 1
    with pytest.raises(UnsupportedProgram, match="carries"):
        written(graph, graph.placeholders()[0].meta["val"].fake_mode)


@pytest.mark.sweep
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_runs_the_same_after_a_hit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results() -> tuple[list[torch.Tensor], str]:
        target, args = PROGRAMS[name]()
        compiled = aotdist.compile(target, backend="inductor", settings=settings_in(tmp_path))
        torch.manual_seed(1)
        found = [each for each in pytree.tree_leaves(compiled(*args)) if isinstance(each, torch.Tensor)]
        sum(each.sum() for each in found if each.requires_grad).backward()
        parameters = target.parameters() if isinstance(target, torch.nn.Module) else ()
        grads = [parameter.grad for parameter in parameters]
        return [*found, *grads], api.compiled_call(compiled).source

    cold, source = results()
    for method in ("check", "emit", "prepare_joint"):
        monkeypatch.setattr(InductorBackend, method, refuse_to_compile)
    warm, source_again = results()
    assert source == source_again
    assert all(map(torch.equal, warm, cold))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # tapes are recorded on tensors that are no leaves
def test_graphs_and_tapes_of_dynamo_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_in(tmp_path)

    def results() -> list[torch.Tensor | None]:
        torch._dynamo.reset()
        model, x = mlp()
        options = {"backend": "inductor", "cache_folder": settings.cache_folder}
        torch.compile(model, backend=backend, options=options)(x).square().sum().backward()
        weight = torch.ones(4, 3, requires_grad=True)
        loss = (x @ weight).tanh().sum()
        with aotdist.compile_backward(backend="inductor", settings=settings, dynamic=False):
            loss.backward()
        return [weight.grad, *(parameter.grad for parameter in model.parameters())]

    cold = results()
    for method in ("check", "emit", "prepare_joint"):
        monkeypatch.setattr(InductorBackend, method, refuse_to_compile)
    assert all(map(torch.equal, results(), cold))
    torch._dynamo.reset()


@pytest.mark.ranks
def test_one_rank_compiles_and_the_others_take_it(world2: World, tmp_path: Path) -> None:
    emitted = world2.run(cases_ranks.compiled_by, str(tmp_path), timeout=110.0)
    assert sum(emitted) == 3


@pytest.mark.ranks
def test_a_deeper_model_takes_what_a_shallow_one_left(world2: World, tmp_path: Path) -> None:
    told = world2.run(cases_ranks.deeper_than_compiled, str(tmp_path), timeout=110.0)
    shallow, deep, reports = zip(*told, strict=True)
    assert deep == (0, 0) and sorted(shallow) == [0, 5]
    for report in reports:
        assert "compiled once for equal layers: forward 1 for 5 calls, backward 4 for 9 calls" in report


def test_an_entry_is_of_the_code_that_wrote_it() -> None:
    """All of our code: what is emitted is decided in other rooms than the cache's."""
    files = {path.name for path in own_files()}
    assert {"inductor.py", "regions.py", "trace.py", "protocol.py", "environment.py"} <= files
