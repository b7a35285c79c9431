"""The form of a new job in a real Chromium: priced as it is edited, and nothing typed is ever lost."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Route, expect

from optimizer.search.answer.baselines import BASELINES
from tests.end_to_end.conftest import running_site
from tests.end_to_end.site.browser import WIDTHS, Watched
from tests.end_to_end.site.site import Site

pytestmark = pytest.mark.browser


def test_an_edit_is_priced_again_and_keeps_what_was_typed(open_tab: Callable[..., Watched]) -> None:
    tab = open_tab("/jobs/new/")
    open_advanced(tab)
    name = tab.page.locator("#id_name")
    budget = tab.page.get_by_label("Device memory budget")
    name.fill("typed words")
    budget.fill("a lot")
    expect(tab.page.locator("#id_device_budget_error")).to_contain_text("size 'a lot' is not understood")
    expect(budget).to_have_attribute("aria-invalid", "true")
    budget.fill("360 MiB")
    expect(tab.page.locator("#id_device_budget_error")).to_be_empty()
    expect(budget).not_to_have_attribute("aria-invalid", "true")
    expect(name).to_have_value("typed words")
    expect(budget).to_be_focused()
    tab.check()


def test_a_session_that_ends_is_said_in_its_place_and_taken_up_again(open_tab: Callable[..., Watched]) -> None:
    """The login page was once drawn inside the pane of the verdict, and took the focus from who typed."""
    tab = open_tab("/jobs/new/")
    context = tab.page.context
    open_advanced(tab)
    tab.page.locator("#id_name").fill("typed words")
    budget = tab.page.get_by_label("Device memory budget")
    context.clear_cookies(name="sessionid")
    budget.fill("420 MiB")
    notice = tab.page.locator("#server-trouble")
    expect(notice).to_contain_text("You were logged out; what you typed is still here.")
    expect(tab.page.locator("#verdict")).not_to_contain_text("Password")
    expect(budget).to_be_focused()
    with context.expect_page() as opened:
        notice.get_by_role("link").click()
    login = opened.value
    login.get_by_label("Username").fill("ada")
    login.get_by_label("Password").fill("correct horse battery")
    login.get_by_role("button", name="Log in").click()
    login.wait_for_url("**/jobs/new/")
    login.close()
    tab.page.bring_to_front()
    tab.page.evaluate("dispatchEvent(new Event('focus'))")
    expect(notice).to_be_hidden()
    budget.fill("a lot")
    expect(tab.page.locator("#id_device_budget_error")).to_contain_text("is not understood")
    expect(tab.page.locator("#id_name")).to_have_value("typed words")
    # the browser itself reports the answer 401, and 403 where a price was asked for between the login and its taking up
    tab.complaints = [text for text in tab.complaints if "401" not in text and "403" not in text]
    tab.check()


def test_a_dataset_uploaded_beside_the_form_is_selected(open_tab: Callable[..., Watched], tmp_path: Path) -> None:
    text = tmp_path / "verse.txt"
    text.write_text("In the beginning God created the heaven and the earth.\n" * 40)
    tab = open_tab("/jobs/new/")
    open_advanced(tab)
    name = tab.page.locator("#id_name")
    name.fill("typed words")
    tab.page.get_by_text("Upload a dataset").click()
    tab.page.locator("#dataset_upload_name").fill("verse")
    tab.page.locator("#dataset_upload_file").set_input_files(text)
    tab.page.locator("#dataset-section").get_by_role("button", name="Upload").click()
    expect(tab.page.locator("#id_dataset option:checked")).to_contain_text("verse")
    expect(name).to_have_value("typed words")
    tab.check()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A site of this module's own: prices name the machine that is best, and the pages' tests bring another one."""
    with running_site() as running:
        yield running


@pytest.fixture(scope="module")
def priced_path(site: Site, llama_folder: Path) -> str:
    """The form with a model whose profile is known."""
    model = site.ask("add_llama", profile_file=str(llama_folder / "profile.json"))
    return f"/jobs/new/?model={model}"


def open_advanced(tab: Watched) -> None:
    tab.page.locator("#advanced > summary").click()


def verdict_of(tab: Watched) -> Locator:
    return tab.page.locator("#verdict .verdict-word")


PLAIN = "plain training, no memory saved"


def take(tab: Watched, label: str) -> None:
    tab.page.get_by_role("radio", name=f"Take {label} on workbench").check()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_priced_form_shows_its_verdict_its_bytes_and_every_plan(
    site: Site, open_tab: Callable[..., Watched], priced_path: str, width: int
) -> None:
    tab = open_tab(priced_path, width=width)
    expect(verdict_of(tab)).to_have_text("fits")
    expect(tab.page.locator("#verdict")).to_contain_text("needs")
    bar = tab.page.locator(".pick").first.get_by_role("img", name=re.compile(r"of a budget of .*: weights .* activations "))
    expect(bar).to_be_visible()
    assert bar.locator("rect.edge").count() >= 4
    tab.page.get_by_text(re.compile(r"^These and the other standard setups in numbers")).click()
    table = tab.page.get_by_role("region", name="Plans to choose from")
    expect(table.get_by_role("row")).to_have_count(2 + len(BASELINES))
    expect(tab.page.get_by_role("radio", name=re.compile("^Take ")).and_(tab.page.locator(":checked"))).to_have_count(1)
    expect(tab.page.get_by_role("radio", name="Take chosen on workbench")).to_be_checked()
    found = Axe().run(tab.page)
    assert found.violations_count == 0, found.generate_report()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    assert not site.has_torch()
    tab.check()


def test_another_budget_changes_the_verdict_and_loses_nothing_that_was_typed(
    open_tab: Callable[..., Watched], priced_path: str
) -> None:
    tab = open_tab(priced_path)
    expect(verdict_of(tab)).to_have_text("fits")
    open_advanced(tab)
    tab.page.locator("#id_name").fill("typed words")
    tab.page.get_by_label("Steps", exact=True).fill("77")
    budget = tab.page.get_by_label("Device memory budget")
    budget.fill("1 MiB")
    expect(verdict_of(tab)).to_have_text("does not fit")
    expect(tab.page.locator("#verdict")).to_contain_text("The smallest budget that would do is")
    expect(tab.page.get_by_role("radio", name="Take chosen on workbench")).to_have_count(0)
    tab.page.get_by_role("link", name="A budget of").click()
    expect(verdict_of(tab)).to_have_text("fits")
    expect(tab.page.get_by_role("radio", name="Take chosen on workbench")).to_be_checked()
    expect(budget).not_to_have_value("1 MiB")
    expect(tab.page.locator("#id_name")).to_have_value("typed words")
    expect(tab.page.get_by_label("Steps", exact=True)).to_have_value("77")
    tab.check()


def test_plans_of_the_last_answer_cannot_be_taken_while_the_form_is_priced_again(
    open_tab: Callable[..., Watched], priced_path: str
) -> None:
    tab = open_tab(priced_path)
    plans = tab.page.locator("#plans")
    expect(plans.get_by_role("radio", name="Take chosen on workbench")).to_be_checked()
    before = plans.get_by_role("radio", name="Take chosen on workbench").get_attribute("value")
    with tab.page.expect_request(lambda request: request.url.endswith("/price/")):
        tab.page.get_by_label("Device memory budget").fill("350 MiB")
        assert plans.evaluate("plans => plans.inert")
        expect(tab.page.locator("#plans-since")).to_contain_text("Being priced again")
    expect(tab.page.locator("#plans-since")).to_be_empty()
    assert not plans.evaluate("plans => plans.inert")
    assert plans.get_by_role("radio", name="Take chosen on workbench").get_attribute("value") != before
    tab.check()


def test_a_price_that_an_edit_supersedes_is_no_error_in_the_console(
    open_tab: Callable[..., Watched], priced_path: str
) -> None:
    tab = open_tab(priced_path)
    expect(verdict_of(tab)).to_have_text("fits")
    held: list[Route] = []
    tab.page.route("**/price/", lambda route: route.continue_() if held else held.append(route))
    budget = tab.page.get_by_label("Device memory budget")
    with tab.page.expect_request(lambda request: request.url.endswith("/price/")):
        budget.fill("350 MiB")
    with tab.page.expect_event("requestfailed"):
        budget.fill("340 MiB")
    expect(tab.page.locator("#start-verdict")).to_contain_text("of 340 MiB")
    tab.check()


def test_a_job_started_while_the_form_is_priced_again_has_the_plan_that_is_best_for_what_was_typed(
    site: Site, open_tab: Callable[..., Watched], priced_path: str
) -> None:
    tab = open_tab(priced_path)
    expect(tab.page.get_by_role("radio", name="Take chosen on workbench")).to_be_checked()
    open_advanced(tab)
    tab.page.locator("#id_name").fill("in a hurry")
    tab.page.get_by_label("Device memory budget").fill("340 MiB")
    tab.page.get_by_role("button", name="Start the job").click()
    expect(tab.page.locator("#job-head .state")).to_have_text("queued")
    job = site.ask("newest_job")
    assert (job["name"], job["spec"]["goal"]["device_budget_bytes"]) == ("in a hurry", 340 * 1024**2)
    tab.check()


def test_a_plan_that_does_not_fit_starts_only_when_that_is_insisted_on(
    site: Site, open_tab: Callable[..., Watched], priced_path: str
) -> None:
    tab = open_tab(priced_path)
    open_advanced(tab)
    tab.page.locator("#id_name").fill("insisted")
    tab.page.get_by_label("Device memory budget").fill("20 MiB")
    expect(tab.page.locator("#verdict")).to_contain_text("20.0 MiB")
    # the first answer is the verdict's alone; the plans follow with the search's
    expect(tab.page.locator(".pick").filter(has_text="No memory saved")).to_contain_text("does not fit")
    take(tab, PLAIN)
    tab.page.get_by_role("button", name="Start the job").click()
    refused = re.compile(r"Plan keep_all needs up to \d+\.\d MiB on the device; the budget is 20\.0 MiB\. .* or tick")
    # on a slow machine the page may also warn that no reconciler works here
    expect(tab.page.get_by_role("alert").filter(has_text="Plan keep_all")).to_contain_text(refused)
    expect(tab.page.locator("#start-verdict")).to_contain_text(f"does not fit {PLAIN}: ")
    expect(tab.page.locator("#id_name")).to_have_value("insisted")
    expect(tab.page.get_by_role("radio", name=f"Take {PLAIN} on workbench")).to_be_checked()
    tab.page.get_by_label("Start it even if it does not fit").check()
    tab.page.get_by_role("button", name="Start the job").click()
    expect(tab.page.locator("#job-head .state")).to_have_text("queued")
    job = site.ask("newest_job")
    assert tab.page.url.endswith(f"/jobs/{job['id']}/")
    assert (job["name"], job["spec"]["plan"]) == ("insisted", "keep_all")
    assert job["plan"]["activations"]["per_block"] == ["keep"] * 4
    assert job["spec"]["goal"]["device_budget_bytes"] == 20 * 1024**2 < job["prediction"]["device_peak_bytes"]
    tab.check()


def test_a_press_while_the_server_is_away_loses_nothing_that_was_typed(
    site: Site, open_tab: Callable[..., Watched], priced_path: str
) -> None:
    tab = open_tab(priced_path)
    expect(verdict_of(tab)).to_have_text("fits")
    open_advanced(tab)
    tab.page.locator("#id_name").fill("patient")
    expect(tab.page.locator("#plans-since")).to_be_empty()
    site.kill_web()
    start = tab.page.get_by_role("button", name="Start the job")
    start.click()
    expect(tab.page.locator("#server-trouble")).to_contain_text("so nothing was done and what you typed is still here")
    expect(tab.page.locator("#id_name")).to_have_value("patient")
    site.start_web()
    start.click()
    expect(tab.page.locator("#job-head .state")).to_have_text("queued")
    assert site.ask("newest_job")["name"] == "patient"
    # the browser and htmx report each connection that was refused meanwhile
    tab.complaints = [text for text in tab.complaints if "net::ERR_" not in text and "htmx:sendError" not in text]
    tab.check()


def test_where_nothing_fits_the_first_way_out_stands_out_and_not_the_start(
    open_tab: Callable[..., Watched], priced_path: str
) -> None:
    tab = open_tab(priced_path)
    expect(verdict_of(tab)).to_have_text("fits")
    colour = "button => getComputedStyle(button).backgroundColor"
    start = tab.page.get_by_role("button", name="Start the job")
    blue = start.evaluate(colour)
    tab.page.get_by_label("Device memory budget").fill("1 MiB")
    way_out = tab.page.get_by_role("link", name="A budget of")
    expect(way_out).to_be_visible()
    assert way_out.evaluate(colour) == blue != start.evaluate(colour)
    tab.check()


def test_an_edit_on_the_page_of_plans_moves_a_point_and_can_be_sent_as_an_address(
    open_tab: Callable[..., Watched], priced_path: str
) -> None:
    tab = open_tab(priced_path)
    expect(verdict_of(tab)).to_have_text("fits")
    tab.page.get_by_role("link", name="See every plan for this work").click()
    drawn = "() => document.getElementById('chart-frontier').data?.map(trace => trace.name) ?? []"
    tab.page.wait_for_function(f"() => ({drawn})().includes('recommended')")
    tab.page.get_by_text("Try a change").click()
    tab.page.locator("[name='try-pin_activations_per_block']").fill("recompute")
    tab.page.locator("[name='try-pin_activations_per_block']").blur()
    expect(tab.page.get_by_text("Yours: activations per block")).to_be_visible()
    tab.page.wait_for_function(f"() => ({drawn})().includes('yours')")
    assert "try-pin_activations_per_block=recompute" in tab.page.url
    tab.page.reload()
    expect(tab.page.get_by_text("Yours: activations per block")).to_be_visible()
    tab.page.get_by_text("Device memory within a step, as predicted").click()
    tab.page.get_by_label("The step of plan A as a table").click()
    expect(tab.page.get_by_role("region", name="A step of recommended").get_by_role("row").first).to_be_visible()
    tab.check()
