"""Values as JSON, and back: of the kinds that are listed in `kinds.py` and here, and no others.

Reading makes data, and looks up what has a name: operators, functions of the list, and what lives in the
process (`live.py`). It imports nothing of the user's, and runs no text.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeAlias, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from aotdist.capture.source import Source
from aotdist.codegen.triton import Packed
from aotdist.errors import AotdistError, BadArtifact, UnsupportedProgram
from aotdist.program import Row
from aotdist.store.kinds import CLASSES, FUNCTIONS, NAMES_OF_FUNCTIONS
from aotdist.store.live import Live, MeshName, class_named
from aotdist.torch_seam.autograd import CreationMeta
from aotdist.torch_seam.dtensor import layout_kinds
from aotdist.torch_seam.operators import HigherOrderOperator, OpOverload, operator_named
from aotdist.torch_seam.trees import TreeSpec, pytree, tree_children, tree_of

Json: TypeAlias = Any
"""What the `json` module reads and writes."""

_Fields: TypeAlias = Mapping[str, Json]
_NAMED_BY_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_OTHER = object()
"""What a reader returns of a kind that is not among its own."""


class Values:
    """Writes values as JSON, and reads them.

    A number, a text, None and a tuple are themselves (a tuple as a list); all else is an object with a key
    `is` that tells its kind.

    Args:
        live: what is told by name.
        binaries: machine code of kernels by its SHA-256, which stands beside the JSON; writing adds to it.
    """

    def __init__(self, live: Live, binaries: MutableMapping[str, bytes]) -> None:
        self.live = live
        self._binaries = binaries
        self._layouts = layout_kinds()

    def written(self, value: Any, where: str) -> Json:
        """`value` as JSON.

        Args:
            value: what to write.
            where: what it belongs to, for the error.

        Raises:
            UnsupportedProgram: it is, or holds, something that cannot be written.
        """
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"is": "float", "text": str(value)}
        if type(value) is tuple:
            return self._all_written(value, where)
        found = self._container(value, where) or self._of_torch(value, where) or self._of_ours(value, where)
        if found is None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise UnsupportedProgram(
                f"{where} holds a {kind}, which an artifact cannot hold",
                stage="store",
                fix="keep it out of the compiled function, or compile where it runs: `aotdist.compile`",
            )
        return found

    def _all_written(self, parts: Any, where: str) -> list[Json]:
        return [self.written(part, where) for part in parts]

    def _container(self, value: Any, where: str) -> Json:
        """Lists, dictionaries and their like, or None."""
        match value:
            case torch.Size():
                return {"is": "size", "of": list(value)}
            case Row() | list():
                kind = "row" if isinstance(value, Row) else "list"
                return {"is": kind, "of": self._all_written(value, where)}
            case dict():
                items = cast("dict[Any, Any]", value).items()
                return {"is": "dict", "of": [self._all_written(pair, where) for pair in items]}
            case frozenset():
                return {"is": "set", "of": self._all_written(sorted(value, key=repr), where)}
            case slice():
                return {"is": "slice", "of": self._all_written((value.start, value.stop, value.step), where)}
            case complex():
                return {"is": "complex", "of": [str(value.real), str(value.imag)]}
            case _:
                return {"is": "ellipsis"} if value is ... else None

    def _of_torch(self, value: Any, where: str) -> Json:
        """What is PyTorch's, or None."""
        match value:
            case torch.device():
                return {"is": "device", "name": str(self.live.device_in_artifact(value))}
            case OpOverload():
                return {"is": "operator", "name": str(value)}
            case HigherOrderOperator():
                return {"is": "higher_order", "name": value.name()}
            case torch.Tensor():
                return self._tensor(value)
            case DeviceMesh():
                return {"is": "mesh", "name": self.written(MeshName.of(value), where)}
            case CreationMeta():
                return {"is": "creation", "name": value.name}
            case TreeSpec():
                return self._tree(value, where)
            case _ if isinstance(value, _NAMED_BY_TORCH):
                return {"is": "torch", "name": str(value).removeprefix("torch.")}
            case _:
                known, fields = self._layouts.get(type(value).__name__, (None, ()))
                parts = {key: self.written(getattr(value, key), where) for key in fields}
                return {"is": type(value).__name__, **parts} if known is type(value) else None

    def _tensor(self, tensor: torch.Tensor) -> Json:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype, device = str(tensor.dtype).removeprefix("torch."), self.live.device_in_artifact(tensor.device)
        fields = {"dtype": dtype, "size": list(tensor.shape), "device": str(device)}
        return {"is": "tensor", **fields, "base64": base64.b64encode(data).decode()}

    def _tree(self, spec: TreeSpec, where: str) -> Json:
        if spec.is_leaf():
            return {"is": "leaf"}
        cls = f"{spec.type.__module__}.{spec.type.__qualname__}"
        if spec.type not in pytree.SUPPORTED_NODES or cls.startswith("aotdist."):
            raise UnsupportedProgram(
                f"{where} has objects in it that no pytree knows, which an artifact cannot hold",
                stage="store",
                fix="return their tensors (of a Hugging Face model: `use_cache=False`), or register their "
                "class with `torch.utils._pytree.register_pytree_node`",
            )
        children = [self._tree(child, where) for child in tree_children(spec)]
        return {"is": "tree", "class": cls, "context": self.written(spec.context, where), "of": children}

    def _of_ours(self, value: Any, where: str) -> Json:
        """Our own data, functions and classes, or None."""
        if id(value) in NAMES_OF_FUNCTIONS:
            return {"is": "function", "name": NAMES_OF_FUNCTIONS[id(value)]}
        if isinstance(value, Source):
            place = self.live.place_of(value)
            return None if place is None else {"is": "place", "name": self.written(place, where)}
        if isinstance(value, Packed):
            return self._packed(value, where)
        if isinstance(value, type):
            return {"is": "class", "module": value.__module__, "name": value.__qualname__}
        if CLASSES.get(type(value).__name__) is not type(value):
            return None
        fields = (field.name for field in dataclasses.fields(value))
        return {"is": type(value).__name__} | {
            name: self.written(getattr(value, name), f"{where}, {name}") for name in fields
        }

    def _packed(self, kernel: Packed, where: str) -> Json:
        name = hashlib.sha256(kernel.code).hexdigest()
        self._binaries[name] = kernel.code
        arguments = {key: self.written(dict(getattr(kernel, key)), where) for key in ("pointers", "blocks")}
        return {
            "is": "packed",
            "code": name,
            "metadata": kernel.metadata,
            "registers": kernel.registers,
            **arguments,
        }

    def read(self, json: Json) -> Any:
        """The value that was written as `json`.

        Raises:
            BadArtifact: nothing is written like that.
            SignatureMismatch: something that it names is not there.
        """
        if not isinstance(json, (list, dict)):
            return json
        if isinstance(json, list):
            return tuple(self._all_read(json))
        kind = cast("_Fields", json).get("is")
        try:
            for reader in (self._read_container, self._read_of_torch, self._read_of_ours):
                value = reader(kind, json)
                if value is not _OTHER:
                    return value
        except AotdistError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            what = f"a {kind} is written in another way than ours ({type(error).__name__}: {error})"
            raise damaged(what) from error
        raise damaged(f"the artifact holds a {kind!r}, which is no kind of ours")

    def _all_read(self, parts: Any) -> list[Any]:
        return [self.read(part) for part in parts]

    def _read_container(self, kind: Any, json: _Fields) -> Any:
        match kind:
            case "row":
                return Row[Any, Any](self._all_read(json["of"]))
            case "list":
                return self._all_read(json["of"])
            case "dict":
                return {self.read(key): self.read(part) for key, part in json["of"]}
            case "set":
                return frozenset(self._all_read(json["of"]))
            case "slice":
                return slice(*self._all_read(json["of"]))
            case _:
                return _NAMED[kind](json) if kind in _NAMED else _OTHER

    def _read_of_torch(self, kind: Any, json: _Fields) -> Any:
        match kind:
            case "device":
                return self.live.device_here(torch.device(json["name"]))
            case "tensor":
                return self._read_tensor(json)
            case "mesh":
                return self.live.mesh(self.read(json["name"]))
            case "group":
                return self.live.group(self.read(json["name"]))
            case "leaf":
                return tree_of(None, None, [])
            case "tree":
                known = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in pytree.SUPPORTED_NODES}
                return tree_of(known[json["class"]], self.read(json["context"]), self._all_read(json["of"]))
            case _ if kind in self._layouts:
                return self._layouts[kind][0](**self._read_fields(json))
            case _:
                return _OTHER

    def _read_of_ours(self, kind: Any, json: _Fields) -> Any:
        match kind:
            case "place":
                return self.live.source_of(self.read(json["name"]))
            case "packed":
                code, pointers, blocks = self._binaries[json["code"]], json["pointers"], json["blocks"]
                return Packed(
                    code, json["metadata"], self.read(pointers), self.read(blocks), json["registers"]
                )
            case "class":
                return class_named(json["module"], json["name"])
            case _ if kind in CLASSES:
                return CLASSES[kind](**self._read_fields(json))
            case _:
                return _OTHER

    def _read_fields(self, json: _Fields) -> dict[str, Any]:
        return {key: self.read(part) for key, part in json.items() if key != "is"}

    def _read_tensor(self, json: _Fields) -> torch.Tensor:
        data = bytearray(base64.b64decode(json["base64"]))
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        made = flat.view(_checked(getattr(torch, json["dtype"]), torch.dtype)).reshape(json["size"])
        return made.to(self.live.device_here(torch.device(json["device"])))


def damaged(what: str) -> BadArtifact:
    """An error for an artifact that holds what no version of ours writes."""
    return BadArtifact(what, stage="store", fix="make the artifact again, or copy it again")


def _checked(value: Any, kinds: type[Any] | tuple[type[Any], ...]) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"{value!r} is something else")
    return value


@functools.cache
def _operator(name: str) -> OpOverload:
    found = operator_named(name)
    if found is None:
        raise BadArtifact(
            f"the artifact calls the operator {name}, which is not there",
            stage="store",
            fix="import what registers it before the artifact is loaded",
        )
    return found


_NAMED: Mapping[str, Callable[[_Fields], Any]] = {
    "float": lambda json: float(json["text"]),
    "complex": lambda json: complex(*map(float, json["of"])),
    "size": lambda json: torch.Size(json["of"]),
    "ellipsis": lambda json: ...,
    "torch": lambda json: _checked(getattr(torch, json["name"]), _NAMED_BY_TORCH),
    "creation": lambda json: CreationMeta.__members__[json["name"]],
    "operator": lambda json: _operator(json["name"]),
    "higher_order": lambda json: _checked(getattr(torch.ops.higher_order, json["name"]), HigherOrderOperator),
    "function": lambda json: FUNCTIONS[json["name"]],
}
"""What reads the kinds that hold no others."""
