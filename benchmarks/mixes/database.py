"""A database of the service's own kind (a SQLite file, migrated), in which mixes are claimed by the service's own code."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimizer.hardware.machine import Machine
from optimizer.models.presets import PRESETS

if TYPE_CHECKING:
    from webapp.catalog import models as catalog
    from webapp.jobs import models as jobs


@contextmanager
def service_database() -> Iterator[None]:
    """Set Django up with an empty home, once in a process. There is no broker: claims are made, not waited for."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        os.environ["HEADROOM_HOME"] = folder
        os.environ["REDIS_URL"] = f"unix://{folder}/none.sock"
        os.environ["DJANGO_SETTINGS_MODULE"] = "webapp.settings"
        os.environ.pop("DATABASE_URL", None)
        import logging

        import django

        django.setup()
        # each submission would say that no broker took its hint
        logging.getLogger("webapp.wire").setLevel(logging.ERROR)
        from django.core.management import call_command
        from django.db import connection

        call_command("migrate", verbosity=0)
        try:
            yield
        finally:
            connection.close()
            Path(folder, "db.sqlite3").unlink(missing_ok=True)


def add_machine(machine: Machine) -> "catalog.Machine":
    from webapp.catalog.actions import register_machine

    return register_machine(name=machine.name, document=machine.to_json())


def add_jobs(machine: "catalog.Machine", subjects: Sequence[Any], *, owners: Sequence[str]) -> "list[jobs.Job]":
    """Queued jobs as a submission makes them, one for each subject, in this order. owners: whose each is."""
    from django.contrib.auth.models import User

    from webapp.catalog.models import Model
    from webapp.jobs.actions import create_job

    spec = PRESETS["gpt2"].spec
    known: Mapping[str, Any] = {
        "model_type": spec.model_type,
        "config": spec.to_config(),
        "fingerprint": spec.fingerprint,
        "folder": "models/gpt2",
        "num_parameters": spec.num_parameters,
    }
    # rows of a job need one; nothing of it is read when a job is claimed
    model, _ = Model.objects.get_or_create(name="gpt2", defaults=known)
    made = []
    for subject, name in zip(subjects, owners, strict=True):
        owner, _ = User.objects.get_or_create(username=name)
        made.append(
            create_job(
                owner=owner,
                spec={"name": subject.name, "workload": {}, "goal": {"device_budget_bytes": subject.budget_bytes}},
                model=model,
                dataset=None,
                plan=subject.plan,
                prediction=subject.prediction,
                machine=machine,
                actor=f"user:{name}",
                num_steps=1,
            )
        )
    return made


def end_job(attempt: "jobs.Attempt") -> None:
    """The claim's end, as if the run had gone well."""
    from django.db.models.functions import Now

    from webapp.jobs.models import State
    from webapp.jobs.moves import held_by, move_job

    changes = {"state": State.SUCCEEDED, "finished_at": Now(), "lease_until": None}
    if move_job(attempt.job_id, when=held_by(attempt), changes=changes, kind="succeeded", actor="benchmark") is None:
        raise RuntimeError(f"{attempt.job_id} could not be ended: its claim is no longer the newest")


def reserve_bytes(made: "Sequence[jobs.Job]", need_bytes: Sequence[int]) -> None:
    """Have admission count with these bytes in place of what it worked out for each job."""
    from webapp.jobs.models import Job

    for job, num_bytes in zip(made, need_bytes, strict=True):
        Job.objects.filter(pk=job.pk).update(need_device_bytes=num_bytes)


def forget_jobs(made: "Sequence[jobs.Job]") -> None:
    from webapp.jobs.models import Job

    Job.objects.filter(pk__in=[job.pk for job in made]).delete()
