"""Followers of a run whose line is cut, whose server is killed, whose Redis is killed: which points they miss at the end.

A follower is the program's own client and takes what the page takes: snapshots, samples, and after a gap the metrics.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.live.service import LiveService
from headroom.client import HeadroomClient
from worker.stack.home import HOST

PER_SECOND = 5.0


def measure_cuts(service: LiveService, *, is_quick: bool) -> dict[str, object]:
    num_followers, num_samples = (4, 100) if is_quick else (20, 200)
    [token] = service.ask("add_people", count=1)
    job_id = service.ask("new_job", name="cut")
    line = CutLine(service.port)
    line.start()
    followers = [Follower(f"http://{HOST}:{line.port}", token, job_id) for _ in range(num_followers)]
    for follower in followers:
        follower.start()
    service.send("measure", job_id=job_id, num_samples=num_samples, per_second=PER_SECOND)
    pause_s = num_samples / PER_SECOND / 8
    for trouble in ("line", "web", "valkey", "line", "web"):
        time.sleep(pause_s)
        if trouble == "line":
            line.cut()
        else:
            restart(service, trouble)
    service.hear()
    service.ask("end", job_id=job_id)
    for follower in followers:
        follower.join(timeout=60)
    line.stop()
    wanted = set(range(1, num_samples + 1))
    return {
        "num_followers": num_followers,
        "num_points": num_samples,
        "num_cuts": 2,
        "num_restarts_of_web": 2,
        "num_restarts_of_redis": 1,
        "num_ended": sum(not follower.is_alive() for follower in followers),
        "num_reconnections": sum(follower.num_lost for follower in followers),
        "num_missing": sum(len(wanted - follower.steps) for follower in followers),
    }


def restart(service: LiveService, name: str) -> None:
    service.kill(name)
    time.sleep(1.5)
    service.start(name)


class Follower(threading.Thread):
    """One client from the run's start to its end."""

    def __init__(self, url: str, token: str, job_id: str) -> None:
        super().__init__(daemon=True)
        self._client = HeadroomClient(url, token=token)
        self._job_id = job_id
        self.steps: set[int] = set()
        self.num_lost = 0

    def run(self) -> None:
        for event in self._client.follow_job(self._job_id):
            if event.kind == "lost":
                self.num_lost += 1
            elif event.kind == "snapshot":
                self._take_all(event.data["metrics"])
            elif event.kind == "sample":
                self._take(event.data)
            elif event.kind in ("gap", "reset", "done"):
                self._fetch()

    def _fetch(self) -> None:
        """Fetch what a gap left out from the record, as the page does."""
        while True:
            with contextlib.suppress(Exception):
                return self._take_all(self._client.metrics(self._job_id))
            time.sleep(0.2)

    def _take_all(self, metrics: Mapping[str, Any]) -> None:
        for sample in metrics["steps"]:
            self.steps.add(sample["step"])

    def _take(self, sample: dict[str, Any]) -> None:
        if sample.get("kind") == "step":
            self.steps.add(sample["step"])


class CutLine(threading.Thread):
    """A line between followers and server that can be cut: all connections end at once, new ones are taken."""

    def __init__(self, server_port: int) -> None:
        super().__init__(daemon=True)
        self._server_port = server_port
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._is_ready = threading.Event()
        self._is_over = asyncio.Event()
        self.port = 0

    def start(self) -> None:
        super().start()
        self._is_ready.wait()

    def run(self) -> None:
        asyncio.run(self._serve())

    def cut(self) -> None:
        self._call_soon(self._cut)

    def stop(self) -> None:
        self._call_soon(self._is_over.set)
        self.join()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._carry, HOST, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_ready.set()
        await self._is_over.wait()
        server.close()
        self._cut()

    def _call_soon(self, what: Callable[[], None]) -> None:
        """Run something in the line's event loop, from any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(what)

    def _cut(self) -> None:
        for writer in tuple(self._open):
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection(HOST, self._server_port)
        except OSError:
            writer.close()
            return
        self._open |= {writer, to_server}
        await asyncio.gather(_pour(reader, to_server), _pour(from_server, writer))
        self._open -= {writer, to_server}


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    writer.close()
