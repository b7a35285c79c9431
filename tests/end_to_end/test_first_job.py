"""Someone's first minutes: from the log-in to a job at work, and by keys alone to a tuned model's answer, in a real Chromium
against all of the stack's processes.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.breadth import WHOLE_ROADS
from tests.end_to_end.site.browser import Watched
from tests.end_to_end.site.stack import running_stack

pytestmark = [pytest.mark.slow, pytest.mark.browser]

MOST_CLICKS = 4
MOST_TABS = 60
# presses of a mouse or of a key on a control, on whatever page; the browser marks those that no script made
COUNT_CLICKS = """
document.addEventListener("click", (event) => {
  if (event.isTrusted) sessionStorage.setItem("clicks", Number(sessionStorage.getItem("clicks") ?? 0) + 1);
}, true);
"""


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service at work, and the administrator whom the set-up prints once."""

    url: str
    user: str
    password: str

    def open(self, chromium: Browser) -> Watched:
        tab = Watched(chromium.new_context(reduced_motion="reduce").new_page(), self.url.removeprefix("http://"))
        tab.page.add_init_script(COUNT_CLICKS)
        tab.page.goto(self.url)
        return tab


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running_stack() as stack:
        administrator = json.loads(stack.run_manage("setup_headroom", "--json"))
        yield Service(url=stack.start_web(), user=administrator["user"], password=administrator["password"])


def test_from_the_log_in_to_a_running_job_it_takes_at_most_four_clicks(service: Service, chromium: Browser) -> None:
    tab = service.open(chromium)
    tab.page.get_by_label("Username").fill(service.user)
    tab.page.get_by_label("Password").fill(service.password)
    tab.page.get_by_role("button", name="Log in").click()
    tab.page.get_by_role("link", name="Try the bundled example").click()
    expect(tab.page.get_by_role("radio", name="Take chosen on")).to_be_checked(timeout=120_000)
    tab.page.get_by_role("button", name="Start the job").click()
    expect(tab.page.locator("#job-head .state")).to_have_text("running", timeout=60_000)
    assert int(tab.page.evaluate("sessionStorage.getItem('clicks')")) <= MOST_CLICKS
    tab.page.locator("#action-stop").click()
    tab.page.locator("#action-discard").click()
    expect(tab.page.locator("#job-head .state")).to_have_text("cancelled", timeout=60_000)
    tab.check()


@pytest.mark.breadth(WHOLE_ROADS)
def test_a_fine_tune_from_the_log_in_to_the_tuned_model_s_answer_by_keys_alone(service: Service, chromium: Browser) -> None:
    tab = service.open(chromium)
    page, keys = tab.page, tab.page.keyboard
    expect(page.get_by_label("Username")).to_be_focused()
    keys.type(service.user)
    keys.press("Tab")
    keys.type(service.password)
    keys.press("Enter")
    press(page, page.get_by_role("link", name="Start a job"))
    press(page, page.get_by_role("link", name="LoRA", exact=True))
    for label, number in (("Steps", "12"), ("Sequence length", "64")):
        reach(page, page.get_by_label(label, exact=True))
        keys.press("Control+a")
        keys.type(number)
    # the verdict comes by itself, even where the form was opened before the first machine had registered
    # and once the model with adapters is profiled, in each of its formats: minutes on a busy machine
    expect(page.locator("#start-verdict .verdict")).to_have_class("verdict verdict-fits", timeout=400_000)
    press(page, page.get_by_role("button", name="Start"))
    expect(page.locator("#job-head .state")).to_have_text("succeeded", timeout=180_000)
    press(page, page.get_by_role("link", name="Chat with it"))
    reach(page, page.get_by_label("Your message"))
    keys.type("Where do you come from?")
    press(page, page.get_by_role("button", name="Send"))
    # how long the answer is, is up to chance; it has a text and an end
    expect(page.locator("[data-state]").first).to_have_text(re.compile(r"^[1-9]\d* tokens? in "), timeout=120_000)
    expect(page.locator(".said.trouble")).to_have_count(0)
    expect(page.locator(".said.assistant").first).to_have_text(re.compile(r"\S"))
    tab.check()


def reach(page: Page, control: Locator) -> None:
    """Tab on until a control has the focus, as someone without a mouse does."""
    expect(control).to_be_visible()
    for _ in range(MOST_TABS):
        if control.evaluate("control => control === document.activeElement"):
            return
        page.keyboard.press("Tab")
    pytest.fail(f"{MOST_TABS} presses of Tab do not reach {control}")


def press(page: Page, control: Locator) -> None:
    reach(page, control)
    page.keyboard.press("Enter")
