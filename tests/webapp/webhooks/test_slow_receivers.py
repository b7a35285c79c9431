"""Receivers of webhooks that take their time: each costs its own messages time, and nobody else's."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection, connections, transaction
from django.db.models.functions import Now
from pytest_django import Settings

from tests.webapp.conftest import make_person
from tests.webapp.webhooks.receiver import Receiver
from tests.worker.processes import wait_for
from webapp.webhooks import posting
from webapp.webhooks.actions import create_webhook, send_test
from webapp.webhooks.models import Delivery, State, Webhook
from webapp.webhooks.sending import Sender, take
from webapp.webhooks.targets import Target, find_target


class DrippingReceiver:
    """Sends one line of an answer's headers, or one byte of its body, every moment, and ends the answer after a minute."""

    def __init__(self, *, in_body: bool = False) -> None:
        self.num_begun = 0
        self._in_body = in_body
        self._hurries = threading.Event()
        self._has_ended = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=200)
        self._server.settimeout(0.05)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.getsockname()[1]}/hook"

    def hurry(self) -> None:
        """From now on answer at once."""
        self._hurries.set()

    def close(self) -> None:
        self._hurries.set()
        self._has_ended.set()
        for thread in self._threads:
            thread.join()
        self._server.close()

    def _accept(self) -> None:
        while not self._has_ended.is_set():
            try:
                caller, _ = self._server.accept()
            except TimeoutError:
                continue
            self.num_begun += 1
            self._threads.append(threading.Thread(target=self._drip, args=(caller,)))
            self._threads[-1].start()

    def _drip(self, caller: socket.socket) -> None:
        until_s = time.monotonic() + 60
        with caller:
            try:
                caller.recv(65536)
                caller.sendall(b"HTTP/1.1 200 OK\r\n" + (b"Content-Length: 100000\r\n\r\n" if self._in_body else b""))
                while time.monotonic() < until_s and not self._hurries.wait(0.05):
                    caller.sendall(b"x" if self._in_body else b"X-Slow: 1\r\n")
                caller.sendall(b"Content-Length: 0\r\n\r\n")
            except OSError:
                return  # the caller has had enough


@pytest.fixture
def opened(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Any]]:
    """Closes receivers on loopback after the test; a call may last 3 s."""
    settings.HEADROOM_WEBHOOK_NETWORKS = ["127.0.0.0/8"]
    monkeypatch.setattr(posting, "TIMEOUT_S", 3.0)
    made: list[Any] = []

    def keep(receiver: Any) -> Any:
        made.append(receiver)
        return receiver

    yield keep
    for receiver in made:
        receiver.close()


def make_hook(person: User, url: str) -> Webhook:
    return create_webhook(person, person.home_project, url=url, events=[])[0]


def note_begun(slow: DrippingReceiver, *, until: Receiver) -> list[int]:
    """Will hold how many calls the slow one had when the other's message came; the slow one then answers at once."""
    num_begun: list[int] = []

    def note() -> None:
        num_begun.append(slow.num_begun)
        slow.hurry()

    until.on_message = note
    return num_begun


def test_an_answer_whose_headers_drip_is_given_up_at_the_deadline(ada: User, opened: Callable[[Any], Any]) -> None:
    delivery = send_test(make_hook(ada, opened(DrippingReceiver()).url))
    assert Sender().send_due() == []
    delivery.refresh_from_db()
    assert (delivery.state, delivery.status_code, delivery.trouble) == (State.PENDING, None, "no answer within 3 s")


def test_an_answer_whose_status_came_in_time_counts_though_its_body_drips(ada: User, opened: Callable[[Any], Any]) -> None:
    delivery = send_test(make_hook(ada, opened(DrippingReceiver(in_body=True)).url))
    assert Sender().send_due() == [delivery.pk]
    delivery.refresh_from_db()
    assert (delivery.state, delivery.status_code) == (State.DELIVERED, 200)


def test_a_project_whose_many_messages_are_due_leaves_room_for_another_s(
    ada: User, eve: User, opened: Callable[[Any], Any]
) -> None:
    slow, quick = opened(DrippingReceiver()), opened(Receiver())
    hook = make_hook(ada, slow.url)
    for _ in range(64):
        send_test(hook)
    delivery = send_test(make_hook(eve, quick.url))
    begun_before = note_begun(slow, until=quick)
    assert delivery.pk in Sender().send_due()
    assert begun_before[0] <= 8


def test_a_webhook_of_the_same_project_waits_for_no_slow_one(ada: User, opened: Callable[[Any], Any]) -> None:
    slow, quick = opened(DrippingReceiver()), opened(Receiver())
    hook = make_hook(ada, slow.url)
    for _ in range(20):
        send_test(hook)
    delivery = send_test(make_hook(ada, quick.url))
    begun_before = note_begun(slow, until=quick)
    assert delivery.pk in Sender().send_due()
    assert begun_before[0] <= 4


@pytest.mark.django_db(transaction=True)
def test_what_comes_due_while_a_slow_answer_is_waited_for_is_sent_before_that_has_ended(
    opened: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "TIMEOUT_S", 20.0)
    slow, quick = opened(DrippingReceiver()), opened(Receiver())
    waiting = send_test(make_hook(make_person("ada"), slow.url))
    hook = make_hook(make_person("eve"), quick.url)
    arrived = threading.Event()
    quick.on_message = arrived.set

    def reconcile() -> None:
        try:
            Sender().send_due()
        finally:
            connections.close_all()

    reconciler = threading.Thread(target=reconcile)
    reconciler.start()
    wait_for(lambda: slow.num_begun, what="the call of the slow receiver")
    send_test(hook)
    assert arrived.wait(15)
    waiting.refresh_from_db()
    assert waiting.tried_at is not None
    assert waiting.duration_ms is None  # it is still being waited for
    slow.hurry()
    reconciler.join()


def test_a_name_server_that_does_not_answer_is_given_up_and_what_it_says_later_is_not_called(
    ada: User, opened: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "TIMEOUT_S", 0.2)
    receiver, has_answered = opened(Receiver()), threading.Event()
    delivery = send_test(make_hook(ada, receiver.url))

    def find_late(url: str) -> Target:
        has_answered.wait(60)
        return find_target(url)

    monkeypatch.setattr(posting, "find_target", find_late)
    assert Sender().send_due() == []
    delivery.refresh_from_db()
    assert (delivery.state, delivery.trouble) == (State.PENDING, "no answer within 0.2 s")
    [thread] = [thread for thread in threading.enumerate() if thread.name == f"webhook {delivery.pk}"]
    has_answered.set()
    thread.join(60)
    assert receiver.heard == []


@pytest.mark.django_db(transaction=True)
def test_two_reconcilers_hold_only_what_they_send_now_and_send_no_message_twice(
    opened: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "TIMEOUT_S", 50.0)
    ada, late, may_answer = make_person("ada"), opened(Receiver()), threading.Event()
    late.on_message = lambda: may_answer.wait(40)
    hook = make_hook(ada, late.url)
    made = sorted(send_test(hook).pk for _ in range(20))

    def reconcile() -> None:
        try:
            until_s = time.monotonic() + 100
            while Delivery.objects.filter(state=State.PENDING).exists() and time.monotonic() < until_s:
                Sender().send_due()
        finally:
            connections.close_all()

    reconcilers = [threading.Thread(target=reconcile) for _ in range(2)]
    for thread in reconcilers:
        thread.start()
    # all of them together may take longer than one is held: those whose turn has not come stay due
    wait_for(lambda: len(late.heard) == 4, what="two calls of each reconciler")
    assert Delivery.objects.filter(tried_at=None, num_tries=0, next_try_at__lte=Now()).count() == len(made) - 4
    may_answer.set()
    for thread in reconcilers:
        thread.join()
    assert sorted(headers["webhook-id"] for headers, _ in late.heard) == made
    assert json.loads(late.heard[0][1])["type"] == "webhook.test"


@pytest.mark.django_db(transaction=True)
def test_a_message_that_another_process_takes_at_this_moment_is_not_taken_twice(opened: Callable[[Any], Any]) -> None:
    hook = make_hook(make_person("ada"), opened(Receiver()).url)
    send_test(hook)
    updates, taken = threading.Event(), []

    def signal(execute: Callable[..., Any], sql: str, *arguments: Any) -> Any:
        if sql.startswith("UPDATE"):
            updates.set()
        return execute(sql, *arguments)

    def take_beside() -> None:
        try:
            with connection.execute_wrapper(signal):
                taken.append(take(hook.pk))
        finally:
            connections.close_all()

    other = threading.Thread(target=take_beside)
    with transaction.atomic():
        assert take(hook.pk) is not None
        other.start()  # it finds the message due, since this transaction has not ended, and waits for the row
        assert updates.wait(10)
        time.sleep(0.2)
    other.join()
    assert taken == [None]
