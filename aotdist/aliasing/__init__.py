"""Which tensors share memory, and how views are made.

Promises: whether tensors overlap is decided to the byte; for every view in a trace the operation that made it
is known, and for in-place changes of metadata their order. Nothing here knows of programs or layers.

Facts
-----
Each input is `Untouched` or `DataWritten`, with the number of writes that its version counter shows; writes
to sizes, strides and history are recorded beside it, in order. Each output is `Fresh`, `IsInput`, or a view
of an input, an intermediate or another output.

The chain of operations that made a view is in the view log (`aliasing/view_log.py`). A dispatch mode writes
it (`aliasing/view_mode.py`), the topmost one, directly below autograd: it sees the operations on the tensors
that the user's code handles, wrappers included, also under `no_grad`. A chain stops at a tensor that a user's
`autograd.Function` returned, as replaying the operators inside of that would lose its backward.

After a write to its base, autograd rebuilds the history of a view: in eager from the memory layout of the
two, in a trace from the operators that made the view. These no longer apply if the view was reshaped in place
since; so its history is then rebuilt here (`aliasing/metadata.py`). If the base was, the view is refused.

One kind of views is made by no operator: tensors inside of a wrapper (`x.a`). They are added to the chain
when it is read (`Inside`): outside of the graph, `x.a` is read after `x` has been written. A wrapper around
memory of an input that is written is refused.
"""
