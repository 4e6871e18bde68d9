"""From a `Program` to one joint forward/backward graph and the facts read off it.

Promises: one functional graph; every node knows its phase, source line, module and sequence number; what the
program did besides is a fact (`aotdist.facts`).

Observed gradients
------------------
In eager every result has its place in autograd's graph. Here the program is one node, so a gradient of one
result with respect to another would not exist, and a hook on a result would miss gradients from within the
program. The trace notes where gradients pass such a tensor (`trace/observed_grads.py`). A gate, a node behind
the program's own, stands there at run time (`runtime/hooks.py`): while nobody watches, it passes on what it
gets, and the backward runs whole; otherwise the backward runs in the parts between the gates
(`partition/gates.py`), compiled when they are first needed.

Hooks and `retain_grad` can be seen on the tensors; which gradients `torch.autograd.grad` was asked for, the
engine does not tell. The frames of the functions that started it do (`torch_seam/autograd.py`): a node made
by the call or after it, or an input that is no leaf, may be a waypoint; leaves, and what was there before,
are not. So a gradient penalty of one of several results takes the backward as a program.

Autograd calls hooks of all results and inputs of a node, if need be with None. In eager most tensors have a
node of their own, so hooks of results are passed over, and those of inputs silenced, where no gradient comes
(`runtime/hooks.py`). The order of hooks is autograd's.

Higher-order operators
----------------------
A branch of `torch.cond` is a program, traced by the same `trace` as any other, inside the enclosing trace,
whose tensors are to it what real tensors are to a program (`trace/body.py`). It becomes a forward and a
gradient graph; both branches take the same operands, and write none of them. Loops of a known length (`scan`,
`map`) are unrolled, so that all that holds of a Python loop holds of them.
"""
