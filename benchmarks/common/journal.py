"""A record of rows that survives its process: each is also a line of a file, from which a later run goes on."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common.record import Record, Row, clear, failure

WRITE_EVERY_S = 20.0


@dataclass(kw_only=True)
class Journal(Record):
    """Rows are printed by ``show``; the result's file is written now and then, and by ``finish``."""

    lines: Path | None = None
    """One JSON object a line. Rows that are there already count as done; failures are tried again."""
    show: Callable[[Row], str] = str
    written_s: float = field(default_factory=time.monotonic)
    """When the result's file was last written."""

    def __post_init__(self) -> None:
        if self.lines is not None and self.lines.exists():
            rows = [json.loads(line) for line in self.lines.read_text().splitlines() if line.endswith("}")]
            self.rows = [row for row in rows if row["what"] != "failed"]
            # Without failures, and without a line that was cut short, which the next would else be joined to.
            self.lines.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(self.show(row), flush=True)
        if self.lines is not None:
            with self.lines.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if time.monotonic() - self.written_s > WRITE_EVERY_S:
            self._write()
            self.written_s = time.monotonic()

    def has(self, **wanted: object) -> bool:
        return any(all(row.get(name) == value for name, value in wanted.items()) for row in self.rows)

    def do(self, make: Callable[[], Row], **head: object) -> None:
        """Make one row, unless it is there already; a failure becomes a row that says why."""
        if self.has(**head):
            return
        try:
            self.add({**head, **make()})
        except Exception as error:
            self.add(failure(dict(head), error))
        clear()
