"""The network of a job over several machines: the measured one where none is stated, and what is said of it."""

import json
import re
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from optimizer.base.errors import InvalidInput, PlanStale
from optimizer.base.units import GIB
from tests.webapp.conftest import make_bench, make_spec
from webapp.catalog.models import Dataset, Link, Model
from webapp.jobs.links.probing import ask_for_links, record_failure, record_measured
from webapp.jobs.specs.training import read_spec
from webapp.planning.pricing import price_spec
from webapp.planning.submitting import submit_job

pytestmark = pytest.mark.django_db

WORKLOAD = {"sequence_length": 128, "global_batch_size": 8, "num_steps": 10}
RATE = 1.0e9 / 8 * 1448 / 1514
"""Content that a gigabit per second carries."""

Spec = dict[str, Any]


def measure(*, bytes_per_s: float = RATE, round_trip_s: float = 0.002) -> None:
    for link in Link.objects.all():
        sizes = ((65536, bytes_per_s / 2), (16777216, bytes_per_s))
        record_measured(link, round_trip_s=round_trip_s, bytes_per_s_by_size=sizes)


@pytest.fixture
def spec(profiled_llama: Model, dataset: Dataset) -> Spec:
    """Without a link; that of home and office was asked for."""
    home, _ = make_bench("home", memory_bytes=GIB), make_bench("office", memory_bytes=GIB)
    ask_for_links(home)
    goal = {"device_budget_bytes": GIB}
    return make_spec(profiled_llama, dataset, goal=goal, workload=WORKLOAD, machines=["home", "office"])


def test_a_link_that_is_left_out_is_the_measured_one_and_the_answer_says_so(ada: User, spec: Spec, client: Client) -> None:
    measure()
    read = read_spec(ada, spec)
    assert read.to_json()["link"] == "1Gbit,1ms"
    assert read.to_json()["link_measured_at"].startswith(f"{timezone.now():%Y-%m-%d}")
    client.force_login(ada)
    answer = client.post("/api/v1/plans", json.dumps(spec), content_type="application/json").json()
    (remark,) = answer["remarks"]
    pattern = r"the network between the machines is taken as 1Gbit,1ms, as their workers measured it .* ago"
    assert re.fullmatch(pattern, remark)
    job = submit_job(ada, spec=spec, plan_id=answer["offers"][0]["id"], actor="test")
    assert job.spec["link"] == "1Gbit,1ms"
    normal = read_spec(ada, job.spec).to_json()
    assert normal["link_measured_at"] == job.spec["link_measured_at"]


def test_a_link_that_was_measured_anew_makes_an_offer_stale(ada: User, spec: Spec) -> None:
    measure()
    offer = next(offer for offer in price_spec(ada, spec).offers if offer.is_chosen)
    measure(bytes_per_s=RATE / 4)
    with pytest.raises(PlanStale, match="was priced for another spec"):
        submit_job(ada, spec=spec, plan_id=offer.row.pk, actor="test")


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ("10Gbit,1ms", "10Gbit,1ms differs much from the 1Gbit,1ms that was measured .* ago: its rate is 10 times higher;"),
        ("1Gbit,20ms", "its delay is 18.3 times longer; leave it out to use what was measured"),
        ("100Mbit,10ms", "its rate is 10 times lower and its delay is 9.18 times longer"),
        ("1.5Gbit,0.6ms", ""),
    ],
)
def test_a_stated_link_that_differs_much_is_used_with_a_warning(ada: User, spec: Spec, stated: str, words: str) -> None:
    measure()
    joining = read_spec(ada, spec | {"link": stated}).joining
    assert joining.link == stated
    assert joining.to_json().keys() == {"machines", "link"}
    assert [bool(re.search(words, remark)) for remark in joining.remarks] == ([True] if words else [])


def test_of_several_links_the_lowest_rate_and_the_longest_delay_count(ada: User, spec: Spec) -> None:
    ask_for_links(make_bench("attic", memory_bytes=GIB))
    measure()
    one, other, _ = Link.objects.order_by("pk")
    record_measured(one, round_trip_s=0.02, bytes_per_s_by_size=((65536, RATE),))
    record_measured(other, round_trip_s=0.002, bytes_per_s_by_size=((65536, RATE / 10),))
    assert read_spec(ada, spec | {"machines": ["home", "office", "attic"]}).joining.link == "100Mbit,10ms"


def test_machines_that_were_found_not_to_reach_each_other_are_refused_in_words(ada: User, spec: Spec) -> None:
    measure()
    record_failure(Link.objects.get(), "office cannot reach home at 10.0.0.2, port 40000: no answer within 5 s; let them connect")
    for link in ({}, {"link": "1Gbit,1ms"}):
        with pytest.raises(InvalidInput, match=r"office cannot reach home at 10\.0\.0\.2, .* measures its links again"):
            read_spec(ada, spec | link)
    measure()
    assert read_spec(ada, spec).joining.link == "1Gbit,1ms"


def test_what_was_never_measured_must_be_stated(ada: User, spec: Spec) -> None:
    with pytest.raises(InvalidInput, match="nothing has measured yet how home and office reach each other"):
        read_spec(ada, spec)
    assert read_spec(ada, spec | {"link": "1Gbit,1ms"}).joining.remarks == ()
