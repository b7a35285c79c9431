"""Short queries of every request whose SQL is written once: Django takes longer to write it than a database to answer.

The query is an ordinary one, built with marks in the place of values, so that what it shows to whom is decided where it always
is. It has no ``select_related``: a row's relations are asked for by queries of their own.
"""

import zlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from django.db import connection
from django.db.models import Model, QuerySet

M = TypeVar("M", bound=Model)


def text_mark(name: str) -> str:
    """Stands for a text value of this name."""
    return f"\x01{name}"


def number_mark(name: str) -> int:
    """Stands for a number of this name. It fits in 32 bits: of a larger one Django knows that no such column holds it."""
    return 2_000_000_000 + zlib.crc32(name.encode()) % 100_000_000


class Prepared(Generic[M]):
    """A query and the names of its values, in no order. Written for each kind of database at its first use."""

    def __init__(self, build: "Callable[[], QuerySet[M, Any]]", *names: str) -> None:
        self._build, self._names = build, names
        self._written: dict[str, tuple[type[M], str, tuple[Any, ...]]] = {}

    def rows(self, **values: Any) -> list[M]:
        """Rows of the model, without the columns that the query defers."""
        model, sql, parameters = self._ask(values)
        return list(model._default_manager.raw(sql, parameters))

    def first(self, **values: Any) -> M | None:
        return next(iter(self.rows(**values)), None)

    def values(self, **values: Any) -> list[tuple[Any, ...]]:
        """Columns of text and numbers as the database has them, of a query by ``values_list``."""
        _, sql, parameters = self._ask(values)
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return [tuple(row) for row in cursor.fetchall()]

    def _ask(self, values: dict[str, Any]) -> tuple[type[M], str, list[Any]]:
        if connection.vendor not in self._written:
            self._written[connection.vendor] = self._write()
        model, sql, parameters = self._written[connection.vendor]
        return model, sql, [values[each.name] if isinstance(each, _Place) else each for each in parameters]

    def _write(self) -> tuple[type[M], str, tuple[Any, ...]]:
        rows = self._build()
        sql, parameters = rows.query.sql_with_params()
        marks = {mark: _Place(name) for name in self._names for mark in (text_mark(name), number_mark(name))}
        placed = tuple(marks.get(each, each) for each in parameters)
        missing = set(self._names) - {each.name for each in placed if isinstance(each, _Place)}
        if missing or rows.query.select_related:
            raise TypeError(f"the query has no place for {sorted(missing)}, or selects related rows: {sql}")
        return rows.model, sql, placed


class _Place:
    """The place of a value among a query's parameters."""

    def __init__(self, name: str) -> None:
        self.name = name
