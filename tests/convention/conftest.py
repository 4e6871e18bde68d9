"""A mesh of one rank."""

from tests.semantics.meshes import mesh as mesh
