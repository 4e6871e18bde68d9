"""The compiled callable at run time: a printed function around compiled graphs, with one autograd node.

Promises: an artifact runs only for a call that passes its guards; a call is right, or raises before anything
was written; the code that runs can be read (`.source`).

What runs at a call
-------------------
The printed function of each artifact fetches the tensors, tests the guards, and runs the graph. If a guard
fails, it returns `MISS` before anything has happened, and the next artifact is tried; if none is left, the
call is compiled. Guards are on:

- the ambient modes (grad, autocast, deterministic, default dtype and device, choice of kernels, DTensor's
  contexts);
- closed-over constants, functions and classes, and which places hold the same object; constants, children
  and hooks of modules;
- the metadata of all tensors, in one C++ check, and the contexts of wrappers;
- if the program writes inputs, which inputs share memory.

A wrapper is saved for the backward as the plain tensors inside it, whose version counters do not count writes
to the wrapper. So the node notes the wrapper's own counter as well, and the backward raises autograd's error
if it has changed (`runtime/held.py`).

Memory that a graph frees stays on glibc's heap for the next step (`runtime/artifact.py`); otherwise zeroing
pages would take a sixth of a small step.
"""
