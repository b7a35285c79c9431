"""Times until a chart is on the screen, over a slow line and warm, and until an edit of the form is answered."""

import math
import statistics
import time

from playwright.sync_api import Browser

from benchmarks.common.record import Row
from benchmarks.pages.visitor import Service, Visitor

SLOW_BYTES_PER_S = 1.6e6 / 8
ROUND_TRIP_MS = 150
DRAWN = "() => document.querySelector('#chart-loss .main-svg, #chart-memory .main-svg') !== null"
NUMBERS = ("Steps", "Batch size")


def measure_chart(service: Service, browser: Browser, *, rounds: int) -> Row:
    """Milliseconds from asking for a finished run's page to its first chart; each slow round in a browser with an empty cache."""
    slow = [_time_slow(service, browser) for _ in range(rounds)]
    visitor = Visitor(browser, service)
    _open_job(visitor, service)  # fills the cache
    warm = [_open_job(visitor, service) for _ in range(rounds)]
    visitor.close()
    return {
        "slow_median_ms": statistics.median(slow),
        "slow_worst_ms": max(slow),
        "warm_median_ms": statistics.median(warm),
        "warm_worst_ms": max(warm),
        "rounds": rounds,
    }


def _time_slow(service: Service, browser: Browser) -> float:
    visitor = Visitor(browser, service)
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


def _open_job(visitor: Visitor, service: Service) -> float:
    began = time.perf_counter()
    visitor.page.goto(service.url + service.job_path, wait_until="commit")
    visitor.page.wait_for_function(DRAWN, polling=10)
    return 1000 * (time.perf_counter() - began)


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
        page.wait_for_function("() => document.querySelector('#verdict').firstElementChild !== window.answered", polling=10)
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
