"""`functorch.compile`'s entry points, on aotdist's own stages: bring a compiler and a partition of your own.

A compiler takes `(graph_module, fake_arguments)` and returns a callable, which takes its arguments as one
list if it has a true attribute `_boxed_call`. A backward is compiled when it runs for the first time, or
ahead of time if the program communicates. A partition takes `(joint_module, (primals, tangents),
num_fwd_outputs=...)` and returns the forward and the backward module; PyTorch's partitions are accepted. All
graphs keep PyTorch's conventions:

- joint: `primals_1, ..., tangents_1, ...` -> new values of written inputs, results, a gradient, or None, for
  each primal;
- forward: `primals_1, ...` -> new values of written inputs, results, saved values;
- backward: saved values, `tangents_1, ...` -> a gradient, or None, for each primal;
- inference: `arg0_1, ...` -> new values of written inputs, results.

Where the backward writes an input, the input's value is one more tangent, after the others, and its new value
follows the gradients.

Other backwards (from one result to another, for hooks and `inputs=`; for tangents of another class than the
results) are derived from the saved values, and run operator by operator: they never reach the user's
partition or compilers.

Where this differs from PyTorch's: only tensors are arguments and results of graphs, and results that are
inputs or views are made outside of the graphs; a closed-over tensor is one more argument, and gets its
gradient; a call that does not fit what was compiled (another shape, grad mode or constant) is compiled anew;
a gradient that is None in eager is None.
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
