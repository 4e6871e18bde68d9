"""The whole training step as one program: forward, loss, backward, clipping, optimizer.

Promises: state is the user's; the step as written is its definition.

A step is captured as it is written (`step/program.py`): `loss.backward()` becomes `autograd.grad` inside of
the trace, and a torch-function mode keeps the gradients that the optimizer, and the clipping, read from
parameters (`step/gradients.py`), laid out as autograd would accumulate them. So a step is an inference
program that writes its inputs, and nothing after the trace knows of it. State and gradients are passed in at
each call, by name, as the optimizer holds them then (`step/held.py`); what its step assigns anew is returned
as results (`step/done.py`).

Optimizers compute in Python what they then pass to operators, on numbers that they read off tensors. Those
numbers are nodes that call the same Python functions (`trace/numbers/scalars.py`): float64 tensors would
round differently. PyTorch unpacks a number where no mode sees it, so a token is passed in its place, a float
that the recorder recognises among the arguments of operators; if it does not, some other code computed with
the number, and the program is rejected. `fx` runs such a graph as it is; for other compilers it is cut in two
(`codegen/numbers.py`): numbers that follow from step counts and learning rates are computed first, in Python,
and are elements of one tensor to the rest.

Where an optimizer branches on a number, the comparison is answered with the values of the call, and becomes a
question for the next call, answered by running the nodes that led to it (`step/program.py`). State that does
not exist cannot be named: a step that creates some runs eagerly. The first one always does, which also shows
what it changes about itself.
"""
