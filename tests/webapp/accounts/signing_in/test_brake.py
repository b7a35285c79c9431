"""The brake on guessing passwords: by real requests over the real server, and its counts over time."""

import asyncio
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest
from django.contrib.auth.models import User
from django.utils import timezone
from pytest_django import Settings

from tests.webapp.conftest import make_person
from tests.webapp.served import served
from webapp.accounts.models import AuditRecord, LoginCount
from webapp.accounts.signing_in import brake
from webapp.accounts.signing_in.brake import ADDRESS, LONGEST_WAIT, NAME, PAIR, note_success, take_try
from webapp.live.record import from_database

RIGHT = "correct horse battery"


async def log_in(port: int, name: str, password: str, *, forwarded_for: str = "") -> bool:
    """Through the form, as somebody who has never been here."""
    headers = {"X-Forwarded-For": forwarded_for} if forwarded_for else {}
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60, trust_env=False
    ) as client:
        page = await client.get("/login/")
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text).group(1)
        answer = await client.post(
            "/login/", data={"username": name, "password": password, "csrfmiddlewaretoken": token}
        )
    return answer.status_code == 302


@pytest.mark.django_db(transaction=True)
async def test_a_made_up_forwarded_address_neither_frees_from_the_wait_nor_stands_in_the_audit_trail() -> None:
    await from_database(lambda: make_person("bob"))
    async with served() as port:
        for number in range(PAIR.num_free):
            assert not await log_in(port, "bob", "wrong", forwarded_for=f"203.0.113.{number}")
        assert not await log_in(port, "bob", RIGHT, forwarded_for="203.0.113.77")
    addresses = await from_database(lambda: set(AuditRecord.objects.values_list("address", flat=True)))
    assert addresses == {"127.0.0.1"}


@pytest.mark.django_db(transaction=True)
async def test_behind_a_proxy_a_strangers_bad_passwords_do_not_hold_up_the_one_who_has_the_name(
    settings: Settings,
) -> None:
    settings.HEADROOM_BEHIND_PROXY = True
    await from_database(lambda: make_person("bob"))
    async with served() as port:
        for _ in range(PAIR.num_free + 3):
            assert not await log_in(port, "bob", "wrong", forwarded_for="203.0.113.7")
        # what the caller wrote itself stands before what the proxy added
        assert not await log_in(port, "bob", RIGHT, forwarded_for="198.51.100.1, 203.0.113.7")
        assert await log_in(port, "bob", RIGHT, forwarded_for="198.51.100.1")
    found = await from_database(lambda: AuditRecord.objects.get(action="login", outcome="done").address)
    assert found == "198.51.100.1"


@pytest.mark.django_db(transaction=True)
async def test_a_caller_that_is_no_trusted_proxy_is_not_believed(settings: Settings) -> None:
    settings.HEADROOM_BEHIND_PROXY = True
    settings.HEADROOM_TRUSTED_PROXIES = ["192.0.2.1"]
    async with served() as port:
        await log_in(port, "bob", "wrong", forwarded_for="203.0.113.7")
    assert await from_database(lambda: AuditRecord.objects.get().address) == "127.0.0.1"


@pytest.mark.django_db(transaction=True)
async def test_the_counts_outlive_the_web_process(settings: Settings) -> None:
    await from_database(lambda: make_person("bob"))
    async with served() as port:
        for _ in range(PAIR.num_free):
            assert not await log_in(port, "bob", "wrong")
    # another process has another cache of its own
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "LOCATION": "another"}}
    async with served() as port:
        assert not await log_in(port, "bob", RIGHT)


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[timedelta], Any]:
    """Moves the brake's clock on."""
    real, passed = timezone.now, [timedelta()]

    class Clock:
        @staticmethod
        def now() -> Any:
            return real() + passed[0]

    monkeypatch.setattr(brake, "timezone", Clock)

    def move(by: timedelta) -> None:
        passed[0] += by

    return move


def num_tries_until_wait(name: str, address: str, *, at_most: int = 1000) -> int:
    return next(number for number in range(at_most) if not take_try(name, address))


def test_waits_grow_to_the_longest_and_are_forgotten(db: None, pass_time: Callable[[timedelta], Any]) -> None:
    assert num_tries_until_wait("bob", "192.0.2.1") == PAIR.num_free
    waits = []
    for _ in range(8):
        waited = timedelta()
        while not take_try("bob", "192.0.2.1"):
            pass_time(timedelta(seconds=5))
            waited += timedelta(seconds=5)
        waits.append(waited)
    assert waits == sorted(waits)
    assert waits[0] < timedelta(seconds=30) < waits[2]
    assert LONGEST_WAIT - timedelta(minutes=2) < waits[-1] <= LONGEST_WAIT
    pass_time(timedelta(days=2))
    assert num_tries_until_wait("bob", "192.0.2.1") == PAIR.num_free


def test_one_address_that_tries_many_names_waits(db: None) -> None:
    tried = [take_try(f"name{number}", "192.0.2.1") for number in range(ADDRESS.num_free + 20)]
    assert tried == [True] * ADDRESS.num_free + [False] * 20
    assert take_try("name1", "192.0.2.2")


def test_all_addresses_of_one_ipv6_network_are_one(db: None) -> None:
    for number in range(PAIR.num_free):
        assert take_try("bob", f"2001:db8::{number + 1:x}")
    assert not take_try("bob", "2001:db8::ffff")
    assert take_try("bob", "2001:db8:0:1::1")


def test_guesses_from_many_addresses_wait_but_not_who_has_logged_in_before(db: None) -> None:
    assert take_try("bob", "198.51.100.1")
    note_success("bob", "198.51.100.1")
    tried = [take_try("bob", f"10.0.{number}.1") for number in range(NAME.num_free + 5)]
    assert tried == [True] * NAME.num_free + [False] * 5
    assert take_try("bob", "198.51.100.1")


def test_a_stranger_at_one_address_never_holds_the_name_up(db: None, pass_time: Callable[[timedelta], Any]) -> None:
    for _ in range(2 * 24 * 60):  # two days of tries, one each minute
        take_try("bob", "192.0.2.1")
        pass_time(timedelta(minutes=1))
    assert take_try("bob", "198.51.100.1")


def test_a_right_password_takes_its_own_try_back(db: None) -> None:
    for _ in range(NAME.num_free * 2):
        assert take_try("bob", "198.51.100.1")
        note_success("bob", "198.51.100.1")


def test_a_flood_that_waits_makes_no_rows(db: None) -> None:
    while take_try("bob", "192.0.2.1"):
        pass
    before = LoginCount.objects.count()
    assert not any(take_try("bob", "192.0.2.1") for _ in range(50))
    assert LoginCount.objects.count() == before


def test_what_is_forgotten_is_deleted(db: None, pass_time: Callable[[timedelta], Any]) -> None:
    take_try("bob", "192.0.2.1")
    pass_time(timedelta(days=2))
    take_try("ada", "192.0.2.2")
    assert LoginCount.objects.count() == 3


def test_a_page_shows_a_wait_as_a_failed_login(client: Any, ada: User) -> None:
    for _ in range(PAIR.num_free):
        client.post("/login/", {"username": "ada", "password": "wrong"})
    answer = client.post("/login/", {"username": "ada", "password": RIGHT})
    assert answer.status_code == 200
    assert "_auth_user_id" not in client.session


@pytest.mark.django_db(transaction=True)
async def test_tries_at_once_are_no_more_than_those_one_by_one() -> None:
    async with served() as port:
        await asyncio.gather(*(log_in(port, "bob", "wrong") for _ in range(3 * PAIR.num_free)))
    levels = await from_database(lambda: {round(level) for level in LoginCount.objects.values_list("level", flat=True)})
    assert levels == {PAIR.num_free}
