"""A function that calls `backward()`, or lets optimizers step, as one program without autograd.

Promises: state is the user's; the step as written is its definition.

What `aotdist.compile` is given becomes a step when its trace meets a gradient of an input (`step/whole.py`).
It is captured as it is written. A torch-function mode (`step/accumulation.py`) makes `backward()` an
`autograd.grad` inside of the trace and answers for `.grad`: what an input's gradient is when the call begins
is one more input, and new gradients are laid out as autograd would accumulate them, results that are assigned
at the end. A sparse tensor that the call finds (a gradient, momentum) has other sizes when it is written, so
a copy is, and the caller's takes over what that holds. So a step is an inference program that writes its
inputs, and nothing after the trace knows of it.

Hooks of all optimizers say which of them step (`step/turns.py`). What they hold is passed in at each call, by
name, as it is then (`step/held.py`); what a step assigns anew is returned as results (`step/done.py`).
Scalers become operators that select; schedules step when the call has run, and where a step reads what they
leave, copies of them do so before. State that does not exist cannot be named: a step that creates some runs
as it was written, and so does the first, which shows who steps.

Optimizers compute in Python what they then pass to operators, on numbers that they read off tensors. Those
numbers are nodes that call the same Python functions (`trace/numbers/scalars.py`): float64 tensors would
round differently. PyTorch unpacks a number where no mode sees it, so a token is passed in its place, a float
that the recorder recognises among the arguments of operators; if it does not, some other code computed with
the number, and the program is rejected. `fx` runs such a graph as it is; for other compilers it is cut in two
(`codegen/numbers.py`): numbers that follow from step counts and learning rates are computed first, in Python,
and are elements of one tensor to the rest. Where an optimizer branches on a number, the comparison is
answered with the values of the call, and is asked again at the next (`step/program.py`). Numbers that change,
and that the program is given or finds, are such numbers, too: a rate is computed by hand of an iteration.
What Python computes of whole numbers alone is a symbol besides, which may be a size.

`train_step` writes such a function for a model, a loss and an optimizer (`step/train_step.py`).
"""
