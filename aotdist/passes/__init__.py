"""From a graph to a graph: named passes with one signature, run in the order that `run.py` lists.

Promises: each pass is timed, verified after, and can be disabled by name.

Losses by chunks
----------------
The logits of a language model's last layer are its largest tensor. With `loss_chunk_bytes` they never exist
in full. `passes/linear_losses.py` finds a loss of a linear layer's logits in the joint graph, forward and
backward, and `passes/chunk_losses.py` replaces it by one operator that computes loss and gradients from the
logits of some rows at a time. So gradients are computed in the forward, for an incoming gradient of 1, and
the backward multiplies by what arrives. That costs no additional product, where recomputing the logits would
cost a fourth beside three; from the forward to the backward, which begins there, it keeps the weight's
gradient. The price is another order of sums, so it has to be asked for. The trace does not decompose the four
operators that identify a loss, since their decompositions are harder to recognise; those that the pass leaves
are decomposed right after it.

For `triton` the operator is split into a kernel and three products per chunk. A product takes the sum that
the previous chunk updated, although it does not read it: an edge, so that no launch ever serves two chunks.
This sum is the only thing in a graph that is written in place, by an operator that gets it from the one
before.
"""
