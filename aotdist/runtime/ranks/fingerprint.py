"""What a compiled program must have in common with its peers': shared state, and collectives.

What may differ from rank to rank is left out: batches, offsets, a rank's shard of a tensor, parameters that
no peer has (the experts of one rank).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakKeyDictionary

from torch import nn

from aotdist.passes.collectives import Collective, collectives, reads_of_state
from aotdist.program import Graph
from aotdist.runtime.compilation import Compilation
from aotdist.runtime.ranks.agreement import agree
from aotdist.runtime.ranks.board import Party, board_of_this_process
from aotdist.runtime.ranks.runs import Phase, RunCheck, run_check
from aotdist.runtime.ranks.sequence import Sequenced, Shared, groups_with_peers
from aotdist.subclasses.protocol import (
    Recipe,
    Wrapper,
    is_wrapper,
    leaves,
    module_rules,
    process_groups,
    recipe_of,
    wrapper_rule,
)


def fingerprint_of(compilation: Compilation) -> tuple[Sequenced, ...]:
    """What peers compare: shared state in order of registration, its first uses, and collectives.

    State is shared with the ranks of a process group if it is a tensor distributed over them, or if a
    collective of theirs holds it, or its gradient.
    """
    found = compilation.collectives()
    shared = _groups_of_state(compilation, found)
    read = reads_of_state(compilation.traced.graph, shared) if shared else ()
    reads = [Shared("read", f"`{path}`", shared[path]) for path in read]
    return (*_described(compilation, shared), *reads, *found)


def fingerprint_of_state(model: nn.Module) -> tuple[Sequenced, ...]:
    """What peers compare before a model runs eagerly: tensors that are distributed over ranks."""
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    recipes = {name: recipe_of(tensor) for name, tensor in tensors.items()}
    groups = {name: tuple(sorted(process_groups([recipe]))) for name, recipe in recipes.items()}
    shared = [name for name in recipes if groups[name]]
    return tuple(Shared("state", f"`{name}` {_words(recipes[name])}", groups[name]) for name in shared)


def checks_of(compilation: Compilation, sequence: Sequence[Sequenced]) -> dict[Phase, RunCheck | None]:
    """The check before each run of a program's graphs; None for one that communicates with nobody.

    Args:
        compilation: the program.
        sequence: its fingerprint.
    """
    label, settings, board = compilation.captured.name, compilation.settings, board_of_this_process()
    return {
        phase: run_check(board, label, phase, sequence, collectives(graph), settings)
        for phase, graph in compilation.run_graphs().items()
    }


def agreeing_on_backwards(
    compilation: Compilation, sequence: Sequence[Sequenced]
) -> Callable[[Graph], RunCheck | None]:
    """A function that agrees with peers on a backward that is compiled on demand.

    It meets the ranks with which the backward communicates, and returns the check before each run of it. A
    peer that runs another backward of the program will not come: it waits in a collective. If this backward
    has no collectives, the difference shows at this rank's next program that has some. The function
    outlives the compilation, so it holds no tensor of the call.

    Args:
        compilation: the program.
        sequence: its fingerprint.

    Raises:
        RankDivergence: by the function: a peer runs, or is about to run, something else.
        RankLost: likewise: a peer failed, died, or did not come within the timeout.
    """
    label, settings, state = compilation.captured.name, compilation.settings, compilation.state()
    ahead = tuple(collectives(compilation.run_graphs()["backward"], state))
    before = sequence[: len(sequence) - len(ahead)]

    def agree_on(graph: Graph) -> RunCheck | None:
        found, board = tuple(collectives(graph, state)), board_of_this_process()
        check = run_check(board, label, "backward", (*before, *found), found, settings)
        agree(found, label=f"{label} backward", settings=settings, earlier=[ahead], check=check)
        return check

    return agree_on


_compiled: WeakKeyDictionary[type[nn.Module], Counter[tuple[Party, ...]]] = WeakKeyDictionary()
"""The number of modules with shared state that were compiled, by class and by the parties that share it."""


def number_of_its_kind(module: nn.Module) -> int:
    """How many modules of this class, shared by the same ranks, were compiled before this one.

    The number distinguishes models whose parameters have the same names, and is the same on ranks that
    compile such models in the same order. It is 0 for a module without shared state, which one rank may
    have alone.
    """
    if board_of_this_process() is None:
        return 0
    state = (*module.parameters(), *module.buffers())
    names = process_groups(recipe_of(tensor) for tensor in state if is_wrapper(tensor))
    if not names and not module_rules(module):
        return 0
    parties = sorted(group.party for name, group in groups_with_peers().items() if name in names)
    counts = _compiled.setdefault(type(module), Counter())
    counts[tuple(parties)] += 1
    return counts[tuple(parties)] - 1


def _groups_of_state(compilation: Compilation, sequence: Sequence[Collective]) -> dict[str, tuple[str, ...]]:
    """The process groups that share each parameter and buffer, by path, in the order of registration."""
    found: dict[str, set[str]] = {path: set() for path in compilation.state()}
    for path, recipe in _recipes(compilation):
        found[path] |= process_groups([recipe])
    for collective in sequence:
        for path in collective.serves:
            found[path].add(collective.group)
    return {path: tuple(groups) for path, groups in found.items() if groups}


def _described(compilation: Compilation, shared: dict[str, tuple[str, ...]]) -> list[Shared]:
    recipes = dict(_recipes(compilation))
    paths = [path for path in shared if path in recipes]
    described = [Shared("state", f"`{path}` {_words(recipes[path])}", shared[path]) for path in paths]
    groups = dict.fromkeys(group for path in paths for group in shared[path])
    which = f"all of it in `{compilation.captured.name}` number {compilation.captured.number + 1}"
    return [*described, Shared("state", which, tuple(groups))]


def _recipes(compilation: Compilation) -> Iterator[tuple[str, Recipe]]:
    """Path and recipe of each parameter and buffer that the program takes."""
    state = frozenset(compilation.state())
    traced = compilation.traced
    for slot, recipe in zip(traced.program.ins, traced.facts.recipes, strict=True):
        if slot.path in state:
            yield slot.path, recipe


def _words(recipe: Recipe) -> str:
    """Dtype, and for a distributed tensor the shape of the whole and its placement."""
    dtypes = dict.fromkeys(str(leaf.dtype).removeprefix("torch.") for _, leaf in leaves(recipe))
    words = [" and ".join(dtypes)]
    if isinstance(recipe, Wrapper) and (placement := wrapper_rule(recipe.cls).placement(recipe)):
        words += [str(list(recipe.size)), placement]
    return " ".join(words)
