"""The entry points, with `functorch.compile`'s parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule

from aotdist.capture.captured import UserCall
from aotdist.codegen.backend import CallableBackend, Compiler
from aotdist.compiled import CompiledFunction
from aotdist.compiling import Compiling, OpenDims
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.export.refusals import refuse_arguments
from aotdist.export.trace import state_of
from aotdist.functorch.backend import FunctorchBackend
from aotdist.functorch.convention import OpenSizes
from aotdist.functorch.partitions import PartitionFn, default_partition
from aotdist.origins import short_tracebacks
from aotdist.passes.run import PASS_NAMES
from aotdist.subclasses.protocol import is_real
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.symbols import hint


def _refuse(**options: tuple[bool, str]) -> None:
    """Raise for the first option that is set; options come with whether they are, and a fix."""
    for name, (is_set, fix) in options.items():
        if is_set:
            raise BadSettings(f"`{name}` cannot be honoured", fix=fix)


def _compilers(
    fw_compiler: Any, bw_compiler: Any, inference_compiler: Any, decompositions: Any, **functions: Any
) -> CallableBackend:
    """The user's compilers and decompositions; `functions` are other arguments that must be callable.

    Raises:
        BadSettings: an argument has the wrong type.
    """
    optional = {"bw_compiler": bw_compiler, "inference_compiler": inference_compiler}
    given = {name: value for name, value in optional.items() if value is not None}
    for name, value in {**functions, "fw_compiler": fw_compiler, **given}.items():
        if not callable(value):
            raise BadSettings(f"`{name}` is {value!r}", fix="pass a function")
    if decompositions is not None and not isinstance(decompositions, Mapping):
        raise BadSettings(
            f"`decompositions` is a {type(decompositions).__name__}",
            fix="pass a dictionary from operators to functions",
        )
    return CallableBackend(fw_compiler, bw_compiler, inference_compiler, dict(decompositions or {}))


def _refuse_no_module(mod: Any) -> None:
    if not isinstance(mod, nn.Module):
        raise BadSettings(
            f"`mod` is a {type(mod).__name__}", fix="pass a module, or use `aot_function` for a function"
        )


class AotFunction(CompiledFunction):
    """A function that the user's partition and compilers compile."""

    def __init__(
        self,
        fn: Callable[..., Any],
        backend: FunctorchBackend,
        *,
        dynamic: bool,
        open_dims: OpenDims | None = None,
    ) -> None:
        settings = replace(
            backend.settings,
            # The user's compilers get what the user's partition returned: no pass changes it in between.
            partition="default",
            disabled_passes=frozenset(PASS_NAMES),
            dynamic=dynamic,
            functional_rng=False,  # PyTorch's convention has no place for seed and offset
        )
        super().__init__(fn, Compiling(backend, settings, open_dims))

    @short_tracebacks
    def compile_for(self, *args: Any) -> None:
        """Compile for a call with these arguments, without calling."""
        self._made(args, {})


_FUNCTIONAL = "leave it False: every graph is functional"


def aot_function(
    fn: Callable[..., Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: PartitionFn = default_partition,
    decompositions: Mapping[OpOverload, Callable[..., Any]] | None = None,
    num_params_buffers: int = 0,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    *,
    dynamic: bool = False,
    enable_log: bool = True,
    disable_functionalization: bool = False,
) -> AotFunction:
    """Compile a function with compilers of your own, at its first call.

    Args:
        fn: takes and returns any pytrees of tensors and constants.
        fw_compiler: compiles forwards.
        bw_compiler: compiles backwards, each when it runs for the first time, ahead of time if the program
            communicates; `fw_compiler` if None.
        partition_fn: cuts the joint graph in two.
        decompositions: operators that the trace must decompose.
        num_params_buffers: how many of the first tensors are parameters and buffers; passed to partitions.
        keep_inference_input_mutations: ignored: graphs return new values of inputs, which are copied into
            these behind the graph.
        inference_compiler: compiles programs without a backward; `fw_compiler` if None.
        dynamic: give sizes of the arguments symbols; the graphs take these after all tensors.
        enable_log: ignored; `TORCH_LOGS` sets what is logged.
        disable_functionalization: not available.

    Raises:
        BadSettings: an option that is not available is set, or an argument has the wrong type.
    """
    brought = (fw_compiler, bw_compiler, inference_compiler, decompositions)
    compilers = _compilers(*brought, fn=fn, partition_fn=partition_fn)
    _refuse(disable_functionalization=(disable_functionalization, _FUNCTIONAL))
    return AotFunction(
        fn,
        FunctorchBackend(compilers, partition_fn, num_params_buffers),
        dynamic=dynamic,
    )


class AotModule(nn.Module):
    """A module that runs the compiled call of another module.

    Args:
        mod: the other module, which keeps its parameters.
        compiled: takes parameters and buffers by name, then the arguments.
    """

    def __init__(self, mod: nn.Module, compiled: Callable[..., Any]) -> None:
        super().__init__()
        self.orig_module = mod
        self._compiled = compiled

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled call with the present parameters and buffers, under each of their names."""
        params = dict(self.orig_module.named_parameters(remove_duplicate=False))
        buffers = dict(self.orig_module.named_buffers(remove_duplicate=False))
        return self._compiled(params, buffers, *args, **kwargs)


def _num_distinct(mod: nn.Module) -> int:
    """How many parameters and buffers a module has; tied ones count once."""
    return len({id(leaf.value) for leaf, _ in state_of(mod)})


def _called_with(
    mod: nn.Module, state: Mapping[str, torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """`torch.func.functional_call`, after which assigned buffers keep their new tensors, as in eager."""
    after = dict(state)
    result = torch.func.functional_call(mod, after, args, dict(kwargs))
    for name, value in after.items():  # `functional_call` stores the final tensors there
        if value is not state[name]:
            owner, _, key = name.rpartition(".")
            setattr(mod.get_submodule(owner), key, value)
    return result


def aot_module(mod: nn.Module, *args: Any, **kwargs: Any) -> AotModule:
    """`aot_function` of a module: its parameters and buffers become the first arguments of the graphs.

    Args:
        mod: the module; it is not changed.
        args: of `aot_function`, without the function.
        kwargs: likewise.
    """
    _refuse_no_module(mod)

    def functional_call(
        named_params: Mapping[str, torch.Tensor],
        named_buffers: Mapping[str, torch.Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return _called_with(mod, {**named_params, **named_buffers}, args, kwargs)

    kwargs = {"num_params_buffers": _num_distinct(mod), **kwargs}
    return AotModule(mod, aot_function(functional_call, *args, **kwargs))


def aot_module_simplified(
    mod: nn.Module,
    args: Sequence[Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: PartitionFn = default_partition,
    decompositions: Mapping[OpOverload, Callable[..., Any]] | None = None,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    compiler_config_extra: Any = None,
    ignore_shape_env: bool = False,
    disable_functionalization: bool = False,
    pre_grad_passes: Callable[[GraphModule, Sequence[Any]], GraphModule] | None = None,
    compile_region_name: str | None = None,
) -> Callable[..., Any]:
    """Compile a module for flat arguments, now, with the parameters that it has now.

    Args:
        mod: returns a flat tuple or list.
        args: of a call; if they are fake, the first call compiles. Sizes that are symbols there, or in the
            placeholders of a graph of Dynamo's, are symbols of the graphs; arguments that are such sizes are
            read off the tensors that have them.
        fw_compiler: compiles forwards.
        bw_compiler: compiles backwards; `fw_compiler` if None.
        partition_fn: cuts the joint graph in two.
        decompositions: operators that the trace must decompose.
        keep_inference_input_mutations: as for `aot_function`.
        inference_compiler: compiles programs without a backward; `fw_compiler` if None.
        compiler_config_extra: not available; it belongs to a cache of PyTorch's.
        ignore_shape_env: treat all sizes as static.
        disable_functionalization: not available.
        pre_grad_passes: applied to `mod`, if that is a graph module, before anything else.
        compile_region_name: names the compiled function.

    Returns:
        a function of flat arguments that returns a list, with the module's `zero_grad`, `named_parameters`
        and `named_buffers`.

    Raises:
        BadSettings: an option that is not available is set, or an argument has the wrong type.
        UnsupportedProgram: the module does not return a tuple or a list.
    """
    _refuse_no_module(mod)
    refuse_arguments(args)
    brought = (fw_compiler, bw_compiler, inference_compiler, decompositions)
    compilers = _compilers(*brought, partition_fn=partition_fn)
    _refuse(
        compiler_config_extra=(compiler_config_extra is not None, "leave it out"),
        disable_functionalization=(disable_functionalization, _FUNCTIONAL),
    )
    if pre_grad_passes is not None and isinstance(mod, GraphModule):
        mod = pre_grad_passes(mod, args)
    state = state_of(mod)
    names = [leaf.path for leaf, _ in state]
    sizes = OpenSizes({}, {}) if ignore_shape_env else OpenSizes.of(mod, args)

    def flat_call(*flat: Any) -> Any:
        by_name = dict(zip(names, flat, strict=False))
        result = _called_with(mod, by_name, tuple(sizes.put_in(flat[len(names) :])), {})
        if not isinstance(result, (tuple, list)):
            raise UnsupportedProgram(
                f"the module returns a {type(result).__name__}, not a tuple or a list",
                stage="capture",
                fix="return a tuple, or use `aot_module`",
            )
        return list(result)

    flat_call.__name__ = compile_region_name or type(mod).__name__
    count = _num_distinct(mod)
    backend = FunctorchBackend(compilers, partition_fn, count)

    def open_dims(call: UserCall) -> dict[int, frozenset[int]]:
        return sizes.by_identity(call.args[len(names) :])

    compiled = AotFunction(flat_call, backend, dynamic=False, open_dims=open_dims)
    if all(is_real(arg) for arg in args if isinstance(arg, torch.Tensor)):
        compiled.compile_for(*(leaf.value for leaf, _ in state), *map(hint, sizes.left_out(args)))

    params = [leaf.value for leaf, _ in state if leaf.kind == "parameter"]
    places = [place for leaf, place in state if leaf.kind == "buffer"]

    def forward(*runtime_args: Any) -> Any:
        buffers = (owner[key] for owner, key in places)  # the program may assign them
        return compiled(*params, *buffers, *sizes.left_out(runtime_args))

    attached = cast(Any, forward)
    attached.zero_grad = mod.zero_grad
    attached.named_parameters = mod.named_parameters
    attached.named_buffers = mod.named_buffers
    return forward
