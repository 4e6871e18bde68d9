"""What was compiled once, in a folder: for the next process, and for the other ranks of this one.

What is kept is what a compiler made of one graph, under a key that is made of the graph. A program is traced
in every process; so an entry that is found was made of exactly the graph that was traced. In the order in
which it happens:

- `key.py`, `environment.py`: all that an entry depends on, as one hash;
- `folder.py`, `entry.py`: entries on disk, checked before anything of them is used;
- `turns.py`: of all processes that look for an entry in vain, one makes it;
- `backend.py`: a backend that looks before it compiles.
"""
