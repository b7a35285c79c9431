"""A page offers nobody what the permission table refuses them: every page that can be reached by links, as each role.

Every form that can be sent, every part that htmx asks for and every link is asked, and none is answered 403; what is offered to
whom is held beside it, so that nothing is hidden from those who may.
"""

from collections.abc import Callable
from html.parser import HTMLParser
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest
from django.contrib.auth.models import User
from django.db import transaction
from django.test import Client
from django.urls import resolve

from tests.webapp.accounts.table import make_owned
from tests.webapp.conftest import make_person
from tests.webapp.exported import leave
from tests.webapp.pages import rows
from webapp.accounts.models import Membership, Role
from webapp.accounts.projects import create_project, set_account_role, set_member
from webapp.accounts.tokens import create_token
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.records import record_checkpoint
from webapp.jobs.actions import cancel_job, pause_job
from webapp.jobs.models import Job

pytestmark = pytest.mark.django_db


class Offers(HTMLParser):
    """Requests that one page can send: POSTs that no disabled button stands before, and GETs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.gets: set[Any] = set()
        self.posts: set[Any] = set()
        self._form: str | None = None
        self._forms: dict[Any, Any] = {}
        self._enabled: set[Any] = set()
        self.feed(text)
        self.posts |= {action for key, action in self._forms.items() if key in self._enabled}

    def handle_starttag(self, tag: str, attrs: list[Any]) -> None:
        found = dict(attrs)
        if tag == "form":
            self._form = found.get("id") or f"form {len(self._forms)}"
            if found.get("method", "get").lower() == "post":
                self._forms[self._form] = found.get("action") or "."
        if tag == "button" and found.get("type", "submit") == "submit" and "disabled" not in found:
            self._enabled.add(found.get("form") or self._form)
        if tag == "a" and found.get("href"):
            self.gets.add(found["href"])
        if found.get("hx-get"):
            self.gets.add(found["hx-get"])
        if found.get("hx-post"):
            self.posts.add(found["hx-post"])

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._form = None


def in_every_state(ada: User, home: Path) -> None:
    """Jobs as their pages differ by them."""
    made = {name: rows.make_job(ada, name=name) for name in ("queued", "paused", "running", "failed", "cancelled", "held")}
    pause_job(made["paused"], actor="user:ada")
    for name in ("running", "failed", "held"):
        attempt = rows.start(made[name])
        record_checkpoint(attempt, step=5, folder="checkpoints/step-000005-f1", manifest_sha256="c0" * 32, num_bytes=5)
        if name == "failed":
            result = {"outcome": "failed", "reason": "internal", "message": "m", "error": None, "step": 5, "measured": None}
            finish_attempt(attempt, result={**result, "summary": {}, "artifacts": []}, exit_code=1)
    pause_job(Job.objects.get(pk=made["held"].pk), actor="user:ada")
    cancel_job(made["cancelled"], mode="discard", actor="user:ada")
    rows.make_generate_job(ada, name="answers")
    leave(rows.make_job(ada, name="trained"), home)


@pytest.fixture
def ids(ada: User, headroom_home: Path) -> dict[str, str]:
    project = create_project(ada, name="summaries")
    owned = make_owned(ada, project, headroom_home)
    make_person("bob")
    set_member(project, username="bob", role=Role.VIEWER)  # who can be removed; the only administrator cannot
    in_every_state(ada, headroom_home)
    return owned | {"project": project.pk}


@pytest.fixture
def sign_in(ada: User, ids: dict[str, str]) -> Callable[..., Client]:
    """Somebody in all of ada's projects, with a token and rows of their own to look at."""

    def make(role: Role, *, is_admin: bool = False) -> Client:
        person = make_person("mia", is_admin=is_admin)
        if role is not None:
            for row in Membership.objects.filter(user=ada).select_related("project"):
                set_member(row.project, username="mia", role=role)
            if role == Role.VIEWER:
                set_account_role(person, "viewer")
        create_token(user=person, name="hers")
        client = Client(raise_request_exception=False)
        client.force_login(person)
        return client

    return make


class Walk:
    """All that can be reached from the jobs, and what was refused on the way."""

    def __init__(self, client: Client, *, starts: list[str]) -> None:
        self._client = client
        self.refused: list[Any] = []
        self.posts: set[Any] = set()
        self.seen: dict[Any, Any] = {}
        left = [(start, "the start") for start in starts]
        while left:
            path, origin = left.pop()
            if self._key(path) not in self.seen:
                left += [(urljoin(path, found), path) for found in self._look(path, origin)]

    def _key(self, path: str) -> str:
        parts = urlsplit(path)
        return path if parts.path == "/plans/" or "deleted=" in parts.query else parts.path

    def _look(self, path: str, origin: str) -> list[str]:
        self.seen[self._key(path)] = resolve(urlsplit(path).path).route
        answer = self._get(path)
        if answer.status_code in (403, 500) or (answer.status_code == 404 and not path.startswith(("/api/", "/plans/"))):
            self.refused.append(f"GET {path} on {origin}: {answer.status_code}")
        if "text/html" not in answer.headers.get("Content-Type", "") or not answer.content:
            return []
        offers = Offers(answer.content.decode())
        for action in offers.posts:
            self._press(urljoin(path, action), path)
        return [found for found in offers.gets if not found.startswith(("#", "http"))]

    def _get(self, path: str) -> Any:
        with transaction.atomic():
            answer = self._client.get(path, follow=False)
            transaction.set_rollback(True)
        return answer

    def _press(self, action: str, page: str) -> None:
        """Nothing that was pressed stays done."""
        route = resolve(urlsplit(action).path).route
        if (route, urlsplit(page).path) in self.posts:
            return
        self.posts.add((route, urlsplit(page).path))
        cookies = self._client.cookies.copy()  # logging out takes them away
        with transaction.atomic():
            status = self._client.post(action, {"next": "/jobs/"}).status_code
            transaction.set_rollback(True)
        self._client.cookies = SimpleCookie({name: morsel.value for name, morsel in cookies.items()})
        if status in (403, 500):
            self.refused.append(f"POST {action} on {page}")

    @property
    def routes(self) -> set[str]:
        return set(self.seen.values())

    @property
    def pressed(self) -> set[str]:
        return {route for route, _ in self.posts}


def walk(client: Client, ids: dict[str, str]) -> Walk:
    gone = (ids["models/<slug:model_id>/restore/ model_id"], ids["datasets/<slug:dataset_id>/restore/ dataset_id"])
    return Walk(client, starts=["/jobs/", f"/models/?deleted={gone[0]}", f"/datasets/?deleted={gone[1]}", "/password/"])


PAGES = {
    "jobs/", "jobs/new/", "jobs/new/generate/", "jobs/<slug:job_id>/", "jobs/<slug:job_id>/tabs/<slug:tab>/", "plans/", "queue/",
    "password/", "models/", "models/<slug:model_id>/", "models/<slug:model_id>/cards/", "datasets/",
    "datasets/<slug:dataset_id>/", "machines/", "machines/<slug:machine_id>/", "tokens/", "projects/",
    "projects/<slug:project_id>/", "words/", "welcome/", "search/", "settings/",
}  # fmt: skip
"""Pages that everyone visits."""
ANYONE = {
    "logout/",
    "jobs/new/price/",
    "jobs/new/generate/price/",
    "models/<slug:model_id>/cards/",
    "tokens/",
    "tokens/<slug:token_id>/revoke/",
    "password/",
    "projects/work-in/",
    "settings/theme/",
    "jobs/filters/",
}
MEMBERS = {
    "projects/",
    "jobs/bulk/",
    "jobs/<slug:job_id>/about/",
    "jobs/<slug:job_id>/delete/",
    "jobs/<slug:job_id>/share/",
    "jobs/<slug:job_id>/cancel/",
    "jobs/<slug:job_id>/pause/",
    "jobs/<slug:job_id>/resume/",
    "jobs/<slug:job_id>/retry/",
    "jobs/<slug:job_id>/model/",
    "jobs/<slug:job_id>/move/",
    "jobs/new/",
    "jobs/new/generate/",
    "jobs/new/model/",
    "jobs/new/dataset/",
    "jobs/new/generate/prompts/",
    "models/",
    "models/<slug:model_id>/delete/",
    "models/<slug:model_id>/restore/",
    "datasets/",
    "datasets/<slug:dataset_id>/read/",
    "datasets/<slug:dataset_id>/delete/",
    "datasets/<slug:dataset_id>/restore/",
}
ADMINS = {
    "projects/<slug:project_id>/members/",
    "projects/<slug:project_id>/members/remove/",
    "projects/<slug:project_id>/webhooks/",
    "webhooks/<slug:webhook_id>/secret/",
    "webhooks/<slug:webhook_id>/test/",
    "webhooks/<slug:webhook_id>/switch/",
    "webhooks/<slug:webhook_id>/delete/",
    "deliveries/<slug:delivery_id>/replay/",
}
SERVICE = {"people/", "people/change/"}
"""POSTs that a page offers, by who may press them."""


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("role", "offered"),
    [(Role.VIEWER, ANYONE), (Role.MEMBER, ANYONE | MEMBERS | ADMINS), (Role.ADMIN, ANYONE | MEMBERS | ADMINS)],
)
def test_a_page_offers_what_a_role_may_press_and_nothing_else(
    ids: dict[str, str], sign_in: Callable[..., Client], role: Role, offered: set[str]
) -> None:
    found = walk(sign_in(role), ids)
    assert found.refused == []
    assert found.routes >= PAGES
    # a member administers a project of their own, whose webhooks and members they change
    own = offered - ADMINS if role == Role.MEMBER else offered
    assert own <= found.pressed <= offered


def test_an_administrator_of_the_service_is_offered_everything(
    ids: dict[str, str], sign_in: Callable[..., Client]
) -> None:
    found = walk(sign_in(None, is_admin=True), ids)
    assert found.refused == []
    assert found.pressed == ANYONE | MEMBERS | ADMINS | SERVICE
