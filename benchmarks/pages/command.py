"""``python -m benchmarks.pages [--quick] [--only PART ...] [--json FILE] [--screenshots DIR]``: the pages as a person meets them.

- journey: clicks from the log-in to a running job, and to an answer of the tuned model, counted in the browser.
- chart: a finished run's page until a chart is on the screen (its curve and axes painted, by the server's picture or by the chart
  program), and until it is interactive; at 1.6 Mbit/s and a round trip of 150 ms with nothing cached, and at full speed with all
  static files cached.
- form: from an edit of the New job form to the answer in its pane, the delay that gathers key presses included.
- audit: axe in light and dark, widths from 360 pixels on, the console, and a job submitted without JavaScript.

The whole stack runs on loopback: web, worker, reconciler, Valkey, SQLite. Needs ``/usr/bin/chromium`` and the test packages.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from benchmarks.common.record import GoalEntry, Record, Row, describe_machine, goal
from benchmarks.pages.audit import audit_pages, submit_without_javascript
from benchmarks.pages.journey import travel
from benchmarks.pages.speed import measure_chart, measure_form
from benchmarks.pages.visitor import ARGUMENTS, CHROMIUM, Service, running_service

PARTS = ("journey", "chart", "form", "audit")
GOALS = (
    ("clicks to a running job", "journey", "clicks_to_job", 3),
    ("clicks to an answer of the tuned model", "journey", "clicks_to_answer", 10),
    ("chart on the screen at 1.6 Mbit/s, median (ms)", "chart", "slow_median_ms", 2500),
    ("chart on the screen, warm, median (ms)", "chart", "warm_median_ms", 500),
    ("form answers, p95 (ms)", "form", "p95_ms", 500),
    ("axe violations", "audit", "num_violations", 0),
    ("pages wider than their window", "audit", "num_wide", 0),
    ("console errors", "audit", "num_complaints", 0),
    ("steps that failed without JavaScript", "audit", "num_failed_without_javascript", 0),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: about two minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--screenshots", type=Path, metavar="DIR", help="keep a picture of each page in the four looks")
    options = parser.parse_args(arguments)
    record = Record(
        file=options.json, machine=describe_machine(), is_quick=options.quick, is_whole=set(options.only) == set(PARTS)
    )
    with running_service() as service, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        # the other parts look at the job that the journey made
        journey = travel(service, browser)
        for name in options.only:
            record.add({"what": name, **_measure(name, service, browser, journey, options)})
        browser.close()
    return record.finish(_summary(record.rows))


def _measure(name: str, service: Service, browser: Browser, journey: Row, options: argparse.Namespace) -> Row:
    if name == "journey":
        return journey
    if name == "chart":
        return measure_chart(service, browser, rounds=2 if options.quick else 7)
    if name == "form":
        return measure_form(service, browser, num_edits=15 if options.quick else 60)
    failed = submit_without_javascript(service, browser)
    return {**audit_pages(service, browser, screenshots=options.screenshots), "num_failed_without_javascript": failed}


def _summary(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    by_part = {row["what"]: row for row in rows}
    return {
        name: goal(by_part[part][key], most, met=by_part[part][key] <= most)
        for name, part, key, most in GOALS
        if part in by_part
    }
