"""Pricing and submitting over the API, with a model's real profile."""

import json
from typing import Any

import pytest
from django.test import Client

from optimizer.search.answer.baselines import BASELINES
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.webapp.conftest import make_spec, make_tiny_model
from webapp.catalog.actions import keep_profile, register_machine
from webapp.catalog.models import Dataset, Machine, Model, Profile
from webapp.jobs.models import Job

WORKLOAD = {"sequence_length": 128, "global_batch_size": 4, "num_steps": 10}
OFFER_KEYS = ["chosen", "costs", "explanation", "id", "label", "lossless", "machine", "plan", "prediction", "verdict"]
TOO_SMALL_BYTES = 100_000


def post(client: Client, path: str, body: dict[str, Any], **headers: Any) -> Any:
    return client.post(f"/api/v1/{path}", data=json.dumps(body), content_type="application/json", headers=headers)


@pytest.fixture
def spec(profiled_llama: Model, dataset: Dataset) -> dict[str, Any]:
    goal = {"device_budget_bytes": "1 GiB"}
    return make_spec(profiled_llama, dataset, workload=WORKLOAD, goal=goal)


@pytest.fixture
def small(spec: dict[str, Any]) -> dict[str, Any]:
    """Nothing fits."""
    return {**spec, "goal": {"device_budget_bytes": TOO_SMALL_BYTES}}


def offers_of(client: Client, spec: dict[str, Any]) -> dict[str, Any]:
    return {offer["label"]: offer for offer in post(client, "plans", spec).json()["offers"]}


def test_a_new_model_is_202_while_profiled_and_200_with_offers_afterwards(
    as_ada: Client, machine: Machine, new_llama: Model, dataset: Dataset, llama_document: dict[str, Any]
) -> None:
    spec = make_spec(new_llama, dataset, workload=WORKLOAD)
    waiting = post(as_ada, "plans", spec)
    assert (waiting.status_code, waiting["Retry-After"]) == (202, "2")
    assert waiting.json() == {"profile": "pending", "waiting_for": "profile"}
    assert as_ada.get(f"/api/v1/models/{new_llama.pk}").json()["profile"] == "pending"
    keep_profile(new_llama.fingerprint, llama_document)
    assert post(as_ada, "plans", spec).status_code == 200
    assert as_ada.get(f"/api/v1/models/{new_llama.pk}").json()["profile"] == "ready"


def test_before_a_machine_is_known_it_is_202_and_says_so(as_ada: Client, spec: dict[str, Any]) -> None:
    waiting = post(as_ada, "plans", spec)
    assert (waiting.status_code, waiting["Retry-After"]) == (202, "2")
    assert waiting.json() == {"profile": "pending", "waiting_for": "machine"}


def test_a_job_that_cannot_be_priced_yet_is_409_with_retry_after(as_ada: Client, spec: dict[str, Any]) -> None:
    refused = post(as_ada, "jobs", {"spec": spec})
    assert (refused.status_code, refused.json()["code"], refused["Retry-After"]) == (409, "profile_pending", "2")


def test_a_model_that_cannot_be_traced_is_422_with_the_traces_words(
    as_ada: Client, machine: Machine, new_llama: Model, dataset: Dataset
) -> None:
    error = {"code": "bad_model", "message": "heads do not divide", "hint": "Change them.", "fields": {}}
    Profile.objects.create(fingerprint=new_llama.fingerprint, error=error)
    refused = post(as_ada, "plans", make_spec(new_llama, dataset))
    assert (refused.status_code, refused.json()["code"]) == (422, "bad_model")
    assert (refused.json()["detail"], refused.json()["hint"]) == ("heads do not divide", "Change them.")


def test_offers_show_what_the_contract_lists(as_ada: Client, machine: Machine, spec: dict[str, Any]) -> None:
    document = post(as_ada, "plans", spec).json()
    assert document["profile"] == "ready"
    assert [offer["label"] for offer in document["offers"]] == ["chosen", *BASELINES]
    assert [offer["label"] for offer in document["offers"] if offer["chosen"]] == ["chosen"]
    assert all(sorted(offer) == OFFER_KEYS for offer in document["offers"])
    assert document["offers"][0]["machine"] == {"id": machine.pk, "name": "bench", "device": "test processor"}


def test_the_best_plan_of_several_devices_stands_beside_setups_that_people_write_by_hand(
    as_ada: Client, pair: Machine, profiled_llama: Model
) -> None:
    goal = {"device_budget_bytes": "1 GiB", "num_devices": 2}
    asked = {"model": profiled_llama.pk, "workload": WORKLOAD, "goal": goal, "machine": pair.pk}
    found = post(as_ada, "plans/best", asked).json()
    said = {setup["label"]: setup for setup in found["setups"]}
    assert said["fsdp_recompute"]["setup"] == "fsdp"
    assert found["baselines"]["fsdp_recompute"]["plan"]["layout"]["data"] == "zero3"
    assert "was not traced" in said["tensor"]["finding"]
    assert "tensor" not in found["baselines"]
    assert [bool(option["sentence"]) for option in found["layouts"]] == [True] * len(found["layouts"])
    alone = post(as_ada, "plans/best", {**asked, "goal": {"device_budget_bytes": "1 GiB"}}).json()
    assert (alone["setups"], alone["layouts"]) == ([], [])


def test_when_nothing_fits_the_answer_names_the_smallest_budget_and_offers_the_baselines(
    as_ada: Client, machine: Machine, small: dict[str, Any]
) -> None:
    refused = post(as_ada, "plans", small)
    document = refused.json()
    assert (refused.status_code, refused["Content-Type"]) == (422, "application/problem+json")
    assert document["code"] == "no_feasible_plan"
    assert document["extra"]["budget_bytes"] == TOO_SMALL_BYTES
    assert [offer["label"] for offer in document["extra"]["offers"]] == list(BASELINES)
    enough = {**small, "goal": {"device_budget_bytes": document["extra"]["smallest_feasible_bytes"]}}
    assert offers_of(as_ada, enough)["chosen"]["verdict"] == "fits"


def test_a_job_is_made_of_the_offer_it_names(as_ada: Client, machine: Machine, spec: dict[str, Any]) -> None:
    offer = offers_of(as_ada, spec)["recompute_all"]
    made = post(as_ada, "jobs", {"spec": spec, "plan_id": offer["id"]})
    job = made.json()
    assert (made.status_code, made["Location"]) == (201, f"/api/v1/jobs/{job['id']}")
    assert (job["plan"], job["prediction"]) == (offer["plan"], offer["prediction"])
    assert (job["state"], job["machine"], job["num_steps"]) == ("queued", "bench", 10)


def test_a_plan_that_does_not_fit_is_409_unless_overridden(
    as_ada: Client, machine: Machine, small: dict[str, Any]
) -> None:
    offers = post(as_ada, "plans", small).json()["extra"]["offers"]
    body = {"spec": small, "plan_id": offers[0]["id"]}
    refused = post(as_ada, "jobs", body)
    assert (refused.status_code, refused.json()["code"]) == (409, "does_not_fit")
    assert refused.json()["extra"]["budget_bytes"] == TOO_SMALL_BYTES
    assert post(as_ada, "jobs", {**body, "override": True}).status_code == 201


def test_a_plan_whose_ground_has_changed_is_409(as_ada: Client, machine: Machine, spec: dict[str, Any]) -> None:
    offer = offers_of(as_ada, spec)["chosen"]
    register_machine(name="bench", document={**machine.document, "host_memory_bytes": 2**30})
    refused = post(as_ada, "jobs", {"spec": spec, "plan_id": offer["id"]})
    assert (refused.status_code, refused.json()["code"]) == (409, "plan_stale")
    assert refused.json()["hint"] == "Price the spec again and take one of its offers."
    assert not Job.objects.exists()


def test_a_plan_that_is_not_ones_own_is_named_as_a_wrong_field(
    as_ada: Client, as_eve: Client, machine: Machine, spec: dict[str, Any]
) -> None:
    offer = offers_of(as_ada, spec)["chosen"]
    refused = post(as_eve, "jobs", {"spec": spec, "plan_id": offer["id"]})
    assert (refused.status_code, refused.json()["fields"][0]["field"]) == (422, "plan_id")


def test_a_request_that_is_sent_twice_makes_one_job(as_ada: Client, machine: Machine, spec: dict[str, Any]) -> None:
    first, second = (post(as_ada, "jobs", {"spec": spec}, **{"Idempotency-Key": "k1"}) for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 201)
    assert second.json() == first.json()
    assert second["Location"] == first["Location"]
    assert (first.headers.get("Idempotent-Replayed"), second["Idempotent-Replayed"]) == (None, "true")
    assert Job.objects.count() == 1


def test_a_key_of_another_request_is_refused_and_anothers_key_is_free(
    as_ada: Client, as_eve: Client, machine: Machine, spec: dict[str, Any]
) -> None:
    post(as_ada, "jobs", {"spec": spec}, **{"Idempotency-Key": "k1"})
    refused = post(as_ada, "jobs", {"spec": {**spec, "name": "other"}}, **{"Idempotency-Key": "k1"})
    assert (refused.status_code, refused.json()["code"]) == (422, "idempotency_key_reused")
    assert post(as_eve, "jobs", {"spec": spec}, **{"Idempotency-Key": "k1"}).status_code == 201
    assert Job.objects.count() == 2


def test_a_refused_job_leaves_its_key_free(as_ada: Client, machine: Machine, small: dict[str, Any]) -> None:
    assert post(as_ada, "jobs", {"spec": small}, **{"Idempotency-Key": "k1"}).status_code == 422
    enough = {**small, "goal": {"device_budget_bytes": "1 GiB"}}
    assert post(as_ada, "jobs", {"spec": enough}, **{"Idempotency-Key": "k1"}).status_code == 201


def test_waiting_for_a_price_with_a_key_ends_with_the_price(
    as_ada: Client, spec: dict[str, Any], machine: Machine
) -> None:
    Machine.objects.all().delete()
    assert post(as_ada, "plans", spec, **{"Idempotency-Key": "k1"}).status_code == 202
    register_machine(name="bench", document=machine.document)
    first, second = (post(as_ada, "plans", spec, **{"Idempotency-Key": "k1"}) for _ in range(2))
    assert first.status_code == 200
    assert second.json() == first.json()


def test_a_model_that_is_no_decoder_is_refused_before_it_is_profiled(
    as_ada: Client, machine: Machine, dataset: Dataset
) -> None:
    encoder = make_tiny_model(name="encoder", config=SMALL_CONFIGS["bert"])
    for path, body in (("plans", make_spec(encoder, dataset)), ("jobs", {"spec": make_spec(encoder, dataset)})):
        refused = post(as_ada, path, body)
        assert refused.status_code == 422
        assert (refused.json()["code"], refused.json()["fields"][0]["field"]) == ("bad_model", "model")
        assert "encoder is of type bert, an encoder; jobs train decoders" in refused.json()["detail"]
