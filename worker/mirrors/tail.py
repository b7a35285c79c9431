"""Measurements of a job that a mirror has not had yet, of all its attempts in their order.

A mirror keeps beside the job how far it has come in each attempt's file, in a file of its own attempt, so that one that was
left over writes over nothing that a later one has noted. What was sent and not noted is sent again.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from worker.mirrors.scalars import Scalars, read_record, scalars_of

MAX_EVENTS = 500


class Tail:
    """Take ``next``; call ``keep`` once it was sent."""

    def __init__(self, job_folder: Path, *, last_attempt: int, marks_folder: Path, mirror: str) -> None:
        """mirror: its name."""
        self._attempts = job_folder / "attempts"
        self._last_attempt = last_attempt
        self._mark_file = marks_folder / f"{mirror}-{last_attempt}.json"
        self._offsets = _read_marks(marks_folder.glob(f"{mirror}*.json"))
        self._taken: dict[str, int] = {}

    @property
    def is_passed_on(self) -> bool:
        """True once a later attempt has begun, whose own mirror sends all that is left."""
        numbers = [path.parent.name for path in self._attempts.glob("*/attempt.json")]
        return any(number.isdigit() and int(number) > self._last_attempt for number in numbers)

    def next(self) -> list[Scalars]:
        """At most MAX_EVENTS; empty when all that is there was sent."""
        for number in range(1, self._last_attempt + 1):
            key = str(number)
            start_bytes = self._offsets.get(key, 0)
            events, end_bytes = _read(self._attempts / key / "samples.jsonl", start_bytes)
            if end_bytes > start_bytes:
                self._taken = {key: end_bytes}
                if events:
                    return events
                self.keep()
        return []

    def keep(self) -> None:
        """Note that what was taken last was sent."""
        self._offsets |= self._taken
        staged = self._mark_file.with_name(f".{self._mark_file.name}")
        staged.write_text(json.dumps(self._offsets))
        staged.replace(self._mark_file)


def _read(file: Path, start_bytes: int) -> tuple[list[Scalars], int]:
    """Events and where they end; a torn last line waits for its end."""
    if not file.exists():
        return [], start_bytes
    events: list[Scalars] = []
    with file.open("rb") as stream:
        stream.seek(start_bytes)
        end_bytes = start_bytes
        while len(events) < MAX_EVENTS and (line := stream.readline()).endswith(b"\n"):
            end_bytes += len(line)
            if (record := read_record(line)) is not None:
                events.append(scalars_of(record))
    return events, end_bytes


def _read_marks(files: Iterable[Path]) -> dict[str, int]:
    """The furthest that any of them has come in each attempt's file."""
    furthest: dict[str, int] = {}
    for file in files:
        try:
            found = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        for key, value in found.items():
            furthest[str(key)] = max(furthest.get(str(key), 0), int(value))
    return furthest
