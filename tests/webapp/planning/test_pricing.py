"""Specs priced with a model's real profile, and offers made into jobs."""

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from optimizer.base.errors import InvalidInput, NoFeasiblePlan, PlanStale
from optimizer.estimate.training import estimate_training
from optimizer.hardware.machine import Machine as MachineSpec
from optimizer.plan.plan import Plan
from optimizer.search.answer.baselines import BASELINES
from optimizer.workload import TrainingWorkload
from tests.webapp.conftest import MACHINE_DOCUMENT, make_spec, make_text
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.reconciling import forget_old_offers
from webapp.catalog.actions import keep_profile, register_machine
from webapp.catalog.models import Dataset, Machine, Model, Profile
from webapp.jobs.errors import PlanDoesNotFit
from webapp.jobs.models import Job, PlanOffer
from webapp.planning import offers
from webapp.planning.pricing import price_spec
from webapp.planning.search.profile_requests import ProfileFailed
from webapp.planning.submitting import NotPricedYet, submit_job

pytestmark = pytest.mark.django_db

WORKLOAD = {"sequence_length": 128, "global_batch_size": 4, "num_steps": 10}
ROOMY_BYTES = 2**30
TOO_SMALL_BYTES = 100_000


@pytest.fixture
def spec(profiled_llama: Model, dataset: Dataset) -> Callable[..., dict[str, Any]]:
    """A function: the spec at a budget."""

    def make(budget_bytes: int = ROOMY_BYTES, **changes: Any) -> dict[str, Any]:
        goal = {"device_budget_bytes": budget_bytes}
        return make_spec(profiled_llama, dataset, **{"workload": WORKLOAD, "goal": goal, **changes})

    return make


@pytest.fixture
def tight_bytes(ada: User, machine: Machine, spec: Callable[..., dict[str, Any]]) -> int:
    """A budget under plain training's peak, over the smallest that would do."""
    with pytest.raises(NoFeasiblePlan) as caught:
        price_spec(ada, spec(TOO_SMALL_BYTES))
    plain = next(offer for offer in caught.value.fields["offers"] if offer["label"] == "keep_all")
    budget_bytes = (caught.value.fields["smallest_feasible_bytes"] + plain["prediction"]["device_peak_bytes"]) // 2
    PlanOffer.objects.all().delete()
    return budget_bytes


def row_of(answer: Any, label: str, *, machine: str = "bench") -> PlanOffer:
    rows = [offer.row for offer in answer.offers if offer.row.label == label and offer.row.machine.name == machine]
    assert len(rows) == 1
    return rows[0]


def submit(user: User, spec: dict[str, Any], **how: Any) -> Job:
    return submit_job(user, spec=spec, actor=f"user:{user.username}", **how)


def test_a_model_seen_for_the_first_time_is_profiled_once_before_it_is_priced(
    ada: User, machine: Machine, new_llama: Model, dataset: Dataset
) -> None:
    for _ in range(2):
        answer = price_spec(ada, make_spec(new_llama, dataset))
        assert answer.to_json() == {"profile": "pending", "waiting_for": "profile"}
    assert [job.kind for job in Job.objects.all()] == ["profile"]
    assert not PlanOffer.objects.exists()


def test_without_a_machine_there_is_nothing_to_price_on(ada: User, spec: Callable[..., dict[str, Any]]) -> None:
    assert price_spec(ada, spec()).to_json() == {"profile": "pending", "waiting_for": "machine"}


def test_what_cannot_be_priced_yet_makes_no_job(ada: User, spec: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(NotPricedYet, match="no machine has registered yet"):
        submit(ada, spec())
    assert not Job.objects.exists()


def test_a_trace_that_failed_is_reported_in_its_own_words(
    ada: User, machine: Machine, new_llama: Model, dataset: Dataset
) -> None:
    price_spec(ada, make_spec(new_llama, dataset))
    error = {"code": "bad_model", "message": "heads do not divide", "hint": "Change them.", "fields": {}}
    result = {"outcome": "failed", "reason": "bad_model", "message": "heads do not divide", "error": error, "step": 0}
    finish_attempt(claim_job(worker="w", machine=machine), result=result, exit_code=1)
    with pytest.raises(ProfileFailed, match="heads do not divide") as caught:
        price_spec(ada, make_spec(new_llama, dataset))
    assert caught.value.hint == "Change them."


def test_the_offers_are_the_chosen_plan_and_every_baseline(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]]
) -> None:
    answer = price_spec(ada, spec())
    assert [offer.row.label for offer in answer.offers] == ["chosen", *BASELINES]
    assert [offer.row.label for offer in answer.offers if offer.is_chosen] == ["chosen"]
    assert all(offer.explanation for offer in answer.offers)
    assert PlanOffer.objects.filter(owner=ada, machine=machine).count() == len(answer.offers)


def test_each_offer_holds_what_the_estimate_says_of_its_plan(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]], llama_profile: Any
) -> None:
    for offer in price_spec(ada, spec()).offers:
        again = estimate_training(
            llama_profile,
            plan=Plan.from_json(offer.row.plan),
            workload=TrainingWorkload(**WORKLOAD),
            machine=MachineSpec.from_json(machine.document),
        )
        assert {**offer.row.prediction, "memory": None, "stages": []} == again.to_json()
        assert offer.row.prediction["memory"]["process"]["value"] == again.device_peak_bytes
        assert offer.row.verdict == again.verdict(ROOMY_BYTES)


def test_under_a_tight_budget_the_chosen_plan_fits_where_plain_training_does_not(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]], tight_bytes: int
) -> None:
    answer = price_spec(ada, spec(tight_bytes))
    chosen, plain = row_of(answer, "chosen"), row_of(answer, "keep_all")
    assert (chosen.verdict, plain.verdict) == ("fits", "does_not_fit")
    assert chosen.prediction["device_peak_high_bytes"] <= tight_bytes < plain.prediction["device_peak_bytes"]
    assert chosen.prediction["step_ms"] > plain.prediction["step_ms"]


def test_of_several_machines_the_one_whose_plan_is_fastest_is_chosen(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]]
) -> None:
    rates = MACHINE_DOCUMENT["rates"]
    slow = {**rates, "matmul_flops_per_s": {"fp32": rates["matmul_flops_per_s"]["fp32"] / 10}}
    register_machine(name="a snail", document={**MACHINE_DOCUMENT, "name": "a snail", "rates": slow})
    answer = price_spec(ada, spec())
    assert [offer.row.machine.name for offer in answer.offers if offer.is_chosen] == ["bench"]
    times = [row_of(answer, "chosen", machine=name).prediction["step_ms"] for name in ("bench", "a snail")]
    assert times[0] < times[1]


def test_when_nothing_fits_the_smallest_budget_is_named_and_is_enough(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        price_spec(ada, spec(TOO_SMALL_BYTES))
    smallest_bytes = caught.value.fields["smallest_feasible_bytes"]
    assert row_of(price_spec(ada, spec(smallest_bytes)), "chosen").verdict == "fits"


def test_when_nothing_fits_the_baselines_are_offered_all_the_same(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        price_spec(ada, spec(TOO_SMALL_BYTES))
    offers = caught.value.fields["offers"]
    assert [offer["label"] for offer in offers] == list(BASELINES)
    assert {offer["verdict"] for offer in offers} == {"does_not_fit"}
    assert set(PlanOffer.objects.values_list("pk", flat=True)) == {offer["id"] for offer in offers}


@pytest.mark.parametrize("label", ["chosen", "recompute_all"])
def test_a_job_takes_exactly_the_plan_that_was_offered(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]], label: str
) -> None:
    offer = row_of(price_spec(ada, spec()), label)
    job = submit(ada, spec(), plan_id=offer.pk)
    assert (job.plan, job.prediction, job.machine, job.spec["plan"]) == (
        offer.plan,
        offer.prediction,
        machine,
        label,
    )
    assert job.spec["goal"]["device_budget_bytes"] == ROOMY_BYTES


def test_a_job_may_be_named_after_it_was_priced(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]]
) -> None:
    offer = row_of(price_spec(ada, spec()), "chosen")
    assert submit(ada, spec(name="another name"), plan_id=offer.pk).name == "another name"


def test_a_plan_over_its_budget_needs_an_override(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]], tight_bytes: int
) -> None:
    offer = row_of(price_spec(ada, spec(tight_bytes)), "keep_all")
    with pytest.raises(PlanDoesNotFit) as caught:
        submit(ada, spec(tight_bytes), plan_id=offer.pk)
    assert caught.value.fields["budget_bytes"] == tight_bytes
    assert not Job.objects.exists()
    assert submit(ada, spec(tight_bytes), plan_id=offer.pk, override=True).plan == offer.plan


def test_without_an_offer_the_plan_of_a_fresh_search_is_taken(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]], tight_bytes: int
) -> None:
    job = submit(ada, spec(tight_bytes))
    chosen = PlanOffer.objects.get(label="chosen")
    assert (job.plan, job.prediction) == (chosen.plan, chosen.prediction)


def test_a_baseline_can_be_asked_for_by_name(ada: User, machine: Machine, spec: Callable[..., dict[str, Any]]) -> None:
    job = submit(ada, spec(plan="recompute_all"))
    assert job.plan["activations"]["per_block"] == ["recompute"] * 4


@pytest.mark.parametrize(("label", "override"), [("keep_all", False), ("chosen", True), ("chosen", False)])
def test_where_nothing_fits_no_job_is_made_of_a_fresh_search(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]], label: str, override: bool
) -> None:
    with pytest.raises(NoFeasiblePlan):
        submit(ada, spec(TOO_SMALL_BYTES, plan=label), override=override)
    assert not Job.objects.exists()


def test_where_nothing_fits_a_baseline_asked_for_by_name_runs_with_an_override(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]]
) -> None:
    job = submit(ada, spec(TOO_SMALL_BYTES, plan="keep_all"), override=True)
    assert job.plan["activations"]["per_block"] == ["keep"] * 4
    assert job.need_device_bytes <= TOO_SMALL_BYTES


def change_budget(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "goal": {"device_budget_bytes": ROOMY_BYTES - 1}}


def change_sequence(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "workload": {**spec["workload"], "sequence_length": 64}}


def change_seed(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "workload": {**spec["workload"], "seed": 7}}


def change_dataset(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "dataset": make_text(User.objects.get(username="ada")).pk}


@pytest.mark.parametrize("change", [change_budget, change_sequence, change_seed, change_dataset])
def test_an_offer_for_another_spec_is_stale(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]], change: Callable[..., Any]
) -> None:
    offer = row_of(price_spec(ada, spec()), "chosen")
    with pytest.raises(PlanStale, match="was priced for another spec"):
        submit(ada, change(spec()), plan_id=offer.pk)
    assert not Job.objects.exists()


def shrink_host(fingerprint: str) -> None:
    Machine.objects.update(document={**MACHINE_DOCUMENT, "host_memory_bytes": 2**30})


def swap_device(fingerprint: str) -> None:
    Machine.objects.update(document={**MACHINE_DOCUMENT, "device": {**MACHINE_DOCUMENT["device"], "name": "another"}})


def profile_anew(fingerprint: str) -> None:
    document = copy.deepcopy(Profile.objects.get(pk=fingerprint).document)
    keep_profile(fingerprint, {**document, "torch_version": "2.99"})


def forget_profile(fingerprint: str) -> None:
    Profile.objects.filter(pk=fingerprint).delete()


@pytest.mark.parametrize("change", [shrink_host, swap_device, profile_anew, forget_profile])
def test_an_offer_whose_ground_has_changed_is_stale(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]], profiled_llama: Model, change: Callable[..., Any]
) -> None:
    offer = row_of(price_spec(ada, spec()), "chosen")
    change(profiled_llama.fingerprint)
    with pytest.raises(PlanStale, match="no longer holds on bench"):
        submit(ada, spec(), plan_id=offer.pk)
    assert not Job.objects.exists()


def test_an_offer_of_an_earlier_program_is_stale(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = row_of(price_spec(ada, spec()), "chosen")
    monkeypatch.setattr(offers, "program_version", lambda: "99.0")
    with pytest.raises(PlanStale):
        submit(ada, spec(), plan_id=offer.pk)


def test_a_finished_run_that_calibrates_the_machine_changes_times_and_makes_no_offer_stale(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]]
) -> None:
    before = row_of(price_spec(ada, spec()), "chosen")
    Machine.objects.update(calibration={"step_time_factor": 2.0, "num_runs": 1})
    after = row_of(price_spec(ada, spec()), "chosen")
    assert after.prediction["step_ms"] == pytest.approx(2 * before.prediction["step_ms"])
    assert after.prediction["device_peak_bytes"] == before.prediction["device_peak_bytes"]
    assert submit(ada, spec(), plan_id=before.pk).plan == before.plan


def test_anothers_offer_is_not_there(
    ada: User, eve: User, machine: Machine, spec: Callable[..., dict[str, Any]]
) -> None:
    offer = row_of(price_spec(ada, spec()), "chosen")
    with pytest.raises(InvalidInput, match="is not one of your offers") as caught:
        submit(eve, spec(), plan_id=offer.pk)
    assert caught.value.fields["field"] == "plan_id"


def test_offers_are_forgotten_after_a_day_and_jobs_keep_their_plan(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]]
) -> None:
    answer = price_spec(ada, spec())
    taken = row_of(answer, "chosen")
    job = submit(ada, spec(), plan_id=taken.pk)
    young = row_of(answer, "keep_all")
    PlanOffer.objects.exclude(pk=young.pk).update(created_at=timezone.now() - timedelta(hours=24, seconds=5))
    PlanOffer.objects.filter(pk=young.pk).update(created_at=timezone.now() - timedelta(hours=23, minutes=59))
    assert forget_old_offers() == len(BASELINES)
    assert PlanOffer.objects.get() == young
    job.refresh_from_db()
    assert job.plan == taken.plan


def test_a_job_from_an_offer_can_be_claimed_by_a_machine_of_its_kind(
    ada: User, machine: Machine, spec: Callable[..., dict[str, Any]], tight_bytes: int
) -> None:
    job = submit(ada, spec(tight_bytes))
    attempt = claim_job(worker="w", machine=machine)
    assert (attempt.job_id, attempt.plan, attempt.prediction) == (job.pk, job.plan, job.prediction)
