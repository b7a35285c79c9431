"""Notices for people: the sentence, a channel, a mail by a real server on loopback."""

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from django.contrib.auth.models import User
from pytest_django import Settings

from optimizer.base.errors import InvalidInput
from tests.webapp.webhooks.receiver import Receiver
from webapp.catalog.models import Machine
from webapp.jobs.actions import cancel_job
from webapp.jobs.models import Job
from webapp.webhooks.actions import create_webhook, queue_job_events, send_test
from webapp.webhooks.models import Delivery, State
from webapp.webhooks.notices import write_notice
from webapp.webhooks.sending import Sender

ENDED = {
    "id": "job_1",
    "name": "my\nrun",
    "message": "The device's budget was too small.",
    "step": 40,
    "num_steps": 100,
    "summary": {"loss": 3.25, "device_peak_bytes": 105 << 20},
    "predicted_peak_bytes": 104 << 20,
    "started_at": "2026-11-24T10:00:00+00:00",
    "finished_at": "2026-11-24T12:05:00+00:00",
}


class MailServer:
    """``taken``: sender, recipients and text of each mail; ``refuses``: the answer to every recipient, where it is set."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, list[str], str]] = []
        self.refuses = ""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._controller = Controller(self, hostname="127.0.0.1", port=self.port)
        self._controller.start()

    async def handle_RCPT(self, server: Any, session: Any, envelope: Any, address: str, options: Any) -> str:
        envelope.rcpt_tos.append(address)
        return self.refuses or "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.taken.append((envelope.mail_from, envelope.rcpt_tos, envelope.content.decode()))
        return "250 taken"

    def close(self) -> None:
        self._controller.stop()


@pytest.fixture
def mail(settings: Settings) -> Iterator[MailServer]:
    server = MailServer()
    settings.HEADROOM_EMAIL_URL = f"smtp://127.0.0.1:{server.port}"
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", server.port
    settings.EMAIL_USE_TLS = settings.EMAIL_USE_SSL = False
    settings.DEFAULT_FROM_EMAIL = "headroom@example.org"
    yield server
    server.close()


def test_a_sentence_says_how_it_ended_and_where_to_look(settings: Settings) -> None:
    settings.HEADROOM_PUBLIC_URL = "https://gpu.example.org/"
    subject, text = write_notice("job.failed", ENDED)
    assert subject == "my run failed"
    assert text == (
        "my run failed after 2 h 5 min. The device's budget was too small. Step 40 of 100, loss 3.250. "
        "Peak 105 MiB of device memory, predicted 104 MiB.\nhttps://gpu.example.org/jobs/job_1/"
    )
    settings.HEADROOM_PUBLIC_URL = ""
    assert write_notice("job.started", ENDED) == ("my run has started", "my run has started.")


def test_people_hear_of_endings_unless_they_ask_for_more(ada: User, mail: MailServer, make_job: Callable[..., Job]) -> None:
    row, secret = create_webhook(ada, ada.home_project, url="ada@example.org", events=[])
    assert (row.kind, secret) == ("email", "")
    job = make_job()
    assert not Delivery.objects.exists()
    cancel_job(job, actor="user:ada", mode="discard")
    assert [delivery.event for delivery in Delivery.objects.all()] == ["job.cancelled"]


def test_a_mail_arrives_once_with_an_id_of_its_own(ada: User, mail: MailServer) -> None:
    row, _ = create_webhook(ada, ada.home_project, url="ada@example.org", events=[])
    delivery = send_test(row)
    assert Sender().send_due() == [delivery.pk]
    [(sender, recipients, text)] = mail.taken
    assert (sender, recipients) == ("headroom@example.org", ["ada@example.org"])
    assert "Subject: A test of Headroom's notices" in text
    assert f"Message-ID: <{delivery.pk}@example.org>" in text
    assert Sender().send_due() == []
    delivery.refresh_from_db()
    assert (delivery.state, delivery.status_code) == (State.DELIVERED, 250)


def test_a_mail_that_is_refused_is_tried_again_and_its_reason_kept(ada: User, mail: MailServer) -> None:
    row, _ = create_webhook(ada, ada.home_project, url="ada@example.org", events=[])
    delivery = send_test(row)
    mail.refuses = "550 no such user"
    assert Sender().send_due() == []
    delivery.refresh_from_db()
    assert (delivery.state, delivery.status_code, delivery.trouble) == (State.PENDING, 550, "no such user")


def test_a_server_that_is_away_is_a_trouble_and_no_fault(ada: User, mail: MailServer, settings: Settings) -> None:
    row, _ = create_webhook(ada, ada.home_project, url="ada@example.org", events=[])
    delivery = send_test(row)
    settings.EMAIL_PORT = 1
    assert Sender().send_due() == []
    delivery.refresh_from_db()
    assert delivery.state == State.PENDING
    assert "refused" in delivery.trouble


@pytest.mark.parametrize(
    ("url", "changes", "why"),
    [
        ("ada@example.org", {"HEADROOM_EMAIL_URL": ""}, "this service sends no mail"),
        ("ada@", {}, "it is no mail address"),
        ("ada@example.org\nBcc: x@y.z", {}, "it is no mail address"),
        ("ada@example.org", {"HEADROOM_EMAIL_DOMAINS": ["example.com"]}, "its domain is not allowed"),
    ],
)
def test_an_address_that_cannot_be_mailed_is_refused(
    ada: User, mail: MailServer, settings: Settings, url: str, changes: dict[str, Any], why: str
) -> None:
    for name, value in changes.items():
        setattr(settings, name, value)
    with pytest.raises(InvalidInput, match=why):
        create_webhook(ada, ada.home_project, url=url, events=[])


def test_a_channel_gets_a_sentence_and_its_address_is_not_shown(ada: User, settings: Settings, machine: Machine) -> None:
    settings.HEADROOM_WEBHOOK_NETWORKS = ["127.0.0.0/8"]
    receiver = Receiver()
    try:
        row, secret = create_webhook(ada, ada.home_project, url=receiver.url, events=[], kind="slack")
        send_test(row)
        assert len(Sender().send_due()) == 1
    finally:
        receiver.close()
    [(headers, body)] = receiver.heard
    assert json.loads(body) == {"text": "A test of this webhook."}
    assert "webhook-signature" not in headers
    assert secret == ""
    assert row.shown_url.endswith("/…hook")
    assert str(row) == row.shown_url
    slack, _ = create_webhook(ada, ada.home_project, url="https://hooks.slack.com/services/T0/B0/secretsecret", events=[])
    assert (slack.kind, slack.shown_url) == ("slack", "https://hooks.slack.com/…cret")


def test_a_job_s_name_calls_nobody_in_a_channel(ada: User, settings: Settings) -> None:
    settings.HEADROOM_WEBHOOK_NETWORKS = ["127.0.0.0/8"]
    create_webhook(ada, ada.home_project, url="http://127.0.0.1:1/hook", events=[], kind="slack")
    data = {**ENDED, "name": "<!channel> & <http://bad.example|report>"}
    queue_job_events(project_id=ada.home_project.pk, event="job.failed", data=[data])
    text = json.loads(Delivery.objects.get().body)["text"]
    assert text.startswith("&lt;!channel&gt; &amp; &lt;http://bad.example|report&gt; failed after 2 h 5 min.")
    assert not {"<", ">"} & set(text)
