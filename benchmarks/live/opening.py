"""A long run's page in Chromium, from the navigation to its drawn charts of loss and memory, and ten such runs on one page.

The browser has a profile of its own on the disk, as everybody's has: what it has compiled of the scripts it keeps for the next
time. A private window compiles them each time, as ``first_ms`` is.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Page, sync_playwright

from benchmarks.live.service import LiveService
from benchmarks.live.writer import PASSWORD

CHROMIUM = "/usr/bin/chromium"
NUM_POINTS = 100_000
NUM_COMPARED = 10
_IS_DRAWN = """() => (document.getElementById('chart-loss')?.data?.[0]?.x?.length ?? 0) > 100
  && (document.getElementById('chart-memory')?.data?.length ?? 0) > 0"""
"""The curve of the whole run, and memory within a step, of which these rows have the prediction alone."""
_ARE_COMPARED = f"""() => ['compare-loss', 'compare-memory', 'compare-speed'].every(
  (id) => document.getElementById(id)?.data?.filter((trace) => trace.x.length > 100).length === {NUM_COMPARED})"""
_NUM_DRAWN = "() => document.getElementById('compare-memory').data.reduce((sum, trace) => sum + trace.x.length, 0)"
_PARTS = """() => {
  const page = performance.getEntriesByType('navigation')[0];
  return { page_ms: page.responseEnd, scripts_ms: page.domContentLoadedEventEnd };
}"""


def measure_opening(service: LiveService, *, is_quick: bool) -> dict[str, object]:
    num_points, num_rounds = (20_000, 3) if is_quick else (NUM_POINTS, 9)
    service.ask("add_people", count=1)
    job_id = service.ask("new_job", name="long")
    service.ask("fill", job_id=job_id, num_points=num_points)
    with _signed_in(service) as page:
        first = _open(page, f"{service.url}/jobs/{job_id}/", until=_IS_DRAWN)
        for _ in range(2):  # until what was compiled is kept
            _open(page, f"{service.url}/jobs/{job_id}/", until=_IS_DRAWN)
        rounds = [_open(page, f"{service.url}/jobs/{job_id}/", until=_IS_DRAWN) for _ in range(num_rounds)]
    return {
        "num_points": num_points,
        "num_rounds": num_rounds,
        "first_ms": round(first["drawn_ms"]),
        "median_ms": round(statistics.median(row["drawn_ms"] for row in rounds)),
        "worst_ms": round(max(row["drawn_ms"] for row in rounds)),
        "page_median_ms": round(statistics.median(row["page_ms"] for row in rounds)),
        "scripts_median_ms": round(statistics.median(row["scripts_ms"] for row in rounds)),
        "web_peak_bytes": service.memory_bytes("VmHWM"),
    }


def measure_comparing(service: LiveService, *, is_quick: bool) -> dict[str, object]:
    """Time a page of ten runs until all three charts of curves hold all of them."""
    num_points, num_rounds = (5_000, 2) if is_quick else (NUM_POINTS, 5)
    service.ask("add_people", count=1)
    jobs = [service.ask("new_job", name=f"long-{number}") for number in range(NUM_COMPARED)]
    for job_id in jobs:
        service.ask("fill", job_id=job_id, num_points=num_points)
    url = f"{service.url}/jobs/compare/?" + "&".join(f"job={job_id}" for job_id in jobs)
    with _signed_in(service) as page:
        rounds = [_open(page, url, until=_ARE_COMPARED) for _ in range(num_rounds + 1)][1:]
        num_drawn = page.evaluate(_NUM_DRAWN)
    return {
        "num_runs": len(jobs),
        "num_points": num_points * len(jobs),
        "num_drawn": num_drawn,
        "median_ms": round(statistics.median(row["drawn_ms"] for row in rounds)),
        "worst_ms": round(max(row["drawn_ms"] for row in rounds)),
        "web_peak_bytes": service.memory_bytes("VmHWM"),
    }


@contextmanager
def _signed_in(service: LiveService) -> Iterator[Page]:
    with sync_playwright() as playwright, tempfile.TemporaryDirectory(prefix="hr-") as profile:
        browser = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu"],
            viewport={"width": 1280, "height": 900},
        )
        page = browser.new_page()
        page.goto(f"{service.url}/jobs/")
        page.get_by_label("Username").fill("viewer-0")
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url(f"{service.url}/jobs/")
        yield page
        browser.close()


def _open(page: Page, url: str, *, until: str) -> dict[str, float]:
    page.goto("about:blank")
    started_at = time.monotonic()
    page.goto(url, wait_until="commit")
    page.wait_for_function(until, polling="raf", timeout=60_000)
    drawn_ms = 1000 * (time.monotonic() - started_at)
    parts: dict[str, float] = page.evaluate(_PARTS)
    return {"drawn_ms": drawn_ms, **parts}
