"""A real Chromium and its tabs: every complaint and every request of a page is kept, and pictures when they are wanted."""

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from playwright.sync_api import Browser, Page, StorageState, expect

from tests.end_to_end.site.site import Site

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
WATCH_POLICY = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""


# what stays in the window while the rest moves, for a picture of the whole page; the policy lets no style sheet in
STAND_STILL = """
([position, height]) => {
  for (const part of document.querySelectorAll(".start-bar, .verdict-pane")) {
    part.style.position = position;
    part.style.maxHeight = height;
  }
}
"""


class Watched:
    """A tab whose every complaint and every request is kept."""

    def __init__(self, page: Page, host: str) -> None:
        self.page = page
        self.complaints: list[Any] = []
        self.foreign: list[Any] = []
        page.set_default_timeout(PATIENCE_MS)
        page.add_init_script(WATCH_POLICY)
        page.on("console", lambda message: self._hear(message))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self._see(request.url, host))

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.text} {message.location.get('url', '')}")

    def _see(self, url: str, host: str) -> None:
        parts = urlparse(url)
        if parts.scheme not in ("data", "blob") and parts.netloc != host:
            self.foreign.append(url)

    def check(self) -> None:
        assert self.complaints == [], self.complaints
        assert self.foreign == [], self.foreign
        violations = self.page.evaluate("window.violations")
        assert violations == [], violations


def log_in(site: Site, chromium: Browser, name: str) -> StorageState:
    """The cookies of a log-in through the form."""
    context = chromium.new_context()
    page = context.new_page()
    page.goto(f"{site.url}/jobs/")
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill("correct horse battery")
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(f"{site.url}/jobs/")
    state = context.storage_state()
    context.close()
    return state


def wait_for_points(tab: Watched, count: int) -> None:
    """The chart itself, not only the page's memory of it, holds that many points."""
    tab.page.wait_for_function(
        "count => (document.getElementById('chart-strip') ?? document.getElementById('chart-memory'))"
        ".data?.[0]?.x?.length === count",
        arg=count,
    )


def take_picture(tab: Watched, name: str) -> None:
    """Write a picture of the whole page into the folder that ``HEADROOM_SCREENSHOTS`` names, if it names one."""
    if folder := os.environ.get("HEADROOM_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        # charts out of view have the colours and width that they were last seen with; printing draws them all
        tab.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        tab.page.evaluate(STAND_STILL, ["static", "none"])
        tab.page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)
        tab.page.evaluate(STAND_STILL, ["", ""])
