"""``headroom machines links``: what was measured, what was not reached with what to do, and another measurement."""

import json
from typing import Any

import httpx
import pytest

from headroom.client import HeadroomClient
from headroom.commands import main as cli
from headroom.commands.main import main

REACHED: dict[str, Any] = {
    "machine": "office",
    "link": "979Mbit,0.21ms",
    "round_trip_s": 0.00042,
    "bytes_per_s_by_size": [[65536, 5.1e7]],
    "measured_at": "2026-11-21T00:00:00Z",
    "checked_at": "2026-11-21T00:00:00Z",
    "is_due": False,
    "failure": "",
}
AWAY: dict[str, Any] = {**REACHED, "machine": "attic", "link": "", "measured_at": None, "failure": "attic cannot reach home at …"}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Method and path of each request."""
    kept: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/api/v1/")
        kept.append(f"{request.method} {path}")
        if path == "machines":
            return httpx.Response(200, json={"results": [{"id": "machine_1", "name": "home"}], "next": None})
        due = [{**REACHED, "is_due": True}, AWAY]
        return httpx.Response(200, json={"links": due if request.method == "POST" else [REACHED, AWAY]})

    def connected(**_: Any) -> HeadroomClient:
        return HeadroomClient("http://headroom", token="t", transport=httpx.MockTransport(answer))

    monkeypatch.setattr(cli, "connect", connected)
    return kept


def test_links_are_a_table_and_who_was_not_reached_is_named(sent: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machines", "links", "home"]) == 0
    assert sent[-1] == "GET machines/machine_1"
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "office 979Mbit,0.21ms 2026-11-21T00:00:00Z" in lines
    assert "attic not known yet never not reached" in lines
    assert "attic cannot reach home at …" in lines


def test_they_are_measured_again_when_asked(sent: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machines", "links", "home", "--measure"]) == 0
    assert sent[-1] == "POST machines/machine_1/links"
    assert "2026-11-21T00:00:00Z due" in " ".join(capsys.readouterr().out.split())
    assert main(["machines", "links", "home", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == REACHED
