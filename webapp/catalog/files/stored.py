"""Bytes that a person's and a project's models, datasets, prompts and runs take of the service's disk, and the limits on them.

Sums come from rows, and for models from their folders: a file that is linked from a run or from a folder of the server is not
counted a second time. What was deleted counts until it is gone. Uploads are refused; results of a job that was taken are not.
An upload is checked as it begins, and once more in the transaction that writes its row, where no other of the same person or
project is written (``lock_stored``): of two that arrive at the same moment and have room for one, one is refused.
"""

import stat
from collections.abc import Callable
from pathlib import Path

from django.apps import apps
from django.conf import settings
from django.contrib.auth.models import User
from django.db.models import Q, Sum

from optimizer.base.units import format_bytes
from webapp.accounts.access import project_for_new
from webapp.accounts.models import Project
from webapp.catalog.errors import StorageLimitReached
from webapp.catalog.models import Dataset, Model, Upload

PER_PERSON, PER_PROJECT = "HEADROOM_MAX_STORED_BYTES_PER_PERSON", "HEADROOM_MAX_STORED_BYTES_PER_PROJECT"


def require_stored_room(
    owner: User | None, num_bytes: int, *, project: Project | None = None, open_bytes: Callable[[Upload], int] | None = None
) -> None:
    """Raises StorageLimitReached where so many bytes more are over a limit.

    owner: None for what ships with the program, which has no limit. project: whose it will be; the one that the owner works in
    unless given. open_bytes: what an unfinished upload has announced, where those count too.
    """
    if owner is None:
        return
    _require(f"{owner.get_username()} has", Q(owner=owner), num_bytes, setting=PER_PERSON, open_bytes=open_bytes)
    if int(getattr(settings, PER_PROJECT)):
        project = project or project_for_new(owner)
        if project is not None:
            whose = Q(project=project)
            _require(f"project {project.name} has", whose, num_bytes, setting=PER_PROJECT, open_bytes=open_bytes)


def lock_stored(owner: User, project: Project | None) -> None:
    """Lets this transaction alone add to what a person and a project have stored, until its end; SQLite's do so anyhow."""
    for rows in (User.objects.filter(pk=owner.pk), Project.objects.filter(pk=project.pk if project else None)):
        # not the whole row: others may refer to it meanwhile
        list(rows.select_for_update(no_key=True).order_by().values_list("pk"))


def require_stored_room_again(owner: User | None, num_bytes: int, *, project: Project | None) -> None:
    """``require_stored_room`` for the transaction that writes the row."""
    if owner is None or not any(int(getattr(settings, name)) for name in (PER_PERSON, PER_PROJECT)):
        return
    project = project or project_for_new(owner)
    lock_stored(owner, project)
    require_stored_room(owner, num_bytes, project=project)


def stored_bytes(whose: Q) -> int:
    """whose: a condition on rows with an ``owner`` and a ``project``."""
    in_datasets = Dataset.objects.filter(whose).aggregate(total=Sum("num_bytes"))["total"] or 0
    in_models = sum(_folder_bytes(folder) for folder in Model.objects.filter(whose).values_list("folder", flat=True))
    # jobs know of this app, not the reverse
    jobs = apps.get_model("jobs.Job").objects.filter(whose).values("pk")
    of_runs = (apps.get_model(table).objects.filter(job__in=jobs) for table in ("jobs.Artifact", "jobs.Checkpoint"))
    return in_datasets + in_models + sum(rows.aggregate(total=Sum("num_bytes"))["total"] or 0 for rows in of_runs)


def _require(
    has: str, whose: Q, num_bytes: int, *, setting: str, open_bytes: Callable[[Upload], int] | None
) -> None:
    allowed_bytes = int(getattr(settings, setting))
    if not allowed_bytes:
        return
    used_bytes = stored_bytes(whose)
    announced_bytes = 0 if open_bytes is None else sum(open_bytes(upload) for upload in Upload.objects.filter(whose))
    if used_bytes + announced_bytes + num_bytes <= allowed_bytes:
        return
    waiting = f" and {format_bytes(announced_bytes)} in unfinished uploads" if announced_bytes else ""
    raise StorageLimitReached(
        f"{has} {format_bytes(used_bytes)} stored{waiting}, and this has {format_bytes(num_bytes)}; "
        f"allowed: {format_bytes(allowed_bytes)} together",
        hint="Delete models, datasets or runs that are no longer needed; they count for as long as they can be restored. "
        f"An administrator can allow more by {setting}.",
        limit=setting,
        used_bytes=used_bytes,
        announced_bytes=announced_bytes,
        num_bytes=num_bytes,
        allowed_bytes=allowed_bytes,
    )


def _folder_bytes(folder: str) -> int:
    """Bytes of files that are nowhere else: links point to a folder of the server, or share their bytes with a run's files."""
    root, total_bytes = Path(settings.HEADROOM_HOME) / folder, 0
    for path in root.rglob("*") if folder else ():
        try:
            found = path.lstat()
        except FileNotFoundError:  # deleted meanwhile
            continue
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            total_bytes += found.st_size
    return total_bytes
