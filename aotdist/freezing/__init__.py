"""Inference programs of modules that do not change: state becomes constants.

Promises: what depends on state alone is computed once, by the operators of the graph itself.

`freezing` traces a call twice. The first trace is an export: parameters and buffers are inputs of its graph.
Nodes that depend on these alone are run, and their results become constants. A constant is identified by the
expression that computes it (`freezing/folding.py`), so a call with another batch size finds it again, even
after the parameters were discarded.

What remains is a function of the arguments that reads constants as a module reads its buffers. The pipeline
traces that function as it traces any other call, with its aliases, writes and guards. Conditions on symbolic
sizes that the first trace relied on are checked by the function, so the second trace guards them. Every call
allocates memory for its results: a node whose memory a result shares is not folded.
"""
