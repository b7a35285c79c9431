"""Compiled blocks that nobody pinned: offered where a long run repays them, once a worker traced them; nobody waits for it."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from optimizer.base.errors import PlanStale
from optimizer.hardware.machine import COMPILER_FACT, NO_COMPILER_FACT
from tests.webapp.attempts.attempts import run
from tests.webapp.conftest import make_spec
from tests.webapp.planning.test_replanning import run_out
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import finish_attempt
from webapp.catalog.actions import keep_profile
from webapp.catalog.models import Dataset, Machine, Model, Profile
from webapp.jobs.models import Job
from webapp.jobs.specs.training import read_spec
from webapp.planning.glance import glance_at
from webapp.planning.levers import list_levers
from webapp.planning.pricing import price_spec
from webapp.planning.runs.comparing import compare_jobs
from webapp.planning.search.resolve import Waiting, place_of, resolve
from webapp.planning.search.training import asked_by_training, find_offered
from webapp.planning.submitting import submit_job
from webapp.planning.waiting import plan_waiting_jobs

pytestmark = pytest.mark.django_db

LONG, SHORT = 200_000, 10
GOAL: dict[str, Any] = {"device_budget_bytes": 2**30, "allow_lossy": True, "most_loss": "rounding"}
COMPILED = {"blocks": "compiled"}

Spec = dict[str, Any]


@pytest.fixture
def machine(machine: Machine) -> Machine:
    """One that has a compiler."""
    return with_facts(machine, {COMPILER_FACT: "g++"})


def with_facts(machine: Machine, facts: dict[str, str]) -> Machine:
    machine.document = {**machine.document, "facts": facts}
    machine.save(update_fields=["document"])
    return machine


@pytest.fixture
def make(profiled_llama: Model, dataset: Dataset, machine: Machine) -> Callable[..., Spec]:
    def make(num_steps: int = LONG, **goal: Any) -> Spec:
        workload = {"sequence_length": 32, "global_batch_size": 2, "num_steps": num_steps}
        return make_spec(profiled_llama, dataset, workload=workload, goal={**GOAL, **goal})

    return make


@pytest.fixture
def traced(ada: User, make: Callable[..., Spec], compiled_document: dict[str, Any]) -> Spec:
    """A long run whose compiled blocks were traced."""
    spec = make()
    price_spec(ada, spec)
    keep_compiled(compiled_document)
    return spec


def keep_compiled(document: dict[str, Any]) -> None:
    """The one trace that was asked for ends well."""
    job = Job.objects.get(kind="profile")
    keep_profile(Profile.objects.get(job_id=job.pk).fingerprint, document)
    job.delete()


def chosen_of(user: User, spec: Spec) -> Any:
    return next(offer for offer in price_spec(user, spec).offers if offer.is_chosen)


@pytest.mark.parametrize(
    ("num_steps", "goal", "facts", "words"),
    [
        (SHORT, {}, {COMPILER_FACT: "g++"}, "a run of 0 s would not repay it"),
        (LONG, {}, {NO_COMPILER_FACT: "no C++ compiler (g++)"}, "blocks are not compiled: bench has no C++ compiler (g++)"),
        (LONG, {}, {}, "whether bench has a compiler is known once its worker has started again"),
        (LONG, {"allow_lossy": False, "most_loss": "any"}, {COMPILER_FACT: "g++"}, ""),
        (LONG, {"forbid": ["compile_blocks"]}, {COMPILER_FACT: "g++"}, ""),
        (LONG, {"pins": {"kernels": {"blocks": "memory_saving"}}}, {COMPILER_FACT: "g++"}, ""),
    ],
)
def test_no_worker_traces_what_cannot_matter(
    ada: User,
    machine: Machine,
    make: Callable[..., Spec],
    num_steps: int,
    goal: dict[str, Any],
    facts: dict[str, str],
    words: str,
) -> None:
    with_facts(machine, facts)
    answer = price_spec(ada, make(num_steps, **goal))
    (chosen,) = (offer for offer in answer.offers if offer.is_chosen)
    said = [sentence for sentence in chosen.explanation if "compil" in sentence]
    assert words in said[-1] if words else not said
    assert not answer.awaits_compiled
    assert not Job.objects.filter(kind="profile").exists()


def test_a_long_run_is_priced_at_once_and_a_worker_traces_its_compiled_blocks(
    ada: User, make: Callable[..., Spec], client: Client
) -> None:
    client.force_login(ada)
    for _ in range(2):
        response = client.post("/api/v1/plans", json.dumps(make()), content_type="application/json")
        assert (response.status_code, response["Retry-After"]) == (200, "2")
        assert response.json()["compiled_blocks"] == "pending"
    chosen = next(offer for offer in response.json()["offers"] if offer["chosen"])
    assert chosen["plan"]["kernels"] == {"blocks": "memory_saving"}
    assert chosen["explanation"][-1] == (
        "blocks are not compiled: a worker traces compiled blocks now, which takes about 15 s; "
        "price again to see what they come to"
    )
    (job,) = Job.objects.filter(kind="profile")
    assert job.spec["compiled"] == ["fp32"]


def test_what_was_traced_is_offered_where_it_is_faster_and_a_job_is_made_of_it(
    ada: User, traced: Spec, machine: Machine
) -> None:
    answer = price_spec(ada, traced)
    assert "compiled_blocks" not in answer.to_json()
    by_label = {offer.row.label: offer for offer in answer.offers}
    chosen = by_label["chosen"]
    assert chosen.row.plan["kernels"] == COMPILED
    assert chosen.row.prediction["once_s"] == 20.0
    assert chosen.explanation[-1] == "op by op the run would take 1125 s instead of 956 s with compiling"
    assert not chosen.is_lossless
    assert by_label["keep_all"].row.plan["kernels"] == {"blocks": "memory_saving"}
    submit_job(ada, spec=traced, plan_id=by_label["keep_all"].row.pk, actor="test").delete()
    job = submit_job(ada, spec=traced, plan_id=chosen.row.pk, actor="test")
    attempt = claim_job(worker="w1", machine=machine, kinds=("train",))
    assert (attempt.job_id, attempt.plan["kernels"]) == (job.pk, COMPILED)


def test_an_offer_of_compiled_blocks_rests_on_their_trace_and_no_other_offer_does(
    ada: User, traced: Spec, profiled_llama: Model
) -> None:
    by_label = {offer.row.label: offer.row.pk for offer in price_spec(ada, traced).offers}
    Profile.objects.exclude(fingerprint=profiled_llama.fingerprint).update(document_sha256="another")
    with pytest.raises(PlanStale, match="plan chosen no longer holds"):
        submit_job(ada, spec=traced, plan_id=by_label["chosen"], actor="test")
    submit_job(ada, spec=traced, plan_id=by_label["keep_all"], actor="test")


def test_blocks_that_cannot_be_compiled_leave_the_best_plan_without_and_are_not_traced_again(
    ada: User, make: Callable[..., Spec], machine: Machine
) -> None:
    price_spec(ada, make())
    error = {"code": "block_not_compiled", "message": "X cannot be compiled: no", "hint": "", "fields": {}}
    result = {"outcome": "failed", "reason": "bad_model", "message": error["message"], "error": error, "step": 0}
    finish_attempt(claim_job(worker="w1", machine=machine), result=result, exit_code=1)
    answer = price_spec(ada, make())
    (chosen,) = (offer for offer in answer.offers if offer.is_chosen)
    assert chosen.explanation[-1] == "blocks are not compiled: X cannot be compiled: no"
    assert not answer.awaits_compiled
    assert Job.objects.filter(kind="profile").count() == 1


def test_a_job_that_may_wait_does_so_for_the_trace_and_is_planned_with_it(
    ada: User, make: Callable[..., Spec], compiled_document: dict[str, Any]
) -> None:
    now = submit_job(ada, spec=make(), actor="test")
    assert now.plan["kernels"] == {"blocks": "memory_saving"}
    by_name = submit_job(ada, spec=make() | {"plan": "keep_all"}, when_ready=True, actor="test")
    assert not by_name.awaits_plan
    job = submit_job(ada, spec=make(), when_ready=True, actor="test")
    assert job.awaits_plan
    assert plan_waiting_jobs() == []
    keep_compiled(compiled_document)
    assert plan_waiting_jobs() == [job.pk]
    job.refresh_from_db()
    assert job.plan["kernels"] == COMPILED


def test_a_job_whose_compiled_plan_ran_out_goes_on_with_one_that_compiles_too(
    ada: User, traced: Spec, machine: Machine, make: Callable[..., Spec]
) -> None:
    peak_bytes = chosen_of(ada, traced).row.prediction["device_peak_high_bytes"]
    job = submit_job(ada, spec=make(device_budget_bytes=peak_bytes), actor="test")
    assert job.plan["kernels"] == COMPILED
    run_out(run(machine))
    assert plan_waiting_jobs() == [job.pk]
    before = job.plan
    job.refresh_from_db()
    assert job.plan != before
    assert job.plan["kernels"] == COMPILED


def test_each_lever_of_a_compiled_plan_is_priced_and_so_is_a_first_look(ada: User, traced: Spec, machine: Machine) -> None:
    spec = read_spec(ada, traced)
    questions = resolve(asked_by_training(spec), [place_of(machine)])
    assert not isinstance(questions, Waiting)
    question = questions[0]
    found = find_offered(question).answer.result.chosen
    levers = list_levers(question, found.plan, found.prediction.device_bytes_by_category)
    assert any(lever.category == "activations" and lever.device_change_bytes < 0 for lever in levers)
    assert question.find_by_hand(taken=found.plan).label == "chosen before"
    assert glance_at(ada, spec, taken=found.plan) is None


def test_the_best_plan_says_that_compiled_blocks_may_make_a_better_one(
    ada: User, make: Callable[..., Spec], machine: Machine, client: Client, compiled_document: dict[str, Any]
) -> None:
    client.force_login(ada)
    asked = {name: make()[name] for name in ("model", "workload", "goal")} | {"machine": machine.pk}

    def ask() -> Any:
        return client.post("/api/v1/plans/best", json.dumps(asked), content_type="application/json")

    answer = ask()
    assert answer.headers["Retry-After"]
    before = answer.json()
    assert before["compiled_blocks"] == "pending"
    assert before["chosen"]["plan"]["kernels"] == {"blocks": "memory_saving"}
    keep_compiled(compiled_document)
    after = ask().json()
    assert after["compiled_blocks"] is None
    assert after["chosen"]["plan"]["kernels"] == COMPILED


def test_a_plan_with_compiled_blocks_is_edited_compared_and_estimated_by_the_api(
    ada: User, traced: Spec, machine: Machine, client: Client
) -> None:
    client.force_login(ada)
    plan = chosen_of(ada, traced).row.plan
    plain = {**plan, "kernels": {"blocks": "memory_saving"}}
    asked = {name: traced[name] for name in ("model", "workload", "goal")} | {"machine": machine.pk}

    def ask(path: str, **more: Any) -> Any:
        response = client.post(f"/api/v1/{path}", json.dumps(asked | more), content_type="application/json")
        assert response.status_code == 200, response.content
        return response.json()

    best = ask("plans/best")
    assert best["chosen"]["plan"] == plan
    compared = ask("plans/compare", plans={"compiled": plan, "plain": plain})
    assert compared["plans"][0]["prediction"]["step_ms"] < compared["plans"][1]["prediction"]["step_ms"]
    assert best["explanation"][-1].startswith("op by op the run would take")
    edited = ask("plans/price", plan=plain, change={"kernels": COMPILED})
    assert edited["step_change_ms"] < 0
    assert ask("estimates", plan=plan)["plans"][0]["prediction"]["once_s"] == 20.0


def test_jobs_that_differ_in_how_blocks_run_are_compared_with_what_that_costs(
    ada: User, traced: Spec, machine: Machine
) -> None:
    rows = {offer.row.label: offer.row.pk for offer in price_spec(ada, traced).offers}
    jobs = [submit_job(ada, spec=traced, plan_id=rows[label], actor="test") for label in ("keep_all", "chosen")]
    for order, is_slower in ((jobs, False), (jobs[::-1], True)):
        (cost,) = (cost for cost in compare_jobs(order).costs if cost.decision == "kernels")
        assert (cost.step_change_ms > 0) == is_slower
