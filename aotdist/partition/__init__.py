"""Cuts a joint graph into a forward and a backward graph: `partition`."""

from aotdist.partition.policy import partition as partition
