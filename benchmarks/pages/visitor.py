"""A service of its own and browsers that visit it: clicks are counted by the browser itself, complaints are kept."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page

from tests.end_to_end.site.browser import ARGUMENTS as ARGUMENTS
from tests.end_to_end.site.browser import CHROMIUM as CHROMIUM
from tests.end_to_end.site.stack import running_stack

PATIENCE_MS = 120_000
# presses of a mouse or of a key on a control; the browser marks those that no script made
COUNT_CLICKS = """
document.addEventListener("click", (event) => {
  if (event.isTrusted && event.target.closest("a, button, summary, input, select, textarea, label")) {
    sessionStorage.setItem("clicks", Number(sessionStorage.getItem("clicks") ?? 0) + 1);
  }
}, true);
"""


@dataclass
class Service:
    """The running service, who may log in, and what the journey left there."""

    url: str
    user: str
    password: str
    storage: Any = None
    """Cookies of a browser that is logged in."""
    job_path: str = ""


@contextmanager
def running_service() -> Iterator[Service]:
    with running_stack() as stack:
        person = json.loads(stack.run_manage("setup_headroom", "--json"))
        yield Service(url=stack.start_web(), user=person["user"], password=person["password"])


class Visitor:
    """One tab in a browser of its own, with nothing cached."""

    def __init__(self, browser: Browser, service: Service, *, is_signed_in: bool = True, **options: Any) -> None:
        self.context: BrowserContext = browser.new_context(
            storage_state=service.storage if is_signed_in else None, reduced_motion="reduce", **options
        )
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.add_init_script(COUNT_CLICKS)
        self.complaints: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self._url = service.url

    def open(self, path: str) -> None:
        self.page.goto(self._url + path)

    def wait_for_machine(self) -> None:
        """A service that has just started measures its machine first; the page is asked again until it names one."""
        while "usable" not in self.page.locator("main").inner_text():
            self.page.wait_for_timeout(1000)
            self.page.reload()

    @property
    def clicks(self) -> int:
        return int(self.page.evaluate("Number(sessionStorage.getItem('clicks') ?? 0)"))

    def close(self) -> None:
        self.context.close()

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.text} at {self.page.url}")
