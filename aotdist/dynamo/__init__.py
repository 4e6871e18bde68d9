"""`torch.compile(backend="aotdist")`: Dynamo captures, aotdist does the rest.

Promises: every call of the graph is right, whatever Dynamo did not guard.

A graph of Dynamo's is captured like a function (`dynamo/graph.py`): its inputs, parameters among them, are
keyword arguments with the names that the user knows. It is run node by node, so that the
trace records the lines and modules of the program. Everything after capture is as for any other call.

Of Dynamo's fake tensors only the dynamic sizes are used. The trace has fakes and symbols of its own, made
from the tensors of the first call, since Dynamo guards less than a compiled program relies on. A size that
Dynamo passes as a number is read off its tensor. Any other number is passed as the size of an empty tensor,
so that all symbols are sizes. Floats are constants, and objects are compared by identity.

The tape of a backward is a graph that PyTorch makes of autograd's nodes, and that Dynamo traces again for the
hooks. Nodes of compiled programs are called, not traced: their class says so when PyTorch asks for their key
(`torch_seam/dynamo.py`). No tapes are recorded while a program is traced: the trace runs backwards itself.
"""

from aotdist.dynamo.backend import Region, backend, compile_backward, regions

__all__ = ["Region", "backend", "compile_backward", "regions"]
