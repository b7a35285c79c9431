"""The benchmark of load: answers read off a connection, percentiles, sums, goals, addresses."""

import asyncio

import pytest

from benchmarks.load.client import Answer, read_answer
from benchmarks.load.command import summarize as judge
from benchmarks.load.reads import fill_in, list_routes
from benchmarks.load.submissions import percentile, summarize


def read(*parts: bytes) -> list[tuple[int, float | None]]:
    async def read_all() -> list[tuple[int, float | None]]:
        reader = asyncio.StreamReader()
        reader.feed_data(b"".join(parts))
        reader.feed_eof()
        return [await read_answer(reader) for _ in parts]

    return asyncio.run(read_all())


def test_answers_on_one_connection_are_read_one_by_one() -> None:
    taken = b'HTTP/1.1 201 Created\r\ncontent-length: 11\r\n\r\n{"id":"\r\n"}'
    refused = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 2\r\n\r\n{}"
    assert read(taken, refused, taken) == [(201, None), (503, 1.0), (201, None)]


@pytest.mark.parametrize("cut", [b"", b"HTTP/1.1 201 Created\r\ncontent-length: 11\r\n\r\n{"])
def test_a_connection_that_ends_early_is_no_answer(cut: bytes) -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        read(cut)


def test_a_percentile_is_one_of_the_measurements() -> None:
    times = [float(value) for value in range(1, 101)]
    assert (percentile(times, 0.5), percentile(times, 0.99), percentile(times, 1.0)) == (51.0, 100.0, 100.0)
    assert percentile([], 0.5) is None


def test_refusals_are_neither_taken_nor_faults() -> None:
    answers = [
        *(Answer(status=201, ms=float(ms)) for ms in (20, 10, 30)),
        Answer(status=503, ms=2.0, retry_after_s=1.0),
        Answer(status=429, ms=4.0),
        Answer(status=500, ms=9.0),
        Answer(status=0, ms=0.0),
    ]
    assert summarize(answers, seconds=2.0) == {
        "taken_per_s": 1.5,
        "p50_ms": 20.0,
        "p99_ms": 30.0,
        "worst_ms": 30.0,
        "num_refused": 2,
        "refused_p99_ms": 4.0,
        "num_without_retry_after": 1,
        "num_faults": 2,
        "statuses": {"0": 1, "201": 3, "429": 1, "500": 1, "503": 1},
    }


def test_goals_take_the_best_rate_and_the_worst_times() -> None:
    rows = [
        {"what": "submissions", "taken_per_s": 40.0, "p99_ms": 30.0, "num_without_retry_after": 0, "num_faults": 0},
        {"what": "submissions", "taken_per_s": 150.0, "p99_ms": 301.0, "num_without_retry_after": 0, "num_faults": 0},
        {"what": "overload", "refused_p99_ms": 20.0, "num_without_retry_after": 1, "num_faults": 0},
        {"what": "pages", "worst_p95_ms": 290.0, "num_faults": 0},
    ]
    goals = judge(rows, database="sqlite")
    assert {name: (entry["value"], entry["met"]) for name, entry in goals.items()} == {
        "offers taken per second, empty queue": (150.0, True),
        "offer taken, empty queue, p99 (ms)": (301.0, False),
        "offers taken per second, 20,000 queued": (None, False),
        "offer taken, 20,000 queued, p99 (ms)": (None, False),
        "refusal under overload, p99 (ms)": (20.0, True),
        "refusals without Retry-After": (1, False),
        "5xx but 503, and lost connections": (0, True),
        "pages with 20,000 queued, slowest p95 (ms)": (290.0, True),
        "routes with 20,000 queued, slowest p95 (ms)": (None, False),
    }
    assert not judge(rows, database="postgresql")["offers taken per second, empty queue"]["met"]


def test_addresses_take_the_ids_that_are_there() -> None:
    ids = {"job_id": "job_1", "tab": "plan", "model_id": "mdl_1"}
    assert fill_in("/jobs/<slug:job_id>/tabs/<slug:tab>/", ids) == "/jobs/job_1/tabs/plan/"
    assert fill_in("/api/v1/uploads/{upload_id}", ids) == "/api/v1/uploads/{upload_id}"
    required = {"name": "model", "in": "query", "required": True}
    paths = {"/jobs": {"get": {}, "post": {}}, "/preview": {"get": {"parameters": [required]}}, "/plans": {"post": {}}}
    assert list_routes({"paths": paths}) == {"/jobs": "/jobs", "/preview": "/preview?model={model}"}
