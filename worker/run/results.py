"""Keeps the finished lines of a generate job on disk: appended and synced as it comes, read back by the next attempt.

Each attempt writes a file of its own, ``results/part-<attempt>-f<fence>.jsonl`` in the job's folder, so that one that was fenced
out and has not noticed yet cannot tear what its successor writes. A torn last line is what a killed attempt leaves; it counts as
not there. The finished files hold the lines in the order of the input, whatever order they came in, and lie in the attempt's own
folder, too.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from optimizer.runtime.job.export.place import artifacts_place

RESULTS_FILE = "results.jsonl"
ERRORS_FILE = "errors.jsonl"
_PARTS_FOLDER = "results"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line's end."""

    index: int
    """The line's, as ``PromptLine.index``."""
    record: dict[str, Any]
    """The line of the finished file."""
    is_error: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ResultWriter:
    """Appends to the attempt's own part. Use as a context manager."""

    def __init__(self, job_folder: Path, *, attempt: int, fence: int, rank: int = 0) -> None:
        """rank: of several that write, each to a part of its own."""
        folder = job_folder / _PARTS_FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = (folder / _part_name(attempt, fence, rank)).open("ab")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, results: Iterable[Result]) -> None:
        """On the disk when this returns."""
        for result in results:
            self._file.write(_encode(vars(result)))
        self._file.flush()
        os.fsync(self._file.fileno())


class OtherParts:
    """Counts what other ranks of this attempt have finished, read as it comes."""

    def __init__(self, job_folder: Path, *, attempt: int, fence: int, num_ranks: int) -> None:
        names = [_part_name(attempt, fence, rank) for rank in range(1, num_ranks)]
        self._read = {job_folder / _PARTS_FOLDER / name: 0 for name in names}
        self.num_done = self.num_errors = self.num_tokens = 0

    def look(self) -> None:
        """Count what was added since the last look; a line that is still being written waits for the next."""
        for part, start in self._read.items():
            if not part.exists():
                continue
            with part.open("rb") as file:
                file.seek(start)
                for line in file:
                    result = _decode(line)
                    if result is None:
                        break
                    self._read[part] += len(line)
                    self.num_done += 1
                    self.num_errors += result.is_error
                    self.num_tokens += result.completion_tokens


def _part_name(attempt: int, fence: int, rank: int) -> str:
    return f"part-{attempt:03d}-f{fence}{f'-r{rank}' if rank else ''}.jsonl"


def read_finished(job_folders: Iterable[Path]) -> dict[int, Result]:
    """By index, what all attempts of these jobs have finished; where two finished a line the first of them holds."""
    found: dict[int, Result] = {}
    for job_folder in job_folders:
        for part in sorted((job_folder / _PARTS_FOLDER).glob("part-*.jsonl")):
            with part.open("rb") as file:
                for line in file:
                    result = _decode(line)
                    if result is not None:
                        found.setdefault(result.index, result)
    return found


@dataclass(frozen=True, kw_only=True)
class FinishedFile:
    """The file's name in ``result.json``."""

    kind: str
    """results or errors."""
    name: str
    file: str
    """Relative to the job's folder."""
    num_bytes: int
    sha256: str


def write_finished(finished: Mapping[int, Result], *, job_folder: Path, fence: int) -> list[FinishedFile]:
    """``results.jsonl``, and ``errors.jsonl`` where a line failed, in the order of the input. fence: the attempt's."""
    place = artifacts_place(fence)
    (job_folder / place).mkdir(mode=0o700, parents=True, exist_ok=True)
    ordered = [finished[index] for index in sorted(finished)]
    good = [result for result in ordered if not result.is_error]
    bad = [result for result in ordered if result.is_error]
    files = [_write(job_folder, f"{place}/{RESULTS_FILE}", good, kind="results")]
    if bad:
        files.append(_write(job_folder, f"{place}/{ERRORS_FILE}", bad, kind="errors"))
    return files


def _write(job_folder: Path, file: str, results: Iterable[Result], *, kind: str) -> FinishedFile:
    path, digest = job_folder / file, hashlib.sha256()
    with path.open("wb") as stream:
        for result in results:
            line = _encode(result.record)
            digest.update(line)
            stream.write(line)
        num_bytes = stream.tell()
        stream.flush()
        os.fsync(stream.fileno())
    return FinishedFile(kind=kind, name=path.name, file=file, num_bytes=num_bytes, sha256=digest.hexdigest())


def _encode(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _decode(line: bytes) -> Result | None:
    if not line.endswith(b"\n"):
        return None
    try:
        return Result(**json.loads(line))
    except (ValueError, TypeError):
        return None
