"""Which tensors share memory, and how views are made.

Promises: sharing is decided to the byte; every view of a trace is known with the operation that made it, and
every change of metadata in its order. Nothing here knows of programs or layers.

Facts
-----
Each input is `Untouched` or `DataWritten`, with the number of writes that its version counter shows; writes
to sizes, strides and history are recorded beside it, in order. Each output is `Fresh`, `IsInput`, or a view
of an input, an intermediate or another output.

How a view was made is known from `aliasing/view_log.py`, which a dispatch mode writes
(`aliasing/view_mode.py`): on top of all others, below autograd, where it sees the operations on the tensors
that the user handles, wrappers included, under `no_grad` too. The chain stops at a user's
`autograd.Function`, whose backward would be lost if the operators inside it were replayed.

After a write to its base, autograd rebuilds the history of a view: in eager from the memory layout of the
two, in a trace from the operators that made the view. So a view whose base was reshaped in place since, or
that was reshaped itself, is made again in the trace (`aliasing/metadata.py`). Steps that no operator shows,
such as reading `x.a` of a wrapper or wrapping a tensor anew, are added to such a chain afterwards (`Inside`,
`Around`): outside the graph, `x.a` is read once `x` has been written.
"""
