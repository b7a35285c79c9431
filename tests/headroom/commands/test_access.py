"""The commands about projects, people and webhooks: what they send, and what they make of answers. The service is a table."""

import json
from typing import Any

import httpx
import pytest

from headroom.client import HeadroomClient
from headroom.commands import main as cli
from headroom.commands.main import main

PROJECT = {"id": "project_1", "name": "lab", "role": "admin", "is_own": False, "created_at": "2026-11-21T00:00:00Z"}
WEBHOOK = {"id": "webhook_1", "project": "project_1", "url": "https://example.org", "events": [], "is_active": True}
RECORD = {"id": "audit_1", "at": "2026-11-21T00:00:00Z", "actor": "ada", "action": "job.cancel", "outcome": "done"}
ANSWERS = {
    ("GET", "projects"): {"results": [PROJECT], "next": None},
    ("POST", "projects"): PROJECT,
    ("GET", "projects/project_1/members"): {"results": [{"username": "eve", "role": "viewer", "since": "2026-11-21T00:00:00Z"}]},
    ("PUT", "projects/project_1/members/eve"): {"username": "eve", "role": "member", "since": "2026-11-21T00:00:00Z"},
    ("DELETE", "projects/project_1/members/eve"): None,
    ("GET", "projects/project_1/audit"): {"results": [{**RECORD, "target": "job_1", "detail": ""}], "next": None},
    ("POST", "people"): {"username": "bob", "role": "viewer", "is_active": True, "password": "first one"},
    ("PATCH", "people/bob"): {"username": "bob", "role": "member", "is_active": False},
    ("POST", "projects/project_1/webhooks"): {**WEBHOOK, "secret": "whsec_1"},
    ("PATCH", "webhooks/webhook_1"): {**WEBHOOK, "is_active": False},
    ("DELETE", "tokens/token_1"): None,
}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """``(method, path, body, project)`` of each request."""
    kept = []

    def answer(request: httpx.Request) -> httpx.Response | None:
        path, body = request.url.path.removeprefix("/api/v1/"), request.read()
        kept.append((request.method, path, json.loads(body) if body else None, request.headers.get("Headroom-Project")))
        document = ANSWERS[request.method, path]
        return httpx.Response(204) if document is None else httpx.Response(200, json=document)

    def connected(*, project: Any = None, **_: Any) -> HeadroomClient:
        return HeadroomClient("http://headroom", token="t", project=project or "", transport=httpx.MockTransport(answer))

    monkeypatch.setattr(cli, "connect", connected)
    return kept


@pytest.mark.parametrize(
    ("words", "method", "path", "body", "said"),
    [
        ("projects list", "GET", "projects", None, "project_1  lab"),
        ("projects create lab", "POST", "projects", {"name": "lab"}, "project_1"),
        ("projects members project_1", "GET", "projects/project_1/members", None, "eve"),
        ("projects admit project_1 eve", "PUT", "projects/project_1/members/eve", {"role": "member"}, "eve is a member"),
        ("projects remove project_1 eve", "DELETE", "projects/project_1/members/eve", None, "no longer belongs"),
        ("audit --project project_1", "GET", "projects/project_1/audit", None, "job.cancel"),
        ("people add bob --role viewer", "POST", "people", {"username": "bob", "role": "viewer"}, "first one"),
        ("people change bob --close", "PATCH", "people/bob", {"is_active": False}, "bob  member, closed"),
        (
            "webhooks add project_1 https://example.org --event job.failed",
            "POST",
            "projects/project_1/webhooks",
            {"url": "https://example.org", "events": ["job.failed"]},
            "whsec_1",
        ),
        ("webhooks hold webhook_1", "PATCH", "webhooks/webhook_1", {"is_active": False}, "held back"),
        ("tokens revoke token_1", "DELETE", "tokens/token_1", None, "revoked"),
    ],
)
def test_a_command_is_one_request_and_a_line_or_a_table(
    sent: list[Any],
    capsys: pytest.CaptureFixture[str],
    words: str,
    method: str,
    path: str,
    body: dict[str, Any] | None,
    said: str,
) -> None:
    assert main(words.split()) == 0
    assert sent == [(method, path, body, None)]
    assert said in capsys.readouterr().out


def test_the_project_to_work_in_goes_with_every_request(sent: list[Any]) -> None:
    assert main(["projects", "list", "--work-in", "lab"]) == 0
    assert [project for *_, project in sent] == ["lab"]


def test_what_leads_elsewhere_stays_one_part_of_the_address(sent: list[Any]) -> None:
    with pytest.raises(KeyError, match="members/%2E%2E|members/-"):
        main(["projects", "remove", "project_1", ".."])
