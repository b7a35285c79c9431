"""Someone's first minutes: from the log-in to a job at work, in a real Chromium against all of the stack's processes."""

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.end_to_end.site.browser import Watched
from tests.end_to_end.site.stack import Stack, running_stack

pytestmark = [pytest.mark.slow, pytest.mark.browser]

MOST_CLICKS = 4
# presses of a mouse or of a key on a control, on whatever page; the browser marks those that no script made
COUNT_CLICKS = """
document.addEventListener("click", (event) => {
  if (event.isTrusted) sessionStorage.setItem("clicks", Number(sessionStorage.getItem("clicks") ?? 0) + 1);
}, true);
"""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack() as stack:
        yield stack


@pytest.fixture
def administrator(stack: Stack) -> dict[str, str]:
    """Name and password of the administrator, which the set-up prints once."""
    return json.loads(stack.run_manage("setup_headroom", "--json"))


def test_from_the_log_in_to_a_running_job_it_takes_at_most_four_clicks(
    stack: Stack, administrator: dict[str, str], chromium: Browser
) -> None:
    stack.run_manage("collectstatic", "--noinput", "--verbosity", "0")
    url = stack.start_web()
    tab = Watched(chromium.new_context(reduced_motion="reduce").new_page(), url.removeprefix("http://"))
    tab.page.add_init_script(COUNT_CLICKS)
    tab.page.goto(url)
    tab.page.get_by_label("Username").fill(administrator["user"])
    tab.page.get_by_label("Password").fill(administrator["password"])
    tab.page.get_by_role("button", name="Log in").click()
    tab.page.get_by_role("link", name="Try the bundled example").click()
    expect(tab.page.get_by_role("radio", name="Take chosen on")).to_be_checked(timeout=120_000)
    tab.page.get_by_role("button", name="Start the job").click()
    expect(tab.page.locator("#job-head .state")).to_have_text("running", timeout=60_000)
    assert int(tab.page.evaluate("sessionStorage.getItem('clicks')")) <= MOST_CLICKS
    tab.check()
