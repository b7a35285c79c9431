"""Fixtures of the browser tests: one site for all of them, one Chromium for each file, one log-in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlparse

import pytest
from playwright.sync_api import Browser, StorageState, expect, sync_playwright

from tests.end_to_end.site.browser import ARGUMENTS, CHROMIUM, PATIENCE_MS, Watched, log_in
from tests.end_to_end.site.site import Site


@contextmanager
def running_site() -> Iterator[Site]:
    """A site with its first people and its one machine."""
    running = Site()
    running.ask("seed")
    yield running
    running.close()


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    with running_site() as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def signed_in(site: Site, chromium: Browser) -> StorageState:
    """The cookies of one log-in, through the form."""
    return log_in(site, chromium, "ada")


@pytest.fixture
def open_tab(site: Site, chromium: Browser, signed_in: StorageState) -> Iterator[Callable[..., Watched]]:
    contexts = []

    def open_(
        path: str, *, width: int = 1280, scheme: str = "light", storage: StorageState | None = signed_in
    ) -> Watched:
        context = chromium.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            storage_state=storage,
            reduced_motion="reduce",
        )
        contexts.append(context)
        tab = Watched(context.new_page(), urlparse(site.url).netloc)
        tab.page.goto(site.url + path)
        return tab

    yield open_
    for context in contexts:
        context.close()
    print(site.log())  # shown where the test failed


@pytest.fixture
def running_job(site: Site) -> Iterator[str]:
    job_id = site.ask("new_job", name="kjv-demo")
    site.ask("begin", job_id=job_id)
    site.ask("measure", job_id=job_id, first=1, last=30)
    yield job_id
    site.ask("succeed", job_id=job_id)  # else it keeps its memory on the one machine; of no effect on one that has ended
