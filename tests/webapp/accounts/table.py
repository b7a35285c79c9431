"""Every address of the service, and a request to it: what the tests of the permission table go over."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.contrib.auth.models import User
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from django.utils import timezone

from tests.webapp.conftest import make_bench, make_spec, make_text, make_tiny_model
from webapp.accounts.models import Project
from webapp.accounts.permissions import OWNED, PERSONAL, PLAIN, TABLE, Rule
from webapp.accounts.tokens import create_token
from webapp.api.api import openapi_document
from webapp.api.batch_urls import api as openai_api
from webapp.batches.models import Batch, BatchFile
from webapp.catalog.models import Upload
from webapp.jobs.about import share_job, shared_path
from webapp.jobs.actions import create_job
from webapp.jobs.models import Artifact, Job
from webapp.webhooks.actions import create_webhook, send_test

KNOWN_KWARGS = frozenset(OWNED) | PERSONAL | PLAIN
_KWARG = re.compile(r"<(?:\w+:)?(\w+)>")


UPLOADED: dict[str, Any] = {"name": "verse.txt", "num_bytes": 0, "sha256": "0" * 64}
"""A file that was announced, and of which nothing has come."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """One method of one route, and its rule."""

    method: str
    route: str
    rule: Rule

    @property
    def kwargs(self) -> list[str]:
        return _KWARG.findall(self.route)

    @property
    def names_owned(self) -> bool:
        return any(name in OWNED for name in self.kwargs)

    @property
    def names_personal(self) -> bool:
        return any(name in PERSONAL for name in self.kwargs)

    @property
    def is_api(self) -> bool:
        return self.route.startswith(("api/v1/", "v1/", "metrics"))

    def ask(self, client: Client, ids: dict[str, str]) -> Any:
        path = "/" + _KWARG.sub(lambda match: ids.get(f"{self.route} {match.group(1)}") or ids[match.group(1)], self.route)
        if self.method == "GET":
            return client.get(path)
        if self.is_api:
            return client.generic(self.method, path, data="{}", content_type="application/json")
        return client.post(path, {"username": "ada"})

    def __str__(self) -> str:
        return f"{self.method} /{self.route}"


def addresses() -> list[Address]:
    parts = [(key.partition(" "), rule) for key, rule in TABLE.items()]
    return [Address(method=method, route=route, rule=rule) for (method, _, route), rule in parts if method != "*"]


def routes() -> list[str]:
    """Each route of the URLconf, as the resolver writes it."""
    return sorted(set(_below(get_resolver(), "")))


def _below(resolver: URLResolver, prefix: str) -> list[str]:
    found: list[str] = []
    for pattern in resolver.url_patterns:
        route = prefix + str(pattern.pattern)
        found += [route] if isinstance(pattern, URLPattern) else _below(pattern, route)
    return found


def operations() -> set[str]:
    """Each operation of both APIs, spelled as the table spells it."""
    documents = (openapi_document(), openai_api.get_openapi_schema(path_prefix="/v1/"))
    return {
        f"{method.upper()} {path.removeprefix('/').replace('{', '<').replace('}', '>')}"
        for document in documents
        for path, methods in document["paths"].items()
        for method in methods
    }


def make_owned(owner: User, project: Project, home: Path) -> dict[str, str]:
    """Ids, by kwarg of an address, of a row of the project or of its owner. A route that needs another has both names."""
    model, dataset = make_tiny_model(owner), make_text(owner)
    for row in (model, dataset):
        row.project = project
        row.save(update_fields=["project"])
    common = {"owner": owner, "project": project, "model": model, "dataset": dataset, "plan": None, "prediction": None}
    arguments = {**common, "spec": make_spec(model, dataset), "machine": make_bench(), "actor": "user:ada"}
    job, generates = create_job(**arguments), create_job(**arguments, kind="generate")
    deleted_job = create_job(**arguments)
    Job.objects.filter(pk=deleted_job.pk).update(deleted_at=timezone.now(), state="cancelled", finished_at=timezone.now())
    share_job(job)
    (home / "some").write_bytes(b"x")
    artifact = Artifact.objects.create(job=job, kind="model", name="m", file="some", num_bytes=1, sha256="0" * 64)
    dataset.file = "some"
    dataset.save(update_fields=["file"])
    owned = {"owner": owner, "project": project, "dataset": dataset}
    file = BatchFile.objects.create(**owned, filename="f", purpose="batch", num_bytes=1)
    batch = Batch.objects.create(**owned, endpoint="/v1/completions", completion_window="24h", expires_at=timezone.now())
    token, _ = create_token(user=owner, name="hers")
    deleted_model, deleted_dataset = make_tiny_model(owner, name="gone"), make_text(owner)
    for row in (deleted_model, deleted_dataset):
        row.project, row.deleted_at = project, timezone.now()
        row.save(update_fields=["project", "deleted_at"])
    upload = Upload.objects.create(owner=owner, project=project, kind="dataset", name="text", files=[UPLOADED])
    (home / "uploads" / upload.pk).mkdir(parents=True)
    webhook, _ = create_webhook(owner, project, url="https://example.org/hook", events=[])
    return {
        "project_id": project.pk,
        "model_id": model.pk,
        "dataset_id": dataset.pk,
        "api/v1/models/<model_id>/restore model_id": deleted_model.pk,
        "models/<slug:model_id>/restore/ model_id": deleted_model.pk,
        "api/v1/datasets/<dataset_id>/restore dataset_id": deleted_dataset.pk,
        "datasets/<slug:dataset_id>/restore/ dataset_id": deleted_dataset.pk,
        "upload_id": upload.pk,
        "machine_id": job.machine_id,
        "number": "0",
        "job_id": job.pk,
        "signature": shared_path(job).split("/")[-2],
        "api/v1/jobs/<job_id>/restore job_id": deleted_job.pk,
        "jobs/<slug:job_id>/restore/ job_id": deleted_job.pk,
        "api/v1/jobs/<job_id>/results job_id": generates.pk,
        "artifact_id": artifact.pk,
        "file_id": file.pk,
        "batch_id": batch.pk,
        "token_id": token.pk,
        "webhook_id": webhook.pk,
        "delivery_id": send_test(webhook).pk,
        "username": "ada",
        "tab": "plan",
        "chart": "memory",
    }
