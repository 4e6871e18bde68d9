"""Gradients of views that one operator makes together (`split`, `unbind`), where these are wrappers.

Where such a node gets no gradient for a view, it makes plain zeros, which some wrappers (DTensor) refuse
together with their own. In eager the caller gives every view that it holds a gradient; in a trace that is
part of their base's, and the node gets those only that the program itself computes with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aotdist.subclasses.protocol import is_wrapper
from aotdist.torch_seam.autograd import has_several_results, nodes_behind


def parts_without_gradient(
    views: Sequence[torch.Tensor], starts: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Those of `views`, made together with one of `starts`, that a backward from there gives nothing to.

    Where the program computes with one of them itself, nobody gives all of them a gradient outside. Nor does
    anybody where one of them is none of `views`; eager fails then, too.
    """
    views = [view for view in filter(is_wrapper, views) if has_several_results(view)]
    if not views:
        return []
    computed_with = {source for node in nodes_behind(starts) for source, _ in node.next_functions}
    begins = {start.grad_fn for start in starts} - computed_with
    known = {(start.grad_fn, start.output_nr) for start in starts}
    parts = {(view.grad_fn, view.output_nr): view for view in views}
    return [view for edge, view in parts.items() if edge[0] in begins and edge not in known]
