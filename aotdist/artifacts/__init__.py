"""Artifacts in files: what one process compiled, for others to load and run without compiling.

A compilation is written as data: graphs node by node, with operators by name, and the facts of the trace.
Loading prints the runtime from them, exactly as after compiling. In the order in which it happens:

- `values.py`, `graphs.py`: values and graphs as JSON, of the kinds listed in `typed.py`, and back;
- `signature.py`: what a call has to be for an artifact to fit;
- `record.py`: a compilation as JSON, and as a compilation again, for a call that it fits;
- `archive.py`: the records of all ranks, merged, and the file: members, checksums, versions;
- `build.py`, `load.py`: what users call.

Graphs and facts are all that a trace finds out. Plans are derived from the facts when a record is read, so a
loaded and a compiled program run the same code.

A record is read for a call: the call is captured as usual and described part by part, in words that two
processes can compare (`artifacts/signature.py`). If they are the words of the build, tensors, modules and
modes are guarded as after a trace. So a file names nothing that lives in a process except meshes, process
groups and places in modules, which are looked up in the call (`artifacts/live.py`), and no line of it is
executed.

Each rank is traced alone, in a process group without others. Records of the same form are merged into one,
with tables of what differs by rank. Backwards that are compiled on demand are derived from stored graphs,
by the reference emitter; those that need a trace are rejected.

For a GPU (`codegen/ahead.py`) the graphs are traced on the CPU and fused, and their kernels compiled
without a GPU; devices are named by the target's type. docs/artifacts.md is its page.
"""
