"""Registers a finished run's weights as a catalog model, so that it can generate, or be trained further.

The files are linked where the disk allows: they take no room twice, and the model keeps them when the job's folder goes. What
``create_model`` checks of an upload is checked of them too, and each must still be what the run recorded.
"""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Literal

from django.conf import settings
from django.db.models import Q

from optimizer.models.files.sidecars import TOKENIZER_FILE, is_sidecar
from webapp.catalog.actions import MAX_NAME_CHARACTERS, checked_name, create_model
from webapp.catalog.errors import ModelExists
from webapp.catalog.files.kept_file import KeptFile
from webapp.catalog.files.model_parts import CHAT_FILE
from webapp.catalog.models import Model
from webapp.jobs.errors import FilesLost, NoModelLeft, WrongState
from webapp.jobs.models import Artifact, Job, Kind, State

Left = Literal["", "adapter", "model"]
_WEIGHTS_SUFFIXES = (".safetensors", ".safetensors.index.json")
_LEAVE_WEIGHTS = (Kind.TRAIN, Kind.EXPORT)
_NUMBER_CHARACTERS = 8
"""Characters of a name kept for the part that makes it unique."""


def create_trained_model(job: Job, *, name: str = "") -> Model:
    """A model with the config, the tokenizer and the weights that the run exported, in its project. Reads all of the files once.

    name: the job's unless given, then with a number where a model is called so.
    Raises WrongState while the run goes on, NoModelLeft, FilesLost, ModelExists (for a given name that is taken; without one
    when the run's model is there already), and what ``create_model`` raises.
    """
    artifacts = _exported(job)
    chosen = _choose_name(job, name)
    with ExitStack() as opened:
        files = {artifact.name: opened.enter_context(_open_checked(artifact)) for artifact in artifacts}
        return create_model(
            owner=job.owner,
            project=job.project,
            name=chosen,
            config=files["config.json"],
            tokenizer=files.get("tokenizer.json"),
            weights=[file for file_name, file in files.items() if file_name.endswith(_WEIGHTS_SUFFIXES)],
            sidecars={name: file for name, file in files.items() if is_sidecar(name) and name != TOKENIZER_FILE},
            chat_file=_chat_file(job.model),
            from_job_id=job.pk,
            check_last=lambda: _check_again(job, name),
        )


def what_is_left(job: Job) -> Left:
    """Kind of a training run's weights: the whole model, its adapters alone, or nothing."""
    if job.kind not in _LEAVE_WEIGHTS:
        return ""
    kinds = set(job.artifacts.filter(kind__in=("model", "adapter")).values_list("kind", flat=True))
    return "model" if "model" in kinds else "adapter" if kinds else ""


def folder_left(job_id: str, *, kind: Left, home: Path) -> Path:
    """Folder of a finished run's model or adapters; one that is not there where the run left none."""
    artifact = Artifact.objects.filter(job_id=job_id, kind=kind).first()
    return home / (artifact.file.removesuffix(f"/{artifact.name}") if artifact else f"jobs/{job_id}/{kind}")


def _exported(job: Job) -> list[Artifact]:
    """The files of the exported model. Raises WrongState, NoModelLeft."""
    if not job.is_terminal:
        raise WrongState("make a model of", job_id=job.pk, state=job.state, allowed="succeeded")
    artifacts = list(job.artifacts.filter(kind="model"))
    names = [artifact.name for artifact in artifacts]
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return artifacts
    if job.kind not in _LEAVE_WEIGHTS:
        raise NoModelLeft(f"job {job.pk} generates; only training leaves a model", hint="Name a job that trained.", job_id=job.pk)
    if what_is_left(job) == "adapter":
        raise NoModelLeft(
            f"job {job.pk} left its adapters alone, which are no model without the one they were trained beside",
            hint="Run it again with workload.export.adapter set to merged or both.",
            job_id=job.pk,
        )
    again = "Run it again." if job.state == State.SUCCEEDED else "Retry it: it goes on from its newest checkpoint, if it has one."
    raise NoModelLeft(f"job {job.pk} left no weights; they are exported after the last step", hint=again, job_id=job.pk)


def _choose_name(job: Job, given: str) -> str:
    """Raises ModelExists."""
    there = Model.objects.filter(Q(project=job.project_id) | Q(project__isnull=True), deleted_at__isnull=True)
    if given:
        name = checked_name(given)
        taken_by = there.filter(name=name).first()
        if taken_by is None:
            return name
        raise ModelExists(f"a model is called {name!r} already", model_id=taken_by.pk, hint="Choose another name.")
    made = there.filter(from_job_id=job.pk).first()
    if made is not None:
        message = f"job {job.pk} is the model {made.name!r} already"
        raise ModelExists(message, model_id=made.pk, hint="Use that one, or name another.")
    taken = set(there.values_list("name", flat=True))
    return next(name for name in _numbered(checked_name(job.name)) if name not in taken)


def _numbered(name: str) -> Iterator[str]:
    """It alone, then with 2, 3, …"""
    yield name
    for number in count(2):
        yield f"{name[: MAX_NAME_CHARACTERS - _NUMBER_CHARACTERS]} {number}"


def _check_again(job: Job, given: str) -> None:
    """Two that ask at once wait for each other here; the second finds the first one's model. Raises ModelExists."""
    Job.objects.select_for_update().order_by().values_list("pk").get(pk=job.pk)
    _choose_name(job, given)


def _open_checked(artifact: Artifact) -> KeptFile:
    """Raises FilesLost where it is gone, or is not what the run recorded."""
    home = Path(settings.HEADROOM_HOME).resolve()
    path = (home / artifact.file).resolve()
    if not path.is_relative_to(home / "jobs" / artifact.job_id) or not path.is_file():
        raise FilesLost(f"file {artifact.name} of job {artifact.job_id} is gone", job_id=artifact.job_id, name=artifact.name)
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found == artifact.sha256:
        return KeptFile(path, name=artifact.name)
    message = f"file {artifact.name} of job {artifact.job_id} has sha256 {found}; the run recorded {artifact.sha256}"
    raise FilesLost(message, job_id=artifact.job_id, name=artifact.name)


def _chat_file(model: Model) -> Path | None:
    """The conversation format of the model that was trained; an export does not carry it."""
    path = Path(settings.HEADROOM_HOME) / model.folder / CHAT_FILE
    return path if model.has_chat and path.is_file() else None
