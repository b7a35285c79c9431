"""Specs that name machines: planned on all of them as one, claimed on each, and what cannot be joined refused in words."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User

from optimizer.base.errors import InvalidInput, OutOfDeviceMemory, PlanStale
from optimizer.base.units import GIB, MIB
from tests.webapp.attempts.attempts import DONE, run
from tests.webapp.conftest import MACHINE_DOCUMENT, make_bench, make_spec
from webapp.attempts.outcome import finish_attempt
from webapp.catalog.actions import register_machine
from webapp.catalog.models import Dataset, Machine, Model
from webapp.jobs.devices.joined import ranks_by_machine
from webapp.jobs.devices.named import JOINED, read_needs
from webapp.jobs.models import Member, Reason
from webapp.jobs.specs.training import read_spec
from webapp.planning.pricing import price_spec
from webapp.planning.submitting import submit_job
from webapp.planning.waiting import plan_waiting_jobs

pytestmark = pytest.mark.django_db

WORKLOAD = {"sequence_length": 128, "global_batch_size": 8, "num_steps": 10}
CARD = MACHINE_DOCUMENT["device"]["name"]
BOTH = {"layout": {"num_devices": 2}}
Spec = Callable[..., dict[str, Any]]


@pytest.fixture
def home() -> Machine:
    return make_bench("home", memory_bytes=GIB)


@pytest.fixture
def office() -> Machine:
    return make_bench("office", memory_bytes=GIB)


@pytest.fixture
def spec(profiled_llama: Model, dataset: Dataset, home: Machine, office: Machine) -> Spec:
    def make(*, goal: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        asked = {"device_budget_bytes": GIB, **(goal or {})}
        named = {"machines": ["home", "office"], "link": "10Gbit,0.1ms", **changes}
        return make_spec(profiled_llama, dataset, goal=asked, workload=WORKLOAD, **named)

    return make


def test_a_job_gets_a_rank_on_each_machine_and_a_claim_of_both(
    ada: User, home: Machine, office: Machine, spec: Spec
) -> None:
    job = submit_job(ada, spec=spec(goal={"pins": BOTH}), actor="user:ada")
    assert (job.need_device_kind, job.need_devices) == (JOINED, 2)
    assert {rank["device"] for rank in job.prediction["ranks"]} == {f"{CARD}@home", f"{CARD}@office"}
    assert {(need.device, need.machine) for need in read_needs(job.need_ranks)} == {(CARD, "home"), (CARD, "office")}
    leader, other = ranks_by_machine(job)
    attempt = run({"home": home, "office": office}[leader])
    assert (attempt.job_id, attempt.devices) == (job.pk, [0])
    assert Member.objects.get(attempt=attempt).machine_name == other


def test_all_devices_are_used_unless_it_says_how_many(ada: User, spec: Spec) -> None:
    assert read_spec(ada, spec()).goal.num_devices == 2
    assert read_spec(ada, spec(goal={"num_devices": 1})).goal.num_devices == 1
    normal = read_spec(ada, spec()).to_json()
    assert read_spec(ada, normal).to_json() == normal
    with pytest.raises(InvalidInput, match="goal.num_devices is 3; the machines here have at most 2 devices"):
        read_spec(ada, spec(goal={"num_devices": 3}))


def test_over_a_slow_network_one_machine_does_it_alone(ada: User, home: Machine, office: Machine, spec: Spec) -> None:
    job = submit_job(ada, spec=spec(link="1Mbit,100ms"), actor="user:ada")
    ((machine, ranks),) = ranks_by_machine(job).items()
    assert ranks == [0]
    attempt = run({"home": home, "office": office}[machine])
    assert (attempt.job_id, Member.objects.count()) == (job.pk, 0)


def test_an_offer_holds_until_one_of_the_machines_changes(ada: User, spec: Spec) -> None:
    asked = spec(goal={"pins": BOTH})
    offers = [next(offer.row.pk for offer in price_spec(ada, asked).offers if offer.is_chosen) for _ in range(2)]
    assert submit_job(ada, spec=asked, plan_id=offers[0], actor="user:ada").need_devices == 2
    with pytest.raises(PlanStale, match="was priced for another spec"):
        submit_job(ada, spec={**asked, "link": "1Gbit,1ms"}, plan_id=offers[1], actor="user:ada")
    make_bench("office", memory_bytes=2 * GIB)
    with pytest.raises(PlanStale, match="no longer holds"):
        submit_job(ada, spec=asked, plan_id=offers[1], actor="user:ada")


def test_after_memory_ran_out_on_one_machine_the_next_plan_is_over_both_as_well(
    ada: User, home: Machine, office: Machine, spec: Spec
) -> None:
    job = submit_job(ada, spec=spec(goal={"pins": BOTH}), actor="user:ada")
    leader, _ = ranks_by_machine(job)
    attempt = run({"home": home, "office": office}[leader])
    first = job.prediction["ranks"][1]
    error = OutOfDeviceMemory(
        requested_bytes=first["memory_bytes"] - first["peak_bytes"] + MIB,
        in_use_bytes=first["peak_bytes"],
        budget_bytes=first["memory_bytes"],
        bytes_by_category=attempt.prediction["device_bytes_by_category"],
        moment="in backward of block 4",
        category="activations",
    )
    error.fields |= {"stage": "steady_step", "cause": "step", "rank": 1, "num_ranks": 2}
    result = {**DONE, "outcome": "failed", "reason": error.code, "message": error.message, "error": error.to_json()}
    assert finish_attempt(attempt, result=result, exit_code=1) == Reason.OUT_OF_DEVICE_MEMORY
    assert plan_waiting_jobs() == [job.pk]
    job.refresh_from_db()
    assert (job.state, job.awaits_plan, job.need_device_kind) == ("queued", False, JOINED)
    assert list(job.joined.order_by("name").values_list("name", flat=True)) == sorted(ranks_by_machine(job))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"machines": ["home"]}, "machines is ['home']; allowed: the names of 2 or more machines"),
        ({"machines": "home,office"}, "machines is 'home,office'; allowed: the names of 2 or more machines"),
        ({"machines": ["home", "home"]}, "machines names 'home' twice; allowed: each machine once"),
        ({"machines": ["home", "attic"]}, "machine 'attic' is not there; those that are: home, office"),
        ({"machines": ["home", "cards"]}, "machine 'cards' is not there; those that are: home, office"),
        (
            {"link": None},
            "are idle; or give the network's rate and delay, such as 1Gbit,1ms",
        ),
        ({"link": "fast"}, "link 'fast' is no network's; allowed: a rate and a delay such as 200Mbit,20ms"),
        ({"machines": None}, "machines is None; allowed: the names of 2 or more machines"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(ada: User, spec: Spec, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(words)):
        read_spec(ada, spec(**changes))


def test_a_machine_with_cards_and_one_without_are_not_joined(ada: User, spec: Spec) -> None:
    make_bench("cards", kind="cuda")
    with pytest.raises(InvalidInput, match="machines with cards and one without are to be joined"):
        read_spec(ada, spec(machines=["home", "cards"]))


def test_machines_with_other_versions_of_torch_are_not_joined(ada: User, spec: Spec) -> None:
    facts = {**MACHINE_DOCUMENT.get("facts", {}), "torch": "1.0"}
    register_machine(name="old", document={**MACHINE_DOCUMENT, "facts": facts})
    with pytest.raises(InvalidInput, match=r"different versions of torch \(home has .*, old has 1\.0\)"):
        read_spec(ada, spec(machines=["home", "old"]))
