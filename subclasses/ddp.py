"""DistributedDataParallel: gradients reduced by a C++ reducer, in hooks, bucket by bucket.

DDP's forward prepares the reducer at every call, which a graph cannot do. So it is never captured:
`aotdist.compile` on a DDP module compiles the module inside it, and DDP's own forward still runs around it
(it broadcasts buffers and moves inputs). The reducer itself could only start when the whole backward is done.
So the reductions are recorded in the graph, a bucket's as one unit for the passes to merge and overlap, and
DDP's own switch, which `no_sync()` uses, keeps the reducer from repeating them during the call::

    parameter ─────────────────────────────────────────────────────────► module
    .grad ◄─ wait_tensor ◄─ all_reduce ◄─ 1 / ranks ◄───────────────────── its grad

Values are equal bit for bit on two ranks; more add in an order that the collective may choose by the place in
its buffer, which DDP itself changes after its first step.

The reducer itself still runs wherever it does more than that: where gradients exist already (it reduces the
sum), for unused parameters, a static graph, gradients as views of buckets, communication hooks, mixed
precision, `join()`, and where a parameter has hooks, which have to see gradients that are not reduced yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Hashable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from aotdist.errors import UnsupportedProgram
from aotdist.origins import annotate
from aotdist.subclasses.protocol import ContainerRule, ModuleRule
from aotdist.torch_seam.fsdp import reduces_plainly
from aotdist.torch_seam.tensors import as_parameter, has_grad_hooks

_c10d = torch.ops._c10d_functional


class _Replica:
    """A module that DDP wraps: its process group and buckets.

    Attributes:
        reducing: whether the present call reduces gradients in the graph.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.group = ddp.process_group
        self.buckets = _buckets(ddp)
        self.reducing = False


class _DataParallelRule(ModuleRule, ContainerRule):
    name = "ddp"
    communicates = True

    def __init__(self) -> None:
        self._replicas: WeakKeyDictionary[nn.Module, _Replica] = WeakKeyDictionary()

    def contained(self, module: nn.Module) -> nn.Module | None:
        if not isinstance(module, DistributedDataParallel):
            return None
        self._replicas[module.module] = _Replica(module)
        return module.module

    @contextmanager
    def calling(self, module: Any) -> Generator[None]:
        replica = self._replicas[module.module]
        if not _reduces_in_graph(module):
            yield
            return
        replica.reducing, module.require_backward_grad_sync = True, False
        try:
            yield
        finally:
            # As after any synchronised step, buffers are broadcast before the next forward.
            replica.reducing, module.require_backward_grad_sync = False, True
            module.require_forward_param_sync = True

    def claims(self, root: nn.Module) -> bool:
        return root in self._replicas or any(isinstance(m, DistributedDataParallel) for m in root.modules())

    def flags(self, root: nn.Module) -> Hashable:
        replica = self._replicas.get(root)
        return replica is not None and replica.reducing

    def capturing(self, root: nn.Module) -> AbstractContextManager[None]:
        replica = self._replicas.get(root)
        if replica is None:
            return _refused_forwards(root)
        return _reduced_parameters(root, replica) if replica.reducing else nullcontext()


MODULE_RULE = CONTAINER_RULE = _DataParallelRule()


class _Reduce(torch.autograd.Function):
    """A parameter; its gradient is averaged over the ranks."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, group: Any, bucket: str) -> torch.Tensor:
        """The parameter itself."""
        ctx.group, ctx.bucket = group, bucket
        ctx.set_materialize_grads(False)  # a parameter without a gradient gets none
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        """The average, scaled before it is summed, as in the reducer."""
        (grad,) = grads
        if grad is None:
            return None, None, None
        with annotate(ctx.bucket):
            scaled = grad * (1.0 / ctx.group.size())
            reduced = _c10d.wait_tensor(_c10d.all_reduce(scaled, "sum", ctx.group.group_name))
        return reduced, None, None


@contextmanager
def _refused_forwards(root: nn.Module) -> Generator[None]:
    """Raise where a DDP module in `root` is called; one that is not called is no part of the program."""
    inside = [(path, m) for path, m in root.named_modules() if isinstance(m, DistributedDataParallel)]
    with ExitStack() as stack:
        for path, module in inside:
            stack.enter_context(_forward_of(module, functools.partial(_refuse_call, path)))
        yield


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., None]) -> Generator[None]:
    attributes = vars(module)
    before = {"forward": attributes["forward"]} if "forward" in attributes else {}
    attributes["forward"] = forward
    try:
        yield
    finally:
        del attributes["forward"]
        attributes.update(before)


def _refuse_call(path: str, *args: Any, **kwargs: Any) -> None:
    raise UnsupportedProgram(
        f"`{path or '(root)'}` is a DistributedDataParallel module inside of what is compiled",
        stage="capture",
        fix="compile the model before it is wrapped, or the DDP module itself, "
        "`aotdist.compile(ddp_model)`, and call it from uncompiled code",
    )


@contextmanager
def _reduced_parameters(root: nn.Module, replica: _Replica) -> Generator[None]:
    """Register, in place of each parameter of a bucket, one whose gradient is reduced."""
    registered = dict(root.named_parameters(remove_duplicate=False))
    reduced: dict[int, torch.Tensor] = {}
    for name, bucket in replica.buckets.items():
        param = registered[name]
        if param.requires_grad:
            reduced[id(param)] = as_parameter(_Reduce.apply(param, replica.group, bucket))
    places = [(name, param) for name, param in registered.items() if id(param) in reduced]
    try:
        for name, param in places:
            _register(root, name, reduced[id(param)])
        yield
    finally:
        for name, param in places:
            _register(root, name, param)


def _register(root: nn.Module, name: str, param: torch.Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    vars(root.get_submodule(path))["_parameters"][attribute] = param


def _buckets(ddp: Any) -> dict[str, str]:
    """The bucket of each parameter that DDP reduces, by name.

    The last parameters, whose gradients come first, share the first bucket. Buckets have the size of DDP's
    own, but the first one is not smaller: nothing waits for it here.
    """
    buckets: dict[str, str] = {}
    count = held = 0
    for name, param in reversed(list(ddp.module.named_parameters())):
        if not param.requires_grad or name in ddp.parameters_to_ignore:
            continue
        size = param.numel() * param.element_size()
        if held and held + size > ddp.bucket_bytes_cap:
            count, held = count + 1, 0
        held += size
        buckets[name] = f"bucket_{count}"
    return buckets


def _reduces_in_graph(ddp: Any) -> bool:
    """Whether the reducer would do no more than average this call's gradients."""
    if not torch.is_grad_enabled() or not ddp.require_backward_grad_sync:
        return False
    if ddp.find_unused_parameters or ddp.static_graph or ddp.gradient_as_bucket_view or ddp.mixed_precision:
        return False
    return reduces_plainly(ddp) and not any(
        param.grad is not None or has_grad_hooks(param) for param in ddp.module.parameters()
    )
