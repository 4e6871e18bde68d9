"""From Dynamo's names of inputs to those that a user writes."""

from __future__ import annotations

import re
from collections.abc import Iterable

_OF_THE_MODULE = re.compile(r"^L\['(?:self|fn)'\](?=\._(?:modules|parameters|buffers)\[)")
_MODULE = re.compile(r"^L\['(?:self|fn)'\]\.?")
_LOCAL = re.compile(r"^[LG]\['([^']+)'\]")
_IN_DICTIONARY = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_ATTRIBUTE = re.compile(r"\.__dict__\['([^']+)'\]")


def as_written(source: str) -> str:
    """`blocks.3.scale` for `L['self']._modules['blocks']._modules['3']._parameters['scale']`.

    What hangs on the module whose `forward` is compiled has the names that it has in its `state_dict`.
    """
    source = _LOCAL.sub(r"\1", _OF_THE_MODULE.sub("", source))
    return _IN_DICTIONARY.sub(r".\1", _ATTRIBUTE.sub(r".\1", source)).removeprefix(".")


def path_of_module(path: str) -> str:
    """`blocks.3` for `L['self'].blocks.3`, as Dynamo names modules; of the compiled one an empty string."""
    return as_written(_MODULE.sub("", path))


def distinct(names: Iterable[str]) -> list[str]:
    """The names, with a number behind those that were there before."""
    found: dict[str, None] = {}
    for name in names:
        number, new = 1, name
        while new in found:
            number += 1
            new = f"{name} ({number})"
        found[new] = None
    return list(found)
