"""Tables and addresses that the demo prints."""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from headroom.client.types import Job
from headroom.demo.claims import Claim, percent
from headroom.demo.jobs import ChatJobs, ExactJobs
from optimizer.base.units import format_bytes, format_duration


def print_table(jobs: ExactJobs, *, console: Console) -> None:
    rows: list[tuple[str, Callable[[Job], str]]] = [
        ("device peak, measured", lambda job: format_bytes(int(job["summary"]["device_peak_bytes"]))),
        ("device peak, predicted", lambda job: _predicted(job, "device_peak_bytes", lambda value: format_bytes(int(value)))),
        ("step time, measured", lambda job: f"{job['summary']['step_ms']:,.0f} ms"),
        ("step time, predicted", lambda job: _predicted(job, "step_ms", lambda value: f"{value:,.0f} ms")),
        ("validation loss, start", lambda job: f"{job['summary']['validation_loss_start']:.5f}"),
        ("validation loss, end", lambda job: f"{job['summary']['validation_loss']:.5f}"),
    ]
    console.print(f"{'':<24}{'in the budget':>22}{'plain':>22}", style="bold", highlight=False)
    for name, cell in rows:
        console.print(f"{name:<24}{cell(jobs.fitted):>22}{cell(jobs.plain):>22}", highlight=False)
    cost = jobs.fitted["summary"]["step_ms"] / jobs.plain["summary"]["step_ms"] - 1
    saved = 1 - jobs.fitted["summary"]["device_peak_bytes"] / jobs.plain["summary"]["device_peak_bytes"]
    slower = f"each step {percent(cost)} slower" if cost >= 0 else f"each step {percent(-cost)} faster"
    console.print(f"{percent(saved)} less device memory, and {slower}", highlight=False)


def _predicted(job: Job, key: str, write: Callable[[float], str]) -> str:
    """``212 MiB (-0.4 %)``: the prediction, and how far off it was."""
    predicted = (job.get("prediction") or {}).get(key)
    if not predicted:
        return "none"
    return f"{write(predicted)} ({percent(predicted / job['summary'][key] - 1, signed=True)})"


def print_claims(claims: list[Claim], *, console: Console) -> None:
    for claim in claims:
        word, style = ("yes", "") if claim.holds else ("NO ", "bold red")
        console.print(f"{word}  {claim.text}", style=style, highlight=False, soft_wrap=True, markup=False)


def print_where_to_look(chat: ChatJobs, folder: Path, *, url: str, console: Console, seconds: float) -> None:
    lines = [
        f"done in {format_duration(seconds)}; the service stays up at {url} (make down stops it)",
        f"  the fine-tune   {url}/jobs/{chat.tuned['id']}/",
        f"  the model       {folder / 'model'}",
        f"  the adapter     {folder / 'adapter'}",
        "  once more       .venv/bin/headroom submit demo/chat.yaml --follow",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
