"""`.grad` while a step is traced: kept here, as the user's tensors must not get gradients of the trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import SparseRows
from aotdist.torch_seam.autograd import in_backward, nodes_behind
from aotdist.torch_seam.control_flow import hands_out_more
from aotdist.torch_seam.modes import torch_functions_off
from aotdist.torch_seam.patches import replaced_here
from aotdist.torch_seam.tensors import has_grad_hooks
from aotdist.torch_seam.trees import pytree
from aotdist.trace.failures import refusal
from aotdist.trace.stand_ins import current_inputs

_GRAD: Any = torch.Tensor.grad


@dataclass(slots=True)
class _Leaf:
    """A leaf whose gradient the step has read or computed.

    Args:
        tensor: the leaf, as the program sees it.
        before: the gradient that it had when the call began.
        now: the gradient that it has.
        begun: the tensor that the program gets for `before`; for a sparse gradient a copy, which may be
            written.
    """

    tensor: torch.Tensor
    before: torch.Tensor | None
    now: torch.Tensor | None
    begun: torch.Tensor | None


class Accumulation(TorchFunctionMode):
    """Answers reads and writes of the `.grad` of leaves, and accumulates into it in `backward()`.

    A leaf is an input of the step or was made in it. The gradient that an input has when the call begins is
    one more input of the trace.
    """

    def __init__(self) -> None:
        super().__init__()
        self._leaves: dict[int, _Leaf] = {}
        self._retains = False

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """The context in which a step is traced."""
        with self, replaced_here(torch.autograd, "backward", self._autograd_backward):
            yield

    def assigned(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs whose gradient was replaced, with the new one."""
        return [
            (leaf.tensor, leaf.now)
            for leaf in self._of_inputs()
            if leaf.now is not None and leaf.now is not leaf.begun
        ]

    def begun(self) -> list[tuple[SparseRows, SparseRows]]:
        """Sparse gradients that inputs had, each with the copy that the program wrote."""
        found = [(leaf.before, leaf.begun) for leaf in self._of_inputs()]
        return [(a, b) for a, b in found if isinstance(a, SparseRows) and isinstance(b, SparseRows)]

    def as_given(self, result: Any) -> Any:
        """A result in which copies of sparse gradients are replaced by the caller's gradients."""
        given = {id(leaf.begun): leaf.before for leaf in self._leaves.values()}
        return pytree.tree_map_only(SparseRows, lambda one: given.get(id(one), one), result)

    def cleared(self) -> list[torch.Tensor]:
        """Inputs that had a gradient, and have none."""
        return [leaf.tensor for leaf in self._of_inputs() if leaf.now is None and leaf.before is not None]

    def _of_inputs(self) -> list[_Leaf]:
        inputs = current_inputs()
        return [leaf for leaf in self._leaves.values() if inputs.index_of(leaf.tensor) is not None]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == _GRAD.__get__:
            return self._gradient(args[0])
        if func in (_GRAD.__set__, _GRAD.__delete__):
            if (leaf := self._leaf(args[0])) is not None:
                leaf.now = args[1] if func == _GRAD.__set__ else None
                return None
        if func is torch.Tensor.backward and not in_backward():
            return self._backward(*args, **(kwargs or {}))
        if func is torch.sparse_coo_tensor and _are_rows(*args, **(kwargs or {})):
            return SparseRows.of((args[0][0], args[1]), args[2])
        self._retains = self._retains or func is torch.Tensor.retain_grad
        return func(*args, **(kwargs or {}))

    def _gradient(self, tensor: torch.Tensor) -> torch.Tensor | None:
        leaf = self._leaf(tensor)
        return tensor.grad if leaf is None else leaf.now

    def _leaf(self, tensor: torch.Tensor) -> _Leaf | None:
        """The record of a leaf, given the user's tensor or its stand-in; None for any other tensor."""
        inputs = current_inputs()
        stand_in = inputs.of_example(tensor)
        found = self._leaves.get(id(tensor if stand_in is None else stand_in))
        if found is not None:
            return found
        before = tensor.grad if tensor.is_leaf else None  # reading it makes a stand-in for a user's tensor
        stand_in = inputs.of_example(tensor)
        tensor = tensor if stand_in is None else stand_in
        if not tensor.is_leaf:
            return None
        begun = before.again() if isinstance(before, SparseRows) else before
        self._leaves[id(tensor)] = leaf = _Leaf(tensor, before, begun, begun)
        return leaf

    def _backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        grads = None if gradient is None else [gradient]
        self._accumulate([loss], grads, retain_graph, create_graph, inputs)

    def _autograd_backward(
        self,
        original: Callable[..., None],
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """Replaces `torch.autograd.backward` in the trace, but for calls by checkpoints in a backward."""
        if in_backward():
            return original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        grads = grad_tensors if grad_variables is None else grad_variables
        roots, seeds = ([each] if isinstance(each, torch.Tensor) else each for each in (tensors, grads))
        return self._accumulate(list(roots), seeds, retain_graph, create_graph, inputs)

    def _accumulate(
        self,
        roots: Sequence[torch.Tensor],
        seeds: Sequence[torch.Tensor | None] | None,
        retain_graph: bool | None,
        create_graph: bool,
        inputs: Any,
    ) -> None:
        if self._retains or create_graph:
            what = (
                "a tensor retains its gradient"
                if self._retains
                else "`backward(create_graph=True)` is called"
            )
            raise refusal(
                f"{what} inside of a compiled step",
                fix="ask for it by `torch.autograd.grad`, which is compiled",
            )
        if hands_out_more(roots):
            raise refusal(
                "a loss follows from something that a reentrant checkpoint hands out besides its results",
                fix="use `checkpoint(..., use_reentrant=False)`: in eager, it has no gradient otherwise",
            )
        wanted = [inputs] if isinstance(inputs, torch.Tensor) else inputs
        ends = _leaves_behind(roots) or roots if wanted is None else list(wanted)
        found = list[torch.Tensor | None](
            torch.autograd.grad(roots, ends, seeds, retain_graph=retain_graph, allow_unused=True)
        )
        with torch.no_grad():
            for end, grad in zip(ends, found, strict=True):
                if grad is not None:
                    self._add(end, grad)

    def _add(self, end: torch.Tensor, grad: torch.Tensor) -> None:
        leaf = self._leaf(end)
        if leaf is None:
            raise refusal(
                "`backward(inputs=)` is given a tensor that is no leaf", fix="use `torch.autograd.grad`"
            )
        if leaf.now is None:
            leaf.now = _laid_out_like(grad, leaf.tensor)
        elif leaf.now.is_sparse and not grad.is_sparse:
            leaf.now = grad + leaf.now
        else:
            leaf.now.add_(grad)


def _are_rows(indices: Any, values: Any, size: Any = None, **options: Any) -> bool:
    """Whether a sparse tensor is made of rows of a matrix without history, as `Adagrad` does."""
    has_history = torch.is_grad_enabled() and values.requires_grad
    if has_history or options or size is None or not isinstance(indices, torch.Tensor):
        return False
    return (indices.dim(), indices.shape[0], values.dim()) == (2, 1, 2)


def _leaves_behind(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that a backward from `roots` gives gradients to, as the program sees them.

    Raises:
        UnsupportedProgram: one was computed before the step, and its gradient would go on from there; or its
            hooks would run while the step is traced, and then no more.
    """
    ends: list[torch.Tensor] = []
    inputs = current_inputs()
    stand_ins = {id(one.leaf): one for one in inputs.behind(roots)}
    with torch_functions_off():  # which would look at stand-ins in their places
        hooked = {key for key, one in stand_ins.items() if has_grad_hooks(one.example)}
    for variable in (node.variable for node in nodes_behind(roots) if hasattr(node, "variable")):
        one = stand_ins.get(id(variable))
        if one is not None and not one.example.is_leaf:
            raise UnsupportedProgram(
                f"`{one.slot}` gets a gradient, and was computed before the step",
                stage="joint",
                fix="detach it, or compute it inside",
            )
        if one is not None and id(variable) in hooked:
            raise UnsupportedProgram(
                f"`{one.slot}` has hooks of its gradient (`register_hook`, or "
                "`register_post_accumulate_grad_hook`)",
                stage="joint",
                fix="do what they do between `backward()` and the optimizer's step",
            )
        ends.append(variable if one is None else one.tensor)
    return ends


def _laid_out_like(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """`grad` with the strides of `param`, if that has no gaps, as autograd accumulates it.

    What reads gradients in the order of memory (a norm) adds up in another order otherwise. It is detached,
    too: a view that a backward took under `no_grad` could not be written with history (`grad.add_(param)`).
    """
    if isinstance(grad, SparseRows):
        return grad.with_values(grad.stored().contiguous())
    wanted = torch.empty_like(param).stride()
    if all(size == 1 or a == b for size, a, b in zip(grad.shape, grad.stride(), wanted, strict=True)):
        return grad.detach()
    return torch.empty_like(param).copy_(grad)
