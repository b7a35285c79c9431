"""A job's checkpoints as the start of something else: an export of their weights, or a branch.

What starts from one gets links to its files in a folder of its own, since the run that wrote it keeps only the newest few.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import transaction

from optimizer.base.errors import DiskFull
from optimizer.base.serialize import to_json
from optimizer.models.files.gguf_export.kinds import check_gguf
from optimizer.models.spec import read_model_spec
from optimizer.workload import Export
from webapp.jobs.actions import create_job
from webapp.jobs.errors import JobConflict, NoCheckpoint
from webapp.jobs.models import Checkpoint, Job, Kind
from webapp.jobs.queue import require_queue_room

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
    job: Job, *, step: int | None = None, export: Export | None = None, actor: str, owner: Any = None
) -> Job:
    """A job that writes the weights of a training run's checkpoint: as its workload says, or as ``export`` does.

    owner: who asks for it; without one it is the program's doing.

    Raises NoCheckpoint, JobConflict for a job that does not train or whose model was deleted, InvalidWorkload for GGUF of a model
    that has no place in it, LimitReached where too many jobs wait.
    """
    if job.kind != Kind.TRAIN:
        raise JobConflict(f"job {job.pk} does not train, and so has no checkpoint", hint="Name one that trains.")
    if job.model.deleted_at is not None:
        raise JobConflict(f"{job.model.name} was deleted, and exporting needs it", hint="Restore it first.")
    if owner is not None:
        require_queue_room(owner, job.project)
    checkpoint = find_checkpoint(job, step)
    wanted = job.spec["workload"].get("export", {}) if export is None else to_json(export)
    if wanted.get("gguf", "none") != "none":
        check_gguf(read_model_spec(job.model.config))
    name = checkpoint.folder.rsplit("/", 1)[-1]
    spec = {
        "kind": "export",
        "name": f"{job.name[:160]}, step {checkpoint.step}",
        "job": job.pk,
        "step": checkpoint.step,
        "checkpoint": name,
        "model": job.model_id,
        "workload": {**job.spec["workload"], "export": wanted},
        "goal": job.spec["goal"],
    }
    with transaction.atomic():
        made = create_job(
            owner=owner or job.owner,
            project=job.project,
            spec=spec,
            model=job.model,
            dataset=None,
            plan=_plan_of(job),
            prediction=None,
            machine=None,
            kind=Kind.EXPORT,
            actor=actor,
            num_steps=checkpoint.step,
        )
        keep_aside(checkpoint, _job_folder(made) / SOURCE_FOLDER)
    return made


def exports_of(job: Job) -> list[Job]:
    """Jobs that write weights of this one's checkpoints, newest first."""
    return list(Job.objects.filter(kind=Kind.EXPORT, project=job.project_id, spec__job=job.pk).order_by("-created_at"))


def is_there(checkpoint: Checkpoint) -> bool:
    """Report whether its files are still on the disk."""
    return _folder(checkpoint).is_dir()


def keep_for_branch(job: Job, checkpoint: Checkpoint) -> None:
    """The checkpoint that a new job goes on from. Raises NoCheckpoint where it went meanwhile, DiskFull."""
    keep_aside(checkpoint, _job_folder(job) / BRANCH_FOLDER / _CHECKPOINTS)


def keep_aside(checkpoint: Checkpoint, folder: Path) -> Path:
    """Link the checkpoint's files into a folder of the same name below ``folder``; copy them where the disk has no links."""
    source, target = _folder(checkpoint), folder / checkpoint.folder.rsplit("/", 1)[-1]
    staged = target.with_name(f".tmp-{target.name}")
    try:
        staged.mkdir(mode=0o700, parents=True)
        for file in sorted(source.iterdir()):
            _link_or_copy(file, staged / file.name)
        staged.rename(target)
    except FileNotFoundError as error:
        shutil.rmtree(staged, ignore_errors=True)
        raise NoCheckpoint(
            f"the checkpoint of step {checkpoint.step} went while it was being put aside", job_id=checkpoint.job_id, steps=[]
        ) from error
    except OSError as error:
        shutil.rmtree(staged, ignore_errors=True)
        raise DiskFull(f"the checkpoint cannot be put aside: {error.strerror}", hint="Free disk space.") from error
    return target


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


def _job_folder(job: Job) -> Path:
    return Path(settings.HEADROOM_HOME) / "jobs" / job.pk
