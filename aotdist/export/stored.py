"""Exported graphs in files.

The format is that of `aotdist.artifacts`: JSON in a zip, operators by their names, a checksum of each member.
Of symbolic sizes only those of the inputs are written; loading computes the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from aotdist.artifacts.archive import FORMAT, Manifest, check_versions, merged, open_archive, version_of
from aotdist.artifacts.archive import save as save_archive
from aotdist.artifacts.graphs import Graphs
from aotdist.artifacts.kinds import Shape
from aotdist.artifacts.live import GroupName, Live
from aotdist.artifacts.typed import damaged, made, only_ours, require
from aotdist.artifacts.values import Json, Values
from aotdist.codegen.fx import attribute_of
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.export.export_module import BackwardSignature, GraphSignature
from aotdist.files import refuse_unwritable
from aotdist.partition.builder import GraphBuilder
from aotdist.program import Graph, Slot
from aotdist.sizes import is_symbolic
from aotdist.torch_seam.functional import FakeTensorMode, quiet_fakes
from aotdist.torch_seam.groups import world_group_name
from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.proxies import call_with_primals_and_tangents, primals_and_values
from aotdist.torch_seam.symbols import expression, hint, is_open, new_symbol, shape_env
from aotdist.trace.numbers.symbols import symbolic_strides


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
        UnsupportedProgram: the graph contains something that a file cannot.
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


def _without_symbols(gm: GraphModule) -> Graph:
    """A copy of the graph without symbolic values, with slots named after its inputs and results."""
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


def _symbolic_inputs(gm: GraphModule) -> dict[str, Json]:
    """For each input with symbolic sizes: sizes and strides as numbers, and the names of the symbols.

    A symbol that the trace has specialised to a number has an empty name.
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


def _has_symbols(val: Any) -> bool:
    """Whether a value is a symbol, or has symbolic sizes."""
    if isinstance(val, (tuple, list)):
        return any(map(_has_symbols, val))
    return any(map(is_open, (*val.shape, *val.stride()) if isinstance(val, torch.Tensor) else (val,)))


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
    sizes = require(record["sizes"], dict[str, dict[str, Any]], "what is known of symbolic sizes")
    env = shape_env() if sizes else None
    fake_mode = FakeTensorMode(static_shapes=not sizes, shape_env=env)
    shapes = require(values.read(record["shapes"]), tuple[Shape, ...], "the shapes")
    gm = Graphs(values, fake_mode, shapes).read(record["graph"]).gm
    if env is not None:
        symbols: dict[str, Any] = {}
        for node in gm.graph.find_nodes(op="placeholder"):
            if node.name in sizes:
                node.meta["val"] = _symbolic(sizes[node.name], env, symbols, fake_mode, node.name)
    _propagate_values(gm, fake_mode)
    _call_as_joint(gm, record["joint"])
    signature = record["signature"]
    return Exported(gm, None if signature is None else _read_signature(signature, values, gm))


def _propagate_values(gm: GraphModule, fake_mode: FakeTensorMode) -> None:
    """Compute `meta["val"]` of nodes whose value has symbolic sizes."""

    def val_of(source: Node) -> Any:
        val = attribute_of(gm, source) if source.op == "get_attr" else source.meta["val"]
        return fake_mode.from_tensor(val) if type(val) is torch.Tensor else val

    with no_modes(), fake_mode, torch.no_grad(), quiet_fakes():
        for node in gm.graph.nodes:
            if node.op == "call_function" and node.meta["val"] is None:
                args, kwargs = map_arg((node.args, dict(node.kwargs)), val_of)
                node.meta["val"] = node.target(*args, **kwargs)


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


def _symbolic(
    json: Mapping[str, Json], env: Any, symbols: dict[str, Any], fake_mode: FakeTensorMode, name: str
) -> torch.Tensor:
    """A fake tensor with symbolic sizes; `symbols` are those of earlier inputs, by name."""
    names = require(json["names"], list[str | None], "the names of symbols")
    numbers = require(json["size"], list[int], "a size")
    size: list[Any] = []
    for dim, (symbol, number) in enumerate(zip(names, numbers, strict=True)):
        known = number if symbol is None else symbols.get(symbol)
        if known is None:
            known = new_symbol(env, number, f"{name}.size({dim})")
            if symbol:
                symbols[symbol] = known
        size.append(known)

    def stride_at(dim: int, number: int) -> int | torch.SymInt:
        return new_symbol(env, number, f"{name}.stride({dim})") if dim in json["open_strides"] else number

    stride = symbolic_strides(size, numbers, require(json["stride"], list[int], "strides"), stride_at)
    dtype = require(vars(torch).get(json["dtype"]), torch.dtype, "the dtype of an input")
    with fake_mode:
        tensor = torch.empty_strided(size, stride, dtype=dtype, device=torch.device(json["device"]))
    for symbol, made_of in zip(names, size, strict=True):
        if symbol == "":
            int(made_of)  # specialises the symbol, as the trace did after the tensor was made
    return tensor
