"""A worker that measures nothing: samples go the way of a real attempt, from a line in a file over the copier to rows and wire.

``python -m benchmarks.live.writer``: one JSON line ``[command, arguments]`` in, one JSON line out; a process of its own, with the
service's own database. Rows are made as the tests of pages make theirs.
"""

import json
import os
import sys
import threading
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import django

PASSWORD = "correct horse battery"
_attempts: dict[str, Any] = {}


def add_people(*, count: int) -> list[str]:
    """Administrators, who may watch everything, since one person may open twenty streams; a token of each."""
    from tests.webapp.pages import rows
    from webapp.accounts.tokens import create_token

    people = [rows.make_user(f"viewer-{number}", is_admin=True) for number in range(count)]
    return [create_token(user=user, name="watching")[1] for user in people]


def new_job(*, name: str) -> str:
    """A running job of viewer-0."""
    from django.contrib.auth.models import User

    from tests.webapp.pages import rows

    job = rows.make_job(User.objects.get(username="viewer-0"), name=name)
    _attempts[job.pk] = rows.start(job)
    return str(job.pk)


def fill(*, job_id: str, num_points: int) -> None:
    """Write all the steps of a long run at once."""
    from tests.webapp.pages import rows

    rows.fill(_attempts[job_id], num_points=num_points)


def measure(*, job_id: str, num_samples: int, per_second: float, first_step: int = 1) -> dict[str, Any]:
    """Steps at this pace, written by one thread as the attempt's process does and carried on by this one as its supervisor does.

    Each record's ``time_s`` is the moment before its line is written.
    """
    from django.conf import settings

    from webapp.attempts.records import record_progress, record_samples
    from webapp.wire.publish import num_dropped, publish_all
    from worker.attempt import TURN_S
    from worker.run.pipe import PipeReader
    from worker.telemetry import Progress, SampleCopier

    attempt = _attempts[job_id]
    folder = Path(settings.HEADROOM_HOME) / "jobs" / job_id / "attempts" / str(attempt.number)
    folder.mkdir(parents=True, exist_ok=True)
    read_end, write_end = os.pipe()
    steps = range(first_step, first_step + num_samples)
    pace = threading.Thread(target=_step, args=(attempt, folder, write_end, steps, 1 / per_second))
    progress = Progress(num_steps=first_step + num_samples - 1)
    copier = SampleCopier(
        folder / "samples.jsonl",
        attempt_number=attempt.number,
        record=lambda records: record_samples(attempt, records),
        mirror=lambda records: publish_all(job_id, "sample", records),
    )
    reader = PipeReader(read_end)
    processor_s = time.process_time()
    pace.start()
    while pace.is_alive():
        reader.read(timeout_s=TURN_S)
        progress.add(copier.copy_if_due())
        if progress.take_if_due():
            record_progress(attempt, step=progress.step, eta_s=progress.eta_s, summary=dict(progress.summary))
    pace.join()
    copier.copy()
    return {"num_dropped": num_dropped(), "processor_s": time.process_time() - processor_s}


def _step(attempt: Any, folder: Path, write_end: int, steps: range, pause_s: float) -> None:
    from tests.webapp.pages import rows
    from worker.run.pipe import PipeWriter
    from worker.run.reporter import Reporter

    reporter = Reporter(folder, pipe=PipeWriter(write_end))
    started_at = time.monotonic()
    for number, step in enumerate(steps, start=1):
        time.sleep(max(0.0, started_at + number * pause_s - time.monotonic()))
        reporter({"type": "sample", **rows.step_record(attempt, step)})
    reporter.close()


def end(*, job_id: str) -> str:
    from webapp.attempts.outcome import finish_attempt

    result: dict[str, Any] = {"outcome": "succeeded", "reason": "done", "message": "", "error": None, "step": 1, "summary": {}}
    return str(finish_attempt(_attempts[job_id], result=result, exit_code=0))


def main() -> None:
    django.setup()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        with redirect_stdout(sys.stderr):  # an attempt prints its steps
            answer = globals()[name](**arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
