"""`torch.cond`: data decide which of two graphs runs, and which of two graphs computes the gradients.

Both branches take the same operands: the arguments, and all tensors that either closes over. The backward
recomputes a branch from the operands.
An operand that only the other branch uses gets zeros for its gradient, where eager leaves it without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from aotdist.subclasses.protocol import Plain, tangent_recipe
from aotdist.torch_seam.functional import FunctionalTensor, functional_value
from aotdist.torch_seam.trees import pytree
from aotdist.trace.body import Body, CutArgument, cut
from aotdist.trace.failures import refusal
from aotdist.trace.recorder import Recorder

_COND: Any = torch.ops.higher_order.cond


@dataclass(frozen=True, slots=True)
class Branches:
    """Two branches whose results agree in structure, sizes, strides and dtypes.

    Args:
        recorder: records the program around them.
        pred: the node of the boolean that decides which of them runs.
        bodies: the branch for true, and the one for false.
        operands: the tensors that they take.
    """

    recorder: Recorder
    pred: Node
    bodies: tuple[Body, Body]
    operands: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, recorder: Recorder, pred: torch.Tensor, bodies: tuple[Body, Body]) -> Branches:
        """The branches, checked.

        Raises:
            UnsupportedProgram: their results differ in structure, sizes, strides, dtypes or constants.
        """
        _check_alike(*bodies)
        operands = {id(tensor): tensor for body in bodies for _, tensor in body.operands()}
        return cls(recorder, recorder.value(pred), bodies, tuple(operands.values()))

    def call(self) -> Any:
        """Record the call; returns what the program gets from `torch.cond`."""
        tensors = list(self.operands)
        outs = Cond.apply(self, *tensors) if any(self.differentiable()) else self.forward(tensors)
        found = iter(outs)
        body = self.bodies[0]
        flat = [
            next(found) if is_tensor else c for is_tensor, c in zip(body.tensors, body.constants, strict=True)
        ]
        return pytree.tree_unflatten(flat, body.spec)

    def differentiable(self) -> list[bool]:
        """Which results have a gradient, in one branch at least."""
        return [a or b for a, b in zip(*(body.differentiable() for body in self.bodies), strict=True)]

    def forward(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Record the branches on the operands' `tensors`; returns the results."""
        graphs = [
            cut(body.joint, _arguments(body, self.operands, _values(tensors)), body.results())
            for body in self.bodies
        ]
        return self._record("branch", graphs, list(map(self.recorder.value, tensors)))

    def needed(self) -> list[torch.Tensor]:
        """The operands that gradients are computed from."""
        found: set[int] = set()
        for body in self.bodies:
            sources = body.joint.ancestors(body.gradients().values())
            found |= {i for i, node in body.arguments().items() if node in sources}
        return [operand for operand in self.operands if id(operand) in found]

    def backward(
        self, saved: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Record the gradients of the branches.

        Args:
            saved: the operands that are `needed`.
            tangents: one for each result; those of results without gradient are not used.

        Returns:
            the gradient of each operand; None where neither branch has one.
        """
        arriving = [_laid_out(tangents[k], stride) for k, stride in self._tangents()]
        gradients = [body.gradients() for body in self.bodies]
        wanted = [id(o) for o in self.operands if any(id(o) in found for found in gradients)]
        results = [_gradients(wanted, gradients, side) for side in (0, 1)]
        by_rows = [k for k, pair in enumerate(zip(*results, strict=True)) if _lie_differently(*pair)]
        graphs = [
            cut(
                body.joint,
                [
                    *_arguments(body, self.needed(), _values(saved)),
                    *zip(_values(arriving), (body.tangent(k) for k, _ in self._tangents()), strict=True),
                ],
                results[side],
                by_rows=by_rows,
            )
            for side, body in enumerate(self.bodies)
        ]
        recorded = self._record("gradients", graphs, list(map(self.recorder.value, (*saved, *arriving))))
        built = dict(zip(wanted, recorded, strict=True))
        return [built.get(id(operand)) for operand in self.operands]

    def _record(
        self, name: str, graphs: Sequence[GraphModule], operands: Sequence[Node]
    ) -> list[FunctionalTensor]:
        ends: Any = graphs[0].graph.output_node().args[0]
        if not ends:
            return []
        if_so, if_not = (
            self.recorder.attribute(f"{name}_{side}", graph)
            for side, graph in zip(("if_true", "if_false"), graphs, strict=True)
        )
        args = (self.pred, if_so, if_not, tuple(operands))
        return self.recorder.call(_COND, args, [end.meta["val"] for end in ends])

    def _tangents(self) -> list[tuple[int, tuple[int, ...]]]:
        """The positions of results with a gradient, each with the strides that its gradient is to have."""
        recipes = [out.recipe for out in self.bodies[0].traced.facts.node_outs]
        assumed = ((k, tangent_recipe(recipes[k])) for k, found in enumerate(self.differentiable()) if found)
        return [(k, tuple(recipe.stride)) for k, recipe in assumed if isinstance(recipe, Plain)]


class Cond(torch.autograd.Function):
    """The gradients of `Branches`."""

    @staticmethod
    def forward(ctx: Any, branches: Branches, *tensors: torch.Tensor) -> Any:
        """Record both branches."""
        outs = branches.forward(tensors)
        ctx.branches = branches
        needed = set(map(id, branches.needed()))
        pairs = zip(branches.operands, tensors, strict=True)
        ctx.save_for_backward(*(tensor for operand, tensor in pairs if id(operand) in needed))
        constant = [o for o, d in zip(outs, branches.differentiable(), strict=True) if not d]
        ctx.mark_non_differentiable(*constant)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
        """Record the gradients of both."""
        return (None, *ctx.branches.backward(ctx.saved_tensors, tangents))


def _values(plains: Sequence[Any]) -> list[torch.Tensor]:
    return list(map(functional_value, plains))


def _arguments(
    body: Body, operands: Sequence[torch.Tensor], likes: Sequence[torch.Tensor]
) -> list[CutArgument]:
    nodes = body.arguments()
    return [(like, nodes.get(id(operand))) for operand, like in zip(operands, likes, strict=True)]


def _laid_out(plain: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    if plain.stride() == stride:
        return plain
    return torch.empty_strided(plain.size(), stride, dtype=plain.dtype, device=plain.device).copy_(plain)


def _gradients(
    wanted: Sequence[int], gradients: Sequence[dict[int, Node]], side: int
) -> list[Node | torch.Tensor]:
    """One side's gradients of the operands that get one on either; zeros where it has none itself."""
    own, other = gradients[side], gradients[1 - side]
    return [own[i] if i in own else other[i].meta["val"] for i in wanted]


def _lie_differently(a: Node | torch.Tensor, b: Node | torch.Tensor) -> bool:
    first, second = (end.meta["val"] if isinstance(end, Node) else end for end in (a, b))
    zeros = not (isinstance(a, Node) and isinstance(b, Node))
    return first.stride() != second.stride() or (zeros and not first.is_contiguous())


def _check_alike(true: Body, false: Body) -> None:
    """Raise unless two branches return the same structure of equal constants and of tensors alike.

    Raises:
        UnsupportedProgram: they differ.
    """
    advice = "let both return the same structure of tensors of the same size, strides and type"
    if true.spec != false.spec or true.tensors != false.tensors:
        raise refusal(f"the branches of `cond` return {true.spec} and {false.spec}", advice)
    if true.constants != false.constants:
        raise refusal(
            f"the branches of `cond` return the constants {true.constants} and {false.constants}",
            "let both return a tensor in their place",
        )
    outs = zip(true.traced.facts.node_outs, false.traced.facts.node_outs, strict=True)
    for position, (a, b) in enumerate(outs):
        if a.recipe != b.recipe:
            raise refusal(f"result {position} of the branches of `cond` is {a.recipe} and {b.recipe}", advice)
    for position, (a, b) in enumerate(zip(true.results(), false.results(), strict=True)):
        if a.meta["val"].device != b.meta["val"].device:
            raise refusal(f"result {position} of the branches of `cond` is on two devices", advice)
