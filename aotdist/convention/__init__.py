"""Layers that lower a calling convention to a simpler one, each with a plan whose `lift` undoes that.

Promises: `lift` undoes `lower`, for results and for writes to arguments:

    plan.lift(inner)  behaves as  outer,  in its results and in what it writes to its arguments

What is left for the graph is a function of plain tensors without aliases or writes. The first two steps are
*layers*: they lower the program before it is traced. The other steps are lowered by the trace itself, and
their plans follow from its facts; `tests/convention` lowers programs by hand, to test each plan without a
compiler. Plans are frozen data. The composed lifts are the reference against which the printed runtime
(`runtime/printer.py`) is tested.

The steps, from the outside in:

1. `dedupe`: an argument given twice is one input.
2. `bases`: inputs that share memory, one of them written, are read through one base (see below).
3. `epilogue`: outputs that alias something are rebuilt outside of the compiled region, by view replay. Views
   of an input that were made before a write to it are rebuilt before the region, so that autograd rebuilds
   their history.
4. `metadata`: `t_`, `resize_`, `set_`, `.data =`, `detach_`, `requires_grad_` are replayed on the user's
   tensor, in program order together with the views of step 3; the region gets the tensor as it was. A tensor
   that begins to require grad in the program does so there, and all its views are made of that one tensor.
5. `mutation`: a write that takes part in the backward is done to the user's tensor outside of the autograd
   node, by an autograd function of its own: the overwritten value gets no gradient from it, where `copy_`
   would add zeros (and -0.0 + 0.0 is 0.0). If the tensor is a view, its base's gradient is assembled as
   eager's `CopySlices` does it.
6. the autograd node.
7. `subclass`: wrappers are unwrapped and rebuilt.
8. `mutation`: any other write is a `copy_` on plain tensors.
9. `rng`, on request: random operators draw from a seed and an offset, the last of the plain inputs.

Version counters increase by as much as in eager (`aliasing/overwrite.py`); a write hidden from autograd
(`x.data`) leaves them alone.

Inputs that share memory
------------------------
Whether two inputs overlap is decided exactly, to the byte (`aliasing/memory.py`: a bounded linear equation,
searched dimension by dimension), so blocks of one matrix count as separate. If a written input overlaps
another, the program is traced again over a base, of one of two kinds (`convention/bases.py`):

- a *span*, the part of the storage that contains them. Each plain tensor, inside wrappers too, is a view of
  it beneath autograd, which does not see that: gradients, identity and history stay those of the inputs;
- a *view base*, if the write has history: then autograd must know that one input is a view of another. The
  base need not be an argument: two slices of one tensor, both written with history, are traced over that
  tensor, and so is a slice whose strides do not place it in its base (of a wrapper, say). Views of another
  kind than their base (`z.real`, conjugates) are refused.

`convention/needed_bases.py` plans both from the writes of a trace. A trace over bases can show further
writes; then the program is traced once more, until the plan holds. Inputs of a view base must not share
memory with an input that autograd does not connect with them (`x` and `x[0]` with `x.detach()`).

A trace rests on assumptions (`Assumptions` in `assumptions.py`): which inputs share memory, that sizes can be
symbols, that none depends on data. One that contradicts them is repeated, in one loop, without these.

Functionalisation writes through `as_strided` only if no other view precedes it, so `as_strided`, and `unfold`
with gaps, are made from the tensor that owns the memory (`trace/strided.py`). A program that reads around an
input in its storage, and writes it, is refused.

The relative layout of inputs in memory, not their addresses, is part of the signature: other layouts take
other artifacts.
"""
