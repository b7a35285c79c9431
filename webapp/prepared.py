"""Short queries of every request whose SQL is written once: Django takes longer to write it than a database to answer.

The query is an ordinary one, built with marks in the place of values, so that what it shows to whom is decided where it always
is. It has no ``select_related``: a row's relations are asked for by queries of their own. PostgreSQL is given the values apart
from the SQL, and so plans each query once for a connection: planning takes it longer than finding a row.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
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
        self._written: dict[str, _Written[M]] = {}

    def rows(self, **values: Any) -> list[M]:
        """Rows of the model, without the columns that the query defers."""
        written = self._get_written()
        convert = written.conversions()
        found = []
        for row in _ask(written.sql, written.place(values)):
            columns = list(row)
            for index, functions in convert:
                for function, expression in functions:
                    columns[index] = function(columns[index], expression, connection)
            found.append(written.model.from_db(connection.alias, written.columns, columns))
        return found

    def first(self, **values: Any) -> M | None:
        return next(iter(self.rows(**values)), None)

    def values(self, **values: Any) -> list[tuple[Any, ...]]:
        """Columns of text and numbers as the database has them, of a query by ``values_list``."""
        written = self._get_written()
        return [tuple(row) for row in _ask(written.sql, written.place(values))]

    def _get_written(self) -> "_Written[M]":
        if connection.vendor not in self._written:
            self._written[connection.vendor] = self._write()
        return self._written[connection.vendor]

    def _write(self) -> "_Written[M]":
        rows = self._build()
        compiler = rows.query.get_compiler(connection=connection)
        sql, parameters = compiler.as_sql()
        marks = {mark: _Place(name) for name in self._names for mark in (text_mark(name), number_mark(name))}
        placed = tuple(marks.get(each, each) for each in parameters)
        missing = set(self._names) - {each.name for each in placed if isinstance(each, _Place)}
        if missing or rows.query.select_related:
            raise TypeError(f"the query has no place for {sorted(missing)}, or selects related rows: {sql}")
        selected = [column[0] for column in compiler.select]
        return _Written(
            model=rows.model,
            sql=sql,
            parameters=placed,
            columns=tuple(column.target.attname for column in selected) if compiler.klass_info else (),
            converters=tuple(
                (index, expression, tuple(_by_name(function) for function in functions))
                for index, (functions, expression) in compiler.get_converters(selected).items()
            ),
        )


@dataclass(frozen=True, kw_only=True)
class _Written(Generic[M]):
    """A query as one kind of database is asked it."""

    model: type[M]
    sql: str
    parameters: tuple[Any, ...]
    """Constants, and places of values."""
    columns: tuple[str, ...]
    """Names of the model's attributes, in the order of the answer's columns."""
    converters: "tuple[tuple[int, Any, tuple[_Converter | str, ...]], ...]"
    """By a column's index, its expression and what makes the attribute's value of the database's: a field's function, or the name
    of one of the connection's, since a connection belongs to a thread."""

    def place(self, values: dict[str, Any]) -> list[Any]:
        return [values[each.name] if isinstance(each, _Place) else each for each in self.parameters]

    def conversions(self) -> "list[tuple[int, list[tuple[_Converter, Any]]]]":
        """The converters, with the functions of this thread's connection."""
        return [
            (index, [(getattr(connection.ops, each) if isinstance(each, str) else each, expression) for each in functions])
            for index, expression, functions in self.converters
        ]


_Converter = Callable[[Any, Any, Any], Any]


class _Place:
    """The place of a value among a query's parameters."""

    def __init__(self, name: str) -> None:
        self.name = name


def _by_name(function: _Converter) -> _Converter | str:
    is_connections = getattr(function, "__self__", None) is connection.ops
    return function.__name__ if is_connections else function


def _ask(sql: str, parameters: list[Any]) -> list[Any]:
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            # Django's own puts the values into the SQL
            driver: Any = connection.Database  # type: ignore[attr-defined]  # unknown to the stubs
            cursor.cursor = driver.Cursor(connection.connection)
        cursor.execute(sql, parameters)
        return list(cursor.fetchall())
