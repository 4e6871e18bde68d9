"""The compile cache: what a compiler made of a graph, in a folder, for later processes and for other ranks.

An entry is the compiler's output for one graph, under a key made from the graph. In the order in which it
happens:

- `key.py`: everything that an entry depends on, as one hash;
- `folder.py`: entries on disk, checked before they are used; of several processes that miss an entry, one
makes
  it, and the others wait;
- `backend.py`: a backend that looks in the cache before it compiles.

Capture and trace run in every process, so a hit was compiled from exactly the graph that was traced. Keys
made from the user's code would save the trace as well, but must include every file, global and installed
package that the trace ran through; a key that misses one silently gives wrong results. The graph contains
the effect of all of these. On the bench model, the trace and the import of PyTorch's compilers are 2.4 s of
12.8.

The cache is a `Backend` around another, so no other stage knows of it. It keeps the results of
`prepare_joint` and `emit`: partition, passes and plans take a tenth of a second, and run the same code
after a hit and after a miss. The rewritten joint graph is written and read again after a miss as well,
because the graphs that follow have keys, too, which must not depend on how a process obtained it. Each node
that is read gets a fake tensor of its own, and arguments keep those of the trace: Inductor checks which
values share memory, and one fake tensor for several equal ones gave wrong results.

Of a module that Inductor generated, `codegen/portable.py` keeps what `call` reaches, and the kernels as
machine
code: running the whole module imports half of Inductor. Inductor's own cache, which pickles, is off for what
ours keeps.

A process that holds the lock of an entry waits for no other lock, so no two processes can wait for each
other. docs/cache.md is its page.
"""
