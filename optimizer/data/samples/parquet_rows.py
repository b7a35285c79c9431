"""Rows of a Parquet file, whose claims about itself are not trusted: call it in a limited process."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optimizer.base.errors import InvalidDataset
from optimizer.data.documents import MAX_COLUMNS, MAX_ROW_GROUPS, MAX_ROWS

_BATCH_ROWS = 64


def read_parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row with its place, lists of structs as lists of objects. Raises InvalidDataset, while iterating."""
    import pyarrow as pa

    try:
        yield from _read(path)
    except (pa.ArrowException, OSError, ValueError, UnicodeDecodeError) as error:
        raise _invalid(f"not readable as parquet ({str(error)[:200]})", allowed="a parquet file") from error


def _read(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    from pyarrow import parquet

    with parquet.ParquetFile(
        path,
        thrift_string_size_limit=16_000_000,
        thrift_container_size_limit=1_000_000,
        page_checksum_verification=True,
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
        number = 0
        for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row


def _invalid(found: str, *, allowed: str) -> InvalidDataset:
    message = f"dataset, the file: {found}; allowed: {allowed}"
    return InvalidDataset(message, field="dataset.the file", value=found, allowed=allowed)
