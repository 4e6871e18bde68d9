"""What the user calls: printed wrappers around compiled graphs, with one autograd node.

Promises: an artifact runs only for a call that it fits, and a call is right or raises before anything was
written; what runs can be read (`.source`).

What runs at a call
-------------------
The printed function of each artifact fetches the tensors, checks that the artifact fits, and runs it. If it
does not fit, the function returns `MISS` before anything has happened, and the next artifact is tried; if
none fits, a new one is compiled. The check covers:

- the ambient modes (grad, autocast, deterministic, default dtype and device, which kernels may be chosen,
  DTensor's contexts);
- closed-over constants, functions and classes, and which places hold the same object; module constants,
  children and hooks;
- all tensors' metadata, in one C++ check, and the wrappers' contexts;
- if the program writes inputs, that these share memory with others exactly as they did at capture.

A wrapper that a node saves is saved as the plain tensors inside it, whose version counters its own writes do
not touch. So the node notes the wrapper's counter, too, and a backward that finds another raises autograd's
error (`runtime/wrappers.py`).

Memory that a graph frees stays on glibc's heap for the next step (`runtime/artifact.py`); otherwise zeroing
pages would be a sixth of a small step.
"""
