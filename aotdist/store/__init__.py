"""Artifacts in files: what one process compiled, for others to load and run without compiling.

A compilation is written as data: graphs node by node, with operators by their names, and the facts of the
trace. Loading prints it again, exactly as it is printed after compiling. In the order in which it happens:

- `values.py`, `graphs.py`: values and graphs as JSON, of kinds that stand on a list, and back;
- `signature.py`: what a call has to be for an artifact to fit;
- `record.py`: a compilation as one such value, and as a compilation again, for a call that it fits;
- `ranks.py`: the records of all ranks as one, in which stands by rank what differs;
- `archive.py`: the file: members, checksums, versions;
- `build.py`, `load.py`: what users call.
"""
