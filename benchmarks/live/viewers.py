"""Many who follow one run: from a sample's line in its file to its event at each of them.

Each viewer is a TCP connection to the server over loopback that reads server-sent events as a browser does. The clock is the
machine's own on both sides. What reading two hundred streams in one process costs is in the figure.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.live.service import LiveService, wait_for
from optimizer.base.errors import HeadroomError
from worker.stack.home import HOST

STREAMS_PER_PERSON = 20
PER_SECOND = 2.0
EARLIER_POINTS = 500
"""The run has been going on for a while; so much is in each snapshot."""
_LINE_LIMIT_BYTES = 32 * 1024 * 1024


@dataclass(kw_only=True)
class Seen:
    """Everything that one viewer received."""

    has_snapshot: asyncio.Event = field(default_factory=asyncio.Event)
    snapshot_ms: float = 0.0
    """From opening the connection."""
    latencies_ms: list[float] = field(default_factory=list)
    steps: set[int] = field(default_factory=set)
    num_gaps: int = 0


def measure_viewers(service: LiveService, *, is_quick: bool, num_viewers: int = 0) -> dict[str, object]:
    """num_viewers: 0 for 60 where it is to be quick, 200 otherwise."""
    num_viewers, num_samples = num_viewers or (60 if is_quick else 200), 20 if is_quick else 180
    tokens = service.ask("add_people", count=-(-num_viewers // STREAMS_PER_PERSON))
    job_id = service.ask("new_job", name="watched")
    idle_bytes = service.memory_bytes("VmRSS")
    service.ask("fill", job_id=job_id, num_points=EARLIER_POINTS)
    viewers = [Seen() for _ in range(num_viewers)]
    timed = asyncio.run(_watch(service, job_id, tokens, viewers, num_samples))
    wanted = set(range(EARLIER_POINTS + 1, EARLIER_POINTS + num_samples + 1))
    latencies = sorted(latency for viewer in viewers for latency in viewer.latencies_ms)
    snapshots = sorted(viewer.snapshot_ms for viewer in viewers)
    return {
        "num_viewers": num_viewers,
        "samples_per_s": PER_SECOND,
        "num_samples": num_samples,
        "num_events": len(latencies),
        "num_missing": sum(len(wanted - viewer.steps) for viewer in viewers),
        "num_gaps": sum(viewer.num_gaps for viewer in viewers),
        "snapshot_median_ms": _at(snapshots, 0.5),
        "snapshot_worst_ms": _at(snapshots, 1.0),
        "median_ms": _at(latencies, 0.5),
        "p95_ms": _at(latencies, 0.95),
        "p99_ms": _at(latencies, 0.99),
        "worst_ms": _at(latencies, 1.0),
        "web_idle_bytes": idle_bytes,
        "web_peak_bytes": service.memory_bytes("VmHWM"),
        **timed,
    }


async def _watch(
    service: LiveService, job_id: str, tokens: list[str], viewers: list[Seen], num_samples: int
) -> dict[str, object]:
    started_at = time.monotonic()
    tasks = [
        asyncio.create_task(_view(service.port, job_id, tokens[index // STREAMS_PER_PERSON], viewer))
        for index, viewer in enumerate(viewers)
    ]
    arrived = asyncio.create_task(_all_arrived(viewers))
    await asyncio.wait([arrived, *tasks], return_when=asyncio.FIRST_COMPLETED)
    if not arrived.done():
        raise HeadroomError(f"a stream ended before its snapshot: {next(task for task in tasks if task.done())}")
    connected_s = time.monotonic() - started_at
    before_s, began_at = service.processor_s("web"), time.monotonic()
    pace = {"num_samples": num_samples, "per_second": PER_SECOND, "first_step": EARLIER_POINTS + 1}
    written = await asyncio.to_thread(service.ask, "measure", job_id=job_id, **pace)
    await asyncio.sleep(1)
    web_share = (service.processor_s("web") - before_s) / (time.monotonic() - began_at)
    left_at = time.monotonic()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(wait_for, lambda: _num_viewers(service, tokens[0]) == 0, what="viewers to be gone")
    return {
        "all_gone_s": round(time.monotonic() - left_at, 2),
        "web_after_bytes": service.memory_bytes("VmRSS"),
        "all_connected_s": round(connected_s, 2),
        "web_processor_share": round(web_share, 3),
        "num_dropped_by_wire": written["num_dropped"],
    }


async def _all_arrived(viewers: list[Seen]) -> None:
    for viewer in viewers:
        await viewer.has_snapshot.wait()


def _num_viewers(service: LiveService, token: str) -> float:
    answer = httpx.get(
        f"{service.url}/metrics", headers={"Authorization": f"Bearer {token}"}, timeout=30, trust_env=False
    )
    line = next(line for line in answer.text.splitlines() if line.startswith("headroom_stream_viewers "))
    return float(line.split()[1])


async def _view(port: int, job_id: str, token: str, seen: Seen) -> None:
    began_at = time.time()
    reader, writer = await asyncio.open_connection(HOST, port, limit=_LINE_LIMIT_BYTES)
    head = (
        f"GET /api/v1/jobs/{job_id}/events HTTP/1.1\r\nHost: {HOST}:{port}\r\n"
        f"Accept: text/event-stream\r\nAuthorization: Bearer {token}\r\n\r\n"
    )
    writer.write(head.encode())
    try:
        event = ""
        # each event is one chunk of the answer; the lines between them that hold the chunks' sizes mean nothing here
        while line := await reader.readline():
            arrived_at = time.time()
            if line.startswith(b"event: "):
                event = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                if event == "snapshot" and not seen.snapshot_ms:
                    seen.snapshot_ms = 1000 * (arrived_at - began_at)
                _take(seen, event, line[6:], arrived_at)
    finally:
        writer.close()


def _take(seen: Seen, event: str, data: bytes, arrived_at: float) -> None:
    if event == "snapshot":
        seen.has_snapshot.set()
    elif event == "gap":
        seen.num_gaps += 1
    elif event == "sample":
        sample: dict[str, Any] = json.loads(data)
        seen.steps.add(sample["step"])
        seen.latencies_ms.append(1000 * (arrived_at - sample["time_s"]))


def _at(ordered: list[float], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else float("nan")
