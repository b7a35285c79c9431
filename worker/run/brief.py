"""``attempt.json``: everything the attempt's process is given. It has no database to ask and no name to look up.

Paths are absolute. Nothing secret goes in: the file stays in the job's folder.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from django.conf import settings

from webapp.attempts.memory import may_probe
from webapp.catalog.files.model_parts import CHAT_FILE
from webapp.catalog.models import Model
from webapp.catalog.weights import model_folder, weights_part
from webapp.jobs.checkpoints import BRANCH_FOLDER, SOURCE_FOLDER
from webapp.jobs.devices.joined import is_joined
from webapp.jobs.devices.named import read_needs
from webapp.jobs.models import Attempt, Job, Kind, Member
from webapp.jobs.trained_model import folder_left


def job_folder(home: Path, job_id: str) -> Path:
    return home / "jobs" / job_id


def write_brief(attempt: Attempt, *, folder: Path, home: Path, devices: Sequence[str]) -> None:
    """Make the attempt's folder and put the file there, whole or not at all."""
    brief = make_brief(attempt, folder=folder, home=home, devices=devices)
    if is_joined(attempt.job) and attempt.machine is not None:
        brief |= _joined_part(attempt, machine=attempt.machine.name, devices=devices)
    _write(brief, folder)


def write_brief_of_member(member: Member, *, folder: Path, home: Path, devices: Sequence[str]) -> None:
    """The same for the ranks of another machine than the one that leads, in the member's own folder."""
    shared = job_folder(home, member.attempt.job_id) / "attempts" / str(member.attempt.number)
    brief = make_brief(member.attempt, folder=shared, home=home, devices=devices)
    brief |= _joined_part(member.attempt, machine=member.machine_name, devices=devices)
    _write({**brief, "attempt_folder": str(shared)}, folder)


def _write(brief: dict[str, Any], folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    staged = folder / ".attempt.json"
    staged.write_text(json.dumps(brief, indent=1))
    staged.replace(folder / "attempt.json")


def _joined_part(attempt: Attempt, *, machine: str, devices: Sequence[str]) -> dict[str, Any]:
    """By rank: the machines, the kinds of device, and torch's names of the devices of this machine."""
    needs, own = read_needs(attempt.job.need_ranks), iter(devices)
    return {
        "machine": machine,
        "devices": [next(own) if need.machine == machine else "" for need in needs],
        "machines": [need.machine for need in needs],
        "kinds": [need.device for need in needs],
    }


def make_brief(attempt: Attempt, *, folder: Path, home: Path, devices: Sequence[str]) -> dict[str, Any]:
    """devices: torch's names of those that the attempt uses on this machine."""
    job = attempt.job
    brief: dict[str, Any] = {
        "job_id": job.pk,
        "attempt": attempt.number,
        "fence": attempt.fence,
        "kind": job.kind,
        "machine": attempt.machine.name if attempt.machine else "",
        "device": devices[0],
        "devices": list(devices),
        "config": job.model.config,
    }
    if job.kind == Kind.PROFILE:
        traced = {"adapter": job.spec.get("adapter"), **{name: bool(job.spec.get(name)) for name in ("generates", "packed")}}
        traced |= {"objective": job.spec.get("objective", "next_token"), "compiled": job.spec.get("compiled", [])}
        traced |= {"sharing": job.spec.get("sharing", 1)}
        return {**brief, **traced, "profile_file": str(folder / "profile.json")}
    brief |= {} if job.kind == Kind.SERVE else _common_part(attempt, home=home)
    if job.spec.get("mirrors"):
        brief["mirrored"] = _mirrored_part(job)
    if job.kind == Kind.EXPORT:
        # put aside for the first of an export's tries, which a retry goes on from
        first = [job, *_retried_jobs(job)][-1]
        source = job_folder(home, first.pk) / SOURCE_FOLDER
        return {**brief, "model_name": job.name, "checkpoint_folder": str(source / job.spec["checkpoint"])}
    brief["chat_file"] = str(home / job.model.folder / CHAT_FILE) if job.model.has_chat else None
    if job.kind == Kind.SERVE:
        return {**brief, **_serving_part(job, home=home)}
    if job.kind == Kind.GENERATE:
        named = {"model_name": job.model.name, "end_ids": job.model.generation.get("end_ids", [])}
        return {**brief, **named, "prompts": _dataset_part(job, home=home)}
    named = {
        "model_name": job.name,
        "tokens_folder": str(home / "cache" / "tokens"),
        "base_folder": str(home / "run" / "bases"),
        "kernels_folder": str(home / "cache" / "compiled"),
    }
    probing = {"probe_enough_left_s": settings.HEADROOM_PROBE_ENOUGH_LEFT_S} if may_probe(attempt) else {}
    return {**brief, **named, **probing, "dataset": _dataset_part(job, home=home)}


def _common_part(attempt: Attempt, *, home: Path) -> dict[str, Any]:
    job = attempt.job
    folder = model_folder(job.model, home=home)
    line = [job, *_retried_jobs(job)]
    earlier = [str(job_folder(home, retried.pk)) for retried in line[1:]]
    # a branch goes on from another job's checkpoint, which was put aside as it was made; its own are newer
    earlier += [str(job_folder(home, each.pk) / BRANCH_FOLDER) for each in line if each.spec.get("resume_from")]
    return {
        "model_folder": str(folder),
        **weights_part(job.model, home=home),
        "tokenizer_file": _tokenizer_file(job.model, folder=folder),
        "workload": job.spec["workload"],
        "goal": job.spec.get("goal"),
        "plan": attempt.plan,
        "prediction": attempt.prediction,
        "job_folder": str(job_folder(home, job.pk)),
        "resume_from": "newest" if attempt.number > 1 or earlier else None,
        "earlier_job_folders": earlier,
    }


def _serving_part(job: Job, *, home: Path) -> dict[str, Any]:
    """A model that is held: the catalog's weights, or those that a run left."""
    folder, spec = model_folder(job.model, home=home), job.spec
    weights = weights_part(job.model, home=home)
    if weights_job := spec.get("weights_job"):
        weights = {"weights_folder": str(folder_left(weights_job, kind="model", home=home)), "linked_files": []}
    return {
        **weights,
        "model_name": job.model.name,
        "tokenizer_file": _tokenizer_file(job.model, folder=folder),
        "end_ids": job.model.generation.get("end_ids", []),
        "job_folder": str(job_folder(home, job.pk)),
        "serving": {**spec["serving"], **spec["goal"]},
    }


def _mirrored_part(job: Job) -> dict[str, Any]:
    """The run's facts for the services that it is copied to."""
    config = {"model": job.model.name, "dataset": job.dataset.name if job.dataset else None}
    address = settings.HEADROOM_PUBLIC_URL.rstrip("/")
    return {"name": job.name, "url": f"{address}/jobs/{job.pk}/" if address else "", "config": config}


def _retried_jobs(job: Job) -> list[Job]:
    """The jobs that this one goes on from, the last first."""
    retried = []
    while job.retry_of is not None:
        job = job.retry_of
        retried.append(job)
    return retried


def _tokenizer_file(model: Model, *, folder: Path) -> str | None:
    """None: the tokenizer that ships with the program."""
    return str(folder / "tokenizer.json") if model.has_tokenizer else None


def _dataset_part(job: Job, *, home: Path) -> dict[str, Any] | None:
    if job.dataset is None:
        return None
    # an absolute path, that of what ships with the program, stays as it is
    dataset = job.dataset
    return {
        "file": str(home / dataset.file),
        "format": dataset.format,
        "columns": dataset.columns,
        "sha256": dataset.sha256,
    }
