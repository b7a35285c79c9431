"""The guard in front of Django: bodies by their real bytes, large ones only from people it knows."""

import asyncio
import json
from typing import Any

import pytest

from tests.webapp.conftest import make_person
from webapp.accounts.tokens import create_token
from webapp.body_guard import SMALL_BODY_BYTES, BodyGuard
from webapp.live.record import from_database


class Reader:
    """Stands where Django stands: reads the whole body, then answers 200."""

    def __init__(self) -> None:
        self.num_bytes = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            self.num_bytes += len(message.get("body", b""))
            if not message.get("more_body"):
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


async def ask(path: str, pieces: list[bytes], *, headers: Any = ()) -> tuple[int, dict[str, Any], int]:
    """Status, document and how many bytes got through."""
    reader, sent, left = Reader(), [], list(pieces)

    async def receive() -> dict[str, Any]:
        piece = left.pop(0) if left else b""
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
    await BodyGuard(reader)(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"]), reader.num_bytes


async def test_a_body_that_says_it_is_too_large_is_refused_unread() -> None:
    headers = [(b"content-length", b"99999999")]
    status, document, num_bytes = await ask("/api/v1/jobs", [b"x"], headers=headers)
    assert (status, document["code"], num_bytes) == (413, "body_too_large", 0)
    assert document["detail"] == "the body is over 1,048,576 bytes; allowed: at most 1,048,576"


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"10")]])
async def test_a_body_that_lies_about_its_size_is_cut_off_at_the_limit(headers: Any) -> None:
    pieces = [b"x" * 2**18] * 100
    status, document, num_bytes = await ask("/api/v1/jobs", pieces, headers=headers)
    assert (status, document["code"]) == (413, "body_too_large")
    assert num_bytes <= SMALL_BODY_BYTES


async def test_a_small_body_goes_through() -> None:
    assert await ask("/api/v1/jobs", [b"a", b"b"]) == (200, {}, 2)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("authorization", [b"", b"Bearer hr_wrong", b"Basic YTpi"])
async def test_a_large_upload_of_nobody_is_refused_before_its_first_byte(authorization: bytes) -> None:
    headers = [(b"content-length", b"50000000")] + ([(b"authorization", authorization)] if authorization else [])
    status, document, num_bytes = await ask("/api/v1/models", [b"x" * 2**20] * 3, headers=headers)
    assert (status, document["code"], num_bytes) == (401, "unauthorized", 0)


@pytest.mark.django_db(transaction=True)
async def test_a_large_upload_with_a_token_goes_through() -> None:
    token = await from_database(lambda: create_token(user=make_person("ada"), name="t")[1])
    headers = [(b"authorization", f"Bearer {token}".encode())]
    assert await ask("/api/v1/models", [b"x" * 2**20] * 3, headers=headers) == (200, {}, 3 * 2**20)


async def test_an_answer_whose_reader_has_gone_ends_at_its_next_piece() -> None:
    num_sent, is_gone = 0, asyncio.Event()

    async def talk_for_ever(scope: Any, receive: Any, send: Any) -> None:
        """Stands where a stream stands that was cancelled and did not heed it."""
        await receive()
        leaving = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            is_gone.set()
            await leaving

    async def receive() -> dict[str, Any]:
        if num_sent == 0:
            return {"type": "http.request", "body": b"", "more_body": False}
        await is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal num_sent
        num_sent += 1
        await asyncio.sleep(0)

    scope = {"type": "http", "method": "GET", "path": "/api/v1/jobs/1/events", "headers": []}
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(60):
            await BodyGuard(talk_for_ever)(scope, receive, send)
    assert num_sent == 2
