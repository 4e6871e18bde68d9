"""Gradients of views that one operator makes together (`split`, `unbind`), where these are wrappers.

The autograd node of such an operator makes plain zeros for a view that gets no gradient, and some wrappers
(DTensor) refuse operators on plain tensors and their own. In eager each view that the caller holds can get a
gradient; in a trace that is part of the gradient of their base, and the node gets gradients only of the views
that the program itself computes with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aotdist.subclasses.protocol import is_wrapper
from aotdist.torch_seam.autograd import has_several_results, nodes_behind


def parts_without_gradient(
    views: Sequence[torch.Tensor], starts: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Those of `views` that are made together with one of `starts` and get no gradient from a backward there.

    Not where the program computes with one of them itself, since then the caller cannot give all of them a
    gradient; nor where one of them is not among `views`, where eager fails, too.
    """
    views = [view for view in filter(is_wrapper, views) if has_several_results(view)]
    if not views:
        return []
    computed_with = {source for node in nodes_behind(starts) for source, _ in node.next_functions}
    begins = {start.grad_fn for start in starts} - computed_with
    known = {(start.grad_fn, start.output_nr) for start in starts}
    parts = {(view.grad_fn, view.output_nr): view for view in views}
    return [view for edge, view in parts.items() if edge[0] in begins and edge not in known]
