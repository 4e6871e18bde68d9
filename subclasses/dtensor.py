"""DTensor: a local shard and a spec.

The general protocol can flatten and rebuild a DTensor (its `device_mesh` is an attribute that is no tensor).
This rule adds a fast constructor, the placements to expect of a tangent, and the conversion of a tangent with
other placements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import Constant, Wrapper, WrapperRule
from aotdist.torch_seam.dtensor import (
    dtensor_spec,
    dtensor_traced,
    finished,
    make_dtensor,
    masks_rows,
    with_placements,
)


class _DTensorRule(WrapperRule):
    mixes = False  # eager refuses to mix them
    views_may_be_copies = True  # along what is sharded

    def owns(self, cls: type[torch.Tensor]) -> bool:
        return cls is DTensor

    def convert(self, tensor: torch.Tensor, recipe: Wrapper) -> torch.Tensor | None:
        if not isinstance(tensor, DTensor):
            return None
        tensor, spec = finished(tensor), _spec(recipe)
        if tensor.device_mesh != spec.mesh or tensor.placements == spec.placements:
            return tensor
        pairs = zip(tensor.placements, spec.placements, strict=True)
        if any(to.is_partial() and at != to for at, to in pairs):
            return None  # a tensor is not made a partial sum again
        return tensor.redistribute(placements=spec.placements)

    def tangent_recipe(self, recipe: Wrapper) -> Wrapper:
        """The gradient of a partial sum is replicated: `Partial` becomes `Replicate`."""
        whole = tuple(Replicate() if p.is_partial() else p for p in _spec(recipe).placements)
        return replace(recipe, context=with_placements(recipe.context, whole))

    def same_layout(self, a: Wrapper, b: Wrapper) -> bool:
        first, second = _spec(a), _spec(b)
        return first.placements == second.placements and first.mesh == second.mesh

    def is_redistributed(self, view: torch.Tensor, base: torch.Tensor) -> bool:
        """A view along a sharded dimension is a replicated copy."""
        placements = (view.placements, base.placements)  # type: ignore[attr-defined]
        return len({tuple(map(type, placed)) for placed in placements}) > 1

    def refuse(self, tensor: torch.Tensor, path: str) -> None:
        if isinstance(tensor, DTensor) and any(map(masks_rows, tensor.placements)):
            raise UnsupportedProgram(
                f"`{path}` is a DTensor of partial sums of which each rank has to leave rows out yet "
                "(`_MaskPartial`), and which rows is not written in it",
                stage="joint",
                fix="redistribute what an embedding returns where it is called: "
                "`embedding(tokens).redistribute(placements=[Replicate()])`",
            )

    def tracing(self) -> AbstractContextManager[None]:
        return dtensor_traced()

    def process_groups(self, recipe: Wrapper) -> Iterable[str]:
        return [group.group_name for group in _spec(recipe).mesh.get_all_groups()]

    def placement(self, recipe: Wrapper) -> str:
        return ", ".join(map(repr, _spec(recipe).placements))

    def context_of(self, tensor: torch.Tensor) -> Any:
        return tensor._spec  # type: ignore[attr-defined]

    def same_context_source(self, tensor: str, expected: str) -> str:
        # Parameters keep their spec object, so the comparison (0.5 us) is rarely reached.
        return f"({tensor}._spec is {expected} or {tensor}._spec == {expected})"

    def unflattener(self, recipe: Wrapper) -> Callable[[Mapping[str, Any], tuple[int, ...]], torch.Tensor]:
        # DTensor's own fails for the strided shards of views (torch 2.13).
        def put_together(inner: Mapping[str, Any], stride: tuple[int, ...]) -> torch.Tensor:
            spec = dtensor_spec(recipe.context, inner.get("device_mesh"), recipe.size, stride)
            return make_dtensor(inner["_local_tensor"], spec)

        return put_together

    def rebuilder(self, recipe: Wrapper) -> Callable[..., torch.Tensor]:
        inner = dict(recipe.attributes)["_local_tensor"]
        if isinstance(inner, Wrapper):
            return super().rebuilder(recipe)
        spec = _spec(recipe)
        return partial(make_dtensor, spec=spec)


def _spec(recipe: Wrapper) -> Any:
    mesh = dict(recipe.attributes).get("device_mesh")
    return dtensor_spec(
        recipe.context, mesh.value if isinstance(mesh, Constant) else None, recipe.size, recipe.stride
    )


WRAPPER_RULE = _DTensorRule()
