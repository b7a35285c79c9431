"""Streamed answers of the chat over the real server: each holds one of the person's streams, however it ends."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connections

from tests.webapp.conftest import make_bench, make_person
from tests.webapp.served import LIMIT_S, served
from webapp.accounts.tokens import create_token
from webapp.api.routes import chat
from webapp.catalog.bundled import ensure_bundled
from webapp.jobs.models import Job
from webapp.live.hub import hub_of_this_loop
from webapp.live.record import from_database
from webapp.live.slots import num_viewers
from webapp.serving.replies import replies_of_this_loop
from webapp.wire.serving import SupervisorWire

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]


@pytest.fixture
def token( monkeypatch: pytest.MonkeyPatch, headroom_home: Path) -> str:
    """ada's, who may have one stream open; nobody answers unless the test does."""
    monkeypatch.setattr(settings, "HEADROOM_MAX_STREAMS_PER_PERSON", 1)
    monkeypatch.setattr(chat, "FIRST_WORD_S", 0.05)
    ensure_bundled()
    make_bench()
    token = create_token(user=make_person("ada"), name="asking")[1]
    connections.close_all()
    return token


class Asker:
    """One connection that asks for a streamed answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def ask(cls, port: int, token: str) -> "Asker":
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        messages = [{"role": "user", "content": "Who built the ark?"}]
        body = json.dumps({"model": "headroom-chat-4m", "messages": messages, "stream": True})
        lines = (
            "POST /v1/chat/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json",
            f"Authorization: Bearer {token}", f"Content-Length: {len(body)}", "Connection: close", "", body,
        )  # fmt: skip
        writer.write("\r\n".join(lines).encode())
        return cls(reader, writer)

    async def status(self) -> int:
        return int((await self.wait_for("HTTP/1.1")).split()[1])

    async def wait_for(self, text: str) -> str:
        """The line that holds it."""
        async with asyncio.timeout(LIMIT_S):
            while text not in (line := (await self._reader.readline()).decode()):
                assert line, f"the answer ended before {text}"
        return line

    async def leave(self) -> None:
        self._writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


@asynccontextmanager
async def served_alone() -> AsyncIterator[int]:
    """The server's port. The connections that it keeps end with its process, and here before the loop does."""
    try:
        async with served() as port:
            yield port
    finally:
        async with asyncio.timeout(LIMIT_S):
            while any(task.get_name() == "serving-replies" for task in asyncio.all_tasks()):
                await asyncio.sleep(0.02)
        for line in (hub_of_this_loop(settings.REDIS_URL), replies_of_this_loop(settings.REDIS_URL)):
            await line._redis.aclose()
            await line._redis.connection_pool.disconnect()


async def wait_for_num_streams(num: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while num_viewers() != num:
            await asyncio.sleep(0.02)


async def test_a_person_has_no_more_answers_open_than_streams_are_allowed(token: str) -> None:
    async with served_alone() as port:
        first = await Asker.ask(port, token)
        assert await first.status() == 200
        await wait_for_num_streams(1)
        refused = await Asker.ask(port, token)
        assert await refused.status() == 503
        assert "you may have 1 at once (HEADROOM_MAX_STREAMS_PER_PERSON)" in await refused.wait_for("too_many_streams")
        await refused.leave()
        await first.leave()
        await wait_for_num_streams(0)
        again = await Asker.ask(port, token)
        assert await again.status() == 200
        await again.leave()
        await wait_for_num_streams(0)


async def test_an_answer_that_ends_gives_its_stream_back(token: str) -> None:
    async with served_alone() as port:
        asker = await Asker.ask(port, token)
        assert await asker.status() == 200
        await wait_for_num_streams(1)
        await asyncio.to_thread(answer, await from_database(lambda: Job.objects.get().pk))
        await asker.wait_for("the process was ended")
        await wait_for_num_streams(0)
        await asker.leave()


async def test_one_that_began_as_others_did_ends_in_words(token: str) -> None:
    """Both found room as they asked; the second finds none as its stream begins."""
    async with served_alone() as port:
        askers = [await Asker.ask(port, token) for _ in range(2)]
        for asker in askers:
            assert await asker.status() == 200
        found = [asyncio.create_task(asker.wait_for("too_many_streams")) for asker in askers]
        done, left = await asyncio.wait(found, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        assert [task.exception() for task in done] == [None]
        assert num_viewers() == 1
        for task in left:
            task.cancel()
        for asker in askers:
            await asker.leave()
        await wait_for_num_streams(0)


def answer(job_id: str) -> None:
    """As a worker whose process ends in the middle of an answer."""
    wire = SupervisorWire(job_id)
    asks: list[Any] = []
    while not asks:
        asks = wire.take(block_ms=500)
    failed = {"id": asks[0]["id"], "type": "error", "code": "server_lost", "message": "the process was ended", "param": None}
    wire.reply([(asks[0]["listener"], failed)])
    wire.close()
