"""A newcomer's way: log in, start a fine-tune with what the page proposes, and chat with the model that it leaves."""

from playwright.sync_api import Browser, expect

from benchmarks.common.record import Row
from benchmarks.pages.visitor import PATIENCE_MS, Service, Visitor

NUM_STEPS = 12


def travel(service: Service, browser: Browser) -> Row:
    """Clicks so far at a running job and at the tuned model's first answer; the log-in's own click counts."""
    visitor = Visitor(browser, service, is_signed_in=False, viewport={"width": 1280, "height": 900})
    page = visitor.page
    visitor.open("/")
    page.get_by_label("Username").fill(service.user)
    page.get_by_label("Password").fill(service.password)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(lambda url: "/login/" not in url)
    visitor.wait_for_machine()
    page.get_by_role("link", name="Start a job").click()
    # typed, not clicked: a full run would take the benchmark's time
    page.get_by_label("Steps", exact=True).fill(str(NUM_STEPS))
    page.get_by_label("Sequence length", exact=True).fill("64")
    page.locator("form#job-form").wait_for(state="attached")
    start = page.get_by_role("button", name="Start")
    page.wait_for_timeout(1000)
    start.click()
    page.wait_for_url("**/jobs/job_*/")
    expect(page.locator("#job-head .state")).to_have_text("running", timeout=PATIENCE_MS)
    at_job = visitor.clicks
    service.job_path = page.url.removeprefix(service.url)
    service.storage = visitor.context.storage_state()
    expect(page.locator("#job-head .state")).to_have_text("succeeded", timeout=PATIENCE_MS)
    page.get_by_role("link", name="Chat with it").click()
    page.get_by_label("Your message").fill("Where do you come from?")
    page.get_by_role("button", name="Send").click()
    page.wait_for_function("() => document.querySelector('[data-talk]').textContent.length > 60")
    row = {
        "clicks_to_job": at_job,
        "clicks_to_answer": visitor.clicks,
        "num_complaints": len(visitor.complaints),
        "complaints": visitor.complaints[:5],
    }
    visitor.close()
    return row
