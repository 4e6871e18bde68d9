"""`aotdist.prepare`: `Accelerator.prepare` with a compiled model, sharded by FSDP2 on CPUs too.

The model is sharded here, and accelerate's state is set to FSDP2, so that its methods (`accumulate`,
`clip_grad_norm_`, `save_state`, `get_state_dict`) do what they do for FSDP2. accelerate itself shards on GPUs
only. It is imported when `prepare` is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from aotdist.api import compile as compile_in_place
from aotdist.codegen.backend import Compiler, is_eager, resolve
from aotdist.codegen.contract import Backend
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.settings import Settings, settings_of

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    is_block: Callable[[nn.Module], bool] | None = None,
    backend: str | Compiler | Backend | None = None,
    settings: Settings | Mapping[str, Any] | None = None,
) -> Any:
    """Prepare a model, optimizers, schedules and loaders, in place of `accelerator.prepare`.

    On several ranks the model is sharded in place with FSDP2, with rank 0's values, and the optimizers step
    the shards, with the state that they have already. The model is compiled in place, so
    `accelerator.unwrap_model` returns the original object. Loaders and schedules are prepared by accelerate.

    Args:
        accelerator: without a compiler of its own, or with an `AotdistPlugin`.
        *objects: one model, and any optimizers, schedules and loaders.
        is_block: whether the parameters of a submodule are gathered together; by default as the accelerator's
            FSDP options say, else for the elements of the outermost `nn.ModuleList`s.
        backend: as for `aotdist.compile`; by default the plugin's, else `auto`.
        settings: likewise.

    Returns:
        The prepared objects in the order in which they came; one alone as it is.

    Raises:
        BadSettings: `accelerator` is none, or is set up for what cannot be combined with this.
        UnsupportedProgram: the model is wrapped or sharded already, or an optimizer is of other parameters.
    """
    _require_combinable(accelerator)
    model = _only_model(objects)
    optimizers = [each for each in objects if isinstance(each, Optimizer)]
    for optimizer in optimizers:
        _require_own(model, optimizer)
    plugin = accelerator.state.dynamo_plugin
    code_backend = backend if backend is not None else getattr(plugin, "code_backend", "auto")
    if not is_eager(code_backend):
        code_backend = resolve(code_backend)
        code_backend.check()
    settings = settings_of(settings if settings is not None else getattr(plugin, "settings", None))
    if accelerator.use_distributed:
        _shard(accelerator, model, optimizers, is_block)
        vars(model)["_is_accelerate_prepared"] = True  # accelerate registers it, and does not wrap it
    with _uncompiled(accelerator):
        prepared = [_prepared(accelerator, each) for each in objects]
    compile_in_place(model, backend=code_backend, settings=settings)
    # Schedules come last: accelerate looks for their optimizers among the prepared ones.
    prepared = [
        accelerator.prepare_scheduler(each) if isinstance(each, LRScheduler) else each for each in prepared
    ]
    return tuple(prepared) if len(prepared) > 1 else prepared[0]


def _prepared(accelerator: Accelerator, each: Any) -> Any:
    match each:
        case nn.Module():
            return accelerator.prepare_model(each)
        case Optimizer():
            return accelerator.prepare_optimizer(each)
        case DataLoader():
            return accelerator.prepare_data_loader(each)
        case _:
            return each


@contextmanager
def _uncompiled(accelerator: Accelerator) -> Generator[None]:
    """Keep accelerate from compiling inside: the model is compiled in place, once."""
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    state = accelerator.state
    before, state.dynamo_plugin = state.dynamo_plugin, TorchDynamoPlugin(backend=DynamoBackend.NO)
    try:
        yield
    finally:
        state.dynamo_plugin = before


def _shard(
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    is_block: Callable[[nn.Module], bool] | None,
) -> None:
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    options = _fsdp_options(accelerator)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    _same_on_all_ranks(model, mesh)
    if accelerator.mixed_precision != "no":
        _keep_in_float32(model)
    is_block = is_block or fsdp2_prepare_auto_wrap_policy(options, model)
    blocks = blocks_of(model) if is_block is None else chosen(model, is_block)
    precision = cast("MixedPrecisionPolicy", options.mixed_precision_policy or MixedPrecisionPolicy())
    reshard = bool(options.reshard_after_forward)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    shards = dict(model.named_parameters())
    for optimizer in optimizers:
        _point_to(optimizer, {parameter: shards[name] for parameter, name in names.items()})
    _set_state(accelerator, options)


def _keep_in_float32(model: nn.Module) -> None:
    """Convert trainable half-precision parameters to float32, as accelerate does for mixed precision."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def _fsdp_options(accelerator: Accelerator) -> FullyShardedDataParallelPlugin:
    """The accelerator's FSDP options, or those of `accelerate launch`, which it drops without a GPU.

    Raises:
        BadSettings: an option is not supported.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin

    options = getattr(accelerator.state, "fsdp_plugin", None) or FullyShardedDataParallelPlugin(
        fsdp_version=2
    )
    if options.fsdp_version != 2:
        raise BadSettings("the accelerator is set up for FSDP1", fix="set `fsdp_version` to 2")
    unsupported = {
        "cpu_offload": isinstance(options.cpu_offload, CPUOffloadPolicy),
        "activation_checkpointing": options.activation_checkpointing,
        "ignored_modules": options.ignored_modules,
    }
    for name, asked in unsupported.items():
        if asked:
            raise BadSettings(
                f"`aotdist.prepare` does not know the FSDP option `{name}`",
                fix="checkpoint in the model itself (`torch.utils.checkpoint`)"
                if name == "activation_checkpointing"
                else "leave it out",
            )
    if accelerator.mixed_precision != "no":
        options.set_mixed_precision(accelerator.mixed_precision)
    return options


def _set_state(accelerator: Accelerator, options: FullyShardedDataParallelPlugin) -> None:
    """Set accelerate's state, in both places, to FSDP2."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    accelerator.state.fsdp_plugin = options
    PartialState().distributed_type = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The submodules whose parameters are gathered together.

    These are the elements of the outermost `nn.ModuleList`s, or of a model that is an `nn.Sequential` itself.
    """
    return _elements(model) if isinstance(model, nn.Sequential) else _listed(model)


def _listed(module: nn.Module) -> list[nn.Module]:
    if not isinstance(module, nn.ModuleList):
        return [block for child in module.children() for block in _listed(child)]
    # Lists and dictionaries are never called, so FSDP2 would not gather for them: their elements are blocks.
    return [
        block
        for child in _elements(module)
        for block in (_listed(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child])
    ]


def _elements(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if next(child.parameters(), None) is not None]


def chosen(model: nn.Module, is_block: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """The submodules that a predicate chooses, inner ones first."""
    return [module for module in reversed(list(model.modules())) if module is not model and is_block(module)]


def _same_on_all_ranks(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all ranks the parameters and buffers of rank 0."""
    for tensor in (*model.parameters(), *model.buffers()):
        shared = tensor.detach().to(mesh.device_type)
        dist.broadcast(shared, 0)
        tensor.detach().copy_(shared)


def _require_own(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer of other parameters than the model's.

    Raises:
        UnsupportedProgram: naming the parameter.
    """
    own = set(model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        for at, parameter in enumerate(group["params"]):
            if parameter not in own:
                raise UnsupportedProgram(
                    f"parameter {at} of group {number} of the {type(optimizer).__name__}, of size "
                    f"{list(parameter.shape)}, is not the model's",
                    stage="launch",
                    fix="make the optimizer of `model.parameters()`, and hand both to one `aotdist.prepare`",
                )


def _point_to(optimizer: Optimizer, shards: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Let an optimizer step the shards, with its state (moments) sharded like them."""
    for group in optimizer.param_groups:
        group["params"] = [shards[parameter] for parameter in group["params"]]
    for parameter in cast("list[nn.Parameter]", [*optimizer.state]):
        state = optimizer.state.pop(parameter)
        shard = shards[parameter]
        optimizer.state[shard] = {key: _sharded_as(shard, value) for key, value in state.items()}


def _sharded_as(shard: Tensor, value: Any) -> Any:
    """State of a parameter, sharded like the parameter if it has the parameter's size."""
    if not isinstance(shard, DTensor) or not isinstance(value, Tensor) or value.shape != shard.shape:
        return value
    value = value.to(shard.device)
    return distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=None)


def _require_combinable(accelerator: Accelerator) -> None:
    """Refuse what is no accelerator, and one that shards, compiles or casts in its own way.

    Raises:
        BadSettings: naming the reason.
    """
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, DynamoBackend

    from aotdist.launch.accelerate import AotdistPlugin

    if not isinstance(cast("object", accelerator), Accelerator):
        raise BadSettings(
            f"`aotdist.prepare` takes the accelerator first, and was given a {type(accelerator).__name__}",
            fix="call `aotdist.prepare(accelerator, model, optimizer)`, with an `accelerate.Accelerator`",
        )

    others = {
        DistributedType.DEEPSPEED: "DeepSpeed",
        DistributedType.MEGATRON_LM: "Megatron-LM",
        DistributedType.XLA: "XLA",
    }
    if accelerator.distributed_type in others:
        raise BadSettings(
            f"the accelerator is set up for {others[accelerator.distributed_type]}, and `aotdist.prepare` "
            "shards with FSDP2",
            fix="leave that out of the accelerator and its configuration",
        )
    if accelerator.parallelism_config is not None:
        raise BadSettings(
            "the accelerator has a `parallelism_config`, and `aotdist.prepare` shards over all ranks alike",
            fix="leave it out, or use `parallelize_module`, `fully_shard` and `aotdist.compile` yourself",
        )
    if accelerator.mixed_precision == "fp8":
        raise BadSettings(
            "`aotdist.prepare` does not do accelerate's fp8",
            fix="use `aotdist.to_float8(model)` and mixed_precision='bf16'",
        )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and accelerator.num_processes == 1:
        raise BadSettings(
            f"there are {ranks} ranks, and the accelerator has not joined them: each would train by itself",
            fix="pass `cpu=True` to `Accelerator` where there is no GPU",
        )
    plugin: Any = accelerator.state.dynamo_plugin
    if plugin.backend != DynamoBackend.NO and not isinstance(plugin, AotdistPlugin):
        raise BadSettings(
            f"the accelerator compiles by {plugin.backend.value}, and `aotdist.prepare` by aotdist",
            fix="leave its dynamo backend out, or use `accelerator.prepare`",
        )


def _only_model(objects: Sequence[Any]) -> nn.Module:
    """The model among them.

    Raises:
        BadSettings: there is none, or there are several.
        UnsupportedProgram: something else shards or compiles it already.
    """
    from accelerate.utils import is_compiled_module

    models = [each for each in objects if isinstance(each, nn.Module)]
    if len(models) != 1:
        raise BadSettings(
            f"`aotdist.prepare` takes one model with its optimizers, and was given {len(models)}",
            fix="call it once for each model; loaders alone are for `accelerator.prepare`",
        )
    (model,) = models
    wrapped = {
        "compiled by torch.compile": is_compiled_module(model),
        "in DistributedDataParallel": isinstance(model, DistributedDataParallel),
        "sharded": isinstance(model, FSDPModule)
        or any(isinstance(parameter, DTensor) for parameter in model.parameters()),
        "prepared by accelerate": getattr(model, "_is_accelerate_prepared", False),
    }
    for how, is_so in wrapped.items():
        if is_so:
            raise UnsupportedProgram(
                f"the {type(model).__name__} is {how} already",
                stage="launch",
                fix="hand `aotdist.prepare` the model as it was made",
            )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UnsupportedProgram(
                f"`{name}` is on the meta device: it has no values to shard",
                stage="launch",
                fix="make the model on the CPU or a GPU, at least on rank 0, and `to_empty` elsewhere",
            )
    return model
