"""The Celery worker, whose attempts run in ``tests.chaos.quick.runner``: ``celery -A tests.chaos.quick.worker worker``."""

from worker.app import app as app

# isort: split
from worker import attempt
from worker.run.child import isolated_command


def _command(module: str, *arguments: str) -> list[str]:
    return isolated_command("tests.chaos.quick.runner" if module == "worker.run.runner" else module, *arguments)


attempt.isolated_command = _command  # type: ignore[attr-defined]
