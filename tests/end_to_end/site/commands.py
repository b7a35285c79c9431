"""The commands of control.py: each function is one command, with JSON in and out. Import it after ``django.setup()``."""

import contextlib
import hashlib
import sqlite3
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection

from optimizer.base.errors import HeadroomError
from optimizer.models.spec import read_model_spec
from webapp.accounts.models import Scope
from webapp.accounts.tokens import create_token
from webapp.catalog.actions import create_dataset as create_prompts_row
from webapp.catalog.models import Dataset, Link, Machine, Model
from webapp.jobs import actions
from webapp.jobs.actions import CancelMode
from webapp.jobs.devices.named import read_needs
from webapp.jobs.links.known import link_documents
from webapp.jobs.links.probing import ask_for_links as ask_for_probes
from webapp.jobs.models import Artifact, Attempt, Checkpoint, Event, Job, Member, Sample
from webapp.planning.search.profile_requests import request_profile as ask_for_profile
from webapp.planning.search.profiles import ProfileNeed
from webapp.planning.submitting import submit_job


def database() -> str:
    return connection.vendor


def can_write() -> bool:
    """Return true if nobody holds SQLite's one write lock for longer than a write takes, and far less than a lease."""
    if connection.vendor != "sqlite":
        return True
    with contextlib.closing(sqlite3.connect(connection.settings_dict["NAME"], timeout=0.1, isolation_level=None)) as own:
        try:
            own.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        own.execute("ROLLBACK")
    return True


def token(name: str, scope: str = "write") -> str:
    """Make a new person and return a token of theirs."""
    return create_token(user=User.objects.create_user(username=name), name="test", scope=Scope(scope))[1]


def create_model(config: dict[str, Any], folder: str = "models/tiny", has_weights: bool = False) -> str:
    spec = read_model_spec(config)
    model = Model.objects.create(
        name="tiny",
        model_type=spec.model_type,
        config=spec.to_config(),
        fingerprint=spec.fingerprint,
        folder=folder,
        has_weights=has_weights,
    )
    return model.pk


def create_dataset(text: str) -> str:
    path = Path(settings.HEADROOM_HOME) / "datasets" / "tiny.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    dataset = Dataset.objects.create(
        name="tiny",
        format="txt",
        file="datasets/tiny.txt",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        num_bytes=path.stat().st_size,
    )
    return dataset.pk


def create_prompts(text: str) -> str:
    file = SimpleUploadedFile("prompts.jsonl", text.encode())
    return create_prompts_row(owner=None, name="prompts", file=file, purpose="prompts").pk


def create_job(
    model: str,
    dataset: str | None,
    workload: dict[str, Any],
    plan: dict[str, Any],
    budget_bytes: int,
    kind: str,
    num_steps: int | None = None,
    prediction: dict[str, Any] | None = None,
    forbid: tuple[str, ...] = (),
    machines: tuple[str, ...] = (),
    owner: str = "",
) -> str:
    """prediction: with one the plan counts as the search's choice, and may change. machines: that the plan's ranks name. owner:
    nobody unless given.
    """
    goal = {"device_budget_bytes": budget_bytes, "forbid": list(forbid)}
    job = actions.create_job(
        owner=User.objects.get(username=owner) if owner else None,
        spec={"name": "tiny", "workload": workload, "goal": goal, "plan": "chosen", "machines": list(machines)},
        model=Model.objects.get(pk=model),
        dataset=Dataset.objects.get(pk=dataset) if dataset else None,
        plan=plan,
        prediction=prediction,
        machine=None,
        kind=kind,
        num_steps=num_steps,
        actor="user:test",
    )
    return job.pk


def submit_planned(
    model: str, dataset: str, workload: dict[str, Any], goal: dict[str, Any], when_ready: bool = False, **fields: Any
) -> str:
    """A job as a person submits it, with the plan that is searched for once the model is profiled. when_ready: profiled or not.
    fields: others of the spec.
    """
    user, _ = User.objects.get_or_create(username="planner")
    spec = {"model": model, "dataset": dataset, "workload": workload, "goal": goal, **fields}
    return submit_job(user, spec=spec, when_ready=when_ready, actor="user:planner").pk


def refusal_of(**asked: Any) -> str:
    """The words with which a submission is refused; empty where it is taken."""
    try:
        submit_planned(**asked)
    except HeadroomError as error:
        return error.message
    return ""


def plan_of(job: str) -> dict[str, Any]:
    row = Job.objects.get(pk=job)
    return {"plan": row.plan, "prediction": row.prediction, "needs": read_needs(row.need_ranks), "spec": row.spec}


def request_profile(model: str) -> str:
    """The job that makes the model's profile."""
    return ask_for_profile(ProfileNeed(model=Model.objects.get(pk=model))).job_id


def cancel(job: str, mode: CancelMode) -> bool:
    return actions.cancel_job(Job.objects.get(pk=job), mode=mode, actor="user:test")


def pause(job: str) -> None:
    actions.pause_job(Job.objects.get(pk=job), actor="user:test")


def resume(job: str) -> None:
    actions.resume_job(Job.objects.get(pk=job), actor="user:test")


def links() -> list[dict[str, Any]]:
    """The measured links as the API shows them for the machine that listens."""
    rows = Link.objects.select_related("listener", "connector")
    return [{"of": link.listener.name, **link_documents(link.listener, [link])[0]} for link in rows]


def ask_for_links(machine: str) -> int:
    return ask_for_probes(Machine.objects.get(name=machine))


def num_machines() -> int:
    return Machine.objects.count()


def members(job: str) -> list[Any]:
    fields = ("machine_name", "worker", "ranks", "devices", "is_lost")
    return list(Member.objects.filter(attempt__job_id=job).order_by("pk").values(*fields))


def show(job: str) -> dict[str, Any]:
    row = Job.objects.get(pk=job)
    fields = (
        "state",
        "phase",
        "reason",
        "message",
        "error",
        "attempt",
        "failed_attempts",
        "step",
        "summary",
        "is_terminal",
    )
    return {name: getattr(row, name) for name in fields}


def attempts(job: str) -> list[Any]:
    fields = ("number", "pid", "devices", "outcome", "exit_code", "resumed_from_step", "measured", "error")
    return list(Attempt.objects.filter(job_id=job).order_by("number").values(*fields))


def events(job: str) -> list[Any]:
    return list(Event.objects.filter(job_id=job).values("kind", "from_state", "to_state", "reason", "message", "actor"))


def samples(job: str, kind: str) -> list[Any]:
    return list(
        Sample.objects.filter(job_id=job, kind=kind).order_by("attempt", "step").values("attempt", "step", "data")
    )


def artifacts(job: str) -> list[Any]:
    return list(Artifact.objects.filter(job_id=job).order_by("name").values("kind", "name", "file", "sha256"))


def checkpoints(job: str) -> list[Any]:
    return list(Checkpoint.objects.filter(job_id=job).order_by("step").values("step", "fence", "folder"))
