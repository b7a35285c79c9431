"""The openai package, unmodified, against a running stack: uploads a batch, polls it, downloads what came of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Batch, FileObject

from tests.breadth import OPENAI_API
from tests.end_to_end.site.stack import Stack, running_stack
from tests.end_to_end.site.writer import CONFIG, write_weights
from tests.worker.processes import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.breadth(OPENAI_API)]

CHAT = "/v1/chat/completions"
DONE_WITHIN_S = 300
ENDED = ("completed", "failed", "expired", "cancelled")


def request(custom_id: str, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Who are you, {custom_id}?"}]
    body = {"model": "writer", "messages": messages, "max_tokens": 8, "seed": 7, **changes}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack() as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """The client of a person who has uploaded a model."""
    url, token = stack.start_web(), stack.ask("token", name="ada")
    weights = write_weights(tmp_path_factory.mktemp("writer"))
    files = {"config": ("config.json", json.dumps(CONFIG)), "weights": ("model.safetensors", weights.read_bytes())}
    headers = {"Authorization": f"Bearer {token}"}
    made = httpx.post(f"{url}/api/v1/models", headers=headers, data={"name": "writer"}, files=files, timeout=60)
    assert made.status_code == 201, made.text
    with OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0) as client:
        yield client


def upload(client: OpenAI, folder: Path, *requests: Any) -> FileObject:
    file = folder / "requests.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in requests))
    with file.open("rb") as opened:
        return client.files.create(file=opened, purpose="batch")


def wait_for_end(client: OpenAI, batch: Batch, stack: Stack) -> Batch:
    def ended() -> Batch | None:
        found = client.batches.retrieve(batch.id)
        return found if found.status in ENDED else None

    try:
        return wait_for(ended, what="the end of the batch", timeout_s=DONE_WITHIN_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{client.batches.retrieve(batch.id)}\n{stack.logs()}") from error


def read(client: OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_is_uploaded_polled_and_downloaded(client: OpenAI, stack: Stack, tmp_path: Path) -> None:
    file = upload(client, tmp_path, request("a"), request("b", n=2), request("c", temperature=0))
    assert (file.object, file.purpose, file.filename) == ("file", "batch", "requests.jsonl")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"for": "the proof"}
    )
    assert (batch.object, batch.status) == ("batch", "validating")
    ended = wait_for_end(client, batch, stack)
    assert ended.status == "completed", f"{ended}\n{stack.logs()}"
    assert ended.metadata == {"for": "the proof"}
    assert (ended.request_counts.total, ended.request_counts.completed, ended.request_counts.failed) == (3, 2, 1)
    first, second = read(client, ended.output_file_id)
    assert (first["custom_id"], second["custom_id"]) == ("a", "c")
    completion = openai.types.chat.ChatCompletion.model_validate(first["response"]["body"])
    assert completion.choices[0].message.role == "assistant"
    assert 1 <= completion.usage.completion_tokens <= 8
    [refused] = read(client, ended.error_file_id)
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("b", 400)
    assert refused["response"]["body"]["error"]["param"] == "n"
    assert ended.id in [each.id for each in client.batches.list()]
    assert {file.id, ended.output_file_id} <= {each.id for each in client.files.list()}
    assert client.files.delete(file.id).deleted


def test_a_file_that_is_no_batch_fails_with_the_number_of_its_line(
    client: OpenAI, stack: Stack, tmp_path: Path
) -> None:
    file = upload(client, tmp_path, request("a"), request("a"))
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    ended = wait_for_end(client, batch, stack)
    assert ended.status == "failed"
    assert [(error.code, error.line) for error in ended.errors.data] == [("duplicate_id", 2)]


def test_a_batch_is_cancelled(client: OpenAI, stack: Stack, tmp_path: Path) -> None:
    file = upload(client, tmp_path, *[request(str(number), max_tokens=200) for number in range(100)])
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    wait_for(lambda: client.batches.retrieve(batch.id).status == "in_progress", what="the start", timeout_s=DONE_WITHIN_S)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    assert wait_for_end(client, batch, stack).status == "cancelled"


def test_what_is_wrong_reaches_the_client_as_its_own_errors(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_0")
    with pytest.raises(openai.BadRequestError, match="input_file_id 'file-0' is not an uploaded file"):
        client.batches.create(input_file_id="file-0", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.AuthenticationError, match="valid API token"):
        client.with_options(api_key="hr_wrong").batches.list()
