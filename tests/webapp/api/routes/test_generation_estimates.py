"""Estimates of batch generations over the API: with a real profile, waited for where there is none, refused by field."""

import json
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from optimizer.models.spec import read_model_spec
from optimizer.profile.fingerprints import generation_fingerprint
from tests.webapp.conftest import TINY_CONFIG
from webapp.catalog.actions import keep_profile
from webapp.catalog.models import Dataset, Model, Profile
from webapp.jobs.models import Job
from worker.run.brief import make_brief
from worker.run.profiling import profile_to_file

WORKLOAD: dict[str, Any] = {"kind": "generation", "prompt_length": 8, "num_new_tokens": 6, "num_sequences": 4}


def post(client: Client, **changes: Any) -> Any:
    body = {"workload": WORKLOAD, "gpu": "RTX 4090", **changes}
    return client.post("/api/v1/estimates", data=json.dumps(body), content_type="application/json")


@pytest.fixture(scope="module")
def generation_document() -> dict[str, Any]:
    from optimizer.profile.trace.generation import profile_generation

    return profile_generation(read_model_spec(TINY_CONFIG), representations=("fp32", "bf16")).to_json()


@pytest.fixture
def generating(model: Model, generation_document: dict[str, Any]) -> Model:
    keep_profile(generation_fingerprint(model.fingerprint), generation_document)
    return model


def test_resident_weights_stand_beside_the_best(as_ada: Client, generating: Model) -> None:
    answer = post(as_ada, model=generating.pk)
    assert answer.status_code == 200, answer.content
    document = answer.json()
    assert document["kind"] == "generation"
    assert [plan["label"] for plan in document["plans"]] == ["resident", "chosen"]
    best = document["plans"][-1]
    assert best["verdict"] == "fits"
    assert best["prediction"]["memory"]["process"]["value"] > best["prediction"]["device_peak_bytes"]
    assert sum(row["peak_bytes"] for row in document["explanation"]["categories"]) == best["prediction"]["device_peak_bytes"]
    assert document["sentences"]


def test_the_plan_of_an_answer_can_be_asked_again(as_ada: Client, generating: Model) -> None:
    first = post(as_ada, model=generating.pk, plan="best").json()["plans"][0]
    again = post(as_ada, model=generating.pk, plan=first["plan"]).json()["plans"]
    assert again == [{**first, "label": "given"}]


def test_budgets_may_be_texts_and_an_objective_is_named(as_ada: Client, generating: Model) -> None:
    goal = {"device_budget_bytes": "2 GiB", "objective": "largest_batch", "allow_lossy": True}
    document = post(as_ada, model=generating.pk, plan="best", goal=goal).json()
    assert document["goal"]["device_budget_bytes"] == 2 * 1024**3
    assert document["plans"][0]["plan"]["batch_size"] == 4


def test_a_model_that_was_never_traced_generating_is_traced_by_a_worker(
    as_ada: Client, profiled_llama: Model, tmp_path: Path
) -> None:
    waiting = post(as_ada, model=profiled_llama.pk)
    assert (waiting.status_code, waiting.json()["waiting_for"]) == (202, "profile")
    job = Job.objects.get()
    assert (job.kind, job.spec["generates"]) == ("profile", True)
    brief = make_brief(job.attempts.model(job=job, number=1, fence=1), folder=tmp_path, home=tmp_path, devices=["cpu"])
    profile_to_file(brief["config"], tmp_path / "profile.json", adapter=brief["adapter"], generates=brief["generates"])
    keep_profile(generation_fingerprint(profiled_llama.fingerprint), json.loads((tmp_path / "profile.json").read_text()))
    assert post(as_ada, model=profiled_llama.pk).status_code == 200
    assert Profile.objects.count() == 2


def test_best_where_nothing_fits_names_the_smallest_budget(as_ada: Client, generating: Model) -> None:
    refused = post(as_ada, model=generating.pk, plan="best", goal={"device_budget_bytes": 1000})
    assert (refused.status_code, refused.json()["code"]) == (422, "no_feasible_plan")
    assert "Raise the budget to" in refused.content.decode()


@pytest.mark.parametrize(
    ("changes", "code", "field", "words"),
    [
        ({"plan": "keep_all"}, "invalid_input", "plan", "is not one of best, resident"),
        ({"plan": {"batch_size": 0}}, "invalid_plan", "plan.batch_size", "allowed: 1 or more"),
        ({"plan": {"batch_size": 5}}, "invalid_plan", "plan.batch_size", "is more than the sequences"),
        ({"workload": {**WORKLOAD, "prompt_length": 1}}, "invalid_workload", "workload.prompt_length", "an integer from 2"),
        ({"workload": {**WORKLOAD, "num_new_tokens": 9999}}, "invalid_workload", "workload.num_new_tokens", "positions for"),
        ({"workload": {**WORKLOAD, "global_batch_size": 2}}, "invalid_workload", "workload.global_batch_size", "not a known"),
        ({"workload": {"kind": "magic"}}, "invalid_workload", "workload.kind", "not a known"),
        ({"goal": {"device_budget_bytes": 1, "objective": "joy"}}, "invalid_workload", "goal.objective", "throughput"),
    ],
)
def test_what_is_wrong_is_refused_by_field(
    as_ada: Client, generating: Model, changes: dict[str, Any], code: str, field: str, words: str
) -> None:
    refused = post(as_ada, **{"model": generating.pk, **changes})
    document = refused.json()
    assert (refused.status_code, document["code"]) == (422, code)
    assert document["fields"][0]["field"] == field
    assert words in document["detail"]


def ask_best(client: Client, **changes: Any) -> Any:
    body = {"workload": WORKLOAD, "gpu": "RTX 4090", **changes}
    return client.post("/api/v1/plans/best", data=json.dumps(body), content_type="application/json")


def test_the_best_generation_comes_with_its_baselines_and_its_frontier(as_ada: Client, generating: Model) -> None:
    answer = ask_best(as_ada, model=generating.pk)
    assert answer.status_code == 200, answer.content
    document = answer.json()
    assert (document["kind"], document["objective"]) == ("generation", "throughput")
    assert "resident" in document["baselines"]
    totals = [found["prediction"]["total_s"] for found in document["baselines"].values() if found["verdict"] == "fits"]
    assert document["chosen"]["prediction"]["total_s"] <= min(totals)
    assert document["frontier"]
    estimated = post(as_ada, model=generating.pk, plan="best").json()["plans"][0]
    assert document["chosen"]["plan"] == estimated["plan"]


def test_what_a_goal_pins_is_kept_and_refused_by_name(as_ada: Client, generating: Model) -> None:
    goal = {"device_budget_bytes": "1 GiB", "pins": {"batch_size": 2, "kv_cache": {"place": "host"}}}
    plan = ask_best(as_ada, model=generating.pk, goal=goal).json()["chosen"]["plan"]
    assert (plan["batch_size"], plan["kv_cache"]["place"]) == (2, "host")
    for pins, field, words in (
        ({"kv_cache": {"place": "moon"}}, "goal.pins.kv_cache.place", "allowed: device, host, disk"),
        ({"wings": 2}, "goal.pins.wings", "is not a known field"),
        ({"batch_size": 9}, "goal.pins.batch_size", "allowed are 1 to 4"),
        ({"weights": {"dtype": "bf16"}}, "goal.pins.weights.dtype", "changes the numbers"),
    ):
        refused = ask_best(as_ada, model=generating.pk, goal={**goal, "pins": pins})
        assert (refused.status_code, refused.json()["fields"][0]["field"]) == (422, field)
        assert words in refused.json()["detail"]


def test_a_generation_that_fits_nowhere_says_what_would_be_enough(as_ada: Client, generating: Model) -> None:
    answer = ask_best(as_ada, model=generating.pk, goal={"device_budget_bytes": 1000})
    assert answer.status_code == 422
    assert answer.json()["code"] == "no_feasible_plan"
    assert answer.json()["extra"]["smallest_feasible_bytes"] > 1000


def test_the_best_generation_waits_for_the_models_profile(as_ada: Client, model: Model) -> None:
    answer = ask_best(as_ada, model=model.pk)
    assert (answer.status_code, answer.json()["waiting_for"]) == (202, "profile")


def ask(client: Client, path: str, **changes: Any) -> Any:
    body = {"workload": WORKLOAD, "gpu": "RTX 4090", **changes}
    return client.post(f"/api/v1/plans/{path}", data=json.dumps(body), content_type="application/json")


def test_plans_of_a_generation_stand_side_by_side_with_only_what_differs(as_ada: Client, generating: Model) -> None:
    answer = ask(as_ada, "compare", model=generating.pk, plans={"best": "best", "one": "one_at_a_time"})
    assert answer.status_code == 200, answer.content
    document = answer.json()
    assert (document["kind"], [plan["label"] for plan in document["plans"]]) == ("generation", ["best", "one"])
    sizes = {each["knob"]: each["values"] for each in document["decisions"]}
    assert sizes["batch_size"] == [4, 1]
    assert all(len(set(values)) > 1 for values in sizes.values())
    assert {row["category"] for row in document["bytes_at_peak"]} >= {"kv_cache"}


def test_cards_are_ranked_for_a_generation(as_ada: Client, generating: Model) -> None:
    body = {"model": generating.pk, "workload": WORKLOAD, "cards": ["T4", "RTX 4090"]}
    answer = as_ada.post("/api/v1/plans/cards", data=json.dumps(body), content_type="application/json")
    assert answer.status_code == 200, answer.content
    found = answer.json()["cards"]
    speeds = [card["tokens_per_s"] for card in found]
    assert speeds == sorted(speeds, reverse=True)
    assert found[0]["chosen"]["plan"]["batch_size"] == 4


def test_an_edit_of_a_generations_plan_is_priced_against_what_it_was(as_ada: Client, generating: Model) -> None:
    plan = ask_best(as_ada, model=generating.pk).json()["chosen"]["plan"]
    answer = ask(as_ada, "price", model=generating.pk, plan=plan, change={"kv_cache": {"place": "host"}})
    assert answer.status_code == 200, answer.content
    document = answer.json()
    assert document["differences"] == [{"path": "kv_cache.place", "a": "device", "b": "host"}]
    assert document["host_change_bytes"] > 0 > document["device_change_bytes"]
    assert document["priced"]["prediction"]["timeline"]


@pytest.mark.parametrize(
    ("path", "changes", "field", "words"),
    [
        ("price", {"plan": {}, "change": {"wings": 2}}, "change.wings", "is not a known field"),
        ("price", {"plan": {}, "change": {"batch_size": 0}}, "plan.batch_size", "allowed: 1 or more"),
        ("price", {"plan": {}, "change": {"batch_size": 9}}, "plan.batch_size", "is more than the sequences"),
        ("price", {"plan": {"wings": 2}, "change": {}}, "plan.wings", "is not a known field"),
        ("compare", {"plans": {"a": "best", "b": "keep_all"}}, "plan", "is not one of best, resident"),
        ("compare", {"plans": {"a": "best", "b": {"batch_size": 9}}}, "plan.batch_size", "is more than the sequences"),
        ("cards", {"cards": ["Abacus"], "gpu": None}, "gpu", "Abacus"),
    ],
)
def test_what_is_wrong_with_a_question_about_plans_is_refused_by_field(
    as_ada: Client, generating: Model, path: str, changes: dict[str, Any], field: str, words: str
) -> None:
    body = {"model": generating.pk, "workload": WORKLOAD, "gpu": "RTX 4090", **changes}
    body = {name: value for name, value in body.items() if value is not None}
    refused = as_ada.post(f"/api/v1/plans/{path}", data=json.dumps(body), content_type="application/json")
    assert refused.status_code == 422, refused.content
    assert refused.json()["fields"][0]["field"] == field
    assert words in refused.json()["detail"]


@pytest.mark.parametrize("path", ["compare", "cards", "price"])
def test_questions_about_plans_wait_for_the_models_profile(as_ada: Client, model: Model, path: str) -> None:
    bodies: dict[str, Any] = {
        "compare": {"plans": {"a": "best", "b": "resident"}},
        "price": {"plan": {}, "change": {}},
        "cards": {},
    }
    asked = bodies[path]
    place = {} if path == "cards" else {"gpu": "RTX 4090"}
    body = {"model": model.pk, "workload": WORKLOAD, **place, **asked}
    answer = as_ada.post(f"/api/v1/plans/{path}", data=json.dumps(body), content_type="application/json")
    assert (answer.status_code, answer.json()["waiting_for"]) == (202, "profile")


def ask_of_prompts(client: Client, path: str, writer: Model, prompts: Dataset, /, **changes: Any) -> Any:
    body = {"model": writer.pk, "prompts": prompts.pk, "workload": {"max_new_tokens": 8}, "gpu": "RTX 4090", **changes}
    return client.post(f"/api/v1/plans/{path}", data=json.dumps(body), content_type="application/json")


def test_the_work_may_be_a_file_of_prompts(as_ada: Client, writer: Model, prompts: Dataset) -> None:
    best = ask_of_prompts(as_ada, "best", writer, prompts)
    assert best.status_code == 200, best.content
    workload = best.json()["workload"]
    assert (workload["num_sequences"], workload["new_token_counts"]) == (2, [8, 4])
    edited = ask_of_prompts(
        as_ada, "price", writer, prompts, plan=best.json()["chosen"]["plan"], change={"kv_cache": {"place": "host"}}
    )
    assert edited.json()["differences"][0]["path"] == "kv_cache.place"
    ranked = ask_of_prompts(as_ada, "cards", writer, prompts, cards=["T4"], gpu=None)
    assert ranked.status_code == 422  # a card is named twice over
    body = {"model": writer.pk, "prompts": prompts.pk, "workload": {"max_new_tokens": 8}, "cards": ["T4"]}
    ranked = as_ada.post("/api/v1/plans/cards", data=json.dumps(body), content_type="application/json")
    assert ranked.json()["cards"][0]["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"prompts": "dataset_none"}, "prompts"), ({"workload": {"wings": 2}}, "workload.wings"), ({"goal": {}}, "goal")],
)
def test_what_is_wrong_with_a_question_of_prompts_is_refused_by_field(
    as_ada: Client, writer: Model, prompts: Dataset, changes: dict[str, Any], field: str
) -> None:
    refused = ask_of_prompts(as_ada, "best", writer, prompts, **changes)
    assert refused.status_code == 422
    assert refused.json()["fields"][0]["field"].startswith(field)


def test_another_persons_prompts_are_not_there(as_eve: Client, writer: Model, prompts: Dataset) -> None:
    refused = ask_of_prompts(as_eve, "best", writer, prompts)
    assert (refused.status_code, refused.json()["fields"][0]["field"]) == (422, "prompts")
