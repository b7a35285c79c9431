"""Every page in light and dark and at several widths: axe, overflow, the console; and a job submitted without JavaScript."""

from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from benchmarks.common.record import Row
from benchmarks.pages.visitor import Service, Visitor

WIDTHS = (360, 390, 768, 1280)
PATHS = (
    "/welcome/", "/jobs/", "/jobs/new/", "/jobs/new/?recipe=qlora", "/jobs/new/generate/", "/plans/", "/models/", "/datasets/",
    "/machines/", "/chat/", "/search/?q=a", "/settings/", "/tokens/", "/projects/", "/people/", "/audit/", "/words/",
)  # fmt: skip
TABS = ("plan", "execution", "checkpoints", "samples", "logs", "events", "files")
PICTURED = (390, 1280)


def audit_pages(service: Service, browser: Browser, *, screenshots: Path | None) -> Row:
    """Counts over all pages and looks, with the first few of what was found."""
    violations: list[str] = []
    wide: list[str] = []
    complaints: list[str] = []
    paths = [*PATHS, *(f"{service.job_path}?tab={tab}" for tab in TABS)]
    for scheme in ("light", "dark"):
        visitor = Visitor(browser, service, color_scheme=scheme)
        for path in paths:
            visitor.open(path)
            visitor.page.wait_for_load_state("networkidle") if "jobs/job" not in path else visitor.page.wait_for_timeout(700)
            for width in WIDTHS:
                visitor.page.set_viewport_size({"width": width, "height": 900})
                visitor.page.wait_for_timeout(150)
                if visitor.page.evaluate("document.documentElement.scrollWidth") > width:
                    wide.append(f"{path} at {width}")
                if width not in PICTURED:
                    continue
                if screenshots is not None:
                    screenshots.mkdir(parents=True, exist_ok=True)
                    name = path.strip("/").replace("/", "-").replace("?", "-") or "home"
                    visitor.page.screenshot(path=screenshots / f"{name}-{width}-{scheme}.png")
                found = Axe().run(visitor.page)
                if found.violations_count:
                    violations += [f"{path} at {width}, {scheme}: {each['id']}" for each in found.response["violations"]]
        complaints += visitor.complaints
        visitor.close()
    return {
        "num_pages": len(paths),
        "num_violations": len(violations),
        "violations": violations[:10],
        "num_wide": len(wide),
        "wide": wide[:10],
        "num_complaints": len(complaints),
        "complaints": complaints[:10],
    }


def submit_without_javascript(service: Service, browser: Browser) -> int:
    """Steps of starting a job that failed where no script runs."""
    visitor = Visitor(browser, service, java_script_enabled=False)
    visitor.page.set_default_timeout(30_000)
    visitor.open("/jobs/new/")
    visitor.page.get_by_label("Steps", exact=True).fill("3")
    visitor.page.get_by_role("button", name="Price it").click()
    failed = 0 if visitor.page.locator("#verdict .verdict-word").count() else 1
    visitor.page.get_by_role("button", name="Start").first.click()
    visitor.page.wait_for_load_state()
    failed += 0 if "/jobs/job_" in visitor.page.url else 1
    visitor.close()
    return failed
