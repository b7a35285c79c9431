"""``headroom generate``: what it uploads, asks for and fetches. The service is a table of answers behind real HTTP calls."""

import json
from pathlib import Path
from typing import Any

import pytest

from headroom.commands import generate
from headroom.commands import main as cli
from tests.worker.answering import AnsweringService

MACHINES = {
    "results": [{"id": "machine_1", "device": {"memory_bytes": 4096}}, {"id": "machine_2", "device": {"memory_bytes": 8192}}]
}
JOB: dict[str, Any] = {
    "id": "job_1",
    "kind": "generate",
    "name": "verses",
    "state": "succeeded",
    "message": "2 of 2 prompts are done",
    "is_terminal": True,
    "step": 2,
    "num_steps": 2,
    "summary": {},
}
RESULTS = b'{"id": "1", "text": "and"}\n'


ANSWERS = {
    ("GET", "/machines"): (200, MACHINES),
    ("POST", "/datasets"): (201, {"id": "dataset_9", "num_documents": 2, "facts": {}}),
    ("POST", "/plans"): (200, {"offers": [{"id": "plan_1", "label": "chosen", "chosen": True}]}),
    ("POST", "/jobs"): (201, JOB),
    ("GET", "/jobs/job_1"): (200, JOB),
    ("GET", "/jobs/job_1/artifacts"): (
        200,
        {"results": [{"id": "artifact_1", "name": "results.jsonl", "path": "results.jsonl", "num_bytes": len(RESULTS)}]},
    ),
    ("GET", "/artifacts/artifact_1/download"): (200, RESULTS),
    ("GET", "/jobs/job_1/events"): (200, b'event: snapshot\ndata: {"job": ' + json.dumps(JOB).encode() + b"}\n\n"),
}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> AnsweringService:
    service = AnsweringService(ANSWERS)
    monkeypatch.setattr(generate, "connect", service.connect)
    return service


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "verses.jsonl"
    file.write_text('{"prompt": "In the beginning"}\n')
    return file


def test_prompts_are_uploaded_priced_followed_and_their_results_fetched(
    service: AnsweringService, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["generate", "--model", "writer", "--prompts", str(prompts), "--max-new-tokens", "9", "--budget", "1 MiB"]
    assert cli.main([*arguments, "--stop", "a", "--stop", "b", "--name", "verses", "-o", str(out)]) == 0
    [upload] = service.sent_bytes("/datasets")
    assert b'name="purpose"\r\n\r\nprompts' in upload
    spec = service.sent("/plans")[0]
    assert spec == {
        "kind": "generate",
        "name": "verses",
        "model": "writer",
        "prompts": "dataset_9",
        "workload": {"max_new_tokens": 9, "stop": ["a", "b"]},
        "goal": {"device_budget_bytes": 1024**2, "allow_lossy": False},
    }
    assert service.sent("/jobs")[0]["plan_id"] == "plan_1"
    assert (out / "results.jsonl").read_bytes() == RESULTS
    assert "prompt 2 of 2" in capsys.readouterr().out


def test_without_a_budget_it_is_all_of_the_largest_machine(service: AnsweringService, prompts: Path) -> None:
    assert cli.main(["generate", "--model", "writer", "--prompts", "known", "--detach"]) == 0
    spec = service.sent("/plans")[0]
    assert (spec["prompts"], spec["goal"]["device_budget_bytes"]) == ("known", 8192)
    assert not service.sent_bytes("/artifacts/artifact_1/download")


def test_a_job_that_failed_fails_the_command_with_its_sentence(
    service: AnsweringService, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {**JOB, "state": "failed", "message": "device memory ran out"}
    service.answers["GET", "/jobs/job_1"] = (200, failed)
    assert cli.main(["generate", "--model", "writer", "--prompts", str(prompts), "--budget", "1 MiB"]) == 1
    assert "verses failed: device memory ran out" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_a_usage_error(
    service: AnsweringService, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "--model", "writer", "--prompts", "missing.jsonl", "--budget", "1 MiB"]) == 2
    assert "missing.jsonl is not a file" in capsys.readouterr().err


def test_a_size_that_is_none_is_refused(
    service: AnsweringService, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", "--model", "writer", "--prompts", str(prompts), "--budget", "much"])
    assert "much" in capsys.readouterr().err
