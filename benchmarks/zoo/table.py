"""The table of docs/zoo.md, of the rows that ``command.py`` has."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.record import Row


def write_table(file: Path, rows: Sequence[Row]) -> None:
    """Placeholder until the table is settled."""
    file.write_text("\n".join(str(row["model_type"]) for row in rows) + "\n")
