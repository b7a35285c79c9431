"""A job's checkpoints as the start of something else: an export of their weights, or a branch.

What starts from one gets links to its files in a folder of its own, since the run that wrote it keeps only the newest few.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import DatabaseError, transaction

from optimizer.base.errors import DiskFull
from optimizer.base.serialize import to_json
from optimizer.models.files.gguf_export.kinds import check_gguf
from optimizer.models.spec import read_model_spec
from optimizer.workload import Export
from webapp.ids import new_job_id
from webapp.jobs.actions import create_job
from webapp.jobs.errors import JobConflict, NoCheckpoint
from webapp.jobs.models import Checkpoint, Job, Kind
from webapp.jobs.turns import require_queue_room

SOURCE_FOLDER = "source"
"""In an export job's folder: holds the checkpoint that is exported."""
BRANCH_FOLDER = "branch"
"""In a branch's folder: a job folder with the one checkpoint that it goes on from."""
_CHECKPOINTS = "checkpoints"


def find_checkpoint(job: Job, step: int | None = None) -> Checkpoint:
    """The newest, or the newest of a step, as long as its files are there. Raises NoCheckpoint."""
    rows = job.checkpoints.order_by("-fence", "-step")
    found = [row for row in rows if (step is None or row.step == step) and _folder(row).is_dir()]
    if found:
        return found[0]
    kept = sorted({row.step for row in rows if _folder(row).is_dir()})
    known = f"there are those of steps {', '.join(map(str, kept))}" if kept else "it has none"
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise NoCheckpoint(
        f"job {job.pk} has {wanted} on the disk; {known}",
        hint="The newest three are kept; set workload.checkpoint_every_steps for more frequent ones.",
        job_id=job.pk,
        steps=kept,
    )


def export_job(
    job: Job,
    *,
    step: int | None = None,
    export: Export | None = None,
    actor: str,
    owner: Any = None,
    and_then: Callable[[Job], None] | None = None,
) -> Job:
    """A job that writes the weights of a training run's checkpoint: as its workload says, or as ``export`` does.

    owner: who asks for it; without one it is the program's doing. and_then: called with the new job in the transaction that makes
    it. Raises what ``ready_export`` does, LimitReached where too many jobs wait.
    """
    if owner is not None:
        require_queue_room(owner, job.project)
    with ready_export(job, step=step, export=export) as ready, transaction.atomic():
        made = create_job(**ready, owner=owner or job.owner, actor=actor)
        if and_then is not None:
            and_then(made)
    return made


@contextmanager
def ready_export(job: Job, *, step: int | None = None, export: Export | None = None) -> Iterator[dict[str, Any]]:
    """Arguments of ``create_job`` for an export, whose checkpoint was put aside. Begin no transaction before.

    Raises NoCheckpoint, JobConflict for a job that does not train or whose model was deleted, InvalidWorkload for GGUF of a model
    that has no place in it, DiskFull.
    """
    if job.kind != Kind.TRAIN:
        raise JobConflict(f"job {job.pk} does not train, and so has no checkpoint", hint="Name one that trains.")
    if job.model.deleted_at is not None:
        raise JobConflict(f"{job.model.name} was deleted, and exporting needs it", hint="Restore it first.")
    checkpoint = find_checkpoint(job, step)
    wanted = job.spec["workload"].get("export", {}) if export is None else to_json(export)
    if wanted.get("gguf", "none") != "none":
        check_gguf(read_model_spec(job.model.config))
    spec = {
        "kind": "export",
        "name": f"{job.name[:160]}, step {checkpoint.step}",
        "job": job.pk,
        "step": checkpoint.step,
        "checkpoint": checkpoint.folder.rsplit("/", 1)[-1],
        "model": job.model_id,
        "workload": {**job.spec["workload"], "export": wanted},
        "goal": job.spec["goal"],
    }
    with _put_aside(checkpoint, SOURCE_FOLDER) as job_id:
        yield {
            "job_id": job_id,
            "project": job.project,
            "spec": spec,
            "model": job.model,
            "dataset": None,
            "plan": _plan_of(job),
            "prediction": None,
            "machine": None,
            "kind": Kind.EXPORT,
            "num_steps": checkpoint.step,
        }


def exports_of(job: Job) -> list[Job]:
    """Jobs that write weights of this one's checkpoints, newest first."""
    return list(Job.objects.filter(kind=Kind.EXPORT, project=job.project_id, spec__job=job.pk).order_by("-created_at"))


def is_there(checkpoint: Checkpoint) -> bool:
    """Report whether its files are still on the disk."""
    return _folder(checkpoint).is_dir()


@contextmanager
def ready_branch(checkpoint: Checkpoint | None) -> Iterator[str]:
    """Id for the job that goes on from the checkpoint, which was put aside; empty without one. Begin no transaction before.

    Raises NoCheckpoint where it went meanwhile, DiskFull.
    """
    if checkpoint is None:
        yield ""
        return
    with _put_aside(checkpoint, f"{BRANCH_FOLDER}/{_CHECKPOINTS}") as job_id:
        yield job_id


@contextmanager
def _put_aside(checkpoint: Checkpoint, place: str) -> Iterator[str]:
    """Id for a job, in whose folder the checkpoint's files lie; they go again where no such job is made within.

    Files are linked, or copied where the disk has no links. That may take minutes, in which a transaction would keep every other
    writer of SQLite waiting. What a process leaves that dies meanwhile the reconciler removes.
    """
    job_id = new_job_id()
    folder = Path(settings.HEADROOM_HOME) / "jobs" / job_id
    try:
        _link_all(checkpoint, folder / place)
        yield job_id
    finally:
        # asked of the database, because a commit whose confirmation was lost has made the job
        with suppress(DatabaseError):
            if not Job.objects.filter(pk=job_id).exists():
                shutil.rmtree(folder, ignore_errors=True)


def _link_all(checkpoint: Checkpoint, folder: Path) -> None:
    source, target = _folder(checkpoint), folder / checkpoint.folder.rsplit("/", 1)[-1]
    staged = target.with_name(f".tmp-{target.name}")
    try:
        staged.mkdir(mode=0o700, parents=True)
        for file in sorted(source.iterdir()):
            _link_or_copy(file, staged / file.name)
        staged.rename(target)
    except FileNotFoundError as error:
        raise NoCheckpoint(
            f"the checkpoint of step {checkpoint.step} went while it was being put aside", job_id=checkpoint.job_id, steps=[]
        ) from error
    except OSError as error:
        raise DiskFull(f"the checkpoint cannot be put aside: {error.strerror}", hint="Free disk space.") from error


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(file, target)


def _plan_of(job: Job) -> dict[str, Any] | None:
    """The newest attempt's: a retry may have been planned again."""
    attempt = job.attempts.exclude(plan=None).order_by("-number").first()
    plan: dict[str, Any] | None = attempt.plan if attempt else job.plan
    return plan


def _folder(checkpoint: Checkpoint) -> Path:
    return Path(settings.HEADROOM_HOME) / "jobs" / checkpoint.job_id / checkpoint.folder
