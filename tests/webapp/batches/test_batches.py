"""OpenAI's Batch API over generate jobs: files, the life of a batch, errors in OpenAI's form. The worker is played."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.utils import timezone

from tests.webapp.api.conftest import token_client
from tests.webapp.generation import CHAT, make_writer, request
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.records import record_phase, record_progress, record_started
from webapp.batches import actions
from webapp.batches.actions import advance_batches
from webapp.batches.models import Batch, BatchFile
from webapp.catalog.models import Dataset, Machine, Model
from webapp.jobs.models import Attempt, Job

pytestmark = pytest.mark.django_db


@pytest.fixture
def writer(writer_document: dict[str, Any], ada: User) -> Model:
    return make_writer(writer_document, owner=ada)


@pytest.fixture
def as_ada(ada: User) -> Client:
    return token_client(ada)


def upload(client: Client, *lines: Any, purpose: str = "batch", name: str = "in.jsonl") -> Any:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    return client.post("/v1/files", data={"purpose": purpose, "file": SimpleUploadedFile(name, text.encode())})


def start(client: Client, file_id: str, **changes: Any) -> Any:
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **changes}
    return client.post("/v1/batches", data=json.dumps(body), content_type="application/json")


def begin(client: Client, *lines: Any) -> str:
    """A batch whose job is queued."""
    batch = start(client, upload(client, *lines).json()["id"]).json()
    advance_batches()
    return batch["id"]


def show(client: Client, batch_id: str) -> dict[str, Any]:
    return client.get(f"/v1/batches/{batch_id}").json()


def read(client: Client, file_id: str) -> bytes:
    answer: Any = client.get(f"/v1/files/{file_id}/content")

    async def collect() -> bytes:
        return b"".join([part async for part in answer.streaming_content])

    return async_to_sync(collect)()


def run(machine: Machine, *, summary: dict[str, int] | None = None, step: int = 1) -> Attempt:
    attempt = claim_job(worker="w", machine=machine)
    assert record_started(attempt, pid=1)
    assert record_progress(attempt, step=step, eta_s=None, summary=summary or {})
    return attempt


def end(attempt: Attempt, home: Path, *, outcome: str = "succeeded", errors: str = "", **changes: Any) -> str:
    folder = Path(home) / "jobs" / attempt.job_id / "artifacts"
    folder.mkdir(parents=True)
    artifacts = []
    for kind, text in (("results", '{"custom_id": "a"}\n'), ("errors", errors)):
        if text:
            (folder / f"{kind}.jsonl").write_text(text)
            named = {"kind": kind, "name": f"{kind}.jsonl", "file": f"artifacts/{kind}.jsonl"}
            artifacts.append({**named, "num_bytes": len(text), "sha256": "0" * 64})
    result = {"outcome": outcome, "reason": "done", "message": "", "error": None, "step": 2, "measured": None, "summary": {}}
    return finish_attempt(attempt, result={**result, "artifacts": artifacts, **changes}, exit_code=0)


def test_an_uploaded_file_is_listed_read_back_and_deleted(as_ada: Client) -> None:
    made = upload(as_ada, request()).json()
    assert (made["object"], made["purpose"], made["filename"]) == ("file", "batch", "in.jsonl")
    assert made["id"].startswith("file-")
    assert as_ada.get(f"/v1/files/{made['id']}").json() == made
    assert as_ada.get("/v1/files").json()["data"] == [made]
    content = read(as_ada, made["id"])
    assert (json.loads(content), len(content)) == (request(), made["bytes"])
    assert as_ada.delete(f"/v1/files/{made['id']}").json() == {"id": made["id"], "object": "file", "deleted": True}
    assert not BatchFile.objects.exists()
    assert not Dataset.objects.exists()


def test_lists_are_paged_newest_first_as_openais_clients_expect(as_ada: Client) -> None:
    ids = [upload(as_ada, request()).json()["id"] for _ in range(3)]
    first = as_ada.get("/v1/files?limit=2").json()
    assert ([row["id"] for row in first["data"]], first["has_more"]) == ([ids[2], ids[1]], True)
    second = as_ada.get(f"/v1/files?limit=2&after={first['last_id']}").json()
    assert ([row["id"] for row in second["data"]], second["has_more"]) == ([ids[0]], False)
    rising = as_ada.get("/v1/files?order=asc&limit=1").json()
    assert rising["data"][0]["id"] == ids[0]


def test_a_file_of_a_running_batch_may_be_deleted_and_its_lines_stay(
    as_ada: Client, machine: Machine, writer: Model
) -> None:
    batch = begin(as_ada, request())
    file_id = show(as_ada, batch)["input_file_id"]
    assert as_ada.delete(f"/v1/files/{file_id}").json()["deleted"]
    assert Dataset.objects.exists()
    assert show(as_ada, batch)["input_file_id"] == file_id


def test_a_batch_goes_from_validating_to_completed_with_files_and_counts(
    as_ada: Client, machine: Machine, writer: Model, headroom_home: Path
) -> None:
    made = start(as_ada, upload(as_ada, request("a"), request("b")).json()["id"], metadata={"for": "test"}).json()
    assert (made["status"], made["request_counts"]) == ("validating", {"total": 0, "completed": 0, "failed": 0})
    assert made["expires_at"] - made["created_at"] == 24 * 3600
    assert advance_batches() == [made["id"]]
    begun = show(as_ada, made["id"])
    assert (begun["status"], begun["model"]) == ("in_progress", "writer")
    assert begun["request_counts"]["total"] == 2
    job = Job.objects.get(kind="generate")
    assert job.spec["workload"]["temperature"] == 1.0
    assert job.spec["goal"]["device_budget_bytes"] == machine.document["device"]["memory_bytes"]
    attempt = run(machine, summary={"num_errors": 1}, step=2)
    assert show(as_ada, made["id"])["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert record_phase(attempt, "saving")
    assert show(as_ada, made["id"])["status"] == "finalizing"
    assert end(attempt, headroom_home, errors='{"custom_id": "b"}\n') == "succeeded"
    done = show(as_ada, made["id"])
    assert done["status"] == "completed"
    assert done["completed_at"] >= done["finalizing_at"] >= done["in_progress_at"]
    assert done["metadata"] == {"for": "test"}
    output = read(as_ada, done["output_file_id"])
    errors = read(as_ada, done["error_file_id"])
    assert (json.loads(output)["custom_id"], json.loads(errors)["custom_id"]) == ("a", "b")
    assert as_ada.get(f"/v1/files/{done['output_file_id']}").json()["purpose"] == "batch_output"
    assert advance_batches() == []


def test_a_batch_that_nobody_looks_at_is_finished_by_the_reconciler(
    as_ada: Client, machine: Machine, writer: Model, headroom_home: Path
) -> None:
    batch = begin(as_ada, request())
    end(run(machine), headroom_home)
    assert advance_batches() == [batch]
    assert Batch.objects.get().status == "completed"
    assert BatchFile.objects.filter(purpose="batch_output").count() == 1


def test_a_batch_waits_while_its_model_is_profiled_or_no_machine_is_known(as_ada: Client, ada: User) -> None:
    make_writer(owner=ada)
    batch = begin(as_ada, request())
    assert show(as_ada, batch)["status"] == "validating"


@pytest.mark.parametrize(
    ("lines", "code", "line"),
    [
        (["nope"], "invalid_json", 1),
        ([request("a"), request("a")], "duplicate_id", 2),
        ([{"prompt": "x"}], "missing_field", None),
        ([request("a"), request("b", url="/v1/completions", body={"model": "writer", "prompt": "x"})], "invalid_url", None),
        ([request("a"), request("b", body={**request()["body"], "model": "other"})], "mismatched_model", None),
        ([request(body={**request()["body"], "n": 3})], "empty_batch", None),
        ([request(body={**request()["body"], "model": "nobody"})], "invalid_input", None),
    ],
)
def test_a_file_that_is_no_batch_fails_with_its_lines(
    as_ada: Client, machine: Machine, writer: Model, lines: list[Any], code: str, line: int | None
) -> None:
    batch = show(as_ada, begin(as_ada, *lines))
    assert (batch["status"], batch["errors"]["object"]) == ("failed", "list")
    first = batch["errors"]["data"][0]
    assert (first["code"], first["line"]) == (code, line)
    assert not Job.objects.filter(kind="generate").exists()


def test_a_batch_that_is_cancelled_keeps_what_is_finished(
    as_ada: Client, machine: Machine, writer: Model, headroom_home: Path
) -> None:
    batch = begin(as_ada, request("a"), request("b"))
    attempt = run(machine)
    assert as_ada.post(f"/v1/batches/{batch}/cancel").json()["status"] == "cancelling"
    assert end(attempt, headroom_home, outcome="drained") == "cancelled"
    ended = show(as_ada, batch)
    assert (ended["status"], bool(ended["output_file_id"])) == ("cancelled", True)
    refused = as_ada.post(f"/v1/batches/{begin_completed(as_ada, machine, headroom_home)}/cancel")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "wrong_state")


def begin_completed(client: Client, machine: Machine, home: Path) -> str:
    batch = begin(client, request())
    end(run(machine), home)
    assert show(client, batch)["status"] == "completed"
    return batch


def test_a_batch_that_has_not_started_is_cancelled_at_once(as_ada: Client, ada: User) -> None:
    make_writer(owner=ada)
    batch = begin(as_ada, request())
    assert as_ada.post(f"/v1/batches/{batch}/cancel").json()["status"] == "cancelled"


def test_after_its_window_a_batch_expires_with_what_is_finished(
    as_ada: Client, machine: Machine, writer: Model, headroom_home: Path
) -> None:
    batch = begin(as_ada, request("a"), request("b"))
    attempt = run(machine)
    Batch.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    advance_batches()
    assert Job.objects.get(kind="generate").cancel_mode == "save"
    end(attempt, headroom_home, outcome="drained")
    ended = show(as_ada, batch)
    assert (ended["status"], bool(ended["output_file_id"])) == ("expired", True)


def test_a_job_that_fails_fails_its_batch_with_its_reason(
    as_ada: Client, machine: Machine, writer: Model, headroom_home: Path
) -> None:
    batch = begin(as_ada, request())
    end(run(machine), headroom_home, outcome="failed", reason="bad_model", message="it cannot be read")
    ended = show(as_ada, batch)
    assert ended["status"] == "failed"
    assert ended["errors"]["data"] == [{"code": "bad_model", "message": "it cannot be read", "param": None, "line": None}]


def test_a_batch_on_which_the_program_fails_holds_up_no_other(
    as_ada: Client, machine: Machine, writer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (start(as_ada, upload(as_ada, request()).json()["id"]).json()["id"] for _ in range(2))
    validate = actions._validate

    def fail_once(batch: Batch) -> None:
        if batch.pk == first:
            raise RuntimeError("secret")
        validate(batch)

    monkeypatch.setattr(actions, "_validate", fail_once)
    advance_batches()
    broken = show(as_ada, first)
    assert (broken["status"], broken["errors"]["data"][0]["code"]) == ("failed", "internal")
    assert "secret" not in json.dumps(broken)
    assert show(as_ada, second)["status"] == "in_progress"


def test_what_is_someone_elses_is_not_there(as_ada: Client, eve: User, machine: Machine, writer: Model) -> None:
    batch = begin(as_ada, request())
    file_id = show(as_ada, batch)["input_file_id"]
    stranger = token_client(eve)
    for path in (f"/v1/batches/{batch}", f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        assert stranger.get(path).status_code == 404
    assert stranger.post(f"/v1/batches/{batch}/cancel").status_code == 404
    assert stranger.get("/v1/batches").json()["data"] == []
    refused = start(stranger, file_id)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input_file_id")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(index): "x" for index in range(17)}}, "metadata"),
        ({"input_file_id": "file-\0"}, "input_file_id"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_request_that_is_wrong_is_refused_in_openais_form(
    as_ada: Client, changes: dict[str, Any], param: str
) -> None:
    refused = start(as_ada, changes.pop("input_file_id", upload(as_ada, request()).json()["id"]), **changes)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param in (error["param"] or "") or "NUL" in error["message"]


def test_other_purposes_and_files_that_are_no_text_are_refused(as_ada: Client) -> None:
    assert upload(as_ada, request(), purpose="fine-tune").json()["error"]["param"] == "purpose"
    empty = upload(as_ada)
    assert (empty.status_code, empty.json()["error"]["code"]) == (400, "bad_dataset")


def test_only_a_token_opens_this_api(as_ada: Client, ada: User) -> None:
    browser = Client(raise_request_exception=False)
    browser.force_login(ada)
    for client in (browser, Client(headers={"Authorization": "Bearer hr_wrong"}, raise_request_exception=False)):
        refused = client.get("/v1/batches")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


def test_an_address_that_is_not_there_answers_in_openais_form(as_ada: Client) -> None:
    refused = as_ada.get("/v1/embeddings")
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "invalid_request_error")


def test_models_with_weights_are_listed_by_name(as_ada: Client, model: Model, writer: Model) -> None:
    assert [row["id"] for row in as_ada.get("/v1/models").json()["data"]] == ["writer"]
