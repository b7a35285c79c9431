"""``headroom models add``: of a folder or of a job. The service is a table of answers."""

from typing import Any

import pytest

from headroom.commands import main as cli
from tests.worker.answering import AnsweringService

MADE: dict[str, Any] = {"id": "model_1", "name": "kjv-demo", "unread": []}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> AnsweringService:
    service = AnsweringService({("POST", "/jobs/job_1/model"): (201, MADE)})
    monkeypatch.setattr(cli, "connect", service.connect)
    return service


@pytest.mark.parametrize(("options", "sent"), [([], {}), (["--name", "mine"], {"name": "mine"})])
def test_a_model_is_made_of_what_a_job_left(
    service: AnsweringService, capsys: pytest.CaptureFixture[str], options: list[str], sent: dict[str, str]
) -> None:
    assert cli.main(["models", "add", "--from-job", "job_1", *options]) == 0
    assert service.sent("/jobs/job_1/model") == [sent]
    assert capsys.readouterr().out == "model_1  kjv-demo\n"


@pytest.mark.parametrize("named", [[], [".", "--from-job", "job_1"]])
def test_it_is_made_of_one_thing(
    service: AnsweringService, capsys: pytest.CaptureFixture[str], named: list[str]
) -> None:
    assert cli.main(["models", "add", *named]) == 2
    assert capsys.readouterr().err == (
        "headroom: a model is made of a folder or of a job, one of the two\n  Give FOLDER, or --from-job JOB.\n"
    )


def test_why_there_is_none_is_said(service: AnsweringService, capsys: pytest.CaptureFixture[str]) -> None:
    problem = {"title": "Conflict", "detail": "job job_1 left its adapters alone", "hint": "Run it again.", "code": "no_model"}
    service.answers["POST", "/jobs/job_1/model"] = (409, problem)
    assert cli.main(["models", "add", "--from-job", "job_1"]) != 0
    said = capsys.readouterr().err
    assert "left its adapters alone" in said
    assert "Run it again." in said
