"""Compiled blocks in the service: a profile of their own where they are pinned, a price, and refusals in words."""

from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User

from optimizer.base.errors import HeadroomError, InvalidPlan
from optimizer.hardware.machine import NO_COMPILER_FACT
from tests.webapp.conftest import make_spec
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import finish_attempt
from webapp.catalog.actions import keep_profile
from webapp.catalog.models import Dataset, Machine, Model, Profile
from webapp.jobs.models import Job
from webapp.jobs.specs.training import read_spec
from webapp.planning.pricing import price_spec
from webapp.planning.search.profile_requests import ProfileFailed
from webapp.planning.submitting import submit_job
from worker.run.brief import make_brief

pytestmark = pytest.mark.django_db

PINS: dict[str, Any] = {"kernels": {"blocks": "compiled"}}
LITTLE = {"device_budget_bytes": 2**30, "allow_lossy": True, "most_loss": "rounding"}


def with_compiled(model: Model, dataset: Dataset, *, pins: dict[str, Any] | None = None, **goal: Any) -> dict[str, Any]:
    return make_spec(model, dataset, goal={**LITTLE, "pins": {**PINS, **(pins or {})}, **goal})


def test_a_pin_asks_for_a_profile_with_compiled_blocks_beside_the_one_that_is_there(
    ada: User, machine: Machine, profiled_llama: Model, dataset: Dataset, tmp_path: Path
) -> None:
    spec = with_compiled(profiled_llama, dataset)
    assert price_spec(ada, spec).to_json() == {"profile": "pending", "waiting_for": "profile"}
    job = Job.objects.get(kind="profile")
    assert job.spec["name"] == "profile of llama, with compiled blocks"
    brief = make_brief(claim_job(worker="w1", machine=machine), folder=tmp_path, home=tmp_path, devices=["cpu"])
    assert brief["compiled"] == ["fp32", "fp32+bf16", "bf16"]
    assert price_spec(ada, make_spec(profiled_llama, dataset)).profile == "ready"


def test_no_form_of_weights_is_traced_that_the_goal_rules_out(
    ada: User, machine: Machine, profiled_llama: Model, dataset: Dataset
) -> None:
    price_spec(ada, with_compiled(profiled_llama, dataset, forbid=["bf16", "fp16", "autocast"]))
    price_spec(ada, with_compiled(profiled_llama, dataset, pins={"weights": {"dtype": "fp32", "autocast": "off"}}))
    assert [job.spec["compiled"] for job in Job.objects.filter(kind="profile")] == [["fp32"]]


def test_a_pinned_job_is_priced_with_its_time_to_compile_and_its_worker_is_given_the_kernels(
    ada: User,
    machine: Machine,
    profiled_llama: Model,
    dataset: Dataset,
    compiled_document: dict[str, Any],
    tmp_path: Path,
) -> None:
    spec = with_compiled(profiled_llama, dataset)
    price_spec(ada, spec)
    keep_profile(read_spec(ada, spec).profile_fingerprint, compiled_document)
    answer = price_spec(ada, spec)
    chosen = next(offer for offer in answer.offers if offer.is_chosen)
    assert chosen.row.plan["kernels"] == {"blocks": "compiled"}
    assert chosen.row.prediction["once_s"] == 20.0
    assert "compiling takes about 20 s before the first step, less where it was done before" in chosen.explanation
    job = submit_job(ada, spec=spec, plan_id=chosen.row.pk, actor="test")
    attempt = claim_job(worker="w1", machine=machine, kinds=("train",))
    assert attempt.job_id == job.pk
    brief = make_brief(attempt, folder=tmp_path, home=tmp_path, devices=["cpu"])
    assert brief["kernels_folder"] == str(tmp_path / "cache" / "compiled")


@pytest.mark.parametrize(
    ("pins", "goal", "words"),
    [
        ({"activations": {"per_block": ["selective"] * 4}}, {}, "goal.pins.activations.per_block is selective, which keeps some"),
        ({"weights": {"frozen": "nf4"}}, {"most_loss": "any"}, "goal.pins.weights.frozen is nf4, which a library unpacks"),
        ({"layout": {"num_devices": 2}}, {"num_devices": 2}, "goal.pins.layout is num_devices=2, which several devices do not"),
    ],
)
def test_a_pin_that_does_not_go_with_it_is_refused_at_once(
    ada: User, profiled_llama: Model, dataset: Dataset, pins: dict[str, Any], goal: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidPlan, match="goal.pins.kernels.blocks is compiled, and ") as caught:
        read_spec(ada, with_compiled(profiled_llama, dataset, pins=pins, **goal))
    assert words in caught.value.message
    assert "Leave out one of the two pins" in caught.value.hint
    assert not Job.objects.exists()


def test_a_machine_without_a_compiler_refuses_the_pin(
    ada: User, machine: Machine, profiled_llama: Model, dataset: Dataset, compiled_document: dict[str, Any]
) -> None:
    Machine.objects.update(document={**machine.document, "facts": {NO_COMPILER_FACT: "no C++ compiler"}})
    spec = with_compiled(profiled_llama, dataset)
    price_spec(ada, spec)
    keep_profile(read_spec(ada, spec).profile_fingerprint, compiled_document)
    with pytest.raises(InvalidPlan, match=r"this machine cannot compile them: that needs a C\+\+ compiler"):
        price_spec(ada, spec)


def test_a_trace_that_refused_the_blocks_is_repeated_in_words_and_not_traced_again(
    ada: User, machine: Machine, profiled_llama: Model, dataset: Dataset
) -> None:
    spec = with_compiled(profiled_llama, dataset)
    price_spec(ada, spec)
    attempt = claim_job(worker="w1", machine=machine)
    message, hint = "the plan compiles the model's blocks, and X cannot be compiled: no", "Choose kernels.blocks=memory_saving"
    error = {"code": "block_not_compiled", "message": message, "hint": hint, "fields": {"block": "X"}}
    result = {"outcome": "failed", "reason": "bad_model", "message": message, "error": error, "step": 0}
    finish_attempt(attempt, result=result, exit_code=1)
    Profile.objects.update(updated_at="2020-01-01T00:00:00Z")
    with pytest.raises(ProfileFailed, match="X cannot be compiled: no") as caught:
        price_spec(ada, spec)
    assert caught.value.hint == hint
    assert Job.objects.filter(kind="profile").count() == 1
    assert price_spec(ada, make_spec(profiled_llama, dataset)).profile == "ready"


def test_a_profile_that_an_older_worker_made_without_them_is_no_fault_of_the_server(
    ada: User, machine: Machine, profiled_llama: Model, dataset: Dataset, llama_document: dict[str, Any]
) -> None:
    spec = with_compiled(profiled_llama, dataset)
    price_spec(ada, spec)
    keep_profile(read_spec(ada, spec).profile_fingerprint, llama_document)
    with pytest.raises(HeadroomError, match="goal.pins.kernels.blocks is compiled; this profile holds none"):
        price_spec(ada, spec)
