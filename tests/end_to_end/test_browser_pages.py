"""Every page in a real Chromium: accessible, as wide as its window, light and dark, and without JavaScript.

``HEADROOM_SCREENSHOTS=FOLDER`` also writes a picture of every page there; ``docs/screenshots`` has the few that the docs show.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, StorageState, expect

from tests.end_to_end.site.browser import WIDTHS, Watched, log_in, take_picture, wait_for_points
from tests.end_to_end.site.site import Site

pytestmark = pytest.mark.browser
MOST_COMPARED = 1200
# points of one run on the page that compares
REACHING_OUT = """
(width) => [...document.querySelectorAll("body *")]
  .map((part) => [Math.round(part.getBoundingClientRect().right), part.outerHTML.slice(0, 120)])
  .filter(([right]) => right > width)
  .slice(0, 12)
"""
NARROWEST = 360
# pixels of the narrowest telephones


def test_shortcuts_are_listed_and_can_be_turned_off(site: Site, open_tab: Callable[..., Watched]) -> None:
    tab = open_tab("/machines/")
    tab.page.keyboard.press("?")
    dialog = tab.page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(dialog).to_be_visible()
    dialog.get_by_label("single-key shortcuts on").uncheck()
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("n")
    expect(tab.page).to_have_url(f"{site.url}/machines/")
    tab.page.locator("header .menu-of summary").click()
    tab.page.get_by_role("button", name="Keyboard shortcuts", exact=True).click()
    dialog.get_by_label("single-key shortcuts on").check()
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("j")
    expect(tab.page).to_have_url(f"{site.url}/jobs/")
    tab.check()


@pytest.fixture(scope="module")
def shown_jobs(site: Site, llama_folder: Path, writer_folder: Path) -> dict[str, Any]:
    """One job at work, one that ran out of memory, and a model whose plans are known, for the pages that are looked at."""
    running, failed = (site.ask("new_job", name=name) for name in ("kjv-demo", "plain-training"))
    site.ask("begin", job_id=running)
    site.ask("measure", job_id=running, first=1, last=82)
    site.ask("keep_checkpoint", job_id=running, step=50)
    site.ask("begin", job_id=failed)
    site.ask("measure", job_id=failed, first=1, last=2)
    site.ask("run_out_of_memory", job_id=failed)
    site.ask("new_job", name="waits-here")
    llama = site.ask("add_llama", profile_file=str(llama_folder / "profile.json"))
    generating = site.ask("new_generate_job", name="answers")
    jobs = {"job": running, "failed-job": failed, "generate-job": generating}
    rare = {**site.ask("rare"), **site.ask("add_writer", profile_file=str(writer_folder / "profile.json"))}
    return {**jobs, **rare, "llama": llama, **site.ask("catalog"), **site.ask("access")}


@pytest.fixture(scope="module")
def signed_in_as(
    site: Site, chromium: Browser, signed_in: StorageState, shown_jobs: dict[str, str]
) -> Callable[[str], StorageState | None]:
    """The cookies of each person, logged in through the form once."""
    known = {"ada": signed_in, "nobody": None}

    def cookies(name: str) -> StorageState | None:
        if name not in known:
            known[name] = log_in(site, chromium, name)
        return known[name]

    return cookies


# the name of a page's pictures -> its address; names in braces stand for what ``shown_jobs`` made
PAGES = {
    "login": "/login/",
    "jobs": "/jobs/",
    "job": "/jobs/{job}/",
    "job-execution": "/jobs/{job}/?tab=execution&loss-scale=log&loss-over=tokens&loss-smoothing=0.6",
    "failed-job": "/jobs/{failed-job}/",
    "generate-job": "/jobs/{generate-job}/?tab=samples",
    "compare": "/jobs/compare/?job={job}&job={failed-job}",
    "queue": "/queue/",
    "job-new": "/jobs/new/?model={llama}",
    "generate-new": "/jobs/new/generate/",
    "generate-plans": "/plans/?kind=generate&model={writer}&prompts={prompts}&max_new_tokens=8&device_budget=2+MiB",
    "plans-first": "/plans/",
    "plans": "/plans/?model={llama}&device_budget=20+MiB&try-pin_activations_per_block=recompute",
    "models": "/models/",
    "model": "/models/{llama}/",
    "datasets": "/datasets/",
    "dataset": "/datasets/{dataset}/",
    "machines": "/machines/",
    "machine": "/machines/{machine}/",
    "tokens": "/tokens/",
    "password": "/password/",
    "projects": "/projects/",
    "project": "/projects/{project}/",
    "webhooks": "/projects/{project}/webhooks/",
    "webhook": "/webhooks/{webhook}/",
    "people": "/people/",
    "audit": "/audit/",
    "words": "/words/",
    "welcome": "/welcome/",
    "search": "/search/?q=demo",
    "settings": "/settings/",
    "failed-generation": "/jobs/{failed-generation}/",
    "paused-job": "/jobs/{paused-job}/",
    "model-unread": "/models/{model-unread}/",
    "machine-uncertain": "/machines/{machine-uncertain}/",
    "project-alone": "/projects/{project-alone}/",
    # as somebody who may only look
    "viewer-job": "/jobs/{job}/",
    "viewer-new": "/jobs/new/",
    "viewer-queue": "/queue/",
    "viewer-project": "/projects/{home}/",
    # as somebody who has nothing yet
    "empty-jobs": "/jobs/",
    "empty-queue": "/queue/",
    "empty-generate": "/jobs/new/generate/",
    "empty-tokens": "/tokens/",
    "empty-compare": "/jobs/compare/",
}
SEEN_BY = {"login": "nobody", "viewer": "vera", "empty": "newcomer"}
"""Owner of a page by the beginning of the page's name; all others are ada's, who administers the service."""
# what JavaScript still has to bring once a page has loaded
READY = {
    "job": lambda tab: wait_for_points(tab, 82),
    "failed-job": lambda tab: wait_for_points(tab, 2),
    "generate-job": lambda tab: wait_for_points(tab, 60),
    "compare": lambda tab: expect(tab.page.locator("#compare-status")).to_have_text("84 points of 2 runs."),
    "generate-plans": lambda tab: tab.page.wait_for_function("() => document.getElementById('chart-frontier')?.data?.length"),
    "viewer-job": lambda tab: wait_for_points(tab, 82),
    "paused-job": lambda tab: wait_for_points(tab, 12),
    "plans": lambda tab: tab.page.wait_for_function("() => document.querySelectorAll('.js-plotly-plot').length >= 3"),
    "model": lambda tab: tab.page.get_by_role("region", name="Verdict for each card").wait_for(),
    "dataset": lambda tab: wait_for_bars(tab),
    "machine": lambda tab: wait_for_bars(tab, chart="chart-peak"),
    "job-new": lambda tab: tab.page.locator("#plans .pick").first.wait_for(),
    "generate-new": lambda tab: tab.page.locator("#plans .pick").first.wait_for(),
}


def wait_for_bars(tab: Watched, chart: str = "chart-lengths") -> None:
    tab.page.wait_for_function("id => document.getElementById(id).data?.length > 0", arg=chart)


@pytest.fixture
def open_page(
    open_tab: Callable[..., Watched], signed_in_as: Callable[[str], StorageState | None], shown_jobs: dict[str, str]
) -> Callable[..., Watched]:
    def open_(name: str) -> Watched:
        whose = SEEN_BY.get(name.partition("-")[0], "ada")
        tab = open_tab(PAGES[name].format_map(shown_jobs), storage=signed_in_as(whose))
        READY.get(name, lambda tab: None)(tab)
        return tab

    return open_


def assert_accessible(tab: Watched, **options: Any) -> None:
    found = Axe().run(tab.page, options=options or None)
    assert found.violations_count == 0, found.generate_report()


def assert_readable(tab: Watched) -> None:
    """The only one of axe's rules that colours decide."""
    assert_accessible(tab, runOnly=["color-contrast"])


def assert_no_wider(tab: Watched, width: int) -> None:
    """Charts follow their window a moment later. Asked here, not by the page: it may draw no frame of its own any more."""
    until_s = time.monotonic() + 30
    while tab.page.evaluate("document.documentElement.scrollWidth") > width and time.monotonic() < until_s:
        tab.page.wait_for_timeout(100)
    reaching = tab.page.evaluate(REACHING_OUT, width)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, reaching


def assert_large_enough_to_hit(tab: Watched) -> None:
    """Controls are 24 pixels wide and high, or as far from their neighbours (WCAG 2.5.8); links in sentences need not be."""
    assert_accessible(tab, runOnly=["target-size"])


@pytest.mark.breadth
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_accessible_as_wide_as_its_window_and_readable_in_the_dark(
    open_page: Callable[..., Watched], name: str
) -> None:
    """Opened once: a page that is opened dark differs in nothing from one that turns dark, and charts follow."""
    tab = open_page(name)
    assert_accessible(tab)
    take_picture(tab, f"{name}-{WIDTHS[0]}")
    tab.page.emulate_media(color_scheme="dark")
    assert_readable(tab)
    take_picture(tab, f"{name}-dark")
    tab.page.emulate_media(color_scheme="light")
    tab.page.set_viewport_size({"width": WIDTHS[1], "height": 900})
    assert_no_wider(tab, WIDTHS[1])
    assert_accessible(tab)
    assert_large_enough_to_hit(tab)
    take_picture(tab, f"{name}-{WIDTHS[1]}")
    tab.page.set_viewport_size({"width": NARROWEST, "height": 900})
    assert_no_wider(tab, NARROWEST)
    tab.check()


def test_runs_chosen_in_the_list_stay_chosen_as_it_refreshes_and_are_compared(
    open_page: Callable[..., Watched]
) -> None:
    tab = open_page("jobs")
    for name in ("kjv-demo", "plain-training"):
        tab.page.get_by_label(f"Choose {name}").first.check()
    with tab.page.expect_response(lambda answer: answer.request.headers.get("hx-request") == "true"):
        pass
    expect(tab.page.get_by_label("Choose plain-training").first).to_be_checked()
    tab.page.get_by_role("button", name="Compare", exact=True).click()
    expect(tab.page.locator("#compare-status")).to_contain_text("of 2 runs.")
    tab.page.get_by_role("button", name="over minutes").click()
    expect(tab.page.locator("#compare-loss")).to_contain_text("minutes since the first step")
    tab.check()


def test_curves_of_runs_of_different_lengths_can_end_where_the_shortest_does(
    site: Site, open_tab: Callable[..., Watched]
) -> None:
    jobs = [site.ask("new_job", name=name) for name in ("short", "long")]
    for job_id, num_steps in zip(jobs, (20, 80), strict=True):
        site.ask("begin", job_id=job_id)
        site.ask("measure", job_id=job_id, first=1, last=num_steps)
    tab = open_tab(f"/jobs/compare/?job={jobs[0]}&job={jobs[1]}")
    last_steps = "[...document.getElementById('compare-loss').data ?? []].map(trace => trace.x.at(-1))"
    tab.page.wait_for_function(f"() => JSON.stringify({last_steps}) === '[20,80]'")
    tab.page.get_by_role("button", name="as far as all ran").click()
    tab.page.wait_for_function(f"() => JSON.stringify({last_steps}) === '[20,20]'")
    # two lines through two ends of each axis say nothing
    expect(tab.page.locator("#compare-all")).to_have_count(0)
    tab.check()


def test_panels_in_which_nothing_was_measured_are_not_drawn(site: Site, open_tab: Callable[..., Watched]) -> None:
    small = site.ask("new_small_generate_job", name="small")
    tab = open_tab(f"/jobs/{small}/?tab=execution")
    expect(tab.page.locator("#chart-memory .nsewdrag")).to_be_attached()
    for panel in ("host-panel", "lanes-panel", "speed-panel", "links-panel", "card-panel"):
        expect(tab.page.locator(f"#{panel}")).to_be_hidden()
    tab.check()


def test_ten_long_runs_are_compared_with_no_more_points_drawn_than_a_chart_can_show(
    site: Site, open_tab: Callable[..., Watched]
) -> None:
    jobs = [site.ask("new_job", name=f"long-{number}") for number in range(10)]
    for job_id in jobs:
        site.ask("begin", job_id=job_id)
        site.ask("fill", job_id=job_id, num_points=MOST_COMPARED + 300)
    tab = open_tab("/jobs/compare/?" + "&".join(f"job={job_id}" for job_id in jobs))
    expect(tab.page.locator("#compare-status")).to_contain_text("points of 10 runs.")
    for chart in ("compare-loss", "compare-memory", "compare-speed"):
        tab.page.wait_for_function("id => document.getElementById(id).data?.length === 10", arg=chart)
        lengths = tab.page.evaluate("id => document.getElementById(id).data.map(trace => trace.x.length)", chart)
        assert all(100 < length <= MOST_COMPARED for length in lengths)
    tab.check()


def test_every_chart_has_the_cloud_turned_off(open_page: Callable[..., Watched]) -> None:
    tab = open_page("job-execution")
    # those out of view are drawn when the browser is idle
    tab.page.wait_for_function("() => document.querySelectorAll('.js-plotly-plot').length === 7")
    configs = tab.page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')].map(chart => chart._context)"
        ".map(c => [c.showSendToCloud, c.plotlyServerURL, c.displaylogo, c.responsive])"
    )
    assert configs == [[False, "", False, True]] * 7


def test_who_has_no_prompts_yet_uploads_the_first_beside_the_form(
    open_page: Callable[..., Watched], tmp_path: Path
) -> None:
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text('{"prompt": "In the beginning"}\n')
    tab = open_page("empty-generate")
    # open already, as there is nothing to choose
    tab.page.locator("#prompts_upload_name").fill("questions")
    tab.page.locator("#prompts_upload_file").set_input_files(prompts)
    tab.page.locator("#prompts-section").get_by_role("button", name="Upload").click()
    expect(tab.page.locator("#id_prompts option:checked")).to_contain_text("questions")
    tab.check()


def test_who_moves_a_job_by_the_keyboard_stays_at_its_button(open_page: Callable[..., Watched]) -> None:
    tab = open_page("queue")
    tab.page.get_by_role("button", name="Move waits-here later").focus()
    tab.page.keyboard.press("Enter")
    expect(tab.page.get_by_role("row").filter(has_text="waits-here").get_by_role("cell").nth(3)).to_have_text("-1")
    expect(tab.page.get_by_role("button", name="Move waits-here later")).to_be_focused()
    with tab.page.expect_response(lambda answer: answer.request.headers.get("hx-request") == "true"):
        pass
    tab.page.wait_for_timeout(100)
    expect(tab.page.get_by_role("button", name="Move waits-here later")).to_be_focused()
    tab.check()


def test_going_back_through_the_tabs_of_a_job_brings_its_charts_back(open_page: Callable[..., Watched]) -> None:
    tab = open_page("job")
    for name in ("Logs", "Events"):
        tab.page.get_by_role("link", name=name, exact=True).click()
        expect(tab.page.get_by_role("link", name=name, exact=True)).to_have_attribute("aria-current", "true")
    tab.page.go_back()
    expect(tab.page.get_by_role("link", name="Logs", exact=True)).to_have_attribute("aria-current", "true")
    wait_for_points(tab, 82)
    tab.check()


def test_a_form_that_comes_back_begins_at_its_first_error(open_page: Callable[..., Watched]) -> None:
    tab = open_page("job-new")
    tab.page.get_by_label("Device memory budget").fill("a lot")
    tab.page.get_by_role("button", name="Start the job").click()
    expect(tab.page.get_by_label("Device memory budget")).to_be_focused()
    expect(tab.page.get_by_label("Device memory budget")).to_have_value("a lot")
    tab.check()


def test_the_page_of_the_api_asks_no_other_host_for_anything(open_tab: Callable[..., Watched]) -> None:
    tab = open_tab("/api/v1/docs")
    # the maker's line, beside which the logo would be
    expect(tab.page.get_by_role("link", name="API docs by Redocly")).to_be_attached()
    tab.page.wait_for_load_state("networkidle")
    tab.check()


def test_an_address_of_nothing_says_so_in_the_pages_own_words(open_tab: Callable[..., Watched]) -> None:
    tab = open_tab("/jobs/job_nothing/")
    expect(tab.page.get_by_role("heading", name="This is not here")).to_be_visible()
    expect(tab.page.get_by_role("link", name="All jobs")).to_be_visible()


def test_a_page_works_without_javascript(
    site: Site, chromium: Browser, signed_in: StorageState, shown_jobs: dict[str, str]
) -> None:
    context = chromium.new_context(java_script_enabled=False, storage_state=signed_in)
    page = context.new_page()
    page.goto(f"{site.url}/jobs/{shown_jobs['job']}/")
    expect(page.locator("#chart-memory .picture path.curve-predicted")).to_be_visible()
    expect(page.locator("#chart-loss .picture path.curve-training")).to_be_visible()
    page.get_by_role("link", name="Events").click()
    expect(page.get_by_role("region", name="Events")).to_contain_text("claimed")
    page.get_by_label("Loss as a table").click()
    page.locator("details[open]").get_by_role("link", name="Open the table").click()
    expect(page.get_by_role("region", name="Loss").get_by_role("row")).to_have_count(84)
    context.close()


def test_the_palette_goes_anywhere_by_the_keyboard_alone(open_page: Callable[..., Watched]) -> None:
    tab = open_page("models")
    tab.page.keyboard.press("Control+k")
    expect(tab.page.get_by_role("combobox", name="Search jobs")).to_be_focused()
    tab.page.keyboard.type("machi")
    expect(tab.page.get_by_role("listbox", name="Found").get_by_role("option").first).to_contain_text("Machines")
    assert_accessible(tab)
    tab.page.keyboard.press("ArrowDown")
    tab.page.keyboard.press("ArrowUp")
    tab.page.keyboard.press("Enter")
    expect(tab.page.get_by_role("heading", name="Machines", level=1)).to_be_visible()
    tab.check()


def test_a_theme_is_changed_in_place_and_charts_follow(open_page: Callable[..., Watched]) -> None:
    tab = open_page("job")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    text = "document.getElementById('chart-memory').layout.font.color"
    light = tab.page.evaluate(ground), tab.page.evaluate(text)
    tab.page.locator("header .menu-of summary").click()
    tab.page.get_by_role("button", name="Dark").click()
    assert_readable(tab)
    tab.page.wait_for_function("before => document.getElementById('chart-memory').layout.font.color !== before", arg=light[1])
    assert tab.page.evaluate(ground) != light[0]
    tab.page.reload()
    expect(tab.page.locator("html")).to_have_attribute("data-theme", "dark")
    tab.page.locator("header .menu-of summary").click()
    with tab.page.expect_response("**/settings/theme/"):
        tab.page.get_by_role("button", name="System").click()
    tab.check()
