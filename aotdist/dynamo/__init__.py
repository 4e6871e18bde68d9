"""`torch.compile(backend="aotdist")`: Dynamo captures, aotdist does the rest."""

from aotdist.dynamo.backend import backend
from aotdist.dynamo.region import Region, regions
from aotdist.dynamo.tape import compile_backward

__all__ = ["Region", "backend", "compile_backward", "regions"]
