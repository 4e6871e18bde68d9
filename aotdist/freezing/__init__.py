"""Programs that are never differentiated, of modules that do not change: state becomes constants.

A call is exported, as `aotdist.export` does, and its graph is rewritten before it is compiled like any other
function. In the order in which it happens:

- `state.py`: parameters and buffers as they were, also once the module has lost them;
- `program.py`: one call as a function of its arguments, after the steps that follow;
- `batch_norm.py`: batch norms into the weights before them; `channels_last.py`: convolutions, laid out;
- `folding.py`: what depends on state alone is computed, once;
- `frozen.py`: what users call.
"""
