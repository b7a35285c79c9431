"""Times until a chart is on the screen and is interactive, over a slow line and warm, and until an edit of the form is answered.

A chart is on the screen in the frame that paints its curve and its axes, whoever drew them: the server as a picture in the page,
or the chart program. It is interactive once the chart program has drawn it. Both are counted by the browser's own clock from the
begin of the navigation, so that the first request and its round trips are part of them.
"""

import math
import statistics
import time
from collections.abc import Sequence

from playwright.sync_api import Browser

from benchmarks.common.record import Row
from benchmarks.pages.visitor import Service, Visitor

SLOW_BYTES_PER_S = 1.6e6 / 8
ROUND_TRIP_MS = 150
NUMBERS = ("Steps", "Batch size")
# tall enough for the charts of a run whose samples stand above them
WINDOW = {"width": 1280, "height": 1400}
# looked at in each frame that the page paints; a frame's own paint comes after its callbacks, so the time is taken in a task
# behind it. Nothing is painted before the style sheets are there, and no callback runs.
WATCH_CHARTS = """
window.chartTimes = {};
const CURVES = { seen: ".picture .curve, .main-svg .scatterlayer path", answers: ".main-svg .scatterlayer path" };
const AXES = { seen: ".picture .tick, .main-svg .xtick", answers: ".main-svg .xtick" };
function isInWindow(element) {
  const { width, height, top, bottom } = element.getBoundingClientRect();
  return width + height > 0 && top >= 0 && bottom <= innerHeight;
}
function look() {
  for (const name of ["seen", "answers"]) {
    if (window.chartTimes[name]) continue;
    const isDrawn = ["#chart-loss", "#chart-memory"].some((chart) => [CURVES, AXES].every((parts) => {
      const selector = parts[name].split(", ").map((part) => `${chart} ${part}`).join(", ");
      return [...document.querySelectorAll(selector)].some(isInWindow);
    }));
    if (isDrawn) {
      window.chartTimes[name] = Infinity;
      setTimeout(() => { window.chartTimes[name] = performance.now(); });
    }
  }
  requestAnimationFrame(look);
}
requestAnimationFrame(look);
"""
ALL_TIMES = "() => Number.isFinite(window.chartTimes.seen) && Number.isFinite(window.chartTimes.answers)"
FIRST_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"


def measure_chart(service: Service, browser: Browser, *, rounds: int) -> Row:
    """Milliseconds from asking for a finished run's page to its first chart; each slow round in a browser with an empty cache."""
    slow = [_time_slow(service, browser) for _ in range(rounds)]
    visitor = Visitor(browser, service, viewport=WINDOW)
    visitor.page.add_init_script(WATCH_CHARTS)
    _open_job(visitor, service)  # fills the cache
    warm = [_open_job(visitor, service) for _ in range(rounds)]
    visitor.close()
    return {
        **_summed_up("slow", [seen for seen, _ in slow]),
        **_summed_up("slow_interactive", [answers for _, answers in slow]),
        **_summed_up("warm", [seen for seen, _ in warm]),
        **_summed_up("warm_interactive", [answers for _, answers in warm]),
        "rounds": rounds,
    }


def _summed_up(name: str, times_ms: Sequence[float]) -> Row:
    return {f"{name}_median_ms": statistics.median(times_ms), f"{name}_worst_ms": max(times_ms)}


def _time_slow(service: Service, browser: Browser) -> tuple[float, float]:
    visitor = Visitor(browser, service, viewport=WINDOW)
    visitor.page.add_init_script(WATCH_CHARTS)
    session = visitor.context.new_cdp_session(visitor.page)
    session.send("Network.enable")
    session.send(
        "Network.emulateNetworkConditions",
        {
            "offline": False,
            "latency": ROUND_TRIP_MS,
            "downloadThroughput": SLOW_BYTES_PER_S,
            "uploadThroughput": SLOW_BYTES_PER_S,
        },
    )
    taken_ms = _open_job(visitor, service)
    visitor.close()
    return taken_ms


def _open_job(visitor: Visitor, service: Service) -> tuple[float, float]:
    """Until the chart is seen, and until it answers."""
    visitor.page.goto(service.url + service.job_path, wait_until="commit")
    visitor.page.wait_for_function(ALL_TIMES, polling=50)
    seen_ms, answers_ms = visitor.page.evaluate("() => [window.chartTimes.seen, window.chartTimes.answers]")
    # what the browser itself says of its first paint is no later than a chart that was painted
    return max(seen_ms, visitor.page.evaluate(FIRST_PAINT)), answers_ms


def measure_form(service: Service, browser: Browser, *, num_edits: int) -> Row:
    """Milliseconds from an edit to the first answer to it in the pane; two fields in turn, a new value each time."""
    visitor = Visitor(browser, service)
    visitor.open("/jobs/new/")
    page = visitor.page
    page.locator("#plans .pick").first.wait_for()
    times = []
    for number in range(num_edits):
        page.evaluate("() => { window.answered = htmx.find('#verdict').firstElementChild; }")
        field = page.get_by_label(NUMBERS[number % 2], exact=True)
        began = time.perf_counter()
        field.fill(str(2 + number))
        page.wait_for_function(
            "() => document.querySelector('#verdict').firstElementChild !== window.answered", polling=10
        )
        times.append(1000 * (time.perf_counter() - began))
        page.wait_for_function("() => !document.querySelector('#plans').inert")
    row = {
        "p50_ms": statistics.median(times),
        "p95_ms": sorted(times)[math.ceil(0.95 * len(times)) - 1],
        "worst_ms": max(times),
        "num_edits": num_edits,
        "num_complaints": len(visitor.complaints),
    }
    visitor.close()
    return row
