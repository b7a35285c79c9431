"""Estimates over the API: priced and explained with a model's real profile, and refused by field."""

import json
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from optimizer.search.answer.baselines import BASELINES
from webapp.api.api import api
from webapp.catalog.actions import keep_profile
from webapp.catalog.models import Machine, Model, Profile
from webapp.jobs.models import Job, PlanOffer

WORKLOAD = {"sequence_length": 128, "global_batch_size": 4}


def post(client: Client, **changes: Any) -> Any:
    body = {"workload": WORKLOAD, "gpu": "RTX 4090", **changes}
    return client.post("/api/v1/estimates", data=json.dumps(body), content_type="application/json")


def test_a_card_of_the_table_needs_no_machine_and_answers_plain_training_beside_the_best(
    as_ada: Client, profiled_llama: Model
) -> None:
    answer = post(as_ada, model=profiled_llama.pk)
    assert answer.status_code == 200, answer.content
    document = answer.json()
    assert [plan["label"] for plan in document["plans"]] == ["keep_all", "chosen"]
    assert {plan["verdict"] for plan in document["plans"]} == {"fits"}
    assert document["profile"] == "ready"
    assert document["machine"]["device"]["kind"] == "cuda"
    peak = document["plans"][-1]["prediction"]["device_peak_bytes"]
    assert sum(row["peak_bytes"] for row in document["explanation"]["categories"]) == peak
    assert "recompute" in {knob["technique"] for knob in document["knobs"]}


def test_it_keeps_nothing(as_ada: Client, profiled_llama: Model) -> None:
    post(as_ada, model=profiled_llama.pk)
    assert not PlanOffer.objects.exists()
    assert not Job.objects.exists()


def test_a_known_machine_is_named_by_its_id(as_ada: Client, profiled_llama: Model, machine: Machine) -> None:
    document = post(as_ada, model=profiled_llama.name, machine=machine.pk, gpu=None, plan="recompute_all").json()
    assert document["machine"]["name"] == "bench"
    assert [plan["label"] for plan in document["plans"]] == ["recompute_all"]


def test_the_plan_of_an_answer_can_be_asked_again(as_ada: Client, profiled_llama: Model) -> None:
    first = post(as_ada, model=profiled_llama.pk, plan="offload_all").json()["plans"][0]
    again = post(as_ada, model=profiled_llama.pk, plan=first["plan"], knobs=False).json()
    assert again["plans"] == [{**first, "label": "given"}]
    assert again["knobs"] == []


def test_a_knobs_plan_costs_what_the_knob_says(as_ada: Client, profiled_llama: Model) -> None:
    found = post(as_ada, model=profiled_llama.pk, plan="keep_all").json()
    knob = found["knobs"][0]
    priced = post(as_ada, model=profiled_llama.pk, plan=knob["plan"], knobs=False).json()["plans"][0]["prediction"]
    assert priced["step_ms"] == knob["step_ms"]
    assert priced["step_ms"] - found["plans"][0]["prediction"]["step_ms"] == knob["step_change_ms"]


def test_a_new_model_is_202_while_profiled_and_200_afterwards(
    as_ada: Client, new_llama: Model, llama_document: dict[str, Any]
) -> None:
    waiting = post(as_ada, model=new_llama.pk)
    assert (waiting.status_code, waiting["Retry-After"]) == (202, "2")
    assert waiting.json() == {"profile": "pending", "waiting_for": "profile"}
    assert Job.objects.get().kind == "profile"
    keep_profile(new_llama.fingerprint, llama_document)
    assert post(as_ada, model=new_llama.pk).status_code == 200


def test_a_model_that_cannot_be_traced_is_422_with_the_traces_words(as_ada: Client, new_llama: Model) -> None:
    error = {"code": "bad_model", "message": "heads do not divide", "hint": "Change them.", "fields": {}}
    Profile.objects.create(fingerprint=new_llama.fingerprint, error=error)
    refused = post(as_ada, model=new_llama.pk)
    assert (refused.status_code, refused.json()["detail"]) == (422, "heads do not divide")


def test_best_where_nothing_fits_names_the_smallest_budget(as_ada: Client, profiled_llama: Model) -> None:
    goal = {"device_budget_bytes": 100_000}
    refused = post(as_ada, model=profiled_llama.pk, plan="best", goal=goal)
    assert (refused.status_code, refused.json()["code"]) == (422, "no_feasible_plan")
    shown = post(as_ada, model=profiled_llama.pk, goal=goal).json()
    assert shown["nothing_fits"] == refused.json()["detail"]
    assert [plan["label"] for plan in shown["plans"]] == ["keep_all"]


@pytest.mark.parametrize(
    ("changes", "code", "field", "words"),
    [
        ({"gpu": "RTX 9999"}, "invalid_input", "gpu", "GPU 'RTX 9999' is not in the table"),
        ({"gpu": None}, "invalid_input", "machine", "neither machine nor gpu is given"),
        ({"machine": "mach_1"}, "invalid_input", "machine", "machine and gpu are both given"),
        ({"gpu": None, "machine": "mach_1"}, "invalid_input", "machine", "is not there"),
        ({"model": "nobody"}, "invalid_input", "model", "model 'nobody' is not there"),
        ({"plan": "hope"}, "invalid_input", "plan", "plan 'hope' is not one of best, " + ", ".join(BASELINES)),
        ({"plan": {"version": 2}}, "invalid_plan", "plan.batch", "plan.batch is missing"),
        ({"workload": {"sequence_length": 1}}, "invalid_workload", "workload.sequence_length", "an integer from 8"),
        ({"workload": {"sequence_length": 512}}, "invalid_workload", "workload.sequence_length", "positions for 256"),
        ({"goal": {}}, "invalid_workload", "goal.device_budget_bytes", "is missing"),
        ({"color": "red"}, "invalid_input", "color", ""),
    ],
)
def test_what_is_wrong_is_refused_by_field(
    as_ada: Client, profiled_llama: Model, changes: dict[str, Any], code: str, field: str, words: str
) -> None:
    refused = post(as_ada, **{"model": profiled_llama.pk, **changes})
    document = refused.json()
    assert (refused.status_code, refused["Content-Type"]) == (422, "application/problem+json")
    assert document["code"] == code
    assert document["fields"][0]["field"] == field
    assert words in document["detail"]


def test_a_model_of_someone_else_is_not_there(as_eve: Client, profiled_llama: Model, ada: User) -> None:
    profiled_llama.owner = ada
    profiled_llama.save()
    assert post(as_eve, model=profiled_llama.pk).status_code == 422


def test_the_answer_is_typed_in_the_schema() -> None:
    schema = api.get_openapi_schema(path_prefix="/api/v1/")
    responses = schema["paths"]["/api/v1/estimates"]["post"]["responses"]
    either = responses[200]["content"]["application/json"]["schema"]["anyOf"]
    assert [each["$ref"].rpartition("/")[2] for each in either] == ["EstimateAnswer", "GenerationAnswer"]
    knob = schema["components"]["schemas"]["Knob"]["properties"]
    assert knob["step_change_ms"]["type"] == "number"
