"""Pages of webhooks: a secret is shown once, the log says how each message went, every button does what it says."""

import pytest
from django.contrib.auth.models import User
from django.test import Client

from webapp.webhooks.actions import create_webhook, send_test
from webapp.webhooks.models import Delivery, Webhook


@pytest.fixture
def address(ada: User) -> str:
    return f"/projects/{ada.home_project.pk}/webhooks/"


@pytest.fixture
def webhook(ada: User) -> Webhook:
    return create_webhook(ada, ada.home_project, url="https://example.org/hook", events=["job.failed"])[0]


def test_a_new_webhooks_secret_is_shown_once_and_never_kept_by_a_browser(browser: Client, address: str) -> None:
    answer = browser.post(address, {"url": "https://example.org/hook", "events": ["job.failed", "job.succeeded"]})
    secret = answer.context["secret"]
    assert secret.startswith("whsec_")
    assert answer["Cache-Control"] == "no-store"
    assert Webhook.objects.get().events == ["job.succeeded", "job.failed"]
    page = browser.get(address).content.decode()
    assert "https://example.org/hook" in page
    assert secret not in page


def test_an_address_that_may_not_be_called_is_refused_beside_its_field(browser: Client, address: str) -> None:
    page = browser.post(address, {"url": "https://127.0.0.1/"}).content.decode()
    assert "is a private address" in page
    assert "HEADROOM_WEBHOOK_NETWORKS" in page
    assert not Webhook.objects.exists()


def test_a_test_and_a_replay_are_in_the_log(browser: Client, webhook: Webhook) -> None:
    page = f"/webhooks/{webhook.pk}/"
    assert browser.post(f"{page}test/")["Location"] == page
    delivery = Delivery.objects.get()
    assert browser.post(f"/deliveries/{delivery.pk}/replay/")["Location"] == page
    text = browser.get(page).content.decode()
    assert text.count("webhook.test</th>") + text.count("webhook.test <span") == 2
    assert "again" in text


def test_the_log_shows_how_the_last_try_went(browser: Client, webhook: Webhook) -> None:
    send_test(webhook)
    Delivery.objects.update(state="failed", num_tries=8, status_code=503, trouble="Service Unavailable", duration_ms=31)
    text = browser.get(f"/webhooks/{webhook.pk}/").content.decode()
    assert "Service Unavailable" in text
    assert '<span class="num">503</span> in 31 ms' in text


def test_a_webhook_is_held_back_made_active_given_another_secret_and_deleted(
    browser: Client, webhook: Webhook, address: str
) -> None:
    page = f"/webhooks/{webhook.pk}/"
    for is_active in (False, True):
        browser.post(f"{page}switch/")
        assert Webhook.objects.get().is_active is is_active
    assert browser.post(f"{page}secret/").context["secret"].startswith("whsec_")
    assert Webhook.objects.get().secret_number == 2
    assert browser.post(f"{page}delete/")["Location"] == address
    assert not Webhook.objects.exists()


def test_the_log_is_shown_a_page_at_a_time(browser: Client, webhook: Webhook) -> None:
    for _ in range(60):
        send_test(webhook)
    page = f"/webhooks/{webhook.pk}/"
    first = browser.get(page)
    assert len(first.context["deliveries"]) == 50
    assert len(browser.get(f"{page}?before={first.context['older']}").context["deliveries"]) == 10
