"""What was compiled once, in a folder: for the next process, and for the other ranks of this one.

What is kept is what a compiler made of one graph, under a key that is made of the graph. A program is traced
in every process; so an entry that is found was made of exactly the graph that was traced. In the order in
which it happens:

- `key.py`: all that an entry depends on, as one hash;
- `folder.py`: entries on disk, checked before anything of them is used; of all processes that look for one in
  vain, one makes it;
- `backend.py`: a backend that looks before it compiles.

Capture and trace run in every process; the compiler's output for a graph is kept (`cache/`). The alternative,
keys made from the user's code, saves the trace too, but must know all that a trace depends on: every file,
global and installed package that it ran through. A key that misses one silently gives wrong results. The
graph contains the effect of all of these. On the bench model, the trace and the import of PyTorch's compilers
are 2.4 s of 12.8.

The cache is a `Backend` around another, so no other stage knows of it. Only `prepare_joint` and `emit` are
kept: partition, passes and plans take a tenth of a second, and run the same code after a hit and after a
miss. The rewritten graph is written and read again in both cases, because what is made of it next has a key
as well: it must not matter how a process obtained the graph. Each node that is read has a fake tensor of its
own, and arguments keep those that the trace gave them: Inductor checks which values share memory, and one
fake tensor for all that are alike gave wrong results.

Of a module that Inductor generated, `codegen/portable.py` keeps what `call` reaches, and the kernels as
machine code: running the whole module imports half of Inductor. Inductor's own cache, which pickles, is off
for what ours keeps.

A process that holds the lock of an entry waits for no other lock, so no two processes can wait for each
other. docs/cache.md is its page.
"""
