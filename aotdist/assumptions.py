"""From a call to a trace: over the bases that its inputs need, with symbols or numbers, for one call or more.

`trace_call` runs the user's program as often as it takes to know how to trace it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, TypeAlias, TypeVar

import torch
from torch.fx import Node

from aotdist.capture.arguments import fakes_of
from aotdist.capture.assignments import Assignments
from aotdist.capture.capture import Captured, Returned, UserCall, capture
from aotdist.capture.constants import is_constant, same_constant
from aotdist.capture.origins import raised_at
from aotdist.capture.source import Source
from aotdist.capture.watched import assign
from aotdist.codegen.ahead import TargetBackend
from aotdist.codegen.contract import Backend, Decompositions
from aotdist.codegen.fx import print_graph
from aotdist.convention import bases as synthetic_base
from aotdist.convention import dedupe
from aotdist.convention.bases import NO_BASES, BasePlan
from aotdist.convention.needed_bases import Writes, plan_bases
from aotdist.errors import AotdistError, BadSettings, InternalError, UnsupportedProgram
from aotdist.facts import Facts, NotATensor
from aotdist.passes.linear_losses import WHOLE
from aotdist.program import DistinctIdx, Graph, PrimalIdx, Program, Row, Slot
from aotdist.report.progress import StageTimes
from aotdist.settings import Settings
from aotdist.sizes import concrete, numbers_of_data
from aotdist.subclasses.protocol import Plain, Recipe, is_real, leaves, plain_tensors, rebuild, recipe_of
from aotdist.torch_seam.ambient import autocast_off, autocast_only
from aotdist.torch_seam.control_flow import fast_paths_on
from aotdist.torch_seam.functional import UnsupportedOperatorException, is_fake, memory_of
from aotdist.torch_seam.modes import class_functions_off, users_modes_off
from aotdist.torch_seam.own_attributes import own_attributes
from aotdist.torch_seam.symbols import SYMBOLIC, computes_exactly, hint, symbols_in
from aotdist.torch_seam.trees import pytree
from aotdist.torch_seam.undo import raise_interrupt
from aotdist.trace.context import TraceOptions
from aotdist.trace.failures import asks_for_data, is_of_the_program
from aotdist.trace.later_backwards import LaterBackwards, Traces
from aotdist.trace.recorder import Recorder
from aotdist.trace.strided import LooksAround
from aotdist.trace.trace import Traced, trace


@dataclass(frozen=True, slots=True)
class Job:
    """What is compiled, and how; see `aotdist.pipeline.compile_call`.

    Args:
        call: the call.
        backend: turns graphs into callables.
        settings: how to compile.
        symbolic: try symbolic sizes, if the call, settings or marks ask for them.
        finds_out: let the program choose by data of this call, see `aotdist.trace.numbers.data_guards`.
        counts: places of numbers that symbols are to stand for.
        counted: such numbers among the arguments, by path.
        opens: let dimensions differ that `call.guess` names.
    """

    call: UserCall
    backend: Backend
    settings: Settings
    symbolic: bool = True
    finds_out: bool = True
    counts: tuple[Source, ...] = ()
    counted: tuple[str, ...] = ()
    opens: bool = False

    def needs_symbols(self) -> bool:
        """Whether it is of no use without symbols."""
        return bool(self.counts or self.counted or self.opens)


T = TypeVar("T")

_Inputs: TypeAlias = tuple[Row[DistinctIdx, Slot], Row[DistinctIdx, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What a trace takes for granted. One that contradicts it is made anew, with what it showed.

    Args:
        symbolic: sizes can be symbols, where they are asked for. Many of PyTorch's operators (linear algebra,
            Fourier transforms, losses) take none.
        bases: which of the inputs share memory, one of them written.
        writes: what traces showed of writes, by which bases are planned: which inputs are written, and around
            which of them the program reaches in their storage (`as_strided`).
        inputs: the distinct inputs, with the closed-over tensors that a trace met.
        of_data: why sizes and numbers may depend on data: what refused them; None while none do.
        failure: why sizes are numbers though symbols were asked for, if a trace with symbols failed.
    """

    symbolic: bool
    bases: BasePlan = NO_BASES
    writes: Writes = Writes()
    inputs: _Inputs | None = None
    of_data: UnsupportedProgram | None = None
    failure: Exception | None = None

    def around(self, job: Job, inputs: _Inputs, example: torch.Tensor, slot: Slot) -> Assumptions:
        """With a program that reaches memory around `example`, an input that may be a new one."""
        slots, examples = inputs
        at = next((idx for idx, each in examples.enumerate() if each is example), None)
        if at is None:
            at, inputs = DistinctIdx(len(examples)), (Row([*slots, slot]), Row([*examples, example]))
        writes = self.writes.and_around(at)
        return replace(
            self, inputs=inputs, writes=writes, bases=plan_bases(Program(job.call.run, *inputs), writes)
        )

    def after(self, job: Job, traced: Traced) -> Assumptions:
        """With the inputs and writes that a trace showed; another one is needed if the bases are others."""
        inputs = _distinct(traced, self.bases, self.inputs)
        program = Program(job.call.run, *inputs)
        writes = self.writes.and_of(program, traced.facts, self.bases)
        symbolic = bool(tuple(traced.symbols))
        return replace(
            self, symbolic=symbolic, inputs=inputs, writes=writes, bases=plan_bases(program, writes)
        )

    def without(self, error: Exception, *, has_symbols: bool) -> Assumptions | None:
        """Without what an error of a trace contradicts; None if that is nothing."""
        # Without symbols, PyTorch's fakes find out by real tensors what an operator makes.
        lacks_fake = isinstance(error.__cause__, UnsupportedOperatorException)
        if has_symbols and (lacks_fake or not isinstance(error, AotdistError)):
            return replace(self, symbolic=False, failure=error, of_data=None)
        if isinstance(error, UnsupportedProgram) and self.of_data is None and asks_for_data(error):
            return replace(self, of_data=error)
        return None


class _Contradicted(Exception):
    """A trace contradicts what it took for granted; the program's changes in Python are undone.

    Args:
        instead: what to take for granted instead.
    """

    def __init__(self, instead: Assumptions) -> None:
        super().__init__()
        self.instead = instead


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call, and its trace.

    Args:
        captured: the call as a program of flat tensors.
        deduped: which of these are the same.
        traced: the trace.
        bases: which of its inputs share memory.
        before: what was there before, where the program left objects of its own.
    """

    captured: Captured
    deduped: dedupe.DedupePlan
    traced: Traced
    bases: BasePlan
    before: Assignments

    def returned(self) -> Returned:
        """How its result is put together, and what it assigns."""
        return Returned.of(self.traced.facts)


def trace_call(job: Job, times: StageTimes, on_failure: ExitStack) -> TracedCall:
    """Trace the program, and once more if its changes in Python would make the trace fit this call only.

    The second trace has symbols for numbers that the program counts in, or starts from what this call leaves:
    flags which say that something was set up, objects that are made once. If that is another program, the
    first trace is kept, for calls that find what this one found; if it left an object, for this call alone.
    Other threads see what it leaves in modules when all that is done.

    Args:
        job: what to trace.
        times: where to note how long it takes.
        on_failure: closed if what comes later fails: what was assigned is then as it was.
    """
    with own_attributes():
        return _trace_call(job, times, on_failure)


def _trace_call(job: Job, times: StageTimes, on_failure: ExitStack) -> TracedCall:
    found = _trace(job, times)
    returned = found.returned()
    counts = [*returned.counts(), *found.captured.in_backward.counts_of_whole()]
    if job.symbolic and (counts or returned.counted):
        counting = replace(job, counts=tuple(_distinct_places(counts)), counted=returned.counted)
        if (symbolic := _with_symbols(counting, times, found)) is not found:
            job, found = counting, symbolic
    if job.symbolic and found.captured.guessed:
        opening = replace(job, opens=True)
        if (symbolic := _with_symbols(opening, times, found)) is not found:
            job, found = opening, symbolic
    leaves = found.before.left()
    if not returned.log.deleted() and (leaves is not None or _flags(job, found)):
        later = _set_up(job, times, found, on_failure)
        if later is not None:
            return later
    found.before.roll_back()  # the call is about to read what it finds
    return replace(found, captured=replace(found.captured, leaves=leaves))


def _flags(job: Job, found: TracedCall) -> list[tuple[Source, Any]]:
    """The constants that the program assigns, without its counts, and without what depends on data."""
    counts = {place.spot() for place in job.counts}
    constants = found.returned().constants()
    return [(place, v) for place, v in constants if place.spot() not in counts and not numbers_of_data(v)]


def _with_symbols(job: Job, times: StageTimes, found: TracedCall) -> TracedCall:
    """The trace with more symbols; `found` if they cannot stand for numbers (as keys, or in texts).

    Objects that the program makes once stay those of the first trace, which hold numbers.
    """
    bring_back = found.before.left()
    found.before.roll_back()
    try:
        symbolic = _trace(job, times)
    except (UnsupportedProgram, _Contradicted):
        symbolic = None
    else:
        symbolic.before.roll_back()
    if bring_back is not None:
        bring_back()
    return symbolic if symbolic is not None and _is_equivalent(symbolic, found) else found


def _is_equivalent(symbolic: TracedCall, found: TracedCall) -> bool:
    """Whether a trace with symbols is of the same program, and computes with them as with numbers."""
    ours, theirs = symbolic.traced, found.traced
    is_exact = _is_exact(ours) and not ours.symbols.decides_by(ours.symbols.floats())
    is_exact &= not symbolic.captured.in_backward.assigns_symbols()
    is_exact &= not _computes_with_what_it_finds(symbolic)
    return (
        is_exact
        and _have_same_constants(ours.facts, theirs.facts)
        and _have_same_operations(ours.graph, theirs.graph)
    )


def _computes_with_what_it_finds(call: TracedCall) -> bool:
    """Whether the backward computes with, or decides by, numbers that another backward may have changed."""
    traced, theirs = call.traced, call.captured.in_backward.symbols.keys()
    used = {name for size in traced.graph.named_sizes().values() for name in symbols_in(size.meta["val"])}
    return not theirs.isdisjoint(used) or traced.symbols.decides_by(theirs)


def _distinct_places(places: Sequence[Source]) -> list[Source]:
    return list({place.spot(): place for place in places}.values())


def _is_exact(traced: Traced) -> bool:
    """Whether all symbolic numbers are computed as Python computes them."""
    taken = [node.meta["val"] for node in traced.graph.named_sizes().values()]
    said = pytree.tree_leaves([_results(traced.facts), list(_assigned(traced.facts).values())])
    return all(computes_exactly(number) for number in (*taken, *said) if isinstance(number, SYMBOLIC))


def _have_same_constants(symbolic: Facts, facts: Facts) -> bool:
    """Whether results and assignments that are no tensors are the same, but for symbols."""
    ours, theirs = _assigned(symbolic), _assigned(facts)
    results, other_results = _results(symbolic), _results(facts)
    if len(results) != len(other_results):
        return False
    pairs = list(zip(results, other_results, strict=True))
    # What is assigned the number that it holds anyway shows as an assignment with symbols only.
    pairs += [(ours[place], theirs[place]) for place in ours.keys() & theirs.keys()]
    if theirs.keys() - ours.keys():
        return False
    for one, other in pairs:
        (leaves, spec), (other_leaves, other_spec) = map(pytree.tree_flatten, (one, other))
        if spec != other_spec:
            return False
        pairs_of_leaves = zip(leaves, other_leaves, strict=True)
        numbers = [(a, b) for a, b in pairs_of_leaves if is_constant(b) or isinstance(b, SYMBOLIC)]
        if not all(_is_hinted(a, b) for a, b in numbers):
            return False
    return True


def _results(facts: Facts) -> list[Any]:
    return [fact.value for fact in facts.outputs if isinstance(fact, NotATensor)]


def _assigned(facts: Facts) -> dict[tuple[int, Any], Any]:
    """What places are assigned, by where they are."""
    return {place.spot(): value for place, value in Returned.of(facts).constants()}


def _have_same_operations(symbolic: Graph, graph: Graph) -> bool:
    """Whether two graphs have the same operations: a program may ask whether a number is an `int`."""
    ours, theirs = _operations(symbolic), _operations(graph)
    return len(ours) == len(theirs) and all(
        target == other and len(args) == len(others) and all(map(_is_hinted, args, others))
        for (target, args), (other, others) in zip(ours, theirs, strict=True)
    )


def _operations(graph: Graph) -> list[tuple[Any, list[Any]]]:
    """What each node calls, and with what: results of nodes are named by position, numbers by value."""
    told: dict[Node, Any] = {node: node.meta["val"] for node in graph.named_sizes().values()}
    found: list[tuple[Any, list[Any]]] = []
    for node in graph.gm.graph.nodes:
        if _keeps_all(node):
            told[node] = told[node.args[0]]
        elif not node.users and getattr(node.target, "is_view", False):
            continue
        elif node not in told:
            told[node] = f"operation {len(found)}"
            args = pytree.tree_leaves((node.args, node.kwargs))
            args = [told[arg] if isinstance(arg, Node) else arg for arg in args]
            found.append((node.target if node.op in ("call_function", "get_attr") else node.op, args))
    return found


def _keeps_all(node: Node) -> bool:
    """Whether a node is its argument, at the sizes at hand: traces with numbers leave some of these out."""
    if node.target not in _OF_SLICES:
        return False
    sizes = [[hint(size) for size in each.meta["val"].size()] for each in (node, node.all_input_nodes[0])]
    return sizes[0] == sizes[1]


_OF_SLICES = (
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.slice_backward.default,
    torch.ops.aten.alias.default,
)


def _is_hinted(symbolic: Any, known: Any) -> bool:
    """Whether `known`, a constant or computed of sizes, is what the symbolic number is in this call."""
    known = hint(known) if isinstance(known, SYMBOLIC) else known
    return is_constant(known) and same_constant(hint(symbolic), known)


def _set_up(job: Job, times: StageTimes, found: TracedCall, on_failure: ExitStack) -> TracedCall | None:
    """The trace of the call that finds what this one leaves, if it is of the same program."""
    with ExitStack() as otherwise:
        symbols = found.traced.symbols
        known = [*symbols, *(count.symbol for count in symbols.counts())]
        numbers = {name: hint(symbol) for symbol in known for name in symbols_in(symbol)}
        flags = [(place, concrete(value, numbers)) for place, value in _flags(job, found)]
        otherwise.callback(assign(flags))
        try:
            later = _trace(job, times)
            moves = later.before.moves()
            later.before.roll_back()  # an object is left once
            if moves or _flags(job, later) or not _is_same_program(later.traced, found.traced):
                return None
        except InternalError:
            raise
        except Exception:  # the program's own: it may refuse to be called twice
            return None
        on_failure.push(otherwise.pop_all())
        return later


def _is_same_program(one: Traced, other: Traced) -> bool:
    """Whether two traces are of one program, but for the constants that it assigns."""
    same_inputs = one.program.ins == other.program.ins
    same_facts = _without_returned(one.facts) == _without_returned(other.facts)
    same_facts &= Returned.of(one.facts).log.prints() == Returned.of(other.facts).log.prints()
    graphs = [print_graph(traced.graph).source for traced in (one, other)]
    same_graphs = graphs[0] == graphs[1] and _have_same_attributes(one.graph, other.graph)
    return same_inputs and same_facts and same_graphs


def _without_returned(facts: Facts) -> Facts:
    """`facts` without the output that says what is assigned."""
    outputs = (f for f in facts.outputs if not (isinstance(f, NotATensor) and isinstance(f.value, Returned)))
    return replace(facts, outputs=Row(outputs))


def _have_same_attributes(one: Graph, other: Graph) -> bool:
    """Whether the tensors that two graphs hold, of as many nodes, are the same."""
    held = [
        [getattr(graph.gm, node.target) for node in graph.gm.graph.find_nodes(op="get_attr")]
        for graph in (one, other)
    ]
    return all(a is b or (_are_data(a, b) and torch.equal(a, b)) for a, b in zip(*held, strict=True))


def _are_data(*values: Any) -> bool:
    return all(isinstance(value, torch.Tensor) and is_real(value) for value in values)


def _trace(job: Job, times: StageTimes) -> TracedCall:
    """Trace the program, anew for as long as a trace contradicts what it took for granted.

    Raises:
        _Contradicted: sizes cannot be symbols, and without them the trace is of no use.
    """
    assumed = Assumptions(job.symbolic)
    while True:
        try:
            found = _trace_once(job, times, assumed)
        except Exception as error:
            raise_interrupt(error)
            if not isinstance(error, _Contradicted) or (job.needs_symbols() and error.instead.failure):
                raise
            assumed = error.instead
            continue
        needed = assumed.after(job, found.traced)
        if needed.bases == assumed.bases:
            if assumed.failure is not None:
                _warn_of_numbers(found.captured.name, assumed.failure)
            return found
        found.before.roll_back()
        assumed = needed


def _warn_of_numbers(name: str, failure: Exception) -> None:
    where = failure.where if isinstance(failure, AotdistError) else raised_at(failure.__traceback__)
    reason = str(failure).partition("\n")[0] + (f", at {where}" if where else "")
    warnings.warn(
        f"aotdist: `{name}` is compiled for the sizes at hand, and again for others: a trace with symbolic "
        f"ones fails ({reason}); move that out of what is compiled, or run calls of many sizes as they were "
        "written: `aotdist.disable()`",
        stacklevel=2,
    )


def _trace_once(job: Job, times: StageTimes, assumed: Assumptions) -> TracedCall:
    """Capture the call and trace it.

    Args:
        job: the call, and how to compile it.
        times: where to note how long it takes.
        assumed: what to take for granted.

    Raises:
        _Contradicted: the trace shows that some of it does not hold.
    """
    with ExitStack() as scope:
        with times.stage("capture"):
            captured = capture(job.call, job.settings, scope, job.counted)
            counts = (*job.counts, *captured.arguments.counts())
            captured.in_backward.counts = job.counts
            before = captured.environment.assignments()
            scope.enter_context(before.undone_on_failure())
            distinct, deduped = dedupe.lower(captured.program)
            distinct = _with_inputs(distinct, assumed.inputs)
            program = synthetic_base.lower(distinct, assumed.bases)
        with times.stage("trace"):
            dims = _dims(job, captured) if assumed.symbolic else {}
            paths = (slot.path for slot in program.ins)
            fakes = fakes_of(zip(paths, program.examples, strict=True), captured.all_closed_over)
            _refuse_fakes(program, job.backend)
            recorder = Recorder(
                _decompositions(job.backend, job.settings),
                functional_rng=job.settings.functional_rng,
                backward_autocast=_backward_autocast(job.settings),
                symbolic=bool(dims or counts),
                of_data=assumed.of_data is not None,
                fakes=fakes,
                finds_out=job.finds_out,
                # A CUDA graph holds nothing that waits for data, as eager's formulas do.
                of_bits=job.backend.name == "fx" and not job.settings.cuda_graphs,
                target=job.backend.target if isinstance(job.backend, TargetBackend) else None,
            )
            times.counting(recorder.num_nodes)
            recorder.draws.allow(captured.environment.reached.generators)
            if job.backend.name == "fx" and not dims:  # compilers make kernels of the other path
                scope.enter_context(fast_paths_on())
            try:
                options = TraceOptions(
                    training=not captured.ambient.inference,
                    bases=assumed.bases,
                    dims=dims,
                    counts=counts,
                    cuts=captured.ambient.grad,
                    may_run_later=not captured.environment.rules,
                    in_python=captured.in_backward,
                )
                traced = trace(program, recorder, options, name_closed_over=captured.name_closed_over)
            except LooksAround as found:
                inputs, slot = (distinct.ins, distinct.examples), captured.name_closed_over(found.example)
                raise _Contradicted(assumed.around(job, inputs, found.example, slot)) from None
            except Exception as error:
                instead = assumed.without(error, has_symbols=bool(dims or counts))
                if instead is not None:
                    raise _Contradicted(instead) from error
                if assumed.of_data is None or isinstance(error, AotdistError) or is_of_the_program(error):
                    raise
                raise assumed.of_data from None  # one of PyTorch's, which needs to know a number
    captured.in_backward.close()
    if traced.later_backwards is not None:
        traced.later_backwards.find_at(captured.sources(traced.program.examples))
    return TracedCall(captured, deduped, traced, assumed.bases, before)


def _dims(job: Job, captured: Captured) -> Mapping[int, frozenset[int]]:
    """The dimensions that symbols are to stand for, by the identity of the tensor."""
    if not job.opens:
        return captured.dims
    none = frozenset[int]()
    keys = {*captured.dims, *captured.guessed}
    return {key: captured.dims.get(key, none) | captured.guessed.get(key, none) for key in keys}


def _refuse_fakes(program: Program[PrimalIdx], backend: Backend) -> None:
    """Refuse to make machine code for a call with fake tensors: it would read memory that is not there."""
    for slot, example in zip(program.ins, program.examples, strict=True):
        if is_fake(example) and backend.name in ("inductor", "triton"):
            raise BadSettings(
                f"`{slot}` is a fake tensor, and what `{backend.name}` emits reads memory",
                stage="capture",
                fix='compile with `backend="fx"`, or export the program: `aotdist.export`',
            )


def _backward_autocast(settings: Settings) -> Callable[[], AbstractContextManager[Any]]:
    match settings.backward_autocast:
        case "off":
            return autocast_off
        case "same_as_forward":
            return nullcontext
        case _:
            return functools.partial(autocast_only, settings.explicit_autocast())


def _distinct(traced: Traced, bases: BasePlan, known: _Inputs | None) -> _Inputs:
    """The distinct tensors of the call: those that are known, and what the trace met besides."""
    slots, examples = (Row[DistinctIdx, Slot](), Row[DistinctIdx, torch.Tensor]()) if known is None else known
    seen = {id(example) for example in examples}
    program = traced.program
    more = [at for at, ex in program.examples.enumerate() if id(ex) not in seen and not bases.is_new(at)]
    return Row([*slots, *(program.ins[at] for at in more)]), Row(
        [*examples, *(program.examples[at] for at in more)]
    )


def _with_inputs(program: Program[DistinctIdx], inputs: _Inputs | None) -> Program[DistinctIdx]:
    """`program` with more inputs, which it reaches by itself."""
    if inputs is None:
        return program
    count = len(program.ins)
    return Program(lambda *distinct: program.fn(*distinct[:count]), *inputs)


def _decompositions(backend: Backend, settings: Settings) -> Decompositions:
    """The operators that the trace decomposes; losses that a pass may look for are left whole."""
    table = backend.decompositions()
    if settings.loss_chunk_bytes is None:
        return table
    return {op: made for op, made in table.items() if op not in WHOLE}


@dataclass(frozen=True, slots=True)
class _Like:
    """A tensor without its data: a call is made anew with another that is like it."""

    recipe: Recipe
    devices: tuple[torch.device, ...]
    requires_grad: bool
    is_leaf: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Like:
        devices = tuple(plain.device for plain in plain_tensors(tensor))
        return cls(recipe_of(tensor), devices, tensor.requires_grad, tensor.is_leaf)

    def make(self) -> torch.Tensor:
        pairs = zip(leaves(self.recipe), self.devices, strict=True)
        plains = [
            torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype, device=device)
            for (_, leaf), device in pairs
        ]
        made = rebuild(self.recipe, plains)
        if self.requires_grad:
            made.requires_grad_()
        return made if self.is_leaf or not self.requires_grad else made.view_as(made)


def with_traces(job: Job, found: TracedCall) -> Traced:
    """The trace of a call, which can be let go of where it can be made anew."""
    later = found.traced.later_backwards
    if later is None:
        return found.traced
    return replace(found.traced, traces=Traces(later, _retracing(job, found)))


def _retracing(job: Job, found: TracedCall) -> Callable[[], LaterBackwards] | None:
    """Traces a program anew for its backwards, once its trace was let go of.

    None where that may give another trace: what it depends on is not the module and what its arguments are
    like alone, or may be another by then.

    Args:
        job: what was traced.
        found: the trace.
    """
    call, captured, traced = job.call, found.captured, found.traced
    tensors, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
    given = [each for each in tensors if isinstance(each, torch.Tensor)]
    outs = (out.recipe for out in traced.facts.node_outs)
    depends = (
        tuple(traced.symbols)
        or not all(isinstance(recipe, Plain) for recipe in (*traced.facts.recipes, *outs))
        or traced.facts.data_guards
        or captured.ambient.autocast
        or captured.leaves is not None
        or not all(isinstance(each, torch.Tensor) or is_constant(each) for each in tensors)
        or any(each._base is not None or not is_real(each) for each in given)
        or len({memory_of(plain) for each in given for plain in plain_tensors(each)}) < len(given)
    )
    if depends:
        return None
    likes = [_Like.of(each) if isinstance(each, torch.Tensor) else each for each in tensors]
    name, recorded = captured.name, _Recorded.of(traced)
    empty = replace(job, call=replace(call, args=(), kwargs={}, dims={}, guess=None, prints=False))

    def again() -> LaterBackwards:
        made = [each.make() if isinstance(each, _Like) else each for each in likes]
        args, kwargs = pytree.tree_unflatten(made, spec)
        asked = replace(empty, call=replace(empty.call, args=args, kwargs=kwargs))
        try:
            another = _in_a_thread(lambda: _traced_alone(asked))
        except Exception as error:
            raise_interrupt(error)
            raise _changed(name, str(error).partition("\n")[0]) from error
        later = another.traced.later_backwards
        if later is None or not _Recorded.of(another.traced).is_like(recorded):
            raise _changed(name, "it is another program now")
        return later

    return again


def _traced_alone(job: Job) -> TracedCall:
    with class_functions_off(), users_modes_off(), own_attributes():
        found = _trace(job, StageTimes())
        found.before.roll_back()
        return found


def _in_a_thread(run: Callable[[], T]) -> T:
    """What `run` returns, called where no backward runs: autograd's formulas ask whether one does."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What a trace recorded, for another to be compared with; passes change the graph itself.

    Args:
        ins: names of the inputs.
        facts: what it showed.
        nodes: a digest of the forward's operations: only these hand values on to another backward.
        constants: tensors that the graph holds.
    """

    ins: Row[PrimalIdx, Slot]
    facts: Facts
    nodes: str
    constants: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, traced: Traced) -> _Recorded:
        graph = traced.graph.gm.graph
        forward = (
            each for each in graph.nodes if each.op == "call_function" and each.meta["phase"] == "forward"
        )
        said = ((node.meta.get("serial"), node, node.target, node.args, node.kwargs) for node in forward)
        nodes = sha256("\n".join(map(str, said)).encode()).hexdigest()
        constants = [getattr(traced.graph.gm, node.target) for node in graph.find_nodes(op="get_attr")]
        tensors = tuple(each for each in constants if isinstance(each, torch.Tensor))
        return cls(traced.program.ins, _without_returned(traced.facts), nodes, tensors)

    def is_like(self, other: _Recorded) -> bool:
        """Whether one trace can stand for the other: the same forward, recorded node by node alike."""
        pairs = zip(self.constants, other.constants, strict=False)
        return (
            (self.ins, self.facts, self.nodes) == (other.ins, other.facts, other.nodes)
            and len(self.constants) == len(other.constants)
            and all(a is b or (_are_data(a, b) and torch.equal(a, b)) for a, b in pairs)
        )


def _changed(name: str, reason: str) -> UnsupportedProgram:
    return UnsupportedProgram(
        f"`{name}` is traced anew for gradients of gradients, or gradients of other kinds, and {reason}",
        stage="joint",
        fix="leave the module as it was when it was called; or compile a clone of it for these calls",
    )
