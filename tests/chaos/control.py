"""Answers the questions of a campaign from the database, past every relay: people and models to begin with, and whether all is
well at the end.

``python -m tests.chaos.control``: one JSON line ``[command, arguments]`` in, one JSON line out.
"""

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from tests.end_to_end.site.site_control import answer_commands

P = ParamSpec("P")
T = TypeVar("T")
_PATIENCE_S = 120.0
TEXT = "In the beginning God created the heaven and the earth, and the earth was without form, and void.\n" * 200


def seed(*, profile_file: str) -> dict[str, str]:
    """A person's token, a model that is priced, and text to train it on."""
    from django.conf import settings

    from tests import llama
    from tests.end_to_end.site import commands
    from tests.end_to_end.site.site_control import add_llama
    from tests.optimizer.runtime.tiny import write_tokenizer

    token = commands.token("ada", scope="admin")
    model = add_llama(profile_file=profile_file)
    # a vocabulary that real jobs can train on
    write_tokenizer(Path(settings.HEADROOM_HOME, "models", "llama", "tokenizer.json"), num_letters=llama.CONFIG["vocab_size"] - 1)
    dataset = commands.create_dataset(TEXT)
    return {"token": token, "model": model, "dataset": dataset}


def patient(command: Callable[P, T]) -> Callable[P, T]:
    """Ask the database again on a new connection when it was lost or is held, as its clients do."""

    @functools.wraps(command)
    def ask(*args: P.args, **kwargs: P.kwargs) -> T:
        from django.db import InterfaceError, OperationalError, connection

        until_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return command(*args, **kwargs)
            except (OperationalError, InterfaceError):
                connection.close()
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.5)

    return ask


def can_write() -> bool:
    from tests.end_to_end.site import commands

    return commands.can_write()


@patient
def num_machines() -> int:
    from webapp.catalog.models import Machine

    return Machine.objects.count()


@patient
def unfinished() -> dict[str, Any]:
    """Number of jobs that have not ended, and the ids of those that wait for somebody to resume them."""
    from webapp.jobs.models import TERMINAL_STATES, Job

    jobs = Job.objects.exclude(state__in=TERMINAL_STATES)
    return {"num": jobs.count(), "paused": list(jobs.filter(pause_requested_at__isnull=False).values_list("pk", flat=True))}


def hint(*, jobs: list[str]) -> int:
    """Announce these, whether there is anything to do or not; the number that the broker took."""
    from webapp.wire.hints import send_hint

    return sum(send_hint(job) for job in jobs)


@patient
def check(*, accepted_file: str) -> dict[str, Any]:
    """Hold every promise against the rows and the files; ``tests.chaos.checker`` says which."""
    from tests.chaos.checker import check_all

    return check_all(json.loads(Path(accepted_file).read_text()))


if __name__ == "__main__":
    answer_commands(globals())
