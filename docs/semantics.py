"""Writes `docs/semantics.md`: programs, what their trace showed, and what was made of them.

`python docs/semantics.py` prints the page; nothing in it is written by hand but the programs and the words.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.errors import AotdistError
from aotdist.facts import Facts


@dataclass(frozen=True)
class Section:
    """A heading of the page.

    Args:
        title: the heading.
        words: what is to be seen.
        program: what is compiled.
        arguments: what it is called with.
        settings: what it is compiled with.
    """

    title: str
    words: str
    program: Callable[..., Any]
    arguments: Callable[[], tuple[torch.Tensor, ...]]
    settings: Mapping[str, Any] = field(default_factory=dict)


def write_to_an_input(x, running_mean):
    x.mul_(2)
    with torch.no_grad():
        running_mean.add_(x.mean(0), alpha=0.1)
    return x.sin()


def transpose_in_place(x):
    x.t_()
    x.add_(1)
    return x * 2


def another_storage(x, y):
    before = x.data
    row = x[0]
    x.data = y
    z = x * 2
    x.data = before
    return z, row


def aliased_outputs(x):
    y = x * 2
    row, rest = y.split([1, 2])
    return x[0], row, rest, rest.detach(), x


def aliased_inputs(x, row):
    row.add_(1)
    return x * 2


def aliased_inputs_with_history(x, row, scale):
    x.mul_(scale)
    return row.sum()


class CountBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, counter):
        counter.add_(1)
        ctx.counter = counter
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        ctx.counter.add_(100)
        return grad * 3, None


def written_in_both_halves(x, counter):
    return CountBothWays.apply(x, counter)


def unused_and_detached(x, unused):
    return x * x.detach()


def dropout_under_checkpoint(x):
    return checkpoint(lambda x: F.dropout(x.sin(), 0.5), x, use_reentrant=False)


def autocast_inside(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ w


STATE = {"steps": 0, "norms": []}


def counts(x, mean):
    STATE["steps"] += 1
    mean.lerp_(x, 1 / STATE["steps"])
    STATE["norms"].append(mean.norm())
    return mean / (1 - 0.9 ** STATE["steps"])


HEARD = {"gradients": 0, "norms": []}


def hears_of_gradients(x, w):
    def hook(grad) -> None:
        HEARD["gradients"] += 1
        HEARD["norms"].append(grad.norm())

    y = x * w
    y.register_hook(hook)
    return y.sin()


def any_size(x, w):
    y = x.view(-1) * 2
    return y.view(x.shape) @ w, y[1:]


def one_of_two(x, w):
    return torch.cond(x.sum() > 0, lambda x: (x * w).sin(), lambda x: x + w, (x,))


def made_of_a_result(x):
    y = x.sin()
    return y, (y * y).sum()


def depends_on_data(x):
    return x * 2 if x.sum() > 0 else x


def leaf(*size: int) -> torch.Tensor:
    return torch.ones(size, requires_grad=True)


def with_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x[1]


SECTIONS = (
    Section(
        "Writes to inputs",
        "The write to `x` takes part in the backward: it is done outside of the node, which gives `x` its "
        "history. The other write is a `copy_` inside the node. The graph itself writes nothing.",
        write_to_an_input,
        lambda: (leaf(3, 2) * 1.0, torch.zeros(2)),
    ),
    Section(
        "Writes to metadata",
        "The region sees `x` as it was, and returns its data in that layout; `t_` is replayed on the user's "
        "tensor afterwards.",
        transpose_in_place,
        lambda: (torch.ones(2, 3),),
    ),
    Section(
        "Other storage",
        "`set_`, `.data =` and `resize_` are replayed, too, among the outputs, in program "
        "order: a view shows what its base was when the view was made.",
        another_storage,
        lambda: (torch.ones(2, 2), torch.ones(2, 2)),
    ),
    Section(
        "Outputs that alias",
        "The node returns one base. Views of it, and of the input, are rebuilt by replaying the operations "
        "that made them, so that `_base`, shared memory and later writes are as in eager.",
        aliased_outputs,
        lambda: (leaf(3, 2),),
    ),
    Section(
        "Inputs that share memory",
        "Both are traced as parts of one span of memory, which is a separate input of the graph. "
        "`span_over` is also the check: inputs with another memory layout need another artifact.",
        aliased_inputs,
        lambda: with_row(torch.ones(3, 2)),
    ),
    Section(
        "Inputs that share memory, written with a history",
        "Autograd has to know that `row` is a view of `x`: in the trace it is made from `x` again.",
        aliased_inputs_with_history,
        lambda: (*with_row(leaf(3, 2) * 1.0), leaf(2)),
    ),
    Section(
        "Written in forward and in backward",
        "Each write lands in its own half, once.",
        written_in_both_halves,
        lambda: (leaf(2), torch.zeros(())),
    ),
    Section(
        "Gradients",
        "An unused input gets no gradient, instead of zeros. `ctx.kept_primals` is kept for a "
        "backward with `create_graph=True`, which is compiled when it is first needed.",
        unused_and_detached,
        lambda: (leaf(2), leaf(2)),
    ),
    Section(
        "Gradients of one result with respect to another",
        "`y` is a waypoint of the other result's gradient, which passes a gate on its way, so that hooks of "
        "`y`, and gradients with respect to it, see it. As long as nobody watches, the backward runs whole.",
        made_of_a_result,
        lambda: (leaf(2),),
    ),
    Section(
        "Random numbers",
        "The checkpoint runs the dropout again in the backward, where it reuses the forward's draw instead "
        "of making a new one.",
        dropout_under_checkpoint,
        lambda: (leaf(4),),
    ),
    Section(
        "Context",
        "Casts of autocast are in the graph; the modes that were on are part of the signature.",
        autocast_inside,
        lambda: (leaf(2, 2), leaf(2, 2)),
    ),
    Section(
        "Assignments in Python",
        "Items, attributes and variables are assigned at every call. A number that the program finds and "
        "changes is a symbol, read at its place. A list that grows gives the next call another signature, "
        "unless it is emptied, or the program does nothing else with it.",
        counts,
        lambda: (torch.ones(3), torch.zeros(3)),
    ),
    Section(
        "What a backward changes in Python",
        "Hooks, autograd functions and checkpoints may count, log, and keep what they compute, which is one "
        "more result of the backward graph. The runtime replays the changes after every backward; the number "
        "is read when the backward runs, which may be after another call.",
        hears_of_gradients,
        lambda: (leaf(3), torch.ones(3)),
    ),
    Section(
        "Symbolic sizes",
        "With `dynamic=True` a size is a symbol, read off a tensor at every call. What the trace decided by "
        "symbols is a guard, tested when the artifact is tried. Every expression that a graph computes with "
        "is one of its arguments.",
        any_size,
        lambda: (leaf(3, 2), torch.ones(2, 4)),
        {"dynamic": True},
    ),
    Section(
        "Branches on data",
        "Both branches are graphs, and so are their gradients; what they close over is an operand.",
        one_of_two,
        lambda: (leaf(2), leaf(2)),
    ),
    Section(
        "Failure",
        "A program that cannot be compiled is rejected before anything is changed.",
        depends_on_data,
        lambda: (torch.ones(3),),
    ),
)


def page() -> str:
    """The whole page."""
    lines = [
        "# Semantics",
        "",
        "What a compiled program does with writes, aliases and gradients, by example. `make docs` writes",
        "this page: it compiles each program with the `fx` backend and prints the result.",
    ]
    for section in SECTIONS:
        lines += ["", f"## {section.title}", "", *textwrap.wrap(section.words, 110), "", *_example(section)]
    return "\n".join(lines) + "\n"


def _example(section: Section) -> Iterator[str]:
    owners = [CountBothWays] if section.program is written_in_both_halves else []
    yield from _block("python", "\n\n".join(inspect.getsource(thing) for thing in (*owners, section.program)))
    compiled = aotdist.compile(section.program, backend="fx", settings=section.settings)
    try:
        compiled(*section.arguments())
    except AotdistError as error:
        yield from _block("text", f"{type(error).__name__}: {error}".replace(__file__, "docs/semantics.py"))
        return
    (artifact,) = compiled.artifacts
    yield from ("Facts:", "")
    yield from _block("text", "\n".join(_facts(artifact.compilation.traced.facts, section)))
    for name, graph in compiled.graphs[0].items():
        if name != "joint":
            yield from (f"The {name} graph:", "")
            yield from _block("python", _code(graph))
    yield from ("What runs:", "")
    yield from _block("python", compiled.source)


def _facts(facts: Facts, section: Section) -> Iterator[str]:
    for idx, fact in facts.inputs.enumerate():
        yield f"input {idx}: {_short(fact)}"
    for idx, fact in facts.outputs.enumerate():
        if "Returned" not in repr(fact):
            yield f"output {idx}: {_short(fact)}"
    yield from map(_short, facts.metadata_writes())
    for idx, bumps in facts.backward.writes.items():
        yield f"input {idx}: written by the backward, bumps={bumps}"


def _short(fact: Any) -> str:
    """A fact without what is long and tells little."""
    shown = [(each.name, getattr(fact, each.name)) for each in fields(fact)]
    text = ", ".join(f"{name}={_steps(value)}" for name, value in shown if value not in ((), None))
    return f"{type(fact).__name__}({text})"


def _steps(value: Any) -> str:
    if isinstance(value, tuple) and value and hasattr(value[0], "pick"):
        return "[" + ", ".join(f"{step.op}{tuple(step.args)}" for step in value) + "]"
    return value.__name__ if inspect.isroutine(value) else str(value)


def _code(graph: torch.fx.GraphModule) -> str:
    lines = [line.partition(";  ")[0] for line in graph.code.splitlines() if line.strip()]
    return "\n".join(lines).replace("torch.ops.", "")


def _block(language: str, text: str) -> list[str]:
    return [f"```{language}", *text.rstrip().splitlines(), "```", ""]


if __name__ == "__main__":
    print(page(), end="")
