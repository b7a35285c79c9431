"""Short texts that a job left on disk, for its page: the end of a log and what follows, lines found in it, texts it wrote.

Only paths made here from rows, and only below HEADROOM_HOME, whatever a link inside says.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from webapp.jobs.models import Artifact, Job

LOG_TAIL_BYTES = 64 * 1024
SEARCHED_BYTES = 8 * 1024 * 1024
"""Bytes shown from the end of each attempt's log."""
FOUND_LINES = 500
SAMPLE_BYTES = 64 * 1024
NUM_ANSWERS = 20


@dataclass(frozen=True, kw_only=True)
class LogPart:
    """A stretch of one attempt's log."""

    text: str
    attempt: int
    """0: nothing was logged yet."""
    end_bytes: int
    """Offset at which the next stretch begins."""
    is_cut: bool = False
    """True where the log begins before this stretch."""


@dataclass(frozen=True, kw_only=True)
class FoundLine:
    """A line of a log that was looked for."""

    attempt: int
    number: int
    """From 1; counted from where the search began in a log of more than ``SEARCHED_BYTES``."""
    text: str


@dataclass(frozen=True, kw_only=True)
class GeneratedText:
    """The text that a generate job wrote for one prompt."""

    title: str
    text: str
    note: str
    """The reason why it ended."""


def log_tail(job: Job) -> LogPart:
    """The last lines of the newest attempt that logged anything."""
    for attempt in range(job.attempt, 0, -1):
        path = _log_file(job, attempt)
        if (size_bytes := _size(path)) > 0:
            text = _read_end(path, LOG_TAIL_BYTES)
            return LogPart(text=text, attempt=attempt, end_bytes=size_bytes, is_cut=size_bytes > LOG_TAIL_BYTES)
    return LogPart(text="", attempt=0, end_bytes=0)


def log_after(job: Job, *, attempt: int, end_bytes: int) -> LogPart:
    """Whole lines written since; of a later attempt from its begin, once there is nothing more of this one."""
    for number in range(max(1, attempt), job.attempt + 1):
        start = end_bytes if number == attempt else 0
        data = _read_from(_log_file(job, number), start, LOG_TAIL_BYTES)
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == LOG_TAIL_BYTES else b"")
        if whole:
            return LogPart(text=whole.decode("utf-8", errors="replace"), attempt=number, end_bytes=start + len(whole))
    return LogPart(text="", attempt=attempt, end_bytes=end_bytes)


def find_in_log(job: Job, wanted: str) -> tuple[list[FoundLine], int]:
    """Lines that hold ``wanted``, in any case, the newest ``FOUND_LINES`` in order; and how many there are."""
    wanted = wanted.casefold()
    found = [
        FoundLine(attempt=attempt, number=number, text=line)
        for attempt in range(1, job.attempt + 1)
        for number, line in enumerate(_read_end(_log_file(job, attempt), SEARCHED_BYTES).splitlines(), start=1)
        if wanted in line.casefold()
    ]
    return found[-FOUND_LINES:], len(found)


def sample_text(artifact: Artifact) -> str:
    return _read_end(Path(settings.HEADROOM_HOME) / artifact.file, SAMPLE_BYTES)


def newest_answers(job: Job) -> list[GeneratedText]:
    """The last texts that a generate job wrote, the newest first."""
    folder = Path(settings.HEADROOM_HOME) / "jobs" / job.pk / "results"
    lines: list[str] = []
    for part in sorted(folder.glob("part-*.jsonl"), reverse=True):
        lines += reversed(_read_end(part, SAMPLE_BYTES).splitlines())
        if len(lines) >= NUM_ANSWERS:
            break
    return [answer for line in lines[:NUM_ANSWERS] if (answer := _answer(line)) is not None]


def _answer(line: str) -> GeneratedText | None:
    """None for a torn line, as a killed attempt leaves one."""
    try:
        result = json.loads(line)
        record = result["record"]
    except (ValueError, KeyError):
        return None
    body = (record.get("response") or {}).get("body") or record
    number, name = str(result["index"] + 1), record.get("custom_id") or record.get("id")
    title = f"Line {number}" if name in (None, number) else f"Line {number}: {name}"
    if error := body.get("error"):
        return GeneratedText(title=title, text="", note=str(error.get("message", error)))
    choice = (body.get("choices") or [body])[0]
    text = (choice.get("message") or {}).get("content") or choice.get("text") or ""
    words = {"stop": "complete", "length": "length limit"}
    how = words.get(choice.get("finish_reason"), "")
    return GeneratedText(title=title, text=text, note=f"{result['completion_tokens']:,} tokens, {how}".rstrip(", "))


def _log_file(job: Job, attempt: int) -> Path:
    return Path(settings.HEADROOM_HOME) / "jobs" / job.pk / "attempts" / str(attempt) / "log.txt"


def _inside_home(path: Path) -> Path | None:
    try:
        real = path.resolve(strict=True)
    except OSError:
        return None
    return real if real.is_relative_to(Path(settings.HEADROOM_HOME).resolve()) and real.is_file() else None


def _size(path: Path) -> int:
    real = _inside_home(path)
    return real.stat().st_size if real is not None else 0


def _read_from(path: Path, start_bytes: int, limit_bytes: int) -> bytes:
    real = _inside_home(path)
    if real is None:
        return b""
    try:
        with real.open("rb") as file:
            file.seek(start_bytes)
            return file.read(limit_bytes)
    except OSError:
        return b""


def _read_end(path: Path, limit_bytes: int) -> str:
    """The last ``limit_bytes`` from a line's start on; empty where there is no such file."""
    size_bytes = _size(path)
    text = _read_from(path, max(0, size_bytes - limit_bytes), limit_bytes).decode("utf-8", errors="replace")
    return text.split("\n", 1)[-1] if size_bytes > limit_bytes else text
