"""One flat functional graph of a program, for whoever compiles or ships it: no runtime around it.

A graph takes parameters, buffers and the leaves of the arguments, in that order; it writes nothing. It
returns the new values of what the program writes, then its results, views and inputs among them, then
gradients.
"""

from aotdist.export.export_module import BackwardSignature, GraphSignature, aot_export_module
from aotdist.export.joint_simple import aot_export_joint_simple
from aotdist.export.stored import Exported, load, save

__all__ = [
    "BackwardSignature",
    "Exported",
    "GraphSignature",
    "aot_export_joint_simple",
    "aot_export_module",
    "load",
    "save",
]
