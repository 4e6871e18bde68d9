"""Exported graphs in files: saved as data, checked when they are loaded, and the same graphs again.

The file is that of `aotdist.store`: JSON in a zip, operators by their names, a checksum of each member. Of a
graph with symbolic sizes only the inputs' sizes are written; what follows from them is found out again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from aotdist.codegen.fx import attribute_of
from aotdist.errors import BadArtifact, BadSettings, UnsupportedProgram
from aotdist.export.signature import BackwardSignature, GraphSignature
from aotdist.files import refuse_unwritable
from aotdist.joint.symbols import symbolic_strides
from aotdist.partition.builder import GraphBuilder
from aotdist.program import Graph, Slot
from aotdist.sizes import is_symbolic
from aotdist.store.archive import FORMAT, Manifest, check_versions, open_archive, version_of
from aotdist.store.archive import save as save_archive
from aotdist.store.graphs import Graphs
from aotdist.store.live import GroupName, Live
from aotdist.store.ranks import merged
from aotdist.store.values import Json, Values
from aotdist.torch_seam.functional import FakeTensorMode, quiet_fakes
from aotdist.torch_seam.groups import world_group_name
from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.proxies import call_with_primals_and_tangents, primals_and_values
from aotdist.torch_seam.symbols import expression, hint, is_open, new_symbol, shape_env


class Exported(NamedTuple):
    """What a file holds.

    Attributes:
        graph_module: the graph.
        signature: what it takes and returns; None of a graph by `aot_export_joint_simple`.
    """

    graph_module: GraphModule
    signature: GraphSignature | None


def save(exported: GraphModule | tuple[GraphModule, GraphSignature | None], path: str | Path) -> None:
    """Write an exported graph, and its signature, to a file.

    Parameters and buffers are inputs of the graph: they are not in the file. A file that is there is replaced
    when all is written.

    Args:
        exported: what `aot_export_module`, `aot_export_joint_simple` or `load` returned; the graph may have
            been edited since.
        path: of the file.

    Raises:
        BadSettings: `exported` is something else, or the file cannot be written.
        UnsupportedProgram: the graph holds something that a file cannot hold.
    """
    gm, signature = _parts(exported)
    refuse_unwritable(Path(path))
    _refuse_calls(gm)
    values = _values()
    graph = _without_symbols(gm)
    graphs = Graphs(values, FakeTensorMode())
    record: Json = {
        "graph": graphs.written(graph),
        "joint": primals_and_values(gm),
        "sizes": _symbolic_inputs(gm),
        "signature": None if signature is None else _signature(signature, values),
        "shapes": values.written(graphs.shapes(), "the graph"),
    }
    manifest = Manifest(
        format=FORMAT,
        kind="exported",
        name=type(gm).__name__,
        target="cpu",
        backend="fx",
        world_size=1,
        versions={name: version_of(name) for name in ("aotdist", "torch")},
        members={},
    )
    save_archive(Path(path), manifest, merged([record]), {})


def load(path: str | Path) -> Exported:
    """The graph in a file, and its signature: those that were saved.

    Nothing is unpickled, imported or traced. A graph calls any operator that is registered: load what you
    would run.

    Args:
        path: of the file.

    Raises:
        BadArtifact: the file is damaged, was saved by other versions, holds something else than an exported
            graph, or calls an operator that is not there.
    """
    archive = open_archive(Path(path), "exported")
    check_versions(Path(path), archive.manifest)
    try:
        return _read(archive.record_of(0))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadArtifact(
            f"{path} is written in another way than ours ({type(error).__name__}: {error})",
            stage="store",
            fix="save it again with this aotdist",
        ) from error


def _parts(exported: Any) -> tuple[GraphModule, GraphSignature | None]:
    match exported:
        case GraphModule():
            return exported, None
        case (GraphModule() as gm, (GraphSignature() | None) as signature):
            return gm, signature
        case _:
            raise BadSettings(
                f"cannot save a {type(exported).__name__}",
                stage="store",
                fix="pass what `aot_export_module` or `aot_export_joint_simple` returned",
            )


def _refuse_calls(gm: GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.op in ("call_module", "call_method"):
            raise UnsupportedProgram(
                f"`{node.name}` calls the {node.op.removeprefix('call_')} `{node.target}`, which a file "
                "cannot hold",
                stage="store",
                fix="let the graph call operators alone, as it was exported",
            )


def _values() -> Values:
    """Writes and reads what stands in graphs; process groups are known if they are of all ranks."""
    world = world_group_name()
    groups = {} if world is None else {world: GroupName(None, 0)}
    return Values(Live("cpu", {}, groups, {}), {})


def _without_symbols(gm: GraphModule) -> Graph:
    """The graph with no value where it says symbols, and slots named as its inputs and results are."""
    builder = GraphBuilder(gm)
    for node in gm.graph.nodes:
        if node.op == "output":
            break
        new = builder.placeholder(node) if node.op == "placeholder" else builder.copy(node)
        val = node.meta.get("val")
        if is_symbolic(val) or _has_symbols(val):
            new.meta["val"] = None
    ins = [Slot("primal", node.name) for node in builder.graph.find_nodes(op="placeholder")]
    results: Any = map_arg(gm.graph.output_node().args[0], builder.env.__getitem__)
    outs = [Slot("output", f"out[{k}]") for k in range(len(results))]
    return builder.finish(results, ins, outs)


def _has_symbols(val: Any) -> bool:
    if isinstance(val, (tuple, list)):
        return any(map(_has_symbols, val))
    return isinstance(val, torch.Tensor) and any(map(is_open, (*val.shape, *val.stride())))


def _symbolic_inputs(gm: GraphModule) -> dict[str, Json]:
    """Of each input with symbols: its sizes and strides as they were, and by name where they are symbols.

    A symbol of which the trace made a number has no name, and still counts among those that have one.
    """
    found: dict[str, Json] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        val = node.meta.get("val")
        if _has_symbols(val):
            found[node.name] = {
                "names": [_name(size) for size in val.shape],
                "size": [hint(size) for size in val.shape],
                "stride": [hint(stride) for stride in val.stride()],
                "open_strides": [dim for dim, stride in enumerate(val.stride()) if is_open(stride)],
                "dtype": str(val.dtype).removeprefix("torch."),
                "device": str(val.device),
            }
    return found


def _name(size: int | torch.SymInt) -> str | None:
    if not is_symbolic(size):
        return None
    return expression(size) if is_open(size) else ""


def _signature(signature: GraphSignature, values: Values) -> Json:
    fields = {f.name: getattr(signature, f.name) for f in dataclasses.fields(signature)}
    backward = fields["backward_signature"]
    fields["backward_signature"] = None if backward is None else dataclasses.asdict(backward)
    return values.written(fields, "the signature")


def _read(record: Mapping[str, Json]) -> Exported:
    values = _values()
    sizes: Mapping[str, Json] = record["sizes"]
    env = shape_env() if sizes else None
    fake_mode = FakeTensorMode(static_shapes=not sizes, shape_env=env)
    gm = Graphs(values, fake_mode, values.read(record["shapes"])).read(record["graph"]).gm
    if env is not None:
        symbols: dict[str, Any] = {}
        for node in gm.graph.find_nodes(op="placeholder"):
            if node.name in sizes:
                node.meta["val"] = _symbolic(sizes[node.name], env, symbols, fake_mode, node.name)
        _find_out(gm, fake_mode)
    if record["joint"] is not None:
        call_with_primals_and_tangents(gm, *record["joint"])
    if record["signature"] is None:
        return Exported(gm, None)
    fields: dict[str, Any] = values.read(record["signature"])
    backward = fields["backward_signature"]
    fields["backward_signature"] = None if backward is None else BackwardSignature(**backward)
    return Exported(gm, GraphSignature(**fields))


def _symbolic(
    json: Mapping[str, Json], env: Any, symbols: dict[str, Any], fake_mode: FakeTensorMode, name: str
) -> torch.Tensor:
    """A fake tensor with symbols among its sizes; those of the same name are the same."""
    size: list[Any] = []
    for dim, (symbol, number) in enumerate(zip(json["names"], json["size"], strict=True)):
        known = number if symbol is None else symbols.get(symbol)
        if known is None:
            known = new_symbol(env, number, f"{name}.size({dim})")
            if symbol:
                symbols[symbol] = known
        size.append(known)

    def stride_at(dim: int, number: int) -> int | torch.SymInt:
        return new_symbol(env, number, f"{name}.stride({dim})") if dim in json["open_strides"] else number

    stride = symbolic_strides(size, json["size"], json["stride"], stride_at)
    dtype, device = getattr(torch, json["dtype"]), torch.device(json["device"])
    with fake_mode:
        tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
    for symbol, made in zip(json["names"], size, strict=True):
        if symbol == "":
            int(made)  # asking makes a number of it, as the trace did once the tensor was there
    return tensor


def _find_out(gm: GraphModule, fake_mode: FakeTensorMode) -> None:
    """Let each node say its value again: it follows from those of the inputs."""

    def val_of(node: Node) -> Any:
        if node.op != "get_attr":
            return node.meta["val"]
        held = attribute_of(gm, node)
        return fake_mode.from_tensor(held) if isinstance(held, torch.Tensor) else held

    for node in gm.graph.nodes:
        if node.op == "call_function" and node.meta["val"] is None:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), val_of)
            with no_modes(), fake_mode, torch.no_grad(), quiet_fakes():
                node.meta["val"] = node.target(*args, **kwargs)
