"""Artifacts in files: what one process compiled, for others to load and run without compiling.

A compilation is written as data: graphs node by node, with operators by their names, and the facts of the
trace. Loading prints it again, exactly as it is printed after compiling. In the order in which it happens:

- `values.py`, `graphs.py`: values and graphs as JSON, of kinds that stand on a list, and back;
- `signature.py`: what a call has to be for an artifact to fit;
- `record.py`: a compilation as one such value, and as a compilation again, for a call that it fits;
- `ranks.py`: the records of all ranks as one, in which stands by rank what differs;
- `archive.py`: the file: members, checksums, versions;
- `build.py`, `load.py`: what users call.

The graphs and the facts are all that a trace finds out; plans are made from the facts again, so a loaded and
a compiled program run the same code.

A record is read for a call: the call is captured as usual, and described part by part in words that two
processes can compare (`artifacts/signature.py`). If the words match those of the build, tensors, modules and
modes are guarded as if they had been traced. So a file refers to nothing of a process except meshes, process
groups and places in modules, by what the call has of them (`artifacts/live.py`), and no line of it is
executed.

Each rank is traced alone, in a process group without others; records of one form are merged into one, with
tables of what differs by rank (`artifacts/ranks.py`). Backwards that are compiled on demand follow from
stored graphs, by the reference emitter; those that need a trace are rejected.

For a GPU (`codegen/ahead.py`) the graphs are traced on the CPU, fused, and their kernels compiled without a
GPU; devices are named by the target's kind. docs/artifacts.md is its page.
"""
