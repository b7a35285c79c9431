"""Requests of strangers write little into the log of the real process."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.test import Client

from webapp.http import log_limits
from webapp.http.log_limits import LimitRefusals


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    """The file holds all that a handler with the program's filter lets through."""
    own: Any = django_settings.LOGGING
    (name,) = own["handlers"]["stderr"]["filters"]
    assert own["filters"][name]["()"] == "webapp.http.log_limits.LimitRefusals"
    handler = logging.FileHandler(tmp_path / "web.log")
    handler.addFilter(LimitRefusals())
    logging.getLogger().addHandler(handler)
    yield tmp_path / "web.log"
    logging.getLogger().removeHandler(handler)
    handler.close()


def test_a_thousand_wrong_host_names_are_one_short_line(log_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_limits, "EVERY_S", 3600.0)  # however long a thousand requests take
    client = Client()
    for number in range(1000):
        assert client.get("/login/", headers={"host": f"evil{number}.example.org" + "x" * 1000}).status_code == 400
    lines = log_file.read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("Invalid HTTP_HOST header: 'evil0.example.org")
    assert len(lines[0]) <= log_limits.LONGEST_LINE + 1


def test_the_next_line_says_how_many_were_left_out(log_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    for _ in range(5):
        client.get("/login/", headers={"host": "evil"})
    monkeypatch.setattr(log_limits, "time", type("Later", (), {"monotonic": lambda: 1e12}))
    client.get("/login/", headers={"host": "evil"})
    assert log_file.read_text().splitlines()[-1].endswith("(and 4 more like it)")


def test_errors_of_our_own_stay_whole(log_file: Path) -> None:
    for _ in range(2):
        try:
            raise ValueError("ours")
        except ValueError:
            logging.getLogger("uvicorn.error").exception("Exception in ASGI application")
    assert log_file.read_text().count("ValueError: ours") == 2
