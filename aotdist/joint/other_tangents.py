"""The backward of a traced program for gradients of other kinds than its results.

The gradient of a wrapper is taken to be such a wrapper, and that of a plain tensor to be plain. Whoever
computes the loss may see to it that it is the other way round. Then operators meet other tensors, and the
inputs' gradients are of other kinds. So autograd's graph of the trace, which holds no data, is kept, and gone
through again when such a gradient arrives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from aotdist.errors import AotdistError, UnsupportedProgram
from aotdist.facts import NodeOut
from aotdist.joint.backward import Backward, grad_results, new_tangent
from aotdist.joint.inputs import StandIn
from aotdist.joint.proxies import Recorder
from aotdist.program import Graph, NodeOutIdx, PrimalIdx, Row, Slot
from aotdist.subclasses.protocol import Constant, Plain, Recipe, Wrapper, recipe_of, wrapper_rule


@dataclass(frozen=True, slots=True)
class OtherJoint:
    """A program with another backward.

    Args:
        graph: what was recorded, with the new gradients for its results.
        tangents: the name of each gradient that it takes, and what it is taken to be.
        grads: recipe of each input's gradient, or None.
    """

    graph: Graph
    tangents: Mapping[NodeOutIdx, tuple[str, Recipe]]
    grads: Row[PrimalIdx, Recipe | None]


def may_meet_others(node_outs: Row[NodeOutIdx, NodeOut], ins: Row[PrimalIdx, StandIn]) -> bool:
    """Whether gradients of other kinds make another backward.

    That of plain tensors alone is the same, whatever it is given. Beneath wrappers with a rule that meet no
    plain tensors, as DTensors do not, plain results have plain gradients.
    """
    of_outs = [out.recipe for out in node_outs if out.differentiable]
    recipes = [stand_in.recipe for stand_in in ins]
    return any(isinstance(recipe, Wrapper) for recipe in of_outs) or (
        bool(of_outs)
        and any(isinstance(recipe, Wrapper) and wrapper_rule(recipe.cls) is None for recipe in recipes)
    )


class OtherTangents:
    """Traces backwards for gradients of other kinds.

    Args:
        recorder: of the trace; it goes on.
        backward: of the trace. No tensor of the caller's is kept.
        node_outs: what the program returns.
        ins: names of the inputs.
    """

    def __init__(
        self,
        recorder: Recorder,
        backward: Backward,
        node_outs: Row[NodeOutIdx, NodeOut],
        ins: Row[PrimalIdx, Slot],
    ) -> None:
        backward.forget_inputs()
        self._recorder, self._backward, self._node_outs, self._ins = recorder, backward, node_outs, ins
        self._count = 0

    def trace(self, arrived: Mapping[NodeOutIdx, torch.Tensor]) -> OtherJoint:
        """The program with the backward for such gradients.

        Args:
            arrived: the gradients that there are.

        Raises:
            UnsupportedProgram: there is no such backward.
        """
        self._count += 1
        kinds = {idx: self._kind(idx, grad) for idx, grad in arrived.items()}
        names = {idx: f"{self._node_outs[idx].slot} of kind {self._count}" for idx in arrived}
        try:
            with self._recorder:
                given = {
                    idx: new_tangent(self._recorder, names[idx], kind, arrived[idx])
                    for idx, kind in kinds.items()
                }
                grads = self._backward.run(list(given), given, again=True)
                results = grad_results(self._recorder, self._ins, grads)
        except AotdistError:
            raise
        except Exception as error:
            raise _fails(self._node_outs, arrived, str(error)) from error
        graph = self._recorder.graph(results, goes_on=True)
        recipes = Row[PrimalIdx, Recipe | None](
            recipe_of(grads[idx]) if idx in grads else None for idx in self._ins.indices()
        )
        return OtherJoint(graph, {idx: (names[idx], kinds[idx]) for idx in arrived}, recipes)

    def _kind(self, idx: NodeOutIdx, grad: torch.Tensor) -> Recipe:
        recipe, of_out = recipe_of(grad), self._node_outs[idx].recipe
        if self._recorder.shape_env is None:
            return _dense(recipe)
        if not isinstance(recipe, Plain) or isinstance(of_out, Constant):
            raise _fails(
                self._node_outs, {idx: grad}, "sizes are symbolic, and those of a wrapper are not known"
            )
        return Plain(of_out.size, of_out.stride, recipe.dtype)


def _dense(recipe: Recipe) -> Recipe:
    """`recipe` without strides that show memory twice, as those of an expanded gradient."""
    match recipe:
        case Plain(size=size, stride=stride) if 0 in stride:
            return replace(recipe, stride=torch.empty(size, device="meta").stride())
        case Wrapper(attributes=attributes):
            return replace(recipe, attributes=tuple((name, _dense(part)) for name, part in attributes))
        case _:
            return recipe


def _fails(
    node_outs: Row[NodeOutIdx, NodeOut], arrived: Mapping[NodeOutIdx, torch.Tensor], reason: str
) -> UnsupportedProgram:
    kinds = ", ".join(f"`{node_outs[idx].slot}` is a {type(grad).__name__}" for idx, grad in arrived.items())
    return UnsupportedProgram(
        f"the gradient of {kinds}, for which the program has no backward ({reason})",
        stage="joint",
        fix="convert it before calling `backward`",
    )
