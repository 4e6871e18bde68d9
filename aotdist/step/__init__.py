"""A function that calls `backward()` or steps optimizers, compiled as one program without autograd.

Promises: the state stays in the user's objects; the result is that of the step as it is written.

A function becomes a step when its trace first needs a gradient of an input (`step/whole.py`). It is captured
as it is written. A torch-function mode (`step/accumulation.py`) turns `backward()` into an `autograd.grad`
inside of the trace, and answers reads of `.grad`: the gradient that an input has when the call begins is one
more graph input. New gradients get the strides that autograd would give them; they are graph outputs, which
are assigned at the end. Writing a sparse tensor of the caller's (a gradient, momentum) changes its sizes, so
the trace writes a copy, whose content the caller's tensor then takes over. So a step is an inference program
that writes its inputs; no stage after the trace treats it in another way.

Hooks of all optimizers tell which of them step (`step/stepping.py`). The tensors and numbers that they hold
are passed in by name at each call (`step/held.py`); what a step replaces is returned (`step/result.py`).
A `GradScaler` becomes operators that select. Schedules step after the call has run; if a step reads what they
set, copies of them step before the call. A tensor that does not exist yet cannot be an input: a step that
creates state runs eagerly, and so does the first, which shows what optimizers step.

Optimizers compute numbers in Python and pass them to operators. Such numbers are nodes that call the same
Python functions (`trace/numbers/scalars.py`), as float64 tensors would round differently. PyTorch unpacks a
number where no mode sees it, so a unique float stands for it, which the recorder recognises among the
arguments of operators; if it does not appear, other code has computed with it, and the program is rejected.
`fx` runs such a graph as it is; for other compilers it is cut in two (`codegen/numbers.py`): what follows
from step counts and learning rates is computed first, in Python, and passed to the rest as the elements of
one tensor. Where an optimizer branches on a number, the branch of the captured call is taken, and each later
call compares its own numbers (`step/program.py`). Numbers among the arguments, and numbers that the program
finds elsewhere, are handled in one way if they change between calls: a learning rate computed by hand from
the iteration. Integers that Python computes from integers are symbols, too, and may be sizes.

`train_step` writes such a function for a model, a loss and an optimizer (`step/train_step.py`).
"""
