"""`functorch.compile`'s entry points, on aotdist's own stages: bring a compiler and a partition of your own.

A compiler is given `(graph_module, fake_arguments)` and returns a callable, boxed if it has a true attribute
`_boxed_call`. It is asked for a backward when that runs for the first time; ahead of time if the program
communicates. A partition is given `(joint_module, (primals, tangents), num_fwd_outputs=...)` and returns the
forward and the backward module; PyTorch's own are accepted too. All graphs keep PyTorch's conventions:

- joint: `primals_1, ..., tangents_1, ...` -> new values of written inputs, results, a gradient, or None, for
  each primal;
- forward: `primals_1, ...` -> new values of written inputs, results, saved values;
- backward: saved values, `tangents_1, ...` -> a gradient, or None, for each primal;
- inference: `arg0_1, ...` -> new values of written inputs, results.

What an input holds that the backward writes is one more tangent, after the others; its new value follows the
gradients.

A backward that neither was shown (from one result to another, where somebody watches; for gradients of other
kinds than the results) is made of what the forward saves, and runs operator by operator.

Where this differs from PyTorch's: only tensors are arguments and results of graphs, and a result that is an
input or a view is made outside of them; a closed-over tensor is one more argument, and gets its gradient; a
call that the compiled program does not fit (another shape, grad mode, constant) is compiled once more,
instead of running what does not fit; a gradient that is None in eager is None.
"""

from aotdist.functorch.backend import FunctorchBackend as FunctorchBackend
from aotdist.functorch.backend import make_boxed_compiler, make_boxed_func, nop, print_compile
from aotdist.functorch.entry import AotFunction as AotFunction
from aotdist.functorch.entry import AotModule as AotModule
from aotdist.functorch.entry import aot_function, aot_module, aot_module_simplified
from aotdist.functorch.partitions import PartitionFn as PartitionFn
from aotdist.functorch.partitions import default_partition, min_cut_rematerialization_partition

__all__ = [
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "default_partition",
    "make_boxed_compiler",
    "make_boxed_func",
    "min_cut_rematerialization_partition",
    "nop",
    "print_compile",
]
