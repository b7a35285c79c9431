"""Messages to webhooks: what makes one, how it is signed, what happens when nobody answers."""

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone
from pytest_django import Settings

from optimizer.base.errors import InvalidInput
from tests.webapp.webhooks.receiver import Receiver
from webapp.attempts.claiming import claim_job
from webapp.attempts.records import record_started
from webapp.catalog.models import Machine
from webapp.jobs.actions import cancel_job
from webapp.jobs.models import Job
from webapp.webhooks import sending
from webapp.webhooks.actions import create_webhook, renew_secret, replay, send_test, set_active
from webapp.webhooks.models import Delivery, State, Webhook
from webapp.webhooks.sending import Sender


@pytest.fixture
def receiver(settings: Settings) -> Iterator[Receiver]:
    settings.HEADROOM_WEBHOOK_NETWORKS = ["127.0.0.0/8"]
    server = Receiver()
    yield server
    server.close()


@pytest.fixture
def hook(ada: User, receiver: Receiver) -> Any:
    """The webhook of ada's own project, with its secret beside it."""
    row: Any
    row, secret = create_webhook(ada, ada.home_project, url=receiver.url, events=[])
    row.secret = secret
    return row


def due_now() -> None:
    Delivery.objects.update(next_try_at=timezone.now() - timedelta(seconds=1))


def verifies(headers: Any, body: bytes, secret: str) -> bool:
    """Verify a signature as a Standard Webhooks library does."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return hmac.compare_digest(headers["webhook-signature"], f"v1,{expected}")


def test_each_move_of_a_job_is_one_message(hook: Any, make_job: Callable[..., Job], machine: Machine) -> None:
    job = make_job()
    attempt = claim_job(worker="w", machine=machine)
    record_started(attempt, pid=1)
    assert list(Delivery.objects.order_by("pk").values_list("event", flat=True)) == ["job.created", "job.started"]
    body = json.loads(Delivery.objects.order_by("pk").last().body)
    assert (body["type"], body["data"]["id"], body["data"]["state"]) == ("job.started", job.pk, "running")


def test_a_webhook_hears_of_its_own_project_and_of_what_it_asked_for_only(
    hook: Any, ada: User, eve: User, receiver: Receiver, make_job: Callable[..., Job]
) -> None:
    create_webhook(eve, eve.home_project, url=receiver.url, events=[])
    picky, _ = create_webhook(ada, ada.home_project, url=receiver.url, events=["job.cancelled"])
    job = make_job()
    cancel_job(job, mode="save", actor="user:ada")
    assert list(hook.deliveries.order_by("pk").values_list("event", flat=True)) == ["job.created", "job.cancelled"]
    assert list(picky.deliveries.values_list("event", flat=True)) == ["job.cancelled"]
    assert Delivery.objects.count() == 3


def test_a_message_is_signed_so_that_its_receiver_can_verify_it(hook: Any, receiver: Receiver) -> None:
    delivery = send_test(hook)
    assert Sender().send_due() == [delivery.pk]
    [(headers, body)] = receiver.heard
    assert verifies(headers, body, hook.secret)
    assert not verifies(headers, body + b" ", hook.secret)
    assert headers["webhook-id"] == delivery.pk
    delivery.refresh_from_db()
    assert (delivery.state, delivery.status_code, delivery.num_tries) == (State.DELIVERED, 200, 1)


def test_a_renewed_secret_signs_and_the_one_before_no_longer_does(hook: Any, receiver: Receiver) -> None:
    secret = renew_secret(hook)
    send_test(hook)
    Sender().send_due()
    [(headers, body)] = receiver.heard
    assert verifies(headers, body, secret)
    assert not verifies(headers, body, hook.secret)


def test_the_secret_is_not_in_the_database(hook: Any) -> None:
    key = base64.b64decode(hook.secret.removeprefix("whsec_"))
    assert hook.secret not in str(Webhook.objects.values().get())
    assert key.hex() not in str(Webhook.objects.values().get())


def test_what_fails_is_tried_again_later_and_then_delivered(hook: Any, receiver: Receiver) -> None:
    receiver.answers = [500, 200]
    delivery = send_test(hook)
    assert Sender().send_due() == []
    delivery.refresh_from_db()
    assert (delivery.state, delivery.status_code, delivery.trouble) == (State.PENDING, 500, "an answer")
    assert timedelta(seconds=2) < delivery.next_try_at - timezone.now() <= timedelta(seconds=5)
    assert Sender().send_due() == []  # not due yet
    due_now()
    assert Sender().send_due() == [delivery.pk]
    assert [headers["webhook-id"] for headers, _ in receiver.heard] == [delivery.pk] * 2


def test_after_its_last_try_a_message_is_given_up(hook: Any, receiver: Receiver) -> None:
    receiver.answers = [503]
    delivery = send_test(hook)
    for _ in range(len(sending.WAITS_S) + 1):
        due_now()
        Sender().send_due()
    delivery.refresh_from_db()
    assert (delivery.state, delivery.num_tries, delivery.next_try_at) == (State.FAILED, 8, None)


def test_a_receiver_that_is_gone_is_left_alone(hook: Any, receiver: Receiver) -> None:
    receiver.answers = [410]
    send_test(hook)
    Sender().send_due()
    assert not Webhook.objects.get(pk=hook.pk).is_active


def test_a_receiver_that_is_not_there_is_recorded_in_the_log(hook: Any) -> None:
    Webhook.objects.update(url="http://127.0.0.1:9/")  # the port of "discard", where nobody listens
    delivery = send_test(Webhook.objects.get(pk=hook.pk))
    Sender().send_due()
    delivery.refresh_from_db()
    assert delivery.status_code is None
    assert delivery.trouble.startswith("ConnectError")


def test_a_redirect_is_not_followed(hook: Any, receiver: Receiver) -> None:
    receiver.answers, receiver.location = [302], receiver.url
    send_test(hook)
    assert Sender().send_due() == []
    assert len(receiver.heard) == 1


def test_what_one_process_is_sending_no_other_takes(hook: Any) -> None:
    delivery = send_test(hook)
    taken = sending.take(hook.pk)
    assert taken is not None
    assert taken.pk == delivery.pk
    assert sending.take(hook.pk) is None


def test_one_held_back_gets_nothing_until_it_is_active_again(hook: Any, receiver: Receiver) -> None:
    delivery = send_test(hook)
    set_active(hook, is_active=False)
    assert Sender().send_due() == []
    set_active(hook, is_active=True)
    assert Sender().send_due() == [delivery.pk]


def test_a_replay_sends_the_same_body_under_an_id_of_its_own(hook: Any, receiver: Receiver) -> None:
    first = send_test(hook)
    Sender().send_due()
    again = replay(first)
    assert Sender().send_due() == [again.pk]
    (_, body), (headers, same) = receiver.heard
    assert (body, headers["webhook-id"]) == (same, again.pk)


def test_a_month_later_the_log_is_forgotten(hook: Any) -> None:
    old, new = send_test(hook), send_test(hook)
    Delivery.objects.filter(pk=old.pk).update(created_at=timezone.now() - timedelta(days=31), state=State.FAILED)
    assert sending.forget_old() == 1
    assert list(Delivery.objects.values_list("pk", flat=True)) == [new.pk]


def test_an_unknown_event_is_refused(ada: User) -> None:
    with pytest.raises(InvalidInput, match=r"events names 'job\.exploded'; allowed: job\.created"):
        create_webhook(ada, ada.home_project, url="https://example.org/", events=["job.exploded"])


def test_an_address_in_a_private_network_is_refused_at_once(ada: User) -> None:
    with pytest.raises(InvalidInput, match=r"is a private address"):
        create_webhook(ada, ada.home_project, url="https://10.0.0.1/", events=[])
