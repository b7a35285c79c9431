"""The pages in a real Chromium, against real processes: live charts, lost connections, accessibility, two widths.

``HEADROOM_SCREENSHOTS=1`` also writes the pictures that the documentation shows.
"""

import os
import re
from urllib.parse import urlparse

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

from optimizer.search.baselines import BASELINES
from tests.end_to_end.site import ROOT, Site
from tests.webapp.pages import rows

pytestmark = pytest.mark.browser

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDTHS = (1280, 390)
PATIENCE_MS = 30_000
PICTURES = ROOT / "docs" / "screenshots"
WATCH_POLICY = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""


@pytest.fixture(scope="module")
def site():
    running = Site()
    running.ask("seed")
    yield running
    running.close()


@pytest.fixture(scope="module")
def chromium():
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def signed_in(site, chromium):
    """The cookies of one log-in, through the form."""
    context = chromium.new_context()
    page = context.new_page()
    page.goto(f"{site.url}/jobs/")
    page.get_by_label("Username").fill("ada")
    page.get_by_label("Password").fill("correct horse battery")
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(f"{site.url}/jobs/")
    state = context.storage_state()
    context.close()
    return state


class Watched:
    """A tab whose every complaint and every request is kept."""

    def __init__(self, page, host):
        self.page = page
        self.complaints = []
        self.foreign = []
        page.set_default_timeout(PATIENCE_MS)
        page.add_init_script(WATCH_POLICY)
        page.on("console", lambda message: self._hear(message))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self._see(request.url, host))

    def _hear(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.text} {message.location.get('url', '')}")

    def _see(self, url, host):
        parts = urlparse(url)
        if parts.scheme not in ("data", "blob") and parts.netloc != host:
            self.foreign.append(url)

    def check(self):
        assert self.complaints == []
        assert self.foreign == []
        assert self.page.evaluate("window.violations") == []


@pytest.fixture
def open_tab(site, chromium, signed_in):
    contexts = []

    def open_(path, *, width=1280, scheme="light", storage=signed_in):
        context = chromium.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            storage_state=storage,
            reduced_motion="reduce",
        )
        contexts.append(context)
        tab = Watched(context.new_page(), urlparse(site.url).netloc)
        tab.page.goto(site.url + path)
        return tab

    yield open_
    for context in contexts:
        context.close()
    print(site.log())  # shown where the test failed


@pytest.fixture
def running_job(site):
    job_id = site.ask("new_job", name="kjv-demo")
    site.ask("begin", job_id=job_id)
    site.ask("measure", job_id=job_id, first=1, last=30)
    return job_id


def wait_for_points(tab, count):
    """The chart itself, not only the page's memory of it, holds that many points."""
    tab.page.wait_for_function(
        "count => document.getElementById('chart-memory').data?.[0]?.x?.length === count", arg=count
    )


def steps_drawn(tab):
    return tab.page.evaluate("document.getElementById('chart-memory').data[0].x")


def named_traces(tab, chart="chart-memory"):
    return tab.page.evaluate("id => document.getElementById(id).data.map(trace => trace.name)", chart)


def take_picture(tab, name):
    if os.environ.get("HEADROOM_SCREENSHOTS") == "1":
        PICTURES.mkdir(parents=True, exist_ok=True)
        tab.page.screenshot(path=PICTURES / f"{name}.png", full_page=True)


def test_charts_grow_while_the_job_runs(site, open_tab, running_job):
    tab = open_tab(f"/jobs/{running_job}/")
    wait_for_points(tab, 30)
    assert site.ask("measure", job_id=running_job, first=31, last=80) == 0
    wait_for_points(tab, 80)
    assert steps_drawn(tab) == list(range(1, 81))
    expect(tab.page.locator('[data-live="step"]')).to_have_text("80")
    tab.check()


def test_prediction_and_budget_are_drawn_over_the_stack(open_tab, running_job):
    tab = open_tab(f"/jobs/{running_job}/")
    wait_for_points(tab, 30)
    names = ["weights", "gradients", "optimizer state", "activations", "logits and loss", "temporaries"]
    assert named_traces(tab) == [*names, "predicted", "budget"]
    traces = tab.page.evaluate("document.getElementById('chart-memory').data.map(t => [t.name, t.y[0], t.line.dash])")
    lines = {name: (value, dash) for name, value, dash in traces}
    assert lines["predicted"] == (409, "dash")
    assert lines["budget"][0] == 480
    assert tab.page.evaluate("document.getElementById('chart-memory').data[1].fillpattern.shape") == "/"
    expect(
        tab.page.get_by_role("group", name="measured peak 411 MiB, predicted 409 MiB, budget 480 MiB")
    ).to_be_visible()
    tab.check()


def test_a_step_is_shown_from_within_with_its_prediction(open_tab, running_job):
    tab = open_tab(f"/jobs/{running_job}/")
    wait_for_points(tab, 30)
    tab.page.get_by_role("button", name="within a step").click()
    tab.page.wait_for_function("() => document.getElementById('chart-memory').data[0].x.length === 60")
    ends = tab.page.evaluate(
        "document.getElementById('chart-memory').data.filter(t => t.name === 'weights' || t.name === 'predicted')"
        ".map(t => t.x.at(-1))"
    )
    assert ends == [100, 100]
    expect(tab.page.get_by_role("button", name="within a step")).to_have_attribute("aria-pressed", "true")
    tab.check()


def test_a_reload_and_a_second_tab_show_every_point(site, open_tab, running_job):
    tab = open_tab(f"/jobs/{running_job}/")
    wait_for_points(tab, 30)
    site.ask("measure", job_id=running_job, first=31, last=60)
    wait_for_points(tab, 60)
    tab.page.reload()
    wait_for_points(tab, 60)
    second = open_tab(f"/jobs/{running_job}/")
    wait_for_points(second, 60)
    site.ask("measure", job_id=running_job, first=61, last=64)
    for each in (tab, second):
        wait_for_points(each, 64)
        assert steps_drawn(each) == list(range(1, 65))
        each.check()


def test_a_restart_of_the_web_process_loses_no_point(site, open_tab, running_job):
    tab = open_tab(f"/jobs/{running_job}/")
    wait_for_points(tab, 30)
    site.kill_web()
    tab.page.wait_for_function("() => document.getElementById('job-page').dataset.connection === 'reconnecting'")
    expect(tab.page.locator('[data-live="connection"]')).to_contain_text("waiting for the server since")
    site.ask("measure", job_id=running_job, first=31, last=45)
    site.start_web()
    wait_for_points(tab, 45)
    site.ask("measure", job_id=running_job, first=46, last=50)
    wait_for_points(tab, 50)
    assert steps_drawn(tab) == list(range(1, 51))
    # the browser itself reports each connection that was refused meanwhile
    tab.complaints = [text for text in tab.complaints if "net::ERR_" not in text]
    tab.check()


def test_the_end_of_a_job_arrives_by_itself(site, open_tab, running_job):
    tab = open_tab(f"/jobs/{running_job}/")
    wait_for_points(tab, 30)
    site.ask("measure", job_id=running_job, first=31, last=rows.NUM_STEPS)
    site.ask("keep_checkpoint", job_id=running_job, step=100)
    assert site.ask("succeed", job_id=running_job) == "succeeded"
    expect(tab.page.locator("#job-head .state")).to_have_text("succeeded")
    expect(tab.page.get_by_role("region", name="How it ended")).to_contain_text("Finished 120 steps; the measured peak")
    expect(tab.page.get_by_role("status").filter(has_text="The job is succeeded")).to_be_attached()
    wait_for_points(tab, rows.NUM_STEPS)
    assert tab.page.evaluate("document.getElementById('job-page').dataset.connection") == "ended"
    tab.page.get_by_role("link", name="Checkpoints").click()
    expect(tab.page.get_by_role("row", name="100")).to_be_visible()
    assert tab.page.url.endswith("?tab=checkpoints")
    tab.check()


def test_a_burst_of_samples_is_drawn_at_most_twice_a_second(site, open_tab, running_job):
    tab = open_tab(f"/jobs/{running_job}/")
    wait_for_points(tab, 30)
    before, began_ms = tab.page.evaluate(
        "[Number(document.getElementById('job-page').dataset.draws), performance.now()]"
    )
    for step in range(31, 71):
        site.ask("measure", job_id=running_job, first=step, last=step)
    wait_for_points(tab, 70)
    after, ended_ms = tab.page.evaluate(
        "[Number(document.getElementById('job-page').dataset.draws), performance.now()]"
    )
    assert after - before <= (ended_ms - began_ms) / 500 + 1
    tab.check()


def test_stop_and_save_is_one_click(site, open_tab, running_job):
    tab = open_tab(f"/jobs/{running_job}/")
    tab.page.get_by_role("button", name="Stop and save").click()
    expect(tab.page.locator("#job-head .state")).to_have_text("stopping")
    expect(tab.page.get_by_role("button", name="Stop and save")).to_be_disabled()
    tab.check()


def test_the_table_behind_a_chart_opens_in_place(open_tab, running_job):
    tab = open_tab(f"/jobs/{running_job}/")
    wait_for_points(tab, 30)
    tab.page.get_by_label("Loss as a table").click()
    expect(tab.page.get_by_role("region", name="Loss").get_by_role("row")).to_have_count(32)
    tab.check()


def test_an_edit_is_priced_again_and_keeps_what_was_typed(open_tab):
    tab = open_tab("/jobs/new/")
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


def test_a_dataset_uploaded_beside_the_form_is_selected(open_tab, tmp_path):
    text = tmp_path / "verse.txt"
    text.write_text("In the beginning God created the heaven and the earth.\n" * 40)
    tab = open_tab("/jobs/new/")
    name = tab.page.locator("#id_name")
    name.fill("typed words")
    tab.page.get_by_text("Upload a dataset").click()
    tab.page.locator("#dataset_upload_name").fill("verse")
    tab.page.locator("#dataset_upload_file").set_input_files(text)
    tab.page.locator("#dataset-section").get_by_role("button", name="Upload").click()
    expect(tab.page.locator("#id_dataset option:checked")).to_have_text("verse")
    expect(name).to_have_value("typed words")
    tab.check()


def test_shortcuts_are_listed_and_can_be_turned_off(site, open_tab):
    tab = open_tab("/machines/")
    tab.page.keyboard.press("?")
    dialog = tab.page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(dialog).to_be_visible()
    dialog.get_by_label("single-key shortcuts on").uncheck()
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("n")
    expect(tab.page).to_have_url(f"{site.url}/machines/")
    tab.page.get_by_role("button", name="Keyboard shortcuts").click()
    dialog.get_by_label("single-key shortcuts on").check()
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("j")
    expect(tab.page).to_have_url(f"{site.url}/jobs/")
    tab.check()


@pytest.fixture(scope="module")
def shown_jobs(site):
    """One job at work and one that ran out of memory, for the pages that are looked at."""
    running, failed = (site.ask("new_job", name=name) for name in ("kjv-demo", "plain-training"))
    site.ask("begin", job_id=running)
    site.ask("measure", job_id=running, first=1, last=82)
    site.ask("keep_checkpoint", job_id=running, step=50)
    site.ask("begin", job_id=failed)
    site.ask("measure", job_id=failed, first=1, last=2)
    site.ask("run_out_of_memory", job_id=failed)
    site.ask("new_job", name="waits-here")
    return {"job": running, "failed-job": failed}


PAGES = ("login", "jobs", "job", "failed-job", "compare", "queue", "job-new", "models", "datasets", "machines", "tokens")
PATHS = {"job-new": "/jobs/new/"}


def open_page(open_tab, name, shown_jobs, **how):
    if name == "login":
        return open_tab("/login/", storage=None, **how)
    if name == "compare":
        tab = open_tab(f"/jobs/compare/?job={shown_jobs['job']}&job={shown_jobs['failed-job']}", **how)
        expect(tab.page.locator("#compare-status")).to_have_text("84 points of 2 runs.")
        return tab
    tab = open_tab(f"/jobs/{shown_jobs[name]}/" if name in shown_jobs else PATHS.get(name, f"/{name}/"), **how)
    if name in shown_jobs:
        wait_for_points(tab, 82 if name == "job" else 2)
    if name == "job-new":
        tab.page.get_by_text("being profiled").or_(tab.page.locator(".verdict-fits")).first.wait_for()
    return tab


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_accessible_and_as_wide_as_its_window(open_tab, shown_jobs, name, width):
    tab = open_page(open_tab, name, shown_jobs, width=width)
    found = Axe().run(tab.page)
    assert found.violations_count == 0, found.generate_report()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    take_picture(tab, f"{name}-{width}")
    tab.check()


@pytest.mark.parametrize("name", ["job", "failed-job", "compare", "jobs", "job-new"])
def test_a_page_is_accessible_in_the_dark(open_tab, shown_jobs, name):
    tab = open_page(open_tab, name, shown_jobs, scheme="dark")
    found = Axe().run(tab.page)
    assert found.violations_count == 0, found.generate_report()
    take_picture(tab, f"{name}-dark")
    tab.check()


def test_runs_chosen_in_the_list_stay_chosen_as_it_refreshes_and_are_compared(open_tab, shown_jobs):
    tab = open_page(open_tab, "jobs", shown_jobs)
    for name in ("kjv-demo", "plain-training"):
        tab.page.get_by_label(f"Compare {name}").first.check()
    with tab.page.expect_response(lambda answer: answer.request.headers.get("hx-request") == "true"):
        pass
    expect(tab.page.get_by_label("Compare plain-training").first).to_be_checked()
    tab.page.get_by_role("button", name="Compare the chosen runs").click()
    expect(tab.page.locator("#compare-status")).to_contain_text("of 2 runs.")
    tab.page.get_by_role("button", name="over minutes").click()
    expect(tab.page.locator("#compare-loss")).to_contain_text("minutes since the first step")
    tab.check()


def test_every_chart_has_the_cloud_turned_off(open_tab, shown_jobs):
    tab = open_page(open_tab, "job", shown_jobs)
    configs = tab.page.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')].map(chart => chart._context)"
        ".map(c => [c.showSendToCloud, c.plotlyServerURL, c.displaylogo, c.responsive])"
    )
    assert configs == [[False, "", False, True]] * 4


def test_a_page_works_without_javascript(site, chromium, signed_in, shown_jobs):
    context = chromium.new_context(java_script_enabled=False, storage_state=signed_in)
    page = context.new_page()
    page.goto(f"{site.url}/jobs/{shown_jobs['job']}/")
    page.get_by_role("link", name="Events").click()
    expect(page.get_by_role("region", name="Events")).to_contain_text("claimed")
    page.get_by_label("Loss as a table").click()
    page.locator("details[open]").get_by_role("link", name="Open the table").click()
    expect(page.get_by_role("region", name="Loss").get_by_role("row")).to_have_count(84)
    context.close()


@pytest.fixture(scope="module")
def priced_path(site, llama_folder):
    """The form with a model whose profile is known."""
    model = site.ask("add_llama", profile_file=str(llama_folder / "profile.json"))
    return f"/jobs/new/?model={model}"


def verdict_of(tab):
    return tab.page.locator("#verdict .verdict-word")


def take(tab, label):
    tab.page.get_by_role("radio", name=f"Take {label} on workbench").check()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_priced_form_shows_its_verdict_its_bytes_and_every_plan(site, open_tab, priced_path, width):
    tab = open_tab(priced_path, width=width)
    expect(verdict_of(tab)).to_have_text("fits")
    expect(tab.page.locator("#verdict")).to_contain_text("in 360 MiB: needs")
    bar = tab.page.locator("#verdict").get_by_role("img", name=re.compile(r"of a budget of 360 MiB: weights .* activations "))
    assert bar.locator("rect.edge").count() >= 4
    table = tab.page.get_by_role("region", name="Plans to choose from")
    expect(table.get_by_role("row")).to_have_count(2 + len(BASELINES))
    expect(table.get_by_role("radio", checked=True)).to_have_count(1)
    expect(table.get_by_role("radio", name="Take chosen on workbench")).to_be_checked()
    found = Axe().run(tab.page)
    assert found.violations_count == 0, found.generate_report()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    assert not site.has_torch()
    tab.check()


def test_another_budget_changes_the_verdict_and_loses_nothing_that_was_typed(open_tab, priced_path):
    tab = open_tab(priced_path)
    expect(verdict_of(tab)).to_have_text("fits")
    tab.page.locator("#id_name").fill("typed words")
    tab.page.get_by_label("Steps", exact=True).fill("77")
    budget = tab.page.get_by_label("Device memory budget")
    budget.fill("1 MiB")
    expect(verdict_of(tab)).to_have_text("does not fit")
    expect(tab.page.locator("#verdict")).to_contain_text("The smallest budget that would do is")
    expect(tab.page.get_by_role("radio", name="Take chosen on workbench")).to_have_count(0)
    tab.page.get_by_role("button", name="Use a budget of").click()
    expect(verdict_of(tab)).to_have_text("fits")
    expect(tab.page.get_by_role("radio", name="Take chosen on workbench")).to_be_checked()
    expect(budget).not_to_have_value("1 MiB")
    expect(tab.page.locator("#id_name")).to_have_value("typed words")
    expect(tab.page.get_by_label("Steps", exact=True)).to_have_value("77")
    tab.check()


def test_a_plan_that_does_not_fit_starts_only_when_that_is_insisted_on(site, open_tab, priced_path):
    tab = open_tab(priced_path)
    tab.page.locator("#id_name").fill("insisted")
    tab.page.get_by_label("Device memory budget").fill("20 MiB")
    expect(tab.page.locator("#verdict")).to_contain_text("in 20.0 MiB")
    take(tab, "keep all")
    tab.page.get_by_role("button", name="Start the job").click()
    expect(tab.page.get_by_role("alert")).to_contain_text("plan keep_all needs up to")
    expect(tab.page.locator("#id_name")).to_have_value("insisted")
    expect(tab.page.get_by_role("radio", name="Take keep all on workbench")).to_be_checked()
    tab.page.get_by_label("Start it even if it does not fit").check()
    tab.page.get_by_role("button", name="Start the job").click()
    expect(tab.page.locator("#job-head .state")).to_have_text("queued")
    job = site.ask("newest_job")
    assert tab.page.url.endswith(f"/jobs/{job['id']}/")
    assert (job["name"], job["spec"]["plan"]) == ("insisted", "keep_all")
    assert job["plan"]["activations"]["per_block"] == ["keep"] * 4
    assert job["spec"]["goal"]["device_budget_bytes"] == 20 * 1024**2 < job["prediction"]["device_peak_bytes"]
    tab.check()
