"""``headroom models add``: of a folder or of a job. The service is a table of answers."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest

from headroom.client import HeadroomClient
from headroom.commands import catalog
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


def make_folder(folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "chat_template.jinja", "notes.txt"):
        (folder / name).write_text("{}")
    return folder


def test_a_folder_that_the_service_sees_too_is_linked(
    service: AnsweringService, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "llama-3.1")
    service.answers["POST", "/models"] = (201, MADE)
    assert cli.main(["models", "add", str(folder)]) == 0
    assert capsys.readouterr().out == f"linked: its weights stay in {folder}\nmodel_1  kjv-demo\n"
    (body,) = service.sent_bytes("/models")
    fields = {name: values[0] for name, values in parse_qs(body.decode()).items()}
    assert (fields["name"], fields["path"]) == ("llama-3.1", str(folder))
    assert sorted(json.loads(fields["seen"])) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("path_not_allowed", "the service may not read this folder (HEADROOM_MODEL_ROOTS)"),
        ("path_differs", "the service runs on another machine"),
    ],
)
def test_a_folder_that_it_does_not_see_is_uploaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, code: str, why: str
) -> None:
    answers = [(422, {"title": "x", "detail": "no", "code": code}), (201, MADE)]
    sent: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.read())
        status, document = answers.pop(0)
        return httpx.Response(status, json=document)

    client = HeadroomClient("http://headroom", token="t", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(cli, "connect", lambda **_: client)
    assert cli.main(["models", "add", str(make_folder(tmp_path / "llama"))]) == 0
    assert capsys.readouterr().out == f"uploaded, because {why}\nmodel_1  kjv-demo\n"
    assert all(name in sent[1] for name in (b'name="config"', b'name="weights"', b'name="files"; filename="chat_template.jinja"'))
    assert b"notes.txt" not in sent[1]


def test_a_folder_without_a_model_is_refused(
    service: AnsweringService, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["models", "add", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no config.json" in capsys.readouterr().err
    assert cli.main(["models", "add", str(tmp_path / "absent")]) == 2
    assert "is not there" in capsys.readouterr().err


def test_a_model_of_the_hub_is_fetched_by_the_service(
    service: AnsweringService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(catalog, "POLL_S", 0)
    source = {"hub": "acme/small", "commit": "0123456789abcdef", "state": "downloading", "message": ""}
    upload = {"id": "upload_1", "source": source, "files": []}
    service.answers["POST", "/models"] = (202, upload)
    service.answers["GET", "/uploads/upload_1"] = (200, {**upload, "source": {**source, "state": "done", "model": "model_1"}})
    service.answers["GET", "/models/model_1"] = (200, MADE)
    assert cli.main(["models", "add", "hub:acme/small@v1"]) == 0
    out = capsys.readouterr().out
    assert "fetching acme/small at commit 0123456789ab; it goes on when this command is stopped (upload_1)" in out
    assert "model_1  kjv-demo" in out
    assert b"hub=acme%2Fsmall%40v1" in service.sent_bytes("/models")[0]
    failed = {**source, "state": "failed", "message": "too large"}
    service.answers["GET", "/uploads/upload_1"] = (200, {**upload, "source": failed})
    assert cli.main(["models", "add", "hub:acme/small"]) != 0
    assert "too large" in capsys.readouterr().err


def test_a_folder_of_data_is_sent_as_one_file(
    service: AnsweringService, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "one"}\n')
    (folder / "b.jsonl").write_text('{"text": "two"}\n')
    service.answers["POST", "/datasets"] = (201, {"id": "dataset_1", "name": "chats", "num_documents": 2, "facts": {}})
    assert cli.main(["datasets", "add", str(folder), "--columns", "text=text"]) == 0
    (body,) = service.sent_bytes("/datasets")
    assert b'{"text": "one"}\n{"text": "two"}\n' in body
    assert b'filename="chats.jsonl"' in body
    assert b"text=text" in body
    assert capsys.readouterr().out == "dataset_1  chats  2 documents\n"


def test_lines_of_prompts_that_get_no_answer_are_named(
    service: AnsweringService, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "ask.jsonl"
    path.write_text('{"prompt": "x"}\nnot JSON\n')
    problems = [{"line": number, "code": "invalid_json", "message": "it is not JSON", "param": None} for number in range(2, 14)]
    row = {"id": "dataset_1", "name": "ask", "num_documents": 14, "facts": {"num_refused": 12, "problems": problems}}
    service.answers["POST", "/datasets"] = (201, row)
    assert cli.main(["datasets", "add", str(path), "--prompts"]) == 0
    heading, first, *_, last = capsys.readouterr().err.splitlines()
    assert heading == "12 of 14 lines cannot be used and get no answer:"
    assert first == "  line 2: it is not JSON"
    assert last == "  and 2 more"


def test_columns_are_corrected(service: AnsweringService, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"id": "dataset_1", "name": "chats", "num_documents": 2, "facts": {"columns": {"text": "body"}}}
    service.answers["GET", "/datasets"] = (200, {"results": [row], "next": None})
    service.answers["PATCH", "/datasets/dataset_1"] = (200, row)
    assert cli.main(["datasets", "columns", "chats", "text=body"]) == 0
    assert service.sent("/datasets/dataset_1") == [{"columns": {"text": "body"}}]
    assert capsys.readouterr().out == "chats is read as text=body  (2 documents)\n"
