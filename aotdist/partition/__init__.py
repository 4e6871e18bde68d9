"""From a joint graph to a forward, a backward, and the values saved between them.

Promises: each half computes what the joint graph computed, in eager's order; other backwards of the same
program are derived from the same graph.

Backwards
---------
Every backward of a program is `derive(joint, request)` (`runtime/derive.py`): of some results, in parts
while somebody watches what passes between results, for other kinds of gradients, with gradients that are
differentiated in turn. The request is what it is compiled and cached under (`runtime/backwards.py`). The one
for which the node is printed is the first.

Under `create_graph=True` autograd computes some gradients by other formulas, which have a derivative (SiLU,
group norm, LSTM cells, determinants), and what a tensor that was written under `no_grad` knows of its history
matters. A recorded backward shows none of this. So autograd runs through its graph of the trace once more
(`trace/later_backwards.py`), with a history, and what it records is compiled as a program with a backward of
its own (`runtime/double_backward.py`), from what the first forward saved (`partition/other_backwards.py`).
Its values and gradients are then eager's, bit for bit; also in parts, and with symbolic sizes. Nothing of
this is there before it is asked for. The program that was compiled last keeps its trace; of those before it,
it is made anew (`retracing.py`), node for node as before, or the call is refused; where arguments and module
do not determine the trace, it is kept: symbolic sizes, wrapper tensors, autocast, arguments that are views or
no tensors, branches on data.

The backward of some results
----------------------------
A backward is linear, so that of some results is the recorded one without the other tangents
(`partition/other_backwards.py`): what depends on these alone is not computed. Three things do not follow from
that, and with one of them the backward is traced for each choice of results (`BackwardFacts.choices`): user
functions that can tell None from zeros, gradients of other kinds, and what user code in the backward keeps.
Where it writes, nothing more is traced: the trace notes in which autograd node each write happens, and a
backward that does not reach all of these is refused (`BackwardFacts.writers`).

Most programs with several results return a loss beside logits, and are differentiated from the loss alone. So
where one result is a scalar and the others are not, the backward that is compiled with the forward, shown,
stored and compared between ranks is that of the scalar (`compiled_ahead` in `runtime/derive.py`). That of
all results is compiled when it is asked for, as that of any others is.
Ranks agree on such a backward before it first runs, and compare its runs by a digest of its own: a rank that
differentiates other results than its peers is a `RankDivergence` on all of them (`agreeing_on_backwards` in
`runtime/ranks/fingerprint.py`).

Without `retain_graph` autograd frees what a node saved, once. Which results lose their backward with that of
another is read off autograd's graph (`BackwardFacts.freed`, `runtime/held.py`).

Autograd keeps a gradient that nobody else holds as a leaf's `.grad`, and adds the next one to it in place. So
two gradients that are one tensor in eager (`x + w`) have to be one wrapper, not two around the same memory,
and one that is passed on has to be the wrapper that arrived (`runtime/backward.py`). What lies inside
of a gradient may also have other strides than in the trace, where the gradient that arrived has: the
wrapper's are made to fit.
"""

from aotdist.partition.policy import partition as partition
