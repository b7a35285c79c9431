"""Short texts that a job left on disk, for its page: the end of a log, a generated sample.

Only paths made here from rows, and only below HEADROOM_HOME, whatever a link inside says.
"""

from pathlib import Path

from django.conf import settings

from webapp.jobs.models import Artifact, Job

LOG_TAIL_BYTES = 64 * 1024
SAMPLE_BYTES = 64 * 1024


def log_tail(job: Job) -> str:
    """The last lines of the newest attempt that logged anything."""
    folder = Path(settings.HEADROOM_HOME) / "jobs" / job.pk / "attempts"
    for number in range(job.attempt, 0, -1):
        if text := _read_end(folder / str(number) / "log.txt", LOG_TAIL_BYTES):
            return text
    return ""


def sample_text(artifact: Artifact) -> str:
    return _read_end(Path(settings.HEADROOM_HOME) / artifact.file, SAMPLE_BYTES)


def _read_end(path: Path, limit_bytes: int) -> str:
    """The last ``limit_bytes`` from a line's start on; empty where there is no such file."""
    home = Path(settings.HEADROOM_HOME).resolve()
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(home) or not real.is_file():
            return ""
        with real.open("rb") as file:
            size_bytes = file.seek(0, 2)
            file.seek(max(0, size_bytes - limit_bytes))
            text = file.read(limit_bytes).decode("utf-8", errors="replace")
    except OSError:
        return ""
    return text.split("\n", 1)[-1] if size_bytes > limit_bytes else text
