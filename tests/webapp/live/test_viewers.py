"""Many who watch one run over the real server, and leave: nothing of theirs stays behind."""

import asyncio
import contextlib
import gc
import threading
from pathlib import Path

import pytest
from django.contrib.auth.models import User

from tests.webapp.served import LIMIT_S, served
from webapp.accounts.tokens import create_token
from webapp.jobs.models import Attempt
from webapp.live import stream as stream_module
from webapp.live.hub import Subscription
from webapp.live.record import from_database
from webapp.live.slots import num_viewers
from webapp.live.threads import NUM_THREADS
from webapp.wire.publish import publish

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("valkey")]

NUM_VIEWERS = 20
"""Number of streams that one person may have open."""


class Viewer:
    """One connection that reads a stream as a browser does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int, job_id: str, token: str) -> "Viewer":
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
        lines = (
            f"GET /api/v1/jobs/{job_id}/events HTTP/1.1", "Host: 127.0.0.1", "Accept: text/event-stream",
            f"Authorization: Bearer {token}", "", "",
        )  # fmt: skip
        writer.write("\r\n".join(lines).encode())
        return cls(reader, writer)

    async def status(self) -> int:
        async with asyncio.timeout(LIMIT_S):
            return int((await self._reader.readline()).split()[1])

    async def wait_for(self, kind: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while f"event: {kind}\n".encode() != (line := await self._reader.readline()):
                assert line, f"the stream ended before {kind}"

    async def wait_for_heartbeat(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not (line := await self._reader.readline()).startswith(b": keep-alive"):
                assert line, "the stream ended before its heartbeat"

    def leave(self) -> None:
        self._writer.transport.abort()


async def make_token() -> str:
    return await from_database(lambda: create_token(user=User.objects.get(username="ada"), name="watching")[1])


async def watch(port: int, job_id: str, token: str, *, count: int) -> list[Viewer]:
    viewers = [await Viewer.open(port, job_id, token) for _ in range(count)]
    for viewer in viewers:
        await viewer.wait_for("snapshot")
    return viewers


async def wait_for_nobody() -> None:
    async with asyncio.timeout(5):
        while num_viewers():
            await asyncio.sleep(0.02)


def num_open_files(of: str = "") -> int:
    """Descriptors of this process whose file's name holds ``of``."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found += of in str(descriptor.readlink())
    return found


async def test_viewers_who_leave_in_the_moment_of_an_event_are_gone(running: Attempt) -> None:
    async with served() as port:
        token = await make_token()
        for viewer in await watch(port, running.job_id, token, count=1):
            viewer.leave()
        await wait_for_nobody()
        before = num_open_files()
        for _ in range(3):
            viewers = await watch(port, running.job_id, token, count=NUM_VIEWERS)
            assert num_viewers() == NUM_VIEWERS
            await asyncio.to_thread(publish, running.job_id, "sample", {"kind": "step", "step": 2})
            await viewers[0].wait_for("sample")
            for _ in range(5):  # an event with each turn in which some of them leave
                publish(running.job_id, "sample", {"kind": "step", "step": 3})
                for _ in range(4):
                    viewers.pop().leave()
                await asyncio.sleep(0.002)
            await wait_for_nobody()
        async with asyncio.timeout(5):
            while num_open_files() > before:
                await asyncio.sleep(0.05)
        again = await Viewer.open(port, running.job_id, token)
        assert await again.status() == 200
        again.leave()


async def test_viewers_who_leave_as_their_stream_begins_are_gone(
    running: Attempt, request: pytest.FixtureRequest
) -> None:
    gc.disable()  # it would close what nothing else closed, some time
    request.addfinalizer(gc.enable)
    async with served() as port:
        token = await make_token()
        for _ in range(3):
            viewers = [await Viewer.open(port, running.job_id, token) for _ in range(NUM_VIEWERS)]
            for viewer in viewers:
                assert await viewer.status() == 200
                viewer.leave()
            await wait_for_nobody()


async def test_streams_hold_neither_a_database_connection_nor_a_thread_each(running: Attempt) -> None:
    async with served() as port:
        token = await make_token()
        (first,) = await watch(port, running.job_id, token, count=1)
        num_threads = threading.active_count()
        first.leave()
        await wait_for_nobody()
        before = num_open_files(".sqlite3-wal")
        viewers = await watch(port, running.job_id, token, count=NUM_VIEWERS)
        assert num_open_files(".sqlite3-wal") <= before + NUM_THREADS
        assert threading.active_count() < num_threads + NUM_VIEWERS / 2
        for viewer in viewers:
            viewer.leave()
        await wait_for_nobody()


async def test_a_reader_that_is_cancelled_as_an_entry_comes_ends() -> None:
    subscription = Subscription("job")
    reading = asyncio.create_task(subscription.get(60))
    await asyncio.sleep(0)  # it waits
    subscription.put(("1-0", "{}"))
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_the_heartbeats_of_many_viewers_are_one_look_at_the_database(
    running: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "HEARTBEAT_S", 2.0)
    looks: list[str] = []

    def look(job_id: str) -> None:
        looks.append(job_id)

    monkeypatch.setattr(stream_module, "ended_state", look)
    async with served() as port:
        viewers = await watch(port, running.job_id, await make_token(), count=NUM_VIEWERS)
        for viewer in viewers:
            await viewer.wait_for_heartbeat()
        for viewer in viewers:
            viewer.leave()
        await wait_for_nobody()
    assert 1 <= len(looks) < NUM_VIEWERS
