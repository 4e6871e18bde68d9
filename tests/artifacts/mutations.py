"""Files as somebody writes them who means harm: changed inside, with checksums that fit."""

from __future__ import annotations

import builtins
import copy
import hashlib
import json
import os
import random
import sys
import zipfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

CANARY = "AOTDIST_CANARY"
"""A global of all programs that nothing but a text of a file names."""

_CODE = f"{CANARY}.append(1)"
_TEXTS = (
    f"x\n{_CODE}\n#",
    f"x\r{_CODE}\n",
    f"x); {_CODE}; (0",
    f"x={_CODE}",
    f"x'+str({_CODE})+'",
    f"a, b={_CODE}",
    f"*a, b={_CODE}",
    f"{CANARY}.append",
    f"__import__('builtins').{_CODE}",
    f"._local_tensor\n    {_CODE}\n    x",
    f".{CANARY}.append(1)",
    "__class__.__init__.__globals__",
    "aten.from_file.default",
    "aten.save.default",
    "os.system",
    "exec",
    "eval",
    "../../../../tmp/canary",
    "/etc/canary",
    "class",
    "None",
    "",
    "\0",
    "\ud800",
    "ﬁ",
    "x" * 5000,
)
_NUMBERS = (0, 1, -1, 7, 2**31, 2**62, 2**63, 10**30, -(2**63), 1.5, 1e308, True, False, None)
_KINDS = (
    *("dict", "list", "set", "row", "slice", "tree", "leaf", "class", "place", "mesh", "group", "packed"),
    *("operator", "function", "higher_order", "tensor", "torch", "device", "size", "float", "complex"),
    *("Slot", "Plain", "Wrapper", "Constant", "ViewStep", "MetadataWrite", "Returned", "Check", "Print"),
    *("EffectLog", "Assign", "Delete", "Tree", "TensorResult"),
    *("Inside", "NodeAt", "Fresh", "IsInput", "ViewOfInput", "Facts", "Settings", "NotATensor"),
)


def places(json_: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a value in JSON, but for the whole."""
    items = json_.items() if isinstance(json_, dict) else enumerate(json_) if isinstance(json_, list) else ()
    for key, part in items:
        yield (*path, key)
        yield from places(part, (*path, key))


def at(json_: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        json_ = json_[key]
    return json_


def mutated(json_: Any, known: list[tuple[Any, ...]], rng: random.Random) -> tuple[Any, str]:
    """A copy that differs in one place, and in words how."""
    path = rng.choice(known)
    owner, key = at(json_, path[:-1]), path[-1]
    old = owner[key]
    changes: list[Callable[[], Any]] = [
        lambda: rng.choice(_TEXTS),
        lambda: rng.choice(_NUMBERS),
        lambda: str(old) if isinstance(old, (int, float)) else [old],
        lambda: copy.deepcopy(at(json_, rng.choice(known))),
        lambda: {"is": rng.choice(_KINDS), **(old if isinstance(old, dict) else {"of": old, "name": old})},
        lambda: old + rng.choice((-1, 1, 1000)) if isinstance(old, int) else old[:-1] if old else [old],
        lambda: _deep(rng.choice((50, 500))),
        lambda: {},
    ]
    shapes = ("value", "value", "value", "value", "missing", "extra", "swapped", "renamed")
    what, others = rng.choice(shapes), list(owner) if isinstance(owner, dict) else list(range(len(owner)))
    changed = _with(json_, path[:-1], copy.copy(owner))
    there = at(changed, path[:-1])
    match what:
        case "missing":
            del there[key]
        case "extra" if isinstance(there, dict):
            there[rng.choice((*_TEXTS, "path", "of", "is", "kwargs", "args", "name"))] = rng.choice(
                (0, "x", [])
            )
        case "extra":
            there.insert(key, copy.deepcopy(rng.choice(owner)))
        case "swapped":
            other = rng.choice(others)
            there[key], there[other] = there[other], there[key]
        case "renamed" if isinstance(there, dict):
            there[rng.choice(_TEXTS)] = there.pop(key)
        case _:
            try:
                there[key] = rng.choice(changes)()
            except TypeError:
                there[key] = None
    return changed, f"{what} at {'.'.join(map(str, path))[:200]}: {str(old)[:60]!r}"


def _with(json_: Any, path: tuple[Any, ...], value: Any) -> Any:
    """`json_` with `value` at a place; what is beside it is shared."""
    if not path:
        return value
    changed = copy.copy(json_)
    changed[path[0]] = _with(json_[path[0]], path[1:], value)
    return changed


def _deep(depth: int) -> Any:
    made: Any = 0
    for _ in range(depth):
        made = [made]
    return made


def write(path: Path, members: dict[str, Any], manifest: dict[str, Any] | None = None) -> None:
    """A file of these members, as JSON, with the manifest that fits them."""
    data = {name: value if isinstance(value, bytes) else dumped(value) for name, value in members.items()}
    manifest = manifest or {}
    checksums = {name: hashlib.sha256(value).hexdigest() for name, value in data.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("manifest.json", dumped({**manifest, "members": checksums}))
        for name, value in data.items():
            file.writestr(name, value)


def dumped(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * 100_000


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest of a file, and its other members."""
    with zipfile.ZipFile(path) as file:
        members = {name: json.loads(file.read(name)) for name in file.namelist() if name.endswith(".json")}
    return members.pop("manifest.json"), members


_watched: list[list[str]] = []
_FORBIDDEN = (
    *(
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.fork",
        "os.forkpty",
        "os.remove",
        "os.rename",
    ),
    *("os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate", "os.putenv"),
    *(
        "subprocess.Popen",
        "shutil.rmtree",
        "shutil.move",
        "shutil.copyfile",
        "ctypes.dlopen",
        "socket.connect",
    ),
)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watched:
        return
    if event in _FORBIDDEN:
        _watched[-1].append(f"{event}{args}")
    elif event == "exec" and CANARY in _names_of(args[0]):
        _watched[-1].append("a text of the file is executed")
    elif event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        _watched[-1].append(f"writes {args[0]}")


def _names_of(code: CodeType) -> set[str]:
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return {*code.co_names, *code.co_varnames}.union(*map(_names_of, inner))


@contextmanager
def watched() -> Generator[list[str]]:
    """What is done inside that reading data and running tensors does not do."""
    if not hasattr(builtins, CANARY):
        setattr(builtins, CANARY, [])
        sys.addaudithook(_audit)
    done: list[str] = []
    _watched.append(done)
    try:
        yield done
    finally:
        _watched.pop()
        if getattr(builtins, CANARY):
            done.append("the canary sings")
            getattr(builtins, CANARY).clear()
