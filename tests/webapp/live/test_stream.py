"""The event stream of a job, over a real Valkey: snapshot, deltas, resume, loss of Redis, slow and departed clients."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from pytest_django import Settings

from tests.valkey import Valkey
from tests.webapp.attempts.attempts import DONE
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.records import record_samples
from webapp.jobs.models import Attempt, Job
from webapp.live import hub as hub_module
from webapp.live import slots as slots_module
from webapp.live import stream as stream_module
from webapp.live.record import from_database
from webapp.live.slots import num_viewers
from webapp.live.stream import full_limit, job_events
from webapp.wire.publish import publish, publish_all, report_gap, stream_key

pytestmark = pytest.mark.django_db(transaction=True)


def sample(step: int, loss: float = 1.0) -> dict[str, Any]:
    return {"kind": "step", "attempt": 1, "step": step, "time_s": 0.0, "loss": loss, "device_peak_bytes": 10}


class Client:
    """Reads one stream as a browser does; ``events`` are (kind, document, id)."""

    def __init__(self, user: User, job_id: str, *, last_event_id: str = "", project_id: str = "") -> None:
        self._source: Any = job_events(user, job_id, project_id=project_id, last_event_id=last_event_id)
        self._text = ""

    async def next(self, kind: str | None = None, *, within_s: float = 15.0) -> tuple[str, Any, str | None]:
        """The next event, of ``kind`` where one is named."""
        async with asyncio.timeout(within_s):
            while True:
                event = await self._next_of_any_kind()
                if kind is None or event[0] == kind:
                    return event

    async def rest(self) -> list[tuple[str, dict[str, Any], str]]:
        found = []
        async with asyncio.timeout(15):
            while True:
                try:
                    found.append(await self._next_of_any_kind())
                except StopAsyncIteration:
                    return found

    async def close(self) -> None:
        await self._source.aclose()

    async def _next_of_any_kind(self) -> tuple[str, dict[str, Any], str]:
        while True:
            while "\n\n" not in self._text:
                self._text += (await anext(self._source)).decode()
            block, _, self._text = self._text.partition("\n\n")
            fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
            if "event" in fields:
                return fields["event"], json.loads(fields["data"]), fields.get("id", "")


async def owner_of(attempt: Attempt) -> User:
    # by the program's own helper, which leaves no connection open in another thread
    return await from_database(lambda: User.objects.get(job=attempt.job_id))


async def test_a_stream_begins_with_a_snapshot_and_goes_on_with_what_is_published(
    running: Attempt, valkey: Valkey
) -> None:
    client = Client(await owner_of(running), running.job_id)
    kind, document, _ = await client.next()
    assert kind == "snapshot"
    assert document["job"]["state"] == "running"
    assert [record["step"] for record in document["metrics"]["steps"]] == [1]
    for step in (2, 3):
        assert await asyncio.to_thread(publish, running.job_id, "sample", sample(step))
    received = [await client.next("sample"), await client.next("sample")]
    assert [document["step"] for _, document, _ in received] == [2, 3]
    ids = [identifier for identifier, _ in valkey.client().xrange(stream_key(running.job_id))]
    assert [identifier for *_, identifier in received] == ids[-2:]
    await client.close()


async def test_several_samples_at_once_come_in_their_order(running: Attempt, valkey: Valkey) -> None:
    client = Client(await owner_of(running), running.job_id)
    await client.next("snapshot")
    assert await asyncio.to_thread(publish_all, running.job_id, "sample", [sample(step) for step in (2, 3, 4)])
    assert [(await client.next("sample"))[1]["step"] for _ in range(3)] == [2, 3, 4]
    await client.close()


async def test_a_resumed_stream_sends_exactly_what_was_missed(running: Attempt, valkey: Valkey) -> None:
    owner = await owner_of(running)
    client = Client(owner, running.job_id)
    await client.next("snapshot")
    await asyncio.to_thread(publish, running.job_id, "sample", sample(2))
    *_, last_id = await client.next("sample")
    await client.close()
    for step in (3, 4, 5):
        await asyncio.to_thread(publish, running.job_id, "sample", sample(step))
    resumed = Client(owner, running.job_id, last_event_id=last_id)
    received = [await resumed.next() for _ in range(3)]
    assert [(kind, document["step"]) for kind, document, _ in received] == [("sample", 3), ("sample", 4), ("sample", 5)]
    await resumed.close()


@pytest.mark.parametrize("last_event_id", ["1-1", "99999999999999999-0", "' OR 1=1", "-"])
async def test_an_id_that_the_stream_no_longer_has_begins_again_with_a_reset(
    running: Attempt, valkey: Valkey, last_event_id: str
) -> None:
    client = Client(await owner_of(running), running.job_id, last_event_id=last_event_id)
    assert (await client.next())[0] == "reset"
    assert (await client.next())[0] == "snapshot"
    await client.close()


async def test_the_end_of_the_job_ends_the_stream(running: Attempt, valkey: Valkey) -> None:
    client = Client(await owner_of(running), running.job_id)
    await client.next("snapshot")
    await asyncio.to_thread(finish_in_thread, running)
    kinds = [kind for kind, *_ in await client.rest()]
    assert kinds[-2:] == ["state", "done"]


async def test_a_job_that_has_ended_is_a_snapshot_and_done(running: Attempt, valkey: Valkey) -> None:
    await asyncio.to_thread(finish_in_thread, running)
    client = Client(await owner_of(running), running.job_id)
    events = await client.rest()
    assert [kind for kind, *_ in events] == ["snapshot", "done"]
    assert events[-1][1] == {"state": "succeeded", "reason": "done"}


async def test_without_redis_the_same_events_come_from_the_database_without_ids(running: Attempt) -> None:
    client = Client(await owner_of(running), running.job_id)
    assert (await client.next())[0] == "snapshot"
    await asyncio.to_thread(in_thread, record_samples, running, [sample(2)])
    _, document, identifier = await client.next("sample")
    assert (document["step"], identifier) == (2, "")
    await asyncio.to_thread(finish_in_thread, running)
    assert [(kind, identifier) for kind, _, identifier in await client.rest()] == [("state", ""), ("done", "")]


async def test_a_killed_redis_loses_no_point_and_ids_come_back_with_it(running: Attempt, valkey: Valkey) -> None:
    client = Client(await owner_of(running), running.job_id)
    await client.next("snapshot")
    await asyncio.to_thread(publish, running.job_id, "sample", sample(2))
    await client.next("sample")
    valkey.kill()
    await asyncio.to_thread(in_thread, record_samples, running, [sample(2), sample(3)])
    steps = []
    while 3 not in steps:
        _, document, identifier = await client.next("sample")
        steps.append(document["step"])
        assert identifier == ""
    await asyncio.to_thread(valkey.start)
    await client.next("gap", within_s=30)
    await asyncio.sleep(1.1)  # the publisher rests for a second after a failure, by design
    assert await asyncio.to_thread(publish, running.job_id, "sample", sample(4))
    while True:
        _, document, identifier = await client.next("sample")
        if document["step"] == 4 and identifier:
            break
    await client.close()


async def test_a_publisher_says_that_it_dropped_something(running: Attempt, valkey: Valkey) -> None:
    valkey.kill()
    assert not await asyncio.to_thread(publish_all, running.job_id, "sample", [sample(1), sample(2)])
    await asyncio.to_thread(valkey.start)
    await asyncio.sleep(1.1)  # see above
    assert await asyncio.to_thread(publish, running.job_id, "sample", sample(3))
    entries = [json.loads(fields["json"]) for _, fields in valkey.client().xrange(stream_key(running.job_id))]
    assert [entry["type"] for entry in entries] == ["gap", "sample"]
    assert entries[0]["data"] == {"num_dropped": 2}


async def test_a_gap_is_reported_if_nothing_else_is_sent(running: Attempt, valkey: Valkey) -> None:
    assert not await asyncio.to_thread(report_gap, running.job_id)
    valkey.kill()
    assert not await asyncio.to_thread(publish, running.job_id, "sample", sample(2))
    assert not await asyncio.to_thread(report_gap, running.job_id)
    await asyncio.to_thread(valkey.start)
    await asyncio.sleep(1.1)  # see above
    assert [await asyncio.to_thread(report_gap, running.job_id) for _ in range(2)] == [True, False]
    (entry,) = (json.loads(fields["json"]) for _, fields in valkey.client().xrange(stream_key(running.job_id)))
    assert (entry["type"], entry["data"]) == ("gap", {"num_dropped": 1})


async def test_a_client_that_does_not_keep_up_gets_a_gap(
    running: Attempt, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "QUEUE_LIMIT", 5)
    client = Client(await owner_of(running), running.job_id)
    await client.next("snapshot")
    client_hub = hub_module.hub_of_this_loop(valkey.url)
    for step in range(2, 40):
        await asyncio.to_thread(publish, running.job_id, "sample", sample(step))
    async with asyncio.timeout(10):
        while client_hub._positions[running.job_id] != await client_hub.last_id(running.job_id):
            await asyncio.sleep(0.05)
    assert (await client.next())[0] == "gap"
    assert (await client.next())[1]["step"] > 30
    await client.close()


async def test_many_clients_share_one_reader(running: Attempt, valkey: Valkey) -> None:
    owner = await owner_of(running)
    clients = [Client(owner, running.job_id) for _ in range(10)]
    for client in clients:
        await client.next("snapshot")
    await asyncio.to_thread(publish, running.job_id, "sample", sample(2))
    for client in clients:
        assert (await client.next("sample"))[1]["step"] == 2
    assert sum(task.get_name() == "live-hub" for task in asyncio.all_tasks()) == 1
    for client in clients:
        await client.close()


async def test_slots_are_given_back_also_by_clients_that_never_read(running: Attempt, valkey: Valkey) -> None:
    owner = await owner_of(running)
    for _ in range(3):
        job_events(owner, running.job_id)  # asked for and never started: no slot is taken
    client = Client(owner, running.job_id)
    await client.next("snapshot")
    assert num_viewers() == 1
    await client.close()
    assert num_viewers() == 0


@pytest.mark.parametrize("setting", ["HEADROOM_MAX_STREAMS_PER_PERSON", "HEADROOM_MAX_STREAMS_PER_PROJECT"])
async def test_the_streams_of_one_person_and_of_one_project_are_limited(
    running: Attempt, valkey: Valkey, settings: Settings, setting: str
) -> None:
    setattr(settings, setting, 1)
    owner = await owner_of(running)
    first = Client(owner, running.job_id, project_id="project_one")
    await first.next("snapshot")
    assert await full_limit(owner, project_id="project_one") == setting
    assert await Client(owner, running.job_id, project_id="project_one").rest() == []
    await first.close()
    again = Client(owner, running.job_id, project_id="project_one")
    await again.next("snapshot")
    await again.close()


async def test_another_person_and_another_project_have_streams_of_their_own(
    running: Attempt, valkey: Valkey, settings: Settings
) -> None:
    settings.HEADROOM_MAX_STREAMS_PER_PERSON, settings.HEADROOM_MAX_STREAMS_PER_PROJECT = 2, 1
    owner = await owner_of(running)
    first = Client(owner, running.job_id, project_id="project_one")
    await first.next("snapshot")
    assert await full_limit(owner, project_id="project_two") == ""
    assert await full_limit(User(pk=owner.pk + 1), project_id="project_one") == "HEADROOM_MAX_STREAMS_PER_PROJECT"
    await first.close()


async def test_streams_of_other_web_processes_count_until_their_minute_is_over(
    running: Attempt, valkey: Valkey, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.HEADROOM_MAX_STREAMS_PER_PERSON = 1
    monkeypatch.setattr(slots_module, "HELD_S", 3)
    owner = await owner_of(running)
    first = Client(owner, running.job_id)
    await first.next("snapshot")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(slots_module, "_open_here", Counter())  # as a process that carries none sees it
        assert await full_limit(owner, project_id="") == "HEADROOM_MAX_STREAMS_PER_PERSON"
        async with asyncio.timeout(10):  # and the first one, like a killed process, does not renew it
            while await full_limit(owner, project_id=""):
                await asyncio.sleep(0.1)
    await first.close()


async def test_a_stream_that_is_renewed_keeps_its_slot(
    running: Attempt, valkey: Valkey, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.HEADROOM_MAX_STREAMS_PER_PERSON = 1
    monkeypatch.setattr(slots_module, "HELD_S", 2)
    monkeypatch.setattr(slots_module, "RENEWED_EACH_S", 0.0)
    owner = await owner_of(running)
    first = Client(owner, running.job_id)
    await first.next("snapshot")
    for step in range(8):  # four seconds, twice what a slot is held for
        await asyncio.to_thread(publish, running.job_id, "sample", {"kind": "step", "step": step})
        await first.next("sample")
        await asyncio.sleep(0.5)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(slots_module, "_open_here", Counter())
            assert await full_limit(owner, project_id="") == "HEADROOM_MAX_STREAMS_PER_PERSON"
    await first.close()


async def test_a_person_who_may_no_longer_watch_is_cut_off(
    running: Attempt, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "RECHECK_S", 0.0)
    monkeypatch.setattr(stream_module, "HEARTBEAT_S", 0.1)
    owner = await owner_of(running)
    client = Client(owner, running.job_id)
    await client.next("snapshot")
    await from_database(lambda: User.objects.filter(pk=owner.pk).update(is_active=False))
    assert all(kind == "state" for kind, *_ in await client.rest())


async def test_an_end_whose_entry_was_lost_is_found_with_the_heartbeat(
    running: Attempt, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "HEARTBEAT_S", 0.2)
    client = Client(await owner_of(running), running.job_id)
    await client.next("snapshot")
    ended = {"state": "failed", "finished_at": running.started_at, "lease_until": None}
    await from_database(lambda: Job.objects.filter(pk=running.job_id).update(**ended))
    assert (await client.rest())[-1][0] == "done"


def in_thread(action: Callable[..., Any], *arguments: Any) -> Any:
    from django.db import connections

    try:
        return action(*arguments)
    finally:
        connections.close_all()


def finish_in_thread(attempt: Attempt) -> str:
    return in_thread(lambda: finish_attempt(attempt, result=DONE, exit_code=0))
