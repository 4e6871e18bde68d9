"""From a graph to a callable: `contract.py` says what a backend is, `backend.py` what names mean.

Promises: what is emitted computes what the graph says, frees an argument after its last use, and says what it
may do otherwise (round, draw, lay out).

Equal layers
------------
Inductor takes the time that a graph has nodes, and most of these are the same layer again. Where collectives
stand between layers nothing fuses across them, so a graph is cut there, and what is equal up to names is
compiled once (`codegen/regions.py`). Graphs without collectives are cut where layers begin.

Before that, Inductor rewrites the joint graph: it looks for attention that is written out, and drops what
does nothing. That takes 0.16 s a layer of a Llama, so it is done once for blocks that are equal, and once for
what is around them (`codegen/rewritten_blocks.py`). The graph is node for node the one of a rewrite of the
whole.

Random numbers under Inductor
-----------------------------
`codegen/random_operators.py`: on a CPU each random operator of a graph becomes one of ours that calls eager's
own, and takes a result of the one before it. To Inductor it is opaque, so it cannot be decomposed, matched by
a pattern, or moved, and what it returns is memory that has been written. The alternative, Inductor's own
numbers, would be others than eager's and leave the generator elsewhere, and on a CPU they are drawn one by
one. On a GPU they are drawn inside the kernels that read them, which saves memory traffic; there the graph is
left to Inductor.

Operators bound to strides under Inductor
-----------------------------------------
Inductor chooses the strides of its results. For operators tagged as bound to strides (products in 8 bits, and
users' own) it keeps eager's, if nodes note these (`codegen/inductor_rewrites.py`). Without, FP8 on a GPU was
refused, or failed in cuBLAS.

Products on CPUs
----------------
PyTorch's float32 matrix products on x86 are MKL's, whose AVX-512 kernels run on Intel's processors only. On
others with AVX-512, large products of a graph become an operator of ours that calls oneDNN
(`codegen/inductor_rewrites.py`), just before Inductor sees the graph. It takes matrices of any strides, so no
layout has to be agreed on; the left one is laid out by rows in the graph, where Inductor's copy is faster
than the operator's. `fx` keeps eager's products, and so does `torch.backends.mkldnn.flags(enabled=False)`.

Warnings of compilers
---------------------
What Inductor and Triton warn about while they compile is shown, even where the user's filters make errors of
warnings (`warnings_no_errors` in `torch_seam/ambient.py`): whether a program compiles is no matter of
filters. Those belong to all threads, so no `catch_warnings` is set: before each filter that raises stands one
that only the compiling thread matches. A warning of the user's program, while it is traced, raises where it
does in eager.

Marks
-----
Everything that was emitted to run here is wrapped once more (`codegen/marks.py`): while a PyTorch profiler
records, the call is inside a mark with the graph's number and name. The emitters that print graphs then print
a second version, in which `with` blocks mark the operators of each module; it exists from the first profiled
call on. `report/lanes.py` reads a trace with these marks. Operators that start collectives or wait for them
are matched, in order, with those of the graph that a mark names, so that waits have names; gloo's threads are
assigned to the process group that matches most of what they ran.
"""
