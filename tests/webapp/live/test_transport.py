"""The worker's way to the broker, on a real Valkey."""

import contextlib
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu.asynchronous import Hub
from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.message import Message
from kombu.messaging import Consumer
from kombu.transport import TRANSPORT_ALIASES

from tests.valkey import Valkey
from webapp.wire.broker import broker_url
from webapp.wire.transport import use_patient_transport

OPEN_FILES = Path("/proc/self/fd")
QUEUE = Queue("hints", Exchange("hints", "direct"), routing_key="hints")
UNREADABLE = (b"", b"\xff\xfe", b"{}", b"[]", b"7", b'{"body": "e30=", "headers": {}, "properties": {}}', b"null")


@pytest.fixture(scope="module")
def broker() -> Iterator[Valkey]:
    valkey = Valkey()
    yield valkey
    valkey.close()


@pytest.fixture
def connection(broker: Valkey, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    monkeypatch.setitem(TRANSPORT_ALIASES, "redis", TRANSPORT_ALIASES["redis"])
    monkeypatch.setattr("kombu.transport._transport_cache", {})  # other tests of this process have connected before
    use_patient_transport()
    with Connection(broker_url(broker.url)) as connection:
        yield connection


def send(connection: Connection, job: str) -> None:
    connection.Producer().publish(job, exchange=QUEUE.exchange, routing_key=QUEUE.routing_key, declare=[QUEUE], serializer="json")


def queue_of(connection: Connection) -> Any:
    """A client of the broker's server, past Kombu."""
    return getattr(connection.default_channel, "client")  # noqa: B009


def receive_all(connection: Connection) -> list[str]:
    received: list[str] = []

    def take(body: str, message: Message) -> None:
        received.append(body)
        message.ack()

    with Consumer(connection, [QUEUE], callbacks=[take], accept=["json"]), contextlib.suppress(socket.timeout):
        while True:
            connection.drain_events(timeout=0.5)
    return received


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_message_that_cannot_be_read_is_dropped_and_the_next_one_is_received(
    connection: Connection, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    send(connection, "job_1")
    queue_of(connection).rpush(QUEUE.name, text)  # the next to be received
    with caplog.at_level(logging.WARNING):
        assert receive_all(connection) == ["job_1"]
    assert "cannot be read and is dropped" in caplog.text


def test_a_message_that_lacks_a_part_is_dropped(connection: Connection) -> None:
    send(connection, "job_1")
    client = queue_of(connection)
    whole = json.loads(client.rpop(QUEUE.name))
    for part in ("properties", "headers"):
        client.lpush(QUEUE.name, json.dumps({name: value for name, value in whole.items() if name != part}))
    send(connection, "job_2")
    assert receive_all(connection)[-1] == "job_2"


def test_a_broker_without_memory_costs_no_socket(
    connection: Connection, broker: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery makes a connection for each try and forgets those that fail here; garbage is not collected in the tests."""
    monkeypatch.setattr("webapp.wire.transport._PAUSE_AFTER_REFUSAL_S", 0)
    url, hub = broker_url(broker.url), Hub()
    connection.release()
    with broker.client() as client:
        client.config_set("maxmemory", 1)
        try:
            num_files = len(list(OPEN_FILES.iterdir()))
            for _ in range(5):
                tried = Connection(url)
                with pytest.raises(redis.ResponseError, match="maxmemory"):
                    tried.transport.register_with_event_loop(tried.connection, hub)
            assert len(list(OPEN_FILES.iterdir())) <= num_files
        finally:
            client.config_set("maxmemory", 0)
            hub.close()
