"""A run's page in a real Chromium: live charts, lost connections, restarts of the server."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Route, expect

from tests.end_to_end.site.browser import WIDTHS, Watched, take_picture, wait_for_points
from tests.end_to_end.site.site import Site
from tests.end_to_end.test_browser_pages import assert_accessible
from tests.webapp.pages import rows

pytestmark = pytest.mark.browser


def steps_drawn(tab: Watched) -> list[int]:
    return tab.page.evaluate("document.getElementById('chart-strip').data[0].x")


def named_traces(tab: Watched, chart: str = "chart-memory") -> list[str]:
    return tab.page.evaluate("id => document.getElementById(id).data.map(trace => trace.name)", chart)


def test_charts_grow_while_the_job_runs(site: Site, open_tab: Callable[..., Watched], running_job: str) -> None:
    tab = open_tab(f"/jobs/{running_job}/")
    wait_for_points(tab, 30)
    assert site.ask("measure", job_id=running_job, first=31, last=80) == 0
    wait_for_points(tab, 80)
    assert steps_drawn(tab) == list(range(1, 81))
    expect(tab.page.locator('[data-live="step"]')).to_have_text("80")
    tab.check()


def test_a_finished_runs_page_shows_the_whole_runs_speed(
    site: Site, open_tab: Callable[..., Watched], running_job: str
) -> None:
    """The script put the last step's in its place, once the points had come."""
    site.ask("succeed", job_id=running_job)
    tab = open_tab(f"/jobs/{running_job}/")
    wait_for_points(tab, 30)
    expect(tab.page.locator('[data-live="loss"]')).to_have_text(re.compile(r"\d"))
    expect(tab.page.locator('[data-live="speed"]')).to_have_text("1,244")
    tab.check()


def test_prediction_and_budget_are_drawn_over_the_stack(open_tab: Callable[..., Watched], running_job: str) -> None:
    tab = open_tab(f"/jobs/{running_job}/")
    wait_for_points(tab, 30)
    tab.page.get_by_role("button", name="over the run").click()
    tab.page.wait_for_function("() => document.getElementById('chart-memory').data[0].x.length === 30")
    names = ["weights", "gradients", "optimizer state", "activations", "logits and loss", "temporaries"]
    assert named_traces(tab) == [*names, "predicted", "budget"]
    traces = tab.page.evaluate("document.getElementById('chart-memory').data.map(t => [t.name, t.y[0], t.line.dash])")
    lines = {name: (value, dash) for name, value, dash in traces}
    assert lines["predicted"] == (409, "dash")
    assert lines["budget"][0] == 480
    assert tab.page.evaluate("document.getElementById('chart-memory').data[1].fillpattern.shape") == "/"
    expect(
        tab.page.get_by_role("group", name="Device memory over 30 points").first
    ).to_be_visible()
    tab.check()


def test_a_step_is_shown_from_within_with_its_prediction(open_tab: Callable[..., Watched], running_job: str) -> None:
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
    tab.page.locator("#chart-memory .nsewdrag").hover()
    # a few bytes were once "0.003906 MiB"
    expect(tab.page.locator("#chart-memory .hoverlayer")).to_contain_text("weights 44.0 MiB")
    tab.check()


def test_a_budget_far_above_the_peak_is_an_arrow_and_leaves_the_chart_readable(
    open_tab: Callable[..., Watched], running_job: str
) -> None:
    """A budget of 1 TiB over a peak of 411 MiB once drew a blank grid."""
    tab = open_tab(f"/jobs/{running_job}/")
    wait_for_points(tab, 30)
    drawn = tab.page.evaluate(
        r"""async () => {
            const { drawMemoryOverRun } = await import(performance.getEntriesByType("resource")
                .map((entry) => entry.name).find((name) => /charts\.[^/]*js$/.test(name)));
            const element = document.createElement("div");
            element.style.width = "600px";
            document.body.append(element);
            const sample = { step: 1, device_peak_bytes: 2 ** 28, device_bytes: { weights: 2 ** 28 } };
            const series = { steps: () => [sample], peakBytes: () => 2 ** 28 };
            const categories = [{ key: "weights", label: "weights" }];
            drawMemoryOverRun(element, { series, categories, prediction: null, budgetBytes: 2 ** 40, numSteps: 2, unit: "step" });
            return [element.layout.yaxis.range, element.layout.annotations[0].text, element.data.map((trace) => trace.name)];
        }"""
    )
    (low, high), text, names = drawn
    assert low == 0
    assert 256 < high < 2 * 256
    assert text == "▲ budget 1.00 TiB"
    assert names == ["weights"]
    tab.check()


def test_a_reload_and_a_second_tab_show_every_point(
    site: Site, open_tab: Callable[..., Watched], running_job: str
) -> None:
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


def test_a_restart_of_the_web_process_loses_no_point(
    site: Site, open_tab: Callable[..., Watched], running_job: str
) -> None:
    tab = open_tab(f"/jobs/{running_job}/")
    wait_for_points(tab, 30)
    site.kill_web()
    tab.page.wait_for_function("() => document.getElementById('job-page').dataset.connection === 'reconnecting'")
    expect(tab.page.locator('[data-live="connection"]')).to_contain_text("waiting for the server since")
    since = tab.page.locator('[data-live="connection"]').inner_text()
    # it tries again meanwhile, every two or three seconds
    tab.page.wait_for_timeout(7000)
    expect(tab.page.locator('[data-live="connection"]')).to_have_text(since)
    tab.page.get_by_role("button", name="Pause").click()
    said = "The server is away, so nothing was done and what you typed is still here; press again once it answers."
    expect(tab.page.locator("#server-trouble")).to_have_text(said)
    expect(tab.page).to_have_url(f"{site.url}/jobs/{running_job}/")
    site.ask("measure", job_id=running_job, first=31, last=45)
    site.start_web()
    wait_for_points(tab, 45)
    site.ask("measure", job_id=running_job, first=46, last=50)
    wait_for_points(tab, 50)
    assert steps_drawn(tab) == list(range(1, 51))
    # the browser itself reports each connection that was refused meanwhile
    tab.complaints = [text for text in tab.complaints if "net::ERR_" not in text]
    tab.check()


def test_the_end_of_a_job_arrives_by_itself(site: Site, open_tab: Callable[..., Watched], running_job: str) -> None:
    tab = open_tab(f"/jobs/{running_job}/")
    wait_for_points(tab, 30)
    site.ask("measure", job_id=running_job, first=31, last=rows.NUM_STEPS)
    site.ask("keep_checkpoint", job_id=running_job, step=100)
    assert site.ask("succeed", job_id=running_job) == "succeeded"
    expect(tab.page.locator("#job-head .state")).to_have_text("succeeded")
    expect(tab.page.get_by_role("region", name="How it ended")).to_contain_text("Finished 120 steps; the measured peak")
    expect(tab.page.get_by_role("status").filter(has_text="Job finished.")).to_be_attached()
    wait_for_points(tab, rows.NUM_STEPS)
    assert tab.page.evaluate("document.getElementById('job-page').dataset.connection") == "ended"
    tab.page.get_by_role("link", name="Checkpoints").click()
    expect(tab.page.get_by_role("row", name="100")).to_be_visible()
    assert tab.page.url.endswith("?tab=checkpoints")
    tab.check()


@pytest.mark.parametrize("slow", ["plan", "checkpoints"])
def test_a_tab_that_is_opened_as_the_job_ends_stays(
    site: Site, open_tab: Callable[..., Watched], running_job: str, slow: str
) -> None:
    """The plan's tab, which the job's end asked for again, came later and took its place."""
    tab, held = open_tab(f"/jobs/{running_job}/"), list[Route]()
    wait_for_points(tab, 30)
    tab.page.route(f"**/tabs/{slow}/", lambda route: held.append(route))
    site.ask("keep_checkpoint", job_id=running_job, step=20)
    if slow == "checkpoints":
        tab.page.get_by_role("link", name="Checkpoints").click()
    assert site.ask("succeed", job_id=running_job) == "succeeded"
    expect(tab.page.locator("#job-head .state")).to_have_text("succeeded")
    tab.page.wait_for_timeout(1000)  # the page gathers what moved for less than a second
    assert len(held) == 1
    if slow == "plan":
        tab.page.get_by_role("link", name="Checkpoints").click()
    held[0].continue_()
    expect(tab.page.get_by_role("row", name="20")).to_be_visible()
    tab.page.wait_for_timeout(1000)
    expect(tab.page.get_by_role("row", name="20")).to_be_visible()
    expect(tab.page.get_by_role("link", name="Checkpoints")).to_have_attribute("aria-current", "true")
    tab.check()


def test_a_finished_run_becomes_a_model_by_the_keyboard_on_a_phone(
    site: Site, open_tab: Callable[..., Watched], running_job: str
) -> None:
    assert site.ask("succeed", job_id=running_job) == "succeeded"
    tab = open_tab(f"/jobs/{running_job}/", width=WIDTHS[1])
    tab.page.get_by_role("button", name="Add to Models").focus()
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**/models/model_*/")
    tab.page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=WIDTHS[1])
    tab.page.get_by_role("link", name="Generate with it").focus()
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**/jobs/new/generate/?model=model_*")
    tab.page.go_back()
    tab.page.locator("dl").get_by_role("link").first.click()
    expect(tab.page.get_by_role("region", name="How it ended").get_by_role("link", name="Train it further")).to_be_visible()
    tab.check()


def test_a_shared_run_is_read_without_an_account(
    site: Site, open_tab: Callable[..., Watched], running_job: str
) -> None:
    tab = open_tab(f"/jobs/{running_job}/")
    wait_for_points(tab, 30)
    tab.page.locator("#action-share").click()
    tab.page.get_by_role("button", name="Make a link").click()
    expect(tab.page.get_by_role("status").filter(has_text="Anyone with the link")).to_be_visible()
    link = tab.page.locator("#share-link").text_content()
    assert link is not None
    tab.check()
    for width in WIDTHS:
        stranger = open_tab(link.removeprefix(site.url), width=width, storage=None)
        wait_for_points(stranger, 30)
        expect(stranger.page.locator("#chart-memory .main-svg").first).to_be_visible()
        expect(stranger.page.get_by_role("button", name="Stop")).to_have_count(0)
        assert_accessible(stranger)
        take_picture(stranger, f"shared-{width}")
        stranger.check()


def test_a_burst_of_samples_is_drawn_at_most_twice_a_second(
    site: Site, open_tab: Callable[..., Watched], running_job: str
) -> None:
    tab = open_tab(f"/jobs/{running_job}/")
    wait_for_points(tab, 30)
    before, began_ms = tab.page.evaluate(
        "[Number(document.getElementById('job-page').dataset.draws), performance.now()]"
    )
    for step in range(31, 71):
        site.ask("measure", job_id=running_job, first=step, last=step)
    # Samples that a slow machine dropped from the wire come with the next one, after a second.
    tab.page.wait_for_timeout(1100)
    site.ask("measure", job_id=running_job, first=71, last=71)
    wait_for_points(tab, 71)
    after, ended_ms = tab.page.evaluate(
        "[Number(document.getElementById('job-page').dataset.draws), performance.now()]"
    )
    assert after - before <= (ended_ms - began_ms) / 500 + 1
    tab.check()


def test_a_chart_out_of_view_waits_until_it_comes_into_view(
    site: Site, open_tab: Callable[..., Watched], running_job: str
) -> None:
    tab = open_tab(f"/jobs/{running_job}/?tab=execution")
    tab.page.wait_for_function("() => document.getElementById('chart-speed').data?.[0]?.x?.length === 30")
    tab.page.set_viewport_size({"width": 1280, "height": 300})
    site.ask("measure", job_id=running_job, first=31, last=40)
    tab.page.wait_for_function("() => document.getElementById('job-page').dataset.points === '40'")
    drawn = "() => document.getElementById('chart-speed').data[0].x.length"
    assert tab.page.evaluate(drawn) == 30
    tab.page.locator("#chart-speed").scroll_into_view_if_needed()
    tab.page.wait_for_function(f"() => ({drawn})() === 40")
    tab.check()


def test_stop_names_what_each_way_keeps(site: Site, open_tab: Callable[..., Watched], running_job: str) -> None:
    tab = open_tab(f"/jobs/{running_job}/")
    tab.page.locator("#action-stop").click()
    for name in ("Stop and export weights", "Stop, keep a checkpoint", "Discard"):
        expect(tab.page.get_by_role("button", name=name)).to_be_visible()
    tab.page.get_by_role("button", name="Stop and export weights").click()
    expect(tab.page.locator("#job-head .state")).to_have_text("stopping")
    tab.page.locator("#action-stop").click()
    expect(tab.page.get_by_role("button", name="Stop and export weights")).to_be_disabled()
    expect(tab.page.get_by_role("button", name="Discard")).to_be_enabled()
    tab.check()


def test_the_table_behind_a_chart_opens_in_place(open_tab: Callable[..., Watched], running_job: str) -> None:
    tab = open_tab(f"/jobs/{running_job}/")
    wait_for_points(tab, 30)
    tab.page.get_by_label("Loss as a table").click()
    expect(tab.page.get_by_role("region", name="Loss").get_by_role("row")).to_have_count(32)
    tab.check()


BOXES = """() => ["#chart-loss", "#chart-memory", "#chart-strip", "#tab-panel"].map((id) => {
    const { x, y, width, height } = document.querySelector(id).getBoundingClientRect();
    return [x, y, width, height].map(Math.round);
})"""


@pytest.mark.parametrize("width", WIDTHS)
def test_the_servers_picture_stands_until_the_chart_takes_its_place_and_nothing_moves(
    site: Site, open_tab: Callable[..., Watched], running_job: str, width: int
) -> None:
    site.ask("succeed", job_id=running_job)
    tab = open_tab("/jobs/", width=width)
    held: list[Route] = []
    tab.page.route("**/plotly-lines-bars*", lambda route: held.append(route))
    tab.page.goto(f"{site.url}/jobs/{running_job}/", wait_until="commit")
    # the page's own scripts have run: figures have their sparklines, and the memory chart waits for its program
    tab.page.wait_for_function("() => document.querySelector('[data-spark=loss] polyline') !== null")
    expect(tab.page.locator("#chart-memory .picture .edge").first).to_be_attached()
    tab.page.locator("#chart-loss path.curve-training").wait_for()
    assert_accessible(tab)
    described = [tab.page.locator(chart).get_attribute("aria-label") for chart in ("#chart-loss", "#chart-memory")]
    before = tab.page.evaluate(BOXES)
    (route,) = held
    route.continue_()
    tab.page.wait_for_function("() => document.querySelectorAll('#chart-loss .main-svg, #chart-memory .main-svg').length > 2")
    expect(tab.page.locator("#chart-loss .picture, #chart-memory .picture")).to_have_count(0)
    assert tab.page.evaluate(BOXES) == before
    assert [tab.page.locator(chart).get_attribute("aria-label") for chart in ("#chart-loss", "#chart-memory")] == described
    tab.check()


def test_the_picture_has_the_ranges_of_the_chart(site: Site, open_tab: Callable[..., Watched], running_job: str) -> None:
    site.ask("succeed", job_id=running_job)
    tab = open_tab("/jobs/")
    tab.page.route("**/plotly-lines-bars*", lambda route: route.abort())
    tab.page.goto(f"{site.url}/jobs/{running_job}/")
    height = tab.page.evaluate("document.querySelector('#chart-memory .curve-budget').getAttribute('d').match(/M0 (\\d+)/)[1]")
    words = tab.page.locator("#chart-memory .picture text").all_text_contents()
    tab.complaints.clear()  # the program that was kept away
    tab.page.unroute("**/plotly-lines-bars*")
    tab.page.reload()
    tab.page.wait_for_function("() => document.querySelector('#chart-memory').data?.length > 2")
    low, high = tab.page.evaluate("document.querySelector('#chart-memory').layout.yaxis.range")
    assert round(1000 - 1000 * (480 - low) / (high - low)) == int(height)
    assert {"MiB", "percent of the step", "budget 480 MiB"} <= set(words)
    tab.check()
