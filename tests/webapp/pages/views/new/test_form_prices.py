"""The form against real prices: levers, ways out, objectives, decisions that are held, and the form as an address."""

import dataclasses
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
from django.contrib.auth.models import User
from django.http import QueryDict
from django.test import Client
from django.urls import reverse

from optimizer.base.units import format_bytes
from optimizer.hardware.devices import table_machine
from tests.webapp.pages import rows
from webapp.catalog.actions import register_machine
from webapp.catalog.models import Dataset, Model
from webapp.jobs.models import Job
from webapp.pages.forms.training import JobForm, initial_from_spec
from webapp.pages.forms.work import form_query, initial_from_query

pytestmark = pytest.mark.django_db

QUICK = ["offload", "offload_optimizer", "offload_gradients", "stream_weights"]


@pytest.fixture
def price(browser: Client, typed_work: dict[str, str], profiled_llama: Model, dataset: Dataset) -> Callable[..., Any]:
    register_machine(name="bench", document=table_machine("T4").to_json())
    rows_named = {"model": profiled_llama.pk, "dataset": dataset.pk}
    typed = typed_work | rows_named | {"sequence_length": "128", "device_budget": "1 GiB", "forbid": QUICK}

    def post(address: str = "job_price", **changes: Any) -> Any:
        answer: Any = browser.post(reverse(address), typed | changes)
        answer.words = " ".join(unescape(re.sub(r"<[^>]+>", " ", answer.content.decode())).split())
        return answer

    return post


def suggested(answer: Any) -> dict[str, Any]:
    """Buttons: their words, and the fields that they fill."""
    found = re.findall(r'<a class="button" href="([^"]+)" data-fill="[^"]+">([^<]+)</a>', answer.content.decode())
    return {unescape(words): parse_qs(urlparse(unescape(href)).query) for href, words in found}


def test_the_largest_part_comes_first_with_its_lever(price: Callable[..., Any]) -> None:
    pricing = price().context["pricing"]
    sizes = pricing.best.bytes_by_category
    first = pricing.suggestions[0]
    assert first.part.startswith(max(sizes, key=sizes.get).replace("_", " "))
    assert re.fullmatch(r"−[\d.]+ .iB, (\+\d+ %|no more) time", first.gained)


def test_a_lever_that_is_pulled_holds_its_decision(price: Callable[..., Any]) -> None:
    lever = price().context["pricing"].suggestions[0]
    after = price(**lever.changes).context["pricing"]
    for name, text in lever.changes.items():
        assert name.startswith("pin_") or (name, text) == ("most_loss", "any")
    assert after.kind == "priced"


def test_a_decision_that_is_held_is_kept_by_the_plan(price: Callable[..., Any]) -> None:
    answer = price(pin_activations_per_block="recompute")
    assert answer.context["pricing"].best.blocks == "R4"


def test_a_decision_that_contradicts_the_rest_is_named_beside_its_field(price: Callable[..., Any]) -> None:
    answer = price(pin_weights_dtype="bf16")
    beside = answer.content.decode().partition('id="id_pin_weights_dtype_error"')[2].partition("</ul>")[0]
    assert "“Weights in” is bf16, which changes the numbers, and “Precision” does not permit that" in beside


def test_a_decision_that_is_not_understood_is_named_beside_its_field(price: Callable[..., Any]) -> None:
    answer = price(pin_activations_per_block="compute again")
    beside = answer.content.decode().partition('id="id_pin_activations_per_block_error"')[2].partition("</ul>")[0]
    assert "Each block must be keep, recompute" in beside


@pytest.mark.parametrize(
    "typed",
    [
        {"global_batch_size": "100000", "device_budget": "16 GiB"},
        {"sequence_length": "600"},
        {"pin_logits_and_loss_num_chunks": "9000"},
        {"pin_batch_micro_batch_size": "3"},
        {"use_adapters": "on", "targets": "foo"},
        {"optimizer": "lion", "pin_optimizer_state_bits": "8", "most_loss": "any"},
    ],
    ids=lambda typed: next(iter(typed)),
)
def test_no_path_of_the_api_or_of_a_plan_is_said_on_the_page(price: Callable[..., Any], typed: dict[str, str]) -> None:
    words = price(**typed).words
    assert not re.search(r"\b(workload|goal|plan|logits_and_loss|optimizer_state)\.[a-z]|num.chunks|allow.lossy", words)


def test_what_does_not_fit_offers_the_smallest_budget_and_what_else_would(price: Callable[..., Any]) -> None:
    answer = price(device_budget="4.2 MiB", sequence_length="256")
    assert answer.context["pricing"].kind == "does_not_fit"
    found = suggested(answer)
    assert any(words.startswith("A budget of") for words in found)
    (shorter,) = [fields for words, fields in found.items() if words.startswith("Sequences of")]
    assert int(shorter["sequence_length"][0]) < 256
    assert "on=gpu:" not in answer.content.decode()  # the machine's own card has room for more


def test_a_budget_that_is_far_too_small_is_answered_by_less_work_with_the_budget_that_it_needs(price: Callable[..., Any]) -> None:
    found = suggested(price(device_budget="1 MiB", sequence_length="256"))
    (shorter,) = [fields for words, fields in found.items() if words.startswith("Sequences of 128 tokens and a budget of")]
    assert shorter["sequence_length"] == ["128"]
    again = price(sequence_length="128", device_budget=shorter["device_budget"][0]).context["pricing"]
    assert again.kind == "priced"


@pytest.mark.parametrize(
    ("budget", "sentence"),
    [
        ({"host_budget": "1 B"}, "writing the weights takes 128 KiB of host memory; 1 B may be used"),
        ({"disk_budget": "1 KiB"}, r"saving a checkpoint takes [\d.]+ MiB of the disk; 1.00 KiB may be used"),
    ],
    ids=["host", "disk"],
)
def test_what_fits_the_device_but_not_the_host_or_the_disk_says_so(
    price: Callable[..., Any], budget: dict[str, str], sentence: str
) -> None:
    """The page said "needs 4.00 MiB, you allow 1.00 GiB", and offered a device budget of 4 MiB."""
    answer = price(**budget)
    assert re.search(f"does not fit : the device has room, but {sentence}", answer.words)
    assert "you allow" not in answer.words
    assert not any(words.startswith("A budget of") for words in suggested(answer))


def test_the_verdict_and_the_bars_stand_against_what_tensors_may_use_of_the_card(price: Callable[..., Any]) -> None:
    """The page showed the whole card, of which a process's context and its allocator's gaps take a part."""
    whole = table_machine("T4").device.memory_bytes
    answer = price(device_budget=f"{whole} B")
    pricing = answer.context["pricing"]
    assert 0.9 * whole < pricing.usable_bytes < whole - 100 * 2**20
    assert f"of {format_bytes(pricing.usable_bytes)} usable, " in answer.words
    assert f"limit {format_bytes(pricing.usable_bytes)}" in answer.words
    assert f"its tensors takes the rest of the budget of {format_bytes(whole)} ." in answer.words
    held = re.findall(r'data-words="([^"]+)"', answer.content.decode())
    assert held
    assert all(f" of {format_bytes(pricing.usable_bytes)} usable, " in words for words in held)


def test_where_the_machine_is_too_small_another_card_is_offered(price: Callable[..., Any]) -> None:
    small = table_machine("T4")
    small = dataclasses.replace(small, device=dataclasses.replace(small.device, memory_bytes=int(4.2 * 2**20)))
    register_machine(name="bench", document=small.to_json())
    answer = price(device_budget="4.2 MiB", sequence_length="256")
    card = re.search(r'href="(/plans/[^"]+on=gpu:[^"]+)"', answer.content.decode())
    assert card is not None
    assert parse_qs(urlparse(unescape(card[1])).query)["device_budget"] != ["4.2 MiB"]


def test_the_most_that_fits_is_found_and_asked_for_by_a_button(price: Callable[..., Any]) -> None:
    answer = price(objective="longest_sequence", device_budget="4.5 MiB")
    assert answer.context["pricing"].kind == "largest"
    (fields,) = suggested(answer).values()
    assert fields["sequence_length"] == ["128"]
    assert "objective" not in fields  # the fastest step is what a form begins with
    assert "128 tokens on bench" in answer.words


def test_a_job_cannot_start_before_its_size_is_taken(price: Callable[..., Any]) -> None:
    answer = price("job_new", objective="longest_sequence", device_budget="4.5 MiB")
    assert "which changes the work" in answer.words
    assert not Job.objects.filter(kind="train").exists()


def test_money_is_said_with_the_date_of_its_price_where_one_is_known(
    price: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(
        '[[rentals]]\ndevice = "T4"\nprovider = "P"\nprice_per_hour = 360.0\n'
        'currency = "USD"\ndate = "2025-06-01"\nsource = "here"\n'
    )
    monkeypatch.setenv("HEADROOM_PRICES", str(prices))
    assert re.search(r"USD [\d.]+ to rent \(price of 2025-06-01\)", price().words)


def test_without_javascript_the_form_is_priced_by_its_own_button(price: Callable[..., Any]) -> None:
    answer = price("job_new", look="yes")
    assert answer.context["pricing"].kind == "priced"
    assert not Job.objects.filter(kind="train").exists()


def test_a_form_written_as_an_address_fills_the_same_form(ada: User) -> None:
    job = rows.make_job(ada)
    goal = {**job.spec["goal"], "allow_lossy": True, "forbid": ["disk", "remote"], "pins": {"weights": {"dtype": "bf16"}}}
    initial = initial_from_spec({**job.spec, "goal": goal, "workload": {**job.spec["workload"], "warmup_steps": 0}})

    def form(initial: dict[str, Any]) -> JobForm:
        return JobForm(initial=initial, models=[job.model], datasets=[job.dataset])

    query = form_query(form(initial), {"num_steps": "7"})
    again = form(initial_from_query(QueryDict(query)))
    assert form_query(again) == query
    assert again["num_steps"].value() == "7"
    assert again["pin_weights_dtype"].value() == "bf16"
    assert again["warmup_steps"].value() in ("0", 0)


def test_a_search_is_preceded_by_a_first_answer_that_asks_for_it(price: Callable[..., Any]) -> None:
    first = price(glance="yes", device_budget="901 MiB")
    assert first.context["pricing"].kind == "glance"
    assert "fits in 901 MiB , for a start with plain training, no memory saved: " in first.words
    assert "Looking for the best plan since" in first.words
    assert """hx-vals='{"glance": "no"}' hx-trigger="load\"""" in first.content.decode()
    assert 'id="plans"' not in first.content.decode()
    assert price(glance="no", device_budget="901 MiB").context["pricing"].kind == "priced"
    assert price(glance="yes", device_budget="901 MiB").context["pricing"].kind == "priced"


def test_a_first_answer_says_where_nothing_written_by_hand_fits(price: Callable[..., Any]) -> None:
    first = price(glance="yes", device_budget="10 KiB")
    assert "unknown : no standard setup fits in 10.0 KiB" in first.words
