"""Connections that submit one after the other: each sends its next request when the last one is answered.

``python -m benchmarks.load.client``: one JSON document of ``Asked`` on stdin, one with the answers on stdout. A process of
its own, so that it shares an interpreter with nothing that is measured. A refused connection waits the seconds in Retry-After.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass

LOST = 0
"""The status of a request whose connection ended before the answer."""
_PAUSE_S = 0.1
"""After a lost connection, or a refusal that names no time."""
REFUSALS = (429, 503)


@dataclass(frozen=True, kw_only=True)
class Asked:
    host: str
    port: int
    token: str
    body: str
    num_connections: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    ms: float
    """From the first byte sent to the last one read; 0 for a lost connection."""
    retry_after_s: float | None = None


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, float | None]:
    """Read one answer, its body included, up to the next one; return its status and Retry-After in seconds."""
    line = await reader.readline()
    if not line:
        raise asyncio.IncompleteReadError(line, None)
    status, num_bytes, retry_after_s = int(line.split()[1]), 0, None
    while (line := await reader.readline()).strip():
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            num_bytes = int(value)
        elif name.lower() == b"retry-after":
            retry_after_s = float(value)
    await reader.readexactly(num_bytes)
    return status, retry_after_s


async def submit_all(asked: Asked) -> list[Answer]:
    answers: list[Answer] = []
    until = time.perf_counter() + asked.seconds
    await asyncio.gather(*(_submit(asked, until, answers) for _ in range(asked.num_connections)))
    return answers


async def _submit(asked: Asked, until: float, answers: list[Answer]) -> None:
    body = asked.body.encode()
    head = (
        f"POST /api/v1/jobs HTTP/1.1\r\nHost: {asked.host}\r\nAuthorization: Bearer {asked.token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    while time.perf_counter() < until:
        try:
            if connection is None:
                connection = await asyncio.open_connection(asked.host, asked.port)
            reader, writer = connection
            began_at = time.perf_counter()
            writer.write(head.encode() + body)
            status, retry_after_s = await read_answer(reader)
        except (OSError, asyncio.IncompleteReadError):
            answers.append(Answer(status=LOST, ms=0.0))
            connection = None
            await asyncio.sleep(_PAUSE_S)
            continue
        answers.append(Answer(status=status, ms=1000 * (time.perf_counter() - began_at), retry_after_s=retry_after_s))
        if status in REFUSALS:
            await asyncio.sleep(max(0.0, min(retry_after_s or _PAUSE_S, until - time.perf_counter())))
    if connection is not None:
        connection[1].close()


def main() -> None:
    asked = Asked(**json.load(sys.stdin))
    began_at = time.perf_counter()
    answers = asyncio.run(submit_all(asked))
    json.dump(
        {"seconds": time.perf_counter() - began_at, "answers": [asdict(answer) for answer in answers]}, sys.stdout
    )


if __name__ == "__main__":
    main()
