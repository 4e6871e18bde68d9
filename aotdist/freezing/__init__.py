"""Inference programs of modules that do not change: state becomes constants.

Promises: what depends on state alone is computed once, by the very operators of the graph.

`freezing` traces a call twice. The first trace is an export, of a graph with state among its inputs. What
depends on state alone in it is computed, by running those nodes; a constant is identified by what computes it
(`freezing/folding.py`), so a call of another size finds it again, even after the parameters are gone.

What is left is a function of the arguments that reads constants as any module reads buffers, and the second
trace is that of the pipeline: aliases, writes, guards and printing are as for any other call. What the first
trace decided by symbols, the function decides again, so that it becomes a guard. Results live in memory that
is allocated at each call: if a result is a constant, the node that allocates its memory is not folded.
"""
