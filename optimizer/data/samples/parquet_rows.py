"""Rows of a Parquet file, whose claims about itself are not trusted: call it in a limited process."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optimizer.base.errors import InvalidDataset
from optimizer.base.units import MIB
from optimizer.data.documents import MAX_COLUMNS, MAX_LINE_BYTES, MAX_ROW_GROUPS, MAX_ROWS

_BATCH_ROWS = 64
_BATCH_BYTES = 64 * MIB
"""Bytes of the rows that are read at once; fewer rows where they are long."""
_BUFFER_BYTES = MIB
MAX_ROW_BYTES = 4 * MAX_LINE_BYTES
"""Bytes of the longest text that a row may hold, in UTF-8; what rows have on average is no more, all columns together."""


def read_parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row with its place, lists of structs as lists of objects. Raises InvalidDataset, while iterating."""
    import pyarrow as pa

    try:
        yield from _read(path)
    except pa.ArrowMemoryError as error:
        raise MemoryError from error  # the limit of the process, which its main module puts in words
    except (pa.ArrowException, OSError, ValueError, UnicodeDecodeError) as error:
        raise _invalid(f"not readable as parquet ({str(error)[:200]})", allowed="a parquet file") from error


def _read(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    from pyarrow import parquet

    with parquet.ParquetFile(
        path,
        thrift_string_size_limit=16_000_000,
        thrift_container_size_limit=1_000_000,
        page_checksum_verification=True,
        buffer_size=_BUFFER_BYTES,
        arrow_extensions_enabled=False,
    ) as file:
        facts = file.metadata
        for name, count, limit in (
            ("rows", facts.num_rows, MAX_ROWS),
            ("row groups", facts.num_row_groups, MAX_ROW_GROUPS),
            ("columns", facts.num_columns, MAX_COLUMNS),
        ):
            if count > limit:
                raise _invalid(f"{count:,} {name}", allowed=f"at most {limit:,}")
        names = file.schema_arrow.names
        if len(set(names)) != len(names):
            twice = next(name for index, name in enumerate(names) if name in names[:index])
            raise _invalid(f"two columns are named {twice[:80]!r}", allowed="each name once")
        number = 0
        for batch in file.iter_batches(_check_sizes(file), use_threads=False):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row


def _check_sizes(file: Any) -> int:
    """Number of rows to read at once, by what the file says its row groups unpack to: few bytes may become many.

    Raises InvalidDataset for texts that are too long on average. A value that a dictionary repeats counts once there, so the
    process's limit of memory stays necessary. What single columns say is not asked: pyarrow ends the process where it is wrong.
    """
    facts, row_bytes = file.metadata, 0
    for group in map(facts.row_group, range(facts.num_row_groups)):
        num_rows, group_bytes = max(1, group.num_rows), max(0, group.total_byte_size)
        if group_bytes > MAX_ROW_BYTES * num_rows:
            names = ", ".join(file.schema.names)[:80]
            raise _invalid(
                f"columns {names} unpack to {group_bytes:,} bytes for {num_rows:,} rows",
                allowed=f"at most {MAX_ROW_BYTES:,} bytes a row",
            )
        row_bytes = max(row_bytes, group_bytes // num_rows)
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, row_bytes)))


def _invalid(found: str, *, allowed: str) -> InvalidDataset:
    message = f"dataset, the file: {found}; allowed: {allowed}"
    return InvalidDataset(message, field="dataset.the file", value=found, allowed=allowed)
