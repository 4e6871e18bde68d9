"""Values as JSON, and back: of the kinds that are listed in `typed.py` and here, and no others.

Reading makes data, and looks up names: of operators, of functions in the list, and of objects of the call
(`live.py`). It imports no code of the user's, and executes no text.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from aotdist.artifacts.live import GroupName, Live, MeshName, Place, class_named
from aotdist.artifacts.typed import (
    CLASSES,
    ERRORS_OF_READING,
    FUNCTIONS,
    HIGHER_ORDER,
    NAMES_OF_FUNCTIONS,
    NOT_WRITTEN,
    damaged,
    made,
    require,
)
from aotdist.capture.source import Source
from aotdist.codegen.triton import Packed
from aotdist.errors import AotdistError, BadArtifact, UnsupportedProgram
from aotdist.program import Row
from aotdist.torch_seam.autograd import CreationMeta
from aotdist.torch_seam.dtensor import layout_kinds
from aotdist.torch_seam.operators import HigherOrderOperator, OpOverload, is_of_tensors, operator_named
from aotdist.torch_seam.trees import TreeSpec, pytree, tree_children, tree_of

T = TypeVar("T")

Json: TypeAlias = Any
"""What the `json` module reads and writes."""

_Fields: TypeAlias = Mapping[str, Json]
_NAMED_BY_TORCH = torch.dtype | torch.layout | torch.memory_format


class Values:
    """Writes values as JSON, and reads them.

    Numbers, texts and None are themselves, and a tuple is a list; everything else is an object whose key `is`
    names its kind.

    Args:
        live: objects of the call that are written by name.
        binaries: machine code of kernels by its SHA-256, stored beside the JSON; writing adds to it.
    """

    def __init__(self, live: Live, binaries: MutableMapping[str, bytes]) -> None:
        self.live = live
        self._binaries = binaries
        self._layouts = layout_kinds()
        self._readers: Mapping[str, Callable[[_Fields], Any]] = {
            "row": lambda json: Row[Any, Any](self._all_read(json["of"])),
            "list": lambda json: self._all_read(json["of"]),
            "dict": lambda json: {self.read(key): self.read(part) for key, part in json["of"]},
            "set": lambda json: frozenset(self._all_read(json["of"])),
            "slice": lambda json: slice(*self._all_read(json["of"])),
            "device": lambda json: self._device(json["name"]),
            "tensor": self._read_tensor,
            "mesh": lambda json: live.mesh(self._named(json, MeshName)),
            "group": lambda json: live.group(self._named(json, GroupName)),
            "place": lambda json: live.source_of(self._named(json, Place)),
            "tree": self._read_tree,
            "packed": self._read_packed,
            **_NAMED,
            **dict.fromkeys(self._layouts, self._read_layout),
            **dict.fromkeys(CLASSES, lambda json: made(CLASSES[json["is"]], self._read_fields(json))),
        }

    def written(self, value: Any, where: str) -> Json:
        """`value` as JSON.

        Args:
            value: what to write.
            where: what it belongs to, for the error.

        Raises:
            UnsupportedProgram: it is, or contains, something that cannot be written.
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
        """Containers, slices, complex numbers and `...` as JSON; None for other values."""
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
        """Objects of PyTorch's as JSON; None for other values."""
        match value:
            case torch.device():
                return {"is": "device", "name": str(self.live.device_in_artifact(value))}
            case OpOverload() if is_of_tensors(value):
                return {"is": "operator", "name": str(value)}
            case HigherOrderOperator() if value.name() in HIGHER_ORDER:
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
                known, fields = self._layouts.get(type(value).__name__, (None, {}))
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
        """Functions of the list, places, classes, and dataclasses of ours as JSON; None for other values."""
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
        fields = (field.name for field in dataclasses.fields(value) if field.name not in NOT_WRITTEN)
        return {"is": type(value).__name__} | {
            name: self.written(getattr(value, name), f"{where}, {name}") for name in fields
        }

    def _packed(self, kernel: Packed, where: str) -> Json:
        name = hashlib.sha256(kernel.code).hexdigest()
        self._binaries[name] = kernel.code
        fields = {field.name: getattr(kernel, field.name) for field in dataclasses.fields(kernel)}
        written = {key: self.written(value, where) for key, value in fields.items() if key != "code"}
        return {"is": "packed", "code": name, **written}

    def read(self, json: Json) -> Any:
        """The value that was written as `json`.

        Raises:
            BadArtifact: `json` is no value.
            SignatureMismatch: it names an object that the call does not have.
        """
        if type(json) is list:
            return tuple(self._all_read(json))
        if type(json) is not dict:
            return json if type(json) is int else require(json, _Scalar, "a value")
        kind = json.get("is")
        reader = self._readers.get(kind) if type(kind) is str else None
        if reader is None:
            raise damaged(f"the artifact holds a {kind!r}, which is no kind of ours")
        try:
            return reader(json)
        except AotdistError:
            raise
        except ERRORS_OF_READING as error:
            what = f"a {kind} is written in another way than ours ({type(error).__name__}: {error})"
            raise damaged(what) from error

    def _all_read(self, parts: Any) -> list[Any]:
        return [self.read(part) for part in require(parts, list, "what a container holds")]

    def _named(self, json: _Fields, kind: type[T]) -> T:
        return require(self.read(json["name"]), kind, "a name")

    def _read_layout(self, json: _Fields) -> Any:
        cls, hints = self._layouts[json["is"]]
        fields = self._read_fields(json)
        return cls(**{key: require(fields[key], hints[key], f"`{cls.__name__}.{key}`") for key in fields})

    def _read_fields(self, json: _Fields) -> dict[str, Any]:
        return {key: self.read(part) for key, part in json.items() if key != "is"}

    def _read_tree(self, json: _Fields) -> TreeSpec:
        known = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in pytree.SUPPORTED_NODES}
        context, children = require(self.read(json["context"]), Any, "a context"), self._all_read(json["of"])
        require(children, list[TreeSpec], "the parts of a structure")
        return tree_of(known[json["class"]], context, children)

    def _read_packed(self, json: _Fields) -> Packed:
        fields = self._read_fields(json)
        return made(Packed, fields | {"code": self._binaries[require(json["code"], str, "a kernel's code")]})

    def _device(self, name: Any) -> torch.device:
        return self.live.device_here(torch.device(require(name, str, "a device")))

    def _read_tensor(self, json: _Fields) -> torch.Tensor:
        data = bytearray(base64.b64decode(json["base64"], validate=True))
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        dtype = require(vars(torch).get(json["dtype"]), torch.dtype, "the dtype of a tensor")
        return flat.view(dtype).reshape(json["size"]).to(self._device(json["device"]))


@functools.cache
def _operator(name: str) -> OpOverload:
    found = operator_named(name) if _OPERATOR.fullmatch(name) else None
    if found is None:
        raise BadArtifact(
            f"the artifact calls the operator {name}, which is not there",
            stage="store",
            fix="import what registers it before the artifact is loaded",
        )
    if not is_of_tensors(found):
        raise damaged(f"the artifact calls {name}, which does more than to compute with tensors")
    return found


def _higher_order(name: str) -> HigherOrderOperator:
    if name not in HIGHER_ORDER:
        raise damaged(f"the artifact calls the higher-order operator {name}, which no graph of ours has")
    return getattr(torch.ops.higher_order, name)


_OPERATOR = re.compile(r"\w+\.\w+\.\w+")
_Scalar: TypeAlias = bool | int | float | str | None

_NAMED: Mapping[str, Callable[[_Fields], Any]] = {
    "float": lambda json: float(json["text"]),
    "complex": lambda json: complex(*map(float, json["of"])),
    "size": lambda json: torch.Size(require(json["of"], list[int], "a size")),
    "ellipsis": lambda json: ...,
    "leaf": lambda json: tree_of(None, None, []),
    "class": lambda json: class_named(json["module"], json["name"]),
    "torch": lambda json: require(vars(torch).get(json["name"]), _NAMED_BY_TORCH, "what torch names"),
    "creation": lambda json: CreationMeta.__members__[json["name"]],
    "operator": lambda json: _operator(json["name"]),
    "higher_order": lambda json: _higher_order(json["name"]),
    "function": lambda json: FUNCTIONS[json["name"]],
}
"""Readers of kinds that contain no other values."""
