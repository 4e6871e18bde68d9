"""What is loaded is what was exported: graph, signature, results."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.artifacts.graphs import without_folder
from aotdist.errors import BadArtifact, BadSettings, UnsupportedProgram
from aotdist.export import aot_export_joint_simple, aot_export_module, load, save
from aotdist.torch_seam.trees import pytree
from tests.export.modules import CASES, Case, Linear

each_case_and_kind = pytest.mark.parametrize(
    ("case", "joint"),
    [
        pytest.param(case, joint, id=f"{name}-{'joint' if joint else 'forward'}")
        for name, case in CASES.items()
        for joint in (False, True)
        if not (joint and case.loss is None)
    ],
)
META = ("phase", "module", "seq_nr", "function")


def exported(case: Case, *, joint: bool = False):
    torch.manual_seed(0)
    module, args = case.make(), case.args()
    loss = case.loss if joint else None
    gm, signature = aot_export_module(
        module, args, trace_joint=joint, output_loss_index=loss, kwargs=case.kwargs
    )
    state = [*module.parameters(), *module.buffers()]
    if len(state) != len(signature.parameters) + len(signature.buffers):
        state = [value for _, value in module.named_parameters(remove_duplicate=False)]
        state += [value for _, value in module.named_buffers(remove_duplicate=False)]
    flat = [*state, *pytree.tree_leaves((args, case.kwargs))]
    return (gm, signature), [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]


def assert_same_results(found, wanted) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert type(a) is type(b)
        if isinstance(b, torch.Tensor):
            assert torch.equal(a, b) and (a.dtype, a.stride()) == (b.dtype, b.stride())
        else:
            assert a == b


def described(val: Any) -> Any:
    if isinstance(val, (tuple, list)):
        return [described(part) for part in val]
    if isinstance(val, torch.Tensor):
        return tuple(map(str, val.shape)), tuple(map(str, val.stride())), val.dtype, val.device
    return str(val)


def assert_same_graph(found: torch.fx.GraphModule, wanted: torch.fx.GraphModule) -> None:
    assert found.code == wanted.code
    for a, b in zip(found.graph.nodes, wanted.graph.nodes, strict=True):
        assert (a.name, a.op, a.target) == (b.name, b.op, b.target)
        assert described(a.meta.get("val")) == described(b.meta.get("val")), a.name
        assert [a.meta.get(key) for key in META] == [b.meta.get(key) for key in META]
        assert a.meta.get("source", "") == without_folder(b.meta.get("source", ""))


@each_case_and_kind
def test_a_module_comes_back(case: Case, joint: bool, tmp_path: Path) -> None:
    (gm, signature), flat = exported(case, joint=joint)
    save((gm, signature), tmp_path / "graph.aot")
    found = load(tmp_path / "graph.aot")
    assert found.signature == signature
    assert_same_graph(found.graph_module, gm)
    assert_same_results(found.graph_module(*flat), gm(*flat))


def test_gradients_of_what_is_loaded_train(tmp_path: Path) -> None:
    """The signature leads from the results to the gradients that eager's backward leaves."""
    torch.manual_seed(0)
    module, x = Linear(), torch.randn(2, 3)
    save(aot_export_module(module, (x,), trace_joint=True, output_loss_index=0), tmp_path / "graph.aot")
    gm, signature = load(tmp_path / "graph.aot")
    parameters = dict(module.named_parameters())
    results = gm(*(parameters[name].detach() for name in signature.parameters), x)
    names = [node.name for node in gm.graph.output_node().args[0]]
    module(x)[0].backward()
    for name, parameter in signature.backward_signature.gradients_to_parameters.items():
        assert torch.equal(results[names.index(name)], parameters[parameter].grad)


@pytest.mark.parametrize("joint", [False, True], ids=["forward", "joint"])
def test_a_function_comes_back_with_its_convention(joint: bool, tmp_path: Path) -> None:
    args = (torch.randn(3, requires_grad=True), torch.randn(3), 2)
    gm = aot_export_joint_simple(lambda x, y, k: (x.sin() * y, x + k), args, trace_joint=joint)
    save(gm, tmp_path / "graph.aot")
    found, signature = load(tmp_path / "graph.aot")
    assert signature is None
    assert_same_graph(found, gm)
    flat = [args[0].detach(), args[1], 2]
    call = ([flat, [torch.ones(3), torch.ones(3)]],) if joint else (flat,)
    outs = [module(*call[0]) for module in (found, gm)]
    assert pytree.tree_structure(outs[0]) == pytree.tree_structure(outs[1])
    assert_same_results(pytree.tree_leaves(outs[0]), pytree.tree_leaves(outs[1]))


def test_constants_and_branches_come_back(tmp_path: Path) -> None:
    def program(x):
        y = torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,))
        return (y * torch.tensor([1.0, 2.0, 3.0]),)

    gm = aot_export_joint_simple(program, (torch.ones(3),), trace_joint=False)
    save(gm, tmp_path / "graph.aot")
    found, _ = load(tmp_path / "graph.aot")
    for x in (torch.ones(3), -torch.ones(3)):
        assert_same_results(found(x), gm(x))


def test_an_edited_graph_is_saved_as_it_is_now(tmp_path: Path) -> None:
    gm = aot_export_joint_simple(lambda x: (x.sin(),), (torch.ones(3),), trace_joint=False)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        node.target = torch.ops.aten.cos.default
    gm.recompile()
    save(gm, tmp_path / "graph.aot")
    assert torch.equal(load(tmp_path / "graph.aot").graph_module(torch.ones(3))[0], torch.ones(3).cos())


def test_nothing_is_traced_when_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, flat = exported(CASES["deep"], joint=True)
    save(pair, tmp_path / "graph.aot")
    monkeypatch.setattr("aotdist.export.trace.trace", None)
    assert_same_results(load(tmp_path / "graph.aot").graph_module(*flat), pair[0](*flat))


# --- what is refused ------------------------------------------------------------------------------


def rewritten(path: Path, change) -> None:
    with zipfile.ZipFile(path) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, data in change(contents).items():
            file.writestr(name, data)


def manifest(**fields: Any):
    def change(contents):
        known = json.loads(contents["manifest.json"])
        return contents | {"manifest.json": json.dumps(known | fields).encode()}

    return change


RECORD = "variants/0.json"
DAMAGED = {
    "a byte": (lambda c: c | {RECORD: c[RECORD].replace(b"tanh", b"sinh")}, f"{RECORD} is damaged"),
    "a member": (lambda c: {k: v for k, v in c.items() if k != RECORD}, f"{RECORD} is missing"),
    "the manifest": (lambda c: c | {"manifest.json": b"["}, "cannot be read"),
    "another format": (manifest(format=1), "has format 1.*\n.*\n.*save it again"),
    "another torch": (manifest(versions={"torch": "2.0.0"}), "saved with torch 2.0.0, and here is 2"),
    "another aotdist": (manifest(versions={"aotdist": "9.9"}), "saved with aotdist 9.9"),
    "another kind": (
        manifest(kind="pickled"),
        "`Manifest.kind` is 'pickled', and not one of compiled, exported",
    ),
}


@pytest.mark.parametrize(("change", "reason"), DAMAGED.values(), ids=list(DAMAGED))
def test_damage_is_named(change, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.aot"
    save(exported(CASES["linear"])[0], path)
    rewritten(path, change)
    with pytest.raises(BadArtifact, match=reason):
        load(path)


def with_record(path: Path, change) -> None:
    """A file whose checksums are right, and whose record is another."""

    def rewrite(contents):
        record = json.loads(contents[RECORD])
        change(record["record"])
        data = json.dumps(record).encode()
        known = json.loads(contents["manifest.json"])
        known["members"][RECORD] = hashlib.sha256(data).hexdigest()
        return contents | {RECORD: data, "manifest.json": json.dumps(known).encode()}

    rewritten(path, rewrite)


def _node(record, name: str):
    return next(node for node in record["graph"]["nodes"] if node["name"] == name)


FORGED = {
    "an operator that is not there": (
        lambda r: _node(r, "tanh")["target"].update(name="aten.tanhh.default"),
        "calls the operator aten.tanhh.default, which is not there",
    ),
    "a function that is not listed": (
        lambda r: _node(r, "tanh").update(target={"is": "function", "name": "eval"}),
        "written in another way than ours",
    ),
    "a method": (
        lambda r: _node(r, "tanh").update(op="call_method"),
        "the kind of a node is 'call_method', and not one of placeholder, ",
    ),
    "no graph": (lambda r: r.pop("graph"), "written in another way than ours"),
}


@pytest.mark.parametrize(("change", "reason"), FORGED.values(), ids=list(FORGED))
def test_what_is_no_record_of_ours_is_refused(change, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.aot"
    save(exported(CASES["linear"])[0], path)
    with_record(path, change)
    with pytest.raises(BadArtifact, match=reason):
        load(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadArtifact, match=r"nothing\.aot is no whole artifact: it cannot be read"):
        load(tmp_path / "nothing.aot")


def test_compiled_and_exported_are_told_apart(tmp_path: Path) -> None:
    graph, program = tmp_path / "graph.aot", tmp_path / "program.aot"
    save(exported(CASES["linear"])[0], graph)
    with pytest.raises(BadArtifact, match="exported.*\n.*\n.*`aotdist.export.load`"):
        aotdist.load(graph, Linear())
    aotdist.build(lambda: (nn.Linear(3, 3), (torch.ones(2, 3),)), program)
    with pytest.raises(BadArtifact, match="compiled.*\n.*\n.*`aotdist.load`"):
        load(program)


@pytest.mark.parametrize("value", [None, nn.Linear(3, 3), (1, 2)], ids=["none", "module", "tuple"])
def test_only_what_was_exported_is_saved(value, tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="cannot save a"):
        save(value, tmp_path / "graph.aot")
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="does not exist"):
        save(torch.fx.symbolic_trace(nn.Linear(3, 3)), tmp_path / "none" / "graph.aot")


def test_calls_of_modules_are_refused(tmp_path: Path) -> None:
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(UnsupportedProgram, match="`_0` calls the module `0`"):
        save(gm, tmp_path / "graph.aot")


def test_functions_of_the_users_are_refused_by_node(tmp_path: Path) -> None:
    gm = aot_export_joint_simple(lambda x: (x.sin(),), (torch.ones(3),), trace_joint=False)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
        node.target = lambda x: x
    with pytest.raises(UnsupportedProgram, match="`sin` holds a builtins.function"):
        save(gm, tmp_path / "graph.aot")


def test_symbolic_sizes_are_refused(tmp_path: Path) -> None:
    pair = aot_export_module(nn.Linear(3, 4), (torch.ones(4, 3),), trace_joint=False, dynamic_shapes=True)
    with pytest.raises(UnsupportedProgram, match="has symbolic sizes.*\n.*\n.*without `dynamic_shapes`"):
        save(pair, tmp_path / "graph.aot")
    assert not list(tmp_path.iterdir())


def test_there_is_no_pickle_in_it(tmp_path: Path) -> None:
    save(exported(CASES["views"])[0], tmp_path / "graph.aot")
    with zipfile.ZipFile(tmp_path / "graph.aot") as file:
        assert sorted(file.namelist()) == ["manifest.json", RECORD]
        assert all(json.loads(file.read(name)) for name in file.namelist())


def test_every_field_of_the_signature_is_written(tmp_path: Path) -> None:
    (gm, signature), _ = exported(CASES["buffers are written"], joint=True)
    save((gm, signature), tmp_path / "graph.aot")
    found = load(tmp_path / "graph.aot").signature
    for field in dataclasses.fields(signature):
        assert getattr(found, field.name) == getattr(signature, field.name), field.name
        assert type(getattr(found, field.name)) is type(getattr(signature, field.name))
