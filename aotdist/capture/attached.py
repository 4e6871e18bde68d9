"""What `compile` hangs on a module for its user: `module.source`, `module.graphs`, `module.explain()`.

They are attributes of the instance, so the module's type stays its own; they survive `deepcopy` and
pickling as empty shells, since a copy of a module is not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


class PrintedSource(str):
    """The printed Python of a module's artifacts; not a constant of the program."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return (PrintedSource, ("",))

    def __deepcopy__(self, memo: dict[int, Any]) -> PrintedSource:
        return PrintedSource("")


class GraphList(list[Mapping[str, torch.fx.GraphModule]]):
    """The graphs of a module's artifacts."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (GraphList, ())

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphList:
        return GraphList()


class Explain:
    """Calls the report of a module's compiled call."""

    def __init__(self, report: Callable[..., Any] | None = None) -> None:
        self._report = report

    def __call__(self, **options: Any) -> Any:
        """The module's report, see `aotdist.explain`."""
        if self._report is None:
            return "not compiled: this module is a copy of one that was"
        return self._report(**options)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Explain, ())

    def __deepcopy__(self, memo: dict[int, Any]) -> Explain:
        return Explain()


ATTACHED = (PrintedSource, GraphList, Explain)
