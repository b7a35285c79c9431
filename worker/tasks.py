"""The one task. Its message is a hint that may be lost, doubled or forged, all without harm."""

from webapp.wire.broker import RUN_JOB_TASK
from worker.app import app
from worker.supervisor import wake_supervisor


@app.task(name=RUN_JOB_TASK)  # type: ignore[untyped-decorator]
def run_job(job_id: str) -> None:
    """Wake the idle slots; which job runs is decided by the database."""
    wake_supervisor()
