"""A mesh of one rank, and the lasting world of two."""

from tests.ranks.harness import world2 as world2
from tests.semantics.meshes import mesh as mesh
