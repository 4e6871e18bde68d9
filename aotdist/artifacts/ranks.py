"""The records of all ranks as one: what they have in common once, and what differs as a table by rank.

Ranks that do the same to other sizes, offsets and coordinates have records of one form, which differ in
numbers and texts alone. Ranks whose graphs differ otherwise (a shard that has to be padded) have records of
their own: *variants*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from aotdist.artifacts.values import Json

_Path: TypeAlias = Sequence["str | int"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One record for several ranks.

    Args:
        record: that of the first of them.
        ranks: whose it is.
        tables: where they differ: keys and positions that lead there, and what each of the ranks has there.
    """

    record: Json
    ranks: Sequence[int]
    tables: Sequence[tuple[_Path, Sequence[Json]]]

    def of(self, rank: int) -> Json:
        """The record of one rank."""
        position, record = self.ranks.index(rank), self.record
        if position:  # `record` is the one of the first
            for path, table in self.tables:
                record = _changed(record, path, table[position])
        return record


def merged(records: Sequence[Json]) -> tuple[Variant, ...]:
    """As few variants as there can be; `records` has one item for each rank."""
    ranks_of: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        ranks_of.setdefault(repr(_form(record)), []).append(rank)
    return tuple(
        Variant(records[ranks[0]], ranks, list(_tables([records[rank] for rank in ranks], ())))
        for ranks in ranks_of.values()
    )


def _form(json: Json) -> Any:
    """`json` without its numbers and texts, but for those that say of what kind something is."""
    if isinstance(json, dict):
        fields = cast("dict[str, Json]", json)
        return {key: part if key == "is" else _form(part) for key, part in fields.items()}
    return [_form(part) for part in cast("list[Json]", json)] if isinstance(json, list) else None


def _tables(records: Sequence[Json], path: _Path) -> Iterator[tuple[_Path, Sequence[Json]]]:
    """Where records of one form differ, and how."""
    first = records[0]
    if isinstance(first, dict):
        for key in cast("dict[str, Json]", first):
            yield from _tables([record[key] for record in records], (*path, key))
    elif isinstance(first, list):
        for position, parts in enumerate(zip(*records, strict=True)):
            yield from _tables(parts, (*path, position))
    elif any(type(record) is not type(first) or record != first for record in records):
        yield path, records


def _changed(json: Json, path: _Path, value: Json) -> Json:
    """`json` with `value` at a place; `json` itself stays as it is."""
    if not path:
        return value
    copy, (key, *rest) = json.copy(), path
    copy[key] = _changed(json[key], rest, value)
    return copy
