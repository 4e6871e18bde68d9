"""`torch.compile(backend="aotdist")`: Dynamo captures, aotdist does the rest.

Promises: any call of the graph is right, whatever Dynamo did not guard.

A Dynamo graph is one more description of what is to be captured (`dynamo/graph.py`): its inputs, parameters
among them, are keyword arguments with the names that the user knows. It is replayed node by node
(`dynamo/replay.py`), so that what is recorded has the lines and modules of the program. Everything after
capture is as for any other call.

Dynamo's fake tensors tell which sizes are dynamic, and nothing else: the trace has fakes and symbols of its
own, made from the tensors that the graph is about to be called with, since Dynamo's guards say less than a
compiled program relies on. A size that Dynamo passes as a number is read off its tensor; any other number is
passed as the size of an empty tensor, and so there is one kind of symbol. Floats are constants, and objects
are told apart by identity.

The tape of a backward (`dynamo/tape.py`) is a graph that PyTorch makes of autograd's nodes, and that Dynamo
goes through once more for the hooks. Our own nodes are called where they stand: their class says so when
PyTorch asks for their key (`torch_seam/dynamo.py`). While a program is traced no tapes are recorded: the
trace runs a backward itself.
"""

from aotdist.dynamo.backend import Region, backend, regions
from aotdist.dynamo.tape import compile_backward

__all__ = ["Region", "backend", "compile_backward", "regions"]
