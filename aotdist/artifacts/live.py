"""Objects that an artifact refers to by name: meshes, process groups, classes, places in modules.

They are looked up in the call that the artifact is loaded for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from aotdist.capture.captured import Captured
from aotdist.capture.source import Item, Source
from aotdist.errors import SignatureMismatch
from aotdist.subclasses.protocol import Constant, Recipe, Wrapper, recipe_of
from aotdist.torch_seam.dtensor import mesh_of_context, parts_of_mesh
from aotdist.torch_seam.groups import world_group_name

_DICTIONARIES = ("", "_parameters", "_buffers")
"""The dictionaries of a module that hold tensors: its attributes, parameters and buffers."""


_BUILT_IN = (bool, dict, float, int, list, set, str, tuple)
"""Built-in classes that an artifact may name: default factories of dictionaries."""


@dataclass(frozen=True, slots=True)
class MeshName:
    """A device mesh, by its axes and ranks. As part of a larger mesh, it may be another on each rank."""

    axes: tuple[str, ...] | None
    ranks: tuple[Any, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh) -> MeshName:
        """The name of `mesh`."""
        return cls(mesh.mesh_dim_names, _tuples(mesh.mesh.tolist()))


def _tuples(nested: Any) -> Any:
    return tuple(map(_tuples, nested)) if isinstance(nested, list) else nested


@dataclass(frozen=True, slots=True)
class GroupName:
    """A process group: an axis of a mesh, or (no mesh) all ranks."""

    mesh: MeshName | None
    axis: int


@dataclass(frozen=True, slots=True)
class Place:
    """An entry of a module's dictionary (`_buffers`; the empty text stands for its attributes)."""

    path: str
    module: str
    dictionary: str
    key: str


@dataclass(frozen=True, slots=True)
class Live:
    """The objects of a call that an artifact can name.

    Args:
        device_type: of the program's tensors, in the artifact and where it is loaded.
        meshes: those of the call's tensors, and their submeshes.
        groups: process groups, by their names in this process.
        modules: by qualified name.
    """

    device_type: str
    meshes: Mapping[MeshName, DeviceMesh]
    groups: Mapping[str, GroupName]
    modules: Mapping[str, nn.Module]

    @classmethod
    def of(cls, captured: Captured, device_type: str) -> Live:
        """The objects of a call.

        Args:
            captured: the call.
            device_type: that of the GPUs that it is for, or `cpu`.
        """
        tensors = [
            *captured.program.examples,
            *(source.read() for source in captured.all_closed_over().values()),
        ]
        meshes = {MeshName.of(mesh): mesh for mesh in _meshes(map(recipe_of, tensors))}
        groups: dict[str, GroupName] = {}
        for name, mesh in meshes.items():
            for axis, group in enumerate(mesh.get_all_groups()):
                groups.setdefault(group.group_name, GroupName(name, axis))
        world = world_group_name()
        if world is not None:
            groups.setdefault(world, GroupName(None, 0))
        return cls(device_type, meshes, groups, captured.environment.modules)

    def mesh(self, name: MeshName) -> DeviceMesh:
        """The mesh of that name.

        Raises:
            SignatureMismatch: no tensor of the call is on it.
        """
        found = self.meshes.get(name)
        if found is None:
            raise _missing(f"no tensor of the call is on a mesh of axes {name.axes} and ranks {name.ranks}")
        return found

    def group(self, name: GroupName) -> str:
        """PyTorch's name of a process group in this process.

        Raises:
            SignatureMismatch: there is none.
        """
        found = world_group_name() if name.mesh is None else None
        if name.mesh is not None:
            found = self.mesh(name.mesh).get_all_groups()[name.axis].group_name
        if found is None:
            raise _missing("it communicates among all ranks, and there is no process group")
        return found

    def place_of(self, source: Source) -> Place | None:
        """The name of a place; None if it is not in a dictionary of a module."""
        step = source.steps[0] if len(source.steps) == 1 else None
        if isinstance(step, Item) and isinstance(step.key, str):
            for name, module in self.modules.items():
                for dictionary in _DICTIONARIES:
                    if _dictionary(module, dictionary) is source.root:
                        return Place(source.path, name, dictionary, step.key)
        return None

    def source_of(self, place: Place) -> Source:
        """The place of that name.

        Raises:
            SignatureMismatch: the call has no such module.
        """
        if place.module not in self.modules or place.dictionary not in _DICTIONARIES:
            raise _missing(f"it assigns `{place.path}`, and the call reaches no module `{place.module}`")
        owner = _dictionary(self.modules[place.module], place.dictionary)
        return Source(place.path, owner).item(place.key, place.path)

    def device_in_artifact(self, device: torch.device) -> torch.device:
        """`device` as an artifact names it: of the target's type, without an index."""
        return torch.device(self.device_type) if device.type in ("cpu", self.device_type) else device

    def device_here(self, device: torch.device) -> torch.device:
        """A device of an artifact in this process."""
        if device.type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return device


NOTHING_LIVE = Live("cpu", {}, {}, {})
"""For what is read or written without a call."""


def class_named(module: str, name: str) -> type[Any]:
    """A class that this process has imported: of tensors, a named tuple, or built-in.

    Raises:
        SignatureMismatch: there is none.
    """
    try:  # not by `getattr`, with which lazy modules import
        found: Any = sys.modules[module]
        for part in name.split("."):
            found = vars(found)[part]
    except (KeyError, TypeError):
        raise _missing(f"the class `{module}.{name}` is not imported here") from None
    is_known = isinstance(found, type) and (issubclass(found, torch.Tensor) or hasattr(found, "_fields"))
    if not is_known and found not in _BUILT_IN:
        raise _missing(f"`{module}.{name}` is no class of tensors or named tuples")
    return found


def _missing(what: str) -> SignatureMismatch:
    return SignatureMismatch(
        f"the artifact does not fit: {what}", stage="store", fix="build the artifact for this program"
    )


def _dictionary(module: nn.Module, name: str) -> dict[str, Any]:
    return vars(module)[name] if name else vars(module)


def _meshes(recipes: Iterable[Recipe]) -> Iterator[DeviceMesh]:
    for recipe in recipes:
        if isinstance(recipe, Wrapper):
            constants = [part.value for _, part in recipe.attributes if isinstance(part, Constant)]
            for value in (*constants, mesh_of_context(recipe.context)):
                if isinstance(value, DeviceMesh):
                    yield value
                    yield from parts_of_mesh(value)
            yield from _meshes(part for _, part in recipe.attributes)
