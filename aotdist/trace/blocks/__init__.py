"""Modules of one kind, called with one kind of inputs, are recorded once, and copied for the others.

Promises: the graph is node for node the one that a trace of every call would have given, names, source lines,
modules, sequence numbers and metadata included. Only the time is another: a block's nodes are copied, and
neither its Python, nor autograd's formulas, nor the fake kernels run again. `Settings(instantiate=False)`
traces every call.

1. **Kind** (`kinds.py`): all that decides what a call of a module records: classes, the attributes that it
   reads, the metadata of parameters, buffers and arguments, which of these are one tensor or lie in one
   memory, and the modes around. Symbolic sizes are compared by what they say. A checkpoint of a module is a
   call of it.
2. **Recording** (`recording.py`): the first two calls of a kind are traced as any other. If both recorded the
   same and nothing but results and new values of buffers is left of them (no other write to what was
   there before, no effect in Python, no choice by data), the kind is known. What is more than that is traced
   at each call, and says why.
3. **Instance** (`instances.py`): from the third call on the nodes of the forward are copied, what it writes
   is written, and autograd sees one node. When the backward comes to it, that of the recorded call is run by
   itself, once for each kind of gradients, in a graph aside, and its nodes are copied (`backwards.py`).

What FSDP2's hooks do with each parameter, outside of blocks, is a function of one tensor. It is recorded once
for each kind of tensor, and copied (`functions.py`).

Autograd runs nodes in the order of their sequence numbers, the last first, so the nodes of a block run in one
go, as the copy does. What several places in a block send to one tensor that others send to as well is handed
on one by one: autograd adds it up in the order in which it adds without instances, behind the block.

An instance has no second gradients. A program that asks for such, or hooks gradients of blocks, is traced
without instances; where gradients of gradients are asked for later, it is traced anew (`retracing.py`).
"""
