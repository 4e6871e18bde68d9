"""Exported graphs in files.

The format is that of `aotdist.artifacts`: JSON in a zip, operators by their names, a checksum of each member.
Graphs with symbolic sizes are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch.fx import GraphModule

from aotdist.artifacts.archive import FORMAT, Manifest, check_versions, merged, open_archive, version_of
from aotdist.artifacts.archive import save as save_archive
from aotdist.artifacts.graphs import Graphs
from aotdist.artifacts.live import GroupName, Live
from aotdist.artifacts.typed import Shape, damaged, made, only_ours, require
from aotdist.artifacts.values import Json, Values
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.export.export_module import BackwardSignature, GraphSignature
from aotdist.files import refuse_unwritable
from aotdist.program import Graph, Slot
from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.torch_seam.groups import world_group_name
from aotdist.torch_seam.proxies import call_with_primals_and_tangents, primals_and_values


class Exported(NamedTuple):
    """A graph and its signature, which is None for a graph of `aot_export_joint_simple`."""

    graph_module: GraphModule
    signature: GraphSignature | None


def save(exported: GraphModule | tuple[GraphModule, GraphSignature | None], path: str | Path) -> None:
    """Write an exported graph, and its signature, to a file.

    Parameters and buffers are inputs of the graph, so they are not in the file. An existing file is replaced
    atomically.

    Args:
        exported: result of `aot_export_module`, `aot_export_joint_simple` or `load`; the graph may have been
            edited.

    Raises:
        BadSettings: `exported` is something else, or the file cannot be written.
        UnsupportedProgram: the graph has symbolic sizes, or contains something else that a file cannot.
    """
    gm, signature = _parts(exported)
    refuse_unwritable(Path(path))
    _refuse_calls(gm)
    values = _values()
    graphs = Graphs(values, FakeTensorMode())
    record: Json = {
        "graph": graphs.written(_with_slots(gm)),
        "joint": primals_and_values(gm),
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
    """Read an exported graph, and its signature, from a file.

    Nothing is unpickled, imported or traced. A graph may call any registered operator: load only what you
    would run.

    Raises:
        BadArtifact: the file is damaged, was saved by other versions, contains no exported graph, or calls an
            operator that is not registered.
    """
    archive = open_archive(Path(path), "exported")
    check_versions(Path(path), archive.manifest)
    with only_ours():
        return _read(archive.record_of(0))


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
    """Writes and reads the values in graphs; of process groups, only the one of all ranks."""
    world = world_group_name()
    groups = {} if world is None else {world: GroupName(None, 0)}
    return Values(Live("cpu", {}, groups, {}), {})


def _with_slots(gm: GraphModule) -> Graph:
    """The graph with slots named after its inputs and results."""
    ins = [Slot("primal", node.name) for node in gm.graph.find_nodes(op="placeholder")]
    results: Any = gm.graph.output_node().args[0]
    return Graph(gm, tuple(ins), tuple(Slot("output", f"out[{k}]") for k in range(len(results))))


def _signature(signature: GraphSignature, values: Values) -> Json:
    fields = {f.name: getattr(signature, f.name) for f in dataclasses.fields(signature)}
    backward = fields["backward_signature"]
    fields["backward_signature"] = None if backward is None else dataclasses.asdict(backward)
    return values.written(fields, "the signature")


def _read(record: Mapping[str, Json]) -> Exported:
    values = _values()
    shapes = require(values.read(record["shapes"]), tuple[Shape, ...], "the shapes")
    gm = Graphs(values, FakeTensorMode(), shapes).read(record["graph"]).gm
    _call_as_joint(gm, record["joint"])
    signature = record["signature"]
    return Exported(gm, None if signature is None else _read_signature(signature, values, gm))


def _call_as_joint(gm: GraphModule, counts: Json) -> None:
    if counts is None:
        return
    num_primals, num_values = require(counts, list[int], "how a joint graph is called")
    results: Any = gm.graph.output_node().args[0]
    num_arguments = len(gm.graph.find_nodes(op="placeholder"))
    if not (0 <= num_primals <= num_arguments and 0 <= num_values <= len(results)):
        raise damaged("a joint graph has fewer arguments or results than it says")
    call_with_primals_and_tangents(gm, num_primals, num_values)


def _read_signature(json: Json, values: Values, gm: GraphModule) -> GraphSignature:
    fields: dict[str, Any] = values.read(json)
    backward = fields["backward_signature"]
    read = None if backward is None else made(BackwardSignature, backward)
    signature: GraphSignature = made(GraphSignature, {**fields, "backward_signature": read})
    inputs = {*signature.inputs_to_parameters, *signature.inputs_to_buffers, *signature.user_inputs}
    if inputs != {node.name for node in gm.graph.find_nodes(op="placeholder")}:
        raise damaged("the signature does not name the inputs of its graph")
    outputs = {*signature.buffers_to_mutate, *signature.parameters_to_mutate}
    outputs |= {*signature.user_inputs_to_mutate, *filter(None, signature.user_outputs)}
    if read is not None:
        outputs |= {read.loss_output, *read.gradients_to_parameters, *read.gradients_to_user_inputs}
    if not outputs <= {node.name for node in gm.graph.output_node().all_input_nodes}:
        raise damaged("the signature names results that its graph has not")
    return signature
