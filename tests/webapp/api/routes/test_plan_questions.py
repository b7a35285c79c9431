"""Questions about plans over the API: answered with a model's real profile, nothing kept, and refused by field."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from webapp.accounts import turns
from webapp.accounts.turns import asked_by
from webapp.catalog.actions import keep_profile
from webapp.catalog.models import Model
from webapp.jobs.models import Job, PlanOffer

WORKLOAD = {"sequence_length": 128, "global_batch_size": 4}
MIB = 1024**2
QUICK = {"forbid": ["offload", "offload_optimizer", "offload_gradients", "stream_weights"]}


@pytest.fixture
def ask(as_ada: Client, profiled_llama: Model) -> Callable[..., Any]:
    def post(path: str, **changes: Any) -> Any:
        body = {"model": profiled_llama.pk, "workload": WORKLOAD, **changes}
        return as_ada.post(f"/api/v1/plans/{path}", data=json.dumps(body), content_type="application/json")

    return post


def test_the_longest_sequence_is_answered_with_the_limit_that_binds(ask: Callable[..., Any]) -> None:
    goal = {"device_budget_bytes": "4.5 MiB", "objective": "longest_sequence", **QUICK}
    answer = ask("best", gpu="T4", goal=goal)
    assert answer.status_code == 200, answer.content
    document = answer.json()
    assert document["workload"]["sequence_length"] == document["limit"]["largest"] == 128
    assert document["limit"]["next"] == 256
    assert document["chosen"]["prediction"]["device_peak_high_bytes"] == document["limit"]["peak_bytes"]
    assert not PlanOffer.objects.exists()
    assert not Job.objects.exists()


def test_pins_are_kept(ask: Callable[..., Any]) -> None:
    goal = {"device_budget_bytes": "1 GiB", "pins": {"batch": {"micro_batch_size": 2}}, **QUICK}
    document = ask("best", gpu="T4", goal=goal).json()
    assert document["chosen"]["plan"]["batch"] == {"micro_batch_size": 2, "accumulation_steps": 2}


def test_a_pin_that_is_none_is_422_with_its_name(ask: Callable[..., Any]) -> None:
    refused = ask("best", gpu="T4", goal={"device_budget_bytes": "1 GiB", "pins": {"weights": {"dtype": "fp8"}}})
    assert (refused.status_code, refused.json()["fields"][0]["field"]) == (422, "goal.pins.weights.dtype")


def test_where_nothing_fits_the_problem_carries_what_would(ask: Callable[..., Any]) -> None:
    goal = {"device_budget_bytes": "4.2 MiB", **QUICK}
    refused = ask("best", gpu="T4", goal=goal, workload={**WORKLOAD, "sequence_length": 256})
    document = refused.json()
    assert (refused.status_code, document["code"]) == (422, "no_feasible_plan")
    assert {way["kind"] for way in document["extra"]["ways_out"]} >= {"shorter_sequence", "budget"}
    assert document["extra"]["largest_part"] in document["extra"]["bytes_by_category"]


def test_plans_are_compared_by_what_differs(ask: Callable[..., Any]) -> None:
    document = ask("compare", gpu="T4", plans={"plain": "keep_all", "rebuilt": "recompute_all"}).json()
    assert [plan["label"] for plan in document["plans"]] == ["plain", "rebuilt"]
    assert document["cells"] == [
        {"category": "activations", "aspect": "lifetime", "values": ["keep 4", "recompute 4"]}
    ]
    assert all(len(set(row["values"])) > 1 for row in document["bytes_at_peak"])


def test_cards_are_ranked(ask: Callable[..., Any]) -> None:
    goal = {"device_budget_bytes": "1 GiB", **QUICK}
    document = ask("cards", cards=["T4", "RTX 4090"], goal=goal).json()
    assert [card["card"] for card in document["cards"]] == ["RTX 4090", "T4"]
    assert document["order"] == "speed"
    assert {cost["price_date"] for card in document["cards"] for cost in card["costs"]}


def test_an_unknown_card_is_422(ask: Callable[..., Any]) -> None:
    refused = ask("cards", cards=["Abacus"])
    assert (refused.status_code, refused.json()["fields"][0]["field"]) == (422, "gpu")


def test_a_plan_is_priced_after_one_edit(ask: Callable[..., Any]) -> None:
    plan = ask("compare", gpu="T4", plans={"a": "keep_all", "b": "recompute_all"}).json()["plans"][0]["plan"]
    document = ask("price", gpu="T4", plan=plan, change={"activations": {"per_block": ["recompute"]}}).json()
    assert document["differences"] == [{"path": "activations.per_block[0:4]", "a": "keep", "b": "recompute"}]
    assert document["device_change_bytes"] < 0 < document["step_change_ms"]
    wrong = ask("price", gpu="T4", plan=plan, change={"activations": {"per_black": []}})
    assert (wrong.status_code, wrong.json()["fields"][0]["field"]) == (422, "change.activations.per_black")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("best", {"gpu": "T4"}),
        ("compare", {"gpu": "T4", "plans": {"a": "keep_all", "b": "best"}}),
        ("cards", {}),
        ("price", {"gpu": "T4", "plan": {}, "change": {}}),
    ],
)
def test_a_new_model_is_202_while_profiled(as_ada: Client, new_llama: Model, path: str, body: dict[str, Any]) -> None:
    plan = {"batch": {"micro_batch_size": 4, "accumulation_steps": 1}, "activations": {"per_block": ["keep"] * 4}}
    document = {"model": new_llama.pk, "workload": WORKLOAD, **body}
    if "plan" in body:
        document["plan"] = plan
    waiting = as_ada.post(f"/api/v1/plans/{path}", data=json.dumps(document), content_type="application/json")
    assert (waiting.status_code, waiting["Retry-After"]) == (202, "2")
    assert Job.objects.get().kind == "profile"


def test_the_adapters_way_out_needs_their_profile(
    ask: Callable[..., Any], new_llama: Model, llama_document: dict[str, Any]
) -> None:
    keep_profile(new_llama.fingerprint, llama_document)
    refused = ask("best", gpu="T4", goal={"device_budget_bytes": 100_000}).json()
    assert "adapters" not in {way["kind"] for way in refused["extra"]["ways_out"]}
    assert not Job.objects.filter(kind="profile").exists()


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("plans/best", {"gpu": "T4"}),
        ("plans/compare", {"gpu": "T4", "plans": {"one": "keep_all", "two": "recompute_all"}}),
        ("plans/cards", {"cards": ["T4"]}),
        ("estimates", {"gpu": "T4"}),
    ],
)
def test_a_question_that_finds_no_turn_is_503_and_says_when_to_ask_again(
    as_ada: Client, profiled_llama: Model, monkeypatch: pytest.MonkeyPatch, path: str, more: dict[str, Any]
) -> None:
    own = turns.Turns()
    monkeypatch.setattr(turns, "_turns", own)
    monkeypatch.setattr(turns, "WAIT_S", 0.1)
    goal = {"device_budget_bytes": "1 GiB", **QUICK}
    body = {"model": profiled_llama.pk, "workload": WORKLOAD, "goal": goal, **more}

    def ask() -> Any:
        return as_ada.post(f"/api/v1/{path}", data=json.dumps(body), content_type="application/json")

    with asked_by(lambda: 3):
        with own.take(1), own.take(2):
            answer = ask()
        assert answer.status_code == 503, answer.content
        assert (answer["Retry-After"], answer.json()["code"]) == ("5", "searches_busy")
        assert ask().status_code == 200
