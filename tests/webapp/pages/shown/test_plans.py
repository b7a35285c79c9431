"""The page Plans: an answer as points and tables, edits, cards, and an address that says it all."""

import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from optimizer.hardware.devices import table_machine
from optimizer.search.problem import PricedPlan
from tests.webapp.pages import rows
from webapp.catalog.actions import register_machine
from webapp.catalog.models import Dataset, Model
from webapp.jobs.models import Job, PlanOffer
from webapp.pages.forms.training import JobForm
from webapp.pages.forms.work import typed_of
from webapp.pages.shown.plans import ComparedRow, Point, split_points, times_in_words
from webapp.planning import cards

pytestmark = pytest.mark.django_db

QUICK = ["offload", "offload_optimizer", "offload_gradients", "stream_weights"]


@pytest.fixture
def look(browser: Client, profiled_llama: Model) -> Callable[..., Any]:
    """The page for a model whose profile is known, on a card of the table."""

    def get(path: str = "plans", **parameters: Any) -> Any:
        asked = {
            "model": profiled_llama.pk,
            "sequence_length": "128",
            "global_batch_size": "4",
            "num_steps": "10",
            "warmup_steps": "0",
            "device_budget": "1 GiB",
            "forbid": QUICK,
            "on": "gpu:T4",
        }
        answer: Any = browser.get(reverse(path), asked | parameters)
        answer.words = " ".join(unescape(re.sub(r"<[^>]+>", " ", answer.content.decode())).split())
        return answer

    return get


def line_of(answer: Any, category: str, name: str) -> ComparedRow:
    group = next(group for group in answer.context["groups"] if group.label == category)
    return next(line for line in group.lines if line.name == name)


def test_every_plan_is_a_point_once_with_the_chosen_one_first(look: Callable[..., Any]) -> None:
    answer = look()
    points = answer.context["points"]
    assert answer.status_code == 200
    assert points[0].sort == "chosen"
    assert len({point.priced.plan for point in points}) == len(points)
    assert {"chosen", "recompute_all"} <= {point.key for point in points}
    assert [drawn["key"] for drawn in answer.context["facts"]["points"]] == [point.key for point in points]


def test_the_chosen_plan_stands_beside_plain_training_until_others_are_asked_for(look: Callable[..., Any]) -> None:
    assert next(point.key for point in look().context["compared"]) == "chosen"
    answer = look(**{"with": ["chosen", "recompute_all"]})
    assert [point.key for point in answer.context["compared"]] == ["chosen", "recompute_all"]
    values = line_of(answer, "activations", "lifetime").values
    assert [(value.text, value.differs) for value in values] == [("4 kept blocks", False), ("4 recomputed blocks", True)]


def test_plans_that_are_compared_have_their_letters_in_the_picture_and_in_the_table(look: Callable[..., Any]) -> None:
    answer = look(**{"with": ["chosen", "recompute_all"]})
    assert {mark.letter for mark in answer.context["picture"].marks} >= {"A", "B"}
    assert "Plan B instead of the recommended plan A" in answer.words
    names = [point.words for point in answer.context["compared"]]
    assert names[0].startswith("recommended, the same as plain training, no memory saved and ")
    assert names[1] == "every block is recomputed (gradient checkpointing)"


def test_the_picture_of_the_plans_covers_those_worth_looking_at_and_says_the_limit(look: Callable[..., Any]) -> None:
    answer = look()
    picture, facts = answer.context["picture"], answer.context["facts"]
    chosen = next(point for point in facts["points"] if point["sort"] == "chosen")
    assert picture.x.low < chosen["peak_bytes"] < picture.x.high
    assert picture.y.title == "seconds for a step"
    assert picture.notes[0].text.startswith("usable ")
    assert picture.notes[0].text.endswith(" ▸")
    assert picture.bands == ()
    assert '<div class="picture' in answer.content.decode()


def test_one_number_of_plans_is_said_and_the_rest_is_what_is_left_of_it(look: Callable[..., Any]) -> None:
    answer = look()
    points, rest = len(answer.context["points"]), len(answer.context["rest"])
    assert f"{points} plans by peak" in answer.context["picture"].summary
    if rest:
        assert f"{points - rest} of {points} plans" in answer.words
        assert f"Show the other {rest}" in answer.words


def test_the_page_says_why_a_jobs_figures_may_differ_unless_its_rows_are_named(look: Callable[..., Any]) -> None:
    why = "These figures are for plain text, cut into full rows of the sequence length."
    assert why in look().words
    assert why not in look(packing="wrapped").words


def test_bytes_of_a_category_are_those_of_the_prediction(look: Callable[..., Any]) -> None:
    answer = look(**{"with": ["chosen", "recompute_all"]})
    shown = [value.num_bytes for value in line_of(answer, "activations", "bytes at the peak").values]
    compared = answer.context["compared"]
    assert shown == [point.priced.prediction.device_bytes_by_category.get("activations", 0) for point in compared]


def test_the_sentences_of_the_search_say_why(look: Callable[..., Any]) -> None:
    answer = look()
    for sentence in answer.context["found"].explanation:
        assert sentence[1:] in answer.words


def test_an_edit_of_the_chosen_plan_is_priced_beside_it(look: Callable[..., Any]) -> None:
    answer = look(**{"try-pin_activations_per_block": "recompute"})
    chosen, yours = answer.context["compared"][:2]
    assert (yours.key, set(yours.priced.plan.activations.per_block)) == ("yours", {"recompute"})
    assert yours.peak_bytes < chosen.peak_bytes
    assert "Yours: activations per block[0:4]: keep → recompute." in answer.words


def test_an_edit_that_cannot_be_carried_out_says_why_and_keeps_what_was_typed(look: Callable[..., Any]) -> None:
    answer = look(**{"try-pin_batch_micro_batch_size": "3"})
    assert answer.status_code == 200
    assert "plan.batch makes 3 sequences per step" in answer.words
    assert 'value="3"' in answer.content.decode()


def test_a_change_can_be_tried_or_held_by_its_address(look: Callable[..., Any], browser: Client) -> None:
    answer = look("plans_knobs")
    row = next(row for row in answer.context["rows"] if row["knob"].change == "recompute every block")
    tried = browser.get(row["try"])
    assert set(tried.context["compared"][1].priced.plan.activations.per_block) == {"recompute"}
    held = browser.get(row["hold"])
    assert set(held.context["found"].chosen.plan.activations.per_block) == {"recompute"}


def test_what_does_not_fit_offers_what_would(look: Callable[..., Any]) -> None:
    answer = look(device_budget="100 KiB")
    assert "does not fit" in answer.words
    assert "What would fit" in answer.words
    assert 'hx-get="/plans/cards/?' in answer.content.decode()


def test_an_address_that_is_no_form_says_which_field_is_wrong(look: Callable[..., Any]) -> None:
    answer = look(num_steps="many")
    assert answer.status_code == 422
    assert "Steps: Enter a whole number." in answer.words


def test_an_unknown_place_is_refused(look: Callable[..., Any]) -> None:
    assert look(on="gpu:Abacus").status_code == 422
    assert look(on="mach_nowhere").status_code == 422


def test_a_model_that_is_not_profiled_is_waited_for(
    look: Callable[..., Any], new_llama: Model, browser: Client
) -> None:
    other = rows.make_model(name="other")
    answer = look(model=other.pk)
    assert "unknown : being profiled" in answer.words
    assert Job.objects.get().kind == "profile"
    assert look(model=other.pk, waits="yes").status_code == 204
    assert look(waits="yes")["HX-Refresh"] == "true"


def test_nothing_is_kept(look: Callable[..., Any]) -> None:
    look()
    assert not PlanOffer.objects.exists()


def test_the_step_behind_a_chart_is_a_table_of_its_moments(look: Callable[..., Any]) -> None:
    answer = look("plans_step", plan="chosen")
    timeline = look().context["found"].chosen.prediction.timeline
    assert len(answer.context["table"].rows) == len(timeline)
    assert look("plans_step", plan="no such plan").status_code == 404


def test_cards_come_a_few_at_a_time_until_all_are_ranked(
    look: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cards, "card_names", lambda: ["T4", "RTX 4090"])
    monkeypatch.setattr(cards, "LOOK_FOR_S", 0.0)
    first = look("plans_cards")
    assert (len(first.context["found"].answers), first.context["found"].num_left) == (0, 2)
    monkeypatch.setattr(cards, "LOOK_FOR_S", 600.0)
    last = look("plans_cards")
    assert [answer.card for answer in last.context["found"].answers] == ["RTX 4090", "T4"]
    assert "Fastest: RTX 4090" in last.words
    by_money = look("plans_cards", order="money")
    assert by_money.context["found"].cheapest is not None


def test_a_page_without_a_machine_looks_at_a_card(browser: Client, profiled_llama: Model) -> None:
    answer = browser.get(reverse("plans"), {"model": profiled_llama.pk, "sequence_length": "128", "forbid": QUICK})
    assert answer.context["on"] == "gpu:RTX 4090"


def test_a_machine_of_ones_own_comes_before_cards(
    look: Callable[..., Any], browser: Client, profiled_llama: Model
) -> None:
    machine = register_machine(name="bench", document=table_machine("T4").to_json())
    answer = browser.get(reverse("plans"), {"model": profiled_llama.pk, "sequence_length": "128", "forbid": QUICK})
    assert answer.context["on"] == machine.pk


def test_the_way_back_to_the_form_keeps_what_was_asked(look: Callable[..., Any], browser: Client) -> None:
    answer = look(pin_optimizer_state_bits="32")
    form = browser.get(f"{reverse('job_new')}?{answer.context['query']}").context["form"]
    assert form["sequence_length"].value() == "128"
    assert form["forbid"].value() == QUICK
    assert form["pin_optimizer_state_bits"].value() == "32"


def test_a_job_leads_to_the_address_of_what_it_asked_for(browser: Client, ada: User) -> None:
    job = rows.make_job(ada)
    answer = browser.get(reverse("plans"), {"from": job.pk})
    assert answer.status_code == 302
    asked = parse_qs(urlparse(answer["Location"]).query)
    assert (asked["num_steps"], asked["device_budget"], asked["on"]) == (["120"], ["480 MiB"], [job.machine_id])


def test_anothers_job_leads_nowhere(browser: Client, eve: User) -> None:
    assert browser.get(reverse("plans"), {"from": rows.make_job(eve).pk}).status_code == 404


def test_a_list_from_which_nothing_was_chosen_stands_on_its_first_line(model: Model, dataset: Dataset) -> None:
    typed = typed_of(JobForm(models=[model], datasets=[dataset]))
    assert (typed["model"], typed["dataset"], typed["schedule"]) == (model.pk, dataset.pk, "cosine")
    assert "forbid" not in typed
    assert "pin_weights_dtype" not in typed


def a_point(key: str, *, peak_bytes: int, step_ms: float, sort: Any = "frontier") -> Point:
    prediction = replace(rows.make_prediction(), device_peak_high_bytes=peak_bytes, step_ms=step_ms)
    priced = PricedPlan(label=key, plan=rows.make_plan(), prediction=prediction, verdict="fits")
    return Point(key=key, label=key, sort=sort, priced=priced)


def test_plans_within_a_fiftieth_of_another_in_bytes_and_time_are_shown_as_one() -> None:
    points = [
        a_point("chosen", sort="chosen", peak_bytes=1000, step_ms=100.0),
        a_point("twin", peak_bytes=1019, step_ms=101.9),
        a_point("smaller", peak_bytes=970, step_ms=101.0),
        a_point("slower", peak_bytes=1000, step_ms=103.0),
    ]
    main, rest = split_points(points)
    assert [point.key for point in main] == ["chosen", "smaller", "slower"]
    assert [point.key for point in rest] == ["twin"]


def test_at_most_eight_plans_are_shown_at_first() -> None:
    points = [a_point(str(number), peak_bytes=1000 * number, step_ms=100.0 / number) for number in range(1, 13)]
    main, rest = split_points(points)
    assert (len(main), len(rest)) == (8, 4)


@pytest.mark.parametrize(
    ("here_s", "there_s", "words"),
    [
        (151.0, 191.0, "3 min 11 s instead of 2 min 31 s"),
        (160.0, 400.0, "6 min 40 s instead of 2 min 40 s"),
        (1500.0, 2400.0, "40 min instead of 25 min"),
        (7200.0, 7205.0, "2 h as well"),
    ],
)
def test_two_durations_never_read_the_same_where_they_differ_by_seconds(here_s: float, there_s: float, words: str) -> None:
    assert times_in_words(here_s, there_s) == words
