"""Connections that send slowly or nothing, over the real server: they end, and others are answered meanwhile."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.webapp.served import LIMIT_S, served
from webapp import body_guard, connections

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_DEADLINE_S", 1.0)
    monkeypatch.setattr(body_guard, "BODY_DEADLINE_S", 1.0)


async def send_slowly(port: int, text: str) -> bytes:
    """The answer of a server that was sent this, and then a letter each tenth of a second until it hung up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(text.encode())
        reading = asyncio.create_task(reader.read())
        async with asyncio.timeout(LIMIT_S):
            while not reading.done():
                writer.write(b"x")
                await asyncio.sleep(0.1)
            return await reading
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def is_answered(port: int) -> bool:
    async with httpx.AsyncClient(timeout=LIMIT_S, trust_env=False) as client:
        return (await client.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(LIMIT_S):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


async def test_headers_letter_by_letter_are_cut_off() -> None:
    async with served() as port:
        assert await send_slowly(port, "GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ") == b""


async def test_headers_of_a_further_request_are_cut_off_too() -> None:
    whole = "GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    async with served() as port:
        answer = await send_slowly(port, whole + "GET /healthz HTTP/1.1\r\nX-Slow: ")
    assert answer.count(b"HTTP/1.1 200") <= 1


async def test_a_body_letter_by_letter_is_refused() -> None:
    head = "POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n"
    async with served() as port:
        answer = await send_slowly(port, head)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"body_too_slow" in answer


async def test_a_body_that_comes_fast_enough_may_take_longer_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_guard, "SLOWEST_BYTES_PER_S", 100)
    body = b'{"name": "' + b"x" * 1000 + b'"}'

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]
            await asyncio.sleep(0.2)

    async with served() as port, httpx.AsyncClient(timeout=LIMIT_S, trust_env=False) as client:
        headers = {"Content-Type": "application/json"}
        answer = await client.post(f"http://127.0.0.1:{port}/api/v1/jobs", content=pieces(), headers=headers)
    assert answer.status_code == 401


async def test_half_open_connections_make_room_for_those_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_DEADLINE_S", 600.0)
    monkeypatch.setattr(connections, "MAX_HALF_OPEN", 10)
    monkeypatch.setattr(connections, "AT_ONCE_S", 0.0)
    async with served() as port:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        assert await is_answered(port)
        async with asyncio.timeout(LIMIT_S):
            ended = [asyncio.create_task(reader.read()) for reader, _ in opened]
            while sum(task.done() for task in ended) < 20:
                await asyncio.sleep(0.02)
        assert not ended[-1].done()
        for _, writer in opened:
            writer.transport.abort()
        await asyncio.gather(*ended, return_exceptions=True)


async def test_many_who_come_at_once_and_send_their_headers_are_all_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADERS_DEADLINE_S", 600.0)
    monkeypatch.setattr(connections, "MAX_HALF_OPEN", 10)
    monkeypatch.setattr(connections, "AT_ONCE_S", 60.0)
    async with served() as port:
        assert all(await asyncio.gather(*(is_answered(port) for _ in range(40))))


async def test_an_answer_that_takes_longer_than_headers_may_is_not_cut_off() -> None:
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        async with asyncio.timeout(LIMIT_S):
            assert b"200" in await reader.readline()
        await asyncio.sleep(1.5)  # past the deadline for headers, within that for idle connections
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        async with asyncio.timeout(LIMIT_S):
            while b"HTTP/1.1 200" not in (line := await reader.readline()):
                assert line, "the connection was cut off"
        writer.close()
