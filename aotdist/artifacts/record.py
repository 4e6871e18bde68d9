"""Writes a compilation as JSON, and reads it in another process, for a call that it fits.

Only what a trace finds out is written: the partitioned graphs, and the facts. Plans are derived from the
facts. The call for which a record is read is captured as usual, so tensors, modules and modes are guarded
as if it had been compiled for that call.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn

import torch

from aotdist.artifacts.graphs import Graphs, without_folder
from aotdist.artifacts.live import NOTHING_LIVE, Live
from aotdist.artifacts.signature import check_same, signature_of, steady_path, storages_of
from aotdist.artifacts.typed import Shape, damaged, only_ours, require
from aotdist.artifacts.values import Json, Values
from aotdist.capture.capture import capture
from aotdist.capture.captured import Captured, UserCall
from aotdist.codegen.ahead import LOADED, Ahead
from aotdist.codegen.contract import Backend, Emitted, Fusion
from aotdist.codegen.emit import EmittedHalves, Emitter
from aotdist.codegen.fx import FxBackend
from aotdist.convention import bases as synthetic_base
from aotdist.convention import dedupe
from aotdist.convention.bases import BasePlan
from aotdist.convention.stack import Plans
from aotdist.errors import InternalError, SignatureMismatch, UnsupportedProgram
from aotdist.facts import Facts
from aotdist.partition.gates import linked
from aotdist.passes.verify import verify, verify_split
from aotdist.pipeline import drawn_on
from aotdist.program import GRADIENT_ROLES, DistinctIdx, Graph, PrimalIdx, Program, Row, Slot, Split
from aotdist.runtime.backwards import Training
from aotdist.runtime.compilation import Compilation, Inference
from aotdist.runtime.derive import BackwardRequest, Joint, gradients
from aotdist.runtime.plan import NodePlan
from aotdist.settings import Settings
from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.trace.later_backwards import TracedDoubleBackward
from aotdist.trace.numbers.symbols import Symbols
from aotdist.trace.trace import Traced

_LOADED = "the program was loaded from an artifact, which holds no such backward"


def written(
    target: Any, compilation: Compilation, device_type: str, binaries: MutableMapping[str, bytes]
) -> Json:
    """A compilation as JSON.

    Args:
        target: the module or function.
        compilation: of one call, with the call's tensors.
        device_type: that of the target: `cuda`, `cpu`.
        binaries: machine code of kernels, by its SHA-256; that of this compilation is added.

    Raises:
        UnsupportedProgram: it contains something that cannot be written.
    """
    captured, traced = compilation.captured, compilation.traced
    _refuse_symbols(compilation)
    captured.arguments.refuse_objects("store", "pass its tensors, or close over it")
    values = Values(Live.of(captured, device_type), binaries)
    graphs = Graphs(values, traced.fake_mode)
    region = _region(compilation.region, values, graphs)
    emitted = {
        name: {
            "graph": graphs.written(each.call.graph),
            "fusion": values.written(_without_folders(each.call.fusion), "the report"),
        }
        for name, each in compilation.emitted().items()
        if isinstance(each.call, Ahead)
    }
    return {
        "name": captured.name,
        "signature": signature_of(target, captured, compilation.deduped, traced.program, values),
        "storages": storages_of(traced.facts.storages, traced.program),
        "closed_over": _closed_over(compilation),
        "settings": values.written(compilation.settings, "the settings"),
        "bases": values.written(compilation.bases, "the plan of what shares memory"),
        "facts": values.written(traced.facts, "the program"),
        "region": region,
        "emitted": emitted,
        "shapes": values.written(graphs.shapes(), "the graphs"),
    }


def _without_folders(fusion: Fusion) -> Fusion:
    kernels = (
        replace(kernel, sources=tuple(map(without_folder, kernel.sources))) for kernel in fusion.kernels
    )
    return replace(fusion, kernels=tuple(kernels))


def _refuse_symbols(compilation: Compilation) -> None:
    for count in compilation.traced.symbols.counts():
        raise UnsupportedProgram(
            f"the program counts in `{count.place.path}`, and an artifact would fit one value of it",
            stage="store",
            fix="count in a buffer (a tensor), or outside of the program",
        )
    if compilation.captured.in_backward.whole:
        raise UnsupportedProgram(
            "the backward changes something in Python (a hook counts), which an artifact cannot hold",
            stage="store",
            fix="count in a buffer (a tensor), or register the hook on a result, outside of the program",
        )
    if tuple(compilation.traced.symbols):
        raise UnsupportedProgram(
            "the program has symbolic sizes, which an artifact cannot hold",
            stage="store",
            fix="build it without `Settings(dynamic=True)` and `mark_dynamic`, and of jagged tensors with "
            "`Settings(dynamic=False)`: for one length",
        )


def _closed_over(compilation: Compilation) -> list[str]:
    """The names of closed-over tensors that became inputs during the trace."""
    captured, program = compilation.captured, compilation.traced.program
    found: list[str] = []
    for idx in compilation.lifted_inputs():
        if id(program.examples[idx]) not in captured.closed_over:
            raise UnsupportedProgram(
                "the program uses a tensor that nothing leads to, which an artifact cannot name",
                stage="store",
                fix="pass it as an argument, or let a module hold it as a buffer",
            )
        found.append(steady_path(program.ins[idx].path))
    return found


def _region(region: Training | Inference, values: Values, graphs: Graphs) -> Json:
    match region:
        case Inference(graph=graph):
            return {"graph": graphs.written(graph)}
        case Training(joint=joint):
            split = joint.split
            return {
                "cut": graphs.written(joint.cut),
                "by_choice": graphs.written(joint.by_choice),
                "forward": graphs.written(split.forward),
                "backward": graphs.written(split.backward),
                "saved": values.written(split.saved, "the split"),
                "saved_primals": values.written(split.saved_primals, "the split"),
                "saved_bytes": split.saved_bytes,
                "ahead": values.written(region.ahead, "the backward"),
                "meets_other_kinds": region.node.other_kinds,
            }


def settings_of(json: Json) -> Settings:
    """The settings of a record, with this process's own cache settings."""
    settings: Settings = require(Values(NOTHING_LIVE, {}).read(json["settings"]), Settings, "the settings")
    own = Settings.from_environment()
    return replace(settings, cache_folder=own.cache_folder, cache_bytes=own.cache_bytes)


def read(
    json: Json,
    call: UserCall,
    settings: Settings,
    device_type: str,
    binaries: MutableMapping[str, bytes],
) -> Compilation:
    """The compilation that was written as `json`, for a call.

    Args:
        json: the record.
        call: the call.
        settings: how it was compiled.
        device_type: as in `written`.
        binaries: machine code of kernels, by its SHA-256.

    Raises:
        SignatureMismatch: it is for other calls.
        BadArtifact: it is no record.
    """
    started = time.perf_counter()
    with ExitStack() as scope:
        captured = capture(call, settings, scope)
    values = Values(Live.of(captured, device_type), binaries)
    distinct, deduped = dedupe.lower(captured.program)
    with only_ours():
        bases: BasePlan = require(values.read(json["bases"]), BasePlan, "the plan of what shares memory")
        paths = require(json["closed_over"], list[str], "what is closed over")
        program = synthetic_base.lower(_with_closed_over(distinct, captured, paths), bases)
        called = signature_of(call.target, captured, deduped, program, values)
        check_same(captured.name, require(json["signature"], dict[str, str], "the signature"), called)
        facts: Facts = require(values.read(json["facts"]), Facts, "what the trace showed")
        if len(facts.inputs) != len(program.ins):
            raise damaged(f"the facts are of {len(facts.inputs)} inputs, and there are {len(program.ins)}")
        places = require(json["storages"], dict[str, str], "where tensors lie")
        check_same(captured.name, places, storages_of(facts.storages, program))
        traced, plans, region, backend = _read_region(json, captured, program, facts, settings, values)
        return Compilation(
            captured=captured,
            deduped=deduped,
            bases=bases,
            traced=traced,
            plans=plans,
            region=region,
            backend=backend,
            settings=settings,
            records=(),
            seconds={"load": time.perf_counter() - started},
        )


def _with_closed_over(
    program: Program[DistinctIdx], captured: Captured, paths: list[str]
) -> Program[DistinctIdx]:
    """`program` with the closed-over tensors that became inputs during the trace."""
    found = {steady_path(source.path): source for source in captured.all_closed_over().values()}
    for path in paths:
        if path not in found:
            raise SignatureMismatch(
                f"the artifact of `{captured.name}` reads `{path}`, which is not there",
                stage="store",
                fix="build the artifact for this program",
            )
    slots = Row[DistinctIdx, Slot]([*program.ins, *(Slot("primal", found[path].path) for path in paths)])
    examples = Row[DistinctIdx, torch.Tensor]([*program.examples, *(found[path].read() for path in paths)])
    return Program(program.fn, slots, examples)


def _read_region(
    json: Json,
    captured: Captured,
    program: Program[PrimalIdx],
    facts: Facts,
    settings: Settings,
    values: Values,
) -> tuple[Traced, Plans, Training | Inference, str]:
    """The compiled part of a record: its graphs are read, and its plans derived from the facts.

    Args:
        json: the record.
        captured: the call.
        program: the program, with the call's tensors.
        facts: what the trace showed.
        settings: how it was compiled.
        values: reads JSON.

    Returns:
        the trace, the plans, the region, and the name of the backend.
    """
    fake_mode, region = FakeTensorMode(), json["region"]
    shapes = require(values.read(json["shapes"]), tuple[Shape, ...], "the shapes")
    graphs = Graphs(values, fake_mode, shapes)
    graph = graphs.read(region["graph"] if "graph" in region else region["cut"])
    verify(graph, "reading a file")
    traced = Traced(program, graph, facts, fake_mode, Symbols(None, {}))
    plans = Plans.of(program, facts, drawn_on(graph))
    split = None if "graph" in region else _split(region, graphs, values)
    of = {"inference": graph} if split is None else {"forward": split.forward, "backward": split.backward}
    emitted = {
        name: _emitted(each, graphs, values).emitted_on(
            values.live.device_here(torch.device(values.live.device_type)),
            of[name],
            settings,
            f"{captured.name} {name}",
        )
        for name, each in json["emitted"].items()
    }
    backend: Backend = LOADED if emitted else FxBackend()
    emitter = Emitter(backend, captured.static_slots(), fake_mode, settings, captured.name)
    if split is None:
        inference = Inference(graph, emitted["inference"] if emitted else emitter.inference(graph))
        return traced, plans, inference, backend.name
    joint = Joint.of(traced, graph, linked(graph), replace(split, backward=graphs.read(region["by_choice"])))
    halves = _halves(joint.whole, emitted) if emitted else emitter.halves(split, joint.whole)
    training = Training.of_halves(
        traced,
        plans,
        replace(joint, split=split, lacks=_LOADED),
        _request(region, split, facts, values),
        halves,
        emitter,
        _no_double_backward,
        has_other_kinds=require(region["meets_other_kinds"], bool, "a flag"),
    )
    return traced, plans, training, backend.name


def _emitted(json: Json, graphs: Graphs, values: Values) -> Ahead:
    """A graph that calls kernels compiled for this machine's GPU."""
    return Ahead(graphs.read(json["graph"]), require(values.read(json["fusion"]), Fusion, "what was fused"))


def _split(json: Json, graphs: Graphs, values: Values) -> Split:
    split = Split(
        graphs.read(json["forward"]),
        graphs.read(json["backward"]),
        require(values.read(json["saved"]), tuple[Slot, ...], "what is saved"),
        require(values.read(json["saved_primals"]), dict[Slot, Slot], "what is saved"),
        require(json["saved_bytes"], int, "how much is saved"),
    )
    verify_split(split)
    return split


def _request(json: Json, split: Split, facts: Facts, values: Values) -> BackwardRequest:
    request = require(values.read(json["ahead"]), BackwardRequest, "the backward")
    taken = frozenset(slot for slot in split.backward.ins if slot.role in GRADIENT_ROLES)
    if gradients(facts, request) != taken or request.kinds:
        raise damaged("the backward takes other gradients than those that it is said to be for")
    return request


def _halves(whole: Graph, emitted: Mapping[str, Emitted]) -> EmittedHalves:
    """The compiled halves, whose kernels take tangents with the strides that were recorded."""
    tangents = {
        slot: tuple(node.meta["val"].stride())
        for slot, node in whole.named_placeholders().items()
        if slot.role == "tangent"
    }
    return EmittedHalves(emitted["forward"], emitted["backward"], tangents, {})


def _no_double_backward(traced: TracedDoubleBackward, plan: NodePlan) -> NoReturn:
    raise InternalError("a program without a trace has no such backward", stage="store")
