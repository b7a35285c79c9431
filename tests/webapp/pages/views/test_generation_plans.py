"""The page Plans of a generate job: the same as of training, and an edit's own price never waits for a search."""

import re
from collections.abc import Callable
from html import unescape
from typing import Any, Never
from urllib.parse import parse_qsl, urlparse

import pytest
from django.test import Client
from django.urls import reverse

from optimizer.hardware.devices import table_machine
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.pins.generation_knobs import generation_knobs, written_knobs
from webapp.catalog.actions import register_machine
from webapp.catalog.models import Dataset, Model, Profile
from webapp.jobs.models import Job, PlanOffer
from webapp.pages.forms.sentences import pin_field
from webapp.planning import cards
from webapp.planning.search import generation

pytestmark = pytest.mark.django_db


@pytest.fixture
def nothing_at_hand() -> None:
    """Forget the answers that other tests have asked for."""
    for name in ("_search", "problem_of_generation", "_equal_problem", "detail_generation", "knobs_of_generation"):
        getattr(generation, name).forget()


@pytest.fixture
def look(browser: Client, writer: Model, prompts: Dataset) -> Callable[..., Any]:
    """The page for a model whose profile is known, on a card of the table."""

    def get(path: str = "plans", **parameters: Any) -> Any:
        asked = {
            "kind": "generate",
            "model": writer.pk,
            "prompts": prompts.pk,
            "max_new_tokens": "8",
            "device_budget": "100 MiB",
            "on": "gpu:T4",
        }
        answer: Any = browser.get(reverse(path), asked | parameters)
        answer.words = " ".join(unescape(re.sub(r"<[^>]+>", " ", answer.content.decode())).split())
        return answer

    return get


@pytest.fixture
def no_search(nothing_at_hand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(*_: Any, **__: Any) -> Never:
        raise AssertionError("an edit's own price waited for a search")

    monkeypatch.setattr(generation, "search_generation", search)


def full_edit(plan: GenerationPlan, **changes: Any) -> dict[str, str]:
    texts = written_knobs(plan) | changes
    return {f"try-{pin_field(knob)}": text for knob, text in texts.items()}


def follow(browser: Client, address: str) -> Any:
    return browser.get(urlparse(address).path or reverse("plans"), dict(parse_qsl(urlparse(address).query)))


def test_the_page_comes_at_once_and_asks_for_the_search_by_itself(look: Callable[..., Any], no_search: None) -> None:
    answer = look()
    assert answer.status_code == 200
    assert "the best plan is being looked for, since" in answer.words
    asked = re.search(r'hx-get="([^"]+)" hx-trigger="load" hx-target="#plans-page"', answer.content.decode())
    assert dict(parse_qsl(urlparse(unescape(asked[1])).query))["whole"] == "yes"


def test_an_answer_searched_before_is_there_at_once(look: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    look(whole="yes")
    monkeypatch.setattr(generation, "search_generation", None)
    answer = look()
    assert answer.context["points"][0].sort == "chosen"
    assert "being looked for" not in answer.words


def test_every_plan_is_a_point_once_with_its_speed(look: Callable[..., Any]) -> None:
    answer = look(whole="yes")
    points = answer.context["points"]
    assert {"chosen", "one_at_a_time"} <= {point.key for point in points}
    assert len({point.priced.plan for point in points}) == len(points)
    facts = answer.context["facts"]
    assert facts["by"] == "speed"
    assert [drawn["tokens_per_s"] for drawn in facts["points"]] == [point.priced.prediction.tokens_per_s for point in points]
    assert "No allowed plan that fits is faster" not in answer.words  # of prompts of two lengths that is not known


def test_an_edit_is_priced_before_any_search(look: Callable[..., Any], no_search: None) -> None:
    answer = look(**full_edit(GenerationPlan(), batch_size="2"))
    (point,) = answer.context["points"]
    assert (point.key, point.priced.plan.batch_size) == ("yours", 2)
    assert point.priced.prediction.device_peak_bytes > 0
    assert answer.context["edit"]["pin_batch_size"].value() == "2"
    assert "the best plan is being looked for" in answer.words


def test_an_edit_of_the_chosen_plan_is_priced_beside_it_and_in_detail_afterwards(
    nothing_at_hand: None, look: Callable[..., Any]
) -> None:
    chosen = look(whole="yes").context["found"].chosen.plan
    edited = full_edit(chosen, **{"kv_cache.place": "host"})
    first = look(**edited)
    mine = first.context["compared"][1]
    assert (mine.key, mine.priced.plan.kv_cache.place) == ("yours", "host")
    assert "Yours: kv cache place: device → host." in first.words
    assert "Its memory over a pass is being worked out" in first.words
    assert [point.letter for point, _ in first.context["steps"]] == ["A", "C"]
    whole = look(**edited, whole="yes")
    assert [point.letter for point, _ in whole.context["steps"]] == ["A", "B", "C"]
    assert "is being worked out" not in look(**edited).words


def test_an_edit_that_cannot_be_carried_out_says_why_and_keeps_what_was_typed(look: Callable[..., Any]) -> None:
    chosen = look(whole="yes").context["found"].chosen.plan
    answer = look(**full_edit(chosen, batch_size="7"))
    assert answer.status_code == 200
    assert "batch size is 7, which is more than the sequences to generate" in answer.words
    assert 'value="7"' in answer.content.decode()


def test_what_is_no_value_of_a_decision_is_named_beside_its_field(look: Callable[..., Any]) -> None:
    chosen = look(whole="yes").context["found"].chosen.plan
    answer = look(**full_edit(chosen, prefill_tokens="1"))
    beside = answer.content.decode().partition('id="id_try-pin_prefill_tokens_error"')[2].partition("</ul>")[0]
    assert "must be 2 or more" in beside


def test_every_decision_of_the_plan_can_be_edited(look: Callable[..., Any]) -> None:
    names = set(look(whole="yes").context["edit"].fields)
    assert names == {pin_field(knob) for knob in generation_knobs()}


def test_a_change_can_be_tried_by_its_address_without_a_search(
    look: Callable[..., Any], browser: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = look("plans_knobs").context["rows"]
    row = next(row for row in rows if row["knob"].change == "keys and values on the host")
    monkeypatch.setattr(generation, "search_generation", None)
    tried = follow(browser, row["try"])
    assert tried.context["compared"][1].priced.plan.kv_cache.place == "host"


def test_a_change_can_be_held_and_searched_again_with_it(look: Callable[..., Any], browser: Client) -> None:
    rows = look("plans_knobs").context["rows"]
    row = next(row for row in rows if row["knob"].change == "keys and values on the host")
    held = follow(browser, f"{row['hold']}&whole=yes")
    assert held.context["form"]["pin_kv_cache_place"].value() == "host"
    assert held.context["found"].chosen.plan.kv_cache.place == "host"
    lossy = next(row for row in rows if row["knob"].change == "weights in bf16")
    held = follow(browser, f"{lossy['hold']}&whole=yes")
    assert held.context["form"]["allow_lossy"].value() is True
    assert held.context["found"].chosen.plan.weights.dtype == "bf16"


def test_where_the_largest_batch_is_looked_for_no_batch_is_held(look: Callable[..., Any]) -> None:
    rows = look("plans_knobs", objective="largest_batch").context["rows"]
    assert {row["knob"].change: bool(row["hold"]) for row in rows if "at once instead" in row["knob"].change}
    assert not any(row["hold"] for row in rows if "sequences at once instead" in row["knob"].change)
    assert any(row["hold"] for row in rows)


def test_pins_that_no_plan_keeps_are_said_on_the_page(look: Callable[..., Any]) -> None:
    answer = look(whole="yes", pin_kv_cache_attention="host", pin_kv_cache_place="device")
    assert answer.status_code == 422
    assert "No plan keeps every locked setting" in answer.words
    assert "Leave one of them out." in answer.words


def test_knobs_show_what_each_would_save_largest_first(look: Callable[..., Any]) -> None:
    changes = [row["knob"].device_change_bytes for row in look("plans_knobs").context["rows"]]
    assert len(changes) > 5
    assert changes == sorted(changes)


def test_bytes_of_a_category_are_those_of_the_prediction(look: Callable[..., Any]) -> None:
    answer = look(whole="yes", **{"with": ["chosen", "one_at_a_time"]})
    group = next(group for group in answer.context["groups"] if group.label == "KV cache")
    shown = [value.num_bytes for value in group.lines[-1].values]
    compared = answer.context["compared"]
    assert shown == [point.priced.prediction.device_bytes_by_category.get("kv_cache", 0) for point in compared]


def test_decisions_without_a_line_of_their_own_are_shown_where_plans_differ(look: Callable[..., Any]) -> None:
    chosen = look(whole="yes").context["found"].chosen.plan
    answer = look(**full_edit(chosen, prefill_tokens="2"), whole="yes")
    whole = answer.context["groups"][0]
    line = next(line for line in whole.lines if line.name == "prefill tokens")
    assert [value.text for value in line.values] == ["all", "2", "all"]


def test_the_same_on_other_cards_best_first(look: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "card_names", lambda: ["T4", "RTX 4090"])
    monkeypatch.setattr(cards, "LOOK_FOR_S", 600.0)
    answer = look("plans_cards")
    speeds = [each.tokens_per_s for each in answer.context["found"].answers]
    assert speeds == sorted(speeds, reverse=True)
    assert "Fastest: " in answer.words
    assert answer.context["found"].cheapest is not None


def test_cards_are_shown_as_they_are_found_while_others_are_looked_at(
    look: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = look(whole="yes")
    assert "Each appears as soon as it is worked out" in page.words
    assert "a second or so" not in page.words
    with monkeypatch.context() as two:
        two.setattr(cards, "card_names", lambda: ["T4", "RTX 4090"])
        two.setattr(cards, "LOOK_FOR_S", 600.0)
        assert not look("plans_cards").context["found"].num_left
    monkeypatch.setattr(cards, "LOOK_FOR_S", 0.01)
    answer = look("plans_cards")
    found = answer.context["found"]
    assert found.answers
    assert found.num_left
    assert f"{found.num_left} of {found.num_all} cards are left" in answer.words
    assert all(each.card in answer.words for each in found.answers)


def test_what_fits_nowhere_says_the_smallest_budget_and_shows_what_people_write(look: Callable[..., Any]) -> None:
    answer = look(device_budget="4 KiB", whole="yes")
    assert "does not fit" in answer.words
    assert "Raise the budget to" in answer.words
    assert {"all_at_once", "stream_host"} <= {point.key for point in answer.context["points"]}
    fill = re.search(r'href="(/jobs/new/generate/[^"]+)" data-fill', answer.content.decode())
    assert dict(parse_qsl(urlparse(unescape(fill[1])).query))["device_budget"] != "4 KiB"


def test_the_moments_of_a_pass_are_a_table(look: Callable[..., Any]) -> None:
    answer = look("plans_step", plan="chosen")
    assert len(answer.context["table"].rows) == len(look(whole="yes").context["found"].chosen.prediction.timeline)
    assert look("plans_step", plan="no such plan").status_code == 404


def test_parts_of_a_page_that_has_no_answer_are_not_there(look: Callable[..., Any]) -> None:
    assert look("plans_knobs", device_budget="4 KiB").status_code == 404
    assert look("plans_cards", model="model_none").status_code == 404


def test_how_long_an_answer_may_take_is_no_part_of_an_address(look: Callable[..., Any]) -> None:
    answer = look(whole="yes")
    assert "whole=yes" not in answer.content.decode()
    assert 'name="whole"' not in answer.content.decode()


def test_a_model_that_was_never_traced_generating_is_waited_for(look: Callable[..., Any]) -> None:
    assert look(waits="yes")["HX-Refresh"] == "true"
    Profile.objects.all().delete()
    assert "unknown : being profiled" in look().words
    assert Job.objects.get().kind == "profile"
    assert look(waits="yes").status_code == 204


def test_nothing_is_kept(look: Callable[..., Any]) -> None:
    look(whole="yes")
    assert not PlanOffer.objects.exists()


def test_a_form_is_answered_at_a_glance_before_its_search(
    browser: Client, writer: Model, prompts: Dataset, no_search: None
) -> None:
    register_machine(name="bench", document=table_machine("T4").to_json())
    typed = {"name": "n", "model": writer.pk, "prompts": prompts.pk, "max_new_tokens": "8", "temperature": "0", "top_k": "0"}
    typed |= {"top_p": "1", "seed": "1", "stop": "", "objective": "throughput", "device_budget": "100 MiB", "glance": "yes"}
    answer = browser.post(reverse("generate_price"), typed)
    words = " ".join(unescape(re.sub(r"<[^>]+>", " ", answer.content.decode())).split())
    assert answer.context["pricing"].kind == "glance"
    assert "fits in 100 MiB , for a start with all weights on the device, as many sequences as fit: " in words
    assert "all prompts take" in words
    small = browser.post(reverse("generate_price"), typed | {"device_budget": "4 KiB"})
    assert "no standard setup fits" in small.content.decode()
