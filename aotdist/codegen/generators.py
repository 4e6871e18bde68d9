"""Random generators in graphs that print their code: it names what it reads, and a generator has no text."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from aotdist.torch_seam.trees import pytree


def name_generators(gm: GraphModule) -> None:
    """Let each generator that operators draw from be an attribute of the module, in place."""
    held: dict[int, str] = {}

    def named(node: Node, value: object) -> object:
        if not isinstance(value, torch.Generator):
            return value
        name = held.setdefault(id(value), f"_generator_{len(held)}")
        setattr(gm, name, value)
        with gm.graph.inserting_before(node):
            return gm.graph.create_node("get_attr", name)

    for node in list(gm.graph.nodes):
        if any(isinstance(leaf, torch.Generator) for leaf in pytree.tree_leaves((node.args, node.kwargs))):
            node.kwargs = {key: named(node, value) for key, value in node.kwargs.items()}
            node.args = tuple(named(node, value) for value in node.args)
