"""A worker connects where another listens, and writes what came of it: figures, or a sentence that says what to do."""

import threading
from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from django.utils import timezone

from optimizer.runtime.ranks.interface import address_of, read_boot_id
from tests.webapp.conftest import make_bench
from webapp.catalog.models import Link
from webapp.jobs.links.probing import ask_for_links, open_offer, record_failure
from worker.config import WorkerConfig
from worker.links import serving
from worker.links.exchange import LinkBroke, answer, open_listener
from worker.links.serving import Links

pytestmark = pytest.mark.django_db

HERE = "127.0.0.1"


@pytest.fixture
def link() -> Link:
    first, second = sorted((make_bench("home"), make_bench("office")), key=lambda row: row.pk)
    return Link.objects.create(listener=first, connector=second)


@pytest.fixture
def links(tmp_path: Any) -> Links:
    """The links of the machine that connects."""
    return Links(WorkerConfig(home=tmp_path, host="office", process_id=1), draining=threading.Event())


def offer_at(link: Link, port: int, **changes: Any) -> Any:
    where = {"address": HERE, "port": port, "interface": "lo", "computer": read_boot_id(), **changes}
    return open_offer(link, **where)


def probe(link: Link, links: Links) -> None:
    """The one side takes its turn while the other listens."""
    with open_listener(HERE) as listener:
        token = offer_at(link, listener.getsockname()[1])["token"]
        listening = threading.Thread(target=answer, args=(listener, token), kwargs={"should_stop": lambda: False})
        listening.start()
        links.turn(link.connector)
        listening.join(timeout=20)
    link.refresh_from_db()


def closed_port() -> int:
    with open_listener(HERE) as listener:
        port: int = listener.getsockname()[1]
    return port


def test_what_is_offered_is_measured_and_recorded(link: Link, links: Links) -> None:
    probe(link, links)
    assert link.failure == ""
    assert 0 < link.round_trip_s < 0.1
    assert [size for size, _ in link.bytes_per_s_by_size] == [65536, 1048576, 16777216]
    assert link.offer is None


def test_a_machine_that_cannot_be_reached_is_named_with_what_to_do(link: Link, links: Links) -> None:
    port = closed_port()
    offer_at(link, port)
    links.turn(link.connector)
    link.refresh_from_db()
    here, there = link.connector.name, link.listener.name
    assert link.failure == (
        f"{here} cannot reach {there} at 127.0.0.1, port {port}: connection refused; let the two connect to each other on "
        f"any TCP port (firewall), and check HEADROOM_RANK_INTERFACE: lo on {there}, lo on {here}"
    )
    assert link.measured_at is None


def test_the_loopback_is_no_way_to_another_computer(link: Link, links: Links) -> None:
    offer_at(link, closed_port(), computer="another")
    links.turn(link.connector)
    link.refresh_from_db()
    assert f"{link.listener.name} would use lo, which leads to no other computer; set HEADROOM_RANK_INTERFACE" in link.failure


def test_an_interface_that_is_not_there_is_said_by_the_side_that_listens(
    link: Link, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADROOM_RANK_INTERFACE", "eth77")
    links.turn(link.listener)
    link.refresh_from_db()
    assert "network interface 'eth77' is not on this machine; present: lo" in link.failure


def test_nobody_listens_longer_than_an_offer_and_the_same_link_waits_a_while(
    link: Link, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "OFFER_S", 0.3)
    links.turn(link.listener)
    link.refresh_from_db()
    assert (link.offer, link.offer_ends_at, link.checked_at) == (None, None, None)
    monkeypatch.setattr(serving, "open_listener", None)
    links.turn(link.listener)  # would fail if it listened again


def test_a_link_that_fails_is_tried_again_soon_and_then_ever_more_seldom(
    link: Link, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s, listened_s = 0.0, []
    monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=lambda: clock_s))

    def answer_nobody(*_: Any, **__: Any) -> bool:
        listened_s.append(clock_s)
        record_failure(link, "office cannot reach home")
        Link.objects.update(checked_at=timezone.now() - timedelta(days=2))  # due by the row: what decides is here
        return False

    monkeypatch.setattr(serving, "answer", answer_nobody)
    while clock_s < 3600:
        links.turn(link.listener)
        clock_s += 30
    pauses_s = [later - earlier for earlier, later in pairwise(listened_s)]
    assert pauses_s == [30, 60, 120, 240, 480, 600, 600, 600, 600]
    ask_for_links(link.connector)
    links.turn(link.listener)
    assert listened_s[-1] == 3600


def test_what_was_measured_beside_a_job_is_thrown_away(link: Link, links: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "is_idle", lambda *_: False)
    probe(link, links)
    assert (link.measured_at, link.checked_at, link.offer) == (None, None, None)
    assert link.asked_at is not None


def test_a_probe_that_broke_off_says_nothing_and_stays_due(link: Link, links: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(*_: Any, **__: Any) -> None:
        raise LinkBroke("the other side closed the connection")

    monkeypatch.setattr(serving, "measure", break_off)
    offer_at(link, closed_port())
    links.turn(link.connector)
    link.refresh_from_db()
    assert (link.failure, link.checked_at, link.offer) == ("", None, None)
    assert link.asked_at is not None


def test_the_loopback_has_an_address() -> None:
    assert address_of("lo") == HERE
