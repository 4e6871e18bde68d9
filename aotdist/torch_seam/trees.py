"""Pytrees: arguments and results of any nesting."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any

# Arguments and results of any nesting: flatten, unflatten, map, key paths.
from torch.utils import _pytree as pytree  # noqa: F401
from torch.utils._pytree import TreeSpec as TreeSpec


def tree_children(spec: TreeSpec) -> list[TreeSpec]:
    """The children of a pytree structure; a method from torch 2.13 on, an attribute before."""
    children: Any = getattr(spec, "children", None)
    specs: Any = children() if callable(children) else spec.children_specs
    return specs


def tree_of(kind: Any, context: Any, children: list[TreeSpec]) -> TreeSpec:
    """A pytree's structure from its parts; of a leaf, all are empty."""
    return pytree.tree_structure(0) if kind is None else TreeSpec(kind, context, children)
